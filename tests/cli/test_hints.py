"""Mistakes that newcomers made: each is answered by what to write instead, in one line, and what it says works."""

import io
import subprocess
import sys
from pathlib import Path

import pytest

import specsparse
from specsparse import run
from specsparse.cli import main as cli
from specsparse.engine.sampling.params import SamplingParams
from specsparse.errors import UserError
from specsparse.experiments import runner
from specsparse.experiments.command_line import flags_first
from specsparse.experiments.kind import RunResult
from specsparse.runtime.method import MethodSpec, resolve
from specsparse.speculative.drafters import get_drafter
from specsparse.support.terminal import until_the_reader_leaves
from specsparse.testing import write_tiny_gguf


def test_newcomer_with_two_checkouts_sees_which_one_runs(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "run", lambda *_, **__: RunResult({}, None))
    monkeypatch.chdir(tmp_path)
    mine = Path(specsparse.__file__).resolve().parent
    for other in ("", f", not {tmp_path / 'specsparse'}"):
        run._say_place.cache_clear()
        assert run.main(["experiment=spec", f"name=a{len(other)}"]) == 0
        assert capsys.readouterr().out.splitlines()[0] == f"specsparse: {mine}{other}"
        assert cli.main(["status"]) == 0
        assert f"package   {mine}{other}\n" in capsys.readouterr().out
        (tmp_path / "specsparse").mkdir(exist_ok=True)
        (tmp_path / "specsparse" / "__init__.py").touch()


def test_newcomer_runs_a_sweep_without_m_and_is_told(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runner, "run", lambda *_, **__: RunResult({}, None))
    assert run.main(["experiment=sweep_gamma"]) == 0
    assert "one run of a sweep; -m runs all of it: policy.gamma=1,2,3,4,5,6,7,8\n" in capsys.readouterr().err
    assert run.main(["experiment=spec", "policy.gamma=2"]) == 0
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["inspect", "a.gguf", "b.gguf", "--draft", "c.gguf"], "--draft: not allowed with argument DRAFT"),
        (["bench", "a.gguf", "b.gguf"], "unknown argument b.gguf"),
        (["bench", "no.gguf"], "no.gguf: no such file"),
    ],
)
def test_newcomer_names_models_as_arguments(capsys, argv, said):
    assert cli.main(argv) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("gamma", r"get_drafter\(NAME, gamma=VALUE\)"),
        ("num_speculative_tokens", r"get_drafter\(NAME, gamma=VALUE\)"),
        ("do_sample", "temperature=0 is greedy"),
        ("n_predict", "it is max_tokens"),
        ("guided_json", "the answer is free text here"),
        ("context_length", r"specsparse.load\(FILE, context_length=VALUE\)"),
    ],
)
def test_other_projects_names_are_told_what_it_is_called_here(option, says):
    with pytest.raises(UserError, match=says):
        SamplingParams().merged(**{option: 3})


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--experiment", "x"], "+experiment=NAME"),
        (["--max-tokens=3"], "settings have no dashes"),
        (["drafter=none", "verifier=token"], "verifier=token needs a drafter: leave it out"),
        ([f"seed={'1' * 5000}"], "seed=111111111111111111111111111111111111111111111111111111111... has too many"),
        (["max_tokens=2", "--cfg", "job", "seed=1"], "unrecognized arguments: seed=1; settings stand side by side"),
        (["drafter=suffix,prompt_lookup"], "several values are a sweep, add -m"),
        (["model=smollm2-13m"], "did you mean smollm2-135m?"),
        (["--resolve"], "--resolve goes with --cfg job or --help"),
        (["--run", "--multirun", "--cfg", "job"], "--run and --multirun and --cfg: give one of them"),
    ],
)
def test_a_mistyped_run_is_one_line(capsys, argv, says):
    assert run.main(argv) == 2
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["hydra.run.dir=file/x"], "file/x: cannot be used: Not a directory"),
        ([f"name={'n' * 300}"], "File name too long"),
        (["-m", "verifier=greedy,token", "hydra.sweep.dir=file/x"], "file/x: cannot be used: Not a directory"),
    ],
)
def test_a_folder_that_cannot_be_made_is_one_line(tmp_path, monkeypatch, capsys, argv, said):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    (tmp_path / "file").write_text("")
    model = write_tiny_gguf(tmp_path / "m.gguf", n_layers=1, context_length=512)
    assert run.main([*argv, f"model={model}"]) == 2
    err = capsys.readouterr().err
    assert said in err and "hydra.run.dir=FOLDER" in err and err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "runs") == ["file", "m.gguf"]


