"""95 % intervals of ratios, shares and means: the one place that computes them.

The sampling unit is the prompt: its repeats are summed first, because they are not independent. Standard errors leave
out one prompt at a time (the jackknife of a ratio of sums, Efron and Tibshirani 1993, chapter 11), on a scale where the
error is nearly symmetric, and Student's t with n - 1 degrees of freedom allows for few prompts. Percentiles of a
bootstrap are too narrow there: at 6 prompts they hold the truth 85 % of the time (docs/LOG.md, 2026-11-22).

Two things make such an interval fail. Skewed prompts, if a few gain much and the rest nothing: `Interval.skewed` says
so. And a kind of prompt that is not among them at all, which no number can show: `unseen` says how common it may be.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

LEVEL = 0.95
LEAST_PROMPTS = 3
"""Prompts from which there is an interval over prompts: one deviation alone says nothing of how far others lie."""
WHISKERS = (
    "Whiskers: 95 % interval over prompts (Student's t, leaving out one prompt at a time); none for fewer than "
    f"{LEAST_PROMPTS} prompts, nor if one prompt holds all that is counted."
)
"""The line under a figure with whiskers."""


class Interval(NamedTuple):
    """A value and its 95 % interval over `prompts` prompts; `low` and `high` may be None.

    `skewed`: a few prompts differ so much from the rest that the interval may hold the truth less often.
    """

    value: float
    low: float | None
    high: float | None
    prompts: int
    skewed: bool = False

    def ends(self) -> str:
        return shown(self.low, self.high)

    def sentence(self) -> str:
        """The ends and over what, or why there are none, for a line of text."""
        if self.low is None or self.high is None:
            few = "one prompt" if self.prompts == 1 else f"{self.prompts} prompts"
            return f"{few}: no interval" if self.prompts < LEAST_PROMPTS else "no interval"
        doubt = ", skewed: it may not be believed" if self.skewed else ""
        return f"95 % interval {shown(self.low, self.high, joined=' to ')} over {self.prompts} prompts{doubt}"


def shown(low: float | None, high: float | None, *, joined: str = "-") -> str:
    """The ends of an interval with two decimals, or a dash."""
    return "-" if low is None or high is None else f"{low:.2f}{joined}{high:.2f}"


def ratio(numerators: ArrayLike, denominators: ArrayLike) -> Interval | None:
    """sum(numerators) / sum(denominators), one entry a prompt; the interval is symmetric in the logarithm.

    Both sums lose the same prompt, so that what moves both sides of one prompt cancels.

    None if the denominators sum to zero; without an interval for fewer than `LEAST_PROMPTS` prompts, or if a sum
    without one of the prompts is not positive.
    """
    top, bottom = _entries(numerators, denominators)
    if not bottom.sum():
        return None
    return _without_each(float(top.sum() / bottom.sum()), [top], [bottom])


def share(parts: Sequence[float], wholes: Sequence[float]) -> Interval | None:
    """sum(parts) / sum(wholes) between 0 and 1, one entry a prompt; the interval is that of the odds.

    None if the wholes sum to zero; without an interval for fewer than `LEAST_PROMPTS` prompts, or if one prompt holds
    all the parts or all that is beside them.
    """
    part, whole = _entries(parts, wholes)
    if not whole.sum():
        return None
    value = float(part.sum() / whole.sum())
    rest = whole - part
    odds = _without_each(float(part.sum() / rest.sum()), [part], [rest]) if rest.sum() > 0 else None
    if odds is None or odds.low is None or odds.high is None:
        return Interval(value, None, None, len(part))
    return Interval(value, odds.low / (1 + odds.low), odds.high / (1 + odds.high), len(part), odds.skewed)


def ratio_of_ratios(above: Sequence[tuple[float, float]], below: Sequence[tuple[float, float]]) -> Interval | None:
    """One ratio of sums over another: (numerator, denominator) of each prompt, the same prompts in both.

    None if either ratio has no denominator, or the one below is zero; the interval is as in `ratio`.
    """
    a, b = np.asarray(above, np.float64).reshape(-1, 2), np.asarray(below, np.float64).reshape(-1, 2)
    bottom = a[:, 1].sum() * b[:, 0].sum()
    if not bottom or not b[:, 1].sum():
        return None
    value = float(a[:, 0].sum() * b[:, 1].sum() / bottom)
    return _without_each(value, [a[:, 0], b[:, 1]], [a[:, 1], b[:, 0]])


def geometric_mean(values: ArrayLike, *, least: int = LEAST_PROMPTS) -> Interval:
    """The geometric mean of positive values, one a prompt, with the t interval of their logarithms if there are at
    least so many."""
    logs = np.log(np.asarray(values, np.float64))
    found = mean(logs.tolist())
    middle = float(np.exp(found.value))
    if found.low is None or found.prompts < least:
        return Interval(middle, None, None, found.prompts)
    return _around(middle, found.value - found.low, found.prompts, skewed=_skewed(logs))


def mean(values: Sequence[float]) -> Interval:
    """Arithmetic mean of at least one independent value, with its t interval (a prompt or a seed each)."""
    array = np.asarray(values, np.float64)
    middle = float(array.mean())
    if array.size < 2:
        return Interval(middle, None, None, array.size)
    half = _t(array.size - 1) * float(array.std(ddof=1)) / array.size**0.5
    return Interval(middle, middle - half, middle + half, array.size)


def over_repeats(numerators: ArrayLike, denominators: ArrayLike, prompts: Sequence[object]) -> Interval:
    """The ratio of sums for these very prompts: how far timing noise alone moves it from repeat to repeat.

    An entry is one repeat of one prompt. The relative error of the ratio is linear in the entries' errors; each prompt
    gives a variance, and Welch and Satterthwaite's formula the degrees of freedom of their sum.

    Without an interval if a prompt has one repeat only.
    """
    top, bottom = _entries(numerators, denominators)
    value = float(top.sum() / bottom.sum())
    errors = top / top.sum() - bottom / bottom.sum()
    keys = {key: i for i, key in enumerate(dict.fromkeys(prompts))}
    of_prompt = np.array([keys[key] for key in prompts])
    count = np.bincount(of_prompt)
    if count.min() < 2:
        return Interval(value, None, None, len(keys))
    middle = np.bincount(of_prompt, errors) / count
    variance = np.bincount(of_prompt, (errors - middle[of_prompt]) ** 2) * count / (count - 1)  # of a prompt's sum
    spread = float(variance.sum())
    freedom = spread**2 / float((variance**2 / (count - 1)).sum()) if spread else 1.0
    return _around(value, _t(freedom) * spread**0.5, len(keys))


def binomial(count: int, trials: int) -> tuple[float, float]:
    """The exact interval of a probability that was met `count` times in `trials` independent ones.

    Clopper and Pearson 1934 (Biometrika 26, 404): it holds the truth with at least `LEVEL`, whatever that is.
    """
    assert 0 <= count <= trials and trials
    from scipy.special import betaincinv

    tail = (1 - LEVEL) / 2
    low = float(betaincinv(count, trials - count + 1, tail)) if count else 0.0
    high = float(betaincinv(count + 1, trials - count, 1 - tail)) if count < trials else 1.0
    return low, high


def unseen(prompts: int) -> float:
    """The most common that a kind of prompt may be if it is not among so many: the s of (1 - s)^prompts = 0.05."""
    return 1 - (1 - LEVEL) ** (1 / prompts)


def _skewed(values: np.ndarray) -> bool:
    """True if values, one a prompt, are too skewed for the t interval of their mean.

    Their skewness g is both beyond 2.4 standard errors of that of normal ones, and so large that n < 10 g^2 (Cochran
    1977, section 2.15, asks for n > 25 g^2, which one in three harmless sets of 24 speed-ups fails). Fewer than five
    values cannot be that skewed. Simulated in tests/measure/test_intervals.py.
    """
    n = len(values)
    away = values - values.mean()
    spread = float((away**2).mean())
    if n < LEAST_PROMPTS or spread <= 1e-24:
        return False
    skewness = abs(float((away**3).mean())) / spread**1.5
    return skewness > max(2.4 * (6 * (n - 2) / ((n + 1) * (n + 3))) ** 0.5, (n / 10) ** 0.5)


def _entries(tops: ArrayLike, bottoms: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    top, bottom = np.asarray(tops, np.float64), np.asarray(bottoms, np.float64)
    assert top.shape == bottom.shape and top.ndim == 1
    return top, bottom


def _without_each(value: float, tops: list[np.ndarray], bottoms: list[np.ndarray]) -> Interval:
    """The jackknife interval of prod(sum(top)) / prod(sum(bottom)), on the logarithm."""
    count = len(tops[0])
    left = [(sum_.sum() - sum_, sign) for sums, sign in ((tops, 1), (bottoms, -1)) for sum_ in sums]
    if count < LEAST_PROMPTS or value <= 0 or any((rest <= 0).any() for rest, _ in left):
        return Interval(value, None, None, count)
    logs = sum((sign * np.log(rest) for rest, sign in left), np.zeros(count))
    error = float(np.sqrt((count - 1) / count * ((logs - logs.mean()) ** 2).sum()))
    return _around(value, _t(count - 1) * error, count, skewed=_skewed(logs))


def _around(value: float, half: float, prompts: int, *, skewed: bool = False) -> Interval:
    """The interval from log(value) - half to log(value) + half."""
    return Interval(value, float(value * np.exp(-half)), float(value * np.exp(half)), prompts, skewed)


def _t(freedom: float) -> float:
    """The two-sided quantile of Student's t at `LEVEL`."""
    from scipy.special import stdtrit  # here: its import would be a tenth of what a run takes to its first text

    return float(stdtrit(freedom, (1 + LEVEL) / 2))
