"""A conversation on a terminal or through pipes: lines of the user in, answers out."""

import dataclasses
import os
import select
import signal
import sys
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.text import Text

from specsparse.cli.method_options import drafter_of
from specsparse.errors import UserError
from specsparse.runtime.binding import ready
from specsparse.runtime.metrics import Counters
from specsparse.speculative.drafters.registry import get_drafter
from specsparse.speculative.method import choose_verifier, drawing_for, make_drafter
from specsparse.speculative.origins import KINDS, PLAIN, Origin
from specsparse.speculative.policies.base import Fixed
from specsparse.support.terminal import decoding_input
from specsparse.tools.chat.conversation import Conversation

STYLES = {"accepted": "green", "recovered": "yellow", "bonus": "cyan", "plain": ""}
"""Colour of a token by where it came from."""
_METHOD = "/method DRAFTER [verifier=NAME] [gamma=N] [draft=FILE]"
COMMANDS = {
    "/help": "this list",
    "/reset": "forget what was said",
    "/method": f"show the method; {_METHOD} changes it, /method none decodes plainly",
    "/stats": "tokens, rate and acceptance of all answers, and how full the context is",
    "/exit": "end, as do /quit, Ctrl-D, and Ctrl-C at the prompt",
}
"""What a line that begins with a slash may say; a space before it makes it a message."""
_END = ("/exit", "/quit")


@dataclasses.dataclass(frozen=True)
class How:
    """A method as the user says it; the names are those of the options. Without a gamma drafts are as long as pays."""

    drafter: str
    draft: str | None = None
    verifier: str | None = None
    gamma: int | None = None

    @property
    def name(self) -> str:
        """Of the drafter: a draft model's is "model"."""
        return drafter_of(self.drafter, self.draft)[0]

    def changed(self, words: tuple[str, ...]) -> "How":
        """After `/method words`; the verifier is the one that fits unless one is named.

        Raises:
            UserError: a word that is no setting.
        """
        given: dict[str, Any] = {"verifier": None}
        if "=" not in words[0]:
            given |= {"drafter": words[0], "draft": None}
            words = words[1:]
        for word in words:
            key, _, value = word.partition("=")
            if key not in ("verifier", "gamma", "draft") or not value:
                raise UserError(f"/method does not know {word!r}: say {_METHOD}")
            given[key] = value
        if not str(given.get("gamma", 1)).isdecimal():
            raise UserError(f"gamma={given['gamma']} must be a whole number of at least 1")
        if "gamma" in given:
            given["gamma"] = int(given["gamma"])
        return dataclasses.replace(self, **given)

    def method(self, temperature: float) -> dict[str, Any]:
        """`drafter` and `verifier` for a generation; {} for plain decoding.

        Raises:
            UserError: unknown names, or a pair that does not fit.
        """
        if self.gamma is not None and self.gamma < 1:
            raise UserError(f"--gamma {self.gamma} must be at least 1")
        if self.name == "none":
            if self.verifier:
                raise UserError("--verifier needs a drafter")
            return {}
        _, options = drafter_of(self.drafter, self.draft)
        if self.gamma is None:
            drafter = get_drafter(self.name, **options)
        else:
            drafter = make_drafter(self.name, options, Fixed(self.gamma))
        drafter = drawing_for(drafter, self.verifier, temperature)
        verifier = choose_verifier(drafter, self.verifier, temperature=temperature, drafted_by=self.name)
        by_name = self.gamma is None and not options
        return {"drafter": self.name if by_name else drafter, "verifier": verifier}


