"""Drafters that need a model: how they draft (`Drafting`), what is asked for (`DrafterSpec`), and what it builds."""

import dataclasses
import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine.model import Model
from specsparse.engine.sampling.params import SamplingParams
from specsparse.errors import UserError, refuse
from specsparse.kernels import Matrix, take_rows
from specsparse.speculative.base import MAX_GAMMA, SHORT_GAMMA, AnyDrafter, Drafter, DraftKind, MaxNodes
from specsparse.speculative.base import LoadedDrafter as LoadedDrafter  # what `build` returns
from specsparse.speculative.drafters.model_drafter import ModelDrafter, TreeDrafter
from specsparse.speculative.drafters.sources import DraftSampling, DraftWeights, Source
from specsparse.speculative.policies.base import Fixed, PMin, Policy, check_policy
from specsparse.speculative.trees import get_tree
from specsparse.speculative.trees.base import TreeShape
from specsparse.support.options import Also, Inline, Range, Read, instance_of


def ids_of(value: str | Path | Iterable) -> tuple[int, ...]:
    """Token ids of a list, or of a text file."""
    items = Path(value).read_text().split() if isinstance(value, str | Path) else value
    return tuple(int(item) for item in items)


def _vocab(value: int | str | Path | Iterable) -> int | tuple[int, ...]:
    """The first so many ids, or those of a list or file."""
    if not isinstance(value, int):
        return ids_of(value)
    if isinstance(value, bool) or value < 1:
        raise ValueError
    return value


Probability = Annotated[float, Range(0, 1)]
Temperature = Annotated[float, Range(0, 1e4), Also("draft_temperature")]
PMinOption = Annotated[float, Range(0, 1), Also("draft_p_min")]
Vocab = Annotated[int | tuple[int, ...] | None, Read(_vocab, "a number, a list of ids or a file of ids")]
PolicyOption = Annotated[Policy | None, instance_of("a Policy", Policy)]


