"""A batch of sequences being decoded: prompts in, rounds on the device, tokens out."""

import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine import generate
from specsparse.engine.cache import KVCache
from specsparse.engine.feed import Piece, feed, piece_rows
from specsparse.engine.generate import DecodeState, Finish, Job
from specsparse.engine.model import Model
from specsparse.engine.noise import seed_words
from specsparse.engine.sampling import pipeline
from specsparse.engine.sampling.params import SamplingParams
from specsparse.errors import UserError
from specsparse.runtime.metrics import Counters, Times
from specsparse.runtime.round_log import NOTED_ROUNDS, Note, RoundLog
from specsparse.speculative import loop, origins
from specsparse.speculative.base import Drafter, Verifier
from specsparse.speculative.drafters.model import ModelDrafter
from specsparse.speculative.drafters.with_policy import PolicyReport, WithPolicy, policy_reports
from specsparse.speculative.origins import Origin

ALL_ROUNDS = 2**30


@dataclass(frozen=True)
class Sequence:
    """One sequence of a batch: a checked prompt int32[n], what to do with it, and where its noise comes from."""

    prompt: np.ndarray
    params: SamplingParams
    seed: int
    sample: int = 0


@dataclass(frozen=True)
class Method:
    """How to decode: both None is plain decoding. `weights` makes the drafter's for a cache capacity, or is None."""

    drafter: Drafter | None = None
    verifier: Verifier | None = None
    weights: Callable[[int], Any] | None = None

    @property
    def max_nodes(self) -> int:
        """K."""
        return self.drafter.max_nodes if self.drafter else 0


