"""The certificate of a callable where there is numpy and nothing else, as a command, a function and a pytest plugin."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from specsparse.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
MINE = """
import numpy as np


def draw(w, u):
    return min(int((np.cumsum(w) <= u * w.sum()).sum()), int(np.flatnonzero(w)[-1]))


def verify(p, q, drafts, uniforms):
    for i, x in enumerate(drafts):
        if uniforms[i] * q[i, x] >= p[i, x]:
            rest = np.maximum(p[i] - q[i], 0)
            return i, draw(rest if rest.sum() > 0 else p[i], uniforms[-1])
    return len(drafts), draw(p[-1], uniforms[-1])


def match_tree(p, q, drafts, parents, uniforms):
    emitted, at = [draw(p[0], uniforms[0])], -1
    while (hit := np.flatnonzero((parents == at) & (drafts == emitted[-1]))).size:
        at = int(hit[0])
        emitted.append(draw(p[at + 1], uniforms[at + 1]))
    return emitted


def accept_all(p, q, drafts, uniforms):
    return len(drafts), draw(p[-1], uniforms[-1])


def three(p, q, drafts, uniforms):
    return "three"
"""
ALONE = """
import sys, time
from importlib.abc import MetaPathFinder

class NumpyAlone(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names and top not in ("numpy", "specsparse", "mine", "test_mine", *ALSO):
            raise ModuleNotFoundError(f"No module named {top!r}", name=top)

sys.meta_path.insert(0, NumpyAlone())
"""
USE = """
import numpy
start = time.process_time()
import specsparse
from specsparse.testing import assert_lossless
specsparse.certify
assert time.process_time() - start < 1
import mine
small = {"vocab": 2, "gamma": 1, "samples": 200}
assert "trees to 2 nodes" in assert_lossless(mine.match_tree, **small).table()
try:
    assert_lossless(mine.accept_all, **small)
except AssertionError as error:
    assert "accept_all is not lossless" in str(error)
else:
    raise SystemExit("accept_all passed")
from specsparse.cli.main import main
code = main(["certify", "mine:verify", "--vocab", "2", "--gamma", "1", "--samples", "200"])
sys.exit(code or main(["certify", "token"]))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("mine", None)


def python(folder, source, also=()):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)]), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    source = f"ALSO = {also!r}\n{ALONE}\n{source}"
    return subprocess.run([sys.executable, "-c", source], cwd=folder, env=env, capture_output=True, text=True)


def test_numpy_alone_is_enough_for_a_callable(folder):
    done = python(folder, USE)
    assert done.returncode == 2, done.stderr
    assert "certificate holds" in done.stdout and "verify  callable" in done.stdout
    [line] = done.stderr.splitlines()
    assert line.endswith("verifiers.rejection needs jax, which is not installed")


def test_the_pytest_plugin_sums_up_in_numpy_alone(folder):
    (folder / "conftest.py").write_text('pytest_plugins = ["specsparse.testing.plugin"]\n')
    (folder / "test_mine.py").write_text(
        "import mine\n\ndef test_it(assert_lossless):\n    assert_lossless(mine.verify, vocab=2, gamma=1, samples=99)\n"
    )
    run = "import pytest; sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider']))"
    done = python(folder, run, also=("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_mine.py::test_it: CertificateReport(1 verifiers, 29 cases" in done.stdout
    assert done.stdout.count("certified lossless") == 1


SMALL = ["--vocab", "2", "--gamma", "1", "--samples", "200"]


def test_the_command_says_what_holds_and_what_does_not(folder, capsys):
    assert main(["certify", "mine:match_tree", *SMALL, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["as_promised"] and [row["name"] for row in found["rows"]] == ["match_tree"]
    assert main(["certify", "mine:accept_all", *SMALL]) == 1
    out = capsys.readouterr().out
    assert "certificate FAILS: accept_all: " in out and "\n  text " in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["mine"], "certify mine: write MODULE:NAME"),
        (["mine:three"], "three returned 'three': return a tuple"),
        (["mine:draw"], "draw raised TypeError"),
        (["mine:nothing"], "module mine has no nothing"),
        (["mine:MINE"], "has no MINE"),
        (["mine:verify", "--drafts", "wor"], "drafts are a chain"),
        (["mine:verify", "--arrays", "numpi"], "did you mean numpy"),
        (["mine:verify", "--vocab", "9"], "vocab=9"),
        (["greedy", "--batched"], "--batched says how a function is called"),
        (["tokn"], "did you mean token"),
        ([], "required: VERIFIER"),
    ],
)
def test_the_command_refuses_in_one_line(folder, capsys, words, said):
    assert main(["certify", *words]) == 2
    out, err = capsys.readouterr()
    assert said in err and err.count("\n") == 1 and not out
