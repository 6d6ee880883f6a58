"""The standard streams: closed, full, in another encoding, or left by their reader (`specsparse status | head -1`)."""

import codecs
import contextlib
import errno
import io
import os
import sys
from collections.abc import Iterator

from specsparse.errors import UserError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
"""Errors of a write that is no fault of ours."""
_ESCAPED = "json-escaped"


@contextlib.contextmanager
def until_the_reader_leaves() -> Iterator[None]:
    """Ends the block in silence where nobody reads the standard output any more; what is left to write goes nowhere.

    An exit out of the block keeps its code. Characters that the output's encoding has not are written as JSON escapes.

    Raises:
        UserError: the standard output cannot be written, on a full disk for instance.
    """
    _open_what_is_closed()
    _escape_what_cannot_be_encoded()
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
            raise _unwritten(error) from error
        raise
    finally:
        with flushing:
            _flush()


@contextlib.contextmanager
def decoding_input() -> Iterator[None]:
    """UserError where what the block reads from the standard input is no text in its encoding."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise UserError(f"the standard input is no {error.encoding.upper()} text: convert it, with iconv say") from None


def _open_what_is_closed() -> None:
    """A stream that the caller closed (`>&-`) is None to Python: nothing is read from it, and what it gets is lost."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def _escape_what_cannot_be_encoded() -> None:
    codecs.register_error(_ESCAPED, _escape)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors=_ESCAPED)


def _escape(error: UnicodeError) -> tuple[str, int]:
    """As JSON has it, so that an object stays one: two escapes for a character beyond U+FFFF."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    units = error.object[error.start : error.end].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i : i + 2].hex()}" for i in range(0, len(units), 2)), error.end


def _flush() -> None:
    try:
        sys.stdout.flush()
    except OSError as error:
        nowhere = os.open(os.devnull, os.O_WRONLY)  # else Python tries again at its end, and complains
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        if not isinstance(error, BrokenPipeError):
            raise _unwritten(error) from error


def _unwritten(error: OSError) -> UserError:
    return UserError(f"the output cannot be written: {error.strerror}; make room, or write it elsewhere")
