"""How the rounds of a session are run, and what they did and took.

`JIT` runs all rounds in one program. The host's loops run them one by one: for models that no program may contain, for
drafts that are made of text, and to time and to watch speculative rounds. Slower, and token for token the same. Traces,
recordings of distributions and the time split are taken there: each stage of a round is a program of its own, which is
given only the arrays that it reads. Finding it, and taking trees of arrays apart and together, is the host's time.
"""

import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np

from specsparse.engine import generate
from specsparse.engine.generate import DecodeState, Finish, LoopCounters
from specsparse.engine.model import Model
from specsparse.engine.pytree import ABSENT, Pytree
from specsparse.errors import UserError
from specsparse.runtime.method import Method
from specsparse.runtime.metrics import Times
from specsparse.speculative import loop as speculation
from specsparse.speculative.base import Draft, Verdict

if TYPE_CHECKING:
    from specsparse.runtime.session import Session  # that module imports this one

NOTED_ROUNDS = 16
"""Rounds between two looks at the texts."""


class RoundLoop(NamedTuple):
    """A way to run rounds: `advance(session, n)` runs up to n rounds of every sequence that has not ended, and adds
    them to its log. If a text may end in a stop string, the texts are looked at after so many `rounds`.
    """

    advance: Callable[["Session", int], None]
    rounds: int


def _in_one_program(session: "Session", rounds: int) -> None:
    """One `lax.while_loop`; of at most `NOTED_ROUNDS` rounds if the session is `noting`."""
    assert not session.noting or rounds <= NOTED_ROUNDS
    note, room = (session.note, NOTED_ROUNDS) if session.noting else (None, 0)
    method, model = session.method, session.model
    if method.drafter is None:
        weights = session.params
        step = generate.make_step(model.forward, session.sampling, model.sampling_kernels)
    else:
        weights = (session.params, session.draft_params)
        step = speculation.make_step(round_of(session))

    def program(weights, job, state, rounds):
        return generate.run(step, weights, job, state, rounds, note=note, room=room)

    key = ("decode", session.sampling, method.drafter, method.verifier, method.policy, room)
    begun = session.clock()
    args = (weights, session.job, session.state, np.int32(rounds))
    session.state, notes = session.call(key, program, *args, donate=(2,))
    session.state.length.block_until_ready()
    session.log.add(Times(total=session.clock() - begun), notes)


JIT = RoundLoop(_in_one_program, NOTED_ROUNDS)
LOOPS = ("jit", "host")


@dataclass(frozen=True)
class RoundView:
    """One finished round, for those who watch. Arrays are on the device."""

    session: "Session"
    number: int  # 0 first
    # before, after: the states around it, without cache and drafter
    before: DecodeState
    after: DecodeState
    # cache_before, cache_after: int32[B], tokens in the target's cache
    cache_before: np.ndarray
    cache_after: np.ndarray
    # draft, logits, verdict: what was proposed, float[B, K+1, V] of the target, and the verdict
    draft: Draft
    logits: jax.Array
    verdict: Verdict
    stats: Pytree = None  # of the target's sparse FFN in this pass, see `ForwardOut`, or None

    def probs(self) -> jax.Array:
        """float32[B, K+1, V], the target's distribution at each row."""
        return self._stage("marked_probs")

    def targets(self) -> jax.Array:
        """int32[B, K+1], the target's own token at each row, drawn with the noise of its position."""
        return self._stage("own_tokens")

    def coins(self) -> np.ndarray:
        return np.asarray(speculation.coins(self.session.job, self.before, max_nodes=self.draft.max_nodes)[0])

    def _stage(self, name: str) -> jax.Array:
        stages = round_of(self.session)

        def call(_, job, before, draft, logits):
            return getattr(speculation.RoundTarget(stages, job, before, draft, logits), name)

        key = ("round", name, stages.config, stages.drafter, stages.verifier)
        return self.session.call(key, call, None, self.session.job, self.before, self.draft, self.logits)


