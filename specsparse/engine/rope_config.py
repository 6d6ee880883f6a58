"""What a rotary embedding is: its base, its pairs and its scaling."""

from dataclasses import dataclass
from typing import Literal

from specsparse.engine.architectures import Pairing

Scaling = Literal["none", "linear", "yarn"]
SCALINGS: tuple[Scaling, ...] = ("none", "linear", "yarn")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864) with the scalings of llama.cpp.

    Attributes:
        base: theta; pair i of position p turns by p * base ** (-2 i / dim).
        dim: elements of a head that turn, even.
        pairing: "norm" turns (2i, 2i+1), "neox" (i, i + dim/2).
        scaling: "linear" divides positions by `factor`; "yarn" does so for slow pairs only (Peng et al. 2023,
            arXiv:2309.00071).
        factor: how far the context was stretched, 1 for "none".
        original_context: trained positions, for YaRN.
        attn_factor: multiplies cos and sin, beside YaRN's own magnitude.
        beta_fast, beta_slow: turns over the original context between which YaRN mixes.
        freq_factors: whether a `rope_freqs.weight` tensor divides the angle of each pair (Llama 3.1).
    """

    base: float
    dim: int
    pairing: Pairing
    scaling: Scaling = "none"
    factor: float = 1.0
    original_context: int = 0
    attn_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    freq_factors: bool = False
