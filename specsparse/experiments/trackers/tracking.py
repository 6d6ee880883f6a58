"""The files of a run, written while it goes on, and the tracker that follows it."""

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from specsparse.errors import UserError
from specsparse.experiments.trackers import TRACKERS
from specsparse.experiments.trackers.base import Jsonl, Series, Tracker
from specsparse.report.record import POINTS_FILE, RECORD_FILE, ROWS_FILE
from specsparse.support import terminal
from specsparse.support.files import append_line, to_json, write_atomically

if TYPE_CHECKING:
    from specsparse.experiments.settings import RunConfig


class Tracking:
    """`prompts.jsonl`, a line per row, `metrics.jsonl`, a line per point, and `record.json` at the end, whole or not at
    all. Rows of an earlier run in the directory are removed first, so that its rows are never taken for this run's.

    An error of these files ends the run. The tracker is beside them: what fails there is one line of warning.
    """

    def __init__(self, directory: Path, run: "RunConfig | None" = None, console: Console | None = None):
        """`run` names the tracker; without it there are the files alone."""
        directory.mkdir(parents=True, exist_ok=True)
        for name in (RECORD_FILE, ROWS_FILE, POINTS_FILE):
            (directory / name).unlink(missing_ok=True)
        self._directory, self._run, self._console = directory, run, console
        self._name = "jsonl" if run is None else run.tracker.name
        self._tracker: Tracker = Jsonl() if run is None else TRACKERS.make(self._name, run.tracker.options)
        self._client: Any = None
        self._follows = False
        self._before: list[tuple[Series, Mapping[str, float]]] | None = []  # None once it has started

    def log(self, row: Mapping[str, object]) -> None:
        append_line(self._directory / ROWS_FILE, to_json(row))

    def point(self, series: Series, values: Mapping[str, float | None]) -> None:
        """A point of a curve; a number that is None is not there."""
        there = {name: float(value) for name, value in values.items() if value is not None}
        append_line(self._directory / POINTS_FILE, to_json({"series": series.name, **there}))
        if self._before is None:
            self._guarded(self._tracker.log, series, there)
        else:
            self._before.append((series, there))

    def finish(self, record: Mapping[str, object]) -> None:
        """Writes the record of the whole run; nothing is logged after it."""
        write_atomically(self._directory / RECORD_FILE, to_json(record, indent=1) + "\n")

    def follow(self, folder: Path | None = None) -> None:
        """Starts the tracker, unless it has started; `folder` as in `Tracker.start`. UserError: it cannot."""
        if self._before is None:
            return
        before, self._before = self._before, None
        try:
            self._client = self._tracker.start(self._run, self._directory, folder)  # pyrefly: ignore[bad-argument-type]  # without a run it is Jsonl
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            raise UserError(f"tracker={self._name} cannot start: {_line(error)}") from error
        self._follows = True
        for point in before:
            self._guarded(self._tracker.log, *point)

    def publish(self) -> str | None:
        """Hands the tracker a run whose files are all written; its line on where the run is."""
        try:
            self.follow()
        except UserError as error:
            self._warn(f"{error}; what the run has found is in {self._directory}")
        line = self._guarded(self._tracker.finish, self._directory)
        self._follows = False
        return line

    def stop(self) -> None:
        """The run has ended with an error."""
        if self._follows:
            self._follows = False
            with contextlib.suppress(Exception, SystemExit):
                self._tracker.stop(self._client)

    def _guarded(self, call: Callable[..., Any], *given: object) -> Any:
        if not self._follows:
            return None
        try:
            return call(self._client, *given)
        except (Exception, SystemExit) as error:
            self.stop()
            self._warn(f"tracker={self._name} failed: {_line(error)}; the run goes on, see {self._directory}")

    def _warn(self, line: str) -> None:
        (self._console or terminal.console()).print(Text(line, style="yellow"), soft_wrap=True)


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")
