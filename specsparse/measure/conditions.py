"""Conditions of the machine while something was timed, and which timings may be compared.

Each rule stands here once, for the terminal, the records and the pages:

    differ      timings taken under conditions too far apart
    busy        one timing whose machine changed under it
    ties        speed-ups that their intervals do not tell apart
    impossible  a speed-up that no method can have
    all_skewed  speed-ups whose interval may not be believed
"""

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import NamedTuple

from specsparse.measure.intervals import LEAST_PROMPTS, Interval
from specsparse.support.files import Json

TOLERANCE = 0.10
"""Read bandwidths, or plain speeds, that differ by more than this share are not those of one machine."""
BUSY_DEVIATION = 0.05
"""Relative deviation between the repeats of one timing from which the machine counts as busy."""
NOISE = 0.02
"""Share by which a speed-up may exceed its bound: what timer and machine vary by even when nothing else runs."""
TIED = "=: the 95 % intervals overlap; the order among these is not certain"
"""The line under a table or page that explains the mark of `Rank`."""
DEFINITIONS = {
    "conditions.read_bandwidth": "bytes read per second: median of samples before each repeat and at the end",
    "conditions.read_deviation": "standard deviation of those samples / their mean",
    "conditions.plain_tokens_per_second": "of plain decoding, timed in turn with the rest",
    "conditions.plain_deviation": "standard deviation of plain decoding's time between repeats / its mean",
    "conditions.other_load": "mean cores that other processes and other guests of the host kept busy meanwhile",
}
"""For records, beside `runtime.metrics.DEFINITIONS`."""
_WORK = ("model", "ffn", "predictor", "placement", "data", "max_tokens", "sampling", "seed", "common_noise")
"""Keys of a config that plain decoding's speed depends on."""


@dataclass(frozen=True)
class Conditions:
    """Conditions of a timing, each None if it is not known; `DEFINITIONS` says what they are."""

    read_bandwidth: float | None = None
    read_deviation: float | None = None
    plain_tokens_per_second: float | None = None
    plain_deviation: float | None = None
    other_load: float | None = None

    def to_dict(self) -> dict[str, float | None]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Json) -> "Conditions":
        """The inverse of `to_dict`; keys of another version are left out."""
        return cls(**{f.name: values.get(f.name) for f in fields(cls)})

    def parts(self) -> list[str]:
        read = None if self.read_bandwidth is None else self.read_bandwidth / 1e9
        known = (
            (read, "read bandwidth {:.1f} GB/s"),
            (self.plain_tokens_per_second, "plain decoding {:.1f} tok/s"),
            (self.other_load, "other processes on {:.1f} cores"),
        )
        return [text.format(value) for value, text in known if value is not None]

    def line(self) -> str | None:
        """The line for the terminal; None if nothing is known."""
        return f"taken at: {', '.join(self.parts())}" if self.parts() else None


UNKNOWN = Conditions()


class ResultConditions(NamedTuple):
    """Conditions of one result. Those of one `machine`, and of one `work` (text and kernels), are compared."""

    conditions: Conditions
    machine: str = ""
    work: str = ""


def from_record(record: Json) -> ResultConditions:
    """The conditions of a record.json; older ones have the bandwidth and the plain speed in other places, or not at
    all."""
    summary, manifest = record.get("summary") or {}, record.get("manifest") or {}
    cpu, config = manifest.get("cpu") or {}, record.get("config") or {}
    found = Conditions.from_dict(summary.get("conditions") or {})
    if "conditions" not in summary:
        rates = (summary.get("plain") or {}).get("rates") or {}
        found = Conditions(summary.get("read_bandwidth"), plain_tokens_per_second=rates.get("tokens_per_second"))
    machine = json.dumps([cpu.get("model"), cpu.get("cores")], default=str)
    work = [machine, manifest.get("kernels"), manifest.get("model"), *map(config.get, _WORK)]
    return ResultConditions(found, machine, json.dumps(work, sort_keys=True, default=str))


def differ(results: Sequence[ResultConditions]) -> str | None:
    """One line if results of the same work on the same machine were taken more than `TOLERANCE` apart, else None."""

    def apart(values: Sequence[tuple[str, float | None]]) -> tuple[float, float] | None:
        """Least and largest of the key whose values lie furthest apart; None if no key has values too far apart."""
        by_key: dict[str, list[float]] = {}
        for key, value in values:
            if value:
                by_key.setdefault(key, []).append(value)
        least, most = max(((min(v), max(v)) for v in by_key.values()), key=lambda r: r[1] / r[0], default=(1.0, 1.0))
        return (least, most) if most > least * (1 + TOLERANCE) else None

    read = apart([(r.machine, r.conditions.read_bandwidth) for r in results])
    plain = apart([(r.work, r.conditions.plain_tokens_per_second) for r in results])
    parts = [f"read bandwidth {read[0] / 1e9:.1f} to {read[1] / 1e9:.1f} GB/s"] if read else []
    parts += [f"plain decoding {plain[0]:.1f} to {plain[1]:.1f} tok/s"] if plain else []
    if not parts:
        return None
    return f"taken more than {TOLERANCE:.0%} apart: {', '.join(parts)}; compare no tok/s and no close speed-ups"


def deviation(values: Sequence[float]) -> float | None:
    """Relative sample standard deviation; None for fewer than two."""
    return statistics.stdev(values) / statistics.fmean(values) if len(values) > 1 else None