Watch = Callable[[RoundView], None]


def loop_for(model: Model, method: Method, *, loop: str = "jit", watch: Watch | None = None) -> RoundLoop:
    """How to run the rounds of a method: in one program, unless the host is asked for or is needed.

    `watch` needs it, which is called with every speculative round; so do a model on two devices, and a drafter that
    reads and writes text. UserError: an unknown loop."""
    if loop not in LOOPS:
        raise UserError(f"loop={loop!r} must be one of {', '.join(LOOPS)}")
    whole = model.devices.one_program
    by_text = method.drafter is not None and method.drafter.reads_text
    if loop == "jit" and watch is None and whole and not by_text:
        return JIT
    if method.drafter is not None:
        step = partial(_speculative_round, compile_forward=Pruned.compile if whole else Unpruned, watch=watch)
    else:
        step = partial(_in_one_program, rounds=1) if whole else _plain_round_around_forward

    def advance(session: "Session", rounds: int) -> None:
        for _ in range(rounds):
            if Finish.RUNNING not in session.finish:
                return
            step(session)

    return RoundLoop(advance, rounds=1)


def _log_round(session: "Session", times: Times) -> None:
    session.log.add(times, jax.tree.map(lambda a: a[None], session.note(session.state)) if session.noting else None)


def _plain_round_around_forward(session: "Session") -> None:
    """Plain decoding if no program may contain the forward pass: the rest of a step is one."""
    probs, kernels = session.sampling, session.model.sampling_kernels

    def rest(_, job, state, out):
        return generate.make_step(lambda *_, **__: (out, state.cache), probs, kernels)(None, job, state)

    begun = session.clock()
    state, live_B = session.state, generate.running(session.state).astype("int32")
    out, cache = session.model.forward(session.params, generate.last_token(state), state.cache, n_valid_B=live_B)
    # Keys and values stay outside: they may lie on two devices.
    args = (None, session.job, state._replace(cache=cache._replace(k=(), v=())), out._replace(stats=None))
    state = session.call(("after forward", probs), rest, *args)
    session.state = state._replace(cache=cache._replace(length=state.cache.length))
    session.state.length.block_until_ready()
    _log_round(session, Times(total=session.clock() - begun))


def round_of(session: "Session") -> speculation.Round:
    method, model = session.method, session.model
    assert method.drafter is not None and method.verifier is not None, "plain decoding drafts nothing"
    return speculation.Round(
        model.forward, session.sampling, model.sampling_kernels, method.drafter, method.verifier, method.policy
    )


