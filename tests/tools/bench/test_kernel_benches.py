"""`bench ffn`, `bench products` and `bench lut` on tiny shapes: what they print and refuse, never how fast it was."""

import dataclasses
import json

import pytest
from rich.console import Console

from specsparse.cli.main import main
from specsparse.errors import UserError
from specsparse.kernels.native import cpu
from specsparse.support import files
from specsparse.tools.bench import kernel_benches
from specsparse.tools.bench.kernel_benches import ExpertsBench, FfnBench, LutBench, ProductsBench, active_share, bounded

GIB = 1 << 30
native = pytest.mark.skipif(not cpu.available(), reason=f"no native kernels: {cpu.why_missing()}")


def bench(capsys, *args):
    """Exit code, standard output and standard error of one call."""
    code = main(["bench", *map(str, args)])
    found = capsys.readouterr()
    return code, found.out, found.err


def smaller(owner, **sizes):
    """The class with other defaults of fields that no option sets."""
    fields = [(name, int, size) for name, size in sizes.items()]
    return dataclasses.make_dataclass("Small", fields, bases=(owner,), frozen=True, kw_only=True)


@pytest.fixture(scope="module")
def of_ffn():
    small = FfnBench(shape=(64, 128), active=(0.25, 1.0), ns=(1, 2), repeats=1, rank=32, cold_bytes=1 << 17)
    return small.run(Console(quiet=True))


def test_ffn_has_a_table_a_report_and_a_figure(capsys, tmp_path, monkeypatch, of_ffn):
    monkeypatch.setattr(FfnBench, "run", lambda *_: of_ffn)
    drawn, written = tmp_path / "active.png", tmp_path / "report.json"
    assert main(["bench", "ffn", "1024x2048", "--plot", str(drawn), "--json", str(written)]) == 0
    shown = capsys.readouterr().out
    assert "+signbit" in shown and "figure: " in shown
    assert drawn.read_bytes().startswith(b"\x89PNG")
    figure = active_share(json.loads(written.read_text()))
    assert {(r["type"], r["tokens"], r["active"]) for r in figure.rows} == {
        (kind, n, share) for kind in ("F16", "Q4_0") for n in (1, 2) for share in (0.25, 1.0)
    }
    assert all(r["low"] <= r["value"] <= r["high"] and r["read"] <= 1 for r in figure.rows)
    assert all(r["read"] == 1 for r in figure.rows if r["active"] == 1)


@native
def test_products(capsys, monkeypatch):
    monkeypatch.setattr(
        kernel_benches, "ProductsBench", smaller(ProductsBench, memory_bytes=1 << 17, cache_bytes=1 << 16)
    )
    args = ("q4_0,Q6_K", "--shape", "80x256", "--widths", "1,3,20", "--repeats", "2", "--json")
    code, out, err = bench(capsys, "products", *args)
    assert (code, err) == (0, "")
    found = json.loads(out.splitlines()[-1])
    cases = [("memory", 1), ("memory", 3), ("cache", 1), ("cache", 3), ("cache", 20)]
    assert [(r["type"], r["weights"], r["n"]) for r in found["rows"]] == [
        (name, *case) for name in ("Q4_0", "Q6_K") for case in cases
    ]
    for row in found["rows"]:
        seconds = 1e-3 * row["ms"]["median"]
        assert row["bytes"] == {"Q4_0": 8 * 288, "Q6_K": 32 + 8 * 544}[row["type"]] * 5  # groups, as they are packed
        assert row["macs_per_second"] == pytest.approx(row["n"] * 80 * 256 / seconds)
        assert row["share_of_read"]["median"] > 0 and row["share_of_int8"]["median"] > 0
        assert row["n"] > 1 or row["v"]["median"] == 1
    assert "of int8" in out and "matrices of 80 x 256" in out


@native
def test_experts(capsys, monkeypatch):
    monkeypatch.setattr(kernel_benches, "ExpertsBench", smaller(ExpertsBench, memory_bytes=1 << 15))
    args = ("--shape", "64x96", "--experts", 6, "--chosen", 2, "--widths", "1,3", "--idle", "0.6", "--repeats", 2)
    code, out, err = bench(capsys, "experts", *args, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out.splitlines()[-1])
    assert [(r["n"], r["skip"]) for r in found["rows"]] == [(1, False), (1, True), (3, False), (3, True)]
    for row in found["rows"]:
        assert row["woken"]["mean"] == 2 if row["n"] == 1 else 2 <= row["woken"]["mean"] <= 6
        assert row["bytes"] == pytest.approx(row["woken"]["mean"] * 3 * 64 * 96 / 32 * 18)
        assert row["share_of_read"]["median"] > 0 and row["v_over_bytes"]["median"] > 0
    assert "left out" in out and "6 experts of 64x96" in out


