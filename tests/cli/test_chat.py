"""`python -m specsparse chat`: the text is the one of `generate`, and the colours count what the counters count."""

import builtins
import io

import pytest
from rich.console import Console

import specsparse
from specsparse.cli import main as cli
from specsparse.cli.conversation import Conversation, origins
from specsparse.engine.sampling.params import SamplingParams
from specsparse.speculative.drafters import get_drafter
from specsparse.speculative.drafters.scripted import Scripted
from specsparse.support import terminal as terminals
from specsparse.testing import write_tiny_gguf

TURN = {"role": "user", "content": "abc abc abc abc"}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write_tiny_gguf(tmp_path_factory.mktemp("m") / "m.gguf", n_layers=1, context_length=512)


@pytest.fixture(scope="module")
def model(file):
    return specsparse.load(file)


@pytest.fixture
def terminal(monkeypatch):
    """What a terminal of 16 colours gets."""
    out = io.StringIO()
    made = Console(file=out, force_terminal=True, color_system="standard", width=200, highlight=False)
    monkeypatch.setattr(terminals, "console", lambda: made)
    return out


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_pieces_make_the_answer_and_their_origins_the_counters(model, temperature):
    sampling = SamplingParams(temperature=temperature, max_tokens=40, ignore_eos=True)
    method = {"drafter": get_drafter("prompt_lookup", gamma=3, ngram_min=1)}
    pieces = []
    chat = Conversation(model, sampling, method, seed=4)
    found = chat.say(TURN["content"], lambda piece, origin: pieces.append((piece, origin)))
    text = "".join(piece for piece, _ in pieces)
    assert found.text in (text, text + "\ufffd")  # an unfinished character is not shown
    assert chat.messages == [TURN, {"role": "assistant", "content": found.text}]
    again = specsparse.generate(model, [TURN], sampling=sampling, seed=5, **method)
    assert again.token_ids == found.token_ids
    kinds = [origin for _, origin in pieces]
    assert kinds.count("accepted") <= found.stats.counters.num_accepted_tokens
    assert temperature or set(kinds) > {"accepted"}


@pytest.mark.parametrize(("accept", "last"), [(2, "recovered"), (3, "bonus")])
def test_origins_of_a_scripted_round(model, accept, last):
    """Of three drafted tokens the first two are right, or all are."""
    plain = specsparse.generate(model, [TURN], max_tokens=12, ignore_eos=True)
    truth = [*plain.prompt_token_ids, *plain.token_ids]
    drafter, rounds = Scripted.chain(3, (accept,), vocab_size=300, truth=tuple(truth)), []
    options = {"drafter": drafter, "watch": lambda view: rounds.append(origins(view))}
    specsparse.generate(model, [TURN], max_tokens=12, ignore_eos=True, **options)
    assert rounds[0] == list(zip(plain.token_ids, ["accepted"] * accept + [last]))


def test_one_message_in_colour(file, terminal, capsys):
    argv = ["chat", str(file), "--prompt", TURN["content"], "--max-tokens", "24", "--drafter", "prompt_lookup"]
    assert cli.main(argv) == 0
    text = terminal.getvalue()
    assert "accepted: proposed by the draft and kept" in text and " tok/s, " in text
    assert text.count("\x1b[32m") > 1 and "tokens a target pass" in text  # green: the legend, and what was accepted


def test_a_conversation(file, terminal, monkeypatch):
    lines, seen = iter(["hello", "", "/reset", "x" * 3000, "again"]), []
    real = Conversation.say
    monkeypatch.setattr(Conversation, "say", lambda self, *a: (seen.append(len(self.messages)), real(self, *a))[1])

    def ended(*_):
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr(builtins, "input", ended)
    assert cli.main(["chat", str(file), "--max-tokens", "4", "--drafter", "none", "--system", "be brief"]) == 0
    assert seen == [1, 1, 1]  # the second after a reset, the third after one that did not fit
    assert "the context holds 512" in terminal.getvalue()


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--gamma", "0"], "--gamma 0"),
        (["--drafter", "oracle"], "drafter=oracle is unknown"),
        (["--drafter", "none", "--verifier", "greedy"], "--verifier needs a drafter"),
        (["--verifier", "token"], "token"),
        (["--draft", "none.gguf", "--prompt", "x"], "none.gguf: no such file"),
        (["--temperature", "-1"], "temperature"),
    ],
)
def test_mistakes(file, capsys, argv, says):
    assert cli.main(["chat", str(file), *argv]) == 2
    captured = capsys.readouterr()
    assert says in captured.err and captured.err.count("\n") == 1
