"""A container's quota and memory, not the machine's, decide how many threads run and what fits."""

import os

import pytest

from specsparse.errors import UserError
from specsparse.support import cgroup, files

GIB = 1 << 30


@pytest.fixture
def group(tmp_path, monkeypatch):
    """Writes the files of control groups, and the groups of this process, as the system would show them."""

    def write(membership: str, **texts: str) -> None:
        (tmp_path / "membership").write_text(membership)
        for name, text in texts.items():
            path = tmp_path.joinpath("root", *name.split("__")[:-1], name.split("__")[-1].replace("_DOT_", "."))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    monkeypatch.setattr(cgroup, "ROOT", tmp_path / "root")
    monkeypatch.setattr(cgroup, "MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    return write


def test_cgroup_2_the_least_quota_above_the_process_counts(group):
    group(
        "0::/job/step\n",
        cpu_DOT_max="max 100000",
        job__cpu_DOT_max="250000 100000",
        job__step__cpu_DOT_max="400000 100000",
    )
    assert cgroup.cpus() == 2  # 2.5, rounded down


def test_cgroup_1_a_quota_below_one_processor_is_one_thread(group):
    group(
        "4:cpu,cpuacct:/\n3:memory:/\n0::/\n", cpu__cpu_DOT_cfs_quota_us="50000", cpu__cpu_DOT_cfs_period_us="100000"
    )  # mounted as cpu, listed with cpuacct
    assert cgroup.cpus() == 1


@pytest.mark.parametrize("membership", ["0::/\n", "0::/../outer\n", "4:cpu:/\n", ""])
def test_cgroup_without_a_quota_the_affinity_counts(group, membership):
    group(membership, cpu_DOT_max="max 100000", cpu__cpu_DOT_cfs_quota_us="-1", cpu__cpu_DOT_cfs_period_us="100000")
    assert cgroup.cpus() == 16
    assert cgroup.memory_left() is None


@pytest.mark.parametrize("quota", ["", "max", "200000", "200000 0", "0 0", "two each", "200000 100000 1"])
def test_cgroup_what_is_no_quota_is_no_limit(group, quota):
    """`import specsparse` counts processors, so nothing here may raise."""
    group(
        "0::/\nneither\n4:cpu\n", cpu_DOT_max=quota, memory_DOT_max=str(GIB), memory_DOT_current="",
        memory_DOT_stat="",
    )  # fmt: skip
    assert cgroup.cpus() == 16 and cgroup.memory_left() is None


def test_cgroup_a_name_may_be_any_bytes(group):
    name = b"j\xff\xe2\x80\xa8b"  # no UTF-8, and a line separator
    group("", **{f"{os.fsdecode(name)}__cpu_DOT_max": "300000 100000"})
    cgroup.MEMBERSHIP.write_bytes(b"0::/" + name + b"\n")
    assert cgroup.cpus() == 3


def test_cgroup_memory_is_what_the_limit_leaves(group):
    stat = f"anon 1\ninactive_file {GIB // 2}\n"
    group("0::/\n", memory_DOT_max=f"{3 * GIB}\n", memory_DOT_current=str(2 * GIB), memory_DOT_stat=stat)
    assert cgroup.memory_left() == GIB + GIB // 2
    assert files.memory_available() <= GIB + GIB // 2
    with pytest.raises(UserError, match="take fewer"):
        files.need_memory("weights", 2 * GIB, "take fewer")


def test_cgroup_1_memory(group):
    names = {"memory__memory_DOT_limit_in_bytes": str(GIB), "memory__memory_DOT_usage_in_bytes": str(2 * GIB)}
    group("4:memory:/\n", memory__memory_DOT_stat="inactive_file 0\ntotal_inactive_file 4096\n", **names)
    assert cgroup.memory_left() == 0  # over the limit already
