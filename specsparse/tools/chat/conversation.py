"""A chat with any method, on a terminal or through pipes: lines of the user in, answers out, each token marked by its
source: the draft, the verifier, or no draft at all."""

import contextlib
import dataclasses
import os
import select
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from specsparse import api
from specsparse.cli.arguments import ONE_TEXT, drafter_of, json_or_text
from specsparse.engine.model import Model
from specsparse.engine.sampling.params import SamplingParams
from specsparse.errors import UserError
from specsparse.runtime.method import MethodSpec, ready
from specsparse.runtime.metrics import Counters, figures
from specsparse.runtime.prefix_cache import PrefixCache
from specsparse.runtime.results import Generation
from specsparse.speculative.policies.base import Fixed
from specsparse.speculative.token_sources import KINDS, PLAIN, TokenSource
from specsparse.support.neighbours import hint, sampling_name
from specsparse.support.terminal import decoding_input

STYLES = {"accepted": "green", "recovered": "yellow", "bonus": "cyan", "plain": ""}
"""Colour of a token by its source."""
_METHOD = "/method DRAFTER [verifier=NAME] [gamma=N] [draft=FILE]"
COMMANDS = {
    "/help": "this list",
    "/reset": "forget what was said",
    "/method": f"show the method; {_METHOD} changes it, /method none decodes plainly",
    "/set": "show how tokens are chosen; /set temperature=0.7 top_p=0.9 changes it, of the answers to come",
    "/stats": "tokens, rate and acceptance of all answers, and how full the context is",
    "/exit": "end, as do /quit, Ctrl-D, and Ctrl-C at the prompt",
}
"""Lines that begin with a slash; a space before it makes it a message."""


@contextlib.contextmanager
def interrupts() -> Generator[threading.Event]:
    """An event that Ctrl-C sets within the block; it raises nothing, since jax's callbacks would lose the exception.

    A second Ctrl-C raises KeyboardInterrupt as ever.
    """
    pressed = threading.Event()

    def press(*_: object) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    before = signal.signal(signal.SIGINT, press)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


