"""How the rounds of a batch are run: here many in one program; `specsparse.runtime.host_loop` has the host's ways."""

import abc
from typing import ClassVar

import numpy as np

from specsparse.engine import generate
from specsparse.runtime.device_batch import DeviceBatch
from specsparse.runtime.metrics import Times
from specsparse.runtime.round_log import NOTED_ROUNDS
from specsparse.speculative import loop


class RoundRunner(abc.ABC):
    """Base of the ways to run rounds. Tokens do not depend on the way.

    Attributes:
        rounds: to run between two looks at the texts, where a text may end in a stop string.
    """

    rounds: ClassVar[int]

    @abc.abstractmethod
    def advance(self, batch: DeviceBatch, rounds: int) -> None:
        """Runs up to `rounds` rounds of every sequence that has not ended, and adds them to the batch's log."""


class InOneProgram(RoundRunner):
    """All rounds in one `lax.while_loop`."""

    rounds = NOTED_ROUNDS

    def advance(self, batch: DeviceBatch, rounds: int) -> None:
        """One call; at most `NOTED_ROUNDS` rounds of a batch that is `noting`."""
        if batch.noting and rounds > NOTED_ROUNDS:
            raise ValueError(f"{rounds} rounds at once, and {NOTED_ROUNDS} can be noted")
        note, room = (batch.note, NOTED_ROUNDS) if batch.noting else (None, 0)
        method, model = batch.method, batch.model
        if method.drafter is None:
            weights, pair, make_step = batch.params, {}, generate.make_step
        else:
            weights, make_step = (batch.params, batch.draft_params), loop.make_step
            pair = {"drafter": method.drafter, "verifier": method.verifier}
        step = make_step(model.forward, batch.sampling, model.sampling_kernels, **pair)

        def program(weights, job, state, rounds):
            return generate.run(step, weights, job, state, rounds, note=note, room=room)

        key = ("decode", batch.sampling, method.drafter, method.verifier, room)
        begun = batch.clock()
        batch.state, notes = batch.call(key, program, weights, batch.job, batch.state, np.int32(rounds), donate=(2,))
        batch.state.length.block_until_ready()
        batch.log.add(Times(total=batch.clock() - begun), notes)
