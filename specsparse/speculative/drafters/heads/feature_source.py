"""Drafters on the target's features as sources of logits: the base of all, and that of EAGLE's generations.

Row i of the target's features stands in slot i of a cache of its own, so that this cache holds one row fewer than there
are tokens. A verdict appends the rows of the tokens it kept. Drafted rows lie beyond the length and are overwritten.
"""

import abc
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from specsparse.engine import cache as kv
from specsparse.engine.model import Model
from specsparse.engine.pytree import Pytree
from specsparse.kernels import Kernels
from specsparse.kernels.reference import q8_cache
from specsparse.speculative.base import DraftContext, Feedback
from specsparse.speculative.drafters.sources import PREFILL_ROWS, DraftWeights, FedRows, KeptRows, Source, VocabMap
from specsparse.speculative.drafters.spec import bytes_of
from specsparse.speculative.trees.base import path_rows


class HeadState(NamedTuple):
    """A head's cache, and in the making of a draft also its last rows."""

    # k, v, length: as in `KVCache`, of one layer
    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]
    length: jax.Array
    root: jax.Array  # f32[B, D], the head's row before the node that is drafted next (before the first node of a tree)
    rows: jax.Array  # f32[B, r, D], its rows at the nodes fed in this draft, for trees


State = Any
"""Of a source: a `HeadState` or a `KVCache`."""


def of_target(target: Model, columns: int, eps: float) -> dict[str, Any]:
    """The fields of a `FeatureSource` for a target, with so many columns of logits."""
    c = target.config
    vocab = VocabMap(c.vocab_size, c.vocab_size, columns)
    dtype = jnp.dtype(jnp.float16 if target.cache_dtype == q8_cache.DTYPE else target.cache_dtype)  # heads of any size
    return {"vocab": vocab, "kernels": target.kernels, "context": c.context_length, "kv_dtype": dtype, "eps": eps}


@dataclasses.dataclass(frozen=True)
class FeatureSource(Source):
    """Base of the drafters on features. Static."""

    kernels: Kernels  # of products, embedding and attention
    context: int  # tokens the target may look at
    kv_dtype: DTypeLike  # of the cache
    eps: float  # of the RMS norms

    @property
    def drafted_at_once(self) -> int:
        """Tokens for which one pass reads the weights."""
        return 1

    @property
    @abc.abstractmethod
    def keys_per_token(self) -> int:
        """As `LoadedDrafter`."""

    def bytes_per_token(self, layers: Any, head: Any) -> int:
        return bytes_of(layers, head) // self.drafted_at_once

    def logits(self, weights: DraftWeights, y_BnD: jax.Array, n_valid_B: jax.Array) -> jax.Array:
        """Logits f32[B, n, N] of rows before the output norm."""
        y_RD = y_BnD.reshape(-1, y_BnD.shape[-1])
        with jax.named_scope("head/output"):
            (logits_RN,) = self.kernels.linear(
                y_RD, (weights.head,), norm=weights.norm, eps=self.eps, n_valid=n_valid_B
            )
        return logits_RN.reshape(*y_BnD.shape[:2], -1)

    @abc.abstractmethod
    def empty(self, batch: int, tokens: int) -> State:
        """The state before any row, beside a target's cache of so many tokens."""

    @abc.abstractmethod
    def advance(
        self, weights: DraftWeights, ctx: DraftContext, state: State, hidden_BnE: jax.Array, count_B: jax.Array
    ) -> State:
        """The state with the first `count` of the target's rows that follow those it has."""

    def init(self, weights: DraftWeights, ctx: DraftContext, hidden_BnD: jax.Array | None = None) -> State:
        """Reads the prompt's rows but the last, whose next token is not known. `hidden` is None for lone tokens."""
        state = self.empty(*ctx.tokens.shape)
        if hidden_BnD is None:
            return state
        until_B = jnp.minimum(ctx.length - 1, hidden_BnD.shape[1])
        rows = min(PREFILL_ROWS, hidden_BnD.shape[1])

        def step(state: State) -> State:
            at_Bn = state.length[:, None] + jnp.arange(rows, dtype=jnp.int32)[None]
            count_B = jnp.clip(until_B - state.length, 0, rows)
            return self.advance(weights, ctx, state, pick(hidden_BnD, at_Bn), count_B)

        return jax.lax.while_loop(lambda s: (s.length < until_B).any(), step, state)

    def keep(self, weights: DraftWeights, state: State, ctx: DraftContext, feedback: Feedback, kept: KeptRows) -> State:
        """Reads the target's rows of the tokens emitted in this round."""
        assert feedback.hidden is not None
        path_BnE = pick(feedback.hidden, path_rows(feedback.verdict))
        return self.advance(
            weights, ctx, state, path_BnE, jnp.clip(ctx.length - 1 - state.length, 0, path_BnE.shape[1])
        )


