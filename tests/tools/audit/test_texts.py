"""`audit diff`: where the texts of two runs fork, and how sure the rate is."""

import json

import numpy as np
import pytest

from specsparse.cli.main import main
from specsparse.tools.audit import texts
from specsparse.tools.audit.same_bits import rate
from specsparse.tools.audit.texts import Fork


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_first_forks_and_what_is_only_cut_off():
    a = {"x": (1, 2, 3, 4), "y": (5, 6), "z": (7, 8, 9), "mine": (1,)}
    b = {"x": (1, 2, 9, 4), "y": (5, 6, 7), "z": (7, 8, 9), "other": (1,), "more": ()}
    found = texts.compare_texts(a, b)
    assert found.forked == (Fork("x", 2, 3, 9, 3),)
    assert found.positions == 3 + 2 + 3 and found.only == (1, 2) and found.shorter == ("y",)
    assert found.rate.per_1000 == 125.0
    assert found.to_dict()["forks"][1] == {"id": "y", "position": None, "a": None, "b": None, "compared": 2}


@pytest.mark.parametrize("probability", [0.002, 0.01, 0.05])
def test_the_interval_holds_though_a_fork_ends_its_text(probability):
    """4,000 runs of 12 texts of 64 tokens: 95 % hold the truth, less three standard errors of that share."""
    rng, held, runs = np.random.default_rng(5), 0, 4000
    first = rng.geometric(probability, (runs, 12))
    for places in first:
        forks, positions = int((places <= 64).sum()), int(np.minimum(places, 64).sum())
        _, low, high = rate(forks, positions)
        held += low <= 1000 * probability <= high
    assert held / runs >= 0.95 - 3 * (0.95 * 0.05 / runs) ** 0.5


def test_a_run_of_ours_and_its_sides(tmp_path, capsys):
    rows = [{"prompt_id": "p", "side": side, "repeat": r, "token_ids": ids, "text": "t"}
            for side, ids in (("plain", [1, 2]), ("spec", [1, 3])) for r in (0, 1)]  # fmt: skip
    write(tmp_path / "prompts.jsonl", rows)
    other = write(tmp_path / "b.jsonl", [{"id": "p", "token_ids": [1, 3]}])
    assert main(["audit", "diff", str(tmp_path), str(tmp_path), "--sides", "plain,spec", "--json"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert json.loads(out[-1])["forks"] == [{"id": "p", "position": 1, "a": 2, "b": 3, "compared": 2}]
    assert any("1 of 1 texts fork; 2 tokens" in line for line in out)
    assert texts.read(tmp_path, "spec") == texts.read(other) == {"p": (1, 3)}


def test_a_line_ends_where_json_lines_end_it(tmp_path):
    """A text may hold other marks of an end of line, which are no end of a line of the file."""
    file = tmp_path / "a.jsonl"
    file.write_text('{"id": "x", "token_ids": [1], "text": "a\u2028b\x85c"}\n', encoding="utf-8")
    assert texts.read(file) == {"x": (1,)}


@pytest.mark.parametrize(
    ("content", "argv", "says"),
    [
        (None, (), "cannot be read"),
        ("nothing\n", (), "a.jsonl:1: not JSON"),
        ('\n{"id": "x", "token_ids": [1.5]}\n', (), "a.jsonl:2: expected an object such as"),
        ('{"id": "x", "token_ids": [true]}\n', (), "expected"),
        ('{"token_ids": [1]}\n', (), "expected"),
        ("[1]\n", (), "expected"),
        ("[" * 100_000, (), "a.jsonl:1: not JSON"),
        ('{"id": "\\ud800", "token_ids": [1]}\n', (), "a.jsonl:1: expected"),
        ("\n", (), "no text in common"),
        ('{"id": "other", "token_ids": [1]}\n', (), "no text in common"),
        ('{"id": "x", "token_ids": []}\n', (), "no text in common"),
        ('{"id": "x", "token_ids": [1]}\n', ("--sides", "plain"), "texts of no side: name"),
        (
            '{"id": "x", "side": "s", "token_ids": [1]}\n{"id": "x", "side": "t", "token_ids": [1]}\n',
            (),
            "of s, t: name one of them with --sides",
        ),
        ('{"id": "x", "token_ids": [1]}\n', ("--sides", "a,b,c"), "one side, or"),
        ('{"id": "x", "token_ids": [1]}\n', ("--html", "x.html"), "unknown argument --html"),
    ],
)
def test_mistakes_are_one_line(tmp_path, capsys, content, argv, says):
    a, b = tmp_path / "a.jsonl", write(tmp_path / "b.jsonl", [{"id": "x", "token_ids": [1]}])
    if content is not None:
        a.write_text(content)
    assert main(["audit", "diff", str(a), str(b), *argv]) == 2
    said = capsys.readouterr()
    assert says in said.err and said.err.count("\n") == 1 and said.out == ""
