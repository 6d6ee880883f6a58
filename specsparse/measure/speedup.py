"""How many times faster: plain over speculative time, with its interval."""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from specsparse.measure import intervals
from specsparse.measure.intervals import Interval
from specsparse.support.files import Json


def timing_ends(faster: Json) -> tuple[float | None, float | None]:
    """A point is timed on one prompt: the interval is that of timing noise, which older records call low and high."""
    prefix = "timing_" if "timing_low" in faster else ""
    return faster[f"{prefix}low"], faster[f"{prefix}high"]


class Speedup(NamedTuple):
    """Plain time over the method's time, by three definitions of `DEFINITIONS`; 95 % intervals, None where none is.

    Attributes:
        ratio_of_totals: the speed-up that everything ranks by.
        low, high: its interval over prompts, others of the same kind; None for fewer than three.
        prompts, pairs: how many; a pair is one repeat of one prompt.
        mean_of_ratios: over pairs; it has no interval here.
        geometric_mean, geometric_low, geometric_high: of the prompts' speed-ups, and the interval over prompts.
        timing_low, timing_high: `ratio_of_totals` of these very prompts: timing noise between repeats alone; None
            where a prompt has one repeat only.
        skewed: whether the interval over prompts may not be believed (`Interval.skewed`).
    """

    ratio_of_totals: float
    low: float | None
    high: float | None
    prompts: int
    pairs: int
    mean_of_ratios: float
    geometric_mean: float
    geometric_low: float | None
    geometric_high: float | None
    timing_low: float | None
    timing_high: float | None
    skewed: bool = False

    @property
    def interval(self) -> Interval:
        """Of `ratio_of_totals`, over prompts."""
        return Interval(self.ratio_of_totals, self.low, self.high, self.prompts, self.skewed)

    def to_dict(self) -> Json:
        """As plain values for a record; `interval_of` says whose `low` and `high` are."""
        return {**self._asdict(), "interval_of": "ratio_of_totals"}


def speedup(plain_s: Sequence[float], method_s: Sequence[float], *, prompts: Sequence[Hashable]) -> Speedup:
    """How many times faster the method decodes the same prompts to the same token counts, prefill excluded.

    Args:
        plain_s: seconds of plain decoding, one entry per prompt and repeat.
        method_s: seconds of the method on the same entries.
        prompts: which prompt each entry is of. Repeats of a prompt are summed before prompts are compared.

    Raises:
        ValueError: the lengths differ, there is no entry, or a time is not positive.
    """
    plain, method = np.asarray(plain_s, np.float64), np.asarray(method_s, np.float64)
    if plain.shape != method.shape or plain.ndim != 1 or plain.size == 0 or len(prompts) != plain.size:
        raise ValueError("a speed-up needs as many plain as method times and prompts, at least one")
    if not (np.all(plain > 0) and np.all(method > 0)):
        raise ValueError("a speed-up needs positive times")
    keys = {key: i for i, key in enumerate(dict.fromkeys(prompts))}
    of_prompt = [keys[key] for key in prompts]
    totals = [np.bincount(of_prompt, weights=seconds) for seconds in (plain, method)]
    found = intervals.ratio(*totals)
    assert found is not None  # positive times have a positive sum
    middle, timing = intervals.geometric_mean(totals[0] / totals[1]), intervals.over_repeats(plain, method, of_prompt)
    return Speedup(
        ratio_of_totals=found.value, low=found.low, high=found.high, prompts=len(keys), pairs=plain.size,
        mean_of_ratios=float(np.mean(plain / method)),
        geometric_mean=middle.value, geometric_low=middle.low, geometric_high=middle.high,
        timing_low=timing.low, timing_high=timing.high, skewed=found.skewed,
    )  # fmt: skip
