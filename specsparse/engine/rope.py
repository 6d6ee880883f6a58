"""Rotary position embedding: its constants and its tables, which `kernels.reference.dense.rotate` applies."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from specsparse.engine.architectures import Pairing
from specsparse.errors import UserError

Scaling = Literal["none", "linear", "yarn"]
SCALINGS: tuple[Scaling, ...] = get_args(Scaling)


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864) with the scalings of llama.cpp."""

    base: float  # theta; pair i of position p turns by p * base ** (-2 i / dim)
    dim: int  # elements of a head that turn, even
    pairing: Pairing  # "norm" turns (2i, 2i+1), "neox" (i, i + dim/2)
    # "linear" divides positions by `factor`; "yarn" does so for slow pairs only (Peng et al. 2023, arXiv:2309.00071)
    scaling: Scaling = "none"
    factor: float = 1.0  # how far the context was stretched, 1 for "none"
    original_context: int = 0  # trained positions, for YaRN
    attn_factor: float = 1.0  # multiplies cos and sin, beside YaRN's own magnitude
    # beta_fast, beta_slow: turns over the original context between which YaRN mixes
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    freq_factors: bool = False  # whether a `rope_freqs.weight` tensor divides the angle of each pair (Llama 3.1)
    # whether YaRN's ramp begins and ends at whole pairs, as in llama.cpp for every model. gpt-oss was trained without
    # (`truncate` of its config)
    rounds_yarn: bool = True


def angles(cfg: RopeConfig, factors: np.ndarray | None = None) -> tuple[np.ndarray, float]:
    """Radians per position of each pair, float64 [dim/2] (divided by `factors` first), and the factor of cos and sin.

    YaRN as llama.cpp has it (`rope_yarn` in ggml): pairs that turn more than beta_fast times over the original context
    keep their angle, those that turn less than beta_slow times are divided by the factor, with a linear ramp over the
    pair index between; cos and sin grow by 1 + 0.1 ln(factor).
    """
    half = cfg.dim // 2
    whole = cfg.base ** (-2.0 * np.arange(half) / cfg.dim)
    if factors is not None:
        whole = whole / factors
    if cfg.scaling == "none":
        return whole, cfg.attn_factor
    stretched = whole / cfg.factor
    if cfg.scaling == "linear":
        return stretched, cfg.attn_factor

    def pair_of(turns: float) -> float:
        """The (fractional) pair that makes so many turns over the original context."""
        return cfg.dim * np.log(cfg.original_context / (turns * 2 * np.pi)) / (2 * np.log(cfg.base))

    low, high = pair_of(cfg.beta_fast), pair_of(cfg.beta_slow)
    if cfg.rounds_yarn:
        low, high = np.floor(low), np.ceil(high)
    low, high = max(0.0, low), min(cfg.dim - 1.0, high)
    ramp = np.clip((np.arange(half) - low) / max(0.001, high - low), 0.0, 1.0)
    return stretched * ramp + whole * (1.0 - ramp), cfg.attn_factor * (1.0 + 0.1 * np.log(cfg.factor))


def rope_tables(
    cfg: RopeConfig, capacity: int, freq_factors: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin of every position and pair, float32 [capacity, dim/2], computed in float64.

    `freq_factors` [dim/2] are divisors of the pairs' angles (`rope_freqs.weight`); UserError if they are not positive.
    """
    if freq_factors is not None:
        freq_factors, wanted = np.asarray(freq_factors, np.float64), (cfg.dim // 2,)
        if freq_factors.shape != wanted or not (np.isfinite(freq_factors) & (freq_factors > 0)).all():
            raise UserError(f"rope_freqs.weight {freq_factors.shape}: positive numbers of shape {wanted} are needed")
    radians, magnitude = angles(cfg, freq_factors)
    turn = np.arange(capacity, dtype=np.float64)[:, None] * radians
    return (np.cos(turn) * magnitude).astype(np.float32), (np.sin(turn) * magnitude).astype(np.float32)


def model_tables(
    ropes: Sequence[RopeConfig | None], capacity: int, freq_factors: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin of each of `ModelConfig.ropes`, float32 [T, capacity, d/2]; cos is 1 and sin 0 for None.

    The first is not None, and `freq_factors` belong to it.
    """
    shape = (capacity, next(rope.dim for rope in ropes if rope is not None) // 2)
    unturned = np.ones(shape, np.float32), np.zeros(shape, np.float32)
    tables = [
        unturned if rope is None else rope_tables(rope, capacity, None if i else freq_factors)
        for i, rope in enumerate(ropes)
    ]
    cos, sin = (np.stack(part) for part in zip(*tables))
    return cos, sin


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key matrix (or bias) for a rotation of neighbours instead of halves.

    transformers turns rows i and i + d/2 of a head together; llama.cpp's Llama turns rows 2i and 2i + 1. Rows that do
    not make heads of an even size come back as they are: their shape is refused elsewhere.
    """
    return rows if rows.shape[0] % (2 * heads) else _swapped(rows, (heads, 2, -1))


def halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """The inverse of `interleaved`: rows for a rotation of halves."""
    return rows if rows.shape[0] % (2 * heads) else _swapped(rows, (heads, -1, 2))


def _swapped(rows: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return np.ascontiguousarray(rows.reshape(*shape, *rows.shape[1:]).swapaxes(1, 2)).reshape(rows.shape)
