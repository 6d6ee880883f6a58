"""The methods of all runs, prompt by prompt, under names that tell them apart: by the settings that differ."""

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from specsparse.measure import intervals
from specsparse.measure.intervals import Interval
from specsparse.report import record
from specsparse.report.record import HOST, PLAIN, SPECULATIVE
from specsparse.report.runs import Run
from specsparse.runtime.metrics import Counters
from specsparse.support.files import Json

GAMMA, TEMPERATURE = "policy.gamma", "sampling.temperature"
NOTHING = "-"
"""The value of a setting that a config does not have."""
_PAIR = ("drafter.name", "verifier.name")
_CONSTANTS = (GAMMA, TEMPERATURE, "max_tokens")
NOT_A_METHOD = (
    "tracker.", "data.", "compare.", "certify.", "roofline.", "train.", "kind", "stream", "warmup",
    "seed", "repeats", "time_split", "debug", "trace", "record_laws", "loop", "sampling.ignore_eos",
)  # fmt: skip
"""Beginnings of the settings that labels leave out."""
_IGNORED = frozenset({"name", "download"})
_CHOICES = {"model": "model.path", "data": "data.source"}
"""The setting of a group that its other settings come with; GROUP.name in the other groups."""
_WORDS = {"policy.gamma": "gamma", "sampling.temperature": "T"}


class Sample(NamedTuple):
    """One prompt on both sides, its repeats summed; seconds for plain decoding's number of tokens."""

    prompt: str
    task: str
    plain_s: float
    method_s: float
    plain: Counters
    method: Counters


Term = Callable[[Sample], float]
MEASURES: dict[str, tuple[Term, Term]] = {
    "speed-up": (lambda s: s.plain_s, lambda s: s.method_s),
    "tokens per second": (lambda s: s.method.num_emitted_tokens, lambda s: s.method.times.total),
    "plain tokens per second": (lambda s: s.plain.num_emitted_tokens, lambda s: s.plain.times.total),
    "tokens per target pass": (lambda s: s.method.num_emitted_tokens, lambda s: s.method.num_rounds),
    "draft acceptance rate": (lambda s: s.method.num_accepted_tokens, lambda s: s.method.num_draft_tokens),
    "drafted tokens a round": (lambda s: s.method.num_draft_tokens, lambda s: s.method.num_rounds),
}
"""Sums over prompts of which each measure is the quotient. Seconds are of decoding alone."""
SHARES = frozenset({"draft acceptance rate"})
"""Those between 0 and 1."""


@dataclass(frozen=True)
class ReportedMethod:
    run: Run
    side: str  # its name in the rows
    parts: tuple[str, ...]  # drafter and verifier, or the one name of a side of a comparison
    names: dict[str, str]  # words that tell it from the others, by key of the config
    samples: tuple[Sample, ...]

    @property
    def label(self) -> str:
        return self.without("")

    def without(self, key: str) -> str:
        """The label without one key of the config: the name of a line over that key."""
        return ", ".join(word for name, word in self.names.items() if name != key) or " x ".join(self.parts)

    @property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(s.task for s in self.samples))

    def of_task(self, task: str) -> "ReportedMethod":
        return replace(self, samples=tuple(s for s in self.samples if s.task == task))

    def share(self, part: Term, whole: Term) -> Interval | None:
        """The ratio of two sums over the prompts, between 0 and 1, with its interval."""
        return intervals.share([part(s) for s in self.samples], [whole(s) for s in self.samples])

    def measured(self, name: str) -> Interval | None:
        over, under = ([term(s) for s in self.samples] for term in MEASURES[name])
        return intervals.share(over, under) if name in SHARES else intervals.ratio(over, under)

    def speedup(self) -> Interval | None:
        return self.measured("speed-up")

    def draws_z(self) -> float | None:
        """As in `metrics.DEFINITIONS`, of the rows, so that older records have it too."""
        return record.draws_z([p for p in self.run.passes if p.side == self.side])

    def positions(self) -> int:
        """Draft positions up to the deepest accepted one."""
        return max((len(s.method.num_accepted_tokens_per_pos) for s in self.samples), default=0)

    def accepted_at(self, position: int) -> Interval | None:
        """Accepted at a position, 0 first / rounds with a draft."""

        def accepted(sample: Sample) -> float:
            found = sample.method.num_accepted_tokens_per_pos
            return found[position] if position < len(found) else 0

        return self.share(accepted, lambda s: s.method.num_drafts)


