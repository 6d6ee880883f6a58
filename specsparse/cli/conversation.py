"""A chat with any method, each token marked by where it came from: the draft, the verifier, or no draft at all."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from specsparse import api
from specsparse.api import Generation
from specsparse.engine.model import Model
from specsparse.engine.sampling.params import SamplingParams
from specsparse.runtime.hostloop import RoundView

Origin = Literal["accepted", "recovered", "bonus", "plain"]
ORIGINS: dict[Origin, str] = {
    "accepted": "proposed by the draft and kept",
    "recovered": "written by the target in place of a refused draft",
    "bonus": "written by the target after a draft that was kept whole",
    "plain": "written by the target without a draft",
}
"""Where a token can come from."""


def origins(view: RoundView, b: int = 0) -> list[tuple[int, Origin]]:
    """The tokens that a round added to sequence b, each with where it came from.

    All but the last token of a round were drafted; a round cut short by a stop may end in one of those.
    """
    start, end = int(view.before.length[b]), int(view.after.length[b])
    tokens = [int(t) for t in np.asarray(view.after.tokens[b])[start:end]]
    drafted, accepted = int(view.draft.count[b]), int(view.verdict.accepted[b])
    whole = int(view.verdict.tested[b]) == accepted
    last: Origin = "plain" if not drafted else "bonus" if whole else "recovered"
    return [(token, "accepted" if i < accepted else last) for i, token in enumerate(tokens)]


@dataclass
class Conversation:
    """A chat: what was said, and how it is answered.

    Attributes:
        model: the target.
        sampling: the law of the answers.
        method: `drafter` and `verifier` for `api.generate`; {} for plain decoding.
        seed: of the noise; each answer adds one.
        messages: what was said so far, as a chat template takes it.
    """

    model: Model
    sampling: SamplingParams
    method: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    messages: list[dict[str, str]] = field(default_factory=list)

    def say(self, text: str, show: Callable[[str, Origin], None]) -> Generation:
        """Answers a message; both are remembered once the answer is there.

        Args:
            text: the user's message.
            show: called with each piece of the answer as it comes, never half a character, and where it came from.

        Raises:
            UserError: no chat template, or a conversation that the context does not hold.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        seed = self.seed + len(asked)
        found = self._speculative(asked, seed, show) if self.method else self._plain(asked, seed, show)
        self.messages = [*asked, {"role": "assistant", "content": found.text}]
        return found

    def _plain(self, asked: list[dict[str, str]], seed: int, show: Callable[[str, Origin], None]) -> Generation:
        pieces = api.stream(self.model, asked, sampling=self.sampling, seed=seed)
        for piece in pieces:
            show(piece, "plain")
        assert pieces.generation is not None
        return pieces.generation

    def _speculative(self, asked: list[dict[str, str]], seed: int, show: Callable[[str, Origin], None]) -> Generation:
        """Round by round from the host: what a round added is known when it ends."""
        decoder = self.model.tokenizer.stream(skip_special=self.sampling.skip_special_tokens)

        def watch(view: RoundView) -> None:
            for token, origin in origins(view):
                if piece := decoder.push(token):
                    show(piece, origin)

        found = api.generate(self.model, asked, sampling=self.sampling, seed=seed, watch=watch, **self.method)
        assert isinstance(found, Generation)
        return found
