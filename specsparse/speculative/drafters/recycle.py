"""Token Recycling: the tokens that the target found most likely behind each token, as a small tree. No weights.

Luo et al., arXiv:2408.08696: their matrix of candidates, overwritten by every verified row, accepted or not. Their tree
has 80 nodes; on a processor a verified row costs time, so this one has a few, the likeliest first.
"""

import functools
from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine.pytree import Pytree
from specsparse.errors import UserError
from specsparse.speculative.base import PAD, ROOT, Draft, DraftContext, Drafted, Drafter, DraftKind, Feedback, MaxNodes
from specsparse.speculative.drafters.lookup import allowed, drafted
from specsparse.speculative.trees.template import TreeTemplate
from specsparse.support.options import Range

Chance = Annotated[float, Range(1e-6, 0.999)]


class RecycleState(NamedTuple):
    """Successors of tokens."""

    # int32[B, V, R], the R tokens that the target last found most likely behind each token, best first; `PAD` where
    # none is known
    successors: jax.Array
    root: jax.Array  # int32[B], the last committed token before the draft


@dataclass(frozen=True)
class Recycle(Drafter):
    """A tree over the last known successors of each token.

    The prompt gives each of its tokens one successor, the token that last followed it; rows that the target verifies
    replace that by the target's own most likely tokens.

    Attributes:
        max_nodes: nodes drafted at most.
        chances: chance that the successor of each rank is the target's token. They decide the shape of the tree: its
            nodes are the likeliest ones.
    """

    kind = DraftKind.ONE_HOT
    max_nodes: MaxNodes = 3
    chances: tuple[Chance, ...] = (0.3, 0.1, 0.06)

    def __post_init__(self):
        if not self.chances or list(self.chances) != sorted(self.chances, reverse=True):
            raise UserError(f"drafter.chances={list(self.chances)} must fall from rank to rank, as [0.3, 0.1] do")

    @functools.cached_property
    def template(self) -> TreeTemplate:
        return TreeTemplate.best_first(self.chances, self.max_nodes)

    tree = property(lambda self: self.template.width > 1)
    max_depth = property(attrgetter("template.max_depth"))
    wants_top = property(attrgetter("template.width"))

    def init(self, params: Pytree, ctx: DraftContext, *, hidden: jax.Array | None = None) -> RecycleState:
        return RecycleState(shown_successors(ctx, ranks=self.wants_top), root_token(ctx))

    def draft(self, params: Pytree, state: RecycleState, ctx: DraftContext) -> Drafted:
        """The nodes of the template that have a known token; consumes no noise."""
        t, batch = self.template, ctx.length.shape[0]
        row_B1, root_B = jnp.arange(batch)[:, None], root_token(ctx)
        parent_K, depth_K, rank_K = map(np.array, (t.parents, t.depths, t.ranks))
        # Column 0 is the root, column 1 + i node i: a node is found behind its parent.
        tokens_Bn = jnp.full((batch, t.size + 1), PAD, jnp.int32).at[:, 0].set(root_B)
        for depth in range(1, t.max_depth + 1):
            node_m = np.flatnonzero(depth_K == depth)
            above_Bm = tokens_Bn[:, parent_K[node_m] + 1]
            found_Bm = state.successors[row_B1, jnp.maximum(above_Bm, 0), rank_K[node_m]]
            tokens_Bn = tokens_Bn.at[:, node_m + 1].set(jnp.where(above_Bm >= 0, found_Bm, PAD))
        tokens_BK = tokens_Bn[:, 1:]
        # Those that exist move to the front; a node's parent exists if it does.
        exists_BK = tokens_BK >= 0
        order_BK = jnp.argsort(~exists_BK, axis=1, stable=True)
        place_BK = jnp.cumsum(exists_BK, axis=1, dtype=jnp.int32) - 1
        parents_BK = t.parents_array(batch)
        moved_BK = jnp.take_along_axis(place_BK, jnp.maximum(parents_BK, 0), axis=1)
        parents_BK = jnp.where(parents_BK == ROOT, ROOT, moved_BK)
        tokens_BK, parents_BK = (jnp.take_along_axis(x, order_BK, axis=1) for x in (tokens_BK, parents_BK))
        count_B = allowed(ctx, jnp.sum(exists_BK, axis=1, dtype=jnp.int32), max_nodes=self.max_nodes)
        held_BK = jnp.arange(self.max_nodes, dtype=jnp.int32)[None] < count_B[:, None]
        draft = Draft(jnp.where(held_BK, tokens_BK, 0), jnp.where(held_BK, parents_BK, ROOT), count_B)
        return drafted(draft, state._replace(root=root_B), ctx)

    def commit(self, params: Pytree, state: RecycleState, ctx: DraftContext, feedback: Feedback) -> RecycleState:
        return state._replace(successors=overwritten(state.successors, state.root, feedback))


def shown_successors(ctx: DraftContext, *, ranks: int) -> jax.Array:
    """int32[B, V, ranks]: of each token the one that last followed it in the text, at rank 0."""
    assert ctx.vocab is not None
    batch, C = ctx.tokens.shape
    row_B1, position_C = jnp.arange(batch)[:, None], jnp.arange(C, dtype=jnp.int32)[None]
    follows_BC = position_C < ctx.length[:, None] - 1
    latest_BV = jnp.full((batch, ctx.vocab), -1, jnp.int32)
    latest_BV = latest_BV.at[row_B1, ctx.tokens].max(jnp.where(follows_BC, position_C, -1), mode="drop")
    after_BV = jnp.take_along_axis(ctx.tokens, jnp.minimum(latest_BV + 1, C - 1), axis=1)
    first_BV = jnp.where(latest_BV >= 0, after_BV, PAD)
    return jnp.pad(first_BV[..., None], [(0, 0), (0, 0), (0, ranks - 1)], constant_values=PAD)


def overwritten(successors_BVR: jax.Array, root_B: jax.Array, feedback: Feedback) -> jax.Array:
    """The successors with those behind the verified rows: of rows with one token an accepted row counts, or the last.

    `root` is the last committed token before the draft.
    """
    draft, top_BnR = feedback.draft, feedback.top
    assert top_BnR is not None
    batch, n = top_BnR.shape[:2]
    row_Bn = jnp.arange(n, dtype=jnp.int32)[None]
    tokens_Bn = jnp.concatenate([root_B[:, None], draft.tokens], axis=1)
    verified_Bn = row_Bn <= draft.count[:, None]
    accepted_Bn = (feedback.verdict.nodes[:, None, :] == row_Bn[:, :, None] - 1).any(axis=2) | (row_Bn == 0)
    rank_Bn = row_Bn + jnp.where(accepted_Bn, jnp.int32(n), jnp.int32(0))
    same_Bnn = (tokens_Bn[:, :, None] == tokens_Bn[:, None]) & verified_Bn[:, None]
    beaten_Bn = (same_Bnn & (rank_Bn[:, None] > rank_Bn[:, :, None])).any(axis=2)
    at_Bn = jnp.where(verified_Bn & ~beaten_Bn, tokens_Bn, successors_BVR.shape[1])
    return successors_BVR.at[jnp.arange(batch)[:, None], at_Bn].set(top_BnR, mode="drop")


def root_token(ctx: DraftContext) -> jax.Array:
    return jnp.take_along_axis(ctx.tokens, jnp.maximum(ctx.length - 1, 0)[:, None], axis=1)[:, 0]
