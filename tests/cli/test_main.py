import json
import subprocess
import sys
from pathlib import Path

import pytest

from specsparse.cli import main as cli
from specsparse.errors import not_installed
from tests.other_process import imported

ROOT = Path(__file__).resolve().parents[2]


def mistake(capsys, *argv):
    assert cli.main(list(argv)) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("specsparse: ") and captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize("argv", [[], ["--help"], ["help"]])
def test_overview_names_every_command(capsys, argv):
    assert cli.main(argv) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in cli.COMMANDS)


def test_unknown_command_names_the_nearest(capsys):
    assert "did you mean bench?" in mistake(capsys, "bnch")
    assert f"there are {', '.join(cli.COMMANDS)}" in mistake(capsys, "xyz")


def test_unknown_argument_names_the_nearest(capsys):
    assert "unknown argument --jsn; did you mean --json?" in mistake(capsys, "status", "--jsn")


def test_version(capsys):
    for argv in (["version"], ["--version"]):
        assert cli.main(argv) == 0
        assert capsys.readouterr().out.startswith("specsparse ")


def test_status_as_json(capsys):
    assert cli.main(["status", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kernels"]["kernels"] and found["cpu"]["cores"] >= 1


def test_status_as_lines(capsys):
    assert cli.main(["status"]) == 0
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines()} == {
        "package", "cpu", "kernels", "packages",
    }  # fmt: skip


def test_run_is_hydra(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    assert "did you mean prompt_lookup" in mistake(capsys, "run", "drafter=prompt_lokup")


MISTAKES = [
    ["audit", "--widhts", "2"],  # first, while nothing else has been imported
    ["advise", "qwen3-8c"],
    ["advise", "qwen3-8b", "--device", "h20"],
    ["generate", "m", "p", "--top-k", "-7"],
]


def test_help_and_mistakes_of_every_command_need_no_jax():
    """The import of jax alone takes longer than the whole answer."""
    asked = [[name, "--help"] for name in cli.COMMANDS if name != "run"]  # whose options stand on classes that need it
    answers = imported(*MISTAKES, *asked)
    assert "numpy" not in answers[0][0] and "unknown argument --widhts; did you mean --widths?" in answers[0][1]
    for line, (packages, said) in zip(MISTAKES + asked, answers, strict=True):
        assert "jax" not in packages, line
        assert said.startswith("specsparse: " if line in MISTAKES else "usage: "), line


@pytest.mark.parametrize("command", [["specsparse", "status"], ["specsparse.run", "+experiment=spec_llama160m"]])
def test_a_python_without_our_packages_is_one_line(command):
    done = subprocess.run([sys.executable, "-S", "-m", *command], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert f"is not installed for {sys.executable}: call .venv/bin/python" in done.stderr


def test_a_module_of_ours_that_is_missing_is_a_defect():
    with pytest.raises(ModuleNotFoundError):
        not_installed(ModuleNotFoundError("No module named 'specsparse.nothing'", name="specsparse.nothing"))
