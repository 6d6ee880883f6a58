"""Ratios of sums with a confidence interval: a bootstrap over prompts, whose own passes are not independent."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

RESAMPLES = 2000
LEVEL = 0.95


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
    drawn = np.random.default_rng(seed).integers(0, len(top), size=(RESAMPLES, len(top)))
    sums = bottom[drawn].sum(axis=1)
    ratios = top[drawn].sum(axis=1)[sums > 0] / sums[sums > 0]
    low, high = np.quantile(ratios, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(value, float(low), float(high), len(top))
