"""Runs on disk: record.json and prompts.jsonl of every folder below the given ones, checked where they are read.

A finished cell of a sweep may lie in several folders; it is one measurement.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from specsparse.errors import UserError
from specsparse.measure import conditions
from specsparse.measure.conditions import Conditions
from specsparse.report.record import RECORD_FILE, ROWS_FILE, STOPPED
from specsparse.support import notebook, options
from specsparse.support.files import Json, kept

CELL_FILE = "cell.json"
_PASS = frozenset({"prompt_id", "task", "side", "repeat", "counters", "decode_s"})


@dataclass(frozen=True)
class Run:
    """One finished run.

    Attributes:
        rows: the lines of its prompts.jsonl.
        also: other directories that hold the same measurement, taken over by sweeps.
    """

    directory: Path
    record: Json
    rows: tuple[Json, ...] = ()
    also: tuple[Path, ...] = ()

    @property
    def name(self) -> str:
        return str(self.record.get("name") or self.directory.name)

    @property
    def kind(self) -> str:
        """A name of `experiments.kind.KINDS`."""
        return str(self.record.get("kind") or self.config.get("kind") or "speed")

    @property
    def summary(self) -> Json:
        return self.record.get("summary") or {}

    @property
    def passes(self) -> list[Json]:
        """The rows that are timed passes; kinds of run may log others too."""
        return [row for row in self.rows if row.keys() >= _PASS]

    @property
    def conditions(self) -> Conditions:
        return conditions.from_record(self.record).conditions

    @property
    def config(self) -> Json:
        return self.record.get("config") or {}

    @property
    def manifest(self) -> Json:
        """See `specsparse.runtime.manifest`."""
        return self.record.get("manifest") or {}

    @property
    def origin(self) -> dict[str, object]:
        """What timings depend on beside the config: machine, kernels, model file and commit, None if unknown."""
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
        about = {
            "kind": self.kind,
            "date": self.manifest.get("date"),
            "commit": origin["commit"],
            "model": origin["model file"],
            "kernels": origin["kernels"],
            "directory": str(self.directory),
        }
        found = {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in self.summary.items()}
        values = {k: str(v) for k, v in (about | found).items() if v and isinstance(v, str | int)}
        return notebook.facts(self.name, values)

    @property
    def stopped(self) -> bool:
        """Whether a signal ended it before it had a result."""
        return self.record.get("state") == STOPPED

    def setting(self, key: str) -> object:
        """A value of the config by its dotted key, or None."""
        value: object = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value


def find(paths: Iterable[Path]) -> list[Run]:
    """Every finished run at or below the paths, in the order of the paths, jobs of a sweep by their number.

    A measurement that several sweeps hold is one run. Stopped runs are left out, see `stopped`.

    Raises:
        UserError: a path that is not there, one without a finished run, or a record that cannot be read.
    """
    everything = _all(paths)
    found = {run.directory: run for run in everything if not run.stopped}
    if not found:
        directories = ", ".join(str(run.directory) for run in everything)
        raise UserError(f"{directories}: stopped before it had a result; there is no finished run")
    return [replace(found[first], also=others) for first, others in once(found).items()]


def stopped(paths: Iterable[Path]) -> list[Run]:
    """Every run at or below the paths that a signal ended, in their order.

    Raises:
        UserError: as `find`.
    """
    return [run for run in _all(paths) if run.stopped]


def _all(paths: Iterable[Path]) -> list[Run]:
    found: dict[Path, Path] = {}
    for path in paths:
        if not path.exists():
            raise UserError(f"{path}: no such run; runs are written to runs/<name>/<date>_<time>")
        if path.is_file() and path.name != RECORD_FILE:
            raise UserError(f"{path}: is a file; give the folder of a run, or one of several runs")
        files = [path] if path.is_file() else sorted(path.rglob(RECORD_FILE), key=_order)
        if not files:
            raise UserError(f"{path}: no finished run there (no {RECORD_FILE} at or below it)")
        for file in files:
            found.setdefault(file.parent.resolve(), file.parent)
    return [read(directory) for directory in found.values()]


def read(directory: Path) -> Run:
    """The run of one directory.

    Raises:
        UserError: no record, or one that no run writes.
    """
    file = directory / RECORD_FILE
    record = _json(_text(file), str(file))
    if not isinstance(record, dict) or not isinstance(record.get("summary"), dict):
        raise UserError(f"{file}: not the record of a run (it has no summary)")
    _check(_Record, record, file)
    rows = directory / ROWS_FILE
    lines = _text(rows).splitlines() if rows.is_file() else []
    parsed = {f"{rows}:{i}": _json(line, f"{rows}:{i}") for i, line in enumerate(lines, 1) if line.strip()}
    found = {where: row for where, row in parsed.items() if isinstance(row, dict)}
    for where, row in found.items():
        if row.keys() >= _PASS:
            _check(_PassRow, row, where)
    return Run(directory, record, tuple(found.values()))


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise UserError(f"{where}: not JSON ({error})") from None
    except RecursionError:
        raise UserError(f"{where}: not the record of a run (nested too deep)") from None


def _order(file: Path) -> tuple[tuple[int, int | str], ...]:
    """Numbers as numbers, so that job 10 comes after job 9."""
    return tuple((0, int(p)) if p.isdecimal() else (1, p) for p in file.parts)


class Measurement(NamedTuple):
    """A finished cell of a sweep: its key, and the sha256 of the record that its run wrote."""

    key: str
    record: str


def measurement(directory: Path) -> Measurement | None:
    """The same for a cell as for the one that it was taken over from; None for other directories."""
    mark = kept(directory / CELL_FILE)
    key, record = mark.get("key"), mark.get("record")
    return Measurement(key, record) if key and record and record == record_hash(directory) else None


def once(directories: Iterable[Path]) -> dict[Path, tuple[Path, ...]]:
    """The first directory of each measurement, with the later ones that hold it too."""
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


def disagreements(runs: Sequence[Run]) -> list[str]:
    """What a reader must know before comparing these runs: another machine, commit, model file or kernels."""
    origins, out = [run.origin for run in runs], []
    for what in ("machine", "kernels", "model file", "commit"):
        values = list(dict.fromkeys(str(origin[what]) for origin in origins if origin[what] is not None))
        if len(values) > 1:
            out.append(f"{what}: {', '.join(values)}")
    return out


def conditions_apart(runs: Sequence[Run]) -> str | None:
    """One line if the runs were timed under conditions too far apart to be compared."""
    return conditions.differ([conditions.from_record(run.record) for run in runs])


# The types of a record.json and of a timed pass in prompts.jsonl, as far as reports read them.

_Group = dict | None


@dataclass(frozen=True, kw_only=True)
class _Open:
    """Other keys may hold anything."""

    others: Annotated[dict, options.Rest()] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _Policy(_Open):
    gamma: float | str | None = None


@dataclass(frozen=True, kw_only=True)
class _Sampling(_Open):
    temperature: float | str | None = None


@dataclass(frozen=True, kw_only=True)
class _Config(_Open):
    policy: _Policy = _Policy()
    sampling: _Sampling = _Sampling()


@dataclass(frozen=True, kw_only=True)
class _Git(_Open):
    commit: str | None = None


@dataclass(frozen=True, kw_only=True)
class _Manifest(_Open):
    cpu: _Group = None
    git: _Git = _Git()
    kernels: _Group = None
    model: _Group = None
    packages: _Group = None
    command: tuple[Any, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class _Conditions(_Open):
    read_bandwidth: float | None = None
    read_deviation: float | None = None
    plain_tokens_per_second: float | None = None
    plain_deviation: float | None = None
    other_load: float | None = None


@dataclass(frozen=True, kw_only=True)
class _Times(_Open):
    draft: float | None = None
    verify: float | None = None
    sample: float | None = None
    commit: float | None = None
    host: float | None = None


@dataclass(frozen=True, kw_only=True)
class _Counters(_Open):
    times: _Times = _Times()


@dataclass(frozen=True, kw_only=True)
class _Side(_Open):
    counters: _Counters = _Counters()


@dataclass(frozen=True, kw_only=True)
class _Task(_Open):
    speculative: _Side = _Side()


def _tasks(found: object) -> object:
    """The groups of a run by task."""
    for name, task in found.items() if isinstance(found, dict) else ():
        if not isinstance(task, dict):
            raise TypeError
        options.read(_Task, task, group=f"tasks.{name}")
    return found


@dataclass(frozen=True, kw_only=True)
class _Summary(_Open):
    conditions: _Conditions = _Conditions()
    identity: _Group = None


@dataclass(frozen=True, kw_only=True)
class _Record(_Open):
    summary: _Summary
    config: _Config = _Config()
    manifest: _Manifest = _Manifest()
    method: _Group = None
    tasks: Annotated[object | None, options.Read(_tasks, "a group of values by task")] = None


@dataclass(frozen=True, kw_only=True)
class _PassRow(_Open):
    prompt_id: str
    task: str | None
    side: str
    repeat: int
    counters: dict[str, Any]
    decode_s: float | None


def _check(kind: type, found: Json, where: object) -> None:
    """UserError with the file and the first value that no run writes."""
    try:
        options.read(kind, found, group="")
    except UserError as error:
        raise UserError(f"{where}: not as a run writes it: {error}") from None
