"""Ratios of sums with a confidence interval: a bootstrap over prompts, whose own passes are not independent."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

RESAMPLES = 2000
LEVEL = 0.95
WHISKERS = "Whiskers: 95 % bootstrap interval over prompts, too narrow for fewer than about ten; none for one prompt."
"""What a figure says of them."""


class Interval(NamedTuple):
    """A value and its 95 % percentile interval; `low` and `high` are None where one prompt is all there is."""

    value: float
    low: float | None
    high: float | None
    prompts: int

    def cells(self) -> dict[str, float | int | None]:
        """As columns of a table."""
        return self._asdict()


def ratio(numerators: Sequence[float], denominators: Sequence[float], *, seed: int = 0) -> Interval | None:
    """sum(numerators) / sum(denominators), one entry a prompt; None where the denominators sum to zero.

    Prompts are drawn as pairs, so that what moves both sides of one prompt cancels (Efron and Tibshirani 1993, 13.3).

    Raises:
        ValueError: the lengths differ.
    """
    top, bottom = np.asarray(numerators, np.float64), np.asarray(denominators, np.float64)
    if top.shape != bottom.shape or top.ndim != 1:
        raise ValueError("a ratio needs as many numerators as denominators")
    if not bottom.sum():
        return None
    value = float(top.sum() / bottom.sum())
    if len(top) < 2:
        return Interval(value, None, None, len(top))
    drawn = _drawn(len(top), seed)
    return _percentiles(value, top[drawn].sum(axis=1), bottom[drawn].sum(axis=1), len(top))


def ratio_of_ratios(
    above: Sequence[tuple[float, float]], below: Sequence[tuple[float, float]], *, seed: int = 0
) -> Interval | None:
    """One ratio of sums over another: (numerator, denominator) of each prompt, the same prompts in both.

    None where either ratio has no denominator, or the one below is zero.
    """
    a, b = np.asarray(above, np.float64).reshape(-1, 2), np.asarray(below, np.float64).reshape(-1, 2)
    top, bottom = a[:, 0].sum() * b[:, 1].sum(), a[:, 1].sum() * b[:, 0].sum()
    if not bottom or not b[:, 1].sum():
        return None
    if len(a) < 2:
        return Interval(float(top / bottom), None, None, len(a))
    drawn = _drawn(len(a), seed)
    sums_a, sums_b = a[drawn].sum(axis=1), b[drawn].sum(axis=1)
    return _percentiles(float(top / bottom), sums_a[:, 0] * sums_b[:, 1], sums_a[:, 1] * sums_b[:, 0], len(a))


def _drawn(count: int, seed: int) -> np.ndarray:
    """Indices of prompts int[resamples, count]."""
    return np.random.default_rng(seed).integers(0, count, size=(RESAMPLES, count))


def _percentiles(value: float, tops: np.ndarray, bottoms: np.ndarray, prompts: int) -> Interval:
    """A resample without a denominator has no ratio."""
    ratios = tops[bottoms > 0] / bottoms[bottoms > 0]
    low, high = np.quantile(ratios, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(value, float(low), float(high), prompts)
