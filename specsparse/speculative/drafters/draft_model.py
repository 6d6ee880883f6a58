"""A draft model: a smaller model of the target's family, with a cache of its own."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from specsparse.engine import cache as kv
from specsparse.engine.cache import LANES, KVCache
from specsparse.engine.model import Model
from specsparse.engine.pytree import Pytree
from specsparse.errors import UserError
from specsparse.speculative.base import DraftContext, Feedback
from specsparse.speculative.drafters.options import ModelOptions
from specsparse.speculative.drafters.plan import Bound, DrafterPlan, MakeModel, bytes_of
from specsparse.speculative.drafters.sources import PREFILL_ROWS, DraftWeights, ModelSource, VocabMap
from specsparse.speculative.vocab import check_compatible

CATCH_UP_ROWS = 8
"""Rows fed at once at the start of a draft; one or two tokens are new unless rounds went by without a draft."""


@dataclasses.dataclass(frozen=True)
class OwnModel(ModelSource):
    """Another model. Its cache (the state) holds what it has been fed; rolling back is a shorter length."""

    layers_total: int
    kv_heads: int
    head_dim: int
    kv_dtype: DTypeLike

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

    def close(self, state: KVCache, cache: KVCache, ctx: DraftContext) -> tuple[KVCache, Pytree]:
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

    def params(self, weights: DraftWeights, ctx: DraftContext) -> Pytree:
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
class ModelPlan(DrafterPlan, ModelOptions):
    """A draft model with a cache of its own, its matrices whole on each device."""

    on_mesh = True

    def prepare(self, target: Model, make: MakeModel) -> Bound:
        """Loads the draft model where it is a path, and compares the vocabularies."""
        if self.model is None:
            raise UserError("drafter.model: a value is needed, the draft model's GGUF file")
        model = make.load(str(self.model)) if isinstance(self.model, str | Path) else self.model
        check_compatible(target.tokenizer, model.tokenizer, special_tokens=self.special_tokens, where=str(model.path))
        c = model.config
        columns = min(c.vocab_size, target.config.vocab_size)
        weights, columns = self.style.trim(target, model.params.output, columns)
        unknown = model.tokenizer.unknown_id
        vocab = VocabMap(target.config.vocab_size, c.vocab_size, columns, 0 if unknown is None else unknown)
        source = OwnModel(
            model.forward, vocab, c.context_length, None, c.n_layers, c.n_kv_heads, c.head_dim, model.cache_dtype
        )

        def weights_for(capacity: int) -> DraftWeights:
            params = model.params_for(source.capacity(capacity))
            return weights._replace(params=params if weights.head is None else params._replace(output=weights.head))

        reads = bytes_of(model.params.layers, model.params.output if weights.head is None else weights.head)
        return Bound(self.style.drafter(source, target), weights_for, reads)
