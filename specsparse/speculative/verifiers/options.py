"""The options of the verifiers that have some; jax is not imported, so that a mistyped one is answered at once."""

from dataclasses import dataclass
from typing import Annotated, Literal

from specsparse.speculative.gamma import MAX_GAMMA
from specsparse.support.options import Also, Range, Share


@dataclass(frozen=True)
class NoOptions:
    """Of a verifier that has none."""


@dataclass(frozen=True)
class TypicalOptions:
    """LOSSY: accept x when p(x) > min(epsilon, delta exp(-H(p))) (Medusa, arXiv:2401.10774).

    Attributes:
        epsilon: hard threshold.
        delta: factor of the entropy-dependent one.
    """

    epsilon: Share = 0.09
    delta: Share = 0.3


@dataclass(frozen=True)
class ThresholdOptions:
    """LOSSY: accept when the siblings' summed p reaches total x coin, or p(x) reaches single (SGLang). 1, 1: lossless.

    Attributes:
        single: p(x) from which a token is taken unseen.
        total: summed p at which acceptance is certain.
    """

    single: Share = 1.0
    total: Share = 0.8


@dataclass(frozen=True)
class SyntheticAcceptance:
    """Acceptance made up beforehand: the options of the verifier `synthetic`. LOSSY, and the output is not text.

    Attributes:
        process: geometric (llama.cpp) or minimum_variance (vLLM).
        rate: chance that a drafted token is accepted once those before it were; by default 0.7.
        length: instead of `rate`, the mean acceptance length, bonus token included.
        rates: instead of both, the chance that at least i tokens are accepted, for each i.
    """

    process: Literal["geometric", "minimum_variance"] = "geometric"
    rate: Annotated[float, Range(0, 1)] | None = None
    length: Annotated[
        float | None,
        Range(1, MAX_GAMMA + 1),
        Also("synthetic_acceptance_length", "spec_synthetic_acceptance_length"),
    ] = None
    rates: tuple[float, ...] | None = None
