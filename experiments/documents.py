"""Claim: text that others wrote serves to train a drafter beside the target's own, and costs no decoding.

Writes a file for `train.documents=[FILE]` from the Python packages that stand on a machine: functions with a docstring,
docstrings, and the descriptions of packages, in the folders given (by default the standard library and this
environment's packages), of packages whose metadata names one of the licences below. A function becomes one of five
questions and its answer (write, document, explain or finish it, rename one of its names); a paragraph becomes
the text of a question for a summary, or stays running text. Nothing is made up or shipped: the file holds other
people's texts.

Expected: about 42,000 documents here; docs/models/smollm2-head.md says what a head made of them.
Run time: under a minute.
Command: python experiments/documents.py OUT.jsonl [FOLDER ...] [--tokens 1500000] [--seed 0]
"""

import argparse
import ast
import json
import random
import re
import sys
import sysconfig
import textwrap
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path

GOOD = re.compile(r"MIT|BSD|Apache|PSF|Python Software Foundation|ISC", re.IGNORECASE)
OTHER = re.compile(r"GPL|Mozilla|MPL|Proprietary", re.IGNORECASE)
_LETTERS = 4
"""Letters of a token, about."""
_LEAST, _MOST = 120, 1600
"""Letters of a function's source, or of a paragraph."""
_CODE = "```python\n{code}\n```"
_ASKED = {
    "write": (
        "Write a Python function `{name}`: {first}",
        "Write Python code for this: {first}",
        "Implement `{name}` in Python. {first}",
    ),
    "document": (f"Write a docstring for this function:\n\n{_CODE}", f"Document this:\n\n{_CODE}"),
    "explain": (
        "What does `{name}` do?",
        "Explain `{name}` of Python's {module}.",
        "What is `{name}` of {module} for?",
    ),
    "rename": (f"In this code rename `{{old}}` to `{{new}}` and give the whole code:\n\n{_CODE}",),
    "go on": ("Finish this function:\n\n```python\n{half}\n```",),
}
_SUMMARIES = (
    "Summarise this text.\n\n{text}",
    "What does this say, in short?\n\n{text}",
    "Repeat the first sentence of this text:\n\n{text}",
)


def licence(found: Distribution) -> str:
    """What a package's metadata says of its licence, classifiers included."""
    said = [found.metadata.get("License-Expression"), (found.metadata.get("License") or "")[:60]]
    said += [c for c in found.metadata.get_all("Classifier", []) if c.startswith("License")]
    return " ".join(s for s in said if s)


def sources(folders: list[Path]) -> Iterator[tuple[str, Path | str]]:
    """(module, file) of Python files, and (package, description), of packages of a good licence."""
    for folder in folders:
        packages = {folder} if not list(folder.glob("*.dist-info")) else set()
        for found in distributions(path=[str(folder)]):
            said = licence(found)
            if GOOD.search(said) and not OTHER.search(said):
                if text := found.metadata.get_payload():
                    yield found.name, str(text)
                tops = {str(file).split("/")[0] for file in found.files or () if str(file).endswith(".py")}
                packages |= {folder / top for top in tops if top.isidentifier()}
        for package in sorted(packages):
            for path in sorted(package.rglob("*.py")):
                if not {"test", "tests", "site-packages", "idlelib", "lib2to3"} & set(
                    path.parts[len(package.parts) - 1 :]
                ):
                    yield ".".join(path.relative_to(folder).with_suffix("").parts), path


def of_file(module: str, path: Path, rng: random.Random) -> Iterator[dict[str, str]]:
    """Questions and answers of the functions of a file, and its longer docstrings."""
    try:
        text = path.read_text(encoding="utf-8")
        tree, lines = ast.parse(text), text.split("\n")
    except (OSError, ValueError, SyntaxError, RecursionError):
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
            continue
        doc = ast.get_docstring(node)
        if not doc or len(doc) < 40 or not doc.isascii():
            continue
        if isinstance(node, ast.FunctionDef):
            code = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
            if _LEAST < len(code) < _MOST and code.isascii():
                yield of_function(node, code, doc, module, rng)
                continue
        name = getattr(node, "name", module)
        if len(doc) < _MOST:
            ask = rng.choice(_ASKED["explain"]).format(name=name, module=module)
            yield {"prompt": ask, "answer": doc}
        else:
            yield {"text": doc}


def of_function(node: ast.FunctionDef, code: str, doc: str, module: str, rng: random.Random) -> dict[str, str]:
    """One question and its answer."""
    kind, name = rng.choice(list(_ASKED)), node.name
    first = " ".join(doc.split("\n\n")[0].split())
    names = [arg.arg for arg in node.args.args if arg.arg not in ("self", "cls") and len(arg.arg) > 1]
    if kind == "rename" and not names:
        kind = "write"
    lines = code.split("\n")
    half = "\n".join(lines[: max(1, len(lines) // 2)])
    old = rng.choice(names) if names else ""
    new = rng.choice(("value", "item", "data", "source", "entry", "given")) + f"_{old[:1]}"
    bare = code.replace(doc, "...") if kind == "document" else code
    ask = rng.choice(_ASKED[kind]).format(name=name, first=first, code=bare, module=module, half=half, old=old, new=new)
    renamed = re.sub(rf"\b{re.escape(old)}\b", new, code) if kind == "rename" else code
    block = _CODE.format(code=renamed)
    documented = block if rng.random() < 0.5 else f'"""{doc}"""'
    return {"prompt": ask, "answer": {"document": documented, "explain": doc}.get(kind, block)}


def of_description(text: str, rng: random.Random) -> Iterator[dict[str, str]]:
    """A package's description: questions for a summary of its prose, whose answer is its first sentence."""
    for part in re.split(r"\n\s*\n", text):
        line = " ".join(part.split())
        if _LEAST < len(line) < _MOST and line.isascii() and not re.search(r"https?:|[<>|{}]|::|`{3}|={3}", line):
            sentence = re.split(r"(?<=[.!?]) ", line)[0]
            yield {"prompt": rng.choice(_SUMMARIES).format(text=line), "answer": sentence}
            yield {"text": line}


def documents(folders: list[Path], seed: int) -> list[dict[str, str]]:
    """All of them, in an order of `seed`."""
    rng, found = random.Random(seed), {}
    for name, source in sources(folders):
        rows = of_description(source, rng) if isinstance(source, str) else of_file(name, source, rng)
        for row in rows:
            found.setdefault(row.get("answer", row.get("text")), row)
    rows = list(found.values())
    rng.shuffle(rows)
    return rows


def main() -> None:
    """Writes the file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("folders", type=Path, nargs="*")
    parser.add_argument("--tokens", type=int, default=1_500_000, help="about so many, of texts and answers")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    paths = sysconfig.get_paths()
    rows = documents(given.folders or [Path(paths["stdlib"]), Path(paths["purelib"])], given.seed)
    left, kept = given.tokens * _LETTERS, []
    for row in rows:
        if left <= 0:
            break
        kept.append(row)
        left -= min(len(row.get("answer", row.get("text", ""))), 240 * _LETTERS)
    given.out.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
    print(f"{given.out}: {len(kept)} of {len(rows)} documents", file=sys.stderr)


if __name__ == "__main__":
    main()
