"""Run the notebooks and write them, with their outputs, to docs/notebooks as Markdown and PNG.

    python notebooks/render.py [NAME ..]            needs SmolLM2-135M and pip install -e '.[notebooks]'

The text in git is the `.py`; what this writes is its output and is not edited.
"""

import re
import sys
from pathlib import Path

import jupytext
from nbclient import NotebookClient
from nbconvert import MarkdownExporter

HERE = Path(__file__).resolve().parent
OUT = HERE.parent / "docs" / "notebooks"


def notebooks() -> list[Path]:
    """The notebooks in order."""
    return sorted(HERE.glob("[0-9]*.py"))


def render(path: Path) -> Path:
    """Run one and write its page and pictures."""
    notebook = jupytext.read(path, fmt="py:percent")
    NotebookClient(notebook, timeout=280, kernel_name="python3", resources={"metadata": {"path": str(HERE)}}).execute()
    text, resources = MarkdownExporter().from_notebook_node(notebook)
    OUT.mkdir(parents=True, exist_ok=True)
    for name, data in resources["outputs"].items():
        (OUT / f"{path.stem}_{name}").write_bytes(data)
        text = text.replace(f"({name})", f"({path.stem}_{name})")
    code = re.compile(r"(^```python\n.*?^```$)", re.MULTILINE | re.DOTALL)  # its blank lines stay
    text = "".join(p if i % 2 else re.sub(r"\n{3,}", "\n\n", p) for i, p in enumerate(code.split(text)))
    text = re.sub(r"\s*\n\s*(!\[png\]\([^)]*\))\s*\n", r"\n\n\1\n\n", text)
    text = re.sub(r"[ \t]+$", "", text.replace("```python\n\n\n", "```python\n"), flags=re.MULTILINE)
    head = f"<!-- notebooks/{path.name}, run by notebooks/render.py -->\n\n"
    page = OUT / f"{path.stem}.md"
    page.write_text(head + text.strip() + "\n", encoding="utf-8")
    return page


if __name__ == "__main__":
    chosen = [p for p in notebooks() if not sys.argv[1:] or any(name in p.name for name in sys.argv[1:])]
    for path in chosen:
        print(f"{path.name} -> {render(path)}", flush=True)
