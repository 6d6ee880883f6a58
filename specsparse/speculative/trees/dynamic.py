"""Trees that grow with q: dynamic (EAGLE-2), ddtree, and llama.cpp's p_split. Chosen, not drawn."""

import dataclasses
from operator import attrgetter
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine.cache import KVCache
from specsparse.errors import UserError
from specsparse.speculative.base import MAX_NODES, ROOT, Draft
from specsparse.speculative.trees.base import Depth, Expanded, Expander, Nodes, TreeShape
from specsparse.support.options import Also, Range, check_at_most

Unit = Annotated[float, Range(0, 1)]

_NEVER = np.float32(-np.inf)
_LEAST = np.float32(1e-30)


class _Candidates(NamedTuple):
    """All nodes seen, T of them level by level: int32[B, T] tokens, parents (candidate or `ROOT`) and rows under which
    they are fed (-1: not), float32[B, T] log probability of the path to each, -inf where there is none yet."""

    tokens: jax.Array
    parents: jax.Array
    rows: jax.Array
    score: jax.Array


class _Levels(NamedTuple):
    """The candidates, and what is fed: int32[B, R] tokens, parents (row) and candidate of each row."""

    cache: KVCache
    seen: _Candidates
    tokens: jax.Array
    parents: jax.Array
    origin: jax.Array
    fed: jax.Array


