"""Drafters that need a model: a plan says what is wanted, `bind` makes the drafter once the target is there."""

import abc
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine.llama import make_layers
from specsparse.engine.model import Model
from specsparse.engine.sampling.params import SamplingParams
from specsparse.engine.weights import Params
from specsparse.errors import UserError
from specsparse.kernels.packing.rows import take_rows
from specsparse.speculative.base import Drafter, DraftKind
from specsparse.speculative.draft_law import DraftLaw
from specsparse.speculative.drafters.either import Either
from specsparse.speculative.drafters.head_file import find, read_head
from specsparse.speculative.drafters.head_source import HeadSource
from specsparse.speculative.drafters.model import ModelDrafter
from specsparse.speculative.drafters.sources import DraftWeights, OwnModel, Source, TargetLayers, VocabMap
from specsparse.speculative.drafters.tree import TreeDrafter
from specsparse.speculative.drafters.with_policy import with_policy
from specsparse.speculative.policies.base import Policy, check_policy
from specsparse.speculative.trees.base import TreeShape
from specsparse.speculative.vocab import check_compatible


class Bound(NamedTuple):
    """A drafter ready to run.

    Attributes:
        drafter: static.
        weights: cache capacity of the target -> the drafter's weights.
        bytes_per_token: of weights that drafting a token reads.
    """

    drafter: Drafter
    weights: Callable[[int], Any]
    bytes_per_token: int = 0

    def under(self, policy: Policy) -> "Bound":
        """The same drafter under that policy."""
        return self._replace(drafter=with_policy(self.drafter, policy))


class MakeModel(NamedTuple):
    """How a plan gets the model that drafts; injected, since loading lies above this room.

    Attributes:
        load: name or path -> the draft model, on the target's backend.
        fewer: (target, options of `powerinfer.ffn.fewer.with_fewer_neurons`) -> the target with fewer neurons.
    """

    load: Callable[[str], Model]
    fewer: Callable[..., Model]


@dataclasses.dataclass(frozen=True)
class Style:
    """How a model drafter drafts, whatever model it has. Hashable.

    Attributes:
        policy: how many tokens, and when to stop.
        sampling: the draft's own temperature and truncation.
        draw: how the tokens of a chain are drawn.
        tree: shape of the drafts, None for a chain. It draws as it says, and the policy is then a budget.
        vocab: ids to score (FR-Spec's trimming), None for all.
        first: score the ids below it (and those that end a text) instead, None for all.
        free: nobody said how long drafts are: `policy` may be replaced by one that suits the target and the machine.
    """

    policy: Policy
    sampling: SamplingParams = dataclasses.field(default_factory=lambda: SamplingParams(temperature=0.0))
    draw: DraftKind = DraftKind.ONE_HOT
    tree: TreeShape | None = None
    vocab: tuple[int, ...] | None = None
    first: int | None = None
    free: bool = False

    def __post_init__(self):
        check_policy(self.policy, self.kind)
        if self.tree is not None and self.policy.needs:
            raise UserError("p_min, confidence and entropy end chains; a tree has options of its own")
        self._check_siblings()

    @property
    def kind(self) -> DraftKind:
        """How the tokens are drawn."""
        return self.draw if self.tree is None else self.tree.kind

    def _check_siblings(self) -> None:
        """Refuses drawn siblings at temperature 0, where one token has all the mass."""
        outcome = {DraftKind.IID: "are all equal", DraftKind.WOR: "after the first have no mass"}.get(self.kind)
        if outcome and self.tree is not None and self.tree.branches and self.sampling.greedy:
            raise UserError(
                f"siblings drawn as by tree=sampled_{self.kind.value} {outcome} at "
                f"drafter.temperature={self.sampling.temperature:g}: set it above 0, or choose tree=static"
            )

    def under(self, policy: Policy) -> "Style":
        """The same with that policy, which somebody asked for."""
        return dataclasses.replace(self, policy=policy, free=False)

    def ids(self, target: Model, available: int) -> np.ndarray | None:
        """The ids to score, ascending, of those below `available`; None for all."""
        if self.vocab is not None:
            wanted = set(self.vocab)
        elif self.first is not None:
            wanted = set(range(min(self.first, available))) | {i for i in target.tokenizer.stop_ids if i < available}
        else:
            return None
        outside = [i for i in wanted if not 0 <= i < available]
        if outside or not wanted:
            raise UserError(f"drafter.draft_vocab holds {outside[:1] or 'no ids'}; ids lie in 0..{available - 1}")
        return np.array(sorted(wanted), np.int32)


