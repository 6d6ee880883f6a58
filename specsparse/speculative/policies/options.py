"""The options of the built-in draft-length policies; imports no jax, so that a mistyped one is answered at once."""

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from specsparse.speculative.gamma import GAMMA_NAMES, MAX_GAMMA, SHORT_GAMMA
from specsparse.support.options import Also, Count, Positive, Range, Size

DEFAULT_GAMMA = 7
"""8 positions a forward pass."""
KEPT = "kept"
"""Value of `v` that asks for the times that were kept on this machine."""

Gamma = Annotated[int, Range(1, MAX_GAMMA), Also(*(name for name in GAMMA_NAMES if name != "gamma"))]
"""Most tokens to draft in a round."""
Unit = Annotated[float, Range(0, 1)]
Times = tuple[Positive, ...]


@dataclass(frozen=True)
class PolicyOptions:
    """What all policies have.

    Attributes:
        gamma: tokens to draft in a round, at most.
    """

    gamma: Gamma = DEFAULT_GAMMA

    def over_tree(self, nodes: int) -> Self:
        """The same for drafts that are trees of so many nodes; by default as for chains."""
        return self


@dataclass(frozen=True)
class FixedOptions(PolicyOptions):
    """The same number of proposed tokens every round.

    Attributes:
        n_min: a draft of fewer tokens is not verified at all (llama.cpp's draft_min); one-hot drafts only.
    """

    n_min: Annotated[Size, Also("draft_min")] = 0


@dataclass(frozen=True)
class NMinOptions(FixedOptions):
    """`fixed`, but a draft of fewer than `n_min` tokens is not verified at all."""

    n_min: Annotated[Size, Also("draft_min")] = 2


@dataclass(frozen=True)
class PMinOptions(FixedOptions):
    """Stop drafting when the draft's top probability is under `p_min` (llama.cpp). Drafters with a model.

    Attributes:
        p_min: least top probability, over the top ten; 0 never stops.
    """

    p_min: Annotated[Unit, Also("draft_p_min")] = 0.75


@dataclass(frozen=True)
class ConfidenceOptions(PolicyOptions):
    """Stop after a token to which the draft gave less than `threshold` (Hugging Face). Drafters with a model.

    Attributes:
        threshold: least probability.
    """

    gamma: Gamma = 20
    threshold: Annotated[Unit, Also("assistant_confidence_threshold")] = 0.4


@dataclass(frozen=True)
class EntropyOptions(PolicyOptions):
    """Stop when 1 - sqrt(scale H(q)), a lower estimate of acceptance, is under `threshold` (AdaEDL, arXiv:2410.18351).

    Attributes:
        threshold: least estimate.
        scale: of the entropy in nats.
    """

    threshold: Unit = 0.4
    scale: Positive = 0.2


@dataclass(frozen=True)
class HeuristicOptions(PolicyOptions):
    """Two more tokens after a round accepted whole, else one fewer (Hugging Face's heuristic).

    Attributes:
        start: tokens at first; by default 5, or `gamma` where that is less.
    """

    gamma: Annotated[int, Range(1, MAX_GAMMA), Also(*({*GAMMA_NAMES} - {"gamma", "num_assistant_tokens"}))] = 16
    start: Annotated[Count | None, Also("num_assistant_tokens")] = None


@dataclass(frozen=True)
class CostOptions:
    """Times in plain decoding steps, and how acceptance is estimated.

    Attributes:
        v: times v(1), v(2), ... of a forward pass of n positions, v(1) = 1; kept: as `+experiment=roofline` measured
            them here, else a safe guess; null: measured before the run.
        c: time to draft a token; by default as v, or by the bytes that a drafted token reads.
        c0: time that a drafting round takes besides; by default as v.
        prior: acceptance expected before there is evidence; null: measured on the built-in prompts, 0.6 in the API.
        weight: tests (of `auto_off`: drafts) that the prior is worth.
        memory: by which evidence fades in each round with a draft.
    """

    v: Times | Literal["kept"] | None = None
    c: Annotated[float | None, Range(0, 1e6), Also("draft_cost")] = None
    c0: Annotated[float | None, Range(0, 1e6)] = None
    prior: Unit | None = None
    weight: Annotated[float, Range(1e-3, 1e6)] = 4.0
    memory: Annotated[float, Range(1e-3, 1)] = 0.9


@dataclass(frozen=True)
class CostOptimalOptions(CostOptions, PolicyOptions):
    """The draft length of the highest predicted speed-up, from measured times and the acceptance so far.

    Attributes:
        least: shortest draft; 1 keeps the estimate of acceptance alive.
    """

    least: Size = 1


@dataclass(frozen=True)
class AutoOffOptions(CostOptions, PolicyOptions):
    """Short drafts of the length that pays best, none while none pays but a probe now and then.

    Attributes:
        inner: the policy while it pays; by default cost, fixed for trees, which are drafted whole or not at all.
        inner_options: of a policy that is named.
        margin: predicted speed-up from which drafting pays.
        probe: tokens of a probe.
        every: rounds before a probe; each probe that is not accepted whole doubles them, up to `most`.
        most: rounds before a probe, at most; by default 32, or `every` where that is more.
        probe_share: most plain steps that failed probes may take, for each round without one: dear probes are rarer.
        probe_memory: like `memory`, after a probe.
    """

    gamma: Gamma = SHORT_GAMMA
    v: Times | Literal["kept"] | None = KEPT
    weight: Annotated[float, Range(1e-3, 1e6)] = 6.0
    prior: Unit | None = 0.6
    memory: Annotated[float, Range(1e-3, 1)] = 0.95
    inner: object | None = None
    inner_options: dict[str, object] | None = None
    margin: Annotated[float, Range(1e-3, 1e3)] = 1.0
    probe: Count = 1
    every: Count = 4
    most: Count | None = None
    probe_share: Annotated[float, Range(1e-6, 1e6)] = 0.03
    probe_memory: Annotated[float, Range(1e-3, 1)] = 0.7

    def over_tree(self, nodes: int) -> Self:
        """All nodes, whose number is no draft length, or none."""
        return dataclasses.replace(self, gamma=nodes, inner="fixed" if self.inner is None else self.inner)
