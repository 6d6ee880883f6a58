"""Two runs side by side."""

import pytest

from specsparse.cli import main as cli
from specsparse.errors import UserError
from specsparse.measure.conditions import Conditions
from specsparse.report import diff, runs
from tests.report import making

TIMES = {(f"p{i}", "chat" if i % 2 else "code"): (2.0, 1.0 + i / 10) for i in range(6)}


@pytest.fixture
def pair(tmp_path):
    """B is twice as fast with the method, has one prompt of its own, and wrote another text to p0."""
    faster = {key: (plain, method / 2) for key, (plain, method) in TIMES.items()}
    done = [*making.passes(faster), *making.passes({("own", "chat"): (2.0, 20.0)})]
    done[1] = making.one("p0", "code", "speculative", 0.5, ids=(9,) * 20)
    a = making.speed_run(tmp_path / "a", making.passes(TIMES), kernels={"isa": "avx2"})
    b = making.speed_run(tmp_path / "b", done, policy__gamma=4, verifier="match", kernels={"isa": "avx512"})
    return runs.read(a), runs.read(b)


def test_what_differs(pair):
    found = diff.diff(*pair)
    lines = {line.name: line for line in found.lines}
    faster = lines["speed-up"]
    assert found.common == 6 and {x.prompts for x in (faster.a, faster.b, faster.ratio)} == {6}
    assert faster.ratio.value == pytest.approx(faster.b.value / faster.a.value)  # the prompt that B alone has is out
    chat = lines["speed-up, chat"]
    assert chat.b.prompts == 3 and chat.ratio.value == pytest.approx(chat.b.value / chat.a.value)
    assert faster.ratio[:3] == pytest.approx((2.0, 2.0, 2.0))
    assert diff.verdict(faster) == "higher"
    assert diff.verdict(lines["tokens per target pass"]) == "no clear difference"
    assert {"speed-up, chat", "speed-up, code"} <= set(lines)
    settings = {key: values for key, *values in found.settings}
    assert settings["policy.gamma"] == ["2", "4"] and settings["verifier.name"] == ["greedy", "match"]
    assert settings["kernels isa"] == ["avx2", "avx512"]
    assert found.texts == {"plain": (6, ()), "method": (6, ("p0",))}
    assert any("do not share one kernels" in line for line in diff.lines(found))
    assert not any("apart" in line for line in diff.lines(found))


def test_two_runs_of_a_busy_hour_are_told_apart(tmp_path):
    for name, plain in (("a", 160.0), ("b", 102.0)):
        taken = Conditions(20e9, plain_tokens_per_second=plain)
        making.speed_run(tmp_path / name, making.passes(TIMES), taken=taken)
    found = diff.diff(*(runs.read(tmp_path / name) for name in "ab"))
    assert any("beware: taken more than 10% apart: plain decoding 102.0 to 160.0" in line for line in diff.lines(found))


def test_the_other_way_round_it_is_lower(pair):
    lines = {line.name: line for line in diff.diff(*reversed(pair)).lines}
    assert lines["speed-up"].ratio.value == pytest.approx(0.5) and diff.verdict(lines["speed-up"]) == "lower"


def test_the_command_prints_and_writes_a_page(pair, tmp_path, capsys):
    paths = [str(run.directory) for run in pair]
    assert cli.main(["report", "diff", *paths, "--out", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "policy.gamma" in out and "method text: 1 of 6 prompts have other tokens: p0" in out
    page = (tmp_path / "out" / "index.html").read_text()
    assert "a against b" in page and "higher" in page


def test_what_cannot_be_compared_is_one_line(pair, tmp_path, capsys):
    other = making.speed_run(tmp_path / "c", making.passes({("z", "chat"): (1.0, 1.0)}))
    with pytest.raises(UserError, match="no prompt in common"):
        diff.diff(pair[0], runs.read(other))
    bare = making.write(tmp_path / "d", {"name": "d", "summary": {}})
    with pytest.raises(UserError, match="no method"):
        diff.diff(pair[0], runs.read(bare))
    assert cli.main(["report", "diff", "a"]) == 2
    assert "report diff A B" in capsys.readouterr().err
    assert cli.main(["report", "diff", str(tmp_path), str(other)]) == 2
    assert "holds 4 runs" in capsys.readouterr().err
