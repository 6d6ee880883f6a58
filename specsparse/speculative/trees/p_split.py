"""llama.cpp's tree: branches that split where a further token is likely enough."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specsparse.engine.cache import KVCache
from specsparse.errors import UserError
from specsparse.speculative.base import ROOT, Draft
from specsparse.speculative.trees.base import Expanded, Expander, TreeShape
from specsparse.speculative.trees.options import PSplitOptions

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

    The rule of llama.cpp's `speculative` example (`--draft-max`, `--draft-p-split`, `--parallel`). Chosen, not drawn.

    Attributes:
        nodes: K, nodes at most (llama.cpp's draft_max).
        depth: longest branch; None for K.
        n_parallel: branches at most.
        p_split: least probability of a token that begins a branch.
        p_min: a branch ends where its top probability is under it.
    """

    nodes: int = PSplitOptions.nodes
    n_parallel: int = PSplitOptions.n_parallel
    p_split: float = PSplitOptions.p_split
    p_min: float = PSplitOptions.p_min
    depth: int | None = None

    def __post_init__(self):
        if self.depth is not None and self.depth > self.nodes:
            raise UserError(f"tree.depth={self.depth} must lie in 1..nodes={self.nodes}")

    @property
    def max_nodes(self) -> int:
        """K."""
        return self.nodes

    @property
    def max_depth(self) -> int:
        """Longest branch."""
        return self.nodes if self.depth is None else self.depth

    def expand(
        self, by: Expander, cache: KVCache, logits_BN: jax.Array, *, budget_B: jax.Array, room_B: jax.Array
    ) -> Expanded:
        """Consumes no noise."""
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
        column_Rr = by.law.ranked(logits_RN, ranks)
        p_Rr = jnp.take_along_axis(by.law.confidence(logits_RN), column_Rr, axis=1)
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
