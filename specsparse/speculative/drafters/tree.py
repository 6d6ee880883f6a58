"""The tree drafter: a model, or a part of the target, expands a tree level by level."""

import dataclasses
from operator import attrgetter
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specsparse.engine.pytree import Pytree
from specsparse.speculative.base import DraftContext, Drafted, Drafter, Feedback
from specsparse.speculative.draft_law import DraftLaw
from specsparse.speculative.drafters.sources import DraftWeights, FedRows, KeptRows, Source
from specsparse.speculative.trees.base import Expander, TreeShape


class TreeState(NamedTuple):
    """The source's state, and int32[B, K], the row each node of the last draft was fed under (-1: it was not)."""

    source: Pytree
    rows: jax.Array


@dataclasses.dataclass(frozen=True)
class TreeDrafter(Drafter):
    """Drafts trees of one shape with a source of logits: one forward of the source a level.

    Attributes:
        source: where logits come from.
        law: the draft's own temperature and truncation.
        shape: which nodes there are and how their tokens are drawn.
    """

    source: Source
    law: DraftLaw
    shape: TreeShape

    kind = property(attrgetter("shape.kind"))
    max_nodes = property(attrgetter("shape.max_nodes"))
    max_depth = property(attrgetter("shape.max_depth"))
    tree = property(attrgetter("shape.branches"))
    wants_hidden = property(attrgetter("source.wants_hidden"))

    def init(self, params: DraftWeights, ctx: DraftContext, *, hidden: jax.Array | None = None) -> TreeState:
        """Feeds the prompt to the source."""
        rows = jnp.full((ctx.length.shape[0], self.max_nodes), -1, jnp.int32)
        return TreeState(self.source.init(params, ctx, hidden), rows)

    def draft(self, params: DraftWeights, state: TreeState, ctx: DraftContext) -> Drafted:
        """A tree of at most `budget` nodes; consumes noise of stream `draft` as the shape says."""
        room_B = self.source.room(params, state.source, ctx)
        budget_B = jnp.clip(jnp.minimum(ctx.budget, room_B), 0, self.max_nodes)
        cache, logits_BN = self.source.open(params, state.source, ctx._replace(budget=budget_B), budget_B > 0)

        def feed(cache, tokens_BR, parents_BR, n_valid_B):
            return self.source.feed(params, ctx, cache, FedRows(tokens_BR, n_valid_B, parents_BR))

        vocab = self.source.vocab
        expander = Expander(
            feed=feed,
            law=self.law,
            token_ids=lambda column: vocab.token_ids(params, column),
            widen=lambda q_RN: vocab.widen(params, q_RN),
            vocab_size=vocab.target,
            ctx=ctx,
        )
        tree = self.shape.expand(expander, cache, logits_BN, budget_B=budget_B, room_B=room_B)
        source, cache = self.source.close(params, state.source, tree.cache, ctx)
        return Drafted(tree.draft, TreeState(source, tree.rows), cache)

    def commit(self, params: DraftWeights, state: TreeState, ctx: DraftContext, feedback: Feedback) -> TreeState:
        """Keeps the rows of the accepted path in the source's cache, as far as they were fed."""
        nodes_BK = feedback.verdict.nodes
        rows_BK = jnp.take_along_axis(state.rows, jnp.maximum(nodes_BK, 0), axis=1)
        fed_BK = (nodes_BK >= 0) & (rows_BK >= 0)
        kept_B = jnp.sum(jnp.cumprod(fed_BK.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
        rows_BK = jnp.maximum(rows_BK, 0)
        source = self.source.keep(params, state.source, ctx, feedback, KeptRows(kept_B, rows_BK))
        return state._replace(source=source)
