"""What commands that measure write: a report as JSON after the tables or into a file, and pictures."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from specsparse.support.files import Json, atomically, need_place, to_json, write_atomically

if TYPE_CHECKING:
    from rich.console import Console

    from specsparse.report.figure import Figure

STDOUT = "-"
"""The file of --json without one."""


def add_json(add: Callable[..., argparse.Action]) -> None:
    """--json; `add` is `add_argument` of a parser."""
    add("--json", nargs="?", const=STDOUT, metavar="FILE", help="the report as one JSON line, last or in FILE")


def need_places(files: list[str | Path | None], pictures: list[Path | None], *sources: str | Path | None) -> None:
    """Before the work: every file to write has its place, and is none of `sources`, which are read.

    Raises:
        UserError: see `need_place`.
    """
    for path in (*files, *pictures):
        if path not in (None, STDOUT):
            need_place(path, *sources, picture=any(path is picture for picture in pictures))


def write_json(file: str | None, report: Json, out: "Console") -> None:
    """The report where --json wants it: `file` None is nowhere."""
    if file == STDOUT:
        print(to_json(report), flush=True)
    elif file is not None:
        write_atomically(Path(file), to_json(report) + "\n")
        out.print(f"report: {file}", soft_wrap=True)


def draw(path: Path | None, figure: "Callable[[Json], Figure]", report: Json, out: "Console") -> None:
    """The report as a picture, if one was asked for."""
    if path is not None:
        with atomically(path) as file:
            file.write(figure(report).png())
        out.print(f"figure: {path}", soft_wrap=True)