class Chat:
    """Answers the lines of a user.

    Args:
        talk: the conversation, without a method.
        how: the method.
        out: where the answers go.
        typed: whether somebody types, who sees a prompt and can mend a mistake; else a mistake ends the chat.

    Raises:
        UserError: a method that does not fit the model.
    """

    def __init__(self, talk: Conversation, how: How, out: Console, *, typed: bool):
        self._talk, self._out, self._typed = talk, out, typed
        self._aside = out if out.is_terminal else Console(stderr=True, highlight=False) if typed else None
        self._first = list(talk.messages)
        self._answers, self._seconds, self._counters, self._context = 0, 0.0, Counters(), 0
        self._use(how)

    def run(self) -> None:
        """Answers until the input ends.

        Raises:
            UserError, KeyboardInterrupt: see `take`.
        """
        if self._talk.method:
            for kind in KINDS:
                self._note(f"{kind}: {KINDS[kind]}", style=STYLES[kind])
        self._note("/help lists the commands; Ctrl-C ends an answer")
        for line in self._typed_lines() if self._typed else _piped_lines():
            if line.strip() in _END:
                break
            self.take(line.rstrip("\n"))

    def take(self, line: str) -> None:
        """A line of the user: a command or a message.

        Raises:
            UserError: a mistake, where nobody types who could mend it.
            KeyboardInterrupt: likewise.
        """
        try:
            if line.startswith("/"):
                self._command(*line.split())
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
        """One answer and its figures.

        Raises:
            UserError: see `Conversation.say`.
            KeyboardInterrupt: the answer was interrupted.
        """
        found = self._talk.say(message, self._show)
        self._show("\n", PLAIN)
        if found is None:
            raise KeyboardInterrupt
        counters, seconds = found.stats.counters, found.stats.decode_s
        self._answers, self._seconds = self._answers + 1, self._seconds + seconds
        self._counters += counters
        self._context = len(found.prompt_token_ids) + len(found.token_ids)
        self._note(_figures(counters, seconds))

    def _typed_lines(self) -> Iterator[str]:
        """What is typed after each prompt, until Ctrl-D or Ctrl-C."""
        assert self._aside is not None
        while True:
            try:
                self._aside.print("[bold]> [/bold]", end="")
                _wait_for_a_line()
                yield input()
            except (EOFError, KeyboardInterrupt):
                self._aside.print()
                return

    def _show(self, piece: str, origin: Origin) -> None:
        if self._out.is_terminal:
            self._out.print(Text(piece, style=STYLES[origin.kind]), end="", soft_wrap=True)
        else:  # as it is: a console would turn tabs into spaces
            print(piece, end="", flush=True)

    def _note(self, text: str, style: str = "dim") -> None:
        """A line beside the answers: on the terminal, if there is one."""
        if self._aside is not None:
            self._aside.print(Text(text, style=style), soft_wrap=True)

    def _command(self, name: str, *words: str) -> None:
        commands = {"/help": self._help, "/reset": self._reset, "/method": self._method, "/stats": self._stats}
        if name not in commands:
            known = ", ".join(COMMANDS)
            raise UserError(f"unknown command {name}; there are {known} (a space before the slash makes it a message)")
        if words and name != "/method":
            raise UserError(f"{name} takes nothing after it")
        commands[name](*words)

    def _help(self) -> None:
        for name, what in COMMANDS.items():
            self._note(f"{name:<9}{what}")

    def _reset(self) -> None:
        self._talk.messages, self._context = list(self._first), 0

    def _method(self, *words: str) -> None:
        if words:
            self._use(self._how.changed(words))
        method = self._talk.method
        if not method:
            self._note("plain decoding")
            return
        draft = f" {self._how.draft}" if self._how.draft else ""
        gamma = "as pays" if self._how.gamma is None else self._how.gamma
        self._note(f"drafter {self._how.name}{draft}, verifier {method['verifier'].name}, gamma {gamma}")

    def _use(self, how: How) -> None:
        """Answers by this method from now on; a draft model is loaded here."""
        method = how.method(self._talk.sampling.temperature)
        ready(self._talk.model, method.get("drafter"), method.get("verifier"), self._talk.sampling)
        self._how, self._talk.method = how, method

    def _stats(self) -> None:
        self._note(f"answers: {self._answers}; {_figures(self._counters, self._seconds)}")
        self._note(f"context: {self._context} of {self._talk.model.config.context_length} tokens")


def _piped_lines() -> Iterator[str]:
    while True:
        with decoding_input():
            line = sys.stdin.readline()
        if not line:
            return
        yield line


def _wait_for_a_line() -> None:
    """Until a line is typed. Ctrl-C is seen at once; just before a plain read it would be seen after the next key."""
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


def _figures(counters: Counters, seconds: float) -> str:
    """Tokens, rate, and what the draft was good for."""
    tokens = counters.num_emitted_tokens
    text = f"{tokens} tokens" + (f", {tokens / seconds:.0f} tok/s" if seconds else "")
    if counters.num_draft_tokens:
        share = counters.num_accepted_tokens / counters.num_draft_tokens
        text += f", {tokens / counters.num_rounds:.2f} tokens a target pass, {share:.0%} of the drafted ones kept"
    return text
