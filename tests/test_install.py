"""The package as it is installed: native library, configs, data, console script, import rules."""

import ast
import graphlib
import itertools
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import yaml

import specsparse

ROOT = Path(__file__).resolve().parents[1]
REQUIRE_NATIVE = os.environ.get("SPECSPARSE_REQUIRE_NATIVE") == "1"


def test_the_imported_package_is_the_one_under_test():
    assert Path(specsparse.__file__).resolve().parent == ROOT / "specsparse"


def test_the_native_library_lies_beside_the_imported_package():
    """A non-editable install run from the checkout would import the sources without the library: this fails then."""
    from specsparse import kernels

    library = Path(kernels.__file__).resolve().parent / "libspecsparse_kernels.so"
    compiler = any(shutil.which(name) for name in ("c++", "g++", "clang++"))
    if not library.exists() and not compiler and not REQUIRE_NATIVE:
        pytest.skip("no compiler here: the jnp reference runs")
    assert library.exists(), "the native kernels were not built: make native"
    assert kernels.status()["native"], kernels.status()


def test_the_library_needs_no_python():
    library = ROOT / "specsparse" / "kernels" / "libspecsparse_kernels.so"
    if not library.exists() or not shutil.which("ldd"):
        pytest.skip("no library or no ldd")
    needed = subprocess.run(["ldd", str(library)], capture_output=True, text=True, check=True).stdout
    assert "python" not in needed.lower()


def test_configs_and_prompts_are_found():
    from specsparse.data import prompts
    from specsparse.run import conf_dir

    assert (conf_dir() / "experiment" / "spec_smollm2.yaml").is_file()
    assert len(prompts.load()) >= 64


def test_imports_go_one_way():
    lint = Path(sys.executable).parent / "lint-imports"
    if not lint.exists():
        pytest.skip("import-linter is not installed")
    done = subprocess.run([str(lint)], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name; a package by the name of its folder."""
    files = (ROOT / "specsparse").rglob("*.py")
    return {".".join(f.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): f for f in files}


def imported(tree: ast.Module, known: Mapping[str, Path]) -> Iterator[str]:
    """What a module imports when it is imported itself; not what it names as a type alone, under TYPE_CHECKING."""
    todo: list[ast.AST] = [*tree.body]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in known else node.module for name in names)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            todo += node.orelse
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            todo += ast.iter_child_nodes(node)


def test_no_module_imports_itself_through_others():
    known = modules()
    parsed = {name: ast.parse(file.read_text()) for name, file in known.items()}
    graph = {name: {*imported(tree, known)} & known.keys() - {name} for name, tree in parsed.items()}
    assert sum(map(len, graph.values())) > 500  # the walk sees imports
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError, which names the circle


def test_the_types_are_published():
    assert (ROOT / "specsparse" / "py.typed").is_file()


def requirements() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"].values()
    return [*project["build-system"]["requires"], *project["project"]["dependencies"], *itertools.chain(*extras)]


def test_a_distribution_has_the_same_bounds_everywhere():
    names = Counter(re.match(r"[\w-]+", line)[0] for line in {*requirements()})
    assert [name for name, times in names.items() if times > 1] == []


def test_private_modules_of_others_have_an_upper_bound():
    private = re.compile(r"^ *(?:from|import) (\w+)[\w.]*\._\w+", re.MULTILINE)
    used = {name for file in modules().values() for name in private.findall(file.read_text())}
    bounded = {re.match(r"\w+", line)[0] for line in requirements() if "<" in line}
    assert {"hydra", "jax"} <= used <= bounded


def test_the_root_of_the_package_is_small():
    assert len(list((ROOT / "specsparse").glob("*.py"))) <= 6


def test_the_image_is_of_this_version_and_sees_what_it_builds_from():
    """hadolint reads the file in `make lint`."""
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked, version = re.search(r'"specsparse\[([\w,]+)\]==([\w.]+)"', text).groups()
    assert version == project["version"] and {*asked.split(",")} <= project["optional-dependencies"].keys()
    seen = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    ours = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["scikit-build"]["sdist"]["include"]
    assert {*ours, "CMakeLists.txt", "pyproject.toml", "constraints", "specsparse-models"} <= seen
    assert all((ROOT / path).exists() for path in seen)


def test_the_pods_of_a_mesh_meet_at_the_first_of_them():
    service, job = yaml.safe_load_all((ROOT / "deploy" / "mesh.yaml").read_text())
    pod, name = job["spec"]["template"]["spec"], job["metadata"]["name"]
    (container,) = pod["containers"]
    words = dict(word.split("=", 1) for word in container["args"] if "=" in word)
    place, count, index = words["model.distributed"].split(",")
    host, port = place.split(":")
    assert job["spec"]["completionMode"] == "Indexed" and index == "$(JOB_COMPLETION_INDEX)" and port.isdecimal()
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["selector"] == {"job-name": name}
    assert host == f"{name}-0.{pod['subdomain']}" and pod["subdomain"] == service["metadata"]["name"]
    assert int(count) == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
