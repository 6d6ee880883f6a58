"""What this machine can do at best: memory reads, int8 and float32 multiply-adds, with the kernels' own threads and
instruction set; by numpy where the native library is missing."""

import ctypes
import functools
import time

import numpy as np

from specsparse.kernels.native import cpu

_MEBIBYTES = 256
"""Of the buffer that is read: more than any cache."""
_MATRIX = 768


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The library with the functions of peaks.cc typed, or None.

    Raises:
        UserError: an older build.
    """
    if (library := cpu.library()) is None:
        return None
    seconds = [ctypes.c_double]
    of = {"read_rate": [ctypes.c_void_p, ctypes.c_int64], "int8_rate": seconds, "f32_rate": seconds}
    for name, arguments in of.items():
        function = cpu.symbol(library, f"specsparse_{name}")
        function.argtypes, function.restype = arguments, ctypes.c_double
    return library


def native() -> bool:
    """Whether the figures come from the native loops."""
    return _library() is not None


class ReadBuffer:
    """Memory to measure read bandwidth with; kept by the caller while it measures again and again."""

    def __init__(self, mebibytes: int = _MEBIBYTES):
        self._data = np.ones(mebibytes * 2**20 // 8, np.int64)

    def rate(self, passes: int = 3) -> float:
        """Bytes per second, the best of `passes` (256 MiB each, about 10 ms)."""
        library = _library()
        if library is None:
            return max(self._numpy_rate() for _ in range(passes))
        return max(library.specsparse_read_rate(self._data.ctypes.data, self._data.nbytes) for _ in range(passes))

    def _numpy_rate(self) -> float:
        start = time.perf_counter()
        self._data.min()  # one vector instruction a load, so memory is the limit
        return self._data.nbytes / (time.perf_counter() - start)


def int8_rate(seconds: float = 0.02) -> float | None:
    """int8 multiply-adds per second on all threads; None without the native library (numpy has no such product)."""
    library = _library()
    return None if library is None else library.specsparse_int8_rate(seconds)


def f32_rate(seconds: float = 0.02) -> float:
    """float32 multiply-adds per second on all threads."""
    library = _library()
    if library is not None:
        return library.specsparse_f32_rate(seconds)
    a = np.ones((_MATRIX, _MATRIX), np.float32)
    start = time.perf_counter()
    a @ a
    return _MATRIX**3 / (time.perf_counter() - start)