def test_flags_stand_anywhere(capsys):
    assert flags_first(["model=a", "-m", "max_tokens=2,3"]) == ["-m", "model=a", "max_tokens=2,3"]
    assert flags_first(["model=a", "--hydra-help"]) == ["--hydra-help"]
    assert flags_first(["a=1", "b=2"]) == ["a=1", "b=2"]


def test_long_numbers_are_cut(capsys):
    digits = "9" * 5000
    for argv in (["generate", "m", "hi", "--seed", digits], ["bench", "--threads", digits], ["bench", "--tg", digits]):
        assert cli.main(argv) == 2
        said = capsys.readouterr().err
        assert "9" * 50 in said and "..." in said and said.count("\n") == 1 and len(said) < 250


def test_a_bench_without_a_model_takes_none(capsys):
    assert cli.main(["bench", "products", "Q4_0", "--model", "/nonexistent"]) == 2
    assert "unknown argument --model" in capsys.readouterr().err


def test_token_on_argmax_drafts_names_the_temperature_that_draws_them():
    with pytest.raises(UserError, match=r"set drafter\.temperature above 0"):
        resolve(MethodSpec(get_drafter("layer_skip"), "token", sampling=SamplingParams(temperature=0.8)))
    drawn = get_drafter("layer_skip", temperature=0.8)
    assert resolve(MethodSpec(drawn, "token", sampling=SamplingParams(temperature=0.8))).verifier.name == "token"
    with pytest.raises(UserError) as caught:  # nothing draws these
        resolve(MethodSpec("prompt_lookup", "token", sampling=SamplingParams(temperature=0.8)))
    assert "drafter.temperature" not in str(caught.value)


def test_each_way_out_for_a_long_prompt_works(tmp_path):
    path = write_tiny_gguf(tmp_path / "m.gguf", n_layers=1, context_length=32)
    model = specsparse.load(path)
    with pytest.raises(UserError, match=r"truncate_prompt_tokens=-1 with max_tokens under 32, or load"):
        specsparse.generate(model, [5] * 40, max_tokens=31)
    cut = specsparse.generate(model, [5] * 40, max_tokens=31, truncate_prompt_tokens=-1, ignore_eos=True)
    assert len(cut.token_ids) == 31
    assert len(specsparse.load(path, context_length=64).check_ids([5] * 40)) == 40


def test_one_verifier_may_stand_alone():
    report = specsparse.certify("greedy", vocab=2, gamma=1, mutants=False, driver=False)
    assert {result.verifier for result in report.results} == {"greedy"}


def test_nothing_is_said_where_the_reader_has_left(monkeypatch):
    class Closed(io.StringIO):
        def flush(self):
            raise BrokenPipeError

        def fileno(self):
            return spare.fileno()

    with open("/dev/null", "w") as spare:
        monkeypatch.setattr(sys, "stdout", Closed())
        with until_the_reader_leaves():
            print("unread")
        with pytest.raises(SystemExit) as ended, until_the_reader_leaves():
            sys.exit(3)
        assert ended.value.code == 3


@pytest.mark.parametrize("command", ["specsparse.run --help", "specsparse --help"])
def test_a_pipe_that_closes_early_ends_the_program_quietly(command):
    line = f"{sys.executable} -m {command} | true"
    done = subprocess.run(line, shell=True, capture_output=True, text=True, check=False)
    assert done.stderr == ""
