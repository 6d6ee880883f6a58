"""Dynamic trees: expand where the draft is confident, then keep the most confident nodes of all that were seen."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine.cache import KVCache
from specsparse.errors import UserError
from specsparse.speculative.base import ROOT, Draft
from specsparse.speculative.trees.base import Expanded, Expander, TreeShape
from specsparse.speculative.trees.options import DynamicOptions

_NEVER = np.float32(-np.inf)
_LEAST = np.float32(1e-30)


class _Candidates(NamedTuple):
    """All nodes seen, T of them level by level: int32[B, T] tokens, parents (candidate or `ROOT`) and rows under which
    they are fed (-1: not), float32[B, T] log probability of the path to each, -inf where there is none yet."""

    tokens: jax.Array
    parents: jax.Array
    rows: jax.Array
    score: jax.Array


class _Partial(NamedTuple):
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

    A node's confidence is the product of the draft's probabilities on its path. Chosen, not drawn.

    Attributes:
        total: K, nodes verified (EAGLE-2: 60).
        depth: levels (EAGLE-2: 7).
        top_k: nodes expanded a level, and children of each (EAGLE-2: 10).
    """

    total: int = DynamicOptions.total
    depth: int = DynamicOptions.depth
    top_k: int = DynamicOptions.top_k

    def __post_init__(self):
        if self.total > self.candidates:
            raise UserError(f"tree.total={self.total} exceeds the {self.candidates} nodes of this depth and top_k")

    @property
    def candidates(self) -> int:
        """T, nodes seen."""
        return self.top_k + (self.depth - 1) * self.top_k**2

    @property
    def max_nodes(self) -> int:
        """K."""
        return self.total

    @property
    def max_depth(self) -> int:
        """Levels."""
        return self.depth

    @property
    def max_rows(self) -> int:
        """The nodes that are expanded."""
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
        partial = _Partial(cache, seen, ints_BR, ints_BR, ints_BR, zeros_B)
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

    def _expand(self, by, partial: _Partial, logits_BPN, parent_BP, row_BP, score_BP, d, live_B) -> _Partial:
        """The children of level d's parents as candidates, and the best of those as the next rows to feed."""
        batch, P, N = logits_BPN.shape
        k = min(self.top_k, N)
        if k < self.top_k:
            raise UserError(f"tree.top_k={self.top_k} exceeds the draft's vocabulary of {N}")
        logits_RN = logits_BPN.reshape(batch * P, N)
        column_Rk = by.law.ranked(logits_RN, k)
        p_Rk = jnp.take_along_axis(by.law.confidence(logits_RN), column_Rk, axis=1)
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

    def _best(self, partial: _Partial, budget_B: jax.Array) -> Expanded:
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
