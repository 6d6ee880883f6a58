"""The processor: its model, and the best rates that it reaches: memory reads, int8 and float32 multiply-adds.

Rates are measured with the kernels' own threads and instruction set, or by numpy if the native library is missing.
"""

import functools
import platform
import re
import time
from pathlib import Path
from typing import Any

import numpy as np

from specsparse.kernels.native import cpu
from specsparse.support.cgroup import cpus

_FLAGS = (
    "f16c", "avx", "avx2", "fma", "avx_vnni", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni",
    "avx512_bf16", "amx_int8", "amx_bf16", "asimd", "asimddp", "i8mm", "sve",
)  # fmt: skip


@functools.cache
def cpu_info() -> dict[str, Any]:
    """The processor's model and architecture, flags (instruction sets of interest), and the number of cores that this
    process may use. A text is empty if the system does not tell it."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    name = re.search(r"^(?:model name|Hardware)\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    have = set(flags.group(1).split()) if flags else set()
    return {
        "model": name.group(1).strip() if name else platform.processor() or platform.machine(),
        "architecture": platform.machine(),
        "flags": [flag for flag in _FLAGS if flag in have],
        "cores": cpus(),
    }


class ReadBuffer:
    """Memory to measure read bandwidth with, by default larger than any cache. It is kept between measurements."""

    def __init__(self, mebibytes: int = 256):
        self._data = np.ones(mebibytes * 2**20 // 8, np.int64)

    def rate(self, passes: int = 3) -> float:
        """Bytes per second, the best of `passes` (256 MiB each, about 10 ms)."""
        library = cpu.library()
        if library is not None:
            return max(library.specsparse_read_rate(self._data.ctypes.data, self._data.nbytes) for _ in range(passes))
        rates = []
        for _ in range(passes):
            start = time.perf_counter()
            self._data.min()  # one vector instruction a load, so memory is the limit
            rates.append(self._data.nbytes / (time.perf_counter() - start))
        return max(rates)


def int8_rate(seconds: float = 0.02) -> float | None:
    """int8 multiply-adds per second on all threads; None without the native library (numpy has no such product)."""
    library = cpu.library()
    return None if library is None else library.specsparse_int8_rate(seconds)


def f32_rate(seconds: float = 0.02) -> float:
    """float32 multiply-adds per second on all threads."""
    library = cpu.library()
    if library is not None:
        return library.specsparse_f32_rate(seconds)
    a = np.ones((768, 768), np.float32)
    start = time.perf_counter()
    a @ a
    return 768**3 / (time.perf_counter() - start)
