"""Speculative rounds stepped from the host: the pieces of the loop in one program, each its own, so they can be timed.

Slower than the loop in one program, and token for token the same. Traces, recordings of laws and the time split are
taken here. A piece's time is that of its program, which is handed only what it reads; finding the program, taking trees
of arrays apart and putting them together is the host's.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from specsparse.engine.generate import DecodeState, Finish
from specsparse.errors import UserError
from specsparse.runtime.metrics import Times
from specsparse.runtime.pruned import Pruned
from specsparse.runtime.session import Session
from specsparse.speculative.base import Draft, Drafted, Verdict
from specsparse.speculative.loop import Round, coins


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

    session: Session
    number: int
    before: DecodeState
    after: DecodeState
    cache_before: np.ndarray
    cache_after: np.ndarray
    draft: Draft
    logits: jax.Array
    verdict: Verdict
    stats: Any = None

    def laws(self) -> jax.Array:
        """float32[B, K+1, V], the target's law at each row."""
        return self._piece("laws")

    def targets(self) -> jax.Array:
        """int32[B, K+1], the target's own token at each row, drawn with the noise of its position."""
        return self._piece("targets")

    def coins(self) -> np.ndarray:
        """float32[B, K], the acceptance coins of the round."""
        return np.asarray(coins(self.session.job, self.before, max_nodes=self.draft.max_nodes)[0])

    def _piece(self, name: str) -> jax.Array:
        pieces = _round(self.session)

        def call(_, job, before, draft, logits):
            return getattr(pieces, name)(job, before, draft, logits)

        key = ("round", name, pieces.config, pieces.drafter, pieces.verifier)
        return self.session.call(key, call, None, self.session.job, self.before, self.draft, self.logits)


Watch = Callable[[RoundView], None]


def run(session: Session, max_rounds: int, *, watch: Watch | None = None) -> None:
    """Up to `max_rounds` rounds of every sequence that has not ended; fills `runtime.session.times`.

    Plain decoding has one piece, and goes one round at a time without a time split.
    """
    for _ in range(max_rounds):
        if Finish.RUNNING not in session.finish:
            return
        if session.method.drafter is None:
            session.advance(1)
            continue
        view = _step(session)
        if watch is not None:
            watch(view)


def _round(session: Session) -> Round:
    method, model = session.method, session.model
    return Round(model.forward, session.law, model.sampling_kernels, method.drafter, method.verifier)


def _step(session: Session) -> RoundView:
    """One round, its pieces timed; what is not in a piece is the host's."""
    if len({k.device for k in session.state.cache.k}) > 1:
        raise UserError("speculation needs the whole cache on one device: place neurons, not layers")
    pieces, job = _round(session), session.job
    weights = (session.params, session.draft_params)
    compiled, begun = session.compile_s, time.perf_counter()
    cache_before = np.asarray(session.state.cache.length)
    spent: dict[str, float] = {}

    def timed(stage: str, function: Callable, *args: Any, donate: tuple[int, ...]) -> Any:
        key = ("round", stage, pieces.config, pieces.drafter, pieces.verifier)
        if stage == "verify" and session.model.stepped:
            start = time.perf_counter()
            out = jax.block_until_ready(function(weights, *args))
            spent[stage] = time.perf_counter() - start
            return out
        program = session.program(key, function, weights, *args, donate=donate, compiled=Pruned.compile)
        out, spent[stage] = program.timed(weights, *args)
        return out

    # What a piece replaces travels apart from the rest of the state, so that it alone is donated.
    rest = session.state._replace(cache=None, drafter=None)

    def draft_piece(w, job, rest, cache, own):
        return pieces.draft(w, job, rest._replace(cache=cache, drafter=own))

    def verify_piece(w, rest, draft, cache):
        return pieces.verify(w, rest, draft, cache)

    def accept_piece(_, job, rest, draft, logits):
        return pieces.accept(job, rest, draft, logits)

    def commit_piece(w, job, rest, cache, own, draft, verdict, out):
        return pieces.commit(w, job, rest, cache, Drafted(draft, own, None), verdict, out)

    drafted = timed("draft", draft_piece, job, rest, session.state.cache, session.state.drafter, donate=(3, 4))
    out, cache = timed("verify", verify_piece, rest, drafted.draft, drafted.cache, donate=(3,))
    verdict = timed("sample", accept_piece, job, rest, drafted.draft, out.logits, donate=())
    args = (job, rest, cache, drafted.state, drafted.draft, verdict, out)
    session.state = timed("commit", commit_piece, *args, donate=(3, 4))
    total = time.perf_counter() - begun - (session.compile_s - compiled)
    session.account(Times(**spent, host=total - sum(spent.values()), total=total))
    after = session.state._replace(cache=None, drafter=None)
    cache_after = np.asarray(session.state.cache.length)
    number = int(np.max(np.asarray(rest.counters.rounds)))
    caches = cache_before, cache_after
    return RoundView(session, number, rest, after, *caches, drafted.draft, out.logits, verdict, out.stats)
