"""Heads on the target's features as sources of logits: what EAGLE's generations have in common.

A head reads the target's rows and the token after each, and scores the token after that. What it drafts from, it reads
its own rows of. Its row i stands in slot i of a cache of its own, so that this cache holds one row fewer than there are
tokens.
"""

import abc
import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from specsparse.engine import cache as kv
from specsparse.engine.pytree import Pytree
from specsparse.kernels import Kernels
from specsparse.speculative.base import DraftContext, Feedback
from specsparse.speculative.drafters.sources import PREFILL_ROWS, DraftWeights, Source, VocabMap
from specsparse.speculative.tree import path_rows


class HeadState(NamedTuple):
    """A head's cache, and in the making of a draft also its last rows.

    Attributes:
        k, v, length: as in `KVCache`, of one layer.
        root: f32[B, D], the head's row before the node that is drafted next (before the first node of a tree).
        rows: f32[B, r, D], its rows at the nodes fed in this draft, for trees.
    """

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]
    length: jax.Array
    root: jax.Array
    rows: jax.Array


@dataclasses.dataclass(frozen=True)
class FeatureSource(Source):
    """Base of the heads: one layer with a cache of its own. Static.

    Attributes:
        vocab: the map between the vocabularies.
        kernels: what products and embedding run on.
        context: tokens the target may look at.
        width: D of the head's rows.
        kv_heads, head_dim, kv_dtype: of the cache.
        tree_rows: rows that a tree feeds at once, 0 for chains.
    """

    vocab: VocabMap
    kernels: Kernels
    context: int
    width: int
    kv_heads: int
    head_dim: int
    kv_dtype: DTypeLike
    tree_rows: int

    def init(self, weights: DraftWeights, ctx: DraftContext, hidden_BnD: jax.Array | None = None) -> HeadState:
        """Feeds the prompt's rows but the last, whose token is not there yet. `hidden` is None for lone tokens only."""
        batch, capacity = ctx.tokens.shape
        cache = kv.init(
            layers=1,
            batch=batch,
            kv_heads=self.kv_heads,
            capacity=capacity,
            head_dim=self.head_dim,
            dtype=self.kv_dtype,
        )
        root = jnp.zeros((batch, self.width), jnp.float32)
        state = HeadState(*cache, root, jnp.zeros((batch, self.tree_rows, self.width), jnp.float32))
        if hidden_BnD is None:
            return state
        until_B = jnp.minimum(ctx.length - 1, hidden_BnD.shape[1])
        rows = min(PREFILL_ROWS, capacity)

        def step(state: HeadState) -> HeadState:
            at_Bn = state.length[:, None] + jnp.arange(rows, dtype=jnp.int32)[None]
            piece_BnD = pick(hidden_BnD, at_Bn)
            return self._advance(weights, ctx, state, piece_BnD, jnp.clip(until_B - state.length, 0, rows))

        return jax.lax.while_loop(lambda s: (s.length < until_B).any(), step, state)

    def room(self, weights: DraftWeights, state: HeadState, ctx: DraftContext) -> jax.Array:
        """Up to the end of the target's context and of the cache."""
        return min(self.context, ctx.tokens.shape[1]) - ctx.length + 1

    def open(
        self, weights: DraftWeights, state: HeadState, ctx: DraftContext, live_B: jax.Array
    ) -> tuple[HeadState, jax.Array]:
        """The rows are there since the last verdict; what is left is the output matrix."""
        return state, self.logits(weights, state.root[:, None], live_B.astype(jnp.int32))[:, 0]

    def feed(
        self,
        weights: DraftWeights,
        ctx: DraftContext,
        cache: HeadState,
        tokens_Bn: jax.Array,
        *,
        n_valid_B: jax.Array,
        parents_Bn: jax.Array | None = None,
    ) -> tuple[jax.Array, HeadState]:
        """The head's row at a node's parent stands for the target's."""
        n = tokens_Bn.shape[1]
        before_BnD = cache.root[:, None]
        if parents_Bn is not None:
            above_BnD = pick(cache.rows, parents_Bn)
            before_BnD = jnp.where(parents_Bn[:, :, None] < 0, before_BnD, above_BnD)
        read_BnD = self.again(weights, before_BnD, n_valid_B)
        y_BnD, cache = self.run(weights, ctx, cache, read_BnD, tokens_Bn, n_valid_B, parents_Bn)
        fed_Bn1 = (jnp.arange(n, dtype=jnp.int32)[None] < n_valid_B[:, None])[:, :, None]
        if parents_Bn is None:
            cache = cache._replace(root=jnp.where(fed_Bn1, y_BnD, before_BnD)[:, 0])
        else:
            cache = cache._replace(rows=cache.rows.at[:, :n].set(jnp.where(fed_Bn1, y_BnD, cache.rows[:, :n])))
        return self.logits(weights, y_BnD, n_valid_B), cache

    def close(
        self, weights: DraftWeights, state: HeadState, cache: HeadState, ctx: DraftContext
    ) -> tuple[HeadState, Pytree]:
        """What was drafted is forgotten: the verdict brings the target's own rows."""
        return cache._replace(length=state.length, root=state.root), ctx.cache

    def keep(
        self,
        weights: DraftWeights,
        state: HeadState,
        ctx: DraftContext,
        feedback: Feedback,
        *,
        rows_Bm: jax.Array | None,
        count_B: jax.Array,
    ) -> HeadState:
        """Feeds the target's rows of the tokens emitted in this round."""
        assert feedback.hidden is not None
        path_BnD = pick(feedback.hidden, path_rows(feedback.verdict))
        n = path_BnD.shape[1]
        return self._advance(weights, ctx, state, path_BnD, jnp.clip(ctx.length - 1 - state.length, 0, n))

    @abc.abstractmethod
    def read(self, weights: DraftWeights, hidden_BnE: jax.Array, n_valid_B: jax.Array) -> jax.Array:
        """f32[B, n, D]: what the head reads of the target's rows."""

    @abc.abstractmethod
    def again(self, weights: DraftWeights, y_BnD: jax.Array, n_valid_B: jax.Array) -> jax.Array:
        """f32[B, n, D]: what the head reads of its own rows, in place of the target's."""

    @abc.abstractmethod
    def run(
        self,
        weights: DraftWeights,
        ctx: DraftContext,
        state: HeadState,
        read_BnD: jax.Array,
        tokens_Bn: jax.Array,
        n_valid_B: jax.Array,
        parents_Bn: jax.Array | None,
    ) -> tuple[jax.Array, HeadState]:
        """f32[B, n, D], the head's rows, and the state with their keys and values behind its length."""

    @abc.abstractmethod
    def logits(self, weights: DraftWeights, y_BnD: jax.Array, n_valid_B: jax.Array) -> jax.Array:
        """f32[B, n, N] of the head's rows."""

    def _advance(self, weights, ctx: DraftContext, state: HeadState, hidden_BnD, count_B) -> HeadState:
        """The state with the first `count` of the target's rows that follow those it has."""
        n = hidden_BnD.shape[1]
        after_Bn = state.length[:, None] + 1 + jnp.arange(n, dtype=jnp.int32)[None]
        tokens_Bn = pick(ctx.tokens, after_Bn)
        read_BnD = self.read(weights, hidden_BnD, count_B)
        y_BnD, state = self.run(weights, ctx, state, read_BnD, tokens_Bn, count_B, None)
        last_BD = pick(y_BnD, jnp.maximum(count_B - 1, 0)[:, None])[:, 0]
        root = jnp.where(count_B[:, None] > 0, last_BD, state.root)
        return state._replace(root=root, length=state.length + count_B)


def pick(x: jax.Array, index_Bn: jax.Array) -> jax.Array:
    """Entries of axis 1 by index, which is clipped."""
    index_Bn = jnp.clip(index_Bn, 0, max(x.shape[1] - 1, 0))
    return jnp.take_along_axis(x, index_Bn.reshape(index_Bn.shape + (1,) * (x.ndim - 2)), axis=1)
