"""What processor this is, and how many cores this process may use."""

import os
import platform
import re
from functools import cache
from pathlib import Path
from typing import TypedDict

_FLAGS = (
    "f16c", "avx", "avx2", "fma", "avx_vnni", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni",
    "avx512_bf16", "amx_int8", "amx_bf16", "asimd", "asimddp", "i8mm", "sve",
)  # fmt: skip


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class CpuInfo(TypedDict):
    """Model name, architecture, instruction sets of interest, and cores that this process may use."""

    model: str
    architecture: str
    flags: list[str]
    cores: int


@cache
def cpu_info() -> CpuInfo:
    """Of this machine; parts that the system does not tell are left empty."""
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
        "cores": usable_cores(),
    }
