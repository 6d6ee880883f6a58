"""Runs that a signal ended: they leave a record that says so, beside the passes that were done."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from specsparse.experiments.settings import RunConfig
from specsparse.report.record import RECORD_FILE, ROWS_FILE, STOPPED
from specsparse.runtime import manifest
from specsparse.support.files import to_json, write_atomically


@contextlib.contextmanager
def recorded(cfg: RunConfig, directory: Path) -> Iterator[None]:
    """Runs the block; where Ctrl-C or SIGTERM ends it, writes a record of the state "stopped" into `directory`.

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