class Session:
    """Decodes one batch. `advance` runs rounds; `tokens` and `finish` say how far it got.

    Attributes:
        state: on the device; donated to each call.
        compile_s: seconds of compiling, which no other time holds.
        noting: whether counters are noted after each round, so that `end` can end a text at any of its tokens.
    """

    def __init__(self, model: Model, sequences: list[Sequence], method: Method, *, noting: bool = False):
        self.model, self.sequences, self.method, self.noting = model, sequences, method, noting
        self.compile_s = 0.0
        self._log = RoundLog()
        context = model.config.context_length
        lengths = [len(s.prompt) for s in sequences]
        limits = [min(context, n + (context if s.params.max_tokens is None else s.params.max_tokens))
                  for n, s in zip(lengths, sequences, strict=True)]  # fmt: skip
        self.capacity = model.capacity_for(max(limits) + method.max_nodes)
        self.params = model.params_for(self.capacity)
        self.draft_params = None if method.weights is None else model.everywhere(method.weights(self.capacity))
        self.law, law_params = pipeline.compile_params(
            [s.params for s in sequences],
            vocab_size=model.config.vocab_size,
            encode=model.tokenizer.encode,
            eos_ids=sorted(model.tokenizer.stop_ids),
            context_limit=self.capacity,
        )
        job = Job(
            law=jax.tree.map(jnp.asarray, law_params),
            stop_ids=jnp.asarray(_stop_ids(model, sequences)),
            limit=jnp.asarray(limits, jnp.int32),
            seed=jnp.asarray(np.stack([seed_words(s.seed) for s in sequences])),
            sample=jnp.asarray([s.sample for s in sequences], jnp.int32),
        )
        self.job = model.everywhere(job)
        self.state = model.everywhere(self._prefill(lengths))

    @property
    def times(self) -> Times:
        """Of the whole batch; its stages where the host stepped all rounds (`specsparse.runtime.hostloop`)."""
        return self._log.times

    @property
    def prefill_s(self) -> float:
        """Seconds of the prompts."""
        return self.times.prefill

    @property
    def decode_s(self) -> float:
        """Seconds of the rounds, up to the one that ended the last text."""
        return self.times.total

    def call(self, key: Hashable, function: Callable, *args, donate: tuple[int, ...] = (), target: bool = False):
        """Calls `function` compiled for these shapes; `key` names what it closes over. Compiling is timed apart.

        `target` says that it runs the target's forward pass, which is not compiled where the host steps through it.
        """
        if target and self.model.stepped:
            return function(*args)
        args = self.model.everywhere(args)
        return self.program(key, function, *args, donate=donate)(*args)

    def program(
        self, key: Hashable, function: Callable, *args, donate: tuple[int, ...] = (), compiled: Callable | None = None
    ) -> Callable:
        """What `call` calls. `compiled`, where given, makes it of function and arguments."""
        leaves, structure = jax.tree.flatten(args[1:])  # args[0] are weights
        key = (key, structure, tuple((jnp.shape(a), a.dtype) for a in leaves))
        program = self.model.programs.get(key)
        if program is None:
            start = time.perf_counter()
            program = (compiled or _compiled)(function, *args, donate=donate)
            self.model.programs[key] = program
            self.compile_s += time.perf_counter() - start
        return program

    def _prefill(self, lengths: list[int]) -> DecodeState:
        """Feeds all tokens of each prompt but the last, which the first round feeds."""
        prompts = [s.prompt for s in self.sequences]
        drafter, batch = self.method.drafter, len(prompts)
        tokens = np.zeros((batch, self.capacity), np.int32)
        for row, ids in zip(tokens, prompts, strict=True):
            row[: len(ids)] = ids
        cache = self.model.new_cache(batch, self.capacity)
        wants_hidden = drafter is not None and drafter.wants_hidden
        chunk = partial(generate.prefill_chunk, self.model.forward, hidden=wants_hidden)
        hidden, spent = [], 0.0

        def program(piece: Piece, cache: KVCache):
            nonlocal spent
            args = (self.params, *piece.arrays, cache)
            compiled, begun = self.compile_s, time.perf_counter()
            out, cache = self.call(("prefill", wants_hidden), chunk, *args, donate=(3,), target=True)
            cache.length.block_until_ready()
            spent += time.perf_counter() - begun - (self.compile_s - compiled)
            return out, cache

        for fed in feed(program, [p[:-1] for p in prompts], cache):
            cache = fed.cache
            hidden.append(fed.out)
        state = DecodeState(
            tokens=jnp.asarray(tokens),
            length=jnp.asarray(lengths, jnp.int32),
            finish=jnp.where(jnp.asarray(lengths, jnp.int32) >= self.job.limit, jnp.int32(Finish.LENGTH), jnp.int32(0)),
            cache=cache,
            counters=generate.zero_counters(batch, self.method.max_nodes),
            history=None if self.law.raw else pipeline.init_history(self.law, prompts),
            scores=None
            if self.law.logprobs is None
            else generate.empty_scores(batch, self.capacity, self.law.logprobs),
        )
        if drafter is None:
            self._log.add(Times(prefill=spent))
            return state
        features = jnp.concatenate(hidden, axis=1) if wants_hidden and hidden else None
        ctx = loop.context(self.params, self.job, state, max_nodes=drafter.max_nodes)

        def begin(weights, ctx, features):
            return drafter.init(weights, ctx, hidden=features)

        compiled, begun = self.compile_s, time.perf_counter()
        init = jax.block_until_ready(self.call(("init", drafter), begin, self.draft_params, ctx, features))
        spent += time.perf_counter() - begun - (self.compile_s - compiled)
        self._log.add(Times(prefill=spent))
        return state._replace(drafter=init, origins=jnp.zeros((batch, self.capacity), origins.DTYPE))

    def _step(self) -> generate.Step:
        forward, drafter, verifier = self.model.forward, self.method.drafter, self.method.verifier
        kernels = self.model.sampling_kernels
        if drafter is None:
            return generate.make_step(forward, self.law, kernels)
        return loop.make_step(forward, self.law, kernels, drafter=drafter, verifier=verifier)

    def advance(self, max_rounds: int = ALL_ROUNDS) -> None:
        """Runs up to `max_rounds` rounds of every sequence that has not ended; at most `NOTED_ROUNDS` if `noting`."""
        if self.noting and max_rounds > NOTED_ROUNDS:
            raise ValueError(f"{max_rounds} rounds at once, and {NOTED_ROUNDS} can be noted")
        if self.model.stepped:
            self._advance_stepped(max_rounds)
            return
        note, room = (self._note, NOTED_ROUNDS) if self.noting else (None, 0)
        weights = self.params if self.method.drafter is None else (self.params, self.draft_params)

        def program(weights, job, state, rounds):
            return generate.run(self._step(), weights, job, state, rounds, note=note, room=room)

        key = ("decode", self.law, self.method.drafter, self.method.verifier, room)
        compiled, begun = self.compile_s, time.perf_counter()
        args = (weights, self.job, self.state, jnp.int32(max_rounds))
        self.state, notes = self.call(key, program, *args, donate=(2,))
        self.state.length.block_until_ready()
        self._log.add(Times(total=time.perf_counter() - begun - (self.compile_s - compiled)), notes)

    def _note(self, state: DecodeState) -> Note:
        """What is noted of a state."""
        c, own = state.counters, state.drafter
        if isinstance(self.method.drafter, WithPolicy):
            return Note(c, own.policy, own.off)
        if isinstance(self.method.drafter, ModelDrafter):
            return Note(c, own.policy, c.rounds - c.drafts)
        return Note(c)

    def account(self, times: Times) -> None:
        """Adds the time of a round that was stepped from the host."""
        self._log.add(times, jax.tree.map(lambda a: a[None], self._note(self.state)) if self.noting else None)

    def _advance_stepped(self, max_rounds: int) -> None:
        """As `advance`, round by round: the forward pass from the host, the rest of a plain step in one program."""
        if self.method.drafter is not None:
            raise UserError("on two devices speculative rounds are stepped one by one: decode with loop=host")
        law, kernels = self.law, self.model.sampling_kernels

        def rest(_, job, state, out):
            return generate.make_step(lambda *_, **__: (out, state.cache), law, kernels)(None, job, state)

        for _ in range(max_rounds):
            if Finish.RUNNING not in self.finish:
                return
            compiled, begun = self.compile_s, time.perf_counter()
            state, live_B = self.state, generate.running(self.state).astype(jnp.int32)
            out, cache = self.model.forward(self.params, generate.last_token(state), state.cache, n_valid_B=live_B)
            # Keys and values stay outside: they may lie on two devices.
            args = (None, self.job, state._replace(cache=cache._replace(k=(), v=())), out._replace(stats=None))
            state = self.call(("after forward", law), rest, *args)
            self.state = state._replace(cache=cache._replace(length=state.cache.length))
            self.state.length.block_until_ready()
            self.account(Times(total=time.perf_counter() - begun - (self.compile_s - compiled)))

    @property
    def finish(self) -> list[Finish]:
        """Why each sequence ended, or RUNNING."""
        return [Finish(int(f)) for f in np.asarray(self.state.finish)]

    def end(self, kept: Mapping[int, int]) -> None:
        """Says that the texts were looked at, and ends some after so many tokens (a stop string was found).

        Tokens, counters and policies of those end there: with the round that wrote the last of these tokens, which came
        since the call before. When all sequences have ended, so does the time, with the last round that a text needed.
        """
        self._log.end(kept)
        if kept:
            finish = np.array(self.state.finish)
            finish[list(kept)] = Finish.STOP
            self.state = self.state._replace(finish=self.model.everywhere(jnp.asarray(finish)))
        ended = Finish.RUNNING not in self.finish
        self._log.settle(int(self._ends().counters.rounds.max()) if ended else None)

    def tokens(self) -> list[np.ndarray]:
        """Tokens generated so far, one int32 array a sequence."""
        return self._generated(self.state.tokens)

    def origins(self, first: int = 0) -> list[tuple[Origin, ...]] | None:
        """Where each of these tokens came from, from the `first` on; None for plain decoding."""
        codes = self.state.origins
        return None if codes is None else [origins.read(codes_n[first:]) for codes_n in self._generated(codes)]

    def _generated(self, values_BC: jax.Array) -> list[np.ndarray]:
        """The values at the positions of what was generated, one array a sequence."""
        buffer, length = np.asarray(values_BC), np.asarray(self.state.length)
        new = [buffer[b, len(s.prompt) : length[b]] for b, s in enumerate(self.sequences)]
        return [values[: self._log.kept.get(b)] for b, values in enumerate(new)]

    def _ends(self) -> Note:
        """What was noted where each text ends, or now, in numpy."""
        return self._log.at_ends(self._note(self.state))

    def counters(self) -> list[Counters]:
        """The counters of each sequence; of the times of a batch its share, by rounds and prompt tokens."""
        every = self._ends().counters
        fed = [len(s.prompt) - 1 for s in self.sequences]
        shares = zip(_shares(every.rounds), _shares(fed), strict=True)
        times = [self.times.share(decode, prefill) for decode, prefill in shares]
        verifier = self.method.verifier
        measured = verifier is not None and loop.measures_alpha(self.law, verifier)
        rows = (jax.tree.map(lambda a, b=b: a[b].tolist(), every) for b in range(len(fed)))
        return [
            Counters(
                num_rounds=c.rounds,
                num_drafts=c.drafts,
                num_draft_tokens=c.drafted,
                num_tested=c.tested,
                num_accepted_tokens=c.accepted,
                num_accepted_tokens_per_pos=tuple(c.accepted_at),
                num_emitted_tokens=c.emitted,
                target_passes=c.rounds + len(piece_rows(prompt)),
                alpha=c.alpha,
                alpha_var=c.alpha_var,
                num_alpha_tested=c.tested if measured else 0,
                times=spent,
            )
            for c, prompt, spent in zip(rows, fed, times, strict=True)
        ]

    def policies(self) -> list[PolicyReport] | None:
        """What the draft-length policy did to each sequence; None where the drafter has none."""
        drafter, note = self.method.drafter, self._ends()
        if not isinstance(drafter, WithPolicy | ModelDrafter):
            return None
        return policy_reports(drafter.policy, note.policy, note.rounds_off)


def _shares(weights: Any) -> list[float]:
    """Parts of one in these proportions; equal ones where all are 0."""
    weights = np.asarray(weights, np.float64)
    return (weights / weights.sum() if weights.any() else np.full(weights.shape, 1 / len(weights))).tolist()


def _compiled(function: Callable, *args, donate: tuple[int, ...]) -> Callable:
    return jax.jit(function, donate_argnums=donate).lower(*args).compile()


def _stop_ids(model: Model, sequences: list[Sequence]) -> np.ndarray:
    """int32[B, s], padded with -1."""
    each = [
        sorted({*s.params.stop_token_ids, *(() if s.params.ignore_eos else model.tokenizer.stop_ids)})
        for s in sequences
    ]
    width = max(1, max(len(ids) for ids in each))
    return np.array([ids + [-1] * (width - len(ids)) for ids in each], np.int32)
