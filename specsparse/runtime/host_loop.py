"""Rounds stepped by the host: for models that no program may contain, and to time and to watch speculative rounds.

`Pieces` runs the pieces of the loop in one program, each as its own, so that they can be timed. Slower, and token for
token the same. Traces, recordings of distributions and the time split are taken there. A piece's time is that of its
program, which is handed only what it reads; finding the program, taking trees of arrays apart and putting them together
is the host's.
"""

import abc
import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from specsparse.engine import generate
from specsparse.engine.generate import DecodeState, Finish
from specsparse.engine.model import Model
from specsparse.engine.pytree import Pytree
from specsparse.errors import UserError
from specsparse.runtime.device_batch import DeviceBatch
from specsparse.runtime.method import Method
from specsparse.runtime.metrics import Times
from specsparse.runtime.pruned import Pruned, Unpruned
from specsparse.runtime.rounds import InOneProgram, RoundRunner
from specsparse.speculative.base import Draft, Drafted, TextDrafter, Verdict
from specsparse.speculative.loop import Round, coins
from specsparse.support.options import shown


@dataclasses.dataclass(frozen=True)
class RoundView:
    """One finished round, for those who watch. Arrays are on the device.

    Attributes:
        session: what is being decoded.
        number: of the round, 0 first.
        before, after: the states around it, without cache and drafter.
        cache_before, cache_after: int32[B], tokens in the target's cache.
        draft, logits, verdict: what was proposed, float[B, K+1, V] of the target, and the verdict.
        stats: of the target's sparse FFN in this pass, see `ForwardOut`, or None.
    """

    session: DeviceBatch
    number: int
    before: DecodeState
    after: DecodeState
    cache_before: np.ndarray
    cache_after: np.ndarray
    draft: Draft
    logits: jax.Array
    verdict: Verdict
    stats: Pytree = None

    def probs(self) -> jax.Array:
        """float32[B, K+1, V], the target's distribution at each row."""
        return self._piece("laws")

    def targets(self) -> jax.Array:
        """int32[B, K+1], the target's own token at each row, drawn with the noise of its position."""
        return self._piece("targets")

    def coins(self) -> np.ndarray:
        """float32[B, K], the acceptance coins of the round."""
        return np.asarray(coins(self.session.job, self.before, max_nodes=self.draft.max_nodes)[0])

    def _piece(self, name: str) -> jax.Array:
        pieces = _pieces(self.session)

        def call(_, job, before, draft, logits):
            return getattr(pieces, name)(job, before, draft, logits)

        key = ("round", name, pieces.config, pieces.drafter, pieces.verifier)
        return self.session.call(key, call, None, self.session.job, self.before, self.draft, self.logits)


Watch = Callable[[RoundView], None]


LOOPS = ("jit", "host")


def runner_for(model: Model, method: Method, *, loop: str = "jit", watch: Watch | None = None) -> RoundRunner:
    """How to run the rounds of a method: in one program, unless the host is asked for or is needed.

    A model on two devices needs it, and a drafter that reads and writes text.

    Args:
        model: the target.
        method: how to decode it.
        loop: of `LOOPS`.
        watch: called with every speculative round.

    Raises:
        UserError: an unknown loop, or a watch that cannot be called.
    """
    if loop not in LOOPS:
        raise UserError(f"loop={loop!r} must be one of {', '.join(LOOPS)}")
    if watch is not None and not callable(watch):
        raise UserError(f"watch={shown(watch)} must be a function of a round")
    whole = model.devices.one_program
    if loop == "jit" and watch is None and whole and not isinstance(method.drafter, TextDrafter):
        return InOneProgram()
    if method.drafter is None:
        return OneRound() if whole else ForwardApart()
    return Pieces(Pruned.compile if whole else Unpruned, watch)


class RoundByRound(RoundRunner):
    """Base of the host's loops."""

    rounds = 1

    def advance(self, batch: DeviceBatch, rounds: int) -> None:
        """Round by round."""
        for _ in range(rounds):
            if Finish.RUNNING not in batch.finish:
                return
            self.step(batch)

    @abc.abstractmethod
    def step(self, batch: DeviceBatch) -> None:
        """One round."""


def _account(batch: DeviceBatch, times: Times) -> None:
    """Adds a round to the log."""
    batch.log.add(times, jax.tree.map(lambda a: a[None], batch.note(batch.state)) if batch.noting else None)


class OneRound(RoundByRound):
    """Plain decoding: a round has one piece, and no time split."""

    def step(self, batch: DeviceBatch) -> None:
        """The loop in one program, for one round."""
        InOneProgram().advance(batch, 1)