@dataclasses.dataclass(frozen=True)
class OneLayerSource(FeatureSource):
    """Base of EAGLE's heads: one layer, which reads the target's rows and the token after each, and scores the token
    after that. Behind drafted tokens it reads its own rows in place of the target's. Static.
    """

    width: int  # D of the head's rows
    # kv_heads, head_dim: of the cache
    kv_heads: int
    head_dim: int
    tree_rows: int  # rows that a tree feeds at once, 0 for chains

    @property
    def keys_per_token(self) -> int:
        return self.kv_heads * self.head_dim

    def empty(self, batch: int, tokens: int) -> HeadState:
        heads = {"kv_heads": self.kv_heads, "head_dim": self.head_dim}
        cache = kv.init(layers=1, batch=batch, capacity=tokens, dtype=self.kv_dtype, **heads)
        root = jnp.zeros((batch, self.width), jnp.float32)
        rows = jnp.zeros((batch, self.tree_rows, self.width), jnp.float32)
        return HeadState(cache.k, cache.v, cache.length, root, rows)

    def room(self, weights: DraftWeights, state: HeadState, ctx: DraftContext) -> jax.Array:
        return min(self.context, ctx.tokens.shape[1]) - ctx.length + 1

    def open(
        self, weights: DraftWeights, state: HeadState, ctx: DraftContext, live_B: jax.Array
    ) -> tuple[HeadState, jax.Array]:
        """The last verdict brought the rows; only the output matrix is left."""
        return state, self.logits(weights, state.root[:, None], live_B.astype(jnp.int32))[:, 0]

    def feed(
        self, weights: DraftWeights, ctx: DraftContext, cache: HeadState, rows: FedRows
    ) -> tuple[jax.Array, HeadState]:
        """The head's row at a node's parent stands for the target's."""
        n = rows.tokens.shape[1]
        before_BnD = cache.root[:, None]
        if rows.parents is not None:
            above_BnD = pick(cache.rows, rows.parents)
            before_BnD = jnp.where(rows.parents[:, :, None] < 0, before_BnD, above_BnD)
        y_BnD, cache = self.run(weights, ctx, cache, self.again(weights, before_BnD, rows.n_valid), rows)
        fed_Bn1 = (jnp.arange(n, dtype=jnp.int32)[None] < rows.n_valid[:, None])[:, :, None]
        if rows.parents is None:
            cache = cache._replace(root=jnp.where(fed_Bn1, y_BnD, before_BnD)[:, 0])
        else:
            cache = cache._replace(rows=cache.rows.at[:, :n].set(jnp.where(fed_Bn1, y_BnD, cache.rows[:, :n])))
        return self.logits(weights, y_BnD, rows.n_valid), cache

    def close(
        self, weights: DraftWeights, state: HeadState, cache: HeadState, ctx: DraftContext
    ) -> tuple[HeadState, Pytree]:
        """Forgets the drafted rows: the verdict brings the target's own."""
        return cache._replace(length=state.length, root=state.root), ctx.cache

    @abc.abstractmethod
    def read(self, weights: DraftWeights, hidden_BnE: jax.Array, n_valid_B: jax.Array) -> jax.Array:
        """The head's input of the target's rows, f32[B, n, D]."""

    @abc.abstractmethod
    def again(self, weights: DraftWeights, y_BnD: jax.Array, n_valid_B: jax.Array) -> jax.Array:
        """The head's input of its own rows, in place of the target's, f32[B, n, D]."""

    @abc.abstractmethod
    def run(
        self, weights: DraftWeights, ctx: DraftContext, state: HeadState, read_BnD: jax.Array, rows: FedRows
    ) -> tuple[jax.Array, HeadState]:
        """f32[B, n, D], the head's rows, and the state with their keys and values behind its length."""

    def advance(
        self, weights: DraftWeights, ctx: DraftContext, state: HeadState, hidden_BnE: jax.Array, count_B: jax.Array
    ) -> HeadState:
        n = hidden_BnE.shape[1]
        after_Bn = state.length[:, None] + 1 + jnp.arange(n, dtype=jnp.int32)[None]
        tokens_Bn = pick(ctx.tokens, after_Bn)
        read_BnD = self.read(weights, hidden_BnE, count_B)
        y_BnD, state = self.run(weights, ctx, state, read_BnD, FedRows(tokens_Bn, count_B))
        last_BD = pick(y_BnD, jnp.maximum(count_B - 1, 0)[:, None])[:, 0]
        root = jnp.where(count_B[:, None] > 0, last_BD, state.root)
        return state._replace(root=root, length=state.length + count_B)


def pick(x: jax.Array, index_Bn: jax.Array) -> jax.Array:
    """Entries of axis 1 by index, which is clipped."""
    index_Bn = jnp.clip(index_Bn, 0, max(x.shape[1] - 1, 0))
    return jnp.take_along_axis(x, index_Bn.reshape(index_Bn.shape + (1,) * (x.ndim - 2)), axis=1)
