"""Every notebook runs from end to end, on a tiny model; their own assertions must hold."""

import runpy
from pathlib import Path

import matplotlib
import pytest

from specsparse.testing import write_tiny_gguf

LONG = ("01", "04", "05", "07")  # compile several decode loops
NOTEBOOKS = sorted((Path(__file__).resolve().parent.parent / "notebooks").glob("[0-9]*.py"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return write_tiny_gguf(path, quant="Q8_0", context_length=1024, n_layers=4)


def test_there_are_nine():
    assert len(NOTEBOOKS) == 9


@pytest.mark.parametrize(
    "path",
    [pytest.param(p, marks=[pytest.mark.slow] if p.name.startswith(LONG) else [], id=p.stem) for p in NOTEBOOKS],
)
@pytest.mark.filterwarnings("ignore:.*non-interactive")
def test_it_runs(path, tiny, monkeypatch, capsys):
    monkeypatch.setenv("SPECSPARSE_NOTEBOOK_MODEL", str(tiny))
    monkeypatch.setenv("SPECSPARSE_NOTEBOOK_TOKENS", "16")
    monkeypatch.chdir(path.parent)
    monkeypatch.syspath_prepend(path.parent)
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    try:
        runpy.run_path(str(path))
    finally:
        plt.close("all")
    assert capsys.readouterr().out


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_opens_with_what_it_shows(path):
    cells = path.read_text().split("\n# %%")
    assert cells[1].startswith(" [markdown]\n# # ") and len(cells) > 6