@dataclasses.dataclass(frozen=True)
class Drafting:
    """How a model drafts, whatever model it is.

    Attributes:
        max_nodes: tokens drafted at most; by default a few, or what the policy that pays allows.
        temperature: of the draft: 0 for argmax drafts, for greedy, match and delta; above, drawn from q, for match,
            token and block.
        top_k, top_p, min_p: truncation of the draft's distribution, as in `SamplingParams`.
        draw: argmax (also greedy) or sampled (also probabilistic); by default as the temperature says.
        p_min: stop before a distribution whose top probability (over its top ten) is under it.
        n_min: drop drafts that are shorter; argmax drafts only.
        draft_vocab: score these ids only: a number N (the first N, and those that end a text), a list, or a file of
            ids; by default all, or those of the head's file.
        policy: a `Policy`, instead of `max_nodes`, `p_min` and `n_min`.
        tree: a `TreeShape` or the name of one, for drafts that branch.
    """

    max_nodes: MaxNodes | None = None
    temperature: Temperature = 0.0
    top_k: Annotated[int, Range(-1, 2**31 - 1)] = -1
    top_p: Probability = 1.0
    min_p: Probability = 0.0
    draw: Annotated[Literal["argmax", "greedy", "sampled", "probabilistic"] | None, Also("draft_sample_method")] = None
    p_min: PMinOption = 0.0
    n_min: Annotated[int, Range(0, MAX_GAMMA), Also("draft_min")] = 0
    draft_vocab: Vocab = None
    policy: PolicyOption = None
    tree: Annotated[TreeShape | str | None, instance_of("a TreeShape or the name of one", TreeShape, str)] = None

    def __post_init__(self):
        shape, greedy = self.shape, self.sampling.greedy
        check_policy(self.length_policy, self.kind)
        outcome = {DraftKind.IID: "are all equal", DraftKind.WOR: "after the first have no mass"}.get(self.kind)
        refuse({
            "drafter.p_min and drafter.n_min are for drafts of a fixed length: choose policy=fixed too":
                self.policy is not None and (self.p_min > 0 or self.n_min > 0),
            "p_min, confidence and entropy end chains; a tree has options of its own":
                shape is not None and self.length_policy.needs,
            f"siblings drawn as by tree=sampled_{self.kind.value} {outcome} at drafter.temperature=0: set it above 0, "
            "or choose tree=static": outcome and shape is not None and shape.branches and greedy,
        })  # fmt: skip

    @functools.cached_property
    def shape(self) -> TreeShape | None:
        """The tree's shape, which says how to draw; None for a chain. With a tree the policy is a budget."""
        return get_tree(self.tree) if isinstance(self.tree, str) else self.tree

    @functools.cached_property
    def length_policy(self) -> Policy:
        """How many tokens, and when to stop."""
        if self.policy is not None:
            return self.policy
        nodes = self.shape.max_nodes if self.shape is not None else self.max_nodes or SHORT_GAMMA
        return PMin(nodes, self.n_min, self.p_min) if self.p_min > 0 else Fixed(nodes, self.n_min)

    @property
    def free(self) -> bool:
        """Whether no option says how long drafts are, so that the policy may suit the target and the machine."""
        return self.max_nodes is self.policy is self.shape is None and self.p_min == self.n_min == 0

    @functools.cached_property
    def sampling(self) -> SamplingParams:
        """The draft's own temperature and truncation, other than the target's."""
        return SamplingParams(temperature=self.temperature or 0.0, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p)

    @property
    def kind(self) -> DraftKind:
        if self.shape is not None:
            return self.shape.kind
        drawn = self.draw in ("sampled", "probabilistic") if self.draw else not self.sampling.greedy
        return DraftKind.SAMPLED if drawn else DraftKind.ONE_HOT

    def ids(self, target: Model, available: int) -> np.ndarray | None:
        """The ids to score, ascending, of those below `available`; None for all."""
        if self.draft_vocab is None or (isinstance(self.draft_vocab, int) and self.draft_vocab >= available):
            return None
        if isinstance(self.draft_vocab, int):
            stop_ids = {i for i in target.tokenizer.stop_ids if i < available}
            wanted = stop_ids.union(range(min(self.draft_vocab, available)))
        else:
            wanted = set(self.draft_vocab)
        outside = [i for i in wanted if not 0 <= i < available]
        if outside or not wanted:
            raise UserError(f"drafter.draft_vocab holds {outside[:1] or 'no ids'}; ids lie in 0..{available - 1}")
        return np.array(sorted(wanted), np.int32)

    def drafter(self, source: Source, target: Model) -> Drafter:
        """The drafter with that source of logits, for that target."""
        if self.shape is None:
            return self.chain(source, target)
        if self.shape.independent and not source.independent:
            raise UserError(
                "tree=ddtree needs distributions that do not depend on the draft so far, as drafter=dflash has; "
                "choose tree=dynamic for this drafter"
            )
        return TreeDrafter(source, self._sampling_of(source, target), self.shape)

    def chain(self, source: Source, target: Model) -> ModelDrafter:
        return ModelDrafter(source, self._sampling_of(source, target), self.length_policy.gamma, self.kind)

    def _sampling_of(self, source: Source, target: Model) -> DraftSampling:
        return DraftSampling(self.sampling, source.vocab.columns, target.sampling_kernels)

    def trim(
        self, target: Model, output: Matrix, columns: int, *, rows: np.ndarray | None = None
    ) -> tuple[DraftWeights, int]:
        """The rows of an output matrix that are scored, and how many; without trimming no matrix and `columns`.

        `rows`: the ids of its rows if row i is not id i: the matrix then always comes back, its ids ascending.
        """
        ids = self.ids(target, columns)
        if rows is not None:
            order = np.argsort(rows)
            taken = order if ids is None else order[np.isin(rows[order], ids)]
            if not len(taken):
                raise UserError("drafter.draft_vocab holds none of the ids that the head scores")
            ids = rows[taken].astype(np.int32)
        elif ids is None:
            return DraftWeights(), columns
        else:
            taken = ids
        return DraftWeights(head=take_rows(output, taken), ids=jnp.asarray(ids)), len(ids)


