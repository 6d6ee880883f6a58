"""Where a model drafter's logits come from: a model of its own with its own cache, or a part of the target's layers
(`head_source`: a head on the target's features).

A source feeds tokens and keeps caches; it knows nothing of laws, trees or policies. Logits come as [.., N], N columns
of the draft's vocabulary; `widen` and `token_ids` lead from columns to the target's ids.
"""

import abc
import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from specsparse.engine import cache as kv
from specsparse.engine.cache import LANES, KVCache
from specsparse.engine.llama import ForwardFn, Want
from specsparse.kernels import QTensor
from specsparse.speculative.base import DraftContext, Feedback

PREFILL_ROWS = 128
"""Rows of a prompt piece fed at `init`."""
CATCH_UP_ROWS = 8
"""Rows fed at once at the start of a draft; one or two tokens are new unless rounds went by without a draft."""


class DraftWeights(NamedTuple):
    """Weights of a model drafter, an argument of every jitted function.

    Attributes:
        params: `engine.weights.Params` of the draft model, or of the target with fewer neurons; None where the target's
            are used.
        head: QTensor [N, D], the trimmed output matrix, or None.
        ids: int32[N], target id of each column of a trimmed head, ascending, or None.
        place: int32[V], column of each target id, N where it has none, or None.
    """

    params: Any = None
    head: QTensor | None = None
    ids: jax.Array | None = None
    place: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class VocabMap:
    """How the draft's columns and the target's ids go together. Ids below both sizes are the same token.

    Attributes:
        target: V, ids of the target.
        draft: ids the draft model can be fed.
        columns: N, columns of logits: min(V, draft), or fewer where the head is trimmed.
        unknown: id fed in place of one that the draft does not have.
    """

    target: int
    draft: int
    columns: int
    unknown: int = 0

    def to_draft(self, tokens: jax.Array) -> jax.Array:
        """Ids to feed: a target id the draft does not have becomes `unknown`."""
        return jnp.where((tokens < 0) | (tokens >= self.draft), jnp.int32(self.unknown), tokens)

    def token_ids(self, weights: DraftWeights, column: jax.Array) -> jax.Array:
        """Target ids of columns."""
        return column if weights.ids is None else weights.ids[column]

    def widen(self, weights: DraftWeights, q_RN: jax.Array) -> jax.Array:
        """float32[R, V]: q over the target's ids, 0 at those that have no column."""
        if weights.place is not None:
            return jnp.take(jnp.pad(q_RN, ((0, 0), (0, 1))), weights.place, axis=1)
        return jnp.pad(q_RN, ((0, 0), (0, self.target - self.columns)))


