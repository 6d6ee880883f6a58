"""Peak memory of this process."""

import contextlib
import re
import resource
import sys
from pathlib import Path


def reset_peak() -> None:
    """Starts the peak anew where the system can (Linux); elsewhere it stays the process's."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """Most resident bytes since `reset_peak`."""
    with contextlib.suppress(OSError):
        found = re.search(r"^VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
        if found:
            return 1024 * int(found.group(1))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
