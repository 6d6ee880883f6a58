"""Pearson's chi-square against a distribution known exactly, and what such a test is sure to see.

Power is stated as a total variation: of all wrong distributions at that distance the least visible one is still refused
with probability `POWER`. With d = distribution - wrong distribution, sum d^2 / distribution >= (sum |d|)^2 = 4 TV^2
(Cauchy-Schwarz, the distribution sums to one), so the noncentrality of N draws is at least 4 N TV^2, whatever the shape
of d.
"""

from typing import NamedTuple

import numpy as np
from scipy import optimize, stats

ALPHA = 1e-6
"""Level: chance that a right sampler is refused. The tests are seeded, so this is spent once and never again."""

POWER = 0.99
"""Chance that a wrong distribution at the stated distance is refused."""

LEAST_EXPECTED = 8.0
"""Draws expected in a cell that stands alone; rarer cells are counted together."""


class ChiSquare(NamedTuple):
    """Result of a test: the statistic, its degrees of freedom, and the chance of one as large."""

    value: float
    freedom: int
    p: float


def pooled(counts: np.ndarray, expected: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Counts and expectations with all rare cells in one; cells of expectation 0 must be empty and are dropped."""
    if counts[expected == 0].any():
        raise AssertionError(f"{int(counts[expected == 0].sum())} draws of probability 0")
    rare = (expected > 0) & (expected < LEAST_EXPECTED)
    common = expected >= LEAST_EXPECTED
    if not rare.any():
        return counts[common], expected[common]
    if expected[rare].sum() < LEAST_EXPECTED:  # too little for a cell of its own: it joins the rarest common one
        rare[np.flatnonzero(common)[np.argmin(expected[common])]] = True
        common &= ~rare
    return np.append(counts[common], counts[rare].sum()), np.append(expected[common], expected[rare].sum())


def chi_square(counts: np.ndarray, probs: np.ndarray) -> ChiSquare:
    """Whether `counts` are draws from `probs` (both of one shape).

    Several distributions with a count of draws each, known or not, stand side by side along the first axis of 2-D
    arguments: their statistics and degrees of freedom add up.
    """
    value, freedom = 0.0, 0
    for n_c, probs_c in zip(np.atleast_2d(counts), np.atleast_2d(np.asarray(probs, np.float64)), strict=True):
        if n_c.sum() == 0:
            continue
        seen, expected = pooled(n_c, n_c.sum() * probs_c / probs_c.sum())
        value += float(((seen - expected) ** 2 / expected).sum())
        freedom += len(seen) - 1
    return ChiSquare(value, freedom, float(stats.chi2.sf(value, freedom)))


def least_tv(freedom: int, draws: int) -> float:
    """The total variation from which any wrong distribution is refused at level `ALPHA` with probability `POWER`."""
    critical = stats.chi2.isf(ALPHA, freedom)

    def missing(tv):
        return stats.ncx2.sf(critical, freedom, 4 * draws * tv**2) - POWER

    return float(optimize.brentq(missing, 1e-6, 1.0))


def least_shift(chance: float, draws: int) -> float:
    """The same for one event of that probability: least change of its probability that the two-sided test refuses."""
    threshold = stats.norm.isf(ALPHA / 2) * np.sqrt(chance * (1 - chance) / draws)

    def missing(shift):
        moved = min(chance + shift, 1 - 1e-12) if chance < 0.5 else max(chance - shift, 1e-12)  # the noisier side
        spread = np.sqrt(moved * (1 - moved) / draws)
        return stats.norm.sf((threshold - shift) / spread) - POWER

    return float(optimize.brentq(missing, 1e-9, 0.5))
