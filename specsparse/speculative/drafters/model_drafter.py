"""Drafters with a source of logits: a chain, written token by token, or a tree, expanded level by level."""

import dataclasses
from operator import attrgetter
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp

from specsparse.engine import cache as kv
from specsparse.engine.cache import KVCache
from specsparse.engine.pytree import AnyArray, Pytree
from specsparse.speculative.base import SHORT_GAMMA, Draft, DraftContext, Drafted, Drafter, DraftKind, Feedback
from specsparse.speculative.drafters.sources import (
    DraftSampling,
    DraftWeights,
    FedRows,
    KeptRows,
    Source,
    draft_uniforms,
)
from specsparse.speculative.policies.base import draft_view
from specsparse.speculative.trees.base import Expander, TreeShape
from specsparse.speculative.trees.template import TreeTemplate


class _Chain(NamedTuple):
    cache: KVCache  # of the source, its length with the drafted tokens that it holds
    tokens: jax.Array  # int32[B, K]
    q: jax.Array | None  # float32[B, K, V], or None for one-hot drafts
    count: jax.Array  # int32[B]
    live: jax.Array  # bool[B], whether another node may follow
    last: jax.Array  # float32[B], the draft's probability of the token drawn last


@dataclasses.dataclass(frozen=True)
class ModelDrafter(Drafter):
    """Drafts a chain with a source of logits; time follows the tokens drafted, not K. Its state is the source's.

    Draws from q (noise stream `draft`, keyed by position, round and node) and records it, or takes the argmax.
    """

    source: Source
    sampling: DraftSampling  # the draft's own temperature and truncation
    max_nodes: int = SHORT_GAMMA  # K, tokens drafted at most
    draw: DraftKind = DraftKind.ONE_HOT  # `DraftKind.SAMPLED` or `DraftKind.ONE_HOT`
    asks_stop = True

    def __post_init__(self):
        assert self.draw in (DraftKind.ONE_HOT, DraftKind.SAMPLED)

    kind = property(attrgetter("draw"))
    wants_hidden = property(attrgetter("source.wants_hidden"))
    wants_mass = property(attrgetter("source.wants_mass"))

    def with_room(self, nodes: int) -> Self:
        return dataclasses.replace(self, max_nodes=nodes)

    def init(self, params: DraftWeights, ctx: DraftContext, *, hidden: jax.Array | None = None) -> Pytree:
        return self.source.init(params, ctx, hidden)

    def draft(self, params: DraftWeights, state: Pytree, ctx: DraftContext) -> Drafted:
        """A chain of at most `budget` tokens; a sequence without budget costs nothing and catches up later."""
        batch, K = ctx.length.shape[0], self.max_nodes
        budget_B = jnp.clip(jnp.minimum(ctx.budget, self.source.room(params, state, ctx)), 0, K)
        cache, logits_BN = self.source.open(params, state, ctx._replace(budget=budget_B), budget_B > 0)
        written_down = self.draw is DraftKind.SAMPLED and not self._at_once(ctx)
        chain = _Chain(
            cache=cache,
            tokens=jnp.zeros((batch, K), jnp.int32),
            q=jnp.zeros((batch, K, self.source.vocab.target), jnp.float32) if written_down else None,
            count=jnp.zeros((batch,), jnp.int32),
            live=budget_B > 0,
            last=jnp.ones((batch,), jnp.float32),
        )
        chain = self._add(params, ctx, chain, logits_BN, jnp.int32(0), budget_B)

        def step(carry):
            i, chain = carry
            token_B1 = jax.lax.dynamic_slice_in_dim(chain.tokens, i - 1, 1, axis=1)
            live_B = chain.live.astype(jnp.int32)
            logits_B1N, cache = self.source.feed(params, ctx, chain.cache, FedRows(token_B1, live_B))
            chain = chain._replace(cache=kv.commit(cache, live_B))
            return i + 1, self._add(params, ctx, chain, logits_B1N[:, 0], i, budget_B)

        _, chain = jax.lax.while_loop(lambda c: c[1].live.any(), step, (jnp.int32(1), chain))
        state, cache = self.source.close(params, state, chain.cache, ctx)
        draft = Draft(chain.tokens, TreeTemplate.chain(K).parents_array(batch), chain.count, chain.q)
        return Drafted(draft, state, cache)

    def commit(self, params: DraftWeights, state: Pytree, ctx: DraftContext, feedback: Feedback) -> Pytree:
        """Keeps the accepted tokens in the source's cache, which has no row of the draft's last node."""
        kept_B = jnp.minimum(feedback.verdict.accepted, jnp.maximum(feedback.draft.count - 1, 0))
        return self.source.keep(params, state, ctx, feedback, KeptRows(kept_B))

    def _at_once(self, ctx: DraftContext) -> bool:
        """Whether one call makes q and token of a node."""
        return not ctx.needs and self.sampling.kernels.propose is not None

    def _add(self, params, ctx, chain: _Chain, logits_BN, i, budget_B) -> _Chain:
        """Node i of the sequences that are live, from the logits before it, unless the policy stops there."""
        live_B, sampled = chain.live, self.draw is DraftKind.SAMPLED
        u_BU = draft_uniforms(ctx, depth=i + 1, node=i)[:, 0]
        vocab = self.source.vocab
        q_BN: AnyArray = None
        wide_BV: AnyArray = None
        if sampled and self._at_once(ctx):
            # The first call makes room for all nodes: zeros as large as that would be shared among XLA's own threads.
            rows = self.max_nodes if chain.q is None else 1
            column_B, ok_B, wide_BV = self.sampling.propose(logits_BN, u_BU, params.ids, rows * vocab.target)
            live_B = live_B & ok_B
        else:
            if sampled:
                q_BN, ok_B = self.sampling.probs(logits_BN)
                live_B = live_B & ok_B  # without a distribution the draft ends
            elif ctx.needs:
                q_BN = self.sampling.confidence(logits_BN)
            if ctx.needs:
                view = draft_view(q_BN, depth_B=chain.count, last_B=chain.last, needs=ctx.needs)
                live_B = live_B & ~ctx.stop(view._replace(confidence=self.source.confidence(chain.cache)))
            if sampled:
                column_B, wide_BV = self.sampling.draw(q_BN, u_BU), vocab.widen(params, q_BN)
            else:
                column_B = self.sampling.top(logits_BN)
        token_B = jnp.where(live_B, vocab.token_ids(params, column_B), 0)
        last_B = chain.last
        if "last" in ctx.needs:
            last_B = jnp.take_along_axis(q_BN, column_B[:, None], axis=1)[:, 0]
        count_B, q = chain.count + live_B.astype(jnp.int32), chain.q
        if q is not None:
            q = jax.lax.dynamic_update_slice_in_dim(q, wide_BV[:, None], i, axis=1)
        elif sampled:
            q = wide_BV.reshape(-1, self.max_nodes, vocab.target)
        return _Chain(
            cache=chain.cache,
            tokens=jax.lax.dynamic_update_slice_in_dim(chain.tokens, token_B[:, None], i, axis=1),
            q=q,
            count=count_B,
            live=live_B & (count_B < budget_B),
            last=last_B,
        )