def from_runs(runs: Sequence[Run]) -> list[ReportedMethod]:
    """The methods of all runs that decoded plainly beside them, in order."""
    sides = [(run, dict.fromkeys(p.side for p in run.passes)) for run in runs]
    found = [(run, side) for run, named in sides for side in named if side not in (PLAIN, HOST)]
    settings = differing_settings([run.config for run, _ in found])
    differing = [s for s in settings if s.key not in _PAIR and not s.key.startswith(NOT_A_METHOD)]
    pairs: list[tuple[str, ...]] = []
    for run, side in found:
        verifier = (run.record.get("method") or {}).get("verifier") or run.setting("verifier.name")
        own = str(run.setting("drafter.name")), str(verifier)
        pairs.append(own if side == SPECULATIVE else tuple(side.split(" x ")))
    columns = list(zip(*pairs)) if len({len(pair) for pair in pairs}) == 1 else [()] * max(map(len, pairs), default=0)
    differing_parts = [i for i, column in enumerate(columns) if len(set(column)) != 1]  # all if their number differs
    words = [" x ".join(pair[i] for i in differing_parts if i < len(pair)) for pair in pairs]
    out = []
    for i, (run, side) in enumerate(found):
        names = {"pair": words[i]} if words[i] else {}
        names |= {s.key: f"{s.name} {s.values[i]}" for s in differing if s.values[i] != NOTHING}
        out.append(ReportedMethod(run, side, pairs[i], names, _samples(run, side)))
    return _told_apart([m for m in out if m.samples])


def constants(methods: Sequence[ReportedMethod]) -> list[str]:
    """Words for the settings that all methods share; labels leave these out."""
    out = []
    if len({len(m.parts) for m in methods}) == 1:
        columns = [set(column) for column in zip(*(m.parts for m in methods), strict=True)]
        same = [column.pop() if len(column) == 1 else None for column in columns]
        words = [f"{what} {one}" for what, one in zip(("drafter", "verifier"), same, strict=False) if one]
        out = words if len(words) < len(columns) else [" x ".join(map(str, same))]
    for key in _CONSTANTS:
        values = {word(m.run.setting(key)) for m in methods} - {NOTHING}
        if len(values) == 1:
            out.append(f"{setting_name(key, _CONSTANTS)} {values.pop()}")
    return out


def fastest(methods: Sequence[ReportedMethod], most: int) -> list[ReportedMethod]:
    """The methods with the highest speed-up, in the given order."""
    kept = ranked(methods)[:most]
    return [m for m in methods if m in kept]


def ranked(methods: Sequence[ReportedMethod]) -> list[ReportedMethod]:
    """The fastest first, by speed-up; those without an interval, which are of one or two prompts, after the others."""
    found = [(m, m.speedup() or intervals.Interval(0, None, None, 0)) for m in methods]
    return [m for m, s in sorted(found, key=lambda pair: (pair[1].low is None, -pair[1].value))]


def grouped(methods: Sequence[ReportedMethod], most: int) -> list[str]:
    """The group of each method, at most `most` of them: single methods, or the values of the part that has the most."""
    if len(methods) <= most:
        return [m.label for m in methods]
    keys = dict.fromkeys(key for m in methods for key in m.names)
    columns = [[m.names.get(key, "others") for m in methods] for key in keys]
    few = [column for column in columns if len(set(column)) <= most]
    return max(few, key=lambda column: len(set(column)), default=["all"] * len(methods))


