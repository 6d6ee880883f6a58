"""Decode loops that are timed a few rounds at a time."""

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine.generate import Finish
from specsparse.engine.model import Model
from specsparse.engine.sampling.params import SamplingParams
from specsparse.runtime.device_batch import Method, Request
from specsparse.runtime.session import Session


class Loop:
    """The decode loop with a method, run a few rounds at a time from one place in one text.

    Attributes:
        session: its cache holds `depth` tokens at the start of each timing.
    """

    def __init__(self, model: Model, method: Method, ids: np.ndarray, *, room: int):
        self._length = jnp.asarray([len(ids)], jnp.int32)
        params = SamplingParams(temperature=0.0, max_tokens=room, ignore_eos=True)
        self.session = Session(model, [Request(ids, params, seed=0)], method)

    def rewind(self) -> None:
        """Back to the place; what the drafter remembers goes on, so only drafters without a state may be rewound."""
        state = self.session.state
        self.session.state = state._replace(
            length=jnp.copy(self._length),
            finish=jnp.full((1,), int(Finish.RUNNING), jnp.int32),
            cache=state.cache._replace(length=self._length - jnp.int32(1)),
        )
        jax.block_until_ready(self.session.state)

    def run(self, rounds: int) -> float:
        """Seconds of up to `rounds` rounds."""
        before = self.session.decode_s
        self.session.advance(rounds)
        return self.session.decode_s - before

    def again(self, rounds: int) -> float:
        """Seconds of up to `rounds` rounds from the place."""
        self.rewind()
        return self.run(rounds)
