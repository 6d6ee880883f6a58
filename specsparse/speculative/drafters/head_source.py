"""A head on the target's features as a source of logits (EAGLE, Li et al., arXiv:2401.15077).

One layer of the target's shape reads h_i, the target's row before its output norm, and the token after it, and gives
what h_{i+1} will be; the target's own output matrix turns that into logits. What it drafts from, it reads in place of
h. A head may read rows of layers below too, and then has a matrix of its own for its own rows (as EAGLE-3 has,
arXiv:2503.01840). Its row i stands in slot i of a cache of its own, so that this cache holds one row fewer than there
are tokens.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from specsparse.engine import cache as kv
from specsparse.engine.cache import KVCache
from specsparse.engine.pytree import Pytree
from specsparse.engine.weights import Layer, Params
from specsparse.kernels import Kernels, QTensor
from specsparse.speculative.base import DraftContext, Feedback
from specsparse.speculative.drafters.sources import PREFILL_ROWS, DraftWeights, Source, VocabMap
from specsparse.speculative.tree import path_rows


class Input(NamedTuple):
    """One input of a head: RMS norm f32[D], and QTensor [D, D] of what is normalised."""

    norm: jax.Array
    matrix: QTensor


class HeadParams(NamedTuple):
    """The weights of a head.

    Attributes:
        hidden_norm, token_norm: f32[D], RMS norms of its inputs.
        fc_hidden, fc_token: QTensor [D, D]; their products are added.
        layer: of the target's shape.
        output_norm: f32[D].
        below: of the target's rows that enter layers below; their products are added too.
        own: in place of `hidden_norm` and `fc_hidden` where the head reads its own row; None: the same.
    """

    hidden_norm: jax.Array
    token_norm: jax.Array
    fc_hidden: QTensor
    fc_token: QTensor
    layer: Layer
    output_norm: jax.Array
    below: tuple[Input, ...] = ()
    own: Input | None = None


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
class HeadSource(Source):
    """A head with a cache of its own. Static.

    Attributes:
        vocab: the map between the vocabularies.
        kernels: what products and embedding run on.
        layers: `engine.llama.make_layers` of the head's one layer.
        eps: of the norms.
        context: tokens the target may look at.
        width: D.
        kv_heads, head_dim, kv_dtype: of the cache.
        tree_rows: rows that a tree feeds at once, 0 for chains.
        features: ids of the layers whose entering rows it reads, as `engine.llama.Want.hidden`; the last rows are last.
    """

    vocab: VocabMap
    kernels: Kernels
    layers: Callable
    eps: float
    context: int
    width: int
    kv_heads: int
    head_dim: int
    kv_dtype: DTypeLike
    tree_rows: int = 0
    features: tuple[int, ...] = ()

    @property
    def wants_hidden(self) -> bool | tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The rows that it reads; those before the output norm where there are no others."""
        return self.features or True

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
            piece_BnD = _pick(hidden_BnD, at_Bn)
            return self._advance(weights, ctx, state, piece_BnD, jnp.clip(until_B - state.length, 0, rows))

        return jax.lax.while_loop(lambda s: (s.length < until_B).any(), step, state)

    def room(self, state: HeadState, ctx: DraftContext) -> jax.Array:
        """Up to the end of the target's context and of the cache."""
        return min(self.context, ctx.tokens.shape[1]) - ctx.length + 1

    def open(
        self, weights: DraftWeights, state: HeadState, ctx: DraftContext, live_B: jax.Array
    ) -> tuple[HeadState, jax.Array]:
        """The rows are there since the last verdict; what is left is the output matrix."""
        return state, self._logits(weights, state.root[:, None], live_B.astype(jnp.int32))[:, 0]

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
            above_BnD = _pick(cache.rows, parents_Bn)
            before_BnD = jnp.where(parents_Bn[:, :, None] < 0, before_BnD, above_BnD)
        w: HeadParams = weights.params
        own = (w.own or Input(w.hidden_norm, w.fc_hidden),)
        y_BnD, cache = self._run(weights, ctx, cache, before_BnD, own, tokens_Bn, n_valid_B, parents_Bn)
        fed_Bn1 = (jnp.arange(n, dtype=jnp.int32)[None] < n_valid_B[:, None])[:, :, None]
        if parents_Bn is None:
            cache = cache._replace(root=jnp.where(fed_Bn1, y_BnD, before_BnD)[:, 0])
        else:
            cache = cache._replace(rows=cache.rows.at[:, :n].set(jnp.where(fed_Bn1, y_BnD, cache.rows[:, :n])))
        return self._logits(weights, y_BnD, n_valid_B), cache

    def close(self, state: HeadState, cache: HeadState, ctx: DraftContext) -> tuple[HeadState, Pytree]:
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
        path_BnD = _pick(feedback.hidden, path_rows(feedback.verdict))
        n = path_BnD.shape[1]
        return self._advance(weights, ctx, state, path_BnD, jnp.clip(ctx.length - 1 - state.length, 0, n))

    def _advance(self, weights, ctx: DraftContext, state: HeadState, hidden_BnD, count_B) -> HeadState:
        """The state with the first `count` of the target's rows that follow those it has."""
        n = hidden_BnD.shape[1]
        after_Bn = state.length[:, None] + 1 + jnp.arange(n, dtype=jnp.int32)[None]
        tokens_Bn = _pick(ctx.tokens, after_Bn)
        w: HeadParams = weights.params
        read = (*w.below, Input(w.hidden_norm, w.fc_hidden))
        y_BnD, state = self._run(weights, ctx, state, hidden_BnD, read, tokens_Bn, count_B, None)
        last_BD = _pick(y_BnD, jnp.maximum(count_B - 1, 0)[:, None])[:, 0]
        root = jnp.where(count_B[:, None] > 0, last_BD, state.root)
        return state._replace(root=root, length=state.length + count_B)

    def _run(self, weights, ctx, state: HeadState, rows_BnW, inputs: Sequence[Input], tokens_Bn, n_valid_B, parents_Bn):
        """float32[B, n, D], the head's rows, and the state with their keys and values behind its length.

        `rows_BnW` are D numbers for each of `inputs`, side by side.
        """
        batch, n, _ = rows_BnW.shape
        width = self.width
        w: HeadParams = weights.params
        tokens_R = self.vocab.to_draft(tokens_Bn).reshape(-1)
        with jax.named_scope("head"):
            e_RD = self.kernels.embed(ctx.params.embedding, tokens_R)
            options = {"eps": self.eps, "n_valid": n_valid_B}
            (x_RD,) = self.kernels.linear(e_RD, (w.fc_token,), norm=w.token_norm, **options)
            rows_RW = rows_BnW.reshape(batch * n, -1)
            for i, read in enumerate(inputs):
                h_RD = rows_RW[:, i * width : (i + 1) * width]
                (x_RD,) = self.kernels.linear(h_RD, (read.matrix,), norm=read.norm, residual=x_RD, **options)
            params = Params(ctx.params.embedding, (w.layer,), w.output_norm, None, ctx.params.cos, ctx.params.sin)
            cache = KVCache(state.k, state.v, state.length)
            y_RD, cache, *_ = self.layers(params, x_RD, cache, n_valid_B, parents_Bn, (0,))
        return y_RD.reshape(batch, n, width), state._replace(k=cache.k, v=cache.v)

    def _logits(self, weights: DraftWeights, y_BnD: jax.Array, n_valid_B: jax.Array) -> jax.Array:
        batch, n, width = y_BnD.shape
        with jax.named_scope("head/output"):
            (logits_RN,) = self.kernels.linear(
                y_BnD.reshape(batch * n, width),
                (weights.head,),
                norm=weights.params.output_norm,
                eps=self.eps,
                n_valid=n_valid_B,
            )
        return logits_RN.reshape(batch, n, -1)


def _pick(x: jax.Array, index_Bn: jax.Array) -> jax.Array:
    """Entries of axis 1 by index, which is clipped."""
    index_Bn = jnp.clip(index_Bn, 0, max(x.shape[1] - 1, 0))
    return jnp.take_along_axis(x, index_Bn.reshape(index_Bn.shape + (1,) * (x.ndim - 2)), axis=1)
