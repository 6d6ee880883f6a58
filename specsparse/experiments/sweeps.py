"""Sweeps: a cell that has finished is known by its hash and is not run twice, and a table over all runs ends them.

The hash is over what a result depends on: the config, the files it names, the code, the machine. A sweep that was
stopped is started again by the same command; what had finished is copied into the new sweep, so that it is whole.
"""

import contextlib
import hashlib
import itertools
import json
import os
import shutil
import socket
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specsparse import kernels
from specsparse.errors import UserError, fail
from specsparse.experiments.kinds import neuron_placement, sparsity, train_drafter
from specsparse.experiments.settings import STAND_IN, RunConfig
from specsparse.kernels.processor import cpu_info
from specsparse.measure import conditions
from specsparse.measure.conditions import Rank
from specsparse.measure.intervals import LEAST_PROMPTS, Interval
from specsparse.measure.manifest import sha256_of
from specsparse.models import catalogue
from specsparse.report import methods, runs
from specsparse.report.methods import Setting
from specsparse.report.record import PLAIN, RECORD_FILE, SPECULATIVE, STOPPED, StandIn
from specsparse.report.runs import CELL_FILE, measurement, record_hash
from specsparse.runtime import metrics
from specsparse.runtime.method import resolve
from specsparse.support import tables, terminal
from specsparse.support.files import Json, kept, to_json, write_atomically
from specsparse.support.registry import source_of

_RESULTS = (
    "rank", "speed-up", "95 % interval", "tok/s", "plain tok/s", "read GB/s", "tokens/pass", "accept. length",
    "differing",
)  # fmt: skip

REFUSED_FILE = "refused.txt"
"""The line of a combination that was left out, beside no record."""
RAY_SECONDS = 10
"""How long the head of a Ray cluster has to answer."""
_NO_MATTER = frozenset({"name", "stream", "debug", "reuse", "download", "stand_in"})
"""Keys that change no result: what a run is called, and what is shown while it runs."""


@dataclass(frozen=True)
class Cell:
    """One combination of a sweep of the experiment `name`; `key` is the sha256 of what its result depends on."""

    key: str
    name: str

    @classmethod
    def from_config(cls, cfg: RunConfig) -> "Cell":
        depends = {
            "config": {k: v for k, v in cfg.composed.items() if k not in _NO_MATTER},
            "stand_in": cfg.stood_in and cfg.stood_in.asked,
            "files": sorted(_files(cfg)),
            "code": source_hash(),
            "cpu": cpu_info(),
            "kernels": kernels.status(),
        }
        key = hashlib.sha256(to_json(depends, sort_keys=True).encode()).hexdigest()
        return cls(key, cfg.name.removesuffix(STAND_IN))

    def finished(self, sweep: Path) -> Path | None:
        """The directory in which it has finished: of the sweep, or of a sweep of the same name beside it."""
        sweeps = [sweep]
        if sweep.parent.name.removesuffix(STAND_IN) == self.name:
            sweeps += sorted((d for d in sweep.parent.iterdir() if d.is_dir() and d != sweep), reverse=True)
        for mark in (file for directory in sweeps for file in sorted(directory.glob(f"*/{CELL_FILE}"))):
            found = measurement(mark.parent)
            if found is not None and found.key == self.key:
                return mark.parent
        return None

    def mark(self, directory: Path, objective: float | None) -> None:
        """Marks it as finished, after all else is written."""
        mark = {"key": self.key, "objective": objective, "record": record_hash(directory)}
        write_atomically(directory / CELL_FILE, to_json(mark) + "\n")


def reuse(done: Path, directory: Path) -> float | None:
    """Copies a finished cell into `directory`, the mark last; returns the objective."""
    if done.resolve() != directory.resolve():
        files = [f for f in done.iterdir() if f.is_file() and f.name not in (RECORD_FILE, CELL_FILE)]
        for file in files:
            shutil.copyfile(file, directory / file.name)
        for name in (RECORD_FILE, CELL_FILE):
            write_atomically(directory / name, (done / name).read_text(encoding="utf-8"))
    return kept(done / CELL_FILE).get("objective")