class DrafterPlan(abc.ABC):
    """A drafter whose model is not there yet: what is known of it beforehand, and how to make it."""

    @property
    @abc.abstractmethod
    def style(self) -> Style:
        """How it drafts."""

    @property
    def kind(self) -> DraftKind:
        """How the tokens are drawn."""
        return self.style.kind

    @property
    def tree(self) -> bool:
        """Whether drafts branch."""
        return self.style.tree is not None and self.style.tree.branches

    @property
    def max_nodes(self) -> int:
        """K."""
        return self.style.policy.gamma if self.style.tree is None else self.style.tree.max_nodes

    @property
    def on_mesh(self) -> bool:
        """Whether the target's matrices may be divided among devices: nothing reads them but its forward function."""
        return False

    @abc.abstractmethod
    def under(self, policy: Policy) -> "DrafterPlan":
        """The same with that policy."""

    def bind(self, target: Model, make: MakeModel) -> Bound:
        """The drafter for this target, under the policy of its style."""
        return self.prepare(target, make).under(self.style.policy)

    @abc.abstractmethod
    def prepare(self, target: Model, make: MakeModel) -> Bound:
        """The drafter for this target; `make` makes the model that drafts."""


@dataclasses.dataclass(frozen=True)
class ModelPlan(DrafterPlan):
    """A draft model with a cache of its own.

    Attributes:
        how: how it drafts.
        model: the draft model, or its name or path.
        special_tokens: "target" goes on where special ids differ, see `speculative.vocab`.
    """

    how: Style
    model: Any = None
    special_tokens: str | None = None

    @property
    def style(self) -> Style:
        """How it drafts."""
        return self.how

    @property
    def on_mesh(self) -> bool:
        """Its matrices are its own, whole on each device."""
        return True

    def under(self, policy: Policy) -> DrafterPlan:
        """The same with that policy."""
        return dataclasses.replace(self, how=self.how.under(policy))

    def prepare(self, target: Model, make: MakeModel) -> Bound:
        """Loads the draft model where it is a path, and compares the vocabularies."""
        if self.model is None:
            raise UserError("drafter.model: a value is needed, the draft model's GGUF file")
        model = make.load(str(self.model)) if isinstance(self.model, str | Path) else self.model
        check_compatible(target.tokenizer, model.tokenizer, special_tokens=self.special_tokens, where=str(model.path))
        c = model.config
        columns = min(c.vocab_size, target.config.vocab_size)
        weights, columns = _trim(self.how, target, model.params, columns)
        unknown = model.tokenizer.unknown_id
        vocab = VocabMap(target.config.vocab_size, c.vocab_size, columns, 0 if unknown is None else unknown)
        source = OwnModel(
            model.forward, vocab, c.context_length, None, c.n_layers, c.n_kv_heads, c.head_dim, model.cache_dtype
        )

        def weights_for(capacity: int) -> DraftWeights:
            params = model.params_for(source.capacity(capacity))
            return weights._replace(params=params if weights.head is None else params._replace(output=weights.head))

        reads = _bytes(model.params.layers, model.params.output if weights.head is None else weights.head)
        return Bound(_drafter(self.how, source, target), weights_for, reads)


