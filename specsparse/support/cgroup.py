"""What a container or a job of Slurm may take: processors and memory, by Linux's control groups (versions 1 and 2).

The system's own figures are those of the whole machine: threads by them are throttled, a model by them is killed.
"""

import os
from collections.abc import Iterator
from pathlib import Path

ROOT, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def _settings(controller: str, *names: str) -> Iterator[tuple[str, ...]]:
    """Texts of these files in the group of this process and in each group above it that has them all.

    Args:
        controller: `cpu` or `memory` of version 1; the empty name is version 2, which has one tree for all.
    """
    try:
        lines = MEMBERSHIP.read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controller not in controllers.split(","):
            continue
        top = ROOT / controller
        # A path out of a namespace begins with /..: its limits are those of the top that is mounted here.
        group = top if ".." in path.split("/") else top / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(top):
                break
            try:
                yield tuple((folder / name).read_text(encoding="ascii").strip() for name in names)
            except OSError:
                continue


def cpus() -> int:
    """Processors that this process may use at one time: its affinity, and no more than its quota, rounded down.

    A thread more than the quota would be stopped in each period while the others wait for its share of a product.
    """
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [text.split() for (text,) in _settings("", "cpu.max")]
    quotas += _settings("cpu", "cpu.cfs_quota_us", "cpu.cfs_period_us")
    shares = [int(quota) / int(period) for quota, period in quotas if quota not in ("max", "-1")]
    return max(1, int(min([count, *shares])))


def memory_left() -> int | None:
    """Bytes that this process may still take; None without a limit. File pages in use by no one are free to take."""
    found = [*_settings("", "memory.max", "memory.current", "memory.stat")]
    found += _settings("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")
    left = []
    for limit, used, stat in found:
        if limit.isdecimal():
            pages = dict(line.split() for line in stat.splitlines())
            left.append(int(limit) - int(used) + int(pages.get("total_inactive_file", pages.get("inactive_file", 0))))
    return max(0, min(left)) if left else None