def busy(conditions: Conditions) -> str | None:
    """One line if the machine changed between the repeats of one timing, else None."""
    deviations = {"read bandwidth": conditions.read_deviation, "plain decoding's time": conditions.plain_deviation}
    varied = [f"{name} varied by {x:.0%}" for name, x in deviations.items() if x is not None and x > BUSY_DEVIATION]
    if not varied:
        return None
    return f"{' and '.join(varied)} between repeats: the machine was busy, take the figures with care"


def impossible(speedup: float | None, tokens_per_pass: float | None) -> str | None:
    """One line if a measured speed-up is above the tokens that a pass of the same model gave, else None.

    A speculative round costs one pass of the target at least, and a plain token costs one, so tokens per pass bound the
    speed-up (Leviathan et al. 2023, theorem 3.8 with drafts that cost nothing); `NOISE` is allowed.
    """
    if speedup is None or tokens_per_pass is None or speedup <= tokens_per_pass * (1 + NOISE):
        return None
    return (
        f"speed-up {speedup:.2f} is impossible with {tokens_per_pass:.2f} tokens per target pass: it cannot come from "
        "the method, the machine changed between the sides"
    )


def all_busy(found: Iterable[tuple[str, Conditions]]) -> list[str]:
    """`busy` of several timings by name; several busy ones share a line."""
    restless = [(name, taken, line) for name, taken in found if (line := busy(taken))]
    if len(restless) < 2:
        return [f"{name}: {line}" for name, _, line in restless]
    values = [x or 0.0 for _, taken, _ in restless for x in (taken.read_deviation, taken.plain_deviation)]
    names = ", ".join(name for name, *_ in restless)
    return [
        "the machine was busy, take the figures with care: read bandwidth or plain decoding varied by up to "
        f"{max(values):.0%} between the repeats of {len(restless)} timings ({names})"
    ]


def all_impossible(found: Iterable[tuple[str, float | None, float | None]]) -> list[str]:
    """`impossible` of names, speed-ups and tokens per pass; several impossible ones share a line."""
    beyond = [each for each in found if impossible(*each[1:])]
    if len(beyond) < 2:
        return [f"{name}: {impossible(*rest)}" for name, *rest in beyond]
    each = ", ".join(f"{name} ({speedup:.2f} with {tokens:.2f})" for name, speedup, tokens in beyond)
    return [
        f"speed-ups that are impossible with their tokens per target pass: {each}: they cannot come from the method, "
        "the machine changed between the sides"
    ]


def all_skewed(found: Iterable[tuple[str, Interval | None]]) -> list[str]:
    """One line that names the speed-ups whose prompts are too skewed for their interval, else none."""
    names = [name for name, interval in found if interval is not None and interval.skewed]
    if not names:
        return []
    return [
        f"skewed: a few prompts gain far more or less than the rest ({', '.join(names)}): the 95 % "
        f"interval{'s' * (len(names) > 1)} may not be believed; look at the prompts one by one, or take more of them"
    ]


def doubts(conditions: Conditions, found: Mapping[str, str | None]) -> tuple[str, ...]:
    """The doubts about one timing, a line each: a busy machine, and the lines of `found`, by name."""
    named = [f"{name}: {line}" if name else line for name, line in found.items() if line]
    return tuple(filter(None, [busy(conditions), *named]))


class Rank(NamedTuple):
    """A place, 1 the best; `tied` if another one shares it."""

    place: int
    tied: bool

    def __str__(self) -> str:
        return f"{self.place}{'=' if self.tied else ''}"


def ties(found: Sequence[Interval]) -> list[list[int]]:
    """Groups of indices, the best first, that intervals do not tell apart.

    A group is the best that is left and, going down, all whose interval overlaps with its own; the first whose interval
    does not begins the next group. A missing interval overlaps with everything.
    """
    out: list[list[int]] = []
    for i in sorted(range(len(found)), key=lambda i: -found[i].value):
        best, high = found[out[-1][0]].low if out else None, found[i].high
        if out and (best is None or high is None or high >= best):
            out[-1].append(i)
        else:
            out.append([i])
    return out


def ranks(found: Sequence[Interval | None]) -> list[Rank | None]:
    """The rank of each, in the order given; None for those without an interval, and for all if none stands out."""
    known = {i: interval for i, interval in enumerate(found) if interval is not None and interval.low is not None}
    out: list[Rank | None] = [None] * len(found)
    where, groups = list(known), ties(list(known.values()))
    place = 1
    for group in groups if len(groups) > 1 else []:
        for i in group:
            out[where[i]] = Rank(place, len(group) > 1)
        place += len(group)
    return out


def rank_lines(found: Sequence[Interval | None]) -> list[str]:
    """Lines under a table or page on its ranks: the meaning of a tie, and why some have no rank."""
    ranked = ranks(found)
    timed = [(interval, rank) for interval, rank in zip(found, ranked, strict=True) if interval is not None]
    out = []
    if any(rank and rank.tied for rank in ranked):
        out.append(TIED)
    if len(timed) > 1 and all(rank is None for _, rank in timed) and any(i.low is not None for i, _ in timed):
        out.append("no ranks: the 95 % intervals overlap, so that none is known to be the fastest")
    bare = sum(interval.low is None for interval, _ in timed)
    if bare and len(timed) > 1:
        out.append(
            f"no rank for {bare} of {len(timed)}: there is no 95 % interval over fewer than {LEAST_PROMPTS} prompts"
        )
    return out