@dataclasses.dataclass(frozen=True)
class DynamicTree(TreeShape):
    """EAGLE-2 (Li et al., arXiv:2406.16858): expand the `top_k` most confident nodes of each level into `top_k`
    children, then verify the `total` most confident nodes of all.

    A node's confidence is the product of the draft's probabilities on its path.

    Attributes:
        total: nodes verified (EAGLE-2: 60).
        depth: levels (EAGLE-2: 7).
        top_k: nodes expanded a level, and children of each (EAGLE-2: 10).
    """

    total: Annotated[Nodes, Also("nodes")] = 15
    depth: Depth = 5
    top_k: Annotated[int, Range(1, 32)] = 4

    max_nodes = property(attrgetter("total"))
    max_depth = property(attrgetter("depth"))

    def __post_init__(self):
        if self.total > self.candidates:
            raise UserError(f"tree.total={self.total} exceeds the {self.candidates} nodes of this depth and top_k")

    @property
    def candidates(self) -> int:
        """T, nodes that are scored before the best are kept."""
        return self.top_k + (self.depth - 1) * self.top_k**2

    @property
    def max_rows(self) -> int:
        return self.top_k * max(self.depth - 1, 1)

    def expand(
        self, by: Expander, cache: KVCache, logits_BN: jax.Array, *, budget_B: jax.Array, room_B: jax.Array
    ) -> Expanded:
        """Consumes no noise. Levels that need more than `room` rows, or are deeper than the budget, are left out."""
        batch, k = budget_B.shape[0], self.top_k
        rows = k * max(self.depth - 1, 1)
        ints_BT = jnp.zeros((batch, self.candidates), jnp.int32)
        ints_BR = jnp.zeros((batch, rows), jnp.int32)
        seen = _Candidates(ints_BT, ints_BT - 1, ints_BT - 1, jnp.full((batch, self.candidates), _NEVER))
        zeros_B = jnp.zeros((batch,), jnp.int32)
        partial = _Levels(cache, seen, ints_BR, ints_BR, ints_BR, zeros_B)
        root = jnp.full((batch, 1), ROOT, jnp.int32)
        live_B = budget_B > 0
        partial = self._expand(
            by, partial, logits_BN[:, None], root, root, jnp.zeros((batch, 1), jnp.float32), jnp.int32(0), live_B
        )

        def live(d):
            return (budget_B > d) & (k * d <= room_B)

        def step(carry):
            d, g = carry
            live_B = live(d)
            n_valid_B = jnp.where(live_B, k * d, 0)
            logits_BRN, cache = by.feed(g.cache, g.tokens, g.parents, n_valid_B)
            first = k * (d - 1)
            level_BkN = jax.lax.dynamic_slice_in_dim(logits_BRN, first, k, axis=1)
            origin_Bk = jax.lax.dynamic_slice_in_dim(g.origin, first, k, axis=1)
            score_Bk = jnp.take_along_axis(g.seen.score, origin_Bk, axis=1)
            row_Bk = jnp.broadcast_to(first + jnp.arange(k, dtype=jnp.int32)[None], (batch, k))
            g = g._replace(cache=cache, fed=jnp.maximum(g.fed, n_valid_B))
            return d + 1, self._expand(by, g, level_BkN, origin_Bk, row_Bk, score_Bk, d, live_B)

        _, partial = jax.lax.while_loop(lambda c: (c[0] < self.depth) & live(c[0]).any(), step, (jnp.int32(1), partial))
        return self._best(partial, budget_B)

    def _expand(self, by, partial: _Levels, logits_BPN, parent_BP, row_BP, score_BP, d, live_B) -> _Levels:
        """The children of level d's parents as candidates, and the best of those as the next rows to feed."""
        batch, P, N = logits_BPN.shape
        k = min(self.top_k, N)
        if k < self.top_k:
            raise UserError(f"tree.top_k={self.top_k} exceeds the draft's vocabulary of {N}")
        logits_RN = logits_BPN.reshape(batch * P, N)
        column_Rk = by.sampling.ranked(logits_RN, k)
        p_Rk = jnp.take_along_axis(by.sampling.confidence(logits_RN), column_Rk, axis=1)
        log_BPk = jnp.log(jnp.maximum(p_Rk, _LEAST)).reshape(batch, P, k)
        # A child never above its parent, so that the most confident nodes are a tree.
        score_BPk = score_BP[:, :, None] + jnp.minimum(log_BPk, 0)
        score_Bm = jnp.where(live_B[:, None], score_BPk.reshape(batch, P * k), _NEVER)
        token_Bm = by.token_ids(column_Rk).reshape(batch, P * k)
        parent_Bm = jnp.repeat(parent_BP, k, axis=1)
        begin = jnp.where(d == 0, 0, k + (d - 1) * k * k)
        put = jax.lax.dynamic_update_slice_in_dim
        seen = partial.seen._replace(
            tokens=put(partial.seen.tokens, token_Bm, begin, axis=1),
            parents=put(partial.seen.parents, parent_Bm, begin, axis=1),
            score=put(partial.seen.score, score_Bm, begin, axis=1),
        )
        if self.depth == 1:
            return partial._replace(seen=seen)
        best_Bk = jnp.sort(jax.lax.top_k(score_Bm, k)[1].astype(jnp.int32), axis=1)
        row = k * d  # of the last level: not fed, the rows of the level before are overwritten
        last = jnp.minimum(row, partial.tokens.shape[1] - k)
        goes = d < self.depth - 1
        chosen_Bk = begin + best_Bk
        sequence_B1 = jnp.arange(batch, dtype=jnp.int32)[:, None]
        rows_Bk = jnp.where(goes, row + jnp.arange(k, dtype=jnp.int32)[None], -1)
        seen = seen._replace(rows=seen.rows.at[sequence_B1, chosen_Bk].set(jnp.broadcast_to(rows_Bk, best_Bk.shape)))

        def next_rows(old, new_Bk):
            return jnp.where(goes, put(old, new_Bk, last, axis=1), old)

        def take(x_Bm):
            return jnp.take_along_axis(x_Bm, best_Bk, axis=1)

        return partial._replace(
            seen=seen,
            tokens=next_rows(partial.tokens, take(token_Bm)),
            parents=next_rows(partial.parents, take(jnp.repeat(row_BP, k, axis=1))),
            origin=next_rows(partial.origin, chosen_Bk),
        )

    def _best(self, partial: _Levels, budget_B: jax.Array) -> Expanded:
        """The most confident candidates in level order; equal ones by index, so that a parent is in with its child."""
        seen, K = partial.seen, self.total
        score_BK, order_BK = jax.lax.top_k(seen.score, K)
        place_K = jnp.arange(K, dtype=jnp.int32)[None]
        kept_BK = (place_K < budget_B[:, None]) & (score_BK > _NEVER)
        count_B = jnp.sum(kept_BK, axis=1, dtype=jnp.int32)
        index_BK = jnp.sort(jnp.where(kept_BK, order_BK.astype(jnp.int32), jnp.int32(self.candidates)), axis=1)
        safe_BK = jnp.minimum(index_BK, self.candidates - 1)
        parent_BK = jnp.take_along_axis(seen.parents, safe_BK, axis=1)
        # Node of each candidate: how many kept ones stand before it.
        node_BK = jnp.sum(index_BK[:, None, :] < parent_BK[:, :, None], axis=2, dtype=jnp.int32)
        parents_BK = jnp.where((parent_BK == ROOT) | (place_K >= count_B[:, None]), ROOT, node_BK)
        row_BK = jnp.take_along_axis(seen.rows, safe_BK, axis=1)
        rows_BK = jnp.where(row_BK < partial.fed[:, None], row_BK, -1)
        tokens_BK = jnp.where(place_K < count_B[:, None], jnp.take_along_axis(seen.tokens, safe_BK, axis=1), 0)
        return Expanded(Draft(tokens_BK, parents_BK, count_B), partial.cache, rows_BK)


