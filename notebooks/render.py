"""Run the notebooks and write them with their outputs: notebooks/*.ipynb, and docs/notebooks as Markdown and PNG.

    make notebooks [NOTEBOOKS="06 08"]              all of them, or those whose names have one of these words

It needs SmolLM2-135M and `make install EXTRAS=notebooks`. The text that is edited is the `.py`; what this writes is
made of it. `tests/test_notebooks.py` checks that both have the same cells.
"""

import re
import sys
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbconvert import MarkdownExporter

HERE = Path(__file__).resolve().parent
OUT = HERE.parent / "docs" / "notebooks"


def notebooks() -> list[Path]:
    """The notebooks in order."""
    return sorted(HERE.glob("[0-9]*.py"))


def render(path: Path) -> Path:
    """Run one and write it, its page and its pictures."""
    notebook = jupytext.read(path, fmt="py:percent")
    NotebookClient(
        notebook, timeout=280, kernel_name="python3", record_timing=False, resources={"metadata": {"path": str(HERE)}}
    ).execute()
    # Only what a reader sees: the kernel's version and random ids would change with every run.
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook.metadata = nbformat.from_dict({"kernelspec": kernel, "language_info": {"name": "python"}})
    for number, cell in enumerate(notebook.cells):
        cell.id, cell.metadata, cell.source = f"cell-{number}", {}, cell.source.strip("\n")
    nbformat.write(notebook, path.with_suffix(".ipynb"))

    text, resources = MarkdownExporter().from_notebook_node(notebook)
    OUT.mkdir(parents=True, exist_ok=True)
    for name, data in resources["outputs"].items():
        (OUT / f"{path.stem}_{name}").write_bytes(data)
        text = text.replace(f"({name})", f"({path.stem}_{name})")
    code = re.compile(r"(^```python\n.*?^```$)", re.MULTILINE | re.DOTALL)  # its blank lines stay
    text = "".join(p if i % 2 else re.sub(r"\n{3,}", "\n\n", p) for i, p in enumerate(code.split(text)))
    text = re.sub(r"\s*\n\s*(!\[png\]\([^)]*\))\s*\n", r"\n\n\1\n\n", text)
    text = re.sub(r"[ \t]+$", "", text.replace("```python\n\n\n", "```python\n"), flags=re.MULTILINE)
    title, _, rest = text.strip().partition("\n")
    page = OUT / f"{path.stem}.md"
    made = f"<!-- notebooks/{path.name}, run by notebooks/render.py -->"
    page.write_text(f"{made}\n\n{title}\n\n{how_to_open(path)}\n{rest}\n", encoding="utf-8")
    return page


def how_to_open(path: Path) -> str:
    """The line under a page's title."""
    return (
        f"*To run it: `.venv/bin/pip install jupyterlab`, then `.venv/bin/jupyter lab notebooks/{path.stem}.ipynb`.\n"
        f"The same cells are in `notebooks/{path.name}`, which runs as a script.*"
    )


if __name__ == "__main__":
    chosen = [p for p in notebooks() if not sys.argv[1:] or any(name in p.name for name in sys.argv[1:])]
    for path in chosen:
        print(f"{path.name} -> {render(path)}", flush=True)