@dataclasses.dataclass(frozen=True)
class LayerSkipPlan(DrafterPlan):
    """Some of the target's layers, on its own cache.

    Attributes:
        how: how it drafts.
        layers: those that run; None for `default_layers`.
    """

    how: Style
    layers: tuple[int, ...] | None = None

    @property
    def style(self) -> Style:
        """How it drafts."""
        return self.how

    @property
    def on_mesh(self) -> bool:
        """Unless it cuts rows of its own out of the target's output matrix."""
        return self.how.vocab is None and self.how.first is None

    def under(self, policy: Policy) -> DrafterPlan:
        """The same with that policy."""
        return dataclasses.replace(self, how=self.how.under(policy))

    def prepare(self, target: Model, make: MakeModel) -> Bound:
        """Checks the layers; no model is loaded."""
        c = target.config
        layers = default_layers(c.n_layers) if self.layers is None else self.layers
        if not layers or sorted(set(layers)) != list(layers) or layers[0] < 0 or layers[-1] >= c.n_layers:
            raise UserError(
                f"drafter.layers={list(layers)} must be at least one layer, ascending, in 0..{c.n_layers - 1}"
            )
        weights, columns = _trim(self.how, target, target.params, c.vocab_size)
        vocab = VocabMap(c.vocab_size, c.vocab_size, columns)
        source = TargetLayers(target.forward, vocab, c.context_length, layers)
        own = [target.params.layers[layer] for layer in layers]
        reads = _bytes(own, target.params.output if weights.head is None else weights.head)
        return Bound(_drafter(self.how, source, target), lambda capacity: weights, reads)


@dataclasses.dataclass(frozen=True)
class SparseSelfPlan(DrafterPlan):
    """The target with few of its neurons, on its own cache.

    Attributes:
        how: how it drafts.
        rule, share, threshold, text: which neurons, see `powerinfer.ffn.fewer.with_fewer_neurons`; None leaves its
            defaults.
    """

    how: Style
    rule: str = "hot"
    share: float | None = None
    threshold: float | None = None
    text: tuple[int, ...] | None = None

    @property
    def style(self) -> Style:
        """How it drafts."""
        return self.how

    def under(self, policy: Policy) -> DrafterPlan:
        """The same with that policy."""
        return dataclasses.replace(self, how=self.how.under(policy))

    def prepare(self, target: Model, make: MakeModel) -> Bound:
        """Makes the target with fewer neurons; no model is loaded."""
        own = {"rule": self.rule, "share": self.share, "threshold": self.threshold, "text": self.text}
        fewer = make.fewer(target, **{key: value for key, value in own.items() if value is not None})
        c = target.config
        weights, columns = _trim(self.how, target, target.params, c.vocab_size)
        source = TargetLayers(fewer.forward, VocabMap(c.vocab_size, c.vocab_size, columns), c.context_length, None)
        drafter = _drafter(self.how, source, target)
        reads = _bytes(fewer.params.layers, target.params.output if weights.head is None else weights.head)
        return Bound(drafter, lambda capacity: weights._replace(params=fewer.params_for(capacity)), reads)


@dataclasses.dataclass(frozen=True)
class HeadPlan(DrafterPlan):
    """A head on the target's features, with the target's embedding and output matrix.

    Attributes:
        how: how it drafts; without ids of its own it scores those of the file.
        head: a file, the name of a shipped head, or None for the shipped one that was trained for the target.
    """

    how: Style
    head: str | None = None

    @property
    def style(self) -> Style:
        """How it drafts."""
        return self.how

    def under(self, policy: Policy) -> DrafterPlan:
        """The same with that policy."""
        return dataclasses.replace(self, how=self.how.under(policy))

    def prepare(self, target: Model, make: MakeModel) -> Bound:
        """Reads the head's file; no model is loaded."""
        c = target.config
        found = read_head(find(self.head, target.params.output_norm), c, floats=target.kernels.name != "native")
        how = self.how
        if how.vocab is None and how.first is None:
            how = dataclasses.replace(how, vocab=tuple(found.ids.tolist()))
        weights, columns = _trim(how, target, target.params, c.vocab_size)
        source = HeadSource(
            vocab=VocabMap(c.vocab_size, c.vocab_size, columns),
            kernels=target.kernels,
            layers=make_layers(c, target.kernels),
            eps=c.norm_eps,
            context=c.context_length,
            width=c.d_model,
            kv_heads=c.n_kv_heads,
            head_dim=c.head_dim,
            kv_dtype=target.cache_dtype,
            tree_rows=0 if how.tree is None else how.tree.max_rows,
        )
        weights = weights._replace(params=found.params)
        reads = _bytes(found.params.layer, found.params.fc_token, found.params.fc_hidden, weights.head)
        return Bound(_drafter(how, source, target), lambda capacity: weights, reads)