@cache
def source_hash() -> str:
    """sha256 over the package's own code, kernels included: after a change of it everything is measured anew."""
    root, digest = Path(__file__).resolve().parents[1], hashlib.sha256()
    for file in sorted(f for f in root.rglob("*") if f.suffix in (".py", ".so")):
        digest.update(f"{file.relative_to(root)}\0".encode())
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def _files(cfg: RunConfig) -> Iterator[str]:
    """sha256 of the models, and of every file that the config names."""
    named = [Path(text).expanduser() for text in _texts(cfg.composed) if "/" in text or "." in text]
    with contextlib.suppress(UserError):  # a kind that needs no model; the others have been checked
        named.append(catalogue.resolve(cfg.model.path))
        named += map(catalogue.resolve, resolve(cfg.spec).files.values())
    for part in (cfg.drafter, cfg.verifier, cfg.tree, cfg.policy, cfg.predictor):
        named += source_of(part.name)
    yield from (sha256_of(path) for path in named if path.is_file())


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for item in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        yield from _texts(item)


def check_ray(launcher: Mapping[str, Any] | None) -> None:
    """Asks the head of a Ray cluster whether it is there: Ray itself would try for minutes. UserError: nothing answers
    at `init.address` within `RAY_SECONDS`, or no cluster runs on this machine.

    Args:
        launcher: `hydra.launcher.ray`, or None of another launcher.
    """
    if launcher is None:
        return
    address, start = launcher["init"].get("address"), "`ray start --head` starts one, RAY_ADDRESS=HOST:PORT names one"
    if address == "auto":
        kept_by_ray = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster"
        if not kept_by_ray.is_file():
            raise UserError(f"sweep=ray: no Ray cluster runs on this machine: {start}")
        address = kept_by_ray.read_text(encoding="utf-8").strip()
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        try:
            socket.create_connection((host, int(port)), timeout=RAY_SECONDS).close()
        except OSError as error:
            reason = error.strerror or str(error)
            raise UserError(f"sweep=ray: no Ray head at {address} within {RAY_SECONDS} s ({reason}): {start}") from None


class Sweep(NamedTuple):
    directory: Path  # a folder of each cell is in it
    launcher: str  # the path of its class
    cells: Sequence[str]  # what each sets, by its number; none for a sweeper that chooses as it goes, as Optuna's

    @classmethod
    def begin(cls, config: Any) -> "Sweep":
        """The sweep of a composed config with Hydra's own node; what an earlier one in its folder refused is removed.

        OSError: a file there cannot be removed.
        """
        hydra, found = config.hydra, cls(Path(str(config.hydra.sweep.dir)), config.hydra.launcher._target_, ())
        for file in found.directory.glob(f"*/{REFUSED_FILE}"):
            file.unlink()
        if not hydra.sweeper._target_.endswith("BasicSweeper"):
            return found
        params = [f"{key}={values}" for key, values in (hydra.sweeper.params or {}).items()]
        parser = OverridesParser.create(GlobalHydra.instance().config_loader())  # of glob(*)
        (cells,) = BasicSweeper.split_arguments(parser.parse_overrides([*params, *hydra.overrides.task]), None)
        several = [len(set(values)) > 1 for values in zip(*cells)]
        return found._replace(cells=[",".join(itertools.compress(cell, several)) for cell in cells])

    def lost_worker(self, error: Exception) -> bool:
        """Whether the launcher raised this error. Hydra passes on the errors of cells."""
        frames = traceback.extract_tb(error.__traceback__)
        return any(frame.name == "launch" and "hydra_plugins" in frame.filename for frame in frames)

    def end(self, error: Exception | None = None) -> int:
        """Shows the table and says which cells have no record; `error` is why it ended early. Returns the exit code."""
        show(self.directory, terminal.console())
        why, place = "" if error is None else f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}", ""
        if "submitit" in self.launcher:  # what its jobs print is in files
            place = f"; their output is in {self.directory}/.submitit"
            for file in sorted(self.directory.glob(f"*/{REFUSED_FILE}")):
                fail(file.read_text(encoding="utf-8"))
            if why:
                fail("jobs that wait or run go on: let them end, then give the same command")
        if lost := [number for number in range(len(self.cells)) if not self._ended(number)]:
            if not any((self.directory / str(number)).is_dir() for number in lost):
                why = why or "their hosts write elsewhere; hydra.sweep.dir must be a folder that all hosts share"
            names = "; ".join(self.cells[number] or str(number) for number in lost[:8]) + "; .." * (len(lost) > 8)
            missing = f"no record of {len(lost)} of {len(self.cells)} cells ({names}) in {self.directory}"
            why = f"{missing}: {why or 'a worker died'}"
        if why:
            return fail(f"{why}{place}; the same command runs what is missing")
        if not records(self.directory):
            return fail("no combination of the sweep could run, see the lines above")
        ends = [file.parent for file in sorted(self.directory.glob(f"*/{RECORD_FILE}"))]
        if broken := [str(end) for end in ends if _finished(end) and measurement(end) is None]:  # it has no mark
            print(f"specsparse: not as promised: {', '.join(broken)}", file=sys.stderr)
        return int(bool(broken))

    def _ended(self, number: int) -> bool:
        """Whether a cell left a record or a refusal. If not, its worker died or wrote elsewhere."""
        folder = self.directory / str(number)
        stand_in = folder.with_name(folder.name + STAND_IN)
        return _finished(folder) or _finished(stand_in) or (folder / REFUSED_FILE).is_file()