@dataclasses.dataclass(frozen=True)
class HeadDrafting(Drafting):
    """How a head drafts by itself: `Drafting` with another default.

    Attributes:
        temperature: of the draft: 0 for argmax; by default 0, or three quarters of the target's under verifier=token
            and block, which draws drafts from q.
    """

    temperature: Temperature | None = None  # pyrefly: ignore[bad-override]  # `Drafting` takes it, its own option not


@dataclasses.dataclass(frozen=True)
class ChainDrafting:
    """How a model beside a lookup drafts.

    Attributes:
        max_nodes: tokens drafted at most; by default a few, or what the policy that pays allows.
        temperature: of the draft: 0 for argmax; by default 0, or three quarters of the target's under verifier=token
            and block, which draws drafts from q.
        p_min: stop before a distribution whose top probability (over its top ten) is under it; by default 0.6 where the
            length is fixed, else 0.
        draft_vocab: score these ids only; by default those of the head's file.
        policy: a `Policy`, instead of `max_nodes` and `p_min`.
    """

    max_nodes: MaxNodes | None = None
    temperature: Temperature | None = None
    p_min: PMinOption | None = None
    draft_vocab: Vocab = None
    policy: PolicyOption = None


How = TypeVar("How", Drafting, ChainDrafting)


def drafting_with(how: How, policy: Policy) -> How:
    """The same with a policy, which says how long drafts are."""
    lengths = ("max_nodes", "p_min", "n_min")
    defaults = {field.name: field.default for field in dataclasses.fields(how) if field.name in lengths}
    return dataclasses.replace(how, policy=policy, **defaults)


class Load(Protocol):
    """Loads the parts of a drafter; injected, since loading lies above this room."""

    def __call__(self, kind: str, spec: Any) -> Any:
        """The loaded part.

        Args:
            kind: "model": a draft model on the target's kernels; `spec` is a path or a name. "fewer_neurons": the
                target with fewer neurons; `spec` are options of `powerinfer.fewer.with_fewer_neurons`.
                `module:function`: calls it with the file or folder that `spec` names.
        """


@dataclasses.dataclass(frozen=True)
class DrafterSpec(AnyDrafter):
    """A drafter that needs a model: its options, and how to build it.

    Derive a drafter that needs the target's model from it: the fields of a frozen dataclass are its options, beside
    those of `Drafting`, and `build` makes the drafter.

    Attributes:
        drafting: how it drafts, as far as that is the same for all.
    """

    drafting: Annotated[Drafting, Inline()] = dataclasses.field(default=Drafting(), kw_only=True)

    @property
    def on_mesh(self) -> bool:
        """Whether the target's matrices may be divided among devices: only its forward function reads them."""
        return False

    @property
    def can_draw(self) -> bool:
        return True

    @property
    def style(self) -> Drafting:
        return self.drafting

    @property
    def kind(self) -> DraftKind:
        return self.style.kind

    @property
    def tree(self) -> bool:
        return self.style.shape is not None and self.style.shape.branches

    @property
    def max_nodes(self) -> int:
        return self.style.length_policy.gamma if self.style.shape is None else self.style.shape.max_nodes

    @property
    def length_policy(self) -> Policy:
        return self.style.length_policy

    @property
    def any_length(self) -> bool:
        return self.style.free

    def with_policy(self, policy: Policy) -> Self:
        return dataclasses.replace(self, drafting=drafting_with(self.drafting, policy))

    def drawing_at(self, temperature: float) -> Self:
        if self.drafting.temperature is not None:
            return self
        return dataclasses.replace(self, drafting=dataclasses.replace(self.drafting, temperature=temperature))


def bytes_of(*weights: object) -> int:
    """Bytes of all arrays in pytrees of weights."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
