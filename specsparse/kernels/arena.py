"""Memory for packed weights, in huge pages where the system has them.

A decoding step reads every weight once. In pages of 4 KiB each page costs a walk of the page table (two nested ones in
a virtual machine) and ends a hardware prefetch: on two cores SmolLM2's layers were read at half the bandwidth of one
large matrix. Linux gives pages of 2 MiB to mappings that ask for them; matrices smaller than that share a mapping.
"""

import contextlib
import math
import mmap
import threading

import numpy as np

ALIGN = 64
"""The CPU backend takes a buffer with this alignment without a copy."""
HUGE_PAGE = 2 << 20
CHUNK = 32 << 20
"""Bytes of a shared mapping. Untouched pages take no memory."""

_lock = threading.Lock()
_rest = np.empty(0, np.uint8)


def aligned_empty(*shape: int) -> np.ndarray:
    """Zeroed uint8[*shape] whose first byte is aligned; its mapping is given back with the last array in it."""
    global _rest
    size = math.prod(shape)
    with _lock:
        if size > CHUNK // 2:
            return _mapping(size)[:size].reshape(shape)
        if size > _rest.size:
            _rest = _mapping(CHUNK)
        out, _rest = _rest[:size], _rest[-(-size // ALIGN) * ALIGN :]
    return out.reshape(shape)


def _mapping(size: int) -> np.ndarray:
    """uint8[>= size] that begins at a huge page."""
    memory = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel built without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    data = np.frombuffer(memory, np.uint8)
    return data[-data.ctypes.data % HUGE_PAGE :]
