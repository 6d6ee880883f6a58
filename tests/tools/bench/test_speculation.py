"""`bench draft`: texts with drafts, beside a scripted peer; beside the real one where it is installed."""

import importlib.util
import json
import os

import pytest

import specsparse
from specsparse.cli.main import main
from specsparse.errors import UserError
from specsparse.testing import write_tiny_gguf
from specsparse.tools import peers
from specsparse.tools.bench import speculation
from specsparse.tools.peers import peer as timed
from specsparse.tools.peers.peer import TimedText

HAS_LLAMA_CPP = peers.PYTHON_VARIABLE in os.environ or importlib.util.find_spec("llama_cpp") is not None
JOBS = [("chat", [5, 6, 7] * 6), ("code", [8, 9] * 8)]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A target and its draft model, which is the target again: every draft is right."""
    folder = tmp_path_factory.mktemp("pair")
    options = {"quant": "Q8_0", "n_layers": 1, "head_dim": 16, "context_length": 2048}
    return write_tiny_gguf(folder / "t.gguf", **options), write_tiny_gguf(folder / "d.gguf", **options)


@pytest.fixture(scope="module")
def model(files):
    return specsparse.load(files[0])


class Scripted:
    """A peer that takes a second a token, half of it with its lookup and a quarter with a draft model."""

    def __init__(self):
        self.asked = []

    def speculate(self, ids, n, *, drafted, draft=None):
        self.asked.append((drafted, draft and draft.name))
        faster = 1.0 if not drafted else 2.0 if draft is None else 4.0
        return TimedText(n / faster, [1] * n + [2 if draft else 1], n / faster)


def test_every_side_writes_every_text_in_turn_and_is_compared_with_its_own_plain_one(model, files):
    peer = Scripted()
    writers = speculation.writers_of(model, peer, str(files[1]), drafted=(3,), tg=15)
    assert list(writers) == ["ours plain", "ours 3", "peer plain", "peer 3", "peer lookup 3"]
    found = speculation.measure(writers, JOBS, repeats=2)
    assert peer.asked[:6] == [(3, None), (3, "d.gguf"), (0, None), (0, None), (3, "d.gguf"), (3, None)]
    assert {len(texts) for row in found.values() for texts in row.values()} == {2}
    got = speculation.summary_of(found, 15)
    assert got["tokens_per_pass"]["all"]["ours 3"] == pytest.approx(4.0)
    assert got["tok_s"]["all"]["peer 3"] == pytest.approx(4.0)
    assert got["differing"] == {**{name: [] for name in writers}, "peer 3": ["chat", "code"]}
    ours = max(got["tok_s"]["all"][name] for name in ("ours 3",))
    assert got["ratios"]["over_peer_drafts"] == pytest.approx(ours / 4.0) == got["ratios"]["over_peer_best"]


def test_without_a_peer_a_drafter_by_name_is_enough(model):
    writers = speculation.writers_of(model, None, "prompt_lookup", drafted=(2, 4))
    assert list(writers) == ["ours plain", "ours 2", "ours 4"]
    assert speculation.draft_file("prompt_lookup") is None
    with pytest.raises(UserError, match="unknown model 'smollm2-drafd': did you mean smollm2-draft"):
        speculation.draft_file("smollm2-drafd")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--depth", "2"), "unknown argument --depth"),
        (("--tg", "0"), "0 is too small"),
        (("--peer", "transformers"), "--peer transformers has no speculative decoding here"),
    ],
)
def test_mistakes_are_one_line(files, capsys, args, says):
    assert main(["bench", "draft", str(files[1]), "--model", str(files[0]), *args]) == 2
    err = capsys.readouterr().err
    assert says in err and len(err.strip().splitlines()) == 1


@pytest.mark.skipif(not HAS_LLAMA_CPP, reason="no llama-cpp-python here, and SPECSPARSE_PEER_PYTHON is not set")
def test_llama_cpp_drafts_with_the_same_file(files, model):
    """The draft is the target: the peer accepts whole drafts too, and its text is its plain one."""
    with timed.Peer("llama.cpp") as peer:
        peer.open(files[0], model.config, threads=1, room=128, depth=0)
        writers = speculation.writers_of(model, peer, str(files[1]), drafted=(3,), tg=24)
        found = speculation.summary_of(speculation.measure(writers, JOBS, repeats=1), 24)
    assert not any(found["differing"].values())
    assert found["tokens_per_pass"]["all"]["peer 3"] > 3.5 and found["tokens_per_pass"]["all"]["peer plain"] == 1.0
    assert json.dumps(found)
