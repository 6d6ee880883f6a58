"""A chat with any method, each token marked by where it came from: the draft, the verifier, or no draft at all."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from specsparse import api
from specsparse.engine.model import Model
from specsparse.engine.sampling.params import SamplingParams
from specsparse.runtime.results import Generation
from specsparse.speculative.origins import Origin


@contextlib.contextmanager
def interrupts() -> Iterator[threading.Event]:
    """Set by Ctrl-C within the block, which raises nothing: in a callback of jax the exception would be lost.

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


@dataclass
class Conversation:
    """A chat: what was said, and how it is answered.

    Attributes:
        model: the target.
        sampling: the law of the answers.
        method: `drafter` and `verifier` for `api.stream`; {} for plain decoding.
        seed: of the noise; each answer adds one.
        messages: what was said so far, as a chat template takes it.
    """

    model: Model
    sampling: SamplingParams
    method: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    messages: list[dict[str, str]] = field(default_factory=list)

    def say(self, text: str, show: Callable[[str, Origin], None]) -> Generation | None:
        """Answers a message; both are remembered once the answer is there.

        A KeyboardInterrupt ends the answer: what was shown of it is remembered as the answer, and the message is
        forgotten where nothing was.

        Args:
            text: the user's message.
            show: called with each piece of the answer as it comes, never half a character, and where it came from.

        Returns:
            The answer, or None where it was interrupted.

        Raises:
            UserError: no chat template, or a conversation that the context does not hold.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        shown: list[str] = []
        found = None
        try:
            stream = api.stream(
                self.model, asked, sampling=self.sampling, seed=self.seed + len(asked), rounds=1, **self.method
            )
            with interrupts() as pressed:
                for piece, origin in stream.marked():
                    shown.append(piece)
                    show(piece, origin)
                    if pressed.is_set():
                        raise KeyboardInterrupt
            found = stream.generation
        except KeyboardInterrupt:
            if not shown:
                return None
        self.messages = [*asked, {"role": "assistant", "content": "".join(shown)}]
        return found