@dataclasses.dataclass(frozen=True)
class LookupHeadPlan(DrafterPlan):
    """Prompt lookup where the text repeats itself, else a head.

    Attributes:
        lookup: what drafts first.
        head: what drafts where that finds nothing.
    """

    lookup: Drafter
    head: HeadPlan

    @property
    def style(self) -> Style:
        """The head's."""
        return self.head.style

    @property
    def max_nodes(self) -> int:
        """K of the two."""
        return max(self.lookup.max_nodes, self.head.max_nodes)

    def under(self, policy: Policy) -> DrafterPlan:
        """The same with that policy."""
        return dataclasses.replace(self, head=self.head.under(policy))

    def prepare(self, target: Model, make: MakeModel) -> Bound:
        """Reads the head's file."""
        bound = self.head.prepare(target, make)
        return bound._replace(drafter=Either(self.lookup, bound.drafter))


def default_layers(count: int) -> tuple[int, ...]:
    """The first and the last quarter, and every other layer between them."""
    edge = max(1, count // 4)
    return tuple(i for i in range(count) if i < edge or i >= count - edge or (i - edge) % 2)


def read_ids(value: Any) -> tuple[int | None, tuple[int, ...] | None]:
    """`draft_vocab` as (first N ids, or None) and (ids, or None): a number, a list, or a text file of ids.

    Raises:
        UserError: none of these.
    """
    if value is None:
        return None, None
    if isinstance(value, bool):
        raise UserError(f"drafter.draft_vocab={value}: a number, a list of ids or a file of ids is needed")
    if isinstance(value, int):
        if value < 1:
            raise UserError(f"drafter.draft_vocab={value} must be at least 1")
        return value, None
    return None, read_id_list(value, "draft_vocab", "a number, a list of ids or a file of ids")


def read_id_list(value: Any, option: str, wanted: str = "a list of ids or a file of ids") -> tuple[int, ...]:
    """Ids of a list or a text file.

    Raises:
        UserError: the value of that option is neither.
    """
    try:
        items: Sequence[Any] = Path(value).read_text().split() if isinstance(value, str | Path) else list(value)
        return tuple(int(item) for item in items)
    except (OSError, TypeError, ValueError) as error:
        raise UserError(f"drafter.{option}={value!s:.60}: {wanted} is needed") from error


def _trim(how: Style, target: Model, params: Params, columns: int) -> tuple[DraftWeights, int]:
    """Weights with a trimmed head and its columns; without trimming none and `columns`."""
    ids = how.ids(target, columns)
    if ids is None:
        return DraftWeights(), columns
    place = np.full((target.config.vocab_size,), len(ids), np.int32)
    place[ids] = np.arange(len(ids))
    head = take_rows(params.output, ids)
    return DraftWeights(head=head, ids=jnp.asarray(ids), place=jnp.asarray(place)), len(ids)


def _bytes(*weights: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(weights))


def _drafter(how: Style, source: Source, target: Model) -> Drafter:
    law = DraftLaw(how.sampling, source.vocab.columns, target.sampling_kernels)
    if how.tree is not None:
        return TreeDrafter(source, law, how.tree)
    return ModelDrafter(source, law, how.policy, how.draw)
