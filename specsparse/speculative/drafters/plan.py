"""Drafters that need a model: a plan says what is wanted, `prepare` makes the drafter once the target is there."""

import abc
import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, NamedTuple, Protocol, Self

import jax

from specsparse.engine.model import Model
from specsparse.engine.pytree import Pytree
from specsparse.speculative.base import Drafter, DraftKind
from specsparse.speculative.drafters.options import Drafting, under
from specsparse.speculative.drafters.style import Style
from specsparse.speculative.policies.base import Policy
from specsparse.support.options import Inline


class Bound(NamedTuple):
    """A drafter ready to run.

    Attributes:
        drafter: static.
        weights: cache capacity of the target -> the drafter's weights.
        bytes_per_token: of weights that drafting a token reads.
        about: what records say of it, as plain values by name, such as how two vocabularies overlap.
        notes: the same in lines.
    """

    drafter: Drafter
    weights: Callable[[int], Pytree]
    bytes_per_token: int = 0
    about: Mapping[str, object] = MappingProxyType({})
    notes: tuple[str, ...] = ()


class Load(Protocol):
    """Gets what a drafter is made of; injected, since loading lies above this room."""

    def __call__(self, kind: str, spec: Any) -> Any:
        """What `spec` names.

        Args:
            kind: "model": a draft model on the target's kernels, of a path or a name. "fewer_neurons": the target with
                fewer neurons, of the options of `powerinfer.fewer.with_fewer_neurons`. `module:function`: what that
                function reads of a file or folder, which `spec` says as a path, a name of the catalogue or of the Hub.
            spec: see `kind`.
        """


@dataclasses.dataclass(frozen=True)
class DrafterPlan(abc.ABC):
    """A drafter whose model is not there yet: what is known of it beforehand, and how to make it.

    Derive from it what drafts with the target's model: the fields of a frozen dataclass are its options, beside those
    of `options.Drafting`, and `prepare` makes the drafter.

    Attributes:
        drafting: how it drafts, as far as that is the same for all.
        on_mesh: whether the target's matrices may be divided among devices: only its forward function reads them.
    """

    drafting: Annotated[Drafting, Inline()] = dataclasses.field(default=Drafting(), kw_only=True)
    on_mesh: ClassVar[bool] = False

    def __post_init__(self):
        checked = getattr(super(), "__post_init__", None)  # of the options, where they have one
        if checked is not None:
            checked()
        assert self.style  # options that exclude each other are found before a model is loaded

    @functools.cached_property
    def style(self) -> Style:
        """How it drafts."""
        return Style.of(self.drafting)

    @property
    def kind(self) -> DraftKind:
        """How the tokens are drawn."""
        return self.style.kind

    @property
    def can_draw(self) -> bool:
        """Whether drafts are drawn from laws that a verifier can weigh, once a temperature above 0 says so."""
        return True

    @property
    def files(self) -> Mapping[str, str]:
        """Options that name a file or a name of the catalogue, and what they say: it must be there before a run."""
        return {}

    @property
    def tree(self) -> bool:
        """Whether drafts branch."""
        return self.style.tree is not None and self.style.tree.branches

    @property
    def max_nodes(self) -> int:
        """K."""
        return self.style.policy.gamma if self.style.tree is None else self.style.tree.max_nodes

    def under(self, policy: Policy) -> Self:
        """The same with that policy, which somebody asked for."""
        return dataclasses.replace(self, drafting=under(self.drafting, policy))

    @abc.abstractmethod
    def prepare(self, target: Model, load: Load) -> Bound:
        """The drafter for this target, and its weights; the policy is put on it by `runtime.method.load_drafter`."""


def bytes_of(*weights: object) -> int:
    """Of all arrays in pytrees of weights."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
