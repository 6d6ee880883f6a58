"""DDTree: the most likely paths of a block whose positions are independent, by a best-first search."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine.cache import KVCache
from specsparse.speculative.base import ROOT, Draft
from specsparse.speculative.trees.base import Expanded, Expander, TreeShape
from specsparse.speculative.trees.options import DDTreeOptions

_NEVER = np.float32(-np.inf)
_LEAST = np.float32(1e-30)


@dataclasses.dataclass(frozen=True)
class DDTree(TreeShape):
    """The nodes whose paths are the most likely ones under the product of the block's laws (Ringel and Romano,
    arXiv:2604.12989, algorithm 1). Chosen, not drawn.

    A path takes the token of some rank at each position. The search keeps a frontier: the best node leaves it, and its
    first child and its next sibling, the only ones whose elders are then in the tree, enter.

    Attributes:
        nodes: K.
        depth: longest path, at most the tokens of a block.
        top_k: ranks looked at after each node; with `nodes` of them the tree is the best of all.
    """

    nodes: int = DDTreeOptions.nodes
    depth: int = DDTreeOptions.depth
    top_k: int = DDTreeOptions.top_k

    independent = True

    @property
    def max_nodes(self) -> int:
        """K."""
        return self.nodes

    @property
    def max_depth(self) -> int:
        """Longest path."""
        return min(self.depth, self.nodes)

    def expand(
        self, by: Expander, cache: KVCache, logits_BN: jax.Array, *, budget_B: jax.Array, room_B: jax.Array
    ) -> Expanded:
        """Consumes no noise. The laws of all positions are read off a chain, whose tokens do not matter."""
        batch, N = logits_BN.shape
        K, D, ranks = self.nodes, self.max_depth, min(self.top_k, self.nodes, N)
        levels = logits_BN[:, None]
        if D > 1:
            chain = jnp.broadcast_to(jnp.arange(-1, D - 2, dtype=jnp.int32)[None], (batch, D - 1))
            fed_B = jnp.where(budget_B > 0, D - 1, 0)
            deeper, cache = by.feed(cache, jnp.zeros((batch, D - 1), jnp.int32), chain, fed_B)
            levels = jnp.concatenate([levels, deeper], axis=1)
        rows_RN = levels.reshape(batch * D, N)
        column_Rr = by.law.ranked(rows_RN, ranks)
        p_Rr = jnp.take_along_axis(by.law.confidence(rows_RN), column_Rr, axis=1)
        log_BDr = jnp.log(jnp.maximum(p_Rr, _LEAST)).reshape(batch, D, ranks)
        token_BDr = by.token_ids(column_Rr).reshape(batch, D, ranks)
        tokens, parents, found = jax.vmap(self._search)(log_BDr, token_BDr, room_B)
        count_B = jnp.minimum(jnp.clip(budget_B, 0, K), found)
        kept_BK = jnp.arange(K, dtype=jnp.int32)[None] < count_B[:, None]
        draft = Draft(jnp.where(kept_BK, tokens, 0), jnp.where(kept_BK, parents, ROOT), count_B)
        return Expanded(draft, cache, jnp.full((batch, K), -1, jnp.int32))

    def _search(self, log_Dr: jax.Array, token_Dr: jax.Array, room: jax.Array):
        """Tokens and parents int32[K] in the order in which nodes leave the frontier, and how many there are.

        A place of the frontier holds score, parent, depth (from 0) and rank; node i makes places 2i + 1 and 2i + 2.
        """
        K, (D, ranks) = self.nodes, log_Dr.shape

        def step(i, carry):
            score, parent, depth, rank, tokens, parents, count = carry
            at = jnp.argmax(score)
            best, d, r, above = score[at], depth[at], rank[at], parent[at]
            alive = best > _NEVER
            node = jnp.where(alive, i, K)
            tokens = tokens.at[node].set(token_Dr[d, r], mode="drop")
            parents = parents.at[node].set(above, mode="drop")
            deeper = jnp.minimum(d + 1, D - 1)
            child = jnp.where(alive & (d + 1 < jnp.minimum(D, room)), best + jnp.minimum(log_Dr[deeper, 0], 0), _NEVER)
            later = jnp.minimum(r + 1, ranks - 1)
            next_log = jnp.minimum(log_Dr[d, later] - log_Dr[d, r], 0)
            sibling = jnp.where(alive & (r + 1 < ranks), best + next_log, _NEVER)

            def put(old, first, second):
                return old.at[2 * i + 1].set(first).at[2 * i + 2].set(second)

            score = put(score.at[at].set(_NEVER), child, sibling)
            parent, depth, rank = put(parent, i, above), put(depth, deeper, d), put(rank, jnp.int32(0), later)
            return score, parent, depth, rank, tokens, parents, count + alive.astype(jnp.int32)

        places, none = jnp.zeros((2 * K + 1,), jnp.int32), jnp.zeros((K,), jnp.int32)
        score = jnp.full((2 * K + 1,), _NEVER).at[0].set(jnp.minimum(log_Dr[0, 0], 0))
        start = (score, places + ROOT, places, places, none, none, jnp.int32(0))
        *_, tokens, parents, count = jax.lax.fori_loop(0, K, step, start)
        return tokens, parents, count