@dataclasses.dataclass(frozen=True)
class DDTree(TreeShape):
    """The nodes whose paths are the most likely ones under the product of the block's distributions (Ringel and Romano,
    arXiv:2604.12989, algorithm 1); for the distributions of `dflash`. As many are verified as the policy finds worth
    their time (`ctx.worth`).

    A path takes the token of some rank at each position. The search keeps a frontier: the best node leaves it, and its
    first child and its next sibling, the only ones whose elders are then in the tree, enter.

    Attributes:
        nodes: verified at most.
        depth: longest path.
        top_k: tokens looked at for each position; as many as `nodes` for the best tree of all.
    """

    nodes: Annotated[Nodes, Also("total")] = 15
    depth: Depth = 5
    top_k: Annotated[int, Range(1, MAX_NODES)] = 8

    independent = True
    max_nodes = property(attrgetter("nodes"))

    @property
    def max_depth(self) -> int:
        return min(self.depth, self.nodes)

    def expand(
        self, by: Expander, cache: KVCache, logits_BN: jax.Array, *, budget_B: jax.Array, room_B: jax.Array
    ) -> Expanded:
        """Consumes no noise. The distributions of all positions are read off a chain, whose tokens do not matter."""
        batch, N = logits_BN.shape
        K, D, ranks = self.nodes, self.max_depth, min(self.top_k, self.nodes, N)
        levels = logits_BN[:, None]
        if D > 1:
            chain = jnp.broadcast_to(jnp.arange(-1, D - 2, dtype=jnp.int32)[None], (batch, D - 1))
            fed_B = jnp.where(budget_B > 0, D - 1, 0)
            deeper, cache = by.feed(cache, jnp.zeros((batch, D - 1), jnp.int32), chain, fed_B)
            levels = jnp.concatenate([levels, deeper], axis=1)
        rows_RN = levels.reshape(batch * D, N)
        column_Rr = by.sampling.ranked(rows_RN, ranks)
        p_Rr = jnp.take_along_axis(by.sampling.confidence(rows_RN), column_Rr, axis=1)
        log_BDr = jnp.log(jnp.maximum(p_Rr, _LEAST)).reshape(batch, D, ranks)
        token_BDr = by.token_ids(column_Rr).reshape(batch, D, ranks)
        tokens, parents, reach_BK, found = jax.vmap(self._search)(log_BDr, token_BDr, room_B)
        count_B = jnp.minimum(jnp.clip(budget_B, 0, K), jnp.minimum(found, by.ctx.worth(reach_BK)))
        kept_BK = jnp.arange(K, dtype=jnp.int32)[None] < count_B[:, None]
        draft = Draft(jnp.where(kept_BK, tokens, 0), jnp.where(kept_BK, parents, ROOT), count_B)
        return Expanded(draft, cache, jnp.full((batch, K), -1, jnp.int32))

    def _search(self, log_Dr: jax.Array, token_Dr: jax.Array, room: jax.Array):
        """Tokens and parents int32[K] in the order in which nodes leave the frontier, the chance of each float32[K],
        and how many there are.

        A place of the frontier holds score, parent, depth (from 0) and rank; node i makes places 2i + 1 and 2i + 2.
        """
        K, (D, ranks) = self.nodes, log_Dr.shape

        def step(i, carry):
            score, parent, depth, rank, tokens, parents, reach, count = carry
            at = jnp.argmax(score)
            best, d, r, above = score[at], depth[at], rank[at], parent[at]
            alive = best > _NEVER
            node = jnp.where(alive, i, K)
            tokens = tokens.at[node].set(token_Dr[d, r], mode="drop")
            parents = parents.at[node].set(above, mode="drop")
            reach = reach.at[node].set(jnp.exp(best), mode="drop")
            deeper = jnp.minimum(d + 1, D - 1)
            child = jnp.where(alive & (d + 1 < jnp.minimum(D, room)), best + jnp.minimum(log_Dr[deeper, 0], 0), _NEVER)
            later = jnp.minimum(r + 1, ranks - 1)
            next_log = jnp.minimum(log_Dr[d, later] - log_Dr[d, r], 0)
            sibling = jnp.where(alive & (r + 1 < ranks), best + next_log, _NEVER)

            def put(old, first, second):
                return old.at[2 * i + 1].set(first).at[2 * i + 2].set(second)

            score = put(score.at[at].set(_NEVER), child, sibling)
            parent, depth, rank = put(parent, i, above), put(depth, deeper, d), put(rank, jnp.int32(0), later)
            return score, parent, depth, rank, tokens, parents, reach, count + alive.astype(jnp.int32)

        places, none = jnp.zeros((2 * K + 1,), jnp.int32), jnp.zeros((K,), jnp.int32)
        score = jnp.full((2 * K + 1,), _NEVER).at[0].set(jnp.minimum(log_Dr[0, 0], 0))
        start = (score, places + ROOT, places, places, none, none, none.astype(jnp.float32), jnp.int32(0))
        *_, tokens, parents, reach, count = jax.lax.fori_loop(0, K, step, start)
        return tokens, parents, reach, count