@dataclasses.dataclass
class Conversation:
    """The messages of a chat so far, and the parameters of its answers.

    `method` is `drafter` and `verifier` for `api.stream`, {} for plain decoding.
    """

    model: Model
    sampling: SamplingParams
    method: dict[str, Any] = dataclasses.field(default_factory=dict)
    seed: int = 0  # of the noise; each answer adds one
    messages: list[dict[str, str]] = dataclasses.field(default_factory=list)
    prefix_cache: PrefixCache = dataclasses.field(default_factory=PrefixCache)  # of what was said

    def say(self, text: str, show: Callable[[str, TokenSource], None]) -> Generation | None:
        """Answers a message and remembers both; None if the answer was interrupted.

        A KeyboardInterrupt ends the answer: the part that was shown is remembered as the answer, and if nothing was,
        the message is forgotten.

        `show` gets each piece of the answer as it comes, never half a character, and its token source. UserError if
        the model has no chat template, or if the context does not hold the conversation.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        seed, shown, generation = self.seed + len(messages), list[str](), None
        try:
            how: dict[str, Any] = {**self.method, "sampling": self.sampling, "prefix_cache": self.prefix_cache}
            stream = api.stream(self.model, messages, seed=seed, rounds=1, **how)
            with interrupts() as pressed:
                for piece, source in stream.marked():
                    shown.append(piece)
                    show(piece, source)
                    if pressed.is_set():
                        raise KeyboardInterrupt
            generation = stream.generation
        except KeyboardInterrupt:
            if not shown:
                return None
        self.messages = [*messages, {"role": "assistant", "content": "".join(shown)}]
        return generation


@dataclasses.dataclass(frozen=True)
class ChatMethod:
    """A method as the options name it; without a gamma drafts are as long as pays."""

    drafter: str
    draft: str | None = None
    verifier: str | None = None
    gamma: int | None = None

    def changed(self, words: tuple[str, ...]) -> "ChatMethod":
        """The method after `/method words`; the verifier is the one that fits unless one is named."""
        given: dict[str, Any] = {"verifier": None}
        if "=" not in words[0]:
            given |= {"drafter": words[0], "draft": None}
            words = words[1:]
        for word in words:
            key, _, value = word.partition("=")
            if key not in ("verifier", "gamma", "draft") or not value:
                raise UserError(f"/method does not know {word!r}: say {_METHOD}")
            given[key] = value
        if given.get("draft"):
            given.setdefault("drafter", "model")
        if "gamma" in given:
            if not given["gamma"].isdecimal() or not int(given["gamma"]):
                raise UserError(f"gamma={given['gamma']} must be a whole number of at least 1")
            given["gamma"] = int(given["gamma"])
        method = dataclasses.replace(self, **given)
        if method.drafter == "none" and (given.get("gamma") or given["verifier"]):
            raise UserError(f"/method none is plain decoding, without gamma and verifier: say {_METHOD}")
        return method

    def spec(self, sampling: SamplingParams) -> MethodSpec:
        policy = None if self.gamma is None else Fixed(self.gamma)
        return MethodSpec(drafter_of(self.drafter, self.draft), self.verifier, policy, sampling=sampling)


class Chat:
    """Answers the lines of a user on `out`.

    If they are `typed`, the user sees a prompt and can correct a mistake; else a mistake ends the chat.
    """

    def __init__(self, talk: Conversation, how: ChatMethod, out: Console, *, typed: bool):
        self._talk, self._out, self._typed = talk, out, typed
        self._aside = out if out.is_terminal else Console(stderr=True, highlight=False) if typed else None
        self._first = list(talk.messages)
        self._answers, self._seconds, self._counters, self._context = 0, 0.0, Counters(), 0
        self._use(how)

    def run(self) -> None:
        """Answers until the input ends; raises as `take` does."""
        if self._talk.method:
            for kind in KINDS:
                self._note(f"{kind}: {KINDS[kind]}", style=STYLES[kind])
        self._note("/help lists the commands; Ctrl-C ends an answer")
        lines = _piped_lines()
        if self._typed:
            lines = _edited_lines() if self._out.is_terminal else self._typed_lines()
        with contextlib.closing(lines):
            for line in lines:
                if line.strip() in ("/exit", "/quit"):
                    break
                self.take(line.rstrip("\n"))

    def take(self, line: str) -> None:
        """A line of the user, a command or a message; a mistake or an interrupt ends the chat unless somebody types."""
        try:
            if line.startswith("/"):
                self._command(*_words(line))
            elif line.strip():
                self.answer(line.strip())
        except UserError as error:
            if not self._typed:
                raise
            self._note(str(error), style="red")
        except KeyboardInterrupt:
            if not self._typed:
                raise
            self._note("stopped")

    def answer(self, message: str) -> None:
        """One answer and its figures; KeyboardInterrupt if it was interrupted."""
        answer = self._talk.say(message, self._show)
        self._show("\n", PLAIN)
        if answer is None:
            raise KeyboardInterrupt
        counters, seconds = answer.stats.counters, answer.stats.decode_s
        self._answers, self._seconds = self._answers + 1, self._seconds + seconds
        self._counters += counters
        self._context = len(answer.prompt_token_ids) + len(answer.token_ids)
        self._note(figures(counters, seconds))

    def _typed_lines(self) -> Generator[str, None, None]:
        """Lines typed after each prompt, until Ctrl-D or Ctrl-C; the answers go elsewhere."""
        assert self._aside is not None
        while True:
            try:
                self._aside.print("[bold]> [/bold]", end="")
                _wait_for_a_line()
                yield input()
            except (EOFError, KeyboardInterrupt):
                self._aside.print()
                return

    def _show(self, piece: str, source: TokenSource) -> None:
        if self._out.is_terminal:
            self._out.print(Text(piece, style=STYLES[source.kind]), end="", soft_wrap=True)
        else:  # as it is: a console would turn tabs into spaces
            print(piece, end="", flush=True)

    def _note(self, text: str, style: str = "dim") -> None:
        """A line beside the answers, on the terminal if there is one."""
        if self._aside is not None:
            self._aside.print(Text(text, style=style), soft_wrap=True)

    def _command(self, name: str, *words: str) -> None:
        if name not in COMMANDS:
            known = ", ".join(COMMANDS)
            raise UserError(f"unknown command {name}; there are {known} (a space before the slash makes it a message)")
        if name == "/help":
            for command, what in COMMANDS.items():
                self._note(f"{command:<9}{what}")
        elif name == "/reset":
            self._talk.messages, self._context = list(self._first), 0
        elif name == "/stats":
            self._note(f"answers: {self._answers}; {figures(self._counters, self._seconds)}")
            self._note(f"context: {self._context} of {self._talk.model.config.context_length} tokens")
        elif name == "/method":
            if words:
                self._use(self._how.changed(words))
            self._say_method()
        elif name == "/set":
            self._set(words)

    def _set(self, words: tuple[str, ...]) -> None:
        """Changes sampling parameters by `NAME=VALUE`, and says those that are not the defaults."""
        talk, given, usual = self._talk, dict[str, Any](), SamplingParams()
        for word in words:
            key, equals, value = word.partition("=")
            name = sampling_name(key.replace("-", "_"))
            if name not in (*ONE_TEXT, "seed"):
                raise UserError(f"/set does not know {key!r}{hint(key, (*ONE_TEXT, 'seed'))}")
            if not equals:
                raise UserError(f"/set {word}: say /set {word}=VALUE")
            given[name] = json_or_text(value)
        before, sampling = talk.sampling, talk.sampling.merged(**given)
        talk.sampling = dataclasses.replace(sampling, seed=None)
        try:
            self._use(self._how)  # another verifier may fit
        except UserError:
            talk.sampling = before
            raise
        talk.seed = talk.seed if sampling.seed is None else sampling.seed
        always = ("temperature", "max_tokens")
        named = {n: v for n in ONE_TEXT if (v := getattr(sampling, n)) != getattr(usual, n) or n in always}
        self._note(" ".join(f"{name}={value}" for name, value in (named | {"seed": talk.seed}).items()))

    def _say_method(self) -> None:
        method = self._talk.method
        if not method:
            self._note("plain decoding")
            return
        draft = f" {self._how.draft}" if self._how.draft else ""
        gamma = "as pays" if self._how.gamma is None else self._how.gamma
        name = drafter_of(self._how.drafter, self._how.draft).name
        self._note(f"drafter {name}{draft}, verifier {method['verifier'].name}, gamma {gamma}")

    def _use(self, how: ChatMethod) -> None:
        spec = how.spec(self._talk.sampling)
        method = spec.arguments()
        ready(spec, self._talk.model)
        self._how, self._talk.method = how, method


def _words(line: str) -> list[str]:
    """The words of a command; quotes hold one together."""
    try:
        return shlex.split(line)
    except ValueError as error:
        raise UserError(f"{line}: {str(error).lower()}; close the quotes") from None


def _edited_lines() -> Generator[str, None, None]:
    """Lines typed at a prompt until Ctrl-D or Ctrl-C, edited by readline if this Python has it: arrow keys, a history
    that later chats have too, and Tab for commands."""
    try:
        import readline
        import termios
    except ImportError:  # as on Windows, whose own console edits lines
        with contextlib.suppress(EOFError, KeyboardInterrupt):
            while True:
                yield input("> ")
        return
    file = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "specsparse" / "chat_history"
    libedit = "libedit" in (readline.__doc__ or "")
    readline.set_completer(lambda text, i: [*(c for c in COMMANDS if text and c.startswith(text)), None][i])
    readline.set_completer_delims(" ")
    readline.parse_and_bind("bind ^I rl_complete" if libedit else "tab: complete")
    readline.clear_history()
    readline.set_history_length(1000)
    with contextlib.suppress(OSError):
        readline.read_history_file(file)
    # A signal that comes just before the read would be seen after the next key. So Ctrl-C is a key here: it empties the
    # line and ends it, as Ctrl-D does.
    settings, keys = termios.tcgetattr(sys.stdin), termios.tcgetattr(sys.stdin)
    if not libedit:
        readline.parse_and_bind(r'"\C-c": "\C-e\C-u\C-d"')
        keys[6][termios.VINTR] = b"\0"
    try:
        while True:
            termios.tcsetattr(sys.stdin, termios.TCSANOW, keys)
            try:
                line = input("> ")
            finally:
                termios.tcsetattr(sys.stdin, termios.TCSANOW, settings)
            yield line
    except (EOFError, KeyboardInterrupt):
        print()
    finally:
        readline.set_completer(None)
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            readline.write_history_file(file)


def _piped_lines() -> Generator[str, None, None]:
    while True:
        with decoding_input():
            line = sys.stdin.readline()
        if not line:
            return
        yield line


def _wait_for_a_line() -> None:
    """Waits for a line. Ctrl-C is seen at once; just before a plain read it would be seen after the next key."""
    seen, woken = os.pipe()
    os.set_blocking(woken, False)
    before = signal.set_wakeup_fd(woken)
    try:
        while sys.stdin not in select.select([sys.stdin, seen], [], [])[0]:
            os.read(seen, 1)
    finally:
        signal.set_wakeup_fd(before)
        os.close(seen)
        os.close(woken)