@native
def test_look_up_tables(capsys, monkeypatch):
    monkeypatch.setattr(kernel_benches, "LutBench", smaller(LutBench, cold_bytes=1 << 15))
    args = ("--shapes", "80x256", "--widths", "1,3", "--types", "q4_0", "--repeats", 2, "--json")
    code, out, err = bench(capsys, "lut", *args)
    assert (code, err) == (0, "")
    found = json.loads(out.splitlines()[-1])
    keys = [(r["type"], r["rows"], r["cols"], r["n"], r["state"], r["kernel"]) for r in found["rows"]]
    kernels = ("product", "int16", "int8", "int6")
    states = ("cold", "warm")
    assert keys == [("Q4_0", 80, 256, n, state, name) for n in (1, 3) for state in states for name in kernels]
    for row in found["rows"]:
        assert row["bytes"] == 80 * 256 // 32 * 18
        assert row["bytes_per_second"] == pytest.approx(row["bytes"] / (1e-3 * row["ms"]["median"]))
        assert row["over_product"]["median"] > 0
    errors = {row["kernel"]: row["relative_error"] for row in found["rows"] if row["n"] == 1}
    assert errors["product"] == errors["int16"] > 0  # the same bits
    assert 2 < errors["int6"] / errors["int8"] < 8  # steps of 31 and of 127
    assert "tables, int8" in out and "x product" in out and "80x256" in out


@pytest.mark.parametrize(
    "args, said",
    [
        (("products", "F16"), "no type 'F16'; there are "),
        (("products", "Q4_K", "--shape", "64x96"), "--shape 64x96: multiples of 256 fit Q4_K"),
        (("products", "Q4_0", "--shape", "64x64,32x32"), "argument --shape"),
        (("products", "Q4_0", "--shape", f"{10**12}x32"), "is too large, 2,147,483,647 is the most"),
        (("products", "Q4_0", "--shape", f"{10**400}x32"), f"{10**56}... is too large"),
        (("products", "Q4_0", "--peer", "llama.cpp"), "unknown argument --peer"),
        (("lut", "--shapes", "64x40"), "--shapes 64x40: multiples of 32 fit Q4_0"),
        (("lut", "--types", "Q8_0"), "no type 'Q8_0'; there are Q4_0, Q4_1"),
        (("experts", "--experts", "4", "--chosen", "5"), "--chosen 5: "),
        (("experts", "--idle", "0.3"), "--idle 0.3: "),
        (("experts", "--idle", "0.6", "--types", "Q8_0"), "--idle 0.6: "),
        (("ffn", "576x1536", "--types", "Q4_0,Q4_K"), "bench ffn 576x1536: multiples of 256 fit Q4_K"),
        (("ffn", "60x1536", "--types", "Q4_0"), "60x1536: multiples of 32 fit Q4_0"),
        (("ffn", "1024x1024", "--active", "0"), "--active"),
        (("ffn", "1024x1024", "--plot", "a.xyz"), "a.xyz: figures are written as PNG"),
        (("speed", "--plot", "x.png"), "unknown argument --plot"),
    ],
)
def test_what_cannot_be_measured_is_said(args, said, capsys):
    code, out, err = bench(capsys, *args)
    assert (code, out) == (2, "")
    assert said in err and err.count("\n") == 1


def test_large_weights_are_copied_until_no_cache_holds_them():
    for each in (1_400_000, 76 << 20, 270 << 20):
        assert (copies := bounded(GIB, each)) * each >= GIB > (copies - 1) * each
    assert bounded(GIB, 4 * GIB) == 1


def test_small_weights_are_copied_as_often_as_compiles_in_seconds():
    assert bounded(GIB, 24_576) == bounded(GIB, 1) == 16
    counts = [bounded(GIB, each) for each in range(1000, 1_380_000, 1000)]
    assert counts == sorted(counts) and max(counts) < 800


@pytest.mark.parametrize("kind", ["Q4_0", "Q6_K", "F16"])
def test_packed_bytes_are_told_without_packing(kind):
    whole = kernel_benches.random_packed(kind, (48, 1024), 0)
    assert kernel_benches.packed_bytes(kind, 48, 1024) == pytest.approx(whole.nbytes, rel=0.02)


@pytest.mark.parametrize(
    "args",
    [
        ("products", "Q4_0", "--widths", "1", "--shape", "4096x4194304"),
        ("products", "Q4_0", "--shape", "32x1000000000"),
        ("ffn", "1024000x1024000"),
        ("lut", "--shapes", "1000000x1000000"),
    ],
)
def test_a_shape_that_memory_does_not_hold_is_refused_before_it_is_made(args, capsys, monkeypatch):
    monkeypatch.setattr(files, "memory_available", lambda: 20 * GIB)
    code, out, err = bench(capsys, *args)
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert f"{args[-1]} in " in err and "do not fit into the memory that is available, 21 GB: give " in err


def test_a_system_that_does_not_tell_its_memory_refuses_nothing(monkeypatch):
    monkeypatch.setattr(files, "memory_available", lambda: None)
    files.need_memory("weights", 1 << 80, "take fewer")
    monkeypatch.setattr(files, "memory_available", lambda: 1000)
    with pytest.raises(UserError, match=r"^weights: 2 kB do not fit into the memory .* available, 1 kB: take fewer$"):
        files.need_memory("weights", 2000, "take fewer")