RANKS = 8
"""Tokens looked at after each branch."""


class _Branches(NamedTuple):
    """A tree in the making: int32[B, K] tokens and parents, int32[B] count; int32[B, S] last node of each branch and
    bool[B, S] whether it goes on; int32[B] branches begun; int32[B] nodes fed."""

    cache: KVCache
    tokens: jax.Array
    parents: jax.Array
    count: jax.Array
    leaf: jax.Array
    live: jax.Array
    begun: jax.Array
    fed: jax.Array


@dataclasses.dataclass(frozen=True)
class PSplit(TreeShape):
    """Each branch takes its top token; the next ones with a probability above `p_split` begin branches of their own.

    The rule of llama.cpp's `speculative` example (`--draft-max`, `--draft-p-split`, `--parallel`).

    Attributes:
        nodes: at most; llama.cpp's draft_max.
        n_parallel: branches at most.
        p_split: least probability of a token that begins a branch.
        p_min: a branch ends where its top probability is under it.
        depth: longest branch; by default `nodes`.
    """

    nodes: Annotated[Nodes, Also("draft_max")] = 16
    n_parallel: Nodes = 4
    p_split: Annotated[Unit, Also("draft_p_split")] = 0.1
    p_min: Annotated[Unit, Also("draft_p_min")] = 0.0
    depth: Depth | None = None

    max_nodes = property(attrgetter("nodes"))

    def __post_init__(self):
        check_at_most("tree", self, depth="nodes")

    @property
    def max_depth(self) -> int:
        return self.nodes if self.depth is None else self.depth

    def expand(
        self, by: Expander, cache: KVCache, logits_BN: jax.Array, *, budget_B: jax.Array, room_B: jax.Array
    ) -> Expanded:
        batch, K, S = budget_B.shape[0], self.nodes, self.n_parallel
        zeros_B, zeros_BK = jnp.zeros((batch,), jnp.int32), jnp.zeros((batch, K), jnp.int32)
        first_BS = jnp.broadcast_to(jnp.arange(S)[None] == 0, (batch, S)) & (budget_B > 0)[:, None]
        tree = _Branches(
            cache, zeros_BK, zeros_BK, zeros_B, jnp.full((batch, S), ROOT, jnp.int32), first_BS, zeros_B + 1, zeros_B
        )
        logits_BSN = jnp.broadcast_to(logits_BN[:, None], (batch, S, logits_BN.shape[1]))
        tree = self._split(by, tree, logits_BSN, budget_B)

        def step(carry):
            d, t = carry
            n_valid_B = jnp.where(t.live.any(axis=1), t.count, 0)
            logits_BKN, cache = by.feed(t.cache, t.tokens, t.parents, n_valid_B)
            leaf_BS = jnp.maximum(t.leaf, 0)
            logits_BSN = jnp.take_along_axis(logits_BKN, leaf_BS[:, :, None], axis=1)
            t = t._replace(cache=cache, fed=jnp.maximum(t.fed, n_valid_B))
            return d + 1, self._split(by, t, logits_BSN, budget_B)

        _, tree = jax.lax.while_loop(lambda c: (c[0] < self.max_depth) & c[1].live.any(), step, (jnp.int32(1), tree))
        node_K = jnp.arange(K, dtype=jnp.int32)[None]
        rows_BK = jnp.where(node_K < tree.fed[:, None], node_K, -1)
        return Expanded(Draft(tree.tokens, tree.parents, tree.count), tree.cache, rows_BK)

    def _split(self, by: Expander, tree: _Branches, logits_BSN: jax.Array, budget_B: jax.Array) -> _Branches:
        """One more node on each live branch, and the branches that begin there."""
        batch, S, N = logits_BSN.shape
        ranks = min(RANKS, N) if S > 1 else 1
        logits_RN = logits_BSN.reshape(batch * S, N)
        column_Rr = by.sampling.ranked(logits_RN, ranks)
        p_Rr = jnp.take_along_axis(by.sampling.confidence(logits_RN), column_Rr, axis=1)
        p_BSr = p_Rr.reshape(batch, S, ranks)
        token_BSr = by.token_ids(column_Rr).reshape(batch, S, ranks)
        sequence_B = jnp.arange(batch, dtype=jnp.int32)
        open_BS = tree.live  # branches that begin on this level wait for the next one

        def take(j, carry):
            t, above_B = carry
            s, f = j // ranks, j % ranks
            p_B, token_B = p_BSr[:, s, f], token_BSr[:, s, f]
            likely_B = jnp.where(f == 0, p_B >= self.p_min, above_B & (p_B > self.p_split) & (t.begun < S))
            ok_B = open_BS[:, s] & likely_B & (t.count < budget_B)
            node_B = jnp.where(ok_B, t.count, self.nodes)  # beyond the end: dropped
            branch_B = jnp.where(f == 0, s, jnp.minimum(t.begun, S - 1))
            parent_B = tree.leaf[:, s]
            slot_B = jnp.where(ok_B, branch_B, S)
            # A branch that cannot go on ends; one begun on this level keeps what it was begun with.
            mark_B = jnp.where(f == 0, jnp.where(open_BS[:, s], s, S), slot_B)
            t = t._replace(
                tokens=t.tokens.at[sequence_B, node_B].set(token_B, mode="drop"),
                parents=t.parents.at[sequence_B, node_B].set(parent_B, mode="drop"),
                leaf=t.leaf.at[sequence_B, slot_B].set(t.count, mode="drop"),
                live=t.live.at[sequence_B, mark_B].set(ok_B, mode="drop"),
                begun=t.begun + (ok_B & (f > 0)).astype(jnp.int32),
                count=t.count + ok_B.astype(jnp.int32),
            )
            return t, ok_B

        start = (tree, jnp.zeros((batch,), bool))
        longer = jax.lax.fori_loop(0, S * ranks, take, start)[0]
        return longer._replace(live=longer.live & (longer.count < budget_B)[:, None])
