"""The terminal and the standard streams: a console, bars and spinners, and streams that are closed, full, in another
encoding, or left by their reader (`specsparse status | head -1`)."""

import codecs
import contextlib
import errno
import io
import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from specsparse.errors import UserError
from specsparse.support.files import unwritten

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
"""Errors of a write that is no fault of ours."""
_PIPE_WIDTH = 10_000
_ESCAPED = "json-escaped"


def console(*, columns: bool = False) -> "Console":
    """The terminal; or a pipe, which has no width, so that a row of a table is one line however long.

    With `columns`, a pipe has the width in the variable COLUMNS.
    """
    from rich.console import Console

    class Terminal(Console):
        def on_broken_pipe(self) -> None:  # rich's own ends the program with exit code 1
            raise BrokenPipeError

    found = Terminal(highlight=False)
    wide = not found.is_terminal and not (columns and os.environ.get("COLUMNS", "").isdecimal())
    return Terminal(highlight=False, width=_PIPE_WIDTH) if wide else found


@contextmanager
def busy(out: "Console", what: str) -> Generator[None]:
    """A spinner with the seconds, for work of unknown length; a plain line if there is no terminal."""
    from rich.progress import SpinnerColumn
    from rich.text import Text

    if not out.is_terminal:
        out.print(Text(f"{what} ..."))
    with _progress(out, what, None, SpinnerColumn()):
        yield


@contextmanager
def loading(out: "Console", what: str) -> Generator[Callable[[int, int], None]]:
    """A bar over bytes; yields the function to call with (bytes done, bytes in all)."""
    from rich.progress import DownloadColumn

    with _progress(out, what, None, DownloadColumn(binary_units=True)) as progress:
        yield lambda done, total: progress.update(progress.task_ids[0], completed=done, total=total)


@contextmanager
def counting(out: "Console", what: str, total: int) -> Generator[Callable[..., None]]:
    """A bar over `total` steps; yields `step()`, or `step(done)` with how many are done, and `what` is now done."""
    from rich.progress import MofNCompleteColumn

    with _progress(out, what, total, MofNCompleteColumn()) as bar:

        def step(done: int | None = None, what: str | None = None) -> None:
            bar.update(bar.task_ids[0], advance=1 if done is None else None, completed=done, description=what)

        yield step


@contextmanager
def _progress(out: "Console", what: str, total: int | None, column: "ProgressColumn") -> Generator["Progress"]:
    """A bar with one task; nothing if there is no terminal."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), column, TimeElapsedColumn())
    with Progress(*columns, console=out, transient=True, disable=not out.is_terminal) as progress:
        progress.add_task(what, total=total)
        yield progress


@contextmanager
def until_the_reader_leaves() -> Generator[None]:
    """Ends the block in silence once nobody reads the standard output; the rest of the output is dropped.

    An exit out of the block keeps its code. Characters that the output's encoding lacks are written as JSON escapes. A
    stream that the caller closed (`>&-`) is an empty one. UserError: the standard output cannot be written, on a full
    disk for instance.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # Python's stand-in for a closed stream
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    codecs.register_error(_ESCAPED, _escape)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors=_ESCAPED)
    flushing: contextlib.AbstractContextManager[None] = contextlib.suppress(UserError)  # another error is said first
    try:
        with contextlib.suppress(BrokenPipeError):
            yield
        flushing = contextlib.nullcontext()
    except SystemExit as ended:
        if not ended.code:
            flushing = contextlib.nullcontext()
        raise
    except OSError as error:
        if error.errno in FULL and error.filename is None:  # of a write, not of an open
            raise unwritten("the output", error) from error
        raise
    finally:
        with flushing:
            try:
                sys.stdout.flush()
            except OSError as error:
                nowhere = os.open(os.devnull, os.O_WRONLY)  # else Python tries again at its end, and complains
                os.dup2(nowhere, sys.stdout.fileno())
                os.close(nowhere)
                if not isinstance(error, BrokenPipeError):
                    raise unwritten("the output", error) from error


def _escape(error: UnicodeError) -> tuple[str, int]:
    """As JSON has it, so that an object stays one: two escapes for a character beyond U+FFFF."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    units = error.object[error.start : error.end].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i : i + 2].hex()}" for i in range(0, len(units), 2)), error.end


@contextmanager
def decoding_input() -> Generator[None]:
    """UserError if what the block reads from the standard input is no text in its encoding."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise UserError(f"the standard input is no {error.encoding.upper()} text: convert it, with iconv say") from None
