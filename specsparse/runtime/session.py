"""A batch of sequences being decoded: prompts in, rounds on the device, tokens out."""

from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq

import jax
import numpy as np

from specsparse.engine.feed import piece_rows
from specsparse.engine.generate import Finish
from specsparse.engine.model import Model
from specsparse.runtime.device_batch import DeviceBatch, Request
from specsparse.runtime.host_loop import Watch, runner_for
from specsparse.runtime.method import Method
from specsparse.runtime.metrics import Counters
from specsparse.runtime.round_log import Note
from specsparse.speculative import token_sources
from specsparse.speculative.drafters.model_drafter import ModelDrafter
from specsparse.speculative.drafters.slem import StringDrafter
from specsparse.speculative.drafters.with_policy import WithPolicy
from specsparse.speculative.policies.base import PolicyReport
from specsparse.speculative.token_sources import TokenSource
from specsparse.speculative.verify import measures_alpha

ALL_ROUNDS = 2**30


class Session(DeviceBatch):
    """Decodes one batch. `advance` runs rounds; `tokens` and `finish` say how far it got.

    Args:
        model, sequences, method, noting: as `DeviceBatch`'s.
        loop: "jit", all rounds in one program; or "host", a program a stage.
        watch: called with every speculative round; the loop is the host's then.

    Attributes:
        runner: how the rounds are run.

    Raises:
        UserError: an unknown loop.
    """

    def __init__(
        self,
        model: Model,
        sequences: list[Request],
        method: Method,
        *,
        noting: bool = False,
        loop: str = "jit",
        watch: Watch | None = None,
    ):
        self.runner = runner_for(model, method, loop=loop, watch=watch)
        super().__init__(model, sequences, method, noting=noting)

    def advance(self, max_rounds: int = ALL_ROUNDS) -> None:
        """Runs up to `max_rounds` rounds of every sequence that has not ended."""
        self.runner.advance(self, max_rounds)

    @property
    def prefill_s(self) -> float:
        """Seconds of the prompts."""
        return self.times.prefill

    @property
    def decode_s(self) -> float:
        """Seconds of the rounds, up to the one that ended the last text."""
        return self.times.total

    def end(self, kept: Mapping[int, int]) -> None:
        """Says that the texts were looked at, and ends some after so many tokens (a stop string was found).

        Tokens, counters and policies of those end there: with the round that wrote the last of these tokens, which came
        since the call before. When all sequences have ended, so does the time, with the last round that a text needed.
        """
        self.log.end(kept)
        if kept:
            self.drop(kept)
        ended = Finish.RUNNING not in self.finish
        self.log.settle(int(self._ends().counters.rounds.max()) if ended else None)

    def drop(self, sequences: Collection[int]) -> None:
        """Ends some sequences as they are: nobody reads what would follow."""
        finish = np.array(self.state.finish)
        finish[list(sequences)] = Finish.STOP
        self.state = self.state._replace(finish=self.model.everywhere(jax.device_put(finish)))

    def tokens(self) -> list[np.ndarray]:
        """Tokens generated so far, one int32 array a sequence."""
        return self._generated(self.state.tokens)

    def token_sources(self, first: int = 0) -> list[tuple[TokenSource, ...]] | None:
        """Where each of these tokens came from, from the `first` on; None for plain decoding."""
        codes = self.state.token_sources
        return None if codes is None else [token_sources.read(codes_n[first:]) for codes_n in self._generated(codes)]

    def _generated(self, values_BC: jax.Array) -> list[np.ndarray]:
        """The values at the positions of what was generated, one array a sequence."""
        buffer, length = np.asarray(values_BC), np.asarray(self.state.length)
        new = [buffer[b, len(s.prompt) : length[b]] for b, s in enumerate(self.sequences)]
        return [values[: self.log.kept.get(b)] for b, values in enumerate(new)]

    def _ends(self) -> Note:
        """What was noted where each text ends, or now, in numpy."""
        return self.log.at_ends(self.note(self.state))

    def counters(self) -> list[Counters]:
        """The counters of each sequence; of the times of a batch its share, by rounds and prompt tokens."""
        every = self._ends().counters
        fed = [len(s.prompt) - 1 for s in self.sequences]
        shares = zip(_shares(every.rounds), _shares(fed), strict=True)
        times = [self.times.share(decode, prefill) for decode, prefill in shares]
        verifier = self.method.verifier
        measured = verifier is not None and measures_alpha(verifier, greedy=self.sampling.greedy)
        rows = (jax.tree.map(lambda a, b=b: a[b], every) for b in range(len(fed)))
        return [
            Counters(
                num_rounds=int(c.rounds),
                num_drafts=int(c.drafts),
                num_draft_tokens=int(c.drafted),
                num_tested=int(c.tested),
                num_accepted_tokens=int(c.accepted),
                num_accepted_tokens_per_pos=tuple(c.accepted_at.tolist()),
                num_emitted_tokens=int(c.emitted),
                target_passes=int(c.rounds) + len(piece_rows(prompt)),
                alpha=float(c.alpha),
                alpha_var=float(c.alpha_var),
                num_alpha_tested=int(c.tested) if measured else 0,
                times=spent,
            )
            for c, prompt, spent in zip(rows, fed, times, strict=True)
        ]

    def drafts(self) -> list[tuple[tuple[int, int], ...]] | None:
        """Drafted and accepted tokens of each round that drafted, by sequence; None where rounds are not noted."""
        if not self.noting or self.method.drafter is None:
            return None
        return [tuple(self.log.drafts(b, int(r))) for b, r in enumerate(self._ends().counters.rounds)]

    def policies(self) -> list[PolicyReport] | None:
        """What the draft-length policy did to each sequence; None where the drafter has none."""
        drafter, note = self.method.drafter, self._ends()
        if not isinstance(drafter, WithPolicy | ModelDrafter | StringDrafter):
            return None
        return drafter.policy.reports(note.policy, note.rounds_off)


def _shares(weights: Seq[int]) -> list[float]:
    """Parts of one in these proportions; equal ones where all are 0."""
    weights = np.asarray(weights, np.float64)
    return (weights / weights.sum() if weights.any() else np.full(weights.shape, 1 / len(weights))).tolist()
