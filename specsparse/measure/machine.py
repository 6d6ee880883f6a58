"""This machine while something is timed: how fast it reads memory, how busy others keep it, and whose turn it is."""

import contextlib
import fcntl
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

from specsparse.engine import hosts
from specsparse.errors import UserError
from specsparse.measure.conditions import Conditions, deviation

_SIGNATURE = "process "  # beginning of a lock's file once it was held


def read_bandwidth(*, mebibytes: int = 256, passes: int = 8) -> float:
    """Bytes per second at which the kernels' threads read memory that no cache holds; takes a fifth of a second."""
    from specsparse.kernels.processor import ReadBuffer  # here: JAX takes a second, and the lock needs none

    return ReadBuffer(mebibytes).rate(passes)


def busy_seconds(proc_stat: str, ticks: int) -> float | None:
    """Core seconds since boot that all processes, and other guests of the host, took; None if nothing is counted.

    `proc_stat` is the text of /proc/stat (proc(5)), whose first line counts user, nice, system, idle, iowait, irq,
    softirq and steal time in `ticks` of a second.
    """
    words = proc_stat.split("\n", 1)[0].split()
    if words[:1] != ["cpu"] or len(words) < 8:
        return None
    user, nice, system, _idle, _iowait, irq, softirq, *rest = map(int, words[1:])
    total = user + nice + system + irq + softirq + (rest[0] if rest else 0)
    return total / ticks if total else None


def _core_seconds() -> tuple[float, float] | None:
    """(core seconds of all processes, core seconds of this one and its children); None if the system does not say."""
    try:
        found = busy_seconds(Path("/proc/stat").read_text(encoding="ascii"), os.sysconf("SC_CLK_TCK"))
    except OSError:
        return None
    return None if found is None else (found, sum(os.times()[:4]))


class Meter:
    """Samples of the machine between timings: its read bandwidth, and how busy others keep it meanwhile."""

    def __init__(self) -> None:
        self._read: list[float] = []
        self._begun, self._cores = time.monotonic(), _core_seconds()

    def sample(self) -> None:
        """Measures once, in about a fifth of a second; before each repeat and after the last."""
        self._read.append(read_bandwidth())

    def conditions(self, plain_tokens_per_second: float | None, plain_s: Sequence[float] = ()) -> Conditions:
        """The conditions since the beginning; `plain_s` are plain decoding's seconds, one entry a repeat of the same
        work."""
        now, seconds, load = _core_seconds(), time.monotonic() - self._begun, None
        if now is not None and self._cores is not None and seconds > 0:  # mean cores that others kept busy
            load = max(0.0, (now[0] - self._cores[0]) - (now[1] - self._cores[1])) / seconds
        return Conditions(
            read_bandwidth=statistics.median(self._read) if self._read else None,
            read_deviation=deviation(self._read),
            plain_tokens_per_second=plain_tokens_per_second,
            plain_deviation=deviation(plain_s),
            other_load=load,
        )


@contextlib.contextmanager
def timing_lock(announce: Callable[[str], None]) -> Generator[None]:
    """Holds the machine for timing, so that runs that measure time take turns, whoever started them.

    The lock is the kernel's (flock) on a file of the machine's own temporary folder: it ends with its process, killed
    or not. `SPECSPARSE_TIMING_LOCK` names another file, such as one of a container's host. `announce` is called once
    with a line if another run holds it. UserError: the lock's file cannot be opened, or is a file of something else.
    """
    if not hosts.leads():  # process 0 holds it for all, on its machine
        yield
        return
    given = os.environ.get("SPECSPARSE_TIMING_LOCK")
    path = Path(given) if given else Path(tempfile.gettempdir()) / "specsparse-timing.lock"
    # Any user's file serves, and a lock needs no right to write. A link is not followed: the folder is everybody's.
    for flags in (os.O_RDWR, os.O_RDONLY, os.O_RDWR | os.O_CREAT):
        try:
            descriptor = os.open(path, flags | os.O_NOFOLLOW, 0o666)
            break
        except OSError as error:
            reason = error.strerror or error
    else:
        raise UserError(f"{path}: cannot be locked: {reason}; set SPECSPARSE_TIMING_LOCK=FILE")
    if flags & os.O_CREAT:
        with contextlib.suppress(OSError):
            os.fchmod(descriptor, 0o666)  # whatever the umask: the next user must be able to lock it

    def holder() -> str:
        with contextlib.suppress(OSError):
            return os.pread(descriptor, 300, 0).decode(errors="replace").strip()
        return ""

    try:
        if (found := holder()) and not found.startswith(_SIGNATURE):
            raise UserError(f"{path}: is no lock but a file with something in it; set SPECSPARSE_TIMING_LOCK=FILE")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            announce(f"waiting for another timing run on this machine: {holder() or path}")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        with contextlib.suppress(OSError):  # for those who wait
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{_SIGNATURE}{os.getpid()}: {' '.join(sys.argv)[:200]}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)
