"""The target drafts for itself, with fewer layers or neurons and on its own cache."""

import dataclasses
from collections.abc import Callable
from typing import Annotated, Literal

import jax

from specsparse.engine.cache import KVCache
from specsparse.engine.llama import ForwardFn
from specsparse.engine.model import Model
from specsparse.engine.pytree import Pytree
from specsparse.errors import UserError, refuse
from specsparse.speculative.base import DraftContext, Feedback
from specsparse.speculative.drafters.sources import DraftWeights, KeptRows, ModelSource, VocabMap
from specsparse.speculative.drafters.spec import DrafterSpec, Drafting, Load, LoadedDrafter, bytes_of, ids_of
from specsparse.support.options import Range, Read


@dataclasses.dataclass(frozen=True)
class TargetLayers(ModelSource):
    """The target with some of its layers or neurons left out, on the target's cache: no second model and no state.

    Rows are written at and beyond the cache's length, where the verification overwrites them (Draft & Verify, Zhang et
    al., arXiv:2309.08168).
    """

    def init(self, weights: DraftWeights, ctx: DraftContext, hidden_BnD: jax.Array | None = None) -> None:
        return None

    def room(self, weights: DraftWeights, state: None, ctx: DraftContext) -> jax.Array:
        return min(self.context, ctx.cache.capacity) - ctx.length + 1

    def open(
        self, weights: DraftWeights, state: None, ctx: DraftContext, live_B: jax.Array
    ) -> tuple[KVCache, jax.Array]:
        """Runs the last emitted token, the only one that the target has not seen."""
        return self.feed_last(weights, ctx, ctx.cache, live_B)

    def close(self, weights: DraftWeights, state: None, cache: KVCache, ctx: DraftContext) -> tuple[None, KVCache]:
        return None, cache._replace(length=ctx.cache.length)

    def keep(self, weights: DraftWeights, state: None, ctx: DraftContext, feedback: Feedback, kept: KeptRows) -> None:
        """The target's own pass decides what its cache holds."""
        return None

    def params(self, weights: DraftWeights, ctx: DraftContext) -> Pytree:
        """All of the target's or those of fewer neurons, with the trimmed head if there is one."""
        params = ctx.params if weights.params is None else weights.params
        return params if weights.head is None else params._replace(output=weights.head)


@dataclasses.dataclass(frozen=True)
class LayerSkip(DrafterSpec):
    """Some of the target's own layers, on the target's cache (Draft & Verify, arXiv:2309.08168).

    Attributes:
        layers: those that run; by default the first and the last quarter, and every other one between.
    """

    layers: tuple[int, ...] | None = None

    @property
    def on_mesh(self) -> bool:
        """Unless it cuts rows of its own out of the target's output matrix."""
        return self.drafting.draft_vocab is None

    def build(self, target: Model, load: Load) -> LoadedDrafter:
        c = target.config
        layers = default_layers(c.n_layers) if self.layers is None else self.layers
        if not layers or sorted(set(layers)) != list(layers) or layers[0] < 0 or layers[-1] >= c.n_layers:
            raise UserError(
                f"drafter.layers={list(layers)} must be at least one layer, ascending, in 0..{c.n_layers - 1}"
            )
        own = [target.params.layers[layer] for layer in layers]
        return on_target(self.style, target, target.forward, layers, own)


@dataclasses.dataclass(frozen=True)
class SparseSelf(DrafterSpec):
    """The target with few of its neurons, on the target's cache.

    Attributes:
        rule: hot, one set with the most energy on a text, as a smaller dense FFN; gate, each token's largest
            |act(gate)| of a dense target; own, a sparse target's own predictors with another threshold.
        share: of the neurons, for hot and gate; by default 0.5.
        threshold: for own.
        text: token ids (a list or a file) to choose by; by default a text that the target writes itself.
    """

    rule: Literal["hot", "gate", "own"] = "hot"
    share: Annotated[float, Range(1e-3, 1)] | None = None
    threshold: float | None = None
    text: Annotated[tuple[int, ...] | None, Read(ids_of, "a list of ids or a file of ids")] = None

    def __post_init__(self):
        own = self.rule == "own"
        refuse({
            "drafter.threshold goes with rule=own, which needs it": own != (self.threshold is not None),
            "drafter.share goes with rule=hot and rule=gate": own and self.share is not None,
            "drafter.text goes with rule=hot and rule=gate": own and self.text is not None,
            "drafter.text holds no ids": self.text == (),
        })  # fmt: skip

    def build(self, target: Model, load: Load) -> LoadedDrafter:
        own = {"rule": self.rule, "share": self.share, "threshold": self.threshold, "text": self.text}
        fewer = load("fewer_neurons", {key: value for key, value in own.items() if value is not None})
        return on_target(self.style, target, fewer.forward, None, fewer.params.layers, params=fewer.params_for)


def default_layers(count: int) -> tuple[int, ...]:
    """The first and the last quarter, and every other layer between them."""
    edge = max(1, count // 4)
    return tuple(i for i in range(count) if i < edge or i >= count - edge or (i - edge) % 2)


def on_target(
    style: Drafting, target: Model, forward: ForwardFn, layers: tuple[int, ...] | None, read: Pytree,
    *, params: Callable[[int], Pytree] = lambda capacity: None,
) -> LoadedDrafter:  # fmt: skip
    """The drafter that is a part of the target, on the target's cache.

    Args:
        forward: of the part.
        layers: those that run, None for all.
        read: the weights that drafting a token reads, without the output matrix.
        params: of the part by capacity, None for the target's own.
    """
    c = target.config
    weights, columns = style.trim(target, target.params.output, c.vocab_size)
    source = TargetLayers(VocabMap(c.vocab_size, c.vocab_size, columns), forward, c.context_length, layers)
    reads = bytes_of(read, target.params.output if weights.head is None else weights.head)

    def weights_for(capacity: int) -> DraftWeights:
        return weights._replace(params=params(capacity))

    return LoadedDrafter(style.drafter(source, target), weights_for, reads, c.endless_kv(layers))
