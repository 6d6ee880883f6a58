"""A run of any kind: its config is checked, the kind does it, and what it found is written down and shown.

A run that a signal ends leaves a record that says so, beside the passes that were done.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from rich.console import Console
from rich.text import Text

from specsparse import kernels
from specsparse.errors import UserError
from specsparse.experiments import trackers
from specsparse.experiments.compose.config import of_kind
from specsparse.experiments.kind import KINDS, Engine, Kind, RunContext, RunResult
from specsparse.experiments.settings import FfnSpec, RunConfig
from specsparse.models import catalogue
from specsparse.report.record import RECORD_FILE, ROWS_FILE, STOPPED
from specsparse.runtime import manifest
from specsparse.support import terminal
from specsparse.support.files import to_json, write_atomically


class CheckedRun(NamedTuple):
    """A kind, and what it reads of a config that nothing is wrong with."""

    kind: Kind
    settings: Any


def check(cfg: RunConfig) -> CheckedRun:
    """What can be found wrong before anything is loaded or written.

    Raises:
        UserError: an unknown kind or tracker, a name that is none, or whatever that kind finds wrong.
    """
    if "placement" in cfg.own and cfg.kind != "placement":
        raise UserError(
            f"placement=... does nothing with kind={cfg.kind}: solve it with +experiment=placement, then give "
            "+model.placement=FILE.gpuidx"
        )
    kind = KINDS.find(cfg.kind)()
    settings = of_kind(cfg, kind.settings)
    kernels.platform()
    try:
        kind.check(settings)
    except catalogue.NotHere as missing:
        catalogue.obtain(missing.wanted, cfg.download)
        kind.check(settings)
    trackers.check(cfg.tracker)
    if cfg.name in ("", ".", "..") or "/" in cfg.name:
        raise UserError(f"name={cfg.name}: a plain name is needed, it becomes a directory")
    if cfg.ffn != FfnSpec() and not kind.takes_ffn:
        raise UserError(f"kind={cfg.kind} takes no ffn: leave it out")
    if cfg.model.mesh is not None and not kind.on_mesh:
        raise UserError(f"kind={cfg.kind} needs the whole model on one device: leave model.mesh out")
    if cfg.model.mesh is not None and cfg.ffn != FfnSpec():
        raise UserError("model.mesh is for dense models: leave ffn out")
    return CheckedRun(kind, settings)


def run(
    cfg: RunConfig,
    directory: Path,
    *,
    engine: Engine | None = None,
    console: Console | None = None,
    checked: CheckedRun | None = None,
) -> RunResult:
    """Run `cfg`, write its record, tables and figures into `directory`, and show the result.

    Args:
        cfg: the run.
        directory: made if it is not there.
        engine: `specsparse.api` by default.
        console: the terminal by default.
        checked: what `check` found of this config; it is checked here by default.

    Raises:
        UserError: a mistake in the config, the model file or the prompts.
    """
    kind, settings = checked or check(cfg)
    ctx = RunContext(directory, engine or _api(), console or terminal.console())
    if kind.takes_model and (line := cfg.data.read_as()):
        ctx.console.print(Text(line), soft_wrap=True)
    found = kind.run(settings, ctx)
    ctx.tracker.finish(_record(cfg, kind, found))
    for figure in found.figures:
        figure.write(directory)
    for part in found.shown:
        ctx.console.print(part)
    files = [str(directory / RECORD_FILE), *found.files, *(name for figure in found.figures for name in figure.files)]
    ctx.console.print(Text(f"record: {', '.join(files)}", style="dim"), soft_wrap=True)
    if cfg.tracker.name == "wandb":
        from specsparse.experiments import wandb_run  # its client takes seconds

        ctx.console.print(Text(wandb_run.publish(directory, cfg.tracker.options)), soft_wrap=True)  # not cut
    return found


def _record(cfg: RunConfig, kind: Kind, found: RunResult) -> Mapping[str, object]:
    file = Path(catalogue.resolve(cfg.model.path)) if kind.takes_model else None
    made = manifest.build(cfg.composed, file)
    definitions = {"definitions": found.definitions} if found.definitions else {}
    return {
        "name": cfg.name, "kind": cfg.kind, "summary": found.summary, **found.more, **definitions, "manifest": made,
        "config": made["config"],
    }  # fmt: skip


def _api() -> Engine:
    from specsparse import api

    return api  # type: ignore[return-value]


@contextlib.contextmanager
def stoppable(cfg: RunConfig, directory: Path) -> Iterator[None]:
    """Runs the block; if Ctrl-C or SIGTERM ends it, writes a record of the state "stopped" into `directory`.

    A record that the block has written itself is whole, and stays.

    Raises:
        KeyboardInterrupt: the block was stopped; its text says what is there.
    """
    record_before, rows_before = _written(directory / RECORD_FILE), _written(directory / ROWS_FILE)
    try:
        with _terminated_as_interrupted():
            yield
    except KeyboardInterrupt:
        if _written(directory / RECORD_FILE) not in (None, record_before):
            raise KeyboardInterrupt(f"stopped after the record was written: {directory / RECORD_FILE}") from None
        rows = directory / ROWS_FILE
        mine = _written(rows) not in (None, rows_before)  # not what an earlier run left
        done = len(rows.read_text(encoding="utf-8").splitlines()) if mine else 0
        record = {
            "name": cfg.name, "kind": cfg.kind, "state": STOPPED, "passes": done, "summary": {},
            "manifest": manifest.build(cfg.composed, None), "config": cfg.composed,
        }  # fmt: skip
        write_atomically(directory / RECORD_FILE, to_json(record, indent=1) + "\n")
        kept = f"{done} pass{'es' * (done > 1)} kept in {rows}" if done else "no pass was done"
        raise KeyboardInterrupt(f"stopped; {kept}, and {directory / RECORD_FILE} says so") from None


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
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


def _written(file: Path) -> int | None:
    """When it was, in ns; None where it is not there."""
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return None
