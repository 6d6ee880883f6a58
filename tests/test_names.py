"""Names that a reader could confuse: a class name stands once in the package, but for the ones listed here."""

import ast
from collections import defaultdict
from pathlib import Path

import specsparse

PACKAGE = Path(specsparse.__file__).parent

TWICE = {
    "Engine": "what an experiment runs on; one a peer's module, which are called alike on purpose",
    "OwnOptions": "of one kind of training, the same word in each kind's module",
}
"""Class names that stand in several modules, and what they are in each."""


def test_a_class_name_stands_once():
    where = defaultdict(set)
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                where[node.name].add(str(path.relative_to(PACKAGE)))
    confusing = {name: sorted(paths) for name, paths in where.items() if len(paths) > 1}
    assert {name: paths for name, paths in confusing.items() if name not in TWICE} == {}
    assert TWICE.keys() <= confusing.keys(), "an exception that is none any more"