class ForwardApart(RoundByRound):
    """Plain decoding where no program may contain the forward pass: the rest of a step is one."""

    def step(self, batch: DeviceBatch) -> None:
        """The forward pass, then the rest."""
        probs, kernels = batch.sampling, batch.model.sampling_kernels

        def rest(_, job, state, out):
            return generate.make_step(lambda *_, **__: (out, state.cache), probs, kernels)(None, job, state)

        begun = batch.clock()
        state, live_B = batch.state, generate.running(batch.state).astype("int32")
        out, cache = batch.model.forward(batch.params, generate.last_token(state), state.cache, n_valid_B=live_B)
        # Keys and values stay outside: they may lie on two devices.
        args = (None, batch.job, state._replace(cache=cache._replace(k=(), v=())), out._replace(stats=None))
        state = batch.call(("after forward", probs), rest, *args)
        batch.state = state._replace(cache=cache._replace(length=state.cache.length))
        batch.state.length.block_until_ready()
        _account(batch, Times(total=batch.clock() - begun))


@dataclasses.dataclass(frozen=True)
class Pieces(RoundByRound):
    """Speculative rounds, their pieces timed; what is not in a piece is the host's time.

    Attributes:
        compile_forward: makes the piece that verifies; its `timed` runs it.
        watch: called with every round.
    """

    compile_forward: Callable[..., Pruned | Unpruned]
    watch: Watch | None = None

    def step(self, batch: DeviceBatch) -> None:
        """Draft, verify, accept, commit."""
        view = self._round(batch)
        if self.watch is not None:
            self.watch(view)

    def _round(self, batch: DeviceBatch) -> RoundView:
        if len({k.device for k in batch.state.cache.k}) > 1:
            raise UserError("speculation needs the whole cache on one device: place neurons, not layers")
        pieces, job = _pieces(batch), batch.job
        weights = (batch.params, batch.draft_params)
        begun = batch.clock()
        cache_before = np.asarray(batch.state.cache.length)
        spent: dict[str, float] = {}

        def timed(stage: str, function: Callable, *args: Pytree, donate: tuple[int, ...]) -> Pytree:
            key = ("round", stage, pieces.config, pieces.drafter, pieces.verifier)
            compiled = self.compile_forward if stage == "verify" else Pruned.compile
            program = batch.program(key, function, weights, *args, donate=donate, compiled=compiled)
            out, spent[stage] = program.timed(weights, *args)
            return out

        # What a piece replaces travels apart from the rest of the state, so that it alone is donated.
        rest = batch.state._replace(cache=None, drafter=None)

        def draft_piece(w, job, rest, cache, own, text):
            return pieces.draft(w, job, rest._replace(cache=cache, drafter=own), text=text)

        def verify_piece(w, rest, draft, cache):
            return pieces.verify(w, rest, draft, cache)

        def accept_piece(_, job, rest, draft, logits):
            return pieces.accept(job, rest, draft, logits)

        def commit_piece(w, job, rest, cache, own, draft, verdict, out):
            return pieces.commit(w, job, rest, cache, Drafted(draft, own, None), verdict, out)

        text = batch.read_text(rest, batch.state.drafter)
        read_s = batch.clock() - begun
        drafted = timed("draft", draft_piece, job, rest, batch.state.cache, batch.state.drafter, text, donate=(3, 4))
        if text is not None:
            written = batch.clock()
            drafted = batch.write_text(rest, drafted)
            spent["draft"] += read_s + batch.clock() - written
        out, cache = timed("verify", verify_piece, rest, drafted.draft, drafted.cache, donate=(3,))
        verdict = timed("sample", accept_piece, job, rest, drafted.draft, out.logits, donate=())
        args = (job, rest, cache, drafted.state, drafted.draft, verdict, out)
        batch.state = timed("commit", commit_piece, *args, donate=(3, 4))
        total = batch.clock() - begun
        _account(batch, Times(**spent, host=total - sum(spent.values()), total=total))
        after = batch.state._replace(cache=None, drafter=None)
        cache_after = np.asarray(batch.state.cache.length)
        number = int(np.max(np.asarray(rest.counters.rounds)))
        caches = cache_before, cache_after
        return RoundView(batch, number, rest, after, *caches, drafted.draft, out.logits, verdict, out.stats)


def _pieces(batch: DeviceBatch) -> Round:
    method, model = batch.method, batch.model
    return Round(model.forward, batch.sampling, model.sampling_kernels, method.drafter, method.verifier)
