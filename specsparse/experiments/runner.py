"""A run of any kind: its config is checked, the kind runs, and its result is written down and shown.

A run that a signal ends leaves a record that says so, beside the passes that were done.
"""

import contextlib
import signal
import threading
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from rich.console import Console
from rich.text import Text

from specsparse import kernels
from specsparse.engine import hosts
from specsparse.errors import UserError, refuse
from specsparse.experiments import stand_in
from specsparse.experiments.kind import KINDS, Engine, Kind, RunContext, RunResult, header_of
from specsparse.experiments.settings import FfnSpec, RunConfig, of_kind
from specsparse.experiments.trackers import TRACKERS
from specsparse.measure import manifest
from specsparse.models import catalogue
from specsparse.report.record import RECORD_FILE, ROWS_FILE, STOPPED
from specsparse.support import terminal
from specsparse.support.files import to_json, write_atomically
from specsparse.support.registry import Choice


class CheckedRun(NamedTuple):
    """A kind, its settings from a config without mistakes, and that config: the stand-in's, if there is one."""

    kind: Kind
    settings: Any
    cfg: RunConfig


def check(cfg: RunConfig, *, refusals: dict[object, UserError] | None = None) -> CheckedRun:
    """Finds mistakes, in a `UserError`, before anything is loaded or written; joins processes if the model has several.

    `refusals` keeps why models could not be had: with the same one, a sweep asks the Hub and the user once.
    """
    refusals = {} if refusals is None else refusals
    instead = "solve it with +experiment=placement, then give +model.placement=FILE.gpuidx"
    elsewhere = "placement" in cfg.own and cfg.kind != "placement"
    refuse({f"placement=... does nothing with kind={cfg.kind}: {instead}": elsewhere})
    kind = KINDS.find(cfg.kind)()
    settings = of_kind(cfg, kind.settings)
    hosts.join(cfg.model.distributed, cfg.words)
    if not hosts.leads():
        cfg = replace(cfg, tracker=Choice("jsonl"))  # process 0 alone sends
    kernels.platform()
    try:
        kind.check(settings)
    except catalogue.NotHere as missing:
        request = (*missing.wanted.items(), cfg.download)
        try:
            if request in refusals:
                raise refusals[request]
            catalogue.obtain(missing.wanted, cfg.download)
        except UserError as why:  # no network, no consent, no room
            refusals[request] = why
            asked, cfg = cfg, stand_in.replaced(cfg, why)
            settings = of_kind(cfg, kind.settings)
            try:
                kind.check(settings)
                header_of(cfg.model)
            except UserError as error:
                raise UserError(f"{why}; stand_in={asked.stand_in} cannot run either: {error}") from None
        else:
            kind.check(settings)
    plain, sparse = Path(cfg.name).name == cfg.name != "..", cfg.ffn != FfnSpec()
    divided = "mesh" if cfg.model.mesh is not None else "distributed"
    on_mesh = getattr(cfg.model, divided) is not None
    refuse({
        f"name={cfg.name}: a plain name is needed, it becomes a directory": not (plain and cfg.name),
        f"kind={cfg.kind} takes no ffn: leave it out": sparse and not kind.takes_ffn,
        f"kind={cfg.kind} takes no data.lengths: leave it out": bool(cfg.data.lengths) and not kind.takes_lengths,
        f"kind={cfg.kind} needs the whole model on one device: leave model.{divided} out":
            on_mesh and not kind.on_mesh,
        f"model.{divided} is for dense models: leave ffn out": on_mesh and sparse,
    })  # fmt: skip
    TRACKERS.make(cfg.tracker.name, cfg.tracker.options).check()
    return CheckedRun(kind, settings, cfg)


def run(
    cfg: RunConfig, directory: Path, *,
    engine: Engine | None = None, console: Console | None = None, checked: CheckedRun | None = None,
) -> RunResult:  # fmt: skip
    """Runs `cfg`, writes its record, tables and figures into `directory`, and shows the result.

    By default `engine` is `specsparse.api`, `console` the terminal, and `checked`, the result of `check`, made here.
    """
    kind, settings, cfg = checked or check(cfg)
    if engine is None:
        from specsparse import api

        engine = api
    ctx = RunContext(directory, engine, console or terminal.console(), cfg)
    if kind.takes_model and (line := cfg.data.read_as()):
        ctx.console.print(Text(line), soft_wrap=True)
    try:
        if not (kind.timed or kind.resumes):  # a client at work and its calls of a network would be in the times
            ctx.tracker.follow()
        found = kind.run(settings, ctx)
        about = manifest.build(cfg.composed, Path(catalogue.resolve(cfg.model.path)) if kind.takes_model else None)
        more = {"definitions": found.definitions} if found.definitions else {}
        more |= {"trained": found.trained} if found.trained else {}
        ctx.tracker.finish({
            **_heading(cfg), "summary": found.summary, **found.more, **more, "manifest": about,
            "config": about["config"],
        })  # fmt: skip
        for figure in found.figures:
            figure.write(directory)
        for part in found.shown:
            ctx.console.print(Text(part) if isinstance(part, str) else part)
        drawn = (name for figure in found.figures for name in figure.files)
        files = [str(directory / RECORD_FILE), *found.files, *drawn]
        ctx.console.print(Text(f"record: {', '.join(files)}", style="dim"), soft_wrap=True)
    except Exception:  # of Ctrl-C, a record is written first: it may be the last thing that there is time for
        ctx.stop()
        raise
    if (line := ctx.tracker.publish()) is not None:
        ctx.console.print(Text(line), soft_wrap=True)  # not cut
    if cfg.stood_in is not None:
        ctx.console.print(Text(str(cfg.stood_in), style="yellow"), soft_wrap=True)
    return found


def _heading(cfg: RunConfig) -> dict[str, object]:
    stood_in = {} if cfg.stood_in is None else {"stand_in": vars(cfg.stood_in)}
    return {"name": cfg.name, "kind": cfg.kind, **stood_in}


@contextlib.contextmanager
def stoppable(cfg: RunConfig, directory: Path) -> Generator[None]:
    """Runs the block; if Ctrl-C or SIGTERM ends it, writes a record of the state "stopped" into `directory`.

    A record that the block has written itself is whole, and stays. KeyboardInterrupt: its text says what is there.
    """

    def written(file: Path) -> int | None:  # at a time in ns
        with contextlib.suppress(OSError):
            return file.stat().st_mtime_ns

    record_file, rows = directory / RECORD_FILE, directory / ROWS_FILE
    record_before, rows_before = written(record_file), written(rows)
    try:
        with _terminated_as_interrupted():
            yield
    except KeyboardInterrupt:
        if written(record_file) not in (None, record_before):
            raise KeyboardInterrupt(f"stopped after the record was written: {record_file}") from None
        mine = written(rows) not in (None, rows_before)  # not what an earlier run left
        done = len(rows.read_text(encoding="utf-8").splitlines()) if mine else 0
        record = {
            **_heading(cfg), "state": STOPPED, "passes": done, "summary": {},
            "manifest": manifest.build(cfg.composed, None), "config": cfg.composed,
        }  # fmt: skip
        write_atomically(record_file, to_json(record, indent=1) + "\n")
        kept = f"{done} pass{'es' * (done > 1)} kept in {rows}" if done else "no pass was done"
        raise KeyboardInterrupt(f"stopped; {kept}, and {record_file} says so") from None


@contextlib.contextmanager
def _terminated_as_interrupted() -> Generator[None]:
    """SIGTERM as Ctrl-C; only the main thread can ask for it, elsewhere nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old)
