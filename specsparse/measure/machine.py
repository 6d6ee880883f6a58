"""What this machine is: its CPU, and how fast it reads memory."""

import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from specsparse.kernels.peaks import ReadBuffer
from specsparse.measure.conditions import Conditions, deviation


def read_bandwidth(*, mebibytes: int = 256, passes: int = 8) -> float:
    """Bytes per second at which the kernels' threads read memory that no cache holds; the best of `passes`.

    Measured now, in about a fifth of a second.
    """
    return ReadBuffer(mebibytes).rate(passes)


def busy_seconds(proc_stat: str, ticks: int) -> float | None:
    """Core seconds since boot that all processes, and other guests of the host, took; None where nothing is counted.

    Args:
        proc_stat: text of /proc/stat (proc(5)); its first line counts user, nice, system, idle, iowait, irq, softirq
            and steal time.
        ticks: of a second.
    """
    words = proc_stat.split("\n", 1)[0].split()
    if words[:1] != ["cpu"] or len(words) < 8:
        return None
    user, nice, system, _idle, _iowait, irq, softirq, *rest = map(int, words[1:])
    total = user + nice + system + irq + softirq + (rest[0] if rest else 0)
    return total / ticks if total else None


def _core_seconds() -> tuple[float, float] | None:
    """(those of everybody, those of this process and its children), now; None where the system does not tell."""
    try:
        found = busy_seconds(Path("/proc/stat").read_text(encoding="ascii"), os.sysconf("SC_CLK_TCK"))
    except OSError:
        return None
    return None if found is None else (found, sum(os.times()[:4]))


class Meter:
    """Samples of the machine between timings: what memory it reads, and how busy others keep it meanwhile."""

    def __init__(self) -> None:
        self._read: list[float] = []
        self._begun, self._cores = time.monotonic(), _core_seconds()

    def sample(self) -> None:
        """Measures once, in about a fifth of a second; before each repeat and after the last."""
        self._read.append(read_bandwidth())

    def conditions(self, plain_tokens_per_second: float | None, plain_s: Sequence[float] = ()) -> Conditions:
        """What was found since the beginning.

        Args:
            plain_tokens_per_second: of plain decoding, where it was timed.
            plain_s: its seconds, one entry a repeat of the same work.
        """
        return Conditions(
            read_bandwidth=statistics.median(self._read) if self._read else None,
            read_deviation=deviation(self._read),
            plain_tokens_per_second=plain_tokens_per_second,
            plain_deviation=deviation(plain_s),
            other_load=self._other_load(),
        )

    def _other_load(self) -> float | None:
        """Mean cores that others kept busy; counted in hundredths of a second, so never below zero."""
        now, seconds = _core_seconds(), time.monotonic() - self._begun
        if now is None or self._cores is None or seconds <= 0:
            return None
        return max(0.0, (now[0] - self._cores[0]) - (now[1] - self._cores[1])) / seconds
