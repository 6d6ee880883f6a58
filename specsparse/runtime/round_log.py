"""What the rounds of a batch did and took, up to where its texts end.

A stop string is found once tokens have become text: up to `NOTED_ROUNDS` rounds later than it was written. So counters
are noted after each round; those of a text are what they were after the round that wrote its last token, and the rounds
that no text needed took no time.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np

from specsparse.engine.generate import LoopCounters
from specsparse.engine.pytree import Pytree
from specsparse.runtime.metrics import Times

NOTED_ROUNDS = 16
"""Rounds between two looks at the texts."""


_DRAFTS = ("rounds", "drafts", "drafted", "accepted")


class Note(NamedTuple):
    """What is remembered of a state. Arrays are [B, ..], or [rounds, B, ..] for the states after several rounds.

    Attributes:
        counters: of the loop.
        policy: the draft-length policy's state, or None.
        rounds_off: int32[B], rounds in which it drafted nothing, or None.
    """

    counters: LoopCounters
    policy: Pytree = None
    rounds_off: Pytree = None


class _Call(NamedTuple):
    """Rounds run in one call."""

    notes: Note
    times: Times

    @property
    def rounds(self) -> int:
        return len(self.notes.counters.rounds)


class RoundLog:
    """Times and counters of a batch.

    Attributes:
        times: of the whole batch; a stage is None where a round was not stepped from the host.
        kept: tokens of the texts that a stop string ended, by sequence.
    """

    def __init__(self):
        self.times = Times()
        self.kept: dict[int, int] = {}
        self._ends: dict[int, Note] = {}
        self._calls: list[_Call] = []
        self._looked = Times()
        self._rounds = 0
        self._drafts: list[np.ndarray] = []

    def add(self, times: Times, notes: Note | None = None) -> None:
        """Some rounds more, and what was noted after each; rows of rounds that were not run are zero.

        Time without notes (of the prompt) is nobody's round, and stays.
        """
        self.times += times
        if notes is None:
            self._looked += times
            return
        notes = jax.tree.map(np.array, notes)  # copies: the device may reuse its buffers
        run = int((notes.counters.rounds.max(axis=1) > self._rounds_run).sum())
        self._calls.append(_Call(jax.tree.map(lambda a: a[:run], notes), times))

    @property
    def _rounds_run(self) -> int:
        return self._rounds + sum(call.rounds for call in self._calls)

    def end(self, kept: Mapping[int, int]) -> None:
        """Ends the texts of some sequences after so many tokens, which were written since the last `settle`."""
        for b, tokens in kept.items():
            self._ends[b] = self._after(b, tokens)
            self._ends[b].counters.emitted[...] = tokens
            self.kept[b] = tokens

    def _after(self, b: int, tokens: int) -> Note:
        """The note of sequence b after the round that wrote its token of that number."""
        for call in self._calls:
            row = int(np.searchsorted(call.notes.counters.emitted[:, b], tokens))
            if row < call.rounds:
                return jax.tree.map(lambda a, row=row: np.array(a[row, b]), call.notes)
        raise ValueError(f"sequence {b} has not written {tokens} tokens since its text was looked at")

    def settle(self, last_round: int | None = None) -> None:
        """The texts were looked at. If all have ended, `last_round` is how many rounds the longest took.

        The rounds of one call share its time equally.
        """
        if last_round is not None:
            self.times, before = self._looked, self._rounds
            for call in self._calls:
                needed = min(max(last_round - before, 0), call.rounds)
                self.times += call.times.share(needed / call.rounds if call.rounds else 1.0, prefill=1.0)
                before += call.rounds
        for counters in (call.notes.counters for call in self._calls):
            self._drafts.append(np.stack([getattr(counters, name) for name in _DRAFTS], axis=-1))
        self._looked, self._rounds, self._calls = self.times, self._rounds_run, []

    def drafts(self, b: int, rounds: int) -> list[tuple[int, int]]:
        """Drafted and accepted tokens of each of the first `rounds` rounds of sequence b that drafted.

        Of rounds that were noted and looked at.
        """
        rows = np.concatenate([np.zeros((1, len(_DRAFTS)), np.int64), *(part[:, b] for part in self._drafts)])
        each = np.diff(rows[rows[:, 0] <= rounds], axis=0)
        return [(drafted, accepted) for _, drafts, drafted, accepted in each.tolist() if drafts]

    def at_ends(self, now: Note) -> Note:
        """`now` in numpy, with the counters and policies of ended texts as they were where those end."""
        out = jax.tree.map(np.array, now)
        for b, end in self._ends.items():
            for array, value in zip(jax.tree.leaves(out), jax.tree.leaves(end), strict=True):
                array[b] = value
        return out