class Source(abc.ABC):
    """Base of all sources: final frozen dataclasses. The state is a pytree, the cache passes through a draft by value.

    A draft is `open`, then any number of `feed`, then `close`; after the verdict `keep`. Rows that are fed lie behind
    the cache's length.

    Attributes:
        vocab: the map between the vocabularies.
        wants_hidden: whether `init` and `keep` need the target's rows before its output norm.
    """

    vocab: VocabMap
    wants_hidden: ClassVar[bool] = False

    @abc.abstractmethod
    def init(self, weights: DraftWeights, ctx: DraftContext, hidden_BnD: jax.Array | None = None) -> Any:
        """State after the prompt; `hidden` are its rows."""

    @abc.abstractmethod
    def room(self, state: Any, ctx: DraftContext) -> jax.Array:
        """int32[B]: nodes that may be fed or drafted behind the committed tokens; below 1 there is no draft."""

    @abc.abstractmethod
    def open(self, weights: DraftWeights, state: Any, ctx: DraftContext, live_B: jax.Array) -> tuple[Any, jax.Array]:
        """The cache with all committed tokens of the sequences in `live`, and float32[B, N] logits after the last."""

    @abc.abstractmethod
    def feed(
        self,
        weights: DraftWeights,
        ctx: DraftContext,
        cache: Any,
        tokens_Bn: jax.Array,
        *,
        n_valid_B: jax.Array,
        parents_Bn: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """float32[B, n, N] logits and the cache, its length unchanged.

        Without `parents` a chain is fed one token at a time, each committed before the next. With them all rows of a
        tree so far are fed, those of earlier calls again.
        """

    @abc.abstractmethod
    def close(self, state: Any, cache: Any, ctx: DraftContext) -> tuple[Any, Any]:
        """The state, and the target's cache, after a draft."""

    @abc.abstractmethod
    def keep(
        self,
        weights: DraftWeights,
        state: Any,
        ctx: DraftContext,
        feedback: Feedback,
        *,
        rows_Bm: jax.Array | None,
        count_B: jax.Array,
    ) -> Any:
        """State after the verdict: it may keep the first `count` rows fed in the last draft, or of the path `rows`."""


@dataclasses.dataclass(frozen=True)
class ModelSource(Source):
    """Base of the sources that run a model's forward function. Static.

    Between `open` and `close` the cache's length counts all committed tokens, the last one too.

    Attributes:
        forward: the forward function.
        vocab: the map between the vocabularies.
        context: tokens the model may look at.
        layers: the layers that run, None for all.
    """

    forward: ForwardFn
    vocab: VocabMap
    context: int
    layers: tuple[int, ...] | None

    @abc.abstractmethod
    def params(self, weights: DraftWeights, ctx: DraftContext) -> Any:
        """The parameters the forward function takes."""

    def feed(
        self,
        weights: DraftWeights,
        ctx: DraftContext,
        cache: KVCache,
        tokens_Bn: jax.Array,
        *,
        n_valid_B: jax.Array,
        parents_Bn: jax.Array | None = None,
        logits: str = "all",
    ) -> tuple[Any, KVCache]:
        """float32[B, n, N] logits ([B, 1, N] of the last row, or None), and the cache, its length unchanged."""
        want = Want(logits=logits, layers=self.layers)  # type: ignore[arg-type]
        params = self.params(weights, ctx)
        tokens_Bn = self.vocab.to_draft(tokens_Bn)
        out, cache = self.forward(params, tokens_Bn, cache, n_valid_B=n_valid_B, parents_Bn=parents_Bn, want=want)
        return None if out.logits is None else out.logits[..., : self.vocab.columns], cache


@dataclasses.dataclass(frozen=True)
class OwnModel(ModelSource):
    """Another model. Its cache (the state) holds what it has been fed; rolling back is a shorter length."""

    layers_total: int
    kv_heads: int
    head_dim: int
    kv_dtype: Any

    def capacity(self, tokens: int) -> int:
        """Slots of its cache beside a target's of `tokens` slots."""
        return min(-(-tokens // LANES), -(-self.context // LANES)) * LANES

    def init(self, weights: DraftWeights, ctx: DraftContext, hidden_BnD: jax.Array | None = None) -> KVCache:
        """Feeds all but the last token of the prompt."""
        capacity = self.capacity(ctx.tokens.shape[1])
        cache = kv.init(
            layers=self.layers_total,
            batch=ctx.tokens.shape[0],
            kv_heads=self.kv_heads,
            capacity=capacity,
            head_dim=self.head_dim,
            dtype=self.kv_dtype,
        )
        until_B = jnp.minimum(ctx.length - 1, self.context)
        rows = min(PREFILL_ROWS, capacity)

        def more(cache):
            return (cache.length < until_B).any()

        def step(cache):
            return self._next(weights, cache, ctx, until_B, rows, "none")[1]

        return jax.lax.while_loop(more, step, cache)

    def room(self, state: KVCache, ctx: DraftContext) -> jax.Array:
        """Up to the end of the model's context and of its cache: the last node drafted is not fed."""
        return min(self.context, state.capacity) - ctx.length + 1

    def open(
        self, weights: DraftWeights, state: KVCache, ctx: DraftContext, live_B: jax.Array
    ) -> tuple[KVCache, jax.Array]:
        """Feeds what was emitted since the last draft."""
        until_B = jnp.where(live_B, ctx.length, state.length)

        def step(carry):
            cache, logits_BN = carry
            fed_B = (cache.length < until_B)[:, None]
            new_B1N, cache = self._next(weights, cache, ctx, until_B, CATCH_UP_ROWS, "last")
            return cache, jnp.where(fed_B, new_B1N[:, 0], logits_BN)

        logits_BN = jnp.zeros((ctx.length.shape[0], self.vocab.columns), jnp.float32)
        return jax.lax.while_loop(lambda c: (c[0].length < until_B).any(), step, (state, logits_BN))

    def close(self, state: KVCache, cache: KVCache, ctx: DraftContext) -> tuple[KVCache, Any]:
        """Its own cache, rolled back to the committed tokens; the target's as it was."""
        return kv.rollback(cache, ctx.length), ctx.cache

    def keep(
        self,
        weights: DraftWeights,
        state: KVCache,
        ctx: DraftContext,
        feedback: Feedback,
        *,
        rows_Bm: jax.Array | None,
        count_B: jax.Array,
    ) -> KVCache:
        """A longer length; the rows of a path are moved together."""
        return kv.commit(state, count_B) if rows_Bm is None else kv.commit_path(state, rows_Bm, count_B)

    def params(self, weights: DraftWeights, ctx: DraftContext) -> Any:
        """Its own."""
        return weights.params

    def _next(self, weights, cache, ctx, until_B, rows, logits):
        """Feeds up to `rows` tokens that the cache does not hold yet."""
        count_B = jnp.clip(until_B - cache.length, 0, rows)
        at_Bn = cache.length[:, None] + jnp.arange(rows, dtype=jnp.int32)[None]
        tokens_Bn = jnp.take_along_axis(ctx.tokens, jnp.clip(at_Bn, 0, ctx.tokens.shape[1] - 1), axis=1)
        out, cache = self.feed(weights, ctx, cache, tokens_Bn, n_valid_B=count_B, logits=logits)
        return out, kv.commit(cache, count_B)


@dataclasses.dataclass(frozen=True)
class TargetLayers(ModelSource):
    """The target with some of its layers or neurons left out, on the target's cache: no second model and no state.

    Rows are written at and beyond the cache's length, where the verification overwrites them (Draft & Verify, Zhang et
    al., arXiv:2309.08168).
    """

    def init(self, weights: DraftWeights, ctx: DraftContext, hidden_BnD: jax.Array | None = None) -> None:
        """No state."""
        return None

    def room(self, state: None, ctx: DraftContext) -> jax.Array:
        """Up to the end of the target's cache."""
        return min(self.context, ctx.cache.capacity) - ctx.length + 1

    def open(
        self, weights: DraftWeights, state: None, ctx: DraftContext, live_B: jax.Array
    ) -> tuple[KVCache, jax.Array]:
        """Feeds the last emitted token, the only one that the target has not seen."""
        last_B1 = jnp.take_along_axis(ctx.tokens, jnp.maximum(ctx.length - 1, 0)[:, None], axis=1)
        live_B = live_B.astype(jnp.int32)
        logits_B1N, cache = self.feed(weights, ctx, ctx.cache, last_B1, n_valid_B=live_B)
        return kv.commit(cache, live_B), logits_B1N[:, 0]

    def close(self, state: None, cache: KVCache, ctx: DraftContext) -> tuple[None, KVCache]:
        """The target's cache at the length it had."""
        return None, cache._replace(length=ctx.cache.length)

    def keep(
        self,
        weights: DraftWeights,
        state: None,
        ctx: DraftContext,
        feedback: Feedback,
        *,
        rows_Bm: jax.Array | None,
        count_B: jax.Array,
    ) -> None:
        """Nothing: the target's own pass decides what its cache holds."""
        return None

    def params(self, weights: DraftWeights, ctx: DraftContext) -> Any:
        """The target's, all or with fewer neurons, with the trimmed head if there is one."""
        params = ctx.params if weights.params is None else weights.params
        return params if weights.head is None else params._replace(output=weights.head)
