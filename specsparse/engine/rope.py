"""Rotary position embedding: tables of cos and sin. `kernels.reference.dense.rotate` applies them."""

import numpy as np

from specsparse.engine.config import ModelConfig
from specsparse.engine.rope_config import RopeConfig
from specsparse.errors import UserError


def angles(cfg: RopeConfig, factors: np.ndarray | None = None) -> tuple[np.ndarray, float]:
    """Radians per position of each pair, float64 [dim/2] (divided by `factors` first), and what multiplies cos and sin.

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

    low = max(0.0, np.floor(pair_of(cfg.beta_fast)))
    high = min(cfg.dim - 1.0, np.ceil(pair_of(cfg.beta_slow)))
    ramp = np.clip((np.arange(half) - low) / max(0.001, high - low), 0.0, 1.0)
    return stretched * ramp + whole * (1.0 - ramp), cfg.attn_factor * (1.0 + 0.1 * np.log(cfg.factor))


def rope_tables(
    cfg: RopeConfig, capacity: int, freq_factors: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin of every position and pair, float32 [capacity, dim/2], computed in float64.

    Args:
        cfg: the rotary embedding.
        capacity: positions 0..capacity-1.
        freq_factors: [dim/2], what each pair's angle is divided by (`rope_freqs.weight`), or None.

    Raises:
        UserError: factors of the wrong length, or not positive and finite.
    """
    if freq_factors is not None:
        freq_factors = np.asarray(freq_factors, np.float64)
        if freq_factors.shape != (cfg.dim // 2,):
            raise UserError(f"rope_freqs.weight has shape {freq_factors.shape}, ({cfg.dim // 2},) is needed")
        if not (np.isfinite(freq_factors) & (freq_factors > 0)).all():
            raise UserError("rope_freqs.weight holds a factor that is not a positive number")
    radians, magnitude = angles(cfg, freq_factors)
    turn = np.arange(capacity, dtype=np.float64)[:, None] * radians
    return (np.cos(turn) * magnitude).astype(np.float32), (np.sin(turn) * magnitude).astype(np.float32)


def model_tables(
    config: ModelConfig, capacity: int, freq_factors: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin of each of `config.ropes`, float32 [T, capacity, d/2]; what turns nothing has cos 1 and sin 0.

    `freq_factors` belong to the first.
    """
    shape = (capacity, config.head_dim // 2)
    unturned = np.ones(shape, np.float32), np.zeros(shape, np.float32)
    tables = [
        unturned if rope is None else rope_tables(rope, capacity, None if i else freq_factors)
        for i, rope in enumerate(config.ropes)
    ]
    cos, sin = (np.stack(part) for part in zip(*tables))
    return cos, sin


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key matrix (or bias) for a rotation of neighbours instead of halves.

    transformers turns rows i and i + d/2 of a head together; llama.cpp's Llama turns rows 2i and 2i + 1. Rows that are
    no heads of an even size come back as they are: their shape is refused elsewhere.
    """
    return _turned(rows, (heads, 2, rows.shape[0] // heads // 2))


def halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """The inverse of `interleaved`."""
    return _turned(rows, (heads, rows.shape[0] // heads // 2, 2))


def _turned(rows: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if shape[0] * shape[1] * shape[2] != rows.shape[0]:
        return rows
    return np.ascontiguousarray(rows.reshape(*shape, *rows.shape[1:]).swapaxes(1, 2)).reshape(rows.shape)
