"""Speed-ups: how many times faster, with intervals, and how often a timing is repeated until one is known well enough.

`repeats` is a number, or "auto". Who stops when an interval looks narrow stops when it is too narrow by chance: looked
at after every repeat, 95 % intervals held the truth 83 to 93 % of the time. So `auto` decides without the last three
repeats, which then are drawn without regard to the decision (a fixed number of further ones is enough at any noise:
Simons 1968, Annals of Mathematical Statistics 39, 1946), and first looks after three, where each prompt's variance has
two degrees of freedom. Coverage simulated at 1, 2, 3 and 6 prompts: at least 0.934 (tests/measure/test_intervals.py).
"""

import enum
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np

from specsparse.measure import intervals
from specsparse.measure.intervals import Interval
from specsparse.support.files import Json


class Speedup(NamedTuple):
    """Plain time over the method's time, with 95 % intervals or None; `runtime.metrics.DEFINITIONS` has the terms."""

    ratio_of_totals: float  # the speed-up that everything ranks by
    low: float | None  # its interval over prompts, others of the same kind; None for fewer than three
    high: float | None
    prompts: int
    pairs: int  # a pair is one repeat of one prompt
    mean_of_ratios: float  # over pairs; it has no interval here
    geometric_mean: float  # of the prompts' speed-ups
    geometric_low: float | None  # its interval over prompts
    geometric_high: float | None
    # interval of `ratio_of_totals` for these very prompts: timing noise between repeats alone; None if a prompt has
    # one repeat only
    timing_low: float | None
    timing_high: float | None
    skewed: bool = False  # whether the interval over prompts may not be believed (`Interval.skewed`)

    @property
    def interval(self) -> Interval:
        return Interval(self.ratio_of_totals, self.low, self.high, self.prompts, self.skewed)

    def to_dict(self) -> Json:
        """The fields of a record; `interval_of` says whose `low` and `high` are."""
        return {**self._asdict(), "interval_of": "ratio_of_totals"}


def speedup(plain_s: Sequence[float], method_s: Sequence[float], *, prompts: Sequence[Hashable]) -> Speedup:
    """How many times faster the method decodes the same prompts to the same token counts, prefill excluded.

    `plain_s` and `method_s` are positive seconds, one entry for each prompt and repeat. `prompts` names the prompt of
    each entry; repeats of a prompt are summed before prompts are compared.
    """
    plain, method = np.asarray(plain_s, np.float64), np.asarray(method_s, np.float64)
    assert plain.shape == method.shape == (len(prompts),) and len(prompts) and (plain > 0).all() and (method > 0).all()
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


def timing_ends(faster: Json) -> tuple[float | None, float | None]:
    """A point is timed on one prompt: the interval is that of timing noise, which older records call low and high."""
    prefix = "timing_" if "timing_low" in faster else ""
    return faster[f"{prefix}low"], faster[f"{prefix}high"]


AUTO = "auto"
WANTED = 0.05
"""Half-width of the 95 % interval of a speed-up, as a share of it, that `auto` repeats for."""
LIMIT = 20
"""Repeats at which `auto` stops in any case."""
FIRST_LOOK, FURTHER = 3, 3
"""Repeats after which `auto` first decides, and those that follow a decision to stop whatever they say."""
PROMPTS_SHARE = 1 / 3
"""`auto` stops where timing alone spreads by no more than this share of the interval: without any timing error the
interval would be at most 1 - sqrt(1 - 1/9) = 6 % narrower, so what is left of it lies between the prompts."""


class Stop(enum.StrEnum):
    GIVEN = "given"
    NARROW = "narrow"
    PROMPTS = "prompts"
    LIMIT = "limit"


@dataclass(frozen=True)
class Width:
    """Half-widths of 95 % intervals of one speed-up, as shares of it; None: not known yet.

    `interval` is over prompts and repeats, as it is reported; `timing` over repeats of the same prompts.
    """

    interval: float | None
    timing: float | None

    @classmethod
    def from_speedup(cls, found: Speedup) -> "Width":
        timing = Interval(found.ratio_of_totals, found.timing_low, found.timing_high, found.prompts)
        return cls(_relative(found.interval), _relative(timing))

    @classmethod
    def from_plain(cls, seconds: Sequence[float]) -> "Width":
        """The terms of plain decoding alone, which has no speed-up: its seconds, one entry a repeat of all prompts."""
        return cls(None, _relative(intervals.mean(seconds)))

    @property
    def decisive(self) -> float | None:
        """The interval's, or that of timing alone for one or two prompts, which have no interval."""
        return self.timing if self.interval is None else self.interval

    def enough(self) -> Stop | None:
        """The reason to stop, or None if another repeat is needed."""
        if self.decisive is None:
            return None
        if self.decisive <= WANTED:
            return Stop.NARROW
        if self.interval is not None and self.timing is not None and self.timing <= PROMPTS_SHARE * self.interval:
            return Stop.PROMPTS
        return None


def _relative(found: Interval) -> float | None:
    """The half-width of an interval relative to its value, or None without an interval."""
    return None if found.low is None or found.high is None else (found.high - found.low) / 2 / found.value


@dataclass(frozen=True)
class Repeats:
    """How often passes were repeated, and why not more often.

    `width` is that of the speed-up that is known the least; None if the number was given.
    """

    asked: int | str
    done: int
    stopped: Stop
    width: Width | None = None

    def to_dict(self) -> Json:
        auto = {"wanted": WANTED, "limit": LIMIT} if self.asked == AUTO else {}
        return {"asked": self.asked, "done": self.done, "stopped": str(self.stopped), **auto,
                "half_width": None if self.width is None else asdict(self.width)}  # fmt: skip

    def line(self) -> str | None:
        """The line for the terminal; None if the number was given."""
        if self.width is None:
            return None
        widths = self.width.decisive, self.width.timing
        width, timing = ("an unknown width" if x is None else f"±{x:.1%}" for x in widths)
        why = {
            Stop.NARROW: f"the speed-up was known to ±{WANTED:.0%} {FURTHER} repeats before, now it is to {width}",
            Stop.PROMPTS: f"the speed-up is known to {width}, of these prompts to {timing}; "
            "more prompts would narrow it, more repeats would not",
            Stop.LIMIT: f"the limit; the speed-up is known to {width} (±{WANTED:.0%} asked for)",
        }[self.stopped]
        return f"repeats=auto stopped after {self.done}: {why}"


def decide_repeats(asked: int | str, done: int, widths: Callable[[int], Sequence[Width]]) -> Repeats | None:
    """Why `done` repeats (at least 1) are enough, or None if another one is needed.

    `widths(n)` are those of every speed-up that is measured (at least one) after n repeats; only "auto" asks.
    """
    if asked != AUTO:
        return Repeats(asked, done, Stop.GIVEN) if done >= int(asked) else None
    looked = done - FURTHER
    reasons = [width.enough() for width in widths(looked)] if looked >= FIRST_LOOK else [None]
    if None in reasons and done < LIMIT:
        return None
    why = Stop.LIMIT if None in reasons else Stop.PROMPTS if Stop.PROMPTS in reasons else Stop.NARROW
    widest = max(widths(done), key=lambda w: float("inf") if w.decisive is None else w.decisive)
    return Repeats(asked, done, why, widest)
