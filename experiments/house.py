"""Claim: a reader meets few doors; what a stranger must know of the package is counted, not felt.

Prints what HOUSE's table asks of this checkout, or of the folder that is given.
Run time: 5 seconds. Command: python experiments/house.py [FOLDER]
"""

import ast
import sys
from collections import Counter
from pathlib import Path

DRAFTERS = {
    "Drafter", "DrafterSpec", "Either", "ModelDrafter", "StringDrafter", "Synthetic", "TextDrafter", "TreeDrafter",
    "WithPolicy",
}  # fmt: skip
RULES = {"Block", "Match", "Rejection", "SiblingRule", "TargetRule"}
RESOLVING = {"choose_verifier", "get_drafter", "get_policy", "make_drafter", "make_method"}
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def body_lines(function: ast.AST, text: list[str]) -> int:
    """Lines of code of a body: no docstring, no blank line, no line that is a comment."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    if not body:
        return 0
    lines = text[body[0].lineno - 1 : body[-1].end_lineno]
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in lines)


def called(node: ast.AST) -> str:
    """The name that a call ends in."""
    f = node.func if isinstance(node, ast.Call) else node
    return f.attr if isinstance(f, ast.Attribute) else getattr(f, "id", "")


def main(root: Path) -> None:
    """Counts and prints."""
    package = root / "specsparse"
    texts = {path.relative_to(package): path.read_text(encoding="utf-8") for path in sorted(package.rglob("*.py"))}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    nodes = {path: list(ast.walk(tree)) for path, tree in trees.items()}
    everything = [node for found in nodes.values() for node in found]
    lines = {path: text.count("\n") for path, text in texts.items()}
    used = Counter(called(n) for n in everything if isinstance(n, ast.Name | ast.Attribute))
    functions = [(path, n) for path, found in nodes.items() for n in found if isinstance(n, FUNCTION)]
    sizes = [body_lines(n, texts[path].split("\n")) for path, n in functions]
    private = [n.name for _, n in functions if n.name.startswith("_") and not n.name.startswith("__")]
    classes = [n for n in everything if isinstance(n, ast.ClassDef)]
    errors = {"UserError"}
    for _ in range(3):  # subclasses of subclasses
        errors |= {n.name for n in classes if errors & {called(base) for base in n.bases}}
    makers = {n.name for _, n in functions if n.returns is not None and called(n.returns) in errors}
    makers |= {n.name for _, n in functions if n.returns is not None and called(n.returns) == "NoReturn"}
    raised = [n for n in everything if isinstance(n, ast.Raise) and n.exc is not None]
    riddles = 0
    for n in everything:
        if isinstance(n, (*FUNCTION, ast.ClassDef)) and (doc := ast.get_docstring(n)) is not None:
            riddles += len(doc.split()) <= 6 and isinstance(n, FUNCTION)

    def asked(names: set[str], path: Path) -> int:
        """isinstance of one of these classes in a file."""
        calls = (n for n in nodes[path] if isinstance(n, ast.Call) and called(n) == "isinstance" and len(n.args) == 2)
        return sum(bool(names & {called(x) for x in ast.walk(n.args[1])}) for n in calls)

    names = Counter(path.name for path in texts if path.name != "__init__.py")
    options = [p for p in texts if p.name == "options.py" and p.parts[0] != "support"]
    calls = [(path, n) for path, found in nodes.items() for n in found if isinstance(n, ast.Call)]
    resolving = [path for path, n in calls if called(n) in RESOLVING]
    outside = [n for path, n in lines.items() if path.parts[0] != "tools"]
    beyond = sum(asked(DRAFTERS, path) for path in texts if "drafters" not in path.parts)
    rules = sum(asked(RULES, path) for path in texts if path.name == "verify.py")
    rows = {
        "Python files; lines": (len(texts), sum(lines.values())),
        "of these outside tools/": (len(outside), sum(outside)),
        "functions; mean lines of code": (len(functions), round(sum(sizes) / len(sizes), 1)),
        "of at most 3 lines; private ones used once": (sum(s <= 3 for s in sizes), sum(used[n] == 1 for n in private)),
        "raise UserError, its subclasses and helpers": (sum(called(n.exc) in errors | makers for n in raised),),
        "isinstance of a drafter outside drafters/; of a rule in verify.py": (beyond, rules),
        f"calls of {', '.join(sorted(RESOLVING))}; files": (len(resolving), len(set(resolving))),
        "files options.py outside support": (len(options),),
        "file names that stand twice or more": (sum(n > 1 for n in names.values()),),
        "functions whose docstring has at most six words": (riddles,),
    }
    for name, values in rows.items():
        print(f"{name}: {'; '.join(map(str, values))}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[1])
