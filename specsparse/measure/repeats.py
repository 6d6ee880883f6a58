"""How often a timing is repeated: as often as asked, or (`repeats=auto`) until the speed-up is known well enough.

Who stops when an interval looks narrow stops when it is too narrow by chance: looked at after every repeat, 95 %
intervals held the truth 83 to 93 % of the time. So `auto` decides without the last three repeats, which then are drawn
without regard to the decision (a fixed number of further ones is enough at any noise: Simons 1968, Annals of
Mathematical Statistics 39, 1946), and first looks after three, where the variance of each prompt has two degrees of
freedom. Coverage simulated at 1, 2, 3 and 6 prompts: at least 0.934 (tests/measure/test_intervals.py).
"""

import enum
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from specsparse.measure import intervals
from specsparse.measure.intervals import Interval
from specsparse.measure.speedup import Speedup
from specsparse.support.files import Json

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
    """Why there was no further repeat."""

    GIVEN = "given"
    NARROW = "narrow"
    PROMPTS = "prompts"
    LIMIT = "limit"


@dataclass(frozen=True)
class Width:
    """Half-widths of 95 % intervals of one speed-up, as shares of it; None: not known yet.

    Attributes:
        interval: of the speed-up as it is reported, over prompts and repeats.
        timing: of the same prompts, repeated: timing noise alone.
    """

    interval: float | None
    timing: float | None

    @classmethod
    def of(cls, found: Speedup) -> "Width":
        """Of a speed-up."""
        timing = Interval(found.ratio_of_totals, found.timing_low, found.timing_high, found.prompts)
        return cls(_relative(found.interval), _relative(timing))

    @classmethod
    def of_plain(cls, seconds: Sequence[float]) -> "Width":
        """Of plain decoding alone, which has no speed-up: of its seconds, one entry a repeat of all prompts."""
        return cls(None, _relative(intervals.mean(seconds)))

    @property
    def decisive(self) -> float | None:
        """The interval's; that of timing alone for one or two prompts, which have no interval."""
        return self.timing if self.interval is None else self.interval

    def enough(self) -> Stop | None:
        """Why no further repeat is needed; None: one is."""
        if self.decisive is None:
            return None
        if self.decisive <= WANTED:
            return Stop.NARROW
        if self.interval is not None and self.timing is not None and self.timing <= PROMPTS_SHARE * self.interval:
            return Stop.PROMPTS
        return None


def _relative(found: Interval) -> float | None:
    """Half-width of an interval as a share of its value; None where there is none."""
    return None if found.low is None or found.high is None else (found.high - found.low) / 2 / found.value


@dataclass(frozen=True)
class Repeats:
    """How often passes were repeated, and why not more often.

    Attributes:
        asked: a number, or "auto".
        done: repeats.
        stopped: why.
        width: of the speed-up that is known the least; None where the number was given.
    """

    asked: int | str
    done: int
    stopped: Stop
    width: Width | None = None

    def to_dict(self) -> Json:
        """As plain values for a record."""
        auto = {"wanted": WANTED, "limit": LIMIT} if self.asked == AUTO else {}
        return {"asked": self.asked, "done": self.done, "stopped": str(self.stopped), **auto,
                "half_width": None if self.width is None else asdict(self.width)}  # fmt: skip

    def line(self) -> str | None:
        """For the terminal; None where the number was given."""
        if self.width is None:
            return None
        width, timing = _shown(self.width.decisive), _shown(self.width.timing)
        why = {
            Stop.NARROW: f"the speed-up was known to ±{WANTED:.0%} {FURTHER} repeats before, now it is to {width}",
            Stop.PROMPTS: f"the speed-up is known to {width}, of these prompts to {timing}; "
            "more prompts would narrow it, more repeats would not",
            Stop.LIMIT: f"the limit; the speed-up is known to {width} (±{WANTED:.0%} asked for)",
        }[self.stopped]
        return f"repeats=auto stopped after {self.done}: {why}"


def _shown(width: float | None) -> str:
    return "an unknown width" if width is None else f"±{width:.1%}"


def most(asked: int | str) -> int:
    """Repeats at most."""
    return LIMIT if asked == AUTO else int(asked)


def decide(asked: int | str, done: int, widths: Callable[[int], Sequence[Width]]) -> Repeats | None:
    """Whether `done` repeats are enough; None: another one.

    Args:
        asked: a positive number, or "auto".
        done: repeats so far, at least 1.
        widths: of every speed-up that is measured, at least one, by so many first repeats; only "auto" asks.
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
