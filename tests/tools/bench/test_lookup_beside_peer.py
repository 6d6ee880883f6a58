"""`experiments/lookup_beside_llama_cpp.py`, beside a scripted peer; beside the real one where it is installed."""

import importlib.util
import json
import os

import pytest

import specsparse
from experiments import lookup_beside_llama_cpp as beside
from specsparse.testing import write_tiny_gguf
from specsparse.tools import peers
from specsparse.tools.peers.peer import TimedText

HAS_LLAMA_CPP = peers.PYTHON_VARIABLE in os.environ or importlib.util.find_spec("llama_cpp") is not None


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("beside") / "m.gguf"
    return specsparse.load(write_tiny_gguf(path, n_layers=1, vocab_size=300, context_length=256))


class Scripted:
    """A peer that takes a second a token, and a quarter of it with a draft of ten."""

    def __init__(self):
        self.calls = []

    def speculate(self, ids, n, *, drafted, draft=None):
        assert draft is None
        self.calls.append(drafted)
        return TimedText(n / (4.0 if drafted == 10 else 1.0), [1] * n, n)


def test_every_side_is_timed_in_turn_and_compared_with_the_peers_best(model):
    peer, jobs = Scripted(), [("chat", [5, 6, 7] * 6), ("code", [8, 9] * 8)]
    found = beside.measure(model, peer, jobs, tokens=12, drafted=[2, 10], repeats=2)
    assert peer.calls == [10, 2, 0, 0, 2, 10, 10, 2, 0] * 2  # the order turns round; the first time compiles
    assert {len(s) for sides in found.values() for s in sides.values()} == {2}
    table = beside.rates(found, 12)
    assert list(table) == ["chat", "code", "all"]
    assert table["all"]["llama.cpp lookup 10"] == pytest.approx(4.0)
    assert table["all"]["llama.cpp plain"] == pytest.approx(1.0)
    assert beside.ratios(table["all"]) == (pytest.approx(table["all"][beside.LOOKUP] / 4.0),) * 2


def test_the_goal_is_over_the_peers_lookup_and_its_best_is_said_beside():
    peer = {"llama.cpp plain": 6.0, "llama.cpp lookup 2": 3.0, "llama.cpp lookup 10": 2.0}
    assert beside.ratios({beside.PLAIN: 99.0, beside.LOOKUP: 12.0, **peer}) == (4.0, 2.0)


def test_the_time_is_of_the_tokens_after_the_first(model):
    rows = beside.rates({"a": {beside.PLAIN: [2.0, 8.0, 3.0]}, "b": {beside.PLAIN: [9.0]}}, 12)
    assert rows["a"][beside.PLAIN] == 4.0 and rows["all"][beside.PLAIN] == 2.0  # medians; then the mean time


@pytest.mark.slow
@pytest.mark.skipif(not HAS_LLAMA_CPP, reason="llama-cpp-python is not installed")
def test_beside_llama_cpp(capsys, smollm2):
    code = beside.main(["--tasks", "chat", "--tokens", "16", "--repeats", "1"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == (0 if found["ratio"] >= beside.GOAL else 1)
    assert all(rate > 0 for rate in found["tok_s"]["chat"].values())
