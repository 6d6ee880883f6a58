"""The terminal: its console, and bars and spinners for work that takes a while."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

_PIPE_WIDTH = 10_000


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """`pipes.until_the_reader_leaves` ends the program, as for a plain print; rich's own way is exit code 1."""
        raise BrokenPipeError


def console(*, columns: bool = False) -> Console:
    """The terminal, or a pipe, which has no width: a row of a table is a line there, whatever its length.

    With `columns`, a pipe has the width that the variable COLUMNS says.
    """
    found = _Console(highlight=False)
    wide = not found.is_terminal and not (columns and os.environ.get("COLUMNS", "").isdecimal())
    return _Console(highlight=False, width=_PIPE_WIDTH) if wide else found


@contextmanager
def busy(out: Console, what: str) -> Iterator[None]:
    """A spinner with the seconds, for work of unknown length; a plain line where there is no terminal."""
    if not out.is_terminal:
        out.print(Text(f"{what} ..."))
        yield
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=out, transient=True) as progress:
        progress.add_task(what, total=None)
        yield


@contextmanager
def loading(out: Console, what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar over bytes; yields the function to call with (bytes done, bytes in all)."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(binary_units=True))
    with Progress(*columns, TimeElapsedColumn(), console=out, transient=True, disable=not out.is_terminal) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextmanager
def counting(out: Console, what: str, total: int) -> Iterator[Progress]:
    """A bar over `total` steps; call `.advance(.task_ids[0])` after each."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=out, transient=True, disable=not out.is_terminal) as progress:
        progress.add_task(what, total=total)
        yield progress
