"""The benchmark of the look-up kernels on a tiny matrix: what it prints is checked, never how fast it was."""

import json
from functools import partial

import pytest

from specsparse.cli.main import main
from specsparse.errors import UserError
from specsparse.kernels.native import cpu
from specsparse.tools.bench.ffn import FfnPlan
from specsparse.tools.bench.lut import bench as lut

pytestmark = pytest.mark.skipif(not cpu.available(), reason=f"no native kernels: {cpu.why_missing()}")


def bench(capsys, *args):
    """Exit code, standard output and standard error of one call."""
    code = main(["bench", *map(str, args)])
    found = capsys.readouterr()
    return code, found.out, found.err


def test_end_to_end(capsys, monkeypatch):
    monkeypatch.setattr(lut, "LutPlan", partial(lut.LutPlan, cold_bytes=1 << 15))
    args = ("--shapes", "80x256", "--n", "1,3", "--quantise", "q4_0", "--repeats", 2, "--json")
    code, out, err = bench(capsys, "--ablation", "lut", *args)
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
        (("--shapes", "64x64"), "--shapes goes with --ablation lut or --products Q4_0,Q8_0"),
        (("--ablation", "lut", "--shapes", "64x40"), "--shapes 64x40: columns are a multiple of 32"),
        (("--ablation", "lut", "--quantise", "Q8_0"), "--ablation lut has no type 'Q8_0'; there are Q4_0, Q4_1"),
        (("--ablation", "lut", "--peer", "llama.cpp"), "--ablation does not go with --peer"),
        (("--ablation", "lut", "--n", "none"), "--n none: nothing to measure with --ablation"),
        (("--ffn-shape", "64x64", "--batch", "2"), "--ffn-shape does not go with --batch"),
    ],
)
def test_what_cannot_be_measured_is_said(args, said, capsys):
    code, out, err = bench(capsys, *args)
    assert (code, out) == (2, "")
    assert said in err


def test_the_shape_of_an_ffn_must_fit_the_types_that_are_measured():
    FfnPlan(576, 1536, (1.0,), types=("Q4_0", "F16"), rank=64).validate()
    with pytest.raises(UserError, match="576x1536: multiples of 256 fit Q4_0, Q4_K"):
        FfnPlan(576, 1536, (1.0,), types=("Q4_0", "Q4_K")).validate()
    with pytest.raises(UserError, match="60x1536: multiples of 32 fit Q4_0"):
        FfnPlan(60, 1536, (1.0,), types=("Q4_0",)).validate()
