"""Memory of packed weights: aligned, apart from each other, given back, and in huge pages."""

import gc
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from specsparse.kernels import arena
from specsparse.kernels.arena import ALIGN, CHUNK, aligned_empty


def test_arrays_are_aligned_zero_and_apart():
    sizes = [1, 63, 64, 65, 4097, CHUNK // 2, CHUNK // 2 + 1, CHUNK + 5, 3]
    with ThreadPoolExecutor(4) as pool:
        arrays = list(pool.map(aligned_empty, sizes * 4))
    for i, a in enumerate(arrays):
        assert a.ctypes.data % ALIGN == 0 and not a.any()
        a[:] = i + 1
    assert [set(np.unique(a).tolist()) for a in arrays] == [{i + 1} for i in range(len(arrays))]


def test_a_shape_is_kept():
    assert aligned_empty(3, 5).shape == (3, 5) and aligned_empty(0, 7).shape == (0, 7)


def resident() -> int:
    return int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[1]) << 10


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_given_back():
    aligned_empty(CHUNK // 2)  # what is left of the present chunk is too small from here on
    before = resident()
    arrays = [aligned_empty(CHUNK // 4) for _ in range(16)]
    for a in arrays:
        a[:] = 1
    assert resident() - before > 3 * CHUNK
    del a, arrays
    gc.collect()
    assert resident() - before < 2 * CHUNK


HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(not HUGE.exists() or "[never]" in HUGE.read_text(), reason="this system has no huge pages")
def test_small_matrices_lie_in_huge_pages():
    """In a process of its own, whose mappings are all known."""
    code = (
        "from specsparse.kernels.arena import aligned_empty\n"
        "a = [aligned_empty(300_000) for _ in range(90)]\n"
        "for x in a: x[:] = 1\n"
        "print(*(l for l in open('/proc/self/smaps_rollup') if 'AnonHugePages' in l))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    found = int(re.search(r"(\d+) kB", out)[1]) << 10
    if not found:
        pytest.skip("the system has no huge page free")
    assert found >= 12 << 20 and arena.HUGE_PAGE == 2 << 20
