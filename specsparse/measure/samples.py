"""Repeated timings of one test, and the statistics that are reported."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from specsparse.support.json_files import Json


@dataclass(frozen=True)
class Samples:
    """Timings of one test on one engine. Invariant: at least one, all positive.

    Attributes:
        seconds: one entry a repeat.
        tokens: processed in each.
    """

    seconds: tuple[float, ...]
    tokens: int

    @property
    def rates(self) -> tuple[float, ...]:
        """Tokens per second of each repeat."""
        return tuple(self.tokens / s for s in self.seconds)

    @property
    def median_s(self) -> float:
        """Median seconds of a repeat."""
        return statistics.median(self.seconds)

    def to_dict(self) -> Json:
        """The timings and their summary; `sd` is the sample deviation, 0 for one repeat."""
        return {
            "tokens": self.tokens,
            "seconds": list(self.seconds),
            "tokens_per_second": summary(self.rates),
            "ms_per_token": 1e3 * self.median_s / self.tokens,
        }


def summary(values: Sequence[float]) -> dict[str, float]:
    """Mean, sample deviation (0 for one value), median, least and largest."""
    return {
        "mean": statistics.fmean(values),
        "sd": statistics.stdev(values) if len(values) > 1 else 0.0,
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
    }


def paired_ratio(top: Sequence[float], bottom: Sequence[float]) -> dict[str, float]:
    """`top / bottom` repeat by repeat: neighbours in time are compared, so that drift hits both."""
    return summary([a / b for a, b in zip(top, bottom, strict=True)])