class TreeState(NamedTuple):
    """The source's state, and int32[B, K], each node's row in the source's cache (-1 for none)."""

    source: Pytree
    rows: jax.Array


@dataclasses.dataclass(frozen=True)
class TreeDrafter(Drafter):
    """Drafts trees of one shape with a source of logits: one forward of the source a level."""

    source: Source
    sampling: DraftSampling  # the draft's own temperature and truncation
    shape: TreeShape  # the nodes and how their tokens are drawn

    kind = property(attrgetter("shape.kind"))
    max_nodes = property(attrgetter("shape.max_nodes"))
    max_depth = property(attrgetter("shape.max_depth"))
    tree = property(attrgetter("shape.branches"))
    wants_hidden = property(attrgetter("source.wants_hidden"))
    wants_mass = property(attrgetter("source.wants_mass"))

    def init(self, params: DraftWeights, ctx: DraftContext, *, hidden: jax.Array | None = None) -> TreeState:
        rows = jnp.full((ctx.length.shape[0], self.max_nodes), -1, jnp.int32)
        return TreeState(self.source.init(params, ctx, hidden), rows)

    def draft(self, params: DraftWeights, state: TreeState, ctx: DraftContext) -> Drafted:
        """A tree of at most `budget` nodes; consumes noise of stream `draft` as the shape says."""
        room_B = self.source.room(params, state.source, ctx)
        budget_B = jnp.clip(jnp.minimum(ctx.budget, room_B), 0, self.max_nodes)
        cache, logits_BN = self.source.open(params, state.source, ctx._replace(budget=budget_B), budget_B > 0)

        vocab = self.source.vocab
        expander = Expander(
            feed=lambda cache, tokens_BR, parents_BR, n_valid_B: self.source.feed(
                params, ctx, cache, FedRows(tokens_BR, n_valid_B, parents_BR)
            ),
            sampling=self.sampling,
            token_ids=lambda column: vocab.token_ids(params, column),
            widen=lambda q_RN: vocab.widen(params, q_RN),
            vocab_size=vocab.target,
            ctx=ctx,
        )
        tree = self.shape.expand(expander, cache, logits_BN, budget_B=budget_B, room_B=room_B)
        source, cache = self.source.close(params, state.source, tree.cache, ctx)
        return Drafted(tree.draft, TreeState(source, tree.rows), cache)

    def commit(self, params: DraftWeights, state: TreeState, ctx: DraftContext, feedback: Feedback) -> TreeState:
        """Keeps the rows of the accepted path in the source's cache."""
        nodes_BK = feedback.verdict.nodes
        rows_BK = jnp.take_along_axis(state.rows, jnp.maximum(nodes_BK, 0), axis=1)
        fed_BK = (nodes_BK >= 0) & (rows_BK >= 0)
        kept_B = jnp.sum(jnp.cumprod(fed_BK.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
        rows_BK = jnp.maximum(rows_BK, 0)
        source = self.source.keep(params, state.source, ctx, feedback, KeptRows(kept_B, rows_BK))
        return state._replace(source=source)