def _told_apart(methods: list[ReportedMethod]) -> list[ReportedMethod]:
    """Adds the sweep's name to labels that are equal, or the end of the directory if that is equal too."""
    labels = Counter(m.label for m in methods)
    twice = [i for i, m in enumerate(methods) if labels[m.label] > 1]
    if not twice:
        return methods
    paths = [m.run.directory.resolve() for m in methods]
    sweeps = [path.parent.name for path in paths]

    def tell_apart(words: Sequence[Hashable]) -> bool:
        return len({(methods[i].label, words[i]) for i in twice}) == len(twice)

    if tell_apart(sweeps):
        return [replace(m, names={**m.names, "sweep": sweep}) for m, sweep in zip(methods, sweeps, strict=True)]
    length = next(n for n in itertools.count(2) if tell_apart([path.parts[-n:] for path in paths]))
    out = list(methods)
    for i in twice:
        out[i] = replace(methods[i], names={**methods[i].names, "directory": "/".join(paths[i].parts[-length:])})
    return out


def _samples(run: Run, side: str) -> tuple[Sample, ...]:
    """The prompts that both sides decoded, repeats paired and summed."""
    sums: dict[str, Sample] = {}
    for method, plain, seconds in record.pairs(run.passes, side):
        nothing = Sample(method.prompt_id, method.task, 0.0, 0.0, Counters(), Counters())
        before = sums.get(method.prompt_id, nothing)
        sums[method.prompt_id] = before._replace(
            plain_s=before.plain_s + plain.decode_s,
            method_s=before.method_s + seconds,
            plain=before.plain + plain.counters,
            method=before.method + method.counters,
        )
    return tuple(sums.values())


class Setting(NamedTuple):
    """A setting that differs, with a word for each config."""

    key: str
    name: str
    values: tuple[str, ...]


def differing_settings(configs: Sequence[Json]) -> list[Setting]:
    """The settings that differ between the configs.

    A choice brings the other settings of its group along: they are left out if the choice alone decides them.
    """
    flats = [dict(flat(config)) for config in configs]
    keys = dict.fromkeys(key for one in flats for key in one)
    differing = [k for k in keys if k not in _IGNORED and len({_same(one.get(k)) for one in flats}) > 1]
    out = []
    for key in differing:
        group, dot, _ = key.partition(".")
        choice = _CHOICES.get(group, f"{group}.name")
        if dot and key != choice and choice in differing:
            decided = {(_same(one.get(choice)), _same(one.get(key))) for one in flats}
            if len(decided) == len({chosen for chosen, _ in decided}):
                continue
        values = [one.get(key) for one in flats]
        words = tuple(map(word, values))
        if len(set(words)) != len(set(map(_same, values))):  # short words would look the same
            words = tuple(NOTHING if value is None else str(value) for value in values)
        out.append(Setting(key, setting_name(key, keys), words))
    return out


def setting_name(key: str, keys: Iterable[str]) -> str:
    """The shortest name of a key that no other of the keys could be meant by."""
    if key in _WORDS:
        return _WORDS[key]
    group, _, last = key.rpartition(".")
    if group and key == _CHOICES.get(group, f"{group}.name"):
        return group
    groups = {other.partition(".")[0] for other in keys if "." in other}
    ends = Counter(other.rpartition(".")[2] for other in keys)
    return last if ends[last] <= 1 and last not in groups else key


def word(value: object) -> str:
    """A value as it is set; the last part of a path."""
    if value is None:
        return NOTHING
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(str, value))}]"
    return str(value).rstrip("/").rsplit("/", 1)[-1]


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _same(value: object) -> str:
    """0 and 0.0 are one setting, 1 and true are two."""
    return repr(float(value)) if isinstance(value, int) and not isinstance(value, bool) else repr(value)
