"""`python -m specsparse chat`: on a terminal, through pipes, interrupted; its text is `generate`'s."""

import contextlib
import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
from rich.console import Console

import specsparse
from specsparse.cli import arguments
from specsparse.cli import main as cli
from specsparse.engine.sampling.params import SamplingParams
from specsparse.errors import UserError
from specsparse.speculative.drafters import get_drafter
from specsparse.support import terminal as terminals
from specsparse.testing import write_tiny_gguf
from specsparse.tools.chat.conversation import COMMANDS, Chat, ChatMethod, Conversation, interrupts

TURN = {"role": "user", "content": "abc abc abc abc"}
LONG = 8000
"""Tokens of an answer that is still being written when it is interrupted."""
ON_A_TERMINAL = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from specsparse.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


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


@pytest.fixture
def chat(model):
    """A chat at a terminal, and what it shows."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=200, highlight=False, color_system=None)
    sampling = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    return Chat(Conversation(model, sampling), ChatMethod("prompt_lookup"), console, typed=True), out


def taken(chat, line):
    """What a chat shows after a line, and nothing that stood before."""
    talk, out = chat
    out.seek(0)
    out.truncate()
    talk.take(line)
    return out.getvalue().strip()


def piped(monkeypatch, text):
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


# A conversation.


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_pieces_make_the_answer_and_their_origins_the_counters(model, temperature):
    sampling = SamplingParams(temperature=temperature, max_tokens=40, ignore_eos=True)
    method = {"drafter": get_drafter("prompt_lookup", gamma=3, ngram_min=1)}
    pieces = []
    talk = Conversation(model, sampling, method, seed=4)
    found = talk.say(TURN["content"], lambda piece, origin: pieces.append((piece, origin)))
    assert "".join(piece for piece, _ in pieces) == found.text
    assert talk.messages == [TURN, {"role": "assistant", "content": found.text}]
    again = specsparse.generate(model, [TURN], sampling=sampling, seed=5, **method)
    assert again.token_ids == found.token_ids
    kinds = [origin.kind for _, origin in pieces]
    assert kinds.count("accepted") <= found.stats.counters.num_accepted_tokens
    assert temperature or set(kinds) > {"accepted"}


def test_a_turn_reads_its_own_message_alone(model):
    system = {"role": "system", "content": "ab " * 40}
    talk = Conversation(model, SamplingParams(max_tokens=2, ignore_eos=True), messages=[system])
    first, second = (talk.say(text, lambda piece, origin: None).stats for text in ("hi", "and then?"))
    assert first.cached_tokens == 0 and first.prefill_tokens - 9 < second.cached_tokens < second.prefill_tokens


def raised():
    raise KeyboardInterrupt


def pressed():
    """A signal, which raises nothing where it comes: an exception in a callback of jax would be lost."""
    with contextlib.suppress(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("interrupt", [raised, pressed])
def test_an_interrupted_answer_is_what_was_shown(model, interrupt):
    handler = signal.getsignal(signal.SIGINT)
    talk = Conversation(model, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    shown = []

    def show(piece, _):
        shown.append(piece)
        if len(shown) == 3:
            interrupt()

    assert talk.say(TURN["content"], show) is None and len(shown) == 3
    assert signal.getsignal(signal.SIGINT) is handler
    assert talk.messages == [TURN, {"role": "assistant", "content": "".join(shown)}]
    before = list(talk.messages)

    def stopped_at_once(*_, **__):
        raise KeyboardInterrupt

    talk.model = model
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specsparse.tools.chat.conversation.api.stream", stopped_at_once)
        assert talk.say("again", show) is None
    assert talk.messages == before
    shown.clear()
    assert talk.say("and now", lambda piece, _: None).token_ids


def test_a_second_ctrl_c_raises_at_once():
    with interrupts() as pressed, pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
        assert pressed.is_set()
        signal.raise_signal(signal.SIGINT)


# Commands.


def test_help_names_every_command_and_others_are_refused_with_the_list(chat):
    talk, out = chat
    talk.take("/help")
    assert all(name in out.getvalue() for name in COMMANDS)
    talk.take("/rest")
    assert f"unknown command /rest; there are {', '.join(COMMANDS)}" in out.getvalue()
    assert not talk._talk.messages


def test_method_shows_and_changes_the_method(chat):
    talk, _ = chat
    said = partial(taken, chat)
    assert said("/method") == "drafter prompt_lookup, verifier greedy, gamma as pays"
    assert said("/method suffix gamma=2") == "drafter suffix, verifier greedy, gamma 2"
    assert said("/method verifier=match") == "drafter suffix, verifier match, gamma 2"
    assert said("/method gamma=3") == "drafter suffix, verifier greedy, gamma 3"
    assert said("/method none") == "plain decoding"
    assert "drafter=oracle is unknown" in said("/method oracle")
    assert "none.gguf: no such file" in said("/method model draft=none.gguf")
    assert "none.gguf: no such file" in said("/method draft=none.gguf")
    assert "suffix and the draft model none.gguf are two drafters" in said("/method suffix draft=none.gguf")
    assert "/method does not know 'n=3'" in said("/method suffix n=3")
    assert "gamma=two must be a whole number" in said("/method suffix gamma=two")
    assert "/method none is plain decoding" in said("/method none gamma=2")
    assert said("/method") == "plain decoding"
    said("a message")
    assert said("/method prompt_lookup") == "drafter prompt_lookup, verifier greedy, gamma 4".replace("4", "3")
    assert " tok/s, " in said("abc abc abc abc") and len(talk._talk.messages) == 4


def test_stats_are_those_of_all_answers_and_reset_forgets_the_messages(chat):
    talk, out = chat
    talk.take("one")
    talk.take(" /two")  # a space before it makes it a message
    assert talk._talk.messages[2]["content"] == "/two"
    talk.take("/stats")
    last = out.getvalue().splitlines()[-2:]
    assert last[0].startswith("answers: 2; 12 tokens, ") and re.fullmatch(r"context: \d+ of 512 tokens", last[1])
    talk.take("/reset")
    talk.take("/stats")
    assert not talk._talk.messages and out.getvalue().splitlines()[-1] == "context: 0 of 512 tokens"


def test_set_shows_and_changes_how_tokens_are_chosen(chat):
    talk, _ = chat
    said = partial(taken, chat)
    before = talk._talk.sampling
    assert said("/set") == "temperature=0.0 max_tokens=6 ignore_eos=True seed=0"
    assert talk._talk.method["verifier"].name == "greedy"
    assert said("/set temperature=0.7 seed=5") == "temperature=0.7 max_tokens=6 ignore_eos=True seed=5"
    assert talk._talk.method["verifier"].name == "match" and talk._talk.seed == 5
    assert said("/set temp=0 'stop=a b' top-k=3 n_predict=2").startswith(
        "temperature=0.0 top_k=3 max_tokens=2 stop=('a b',)"
    )
    assert said("a message") and talk._answers == 1
    for line, says in (
        ("/set temperature=-1", "temperature=-1 must be"),
        (f"/set temperature={'[' * 5000}", "must be"),
        ("/set temprature=1", "/set does not know 'temprature'; did you mean temperature?"),
        ("/set temperature", "/set temperature: say /set temperature=VALUE"),
        ("/set mirostat=2", "temperature, top_k, top_p and min_p choose tokens here"),
        ("/set 'stop=a", "close the quotes"),
        ("/set logprobs=2", "/set does not know 'logprobs'"),
    ):
        now = talk._talk.sampling
        assert says in said(line) and talk._talk.sampling is now is not before


# Through pipes.


def test_piped_output_is_the_answers_alone(file, model, monkeypatch, capsys):
    sampling = {"max_tokens": 12, "temperature": 0.7, "top_k": 20, "ignore_eos": True, "seed": 6}
    argv = ["chat", str(file), "--max-tokens", "12", "--temperature", "0.7", "--top-k", "20", "--ignore-eos"]
    piped(monkeypatch, "hello\n\n/reset\nhello\n/stats\n/exit\nnever\n")
    assert cli.main([*argv, "--seed", "5"]) == 0
    answer = specsparse.generate(model, [{"role": "user", "content": "hello"}], **sampling).text
    captured = capsys.readouterr()
    assert captured.out == f"{answer}\n{answer}\n" and captured.err == ""


def test_piped_input_as_one_message(file, model, monkeypatch, capsys):
    piped(monkeypatch, "/hello\nthere\tyou")
    assert cli.main(["chat", str(file), "--max-tokens", "8", "--prompt", "-", "--drafter", "none"]) == 0
    turn = {"role": "user", "content": "/hello\nthere\tyou"}
    assert capsys.readouterr().out == specsparse.generate(model, [turn], max_tokens=8).text + "\n"


@pytest.mark.parametrize(("line", "says"), [("/rest", "unknown command /rest"), ("x" * 3000, "the context holds 512")])
def test_a_mistake_in_piped_input_ends_it_in_one_line(file, monkeypatch, capsys, line, says):
    piped(monkeypatch, f"{line}\nhello\n")
    assert cli.main(["chat", str(file), "--max-tokens", "4"]) == 2
    captured = capsys.readouterr()
    assert says in captured.err and captured.err.count("\n") == 1 and captured.out.strip() == ""


# On a terminal.


def test_one_message_in_colour(file, terminal):
    argv = ["chat", str(file), "--prompt", TURN["content"], "--max-tokens", "24", "--drafter", "prompt_lookup"]
    assert cli.main(argv) == 0
    text = terminal.getvalue()
    assert " tok/s, " in text and "tokens a target pass" in text
    assert "\x1b[32m" in text  # green: what was accepted


def test_ctrl_c_ends_the_answer_and_at_the_prompt_the_chat(tmp_path):
    """Keys pressed at a real terminal; the answer would go on for 8,000 tokens."""
    file = write_tiny_gguf(tmp_path / "long.gguf", n_layers=1, context_length=2 * LONG)
    sampling = [
        "--temperature",
        "1",
        "--allowed-token-ids",
        "100,101,102",
    ]  # letters, so that no answer looks like a prompt
    argv = ["chat", str(file), "--ignore-eos", "--max-tokens", str(LONG), *sampling, "--system", "be brief"]
    with Typed(argv, tmp_path) as typed:
        legend = typed.until("> ")
        assert "accepted: proposed by the draft and kept" in legend and "/help lists the commands" in legend
        typed.press("abc abc abc\n")
        typed.until("abc abc abc\n")
        typed.more()
        typed.press("\x03")
        assert "stopped" in typed.until("> ") and typed.running()
        typed.press("/stats\n")
        assert "answers: 0" in typed.until("> ")
        typed.press("/rest\n")
        assert "unknown command /rest; there are /help" in typed.until("> ")
        typed.press("\x1b[A")  # up: the line before; Ctrl-A and right, to change it in place
        assert "/rest" in typed.until("/rest")
        typed.press("\x01\x1b[C\x1b[C\x1b[C\x1b[Cs\x0b\n")
        assert "unknown command /ress; there are /help" in typed.until("> ")
        typed.press("/st\t\n")
        assert "answers: 0" in typed.until("> ")
        typed.press("half a line\x03")
        assert typed.ended() == 0
    history = tmp_path / "specsparse" / "chat_history"
    assert history.read_text().split("\n")[:4] == ["abc abc abc", "/stats", "/rest", "/ress"]


class Typed:
    """A chat on a pseudo-terminal of its own, whose Ctrl-C reaches it as a signal."""

    def __init__(self, argv, folder):
        self._ours, theirs = pty.openpty()
        env = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "XDG_STATE_HOME": str(folder)}
        self._child = subprocess.Popen(
            [sys.executable, "-c", ON_A_TERMINAL, *argv],
            stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, env=env,
        )  # fmt: skip
        os.close(theirs)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._child.kill()
        self._child.wait()
        os.close(self._ours)

    def press(self, keys):
        os.write(self._ours, keys.encode())

    def more(self):
        """The next thing shown, without its colours."""
        ready, _, _ = select.select([self._ours], [], [], 120)
        assert ready, "nothing was shown"
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|[\r\a]", "", os.read(self._ours, 65536).decode(errors="replace"))

    def until(self, end):
        """Everything shown up to a text that ends in `end`."""
        shown = ""
        while not shown.endswith(end):
            shown += self.more()
        return shown

    def running(self):
        return self._child.poll() is None

    def ended(self):
        """Exit code, with what is still shown read so that the child can write it."""
        deadline = time.monotonic() + 60
        while self.running() and time.monotonic() < deadline:
            if select.select([self._ours], [], [], 0.1)[0]:
                try:
                    os.read(self._ours, 65536)
                except OSError:  # the other end is closed
                    break
        return self._child.wait(10)


# Options.


def parsed(*argv):
    parser = cli.Parser()
    arguments.add_sampling(parser, temperature=0.0, max_tokens=256)
    return arguments.sampling_params(parser.parse_args(argv))


def test_sampling_options_are_the_fields_of_sampling_params():
    assert parsed() == SamplingParams(temperature=0.0, max_tokens=256)
    argv = "--top-p 0.9 --top-k 5 --min-p 0.1 --presence-penalty 1 --frequency-penalty -1 --repetition-penalty 1.2"
    lists = [
        "--stop",
        "a b",
        "--stop",
        "c",
        "--stop-token-ids",
        "1,2",
        "--stop-token-ids",
        "3",
        "--logit-bias",
        "4=-inf",
    ]
    found = parsed(*argv.split(), *lists, "--no-skip-special-tokens", "--ignore-eos", "--max-tokens", "7")
    assert found == SamplingParams(
        temperature=0.0, max_tokens=7, top_p=0.9, top_k=5, min_p=0.1, presence_penalty=1, frequency_penalty=-1,
        repetition_penalty=1.2, stop=["a b", "c"], stop_token_ids=[1, 2, 3], logit_bias={4: float("-inf")},
        skip_special_tokens=False, ignore_eos=True,
    )  # fmt: skip


@pytest.mark.parametrize("argv", [["--top-p", "2"], ["--stop-token-ids", "1,a"], ["--logit-bias", "5"], ["--min-p"]])
def test_sampling_options_that_are_refused(argv):
    with pytest.raises(UserError):
        parsed(*argv)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--gamma", "0"], "--gamma"),
        (["--drafter", "oracle"], "drafter=oracle is unknown"),
        (["--drafter", "none", "--verifier", "greedy"], "verifier needs a drafter"),
        (["--verifier", "token"], "token"),
        (["--draft", "none.gguf", "--prompt", "x"], "none.gguf: no such file"),
        (["--temperature", "-1"], "temperature"),
        (["--max-tokens", "0"], "max_tokens=0"),
    ],
)
def test_mistakes(file, capsys, argv, says):
    assert cli.main(["chat", str(file), *argv]) == 2
    captured = capsys.readouterr()
    assert says in captured.err and captured.err.count("\n") == 1
