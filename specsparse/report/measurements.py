"""Finished cells of sweeps on disk: one measurement may lie in several directories."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from specsparse.report.record import RECORD_FILE
from specsparse.support.files import kept

CELL_FILE = "cell.json"


class Measurement(NamedTuple):
    """What a finished cell holds: the cell's key, and the sha256 of the record that its run wrote."""

    key: str
    record: str


def measurement(directory: Path) -> Measurement | None:
    """Of a finished cell, the same for one taken over as for the one it was taken from; None for other directories."""
    mark = kept(directory / CELL_FILE)
    key, record = mark.get("key"), mark.get("record")
    return Measurement(key, record) if key and record and record == record_hash(directory) else None


def once(directories: Iterable[Path]) -> dict[Path, tuple[Path, ...]]:
    """The directories, each measurement at its first place, with the later places that hold it too."""
    places: dict[Measurement | Path, list[Path]] = {}
    for directory in directories:
        places.setdefault(measurement(directory) or directory, []).append(directory)
    return {first: tuple(others) for first, *others in places.values()}


def record_hash(directory: Path) -> str:
    """sha256 of the record; empty without one. A mark beside another record than its own is no mark."""
    try:
        return hashlib.sha256((directory / RECORD_FILE).read_bytes()).hexdigest()
    except OSError:
        return ""
