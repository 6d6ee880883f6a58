"""`bench --ffn-shape` on a small shape: the table, the figure and what is refused; never how fast it was."""

import json

import pytest
from rich.console import Console

from specsparse.cli.main import main
from specsparse.report.figures.active_share import active_share
from specsparse.tools.bench import ffn


@pytest.fixture(scope="module")
def report():
    plan = ffn.FfnPlan(64, 128, (0.25, 1.0), ns=(1, 2), repeats=1, rank=32, cold_bytes=1 << 17)
    return ffn.run(plan, Console(quiet=True), threads=None, backend=None)


def test_table_report_and_figure(capsys, tmp_path, monkeypatch, report):
    monkeypatch.setattr(ffn, "run", lambda *args, **options: report)
    drawn, written = tmp_path / "active.png", tmp_path / "report.json"
    assert main(["bench", "--ffn-shape", "64x128", "--plot", str(drawn), "--json", str(written)]) == 0
    shown = capsys.readouterr().out
    assert "+signbit" in shown and "figure: " in shown
    assert drawn.read_bytes().startswith(b"\x89PNG")
    figure = active_share(json.loads(written.read_text()))
    assert {(r["type"], r["tokens"], r["active"]) for r in figure.rows} == {
        (kind, n, share) for kind in ("F16", "Q4_0") for n in (1, 2) for share in (0.25, 1.0)
    }
    assert all(r["low"] <= r["value"] <= r["high"] and r["read"] <= 1 for r in figure.rows)
    assert all(r["read"] == 1 for r in figure.rows if r["active"] == 1)


def test_a_figure_needs_a_shape_and_a_name_that_says_what_is_written(capsys, tmp_path):
    assert main(["bench", "--ffn-shape", "64x128", "--plot", "a.xyz"]) == 2
    assert capsys.readouterr().err == "specsparse: a.xyz: figures are written as PNG; name a file that ends in .png\n"
    assert main(["bench", "--plot", str(tmp_path / "x.png")]) == 2
    assert (
        capsys.readouterr().err == "specsparse: --plot goes with --ffn-shape or --batch, for instance --batch 1,2,4,8\n"
    )
