"""Every notebook runs from end to end, on a tiny model; their own assertions must hold. The rendered ones, with their
outputs, have the same cells."""

import json
import re
import runpy
from pathlib import Path

import matplotlib
import pytest

from specsparse.testing import write_tiny_gguf

LONG = ("01", "04", "05", "07")  # compile several decode loops
ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9]*.py"))
MAX_BYTES = 1_500_000
"""Of all rendered notebooks together: a clone stays small."""


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


def cells_of(text: str) -> list[tuple[str, str]]:
    """(type, source) of the cells of a notebook in jupytext's percent format."""
    found = []
    for cell in text.split("\n# %%")[1:]:
        mark, _, body = cell.partition("\n")
        if mark == " [markdown]":
            body = re.sub(r"^# ?", "", body, flags=re.MULTILINE)
        found.append(("markdown" if mark else "code", body.strip("\n")))
    return found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_rendered_notebook_has_the_same_cells(path):
    rendered = json.loads(path.with_suffix(".ipynb").read_text())["cells"]
    made = [(cell["cell_type"], "".join(cell["source"])) for cell in rendered]
    assert made == cells_of(path.read_text()), f"make notebooks NOTEBOOKS={path.stem}"
    outputs = [output for cell in rendered for output in cell.get("outputs", ())]
    assert outputs and all(output["output_type"] != "error" for output in outputs)
    assert not re.search(r"(/work|/tmp|/home|/root)/", json.dumps(outputs))  # a path of the machine that ran it
    page = (ROOT / "docs" / "notebooks" / f"{path.stem}.md").read_text()
    assert f"jupyter lab notebooks/{path.stem}.ipynb" in page


def test_rendered_notebooks_are_small():
    assert sum(path.with_suffix(".ipynb").stat().st_size for path in NOTEBOOKS) < MAX_BYTES