def _finished(directory: Path) -> bool:
    """Whether a run has its record, and not that of a stopped one."""
    file = directory / RECORD_FILE
    return file.is_file() and kept(file).get("state") != STOPPED


def forget(directory: Path) -> None:
    for name in (RECORD_FILE, CELL_FILE):
        (directory / name).unlink(missing_ok=True)


def records(directory: Path) -> list[dict[str, Any]]:
    """The records of a sweep's finished jobs, in their order, a measurement once."""
    numbers = {d: d.name.removesuffix(STAND_IN) for d in directory.iterdir()}
    jobs = sorted((d for d in numbers if numbers[d].isdecimal()), key=lambda d: (int(numbers[d]), d.name))
    once = runs.once([d for d in jobs if (d / RECORD_FILE).is_file()])
    found = [json.loads((d / RECORD_FILE).read_text(encoding="utf-8")) for d in once]
    return [record for record in found if record.get("state") != STOPPED]


def swept(found: list[dict[str, Any]]) -> list[Setting]:
    """The settings that differ, and a column of stand-ins if there are any."""
    words, said = stand_ins(found)
    stood_in = [Setting("stand_in", "stand-in", words)] if said else []
    return [*methods.differing_settings([r["config"] for r in found]), *stood_in]


def stand_ins(found: list[dict[str, Any]]) -> tuple[tuple[str, ...], list[str]]:
    """A word of each run, and a line of each stand-in that says all parts that differ, but for what is swept.

    The word is the stand-in's model, or the number of its line if there are several.
    """
    columns = {setting.key for setting in methods.differing_settings([r["config"] for r in found])}

    def unswept(parts: Json) -> Json:
        return {
            group: {key: x for key, x in part.items() if key == "name" or f"{group}.{key}" not in columns}
            if isinstance(part, dict)
            else part
            for group, part in parts.items()
        }

    each = [StandIn(**r["stand_in"]) if "stand_in" in r else None for r in found]
    each = [s and StandIn(unswept(s.asked), unswept(s.used), s.why) for s in each]
    lines = dict[str, str]()
    for stand_in in filter(None, each):
        lines.setdefault(stand_in.parts, str(stand_in))
    if len(lines) < 2:
        return tuple(s.used["model"] if s else methods.NOTHING for s in each), list(lines.values())
    numbers = {parts: str(i) for i, parts in enumerate(lines, 1)}
    words = tuple(numbers[s.parts] if s else methods.NOTHING for s in each)
    return words, [line.replace(":", f" {numbers[parts]}:", 1) for parts, line in lines.items()]


