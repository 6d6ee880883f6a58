"""Where the numbers of a run go: JSON lines and one record. Weights & Biases gets them from there (`wandb_run`).

A tracker gets rows while the run goes on and one record at its end. The record appears whole or not at all.
"""

import abc
from collections.abc import Mapping
from pathlib import Path

from specsparse.errors import UserError
from specsparse.report.record import RECORD_FILE, ROWS_FILE
from specsparse.support.files import append_line, to_json, write_atomically

WANDB_MODES = ("offline", "online", "disabled")
_OPTIONS = {"jsonl": (), "wandb": ("group", "mode", "project")}


class Tracker(abc.ABC):
    """Takes rows, then one record."""

    @abc.abstractmethod
    def log(self, row: Mapping[str, object]) -> None:
        """One row: a decoded prompt."""

    @abc.abstractmethod
    def finish(self, record: Mapping[str, object]) -> None:
        """The record of the whole run; nothing is logged after it."""


class Jsonl(Tracker):
    """`prompts.jsonl`, a line per row as it comes, and `record.json` at the end.

    What an earlier run left in the directory goes first, so that its rows are never taken for this run's.
    """

    def __init__(self, directory: Path):
        directory.mkdir(parents=True, exist_ok=True)
        for name in (RECORD_FILE, ROWS_FILE):
            (directory / name).unlink(missing_ok=True)
        self._directory = directory

    def log(self, row: Mapping[str, object]) -> None:
        """Append one line."""
        append_line(self._directory / ROWS_FILE, to_json(row))

    def finish(self, record: Mapping[str, object]) -> None:
        """Write the record, whole."""
        write_atomically(self._directory / RECORD_FILE, to_json(record, indent=1) + "\n")


def check(name: str, options: Mapping[str, object]) -> None:
    """Refuse an unknown tracker or option, before anything is written.

    Raises:
        UserError: with the valid names.
    """
    if name not in _OPTIONS:
        raise UserError(f"unknown tracker {name!r}; valid: {', '.join(_OPTIONS)}")
    unknown = sorted(set(options) - set(_OPTIONS[name]))
    if unknown:
        raise UserError(f"unknown key tracker.{unknown[0]}; {name} has {', '.join(_OPTIONS[name]) or 'no options'}")
    if options.get("mode", "offline") not in WANDB_MODES:
        raise UserError(f"tracker.mode={options['mode']}: must be one of {', '.join(WANDB_MODES)}")


def make(name: str, options: Mapping[str, object], directory: Path) -> Tracker:
    """The tracker called `name`, writing under `directory`; raises what `check` does.

    For "wandb" too it writes the files: `wandb_run` publishes them when the run is over.
    """
    check(name, options)
    return Jsonl(directory)
