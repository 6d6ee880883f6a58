"""Where the numbers of a run go: JSON lines and one record. Weights & Biases gets them from there (`wandb_run`)."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from specsparse.errors import UserError
from specsparse.report.record import RECORD_FILE, ROWS_FILE
from specsparse.support.files import append_line, to_json, write_atomically
from specsparse.support.options import nearest, read
from specsparse.support.registry import Choice


class Tracker:
    """`prompts.jsonl`, a line per row as it comes, and `record.json` at the end, whole or not at all.

    What an earlier run left in the directory goes first, so that its rows are never taken for this run's.
    """

    def __init__(self, directory: Path):
        directory.mkdir(parents=True, exist_ok=True)
        for name in (RECORD_FILE, ROWS_FILE):
            (directory / name).unlink(missing_ok=True)
        self._directory = directory

    def log(self, row: Mapping[str, object]) -> None:
        """Appends one row: a decoded prompt."""
        append_line(self._directory / ROWS_FILE, to_json(row))

    def finish(self, record: Mapping[str, object]) -> None:
        """Writes the record of the whole run; nothing is logged after it."""
        write_atomically(self._directory / RECORD_FILE, to_json(record, indent=1) + "\n")


@dataclass(frozen=True)
class JsonlOptions:
    """Of the files that are always written."""


@dataclass(frozen=True)
class WandbOptions:
    """Of Weights & Biases; see `wandb_run.publish`."""

    group: str | None = None
    mode: Literal["offline", "online", "disabled"] = "offline"
    project: str = "specsparse"


_OPTIONS = {"jsonl": JsonlOptions, "wandb": WandbOptions}


def check(tracker: Choice) -> None:
    """Refuses an unknown tracker or option, before anything is written.

    Raises:
        UserError: with the valid names.
    """
    if tracker.name not in _OPTIONS:
        raise UserError(f"tracker={tracker.name} is unknown{nearest(tracker.name, _OPTIONS)}")
    read(_OPTIONS[tracker.name], tracker.options, group="tracker", name=tracker.name)
