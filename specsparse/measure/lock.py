"""Runs that measure time take turns: one at a time on a machine, whoever started them.

The lock is the kernel's (flock) on a file of the machine's own temporary folder: it ends with its process, killed or
not. `SPECSPARSE_TIMING_LOCK` names another file, such as one of a container's host.
"""

import contextlib
import fcntl
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from specsparse.errors import UserError

_SIGNATURE = "process "
"""What a lock's file begins with once it was held."""


def lock_file() -> Path:
    """The file that stands for this machine."""
    given = os.environ.get("SPECSPARSE_TIMING_LOCK")
    return Path(given) if given else Path(tempfile.gettempdir()) / "specsparse-timing.lock"


@contextlib.contextmanager
def turn(announce: Callable[[str], None]) -> Iterator[None]:
    """Hold the machine for timing; `announce` is called once with a line if another run holds it.

    Raises:
        UserError: the lock's file cannot be opened, or is a file of something else.
    """
    path = lock_file()
    descriptor = _open(path)
    try:
        if (found := _holder(descriptor)) and not found.startswith(_SIGNATURE):
            raise UserError(f"{path}: is no lock but a file with something in it; set SPECSPARSE_TIMING_LOCK=FILE")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            announce(f"waiting for another timing run on this machine: {_holder(descriptor) or path}")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        _sign(descriptor)
        yield
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    """Any user's file serves, and a lock needs no right to write. A link is not followed: the folder is everybody's."""
    with contextlib.suppress(OSError):
        return os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    with contextlib.suppress(OSError):
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"{path}: cannot be locked: {reason}; set SPECSPARSE_TIMING_LOCK=FILE") from None
    with contextlib.suppress(OSError):
        os.fchmod(descriptor, 0o666)  # whatever the umask: the next user must be able to lock it
    return descriptor


def _sign(descriptor: int) -> None:
    """Say who holds it, for those who wait."""
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{_SIGNATURE}{os.getpid()}: {' '.join(sys.argv)[:200]}\n".encode(), 0)


def _holder(descriptor: int) -> str:
    with contextlib.suppress(OSError):
        return os.pread(descriptor, 300, 0).decode(errors="replace").strip()
    return ""
