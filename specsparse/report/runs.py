"""Runs on disk: record.json and prompts.jsonl of every folder below the given ones, checked when they are read.

A finished cell of a sweep may lie in several folders; it is one measurement.
"""

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from specsparse.errors import UserError
from specsparse.measure import conditions
from specsparse.measure.conditions import Conditions
from specsparse.report.record import RECORD_FILE, ROWS_FILE, STOPPED, Pass, StandIn
from specsparse.support import notebook, options
from specsparse.support.files import Json, json_lines, kept, read_text

CELL_FILE = "cell.json"
_PASS = frozenset(field.name for field in fields(Pass) if field.name != "seed")


@dataclass(frozen=True)
class Run:
    directory: Path
    record: Json
    rows: tuple[Json, ...] = ()  # the lines of its prompts.jsonl
    also: tuple[Path, ...] = ()  # other directories that hold the same measurement, taken over by sweeps

    @property
    def name(self) -> str:
        return str(self.record.get("name") or self.directory.name)

    @property
    def kind(self) -> str:
        return str(self.record.get("kind") or self.config.get("kind") or "speed")

    @property
    def summary(self) -> Json:
        return self.record.get("summary") or {}

    @cached_property
    def passes(self) -> list[Pass]:
        """The rows that are timed passes; kinds of run may log others too."""
        return [Pass.from_row(row) for row in self.rows if row.keys() >= _PASS]

    @property
    def conditions(self) -> Conditions:
        return conditions.from_record(self.record).conditions

    @property
    def stand_in(self) -> StandIn | None:
        found = self.record.get("stand_in")
        return StandIn(**found) if found else None

    @property
    def config(self) -> Json:
        return self.record.get("config") or {}

    @property
    def manifest(self) -> Json:
        return self.record.get("manifest") or {}

    @property
    def origin(self) -> dict[str, object]:
        """Machine, kernels, model file and commit, on which timings depend beside the config; None if unknown."""
        found = self.manifest
        kernels = found.get("kernels") or {}
        return {
            "machine": (found.get("cpu") or {}).get("model"),
            "kernels": " ".join(str(kernels[key]) for key in ("kernels", "isa") if kernels.get(key)) or None,
            "model file": (found.get("model") or {}).get("file"),
            "commit": ((found.get("git") or {}).get("commit") or "")[:10] or None,
        }

    def _repr_html_(self) -> str:
        """Kind and origin, then the plain numbers of its summary."""
        origin = self.origin
        about = {"kind": self.kind, "date": self.manifest.get("date"), "commit": origin["commit"]}
        about |= {"model": origin["model file"], "kernels": origin["kernels"], "directory": str(self.directory)}
        found = {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in self.summary.items()}
        values = {k: str(v) for k, v in (about | found).items() if v and isinstance(v, str | int)}
        return notebook.table(values.items(), title=self.name)

    @property
    def stopped(self) -> bool:
        """Whether a signal ended it before it had a result."""
        return self.record.get("state") == STOPPED

    def setting(self, key: str) -> Any:
        """A value of the config by its dotted key, or None."""
        value: Any = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value


def find(paths: Iterable[Path]) -> list[Run]:
    """Every finished run at or below the paths, in the order of the paths, jobs of a sweep by their number.

    A measurement that several sweeps hold is one run. UserError: a path without a finished run, or a record that cannot
    be read.
    """
    everything = _all(paths)
    found = {run.directory: run for run in everything if not run.stopped}
    if not found:
        directories = ", ".join(str(run.directory) for run in everything)
        raise UserError(f"{directories}: stopped before it had a result; there is no finished run")
    return [replace(found[first], also=others) for first, others in once(found).items()]


def stopped(paths: Iterable[Path]) -> list[Run]:
    """Every run at or below the paths that a signal ended, in their order. UserError: as `find`."""
    return [run for run in _all(paths) if run.stopped]


def _all(paths: Iterable[Path]) -> list[Run]:
    found: dict[Path, Path] = {}
    for path in paths:
        in_order = lambda file: [(0, int(p)) if p.isdecimal() else (1, p) for p in file.parts]  # noqa: E731 (9, 10)
        files = [path] if path.name == RECORD_FILE else sorted(path.rglob(RECORD_FILE), key=in_order)
        if not files:
            place = "runs are written to runs/<name>/<date>_<time>"
            raise UserError(f"{path}: no finished run there (no {RECORD_FILE} at or below it); {place}")
        for file in files:
            found.setdefault(file.parent.resolve(), file.parent)
    return [read(directory) for directory in found.values()]