def _speculative_round(
    session: "Session", *, compile_forward: Callable[..., "Pruned | Unpruned"], watch: Watch | None
) -> None:
    """Draft, verify, accept, commit; the stages are timed, and the rest of the time is the host's.

    `compile_forward` makes the program of the stage that verifies.
    """
    if len({k.device for k in session.state.cache.k}) > 1:
        raise UserError("speculation needs the whole cache on one device: place neurons, not layers")
    stages, job = round_of(session), session.job
    weights = (session.params, session.draft_params)
    begun = session.clock()
    cache_before = np.asarray(session.state.cache.length)
    spent: dict[str, float] = {}
    whole = (stages.config, stages.drafter, stages.verifier, stages.policy)

    def timed(
        stage: str, function: Callable, *args: Pytree, donate: tuple[int, ...], of: tuple[Hashable, ...] = whole,
        weights: Pytree = weights, compiled: Callable[..., "Pruned | Unpruned"] = Pruned.compile,
    ) -> Pytree:  # fmt: skip
        """Runs a stage; `of` is what its function closes over."""
        program = session.program(("round", stage, *of), function, weights, *args, donate=donate, compiled=compiled)
        out, spent[stage] = program.timed(weights, *args)
        return out

    # What a stage replaces travels apart from the rest of the state, so that it alone is donated.
    rest = session.state._replace(cache=ABSENT, drafter=None)

    def draft_stage(w, job, rest, cache, own, text):
        return stages.draft(w, job, rest._replace(cache=cache, drafter=own), text=text)

    def verify_stage(w, rest, draft, cache):
        return stages.verify(w, rest, draft, cache)

    def accept_stage(_, job, rest, draft, logits):
        return stages.accept(job, rest, draft, logits)

    def commit_stage(w, job, rest, cache, own, drafted, verdict, out):
        return stages.commit(w, job, rest, cache, drafted._replace(state=own), verdict, out)

    text = session.read_text(rest, session.state.drafter)
    read_s = session.clock() - begun
    drafted = timed("draft", draft_stage, job, rest, session.state.cache, session.state.drafter, text, donate=(3, 4))
    if text is not None:
        written = session.clock()
        drafted = session.write_text(rest, drafted)
        spent["draft"] += read_s + session.clock() - written
    # The target's pass is one program for all drafters and policies whose drafts have one shape.
    out, cache = timed(
        "verify", verify_stage, rest._replace(policy=None), drafted.draft, drafted.cache, donate=(3,),
        weights=(session.params, None), compiled=compile_forward, of=(stages.want, stages.drafter.tree),
    )  # fmt: skip
    verdict = timed("sample", accept_stage, job, rest, drafted.draft, out.logits, donate=())
    args = (job, rest, cache, drafted.state, drafted._replace(state=None, cache=None), verdict, out)
    session.state = timed("commit", commit_stage, *args, donate=(3, 4))
    total = session.clock() - begun
    _log_round(session, Times(**spent, host=total - sum(spent.values()), total=total))
    if watch is not None:
        after = session.state._replace(cache=ABSENT, drafter=None)
        caches = cache_before, np.asarray(session.state.cache.length)
        number = int(np.max(np.asarray(rest.counters.rounds)))
        watch(RoundView(session, number, rest, after, *caches, drafted.draft, out.logits, verdict, out.stats))


# Programs that can be timed.


@dataclass(frozen=True)
class Pruned:
    """A compiled function of trees of arrays. Arguments that it only passes on never enter the program.

    A compiled program takes about a microsecond for each array among its arguments. A stage that is a program of its
    own and is given all weights and the whole cache, as the stage inside a larger program is for nothing, would seem
    to cost that.
    """

    program: Callable[..., list[jax.Array]]  # from the leaves that are read to the leaves that are computed
    read: tuple[int, ...]  # their places among the leaves of the arguments
    # for each leaf of the result the place of the argument it is, or None if it is computed
    passed: tuple[int | None, ...]
    structure: jax.tree_util.PyTreeDef  # of the result

    @classmethod
    def compile(cls, function: Callable[..., Pytree], *args: Pytree, donate: tuple[int, ...] = ()) -> "Pruned":
        """The function compiled for arguments of these shapes; those at the places `donate` are given up, as far as
        they are read."""
        from jax.extend.core import Literal, jaxpr_as_fun  # brings Pallas, which most runs do not need

        closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        inputs = {var: place for place, var in enumerate(closed.jaxpr.invars)}
        results = closed.jaxpr.outvars
        passed = tuple(None if isinstance(var, Literal) else inputs.get(var) for var in results)
        used = {var for eqn in closed.jaxpr.eqns for var in eqn.invars if not isinstance(var, Literal)}
        read = tuple(place for var, place in inputs.items() if var in used)
        argument_of_leaf = [n for n, arg in enumerate(args) for _ in jax.tree.leaves(arg)]
        given_up = [place for place, n in enumerate(argument_of_leaf) if n in donate and place not in passed]

        def computed(*leaves):
            known: list[jax.Array | None] = [None] * len(inputs)
            for place, leaf in zip(read, leaves, strict=True):
                known[place] = leaf
            out = jaxpr_as_fun(closed)(*known)
            return [leaf for leaf, place in zip(out, passed, strict=True) if place is None]

        leaves = jax.tree.leaves(args)
        jitted = jax.jit(computed, donate_argnums=[i for i, place in enumerate(read) if place in given_up])
        program = jitted.lower(*(leaves[place] for place in read)).compile()
        return cls(program, read, passed, jax.tree.structure(shape))

    def timed(self, *args: Pytree) -> tuple[Pytree, float]:
        """The result, ready, and the seconds of the program."""
        leaves = jax.tree.leaves(args)
        given = [leaves[place] for place in self.read]
        start = time.perf_counter()
        computed = iter(jax.block_until_ready(self.program(*given)))
        seconds = time.perf_counter() - start
        out = [next(computed) if place is None else leaves[place] for place in self.passed]
        return jax.tree.unflatten(self.structure, out), seconds


