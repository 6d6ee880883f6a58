"""`python -m specsparse generate`: its text is `specsparse.generate`'s, by any method, from anywhere."""

import argparse
import dataclasses
import io
import json
import sys

import pytest

import specsparse
from specsparse.cli import arguments, generate
from specsparse.cli import main as cli
from specsparse.engine.sampling.params import SamplingParams
from specsparse.runtime.session import prompt_ids
from specsparse.testing import write_tiny_gguf

PROMPT = "abc abc abc"
SHORT = ("--max-tokens", "12", "--ignore-eos")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write_tiny_gguf(tmp_path_factory.mktemp("m") / "m.gguf", n_layers=1, context_length=256)


@pytest.fixture(scope="module")
def expected(file):
    """What the API writes, plainly."""
    return specsparse.generate(specsparse.load(file), PROMPT, max_tokens=12, ignore_eos=True)


@pytest.fixture
def answer(capsys, file):
    """Runs the command; what it prints."""

    def run(*argv):
        assert cli.main(["generate", str(file), *argv, *SHORT]) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def mistake(capsys):
    def run(*argv):
        assert cli.main(["generate", *map(str, argv)]) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.startswith("specsparse: ") and captured.err.count("\n") == 1
        return captured.err

    return run


@pytest.mark.parametrize("where", ["argument", "file", "stdin"])
def test_the_prompt_is_an_argument_a_file_or_the_standard_input(answer, expected, monkeypatch, tmp_path, where):
    text = tmp_path / "prompt.txt"
    text.write_text(PROMPT + "\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT + "\n" if where == "stdin" else "not this"))
    argv = {"argument": [PROMPT], "file": ["--file", str(text)], "stdin": []}[where]
    assert answer(*argv) == expected.text + "\n"


def test_json_is_one_object_with_ids_counters_seed_and_reason(answer, expected):
    method = ("--drafter", "prompt_lookup", "--option", "gamma=3", "--option", "ngram_min=1", "--verifier", "match")
    found = json.loads(answer(PROMPT, "--json", "--seed", "7", "--logprobs", "0", *method))
    assert found["text"] == expected.text and found["token_ids"] == list(expected.token_ids)
    assert found["seed"] == 7 and found["finish_reason"] == "length"
    assert found["prompt_token_ids"] == list(expected.prompt_token_ids)
    assert found["counters"]["num_draft_tokens"] and len(found["counters"]["num_accepted_tokens_per_pos"]) == 3
    assert found["seconds"]["decode"] > 0 and len(found["logprobs"]) == 12


def test_figures_are_on_the_standard_error(capsys, file, expected):
    for options, said in ((("--gamma", "3", "--option", "ngram_min=1"), "% of the drafted ones kept; "),
                          (("--drafter", "none"), " tok/s; ")):  # fmt: skip
        assert cli.main(["generate", "-m", str(file), "-p", PROMPT, *options, *SHORT]) == 0
        out, err = capsys.readouterr()
        assert out == expected.text + "\n" and err.count("\n") == 1
        assert err.startswith("12 tokens, ") and f"{said}prompt of {len(expected.prompt_token_ids)} tokens in " in err


def test_several_completions(answer):
    options = ("--n", "2", "--temperature", "1.0", "--seed", "3")
    found = json.loads(answer(PROMPT, "--json", *options))["completions"]
    assert len(found) == 2 and found[0]["token_ids"] != found[1]["token_ids"]
    assert answer(PROMPT, *options) == "".join(f"--- {i} of 2\n{c['text']}\n" for i, c in enumerate(found, 1))


def test_a_chat_goes_through_the_template(answer, file):
    model = specsparse.load(file)
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": PROMPT}]
    found = json.loads(answer(PROMPT, "--json", "--system", "s"))
    ids = prompt_ids(model, turns, SamplingParams())
    assert found["prompt_token_ids"] == ids.tolist()


def test_every_sampling_parameter_is_an_option():
    parser = argparse.ArgumentParser()
    generate.add_arguments(parser)
    named = {action.dest for action in parser._actions}
    assert {f.name for f in dataclasses.fields(SamplingParams)} - named == set(arguments.NO_OPTION)


def test_options_by_group():
    given = ["gamma=4", "draft_vocab=[1, 2]", "policy.p_min=0.5", "tree.draw=top", "verifier.delta=null"]
    assert arguments.read_options(given) == {
        "drafter": {"gamma": 4, "draft_vocab": [1, 2]},
        "policy": {"p_min": 0.5},
        "tree": {"draw": "top"},
        "verifier": {"delta": None},
    }


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--file", "nowhere.txt"], "--file nowhere.txt: cannot be read: No such file"),
        (["a", "--file", "b"], "--file and a prompt: give one of them"),
        ([""], "there is no prompt"),
        (["a", "--logprobs", "2"], "add --json"),
        (["a", "--verifier", "match", "--drafter", "none"], "--verifier needs --drafter NAME"),
        (["a", "-m", "b"], "unknown argument a: the model and the prompt are given already"),
        (["--policy", "p_min", "a"], "policy=p_min looks at the distributions of the draft"),
        (["a", "--drafter", "suffix", "--option", "gamma"], "KEY=VALUE"),
        (["a", "--drafter", "suffix", "--option", "gama=4"], "did you mean gamma?"),
        (["a", "--drafter", "suffix", "--option", "policy.gamma=4"], "policy.gamma needs --policy NAME"),
        (["a", "--drafter", "sufix"], "did you mean suffix?"),
        (["a", "--drafter", "suffix", "--verifier", "token"], "cannot verify"),
        (["a", "--top-p", "2"], "top_p=2"),
        (["a", "--tempratur", "1"], "did you mean --temperature?"),
    ],
)
def test_a_mistake_is_one_line_before_the_model_is_loaded(mistake, argv, said):
    assert said in mistake("no-such-model.gguf", *argv)


def test_no_prompt_at_a_terminal_is_a_mistake(mistake, monkeypatch):
    stdin = io.StringIO()
    stdin.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", stdin)
    assert "there is no prompt" in mistake("no-such-model.gguf")


@pytest.mark.parametrize("word", ["prompt=Once upon a time", "prompt=Hello, world!", "+prompt=x"])
def test_a_run_asked_for_a_prompt_names_the_key_and_the_command(capsys, word):
    assert cli.main(["run", word]) == 2
    said = capsys.readouterr().err
    assert "data.source=FILE" in said and "python -m specsparse generate" in said
