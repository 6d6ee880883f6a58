"""Rows of numbers and their CSV."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specsparse.support.files import Json, write_atomically

Row = Json
"""A column by its name, and its value."""


def columns(rows: Sequence[Row]) -> list[str]:
    """Every key of the rows, in order of appearance."""
    return list(dict.fromkeys(key for row in rows for key in row))


def csv_text(rows: Sequence[Row]) -> str:
    """The rows under a heading; what is missing is empty."""
    out = io.StringIO()
    writer = csv.DictWriter(out, columns(rows), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


@dataclass(frozen=True)
class Rows:
    """Numbers that are not drawn; `name` is the stem of their file."""

    name: str
    rows: Sequence[Row]

    @property
    def files(self) -> tuple[str, ...]:
        """Its file."""
        return (f"{self.name}.csv",)

    def write(self, directory: Path) -> None:
        """NAME.csv; UserError where it cannot be written."""
        write_atomically(directory / f"{self.name}.csv", csv_text(self.rows))
