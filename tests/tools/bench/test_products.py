"""`bench --products` on tiny matrices: what it prints is checked, never how fast it was."""

import json
from functools import partial

import pytest

from specsparse.cli.main import main
from specsparse.kernels.native import cpu
from specsparse.tools.bench import products

pytestmark = pytest.mark.skipif(not cpu.available(), reason=f"no native kernels: {cpu.why_missing()}")


def test_end_to_end(capsys, monkeypatch):
    small = partial(products.ProductsPlan, memory_bytes=1 << 17, cache_bytes=1 << 16)
    monkeypatch.setattr(products, "ProductsPlan", small)
    args = ("--products", "q4_0,Q6_K", "--shapes", "80x256", "--n", "1,3,20", "--repeats", "2", "--json")
    code = main(["bench", *args])
    printed = capsys.readouterr()
    assert (code, printed.err) == (0, "")
    found = json.loads(printed.out.splitlines()[-1])
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
    assert "of int8" in printed.out and "matrices of 80 x 256" in printed.out


@pytest.mark.parametrize(
    "args, said",
    [
        (("--products", "F16"), "--products has no type 'F16'; there are "),
        (("--products", "Q4_K", "--shapes", "64x96"), "--shapes 64x96: columns of Q4_K are a multiple of 256"),
        (("--products", "Q4_0", "--shapes", "64x64,32x32"), "--products takes one of --shapes, for instance 1536x1536"),
        (("--products", "Q4_0", "--shapes", f"{10**12}x32"), "x32': lengths go up to 2147483647, for instance"),
        (("--products", "Q4_0", "--shapes", f"{10**400}x32"), f"{10**56}... is too large"),
        (("--products", "Q4_0", "--peer", "llama.cpp"), "--products does not go with --peer"),
    ],
)
def test_what_cannot_be_measured_is_said(args, said, capsys):
    code = main(["bench", *args])
    printed = capsys.readouterr()
    assert (code, printed.out) == (2, "")
    assert said in printed.err