def read(directory: Path) -> Run:
    """The run of one directory. UserError: no record, or one that no run writes."""
    file, rows = directory / RECORD_FILE, directory / ROWS_FILE
    try:
        record = json.loads(read_text(file))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: not JSON ({error})") from None
    _check({"record.summary": _GROUP}, {"record": record}, file, needed=("record", "summary"))
    _check(_RECORD, record, file)
    parsed = json_lines(rows) if rows.is_file() else ()
    found = {where: row for where, row in parsed if isinstance(row, dict)}
    for where, row in found.items():
        if row.keys() >= _PASS:
            _check(_ROW, row, where, needed=("prompt_id", "side", "repeat", "counters", "token_ids"))
    return Run(directory, record, tuple(found.values()))


class Measurement(NamedTuple):
    """A finished cell of a sweep: its key, and the sha256 of the record that its run wrote."""

    key: str
    record: str


def measurement(directory: Path) -> Measurement | None:
    """The measurement of a finished cell, equal for its copies in later sweeps; None for other directories."""
    mark = kept(directory / CELL_FILE)
    key, record = mark.get("key"), mark.get("record")
    return Measurement(key, record) if key and record and record == record_hash(directory) else None


def once(directories: Iterable[Path]) -> dict[Path, tuple[Path, ...]]:
    """The first directory of each measurement, and the later directories that hold a copy."""
    places: dict[Measurement | Path, list[Path]] = {}
    for directory in directories:
        places.setdefault(measurement(directory) or directory, []).append(directory)
    return {first: tuple(others) for first, *others in places.values()}


def record_hash(directory: Path) -> str:
    """sha256 of the record; empty without one. The mark of a cell beside another record than its own is no mark."""
    try:
        return hashlib.sha256((directory / RECORD_FILE).read_bytes()).hexdigest()
    except OSError:
        return ""


def stand_ins(runs: Sequence[Run]) -> list[str]:
    """A line on each run that is a stand-in."""
    return [f"{run.directory}: {run.stand_in}" for run in runs if run.stand_in]


def disagreements(runs: Sequence[Run]) -> list[str]:
    """A line for each difference that makes seconds of these runs incomparable: conditions, machine, kernels, model
    file, commit."""
    apart = conditions.differ([conditions.from_record(run.record) for run in runs])
    out = [apart] if apart else []
    for what in runs[0].origin if runs else ():
        values = list(dict.fromkeys(str(run.origin[what]) for run in runs if run.origin[what] is not None))
        if len(values) > 1:
            out.append(f"these runs do not share one {what}: {', '.join(values)}: compare ratios, not seconds")
    return out


_GROUP, _NUMBER, _NAME, _LIST = "a group of values", "a number", "a text", "a list"
_TYPES: dict[str, tuple[type, ...]] = {
    _GROUP: (dict,), _NUMBER: (int, float), _NAME: (str,), _LIST: (list,), "a number or a text": (int, float, str),
}  # fmt: skip
_TIMES = "tasks.*.speculative.counters.times"
_RECORD = {
    **dict.fromkeys(("config.policy.gamma", "config.sampling.temperature"), "a number or a text"),
    **dict.fromkeys(("stand_in", "stand_in.asked", "stand_in.used"), _GROUP), "stand_in.why": _NAME,
    **{f"manifest.{part}": _GROUP for part in ("cpu", "git", "kernels", "model", "packages")},
    "manifest.git.commit": _NAME, "manifest.command": _LIST, "method": _GROUP, "summary.identity": _GROUP,
    **{f"summary.conditions.{name}": _NUMBER for name in (
        "read_bandwidth", "read_deviation", "plain_tokens_per_second", "plain_deviation", "other_load")},
    **{f"{_TIMES}.{stage}": _NUMBER for stage in ("draft", "verify", "sample", "commit", "host")},
}  # fmt: skip
"""Types of the values of a record.json that reports read, by dotted key; * is any key. All may be left out or null."""
_ROW = {
    "prompt_id": _NAME, "task": _NAME, "side": _NAME, "repeat": _NUMBER, "counters": _GROUP, "decode_s": _NUMBER,
    "token_ids": _LIST,
}  # fmt: skip
"""The same of a timed pass in prompts.jsonl."""


def _check(types: Mapping[str, str], found: Json, where: object, *, needed: Collection[str] = ()) -> None:
    """UserError with the file and the first value that no run writes; those that are `needed` are not null."""
    for path, wanted in types.items():
        values, parts = [("", found)], path.split(".")
        for i, part in enumerate(parts):
            kind, inner = (wanted if i + 1 == len(parts) else _GROUP), []
            for label, group in values:
                for key in group if part == "*" else [part]:
                    name, value = f"{label}.{key}".lstrip("."), group.get(key)
                    fits = isinstance(value, _TYPES[kind]) and not isinstance(value, bool)
                    if not fits and (value is not None or key in needed):
                        problem = f"{name}={options.shown(value)} must be {kind}"
                        raise UserError(f"{where}: not as a run writes it: {problem}")
                    inner += [] if value is None else [(name, value)]
            values = inner
