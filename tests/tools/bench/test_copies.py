"""Copies of a bench's weights: as many as memory needs, few enough to compile, and none that memory does not hold."""

import pytest

from specsparse.cli.main import main
from specsparse.errors import UserError
from specsparse.kernels.native import cpu
from specsparse.support import files
from specsparse.tools.bench import copies

GIB = 1 << 30


def test_large_weights_are_copied_until_no_cache_holds_them():
    for each in (1_400_000, 76 << 20, 270 << 20):
        assert (bounded := copies.bounded(GIB, each)) * each >= GIB > (bounded - 1) * each
    assert copies.bounded(GIB, 4 * GIB) == 1


def test_small_weights_are_copied_as_often_as_compiles_in_seconds():
    assert copies.bounded(GIB, 24_576) == copies.bounded(GIB, 1) == 16
    counts = [copies.bounded(GIB, each) for each in range(1000, 1_380_000, 1000)]
    assert counts == sorted(counts) and max(counts) < 800


@pytest.mark.parametrize("kind", ["Q4_0", "Q6_K", "F16"])
def test_packed_bytes_are_told_without_packing(kind):
    whole = copies.pack_qtensor(copies.random_quantised(kind, 48, 1024), copies.GGML[kind], (48, 1024))
    assert copies.packed_bytes(kind, 48, 1024) == pytest.approx(whole.nbytes, rel=0.02)


@pytest.mark.skipif(not cpu.available(), reason=f"no native kernels: {cpu.why_missing()}")
@pytest.mark.parametrize(
    "args",
    [
        ("--products", "Q4_0", "--shapes", "4096x4194304", "--n", "1"),
        ("--products", "Q4_0", "--shapes", "32x1000000000"),
        ("--ffn-shape", "1000000x1000000"),
        ("--ablation", "lut", "--shapes", "1000000x1000000"),
    ],
)
def test_a_shape_that_memory_does_not_hold_is_refused_before_it_is_made(args, capsys, monkeypatch):
    monkeypatch.setattr(files, "memory_available", lambda: 20 * GIB)
    assert main(["bench", *args]) == 2
    printed = capsys.readouterr()
    shape = args[args.index("--shapes") + 1] if "--shapes" in args else args[1]
    assert printed.out == "" and printed.err.count("\n") == 1
    assert f"{shape} in " in printed.err and "do not fit into the memory that is available, 21 GB: give " in printed.err


def test_a_system_that_does_not_tell_its_memory_refuses_nothing(monkeypatch):
    monkeypatch.setattr(files, "memory_available", lambda: None)
    files.need_memory("weights", 1 << 80, "take fewer")
    monkeypatch.setattr(files, "memory_available", lambda: 1000)
    with pytest.raises(UserError, match=r"^weights: 2 kB do not fit into the memory .* available, 1 kB: take fewer$"):
        files.need_memory("weights", 2000, "take fewer")
