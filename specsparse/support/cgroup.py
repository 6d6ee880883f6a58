"""Limits of a container or a job of Slurm: processors and memory, by Linux's control groups (versions 1 and 2).

The system's own figures are those of the whole machine: threads by them are throttled, a model by them is killed.
A line or a file of another form is no limit: `import specsparse` reads them.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

ROOT, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def _settings(controller: str, *names: str) -> Iterator[tuple[str, ...]]:
    """Texts of these files in the group of this process and in each group above it that has them all.

    Args:
        controller: `cpu` or `memory` of version 1; the empty name is version 2, which has one tree for all.
    """
    try:
        lines = MEMBERSHIP.read_text(encoding="utf-8", errors="surrogateescape").split("\n")
    except OSError:  # not Linux
        return
    for controllers, path in (line.split(":", 2)[1:] for line in lines if line.count(":") >= 2):
        if controller not in controllers.split(","):
            continue
        top = ROOT / controller
        # A path out of a namespace begins with /..: its limits are those of the top that is mounted here.
        group = top if ".." in path.split("/") else top / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(top):
                break
            try:
                yield tuple((folder / name).read_text(encoding="ascii", errors="replace").strip() for name in names)
            except OSError:
                continue


def cpus() -> int:
    """Processors that this process may use at one time: its affinity, and no more than its quota, rounded down.

    A thread more than the quota would be stopped in each period while the others wait for its share of a product.
    """
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    given = [*_settings("", "cpu.max"), *_settings("cpu", "cpu.cfs_quota_us", "cpu.cfs_period_us")]
    pairs = [re.fullmatch(r"([0-9]+)\s+([1-9][0-9]*)", " ".join(texts)) for texts in given]  # else max or -1: no limit
    return max(1, int(min([count, *(int(pair[1]) / int(pair[2]) for pair in pairs if pair)])))


def memory_left() -> int | None:
    """Bytes that this process may still take; None without a limit. File pages in use by no one are free to take."""
    found = [*_settings("", "memory.max", "memory.current", "memory.stat")]
    found += _settings("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")
    left = []
    for limit, used, stat in found:
        if limit.isdecimal() and used.isdecimal():
            pages = dict(re.findall(r"^(\w+) ([0-9]+)$", stat, re.MULTILINE))
            left.append(int(limit) - int(used) + int(pages.get("total_inactive_file", pages.get("inactive_file", 0))))
    return max(0, min(left)) if left else None
