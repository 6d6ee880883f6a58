"""Names that a reader could confuse: a class name stands once in the package, but for the ones listed here."""

import ast
from collections import defaultdict
from pathlib import Path

import specsparse

PACKAGE = Path(specsparse.__file__).parent

TWICE = {
    "Acceptance": "counts of a policy's sequence; options of the verifier `synthetic`: neither leaves its module",
    "Cell": "of a sweep's table, of a figure's table",
    "Engine": "what an experiment runs on; one a peer's module, which are called alike on purpose",
    "Entry": "of a comparison; of the catalogue of models",
    "Job": "what stays the same while a batch is decoded; a prompt of an experiment that is ready to decode",
    "Measure": "a figure's axis; what a distillation compares",
    "Method": "how to decode; what a report shows of it",
    "Option": "of a class's schema; of a factory of trees or policies",
    "Options": "of one kind of training, the same word in each kind's module",
    "OwnOptions": "of one kind of training, the same word in each kind's module",
    "Plan": "what a benchmark measures; how a model is obtained",
    "Roofline": "the measured numbers; the kind of experiment that measures them",
    "Sparse": "a sparse model of a run; the kind of experiment about one",
    "_Partial": "a tree that is being drafted, private to its module",
}
"""Class names that stand in several modules, and what they are in each."""


def test_a_class_name_stands_once():
    where = defaultdict(set)
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                where[node.name].add(str(path.relative_to(PACKAGE)))
    confusing = {name: sorted(paths) for name, paths in where.items() if len(paths) > 1 and name not in TWICE}
    assert confusing == {}
