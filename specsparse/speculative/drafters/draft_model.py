"""A draft model: a smaller model, of the target's vocabulary or another, with a cache of its own."""

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from specsparse.engine import cache as kv
from specsparse.engine.cache import LANES, KVCache
from specsparse.engine.model import Model
from specsparse.engine.pytree import Pytree
from specsparse.errors import UserError, refuse
from specsparse.kernels import take_rows
from specsparse.speculative.base import DraftContext, Drafter, DraftKind, Feedback
from specsparse.speculative.drafters.slem import StringDrafter, Translator
from specsparse.speculative.drafters.sources import (
    PREFILL_ROWS,
    DraftIds,
    DraftWeights,
    FedRows,
    Images,
    KeptRows,
    ModelSource,
    VocabMap,
    draft_ids,
)
from specsparse.speculative.drafters.spec import DrafterSpec, Drafting, Load, LoadedDrafter, bytes_of
from specsparse.speculative.vocab import Intersection, check_compatible, intersect
from specsparse.support.options import Also, instance_of

log = logging.getLogger(__name__)

CATCH_UP_ROWS = 8
"""Rows of a chunk at the start of a draft; one or two tokens are new unless rounds went by without a draft."""


@dataclasses.dataclass(frozen=True)
class OwnModel(ModelSource):
    """Another model with a cache of its own, the state; rolling back is a shorter length."""

    layers_total: int
    kv_heads: int
    head_dim: int
    kv_dtype: DTypeLike
    expansion: float = 1.0  # slots of its cache for each of the target's: above 1 if it reads a token as several

    def capacity(self, tokens: int) -> int:
        """Slots of its cache beside a target's of `tokens` slots."""
        wanted = math.ceil(tokens * self.expansion)
        return min(-(-wanted // LANES), -(-self.context // LANES)) * LANES

    def init(self, weights: DraftWeights, ctx: DraftContext, hidden_BnD: jax.Array | None = None) -> KVCache:
        """Reads the prompt without its last token."""
        capacity = self.capacity(ctx.tokens.shape[1])
        heads = {"kv_heads": self.kv_heads, "head_dim": self.head_dim, "layers": self.layers_total}
        cache = kv.init(batch=ctx.tokens.shape[0], capacity=capacity, dtype=self.kv_dtype, **heads)
        text = draft_ids(weights.images, ctx)
        until_B = jnp.clip(text.length - 1, 0, min(self.context, capacity))
        rows = min(PREFILL_ROWS, capacity)

        def step(cache):
            return self._next(weights, cache, ctx, text, until_B, rows, "none")[1]

        return jax.lax.while_loop(lambda cache: (cache.length < until_B).any(), step, cache)

    def room(self, weights: DraftWeights, state: KVCache, ctx: DraftContext) -> jax.Array:
        """Up to the end of the model's context and of its cache: the last node drafted is not fed."""
        text = draft_ids(weights.images, ctx)
        room_B = min(self.context, state.capacity) - text.length + 1
        return jnp.where(text.length > 0, room_B, 0)  # nothing was read: nothing follows it

    def open(
        self, weights: DraftWeights, state: KVCache, ctx: DraftContext, live_B: jax.Array
    ) -> tuple[KVCache, jax.Array]:
        """Reads the tokens emitted since the last draft, and at least the last one."""
        text = draft_ids(weights.images, ctx)
        if weights.images is not None:  # the last token of the target may be read as nothing
            state = kv.rollback(state, jnp.maximum(text.length - 1, 0))
        until_B = jnp.where(live_B, text.length, state.length)

        def step(carry):
            cache, logits_BN = carry
            fed_B = (cache.length < until_B)[:, None]
            new_B1N, cache = self._next(weights, cache, ctx, text, until_B, CATCH_UP_ROWS, "last")
            return cache, jnp.where(fed_B, new_B1N[:, 0], logits_BN)

        logits_BN = jnp.zeros((ctx.length.shape[0], self.vocab.columns), jnp.float32)
        return jax.lax.while_loop(lambda c: (c[0].length < until_B).any(), step, (state, logits_BN))

    def close(self, weights: DraftWeights, state: KVCache, cache: KVCache, ctx: DraftContext) -> tuple[KVCache, Pytree]:
        """Its own cache, rolled back to the committed tokens; the target's as it was."""
        return kv.rollback(cache, draft_ids(weights.images, ctx).length), ctx.cache

    def keep(
        self, weights: DraftWeights, state: KVCache, ctx: DraftContext, feedback: Feedback, kept: KeptRows
    ) -> KVCache:
        """A longer length; the rows of a path are moved together."""
        return kv.commit(state, kept.count) if kept.rows is None else kv.commit_path(state, kept.rows, kept.count)

    def params(self, weights: DraftWeights, ctx: DraftContext) -> Pytree:
        return weights.params

    def _next(self, weights, cache, ctx, text: DraftIds, until_B, rows, logits):
        """Reads up to `rows` tokens of the text that the cache does not hold yet."""
        count_B = jnp.clip(until_B - cache.length, 0, rows)
        at_Bn = cache.length[:, None] + jnp.arange(rows, dtype=jnp.int32)[None]
        ids_Bn = text.at(weights.images, at_Bn)
        if weights.images is None:
            ids_Bn = self.vocab.to_draft(ids_Bn)
        out, cache = self.run(weights, ctx, cache, FedRows(ids_Bn, count_B), logits)
        return out, kv.commit(cache, count_B)


@dataclasses.dataclass(frozen=True)
class DraftModel(DrafterSpec):
    """A smaller model, of the target's family or not, with a cache of its own, its matrices whole on each device.

    Attributes:
        model: its GGUF file, a name as in model.path, or a loaded model.
        vocabulary: same, an id is the same token in both models, else they are refused; tli, only tokens whose bytes
            the target has too are drafted, for any verifier; slem, the draft's text is cut into the target's tokens,
            one-hot chains (both arXiv:2502.05202); auto, same where the vocabularies are, else tli.
        special_tokens: target goes on with the target's ids if BOS or EOS differ.
    """

    model: Annotated[
        Model | str | Path | None, instance_of("a GGUF file, a name or a loaded model", Model, str, Path), Also("path")
    ] = None
    vocabulary: Literal["auto", "same", "tli", "slem"] = "auto"
    special_tokens: Literal["target"] | None = None
    on_mesh = True

    def __post_init__(self):
        slem, drafting = self.vocabulary == "slem", self.drafting
        refuse({
            "drafter.special_tokens is for vocabularies that are otherwise the same: leave it out, since "
            f"vocabulary={self.vocabulary} brings special ids together by itself":
                self.special_tokens is not None and self.vocabulary in ("tli", "slem"),
            "drafter.vocabulary=slem drafts chains of all that the draft writes: leave tree and draft_vocab out, or "
            "choose vocabulary=tli": slem and (drafting.tree is not None or drafting.draft_vocab is not None),
        })  # fmt: skip

    def build(self, target: Model, load: Load) -> LoadedDrafter:
        if self.model is None:
            raise UserError("drafter.model: a value is needed, the draft model's GGUF file")
        model = load("model", str(self.model)) if isinstance(self.model, str | Path) else self.model
        size, slem = model.config.vocab_size, self.vocabulary == "slem"
        if self._same_ids(target, model):
            weights, columns = self.style.trim(target, model.params.output, min(size, target.config.vocab_size))
            return self._by_ids(target, model, weights, columns)
        common = common_tokens(target, model, text=slem)
        expansion = max(1.0, common.pieces_per_token)
        if slem:
            writer = self.style.chain(_source(model, size, size), target)
            drafter = StringDrafter(writer, Translator(target.tokenizer, model.tokenizer, common), expansion)
            loaded = _loaded(drafter, drafter.slots, model, DraftWeights())
        else:
            loaded = self._by_ids(target, model, *shared_weights(self.style, target, model, common), expansion)
        method, how = ("slem", "stepped") if slem else ("tli", "jitted")
        note = f"drafter.vocabulary={method}: {model.path.name} has other tokens than the target; {common.sentence()}"
        log.log(logging.WARNING if self.vocabulary == "auto" else logging.INFO, "%s", note)
        return loaded._replace(about={"vocabulary": {"method": method, "rounds": how, **common.facts()}}, notes=(note,))

    @property
    def kind(self) -> DraftKind:
        """How the tokens are drawn. Text made into tokens has no known distribution."""
        return DraftKind.ONE_HOT if self.vocabulary == "slem" else self.style.kind

    @property
    def can_draw(self) -> bool:
        return self.vocabulary != "slem"

    @property
    def files(self) -> Mapping[str, str]:
        return {"model": self.model} if isinstance(self.model, str) else {}

    def _by_ids(
        self, target: Model, model: Model, weights: DraftWeights, columns: int, expansion: float = 1.0
    ) -> LoadedDrafter:
        source = _source(model, target.config.vocab_size, columns, expansion)
        return _loaded(self.style.drafter(source, target), source.capacity, model, weights)

    def _same_ids(self, target: Model, model: Model) -> bool:
        """Whether an id is the same token in both vocabularies; UserError if it must be and is not."""
        try:
            check_compatible(
                target.tokenizer, model.tokenizer, special_tokens=self.special_tokens, where=str(model.path)
            )
        except UserError:
            if self.vocabulary == "same":
                raise
            return False
        return self.vocabulary in ("auto", "same")


def _loaded(drafter: Drafter, slots: Callable[[int], int], model: Model, weights: DraftWeights) -> LoadedDrafter:
    """The drafter, whose cache has `slots` of so many tokens of the target."""
    head = weights.head

    def weights_for(tokens: int) -> DraftWeights:
        params: Pytree = model.params_for(slots(tokens))
        return weights._replace(params=params if head is None else params._replace(output=head))

    reads = bytes_of(model.params.layers, model.params.output if head is None else head)
    return LoadedDrafter(drafter, weights_for, reads, model.config.endless_kv())


def _source(model: Model, target_size: int, columns: int, expansion: float = 1.0) -> OwnModel:
    """A draft model as a source of `columns` logits, for a target of that many ids."""
    c, unknown = model.config, model.tokenizer.unknown_id
    vocab = VocabMap(target_size, c.vocab_size, columns, 0 if unknown is None else unknown)
    sizes = c.n_layers, c.n_kv_heads, c.head_dim
    return OwnModel(vocab, model.forward, c.context_length, None, *sizes, model.cache_dtype, expansion)


def common_tokens(target: Model, draft: Model, *, text: bool = False) -> Intersection:
    """The tokens that both models have; UserError if none has a text, unless `text` goes between the models."""
    common = intersect(
        target.tokenizer, draft.tokenizer, target_size=target.config.vocab_size, draft_size=draft.config.vocab_size
    )
    if not common.texts and not text:
        raise UserError(
            f"{draft.path} has no token in common with the target: take a draft model whose vocabulary overlaps, or a "
            "drafter without a model (drafter=prompt_lookup)"
        )
    return common


def shared_weights(style: Drafting, target: Model, draft: Model, common: Intersection) -> tuple[DraftWeights, int]:
    """Weights of a draft by token-level intersection, and how many tokens it scores.

    The rows of the draft's output matrix for the tokens that both have: the distribution of these logits is q
    restricted to them and normalised anew, before the draft's temperature and truncation see it. UserError if no id of
    `drafter.draft_vocab` is shared.
    """
    wanted, keep = style.ids(target, target.config.vocab_size), np.ones(len(common.target_ids), bool)
    if wanted is not None:
        keep = np.isin(common.target_ids, wanted)
    ids, own = common.target_ids[keep], common.draft_ids[keep]
    if not len(ids):
        raise UserError(f"drafter.draft_vocab holds no token that {draft.path} has too")
    bos = draft.tokenizer.bos_id if draft.tokenizer.add_bos else None
    images = Images(jnp.asarray(common.starts), jnp.asarray(common.pieces), jnp.int32(-1 if bos is None else bos))
    return DraftWeights(head=take_rows(draft.params.output, own), ids=jnp.asarray(ids), images=images), len(ids)