class Unpruned:
    """A function that the host steps through (two devices), timed as `Pruned` is; nothing is compiled around it."""

    def __init__(self, function: Callable[..., Pytree], *args: Pytree, donate: tuple[int, ...] = ()):
        self._function = function

    def timed(self, *args: Pytree) -> tuple[Pytree, float]:
        start = time.perf_counter()
        return jax.block_until_ready(self._function(*args)), time.perf_counter() - start


# What the rounds did and took.


class Note(NamedTuple):
    """The part of a state that is kept after a round: arrays [B, ..], or [rounds, B, ..] after several rounds."""

    counters: LoopCounters
    policy: Pytree = None  # `speculative.loop.PolicyState`, or None without a policy


_DRAFTS = ("rounds", "drafts", "drafted", "accepted")


class RoundLog:
    """Times and counters of a session, up to where its texts end.

    A stop string is found once tokens have become text: up to `NOTED_ROUNDS` rounds later than it was written. So
    counters are noted after each round; those of a text are what they were after the round that wrote its last token,
    and the rounds that no text needed took no time.

    Attributes:
        times: of the whole batch; a stage is None if a round did not run on the host.
        kept: tokens of the texts that a stop string ended, by sequence.
    """

    def __init__(self):
        self.times = Times()
        self.kept: dict[int, int] = {}
        self._ends: dict[int, Note] = {}
        self._calls: list[tuple[Note, int, Times]] = []  # since the last look: notes, rounds and time of each call
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
        self._calls.append((jax.tree.map(lambda a: a[:run], notes), run, times))

    @property
    def _rounds_run(self) -> int:
        return self._rounds + sum(rounds for _, rounds, _ in self._calls)

    def end(self, kept: Mapping[int, int]) -> None:
        """Ends the texts of some sequences after so many tokens, which were written since the last `settle`."""
        for b, tokens in kept.items():
            rows = ((n, int(np.searchsorted(n.counters.emitted[:, b], tokens)), rounds) for n, rounds, _ in self._calls)
            notes, row = next(((notes, row) for notes, row, rounds in rows if row < rounds), (None, 0))
            assert notes is not None, f"no round since the last look wrote token {tokens} of sequence {b}"
            self._ends[b] = jax.tree.map(lambda a, row=row, b=b: np.array(a[row, b]), notes)
            self._ends[b].counters.emitted[...] = tokens
            self.kept[b] = tokens

    def settle(self, last_round: int | None = None) -> None:
        """The texts were looked at. If all have ended, `last_round` is how many rounds the longest took.

        The rounds of one call share its time equally.
        """
        if last_round is not None:
            self.times, before = self._looked, self._rounds
            for _, rounds, times in self._calls:
                needed = min(max(last_round - before, 0), rounds)
                self.times += times.share(needed / rounds if rounds else 1.0, prefill=1.0)
                before += rounds
        for notes, _, _ in self._calls:
            self._drafts.append(np.stack([getattr(notes.counters, name) for name in _DRAFTS], axis=-1))
        self._looked, self._rounds, self._calls = self.times, self._rounds_run, []

    def drafts(self, b: int, rounds: int) -> list[tuple[int, int]]:
        """Drafted and accepted tokens of those of the first `rounds` rounds of sequence b that drafted."""
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