def table(found: list[dict[str, Any]]) -> Table:
    """A row a run: what was swept, then the results; the best speed-up, and what ties with it, is bold."""
    settings, note = swept(found), metrics.lengths_note(per_pass="tokens/pass", length="accept. length")
    out = tables.new(*(Text(s.name) for s in settings), *_RESULTS, close=True, note=note)
    for i, (r, rank) in enumerate(zip(found, ranks(found), strict=True)):
        plain, method = (_rates(r, side) for side in (PLAIN, SPECULATIVE))
        interval, identity = _interval(r), r["summary"].get("identity")
        rate = "tokens_per_second"
        out.add_row(
            *(Text(setting.values[i]) for setting in settings),
            str(rank or "-"),
            tables.cell(interval.value if interval else None, ".2f"),
            interval.ends() if interval else "-",
            *(tables.cell(rates.get(rate), ".1f") for rates in (method, plain)),
            tables.cell(conditions.from_record(r).conditions.read_bandwidth, ".1f", 1e-9),
            *(tables.cell(method.get(key), ".2f") for key in ("tokens_per_target_pass", "mean_acceptance_length")),
            str(identity["differing"]) if identity else "-",
            style="bold" if rank and rank.place == 1 else None,
        )
    return out


def ranks(found: list[dict[str, Any]]) -> list[Rank | None]:
    return conditions.ranks([_interval(r) for r in found])


def lines(found: list[dict[str, Any]]) -> list[str]:
    """Notes on the table: the meaning of ties, and doubts of the ranking."""
    measured = [_interval(r) for r in found]
    telling = [setting for setting in swept(found) if len(set(setting.values)) > 1]
    names = [", ".join(f"{setting.name} {setting.values[i]}" for setting in telling) for i in range(len(found))]
    bounds = [
        (name, faster.value if faster else None, _rates(r, SPECULATIVE).get("tokens_per_target_pass"))
        for name, r, faster in zip(names, found, measured, strict=True)
    ]
    taken = [conditions.from_record(r).conditions for r in found]
    return [
        *conditions.rank_lines(measured),
        *apart(found),
        *conditions.all_busy(zip(names, taken, strict=True)),
        *conditions.all_impossible(bounds),
        *conditions.all_skewed(zip(names, measured, strict=True)),
    ]


def apart(found: list[dict[str, Any]]) -> list[str]:
    """One line if the records were taken under conditions too far apart, else empty."""
    line = conditions.differ([conditions.from_record(r) for r in found])
    return [line] if line else []


def show(directory: Path, out: Console) -> None:
    """Prints the table of a sweep's directory; nothing for fewer than two runs of a kind that has one."""
    everything = records(directory)
    points = [r for r in everything if r.get("kind") == "sparsity"]
    placed = [r for r in everything if r.get("kind") == "placement"]
    trained = [r for r in everything if r.get("kind") == "train_drafter"]
    timed = [r for r in everything if "summary" in r and PLAIN in r["summary"]]

    def show_rows(rows: Table | None, found: list[dict[str, Any]], lines: list[str]) -> None:
        if rows is not None:
            tables.show(out, rows, names=len(swept(found)))
        for line in lines:
            out.print(Text(line, style="yellow"), soft_wrap=True)
        if rows is not None:
            out.print(Text(f"records: {directory}", style="dim"), soft_wrap=True)
        for line in stand_ins(found)[1]:
            out.print(Text(line, style="yellow"), soft_wrap=True)

    if len(points) > 1:
        sparsity.show_sweep(directory, points, swept(points), out)
        show_rows(None, points, apart(points))
    if len(placed) > 1:
        neuron_placement.show_sweep(directory, placed, out)
        show_rows(None, placed, apart(placed))
    if len(trained) > 1:
        show_rows(train_drafter.table([r["summary"] for r in trained], swept(trained)), trained, [])
    if len(timed) > 1:
        show_rows(table(timed), timed, lines(timed))


def _rates(record: Mapping[str, Any], side: str) -> Mapping[str, Any]:
    return (record["summary"].get(side) or {}).get("rates", {})


def _interval(record: Mapping[str, Any]) -> Interval | None:
    """The speed-up; older records hold ends for one or two prompts too, and do not say how many prompts there were."""
    faster = record["summary"].get("speedup")
    if faster is None:
        return None
    prompts = faster.get("prompts", 0)
    ends = (None, None) if 0 < prompts < LEAST_PROMPTS else (faster["low"], faster["high"])
    return Interval(faster["ratio_of_totals"], *ends, prompts, faster.get("skewed", False))
