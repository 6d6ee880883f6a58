"""Runs on disk: record.json and prompts.jsonl of every directory below the given ones."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specsparse.errors import UserError
from specsparse.measure import conditions
from specsparse.measure.conditions import Conditions
from specsparse.report import measurements, schema
from specsparse.report.record import RECORD_FILE, ROWS_FILE, STOPPED
from specsparse.support import notebook
from specsparse.support.files import Json

_PASS = frozenset({"prompt_id", "task", "side", "repeat", "counters", "decode_s"})


@dataclass(frozen=True)
class Run:
    """One finished run.

    Attributes:
        directory: where it lies.
        record: its record.json.
        rows: the lines of its prompts.jsonl, one a timed pass.
        also: other directories that hold the same measurement, taken over by sweeps.
    """

    directory: Path
    record: Json
    rows: tuple[Json, ...] = ()
    also: tuple[Path, ...] = ()

    @property
    def name(self) -> str:
        """Of the experiment."""
        return str(self.record.get("name") or self.directory.name)

    @property
    def kind(self) -> str:
        """A name of `experiments.kind.KINDS`."""
        return str(self.record.get("kind") or self.config.get("kind") or "speed")

    @property
    def summary(self) -> Json:
        """What the run found."""
        return self.record.get("summary") or {}

    @property
    def passes(self) -> list[Json]:
        """The rows that are timed passes; kinds of run may log others."""
        return [row for row in self.rows if row.keys() >= _PASS]

    @property
    def conditions(self) -> Conditions:
        """What its timings were taken at."""
        return conditions.of_record(self.record).conditions

    @property
    def config(self) -> Json:
        """The whole composed config, nested."""
        return self.record.get("config") or {}

    @property
    def manifest(self) -> Json:
        """See `specsparse.runtime.manifest`."""
        return self.record.get("manifest") or {}

    def _repr_html_(self) -> str:
        """What it is and on what it ran, then the plain numbers of its summary."""
        about = {
            "kind": self.kind,
            "date": self.manifest.get("date"),
            "commit": ((self.manifest.get("git") or {}).get("commit") or "")[:10],
            "model": (self.manifest.get("model") or {}).get("file"),
            "kernels": _kernels(self.manifest.get("kernels") or {}),
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
        """A value of the config by its dotted key; None where there is none."""
        value: object = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value


def find(paths: Iterable[Path]) -> list[Run]:
    """Every finished run at or below the paths, in the order of the paths, jobs of a sweep by their number.

    A cell that a sweep took over from another is the same measurement, and no second run. Runs that were stopped are
    left out, see `stopped`.

    Raises:
        UserError: a path that is not there, one without a finished run, or a record that cannot be read.
    """
    everything = _all(paths)
    found = {run.directory: run for run in everything if not run.stopped}
    if not found:
        directories = ", ".join(str(run.directory) for run in everything)
        raise UserError(f"{directories}: stopped before it had a result; there is no finished run")
    return [replace(found[first], also=others) for first, others in measurements.once(found).items()]


def stopped(paths: Iterable[Path]) -> list[Run]:
    """Every run at or below the paths that a signal ended, in their order.

    Raises:
        UserError: as `find`.
    """
    return [run for run in _all(paths) if run.stopped]


def _all(paths: Iterable[Path]) -> list[Run]:
    """Every run at or below the paths."""
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
        UserError: no record, or one that is not ours.
    """
    file = directory / RECORD_FILE
    record = _json(_text(file), str(file))
    if not isinstance(record, dict) or not isinstance(record.get("summary"), dict):
        raise UserError(f"{file}: not the record of a run (it has no summary)")
    schema.check(schema.Record, record, file)
    rows = directory / ROWS_FILE
    lines = _text(rows).splitlines() if rows.is_file() else []
    parsed = {f"{rows}:{i}": _json(line, f"{rows}:{i}") for i, line in enumerate(lines, 1) if line.strip()}
    found = {where: row for where, row in parsed.items() if isinstance(row, dict)}
    for where, row in found.items():
        if row.keys() >= _PASS:
            schema.check(schema.PassRow, row, where)
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


def disagreements(runs: Sequence[Run]) -> list[str]:
    """What a reader must know before comparing these runs: another machine, commit, model file or kernels."""
    places = {
        "machine": lambda m: (m.get("cpu") or {}).get("model"),
        "kernels": lambda m: _kernels(m.get("kernels") or {}),
        "model file": lambda m: (m.get("model") or {}).get("file"),
        "commit": lambda m: ((m.get("git") or {}).get("commit") or "")[:10] or None,
    }
    out = []
    for what, get in places.items():
        values = list(dict.fromkeys(str(v) for run in runs if (v := get(run.manifest)) is not None))
        if len(values) > 1:
            out.append(f"{what}: {', '.join(values)}")
    return out


def conditions_apart(runs: Sequence[Run]) -> str | None:
    """One line where the runs were timed under conditions too far apart to be compared."""
    return conditions.differ([conditions.of_record(run.record) for run in runs])


def _kernels(status: Json) -> str | None:
    parts = [str(status[key]) for key in ("kernels", "isa") if status.get(key)]
    return " ".join(parts) or None
