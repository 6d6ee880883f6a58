"""A batch of sequences being decoded: prompts in, rounds on the device, tokens out."""

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine import generate, sampling
from specsparse.engine.generate import DecodeState, Finish, Job
from specsparse.engine.model import Model
from specsparse.engine.noise import seed_words
from specsparse.engine.params import SamplingParams
from specsparse.errors import UserError
from specsparse.metrics import Counters, Times
from specsparse.speculative import loop
from specsparse.speculative.base import Drafter, Verifier
from specsparse.speculative.drafters.model import ModelDrafter
from specsparse.speculative.drafters.with_policy import PolicyReport, WithPolicy, policy_report

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
        compile_s, prefill_s, decode_s: seconds, each without the others.
        times: of the stages of the rounds that the host stepped (`specsparse.hostloop`).
    """

    def __init__(self, model: Model, sequences: list[Sequence], method: Method):
        self.model, self.sequences, self.method = model, sequences, method
        self.compile_s = self.prefill_s = self.decode_s = 0.0
        self.times = Times()
        context = model.config.context_length
        lengths = [len(s.prompt) for s in sequences]
        limits = [min(context, n + (context if s.params.max_tokens is None else s.params.max_tokens))
                  for n, s in zip(lengths, sequences, strict=True)]  # fmt: skip
        self.capacity = model.capacity_for(max(limits) + method.max_nodes)
        self.params = model.params_for(self.capacity)
        self.draft_params = None if method.weights is None else model.everywhere(method.weights(self.capacity))
        self.law, law_params = sampling.compile_params(
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
        for start, rows in generate.prompt_pieces([n - 1 for n in lengths]):
            ids, count = generate.piece([p[:-1] for p in prompts], start, rows)
            args = (self.params, jnp.asarray(ids), jnp.asarray(count), cache)
            compiled, begun = self.compile_s, time.perf_counter()
            cache, h = self.call(("prefill", wants_hidden), chunk, *args, donate=(3,), target=True)
            cache.length.block_until_ready()
            spent += time.perf_counter() - begun - (self.compile_s - compiled)
            hidden.append(h)
        self.prefill_s = spent
        state = DecodeState(
            tokens=jnp.asarray(tokens),
            length=jnp.asarray(lengths, jnp.int32),
            finish=jnp.where(jnp.asarray(lengths, jnp.int32) >= self.job.limit, jnp.int32(Finish.LENGTH), jnp.int32(0)),
            cache=cache,
            counters=generate.zero_counters(batch, self.method.max_nodes),
            history=None if self.law.raw else sampling.init_history(self.law, prompts),
            scores=None
            if self.law.logprobs is None
            else generate.empty_scores(batch, self.capacity, self.law.logprobs),
        )
        if drafter is None:
            return state
        features = jnp.concatenate(hidden, axis=1) if wants_hidden and hidden else None
        ctx = loop.context(self.params, self.job, state, max_nodes=drafter.max_nodes)

        def begin(weights, ctx, features):
            return drafter.init(weights, ctx, hidden=features)

        compiled, begun = self.compile_s, time.perf_counter()
        init = jax.block_until_ready(self.call(("init", drafter), begin, self.draft_params, ctx, features))
        self.prefill_s += time.perf_counter() - begun - (self.compile_s - compiled)
        return state._replace(drafter=init)

    def _step(self) -> generate.Step:
        forward, drafter, verifier = self.model.forward, self.method.drafter, self.method.verifier
        kernels = self.model.sampling_kernels
        if drafter is None:
            return generate.make_step(forward, self.law, kernels)
        return loop.make_step(forward, self.law, kernels, drafter=drafter, verifier=verifier)

    def advance(self, max_rounds: int = ALL_ROUNDS) -> None:
        """Runs up to `max_rounds` rounds of every sequence that has not ended."""
        weights = self.params if self.method.drafter is None else (self.params, self.draft_params)

        def program(weights, job, state, rounds):
            return generate.run(self._step(), weights, job, state, rounds)

        key = ("decode", self.law, self.method.drafter, self.method.verifier)
        compiled, begun = self.compile_s, time.perf_counter()
        if self.model.stepped:
            self._advance_stepped(max_rounds)
        else:
            self.state = self.call(key, program, weights, self.job, self.state, jnp.int32(max_rounds), donate=(2,))
        self.state.length.block_until_ready()
        self.decode_s += time.perf_counter() - begun - (self.compile_s - compiled)

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
            state, live_B = self.state, generate.running(self.state).astype(jnp.int32)
            out, cache = self.model.forward(self.params, generate.last_token(state), state.cache, n_valid_B=live_B)
            # Keys and values stay outside: they may lie on two devices.
            args = (None, self.job, state._replace(cache=cache._replace(k=(), v=())), out._replace(stats=None))
            state = self.call(("after forward", law), rest, *args)
            self.state = state._replace(cache=cache._replace(length=state.cache.length))

    @property
    def finish(self) -> list[Finish]:
        """Why each sequence ended, or RUNNING."""
        return [Finish(int(f)) for f in np.asarray(self.state.finish)]

    def end(self, index: int) -> None:
        """Ends a sequence from outside (a stop string was found)."""
        self.state = self.state._replace(finish=self.state.finish.at[index].set(int(Finish.STOP)))

    def tokens(self) -> list[np.ndarray]:
        """Tokens generated so far, one int32 array a sequence."""
        buffer, length = np.asarray(self.state.tokens), np.asarray(self.state.length)
        return [buffer[b, len(s.prompt) : length[b]] for b, s in enumerate(self.sequences)]

    def counters(self, index: int) -> Counters:
        """The counters of one sequence."""
        c = jax.tree.map(lambda a: np.asarray(a)[index], self.state.counters)
        verifier = self.method.verifier
        measured = verifier is not None and loop.measures_alpha(self.law, verifier)
        pieces = len(generate.prompt_pieces([len(self.sequences[index].prompt) - 1]))
        return Counters(
            num_rounds=int(c.rounds),
            num_drafts=int(c.drafts),
            num_draft_tokens=int(c.drafted),
            num_tested=int(c.tested),
            num_accepted_tokens=int(c.accepted),
            num_accepted_tokens_per_pos=tuple(int(x) for x in c.accepted_at),
            num_emitted_tokens=int(c.emitted),
            target_passes=int(c.rounds) + pieces,
            alpha=float(c.alpha),
            alpha_var=float(c.alpha_var),
            num_alpha_tested=int(c.tested) if measured else 0,
            times=self.times,
        )

    def policy(self, index: int) -> PolicyReport | None:
        """What the draft-length policy did to one sequence; None where the drafter has none."""
        drafter, state = self.method.drafter, self.state.drafter
        if isinstance(drafter, WithPolicy):
            return policy_report(drafter.policy, state.policy, index, int(state.off[index]))
        if isinstance(drafter, ModelDrafter):
            c = self.counters(index)
            return policy_report(drafter.policy, state.policy, index, c.num_rounds - c.num_drafts)
        return None


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
