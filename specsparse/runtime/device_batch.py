"""A batch of sequences on the device: prompts in the cache, weights, noise, and the programs that its rounds call."""

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine import generate
from specsparse.engine.cache import KVCache
from specsparse.engine.devices import compiled
from specsparse.engine.feed import Piece, feed
from specsparse.engine.fixed_width import check_rows
from specsparse.engine.generate import DecodeState, Finish, Job
from specsparse.engine.model import Model
from specsparse.engine.noise import seed_words
from specsparse.engine.pytree import Pytree
from specsparse.engine.sampling import pipeline
from specsparse.engine.sampling.params import SamplingParams
from specsparse.runtime.method import Method
from specsparse.runtime.metrics import Times
from specsparse.runtime.round_log import Note, RoundLog
from specsparse.speculative import loop, token_sources
from specsparse.speculative.base import Drafted, TextDrafter
from specsparse.speculative.drafters.model_drafter import ModelDrafter
from specsparse.speculative.drafters.slem import StringDrafter
from specsparse.speculative.drafters.with_policy import WithPolicy


@dataclass(frozen=True)
class Request:
    """One sequence of a batch: a checked prompt int32[n], what to do with it, and where its noise comes from."""

    prompt: np.ndarray
    params: SamplingParams
    seed: int
    sample: int = 0


class DeviceBatch:
    """What runners work on (`specsparse.runtime.rounds`).

    Attributes:
        model, sequences, method: what is decoded, and how.
        noting: whether counters are noted after each round, so that a text can end at any of its tokens.
        job: what stays the same while the batch is decoded.
        probs: how its distributions are made.
        params, draft_params: weights of the target and of the drafter.
        state: donated to each call.
        log: times and counters.
        compile_s: seconds of compiling, which no other time holds.
    """

    def __init__(self, model: Model, sequences: list[Request], method: Method, *, noting: bool = False):
        self.model, self.sequences, self.method, self.noting = model, sequences, method, noting
        self.compile_s = 0.0
        self.log = RoundLog()
        check_rows(method.max_nodes + 1, model.width)
        context = model.config.context_length
        lengths = [len(s.prompt) for s in sequences]
        limits = [min(context, n + (context if s.params.max_tokens is None else s.params.max_tokens))
                  for n, s in zip(lengths, sequences, strict=True)]  # fmt: skip
        self.capacity = model.capacity_for(max(limits) + model.room_for(method.max_nodes))
        self.params = model.params_for(self.capacity)
        self.draft_params = None if method.weights is None else model.everywhere(method.weights(self.capacity))
        self.sampling, sampling_arrays = pipeline.compile_params(
            [s.params for s in sequences],
            vocab_size=model.config.vocab_size,
            encode=model.tokenizer.encode,
            eos_ids=sorted(model.tokenizer.stop_ids),
            context_limit=self.capacity,
        )
        job = Job(
            sampling=sampling_arrays,
            stop_ids=_stop_ids(model, sequences),
            limit=np.array(limits, np.int32),
            seed=np.stack([seed_words(s.seed) for s in sequences]),
            sample=np.array([s.sample for s in sequences], np.int32),
        )
        self.job = model.everywhere(jax.device_put(job))  # `jnp.asarray` would compile a program for each shape
        self.state = model.everywhere(self._prefill(np.array(lengths, np.int32), job.limit))

    def clock(self) -> float:
        """Seconds on a clock that stands still while programs are compiled."""
        return time.perf_counter() - self.compile_s

    def call(self, key: Hashable, function: Callable, *args: Pytree, **how) -> Pytree:
        """Calls `program` of these arguments, with its keywords."""
        args = self.model.everywhere(args)
        return self.program(key, function, *args, **how)(*args)

    def program(
        self,
        key: Hashable,
        function: Callable,
        *args: Pytree,
        donate: tuple[int, ...] = (),
        compiled: Callable[..., Callable] = compiled,
    ) -> Callable:
        """`function` compiled for arguments of these shapes, once; compiling is timed apart.

        Args:
            key: names what the function closes over.
            function: pure; its first argument are weights.
            args: to compile for.
            donate: places of the arguments that a call gives up.
            compiled: compiles; of functions that run the target's forward pass, `Devices.compile` does.
        """
        leaves, structure = jax.tree.flatten(args[1:])  # args[0] are weights
        key = (key, structure, tuple((jnp.shape(a), a.dtype) for a in leaves))
        program = self.model.programs.get(key)
        if program is None:
            start = time.perf_counter()
            program = compiled(function, *args, donate=donate)
            self.model.programs[key] = program
            self.compile_s += time.perf_counter() - start
        return program

    def _prefill(self, lengths: np.ndarray, limits: np.ndarray) -> DecodeState:
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
            begun, args = self.clock(), (self.params, *piece.arrays, cache)
            how = self.model.devices.compile
            out, cache = self.call(("prefill", wants_hidden), chunk, *args, donate=(3,), compiled=how)
            cache.length.block_until_ready()
            spent += self.clock() - begun
            return out, cache

        for fed in feed(program, [p[:-1] for p in prompts], cache):
            cache = fed.cache
            hidden.append(fed.out)
        state = DecodeState(
            tokens=jax.device_put(tokens),
            length=jax.device_put(lengths),
            finish=jax.device_put(np.where(lengths >= limits, np.int32(Finish.LENGTH), np.int32(Finish.RUNNING))),
            cache=cache,
            counters=generate.zero_counters(batch, self.method.max_nodes),
            history=None if self.sampling.raw else pipeline.init_history(self.sampling, prompts),
            scores=None
            if self.sampling.logprobs is None
            else generate.empty_scores(batch, self.capacity, self.sampling.logprobs),
        )
        if drafter is None:
            self.log.add(Times(prefill=spent))
            return state
        features = jnp.concatenate(hidden, axis=1) if wants_hidden and hidden else None

        def begin(weights, job, state, text, features):
            ctx = loop.context(weights[0], job, state, max_nodes=drafter.max_nodes)
            with loop.traced(drafter, "init"):
                return drafter.init(weights[1], ctx._replace(text=text), hidden=features)

        text, weights = self.read_text(state, None), (self.params, self.draft_params)
        begun = self.clock()
        init = self.call(("init", drafter), begin, weights, self.job, state, text, features)
        jax.block_until_ready(init)
        spent += self.clock() - begun
        self.log.add(Times(prefill=spent))
        empty = jax.device_put(np.zeros((batch, self.capacity), token_sources.DTYPE))
        return state._replace(drafter=init, token_sources=empty)

    def read_text(self, state: DecodeState, own: Pytree) -> Pytree:
        """What a `TextDrafter` of that state reads of the committed text; None of any other drafter."""
        if not isinstance(self.method.drafter, TextDrafter):
            return None
        text = self.method.drafter.read_text(own, np.asarray(state.tokens), np.asarray(state.length))
        return self.model.everywhere(jax.tree.map(jnp.asarray, text))

    def write_text(self, state: DecodeState, drafted: Drafted) -> Drafted:
        """A draft of a `TextDrafter` in the target's tokens."""
        assert isinstance(self.method.drafter, TextDrafter)
        drafted = self.method.drafter.write_text(drafted, np.asarray(state.tokens), np.asarray(state.length))
        return drafted._replace(draft=self.model.everywhere(jax.tree.map(jnp.asarray, drafted.draft)))

    def note(self, state: DecodeState) -> Note:
        """What is noted of a state after a round."""
        c, own = state.counters, state.drafter
        if isinstance(self.method.drafter, WithPolicy):
            return Note(c, own.policy, own.off)
        if isinstance(self.method.drafter, ModelDrafter | StringDrafter):
            return Note(c, own.policy, c.rounds - c.drafts)
        return Note(c)

    @property
    def finish(self) -> list[Finish]:
        """Why each sequence ended, or RUNNING."""
        return [Finish(int(f)) for f in np.asarray(self.state.finish)]

    @property
    def times(self) -> Times:
        """Of the whole batch; its stages where the host stepped all rounds (`specsparse.runtime.host_loop`)."""
        return self.log.times


def _stop_ids(model: Model, sequences: list[Request]) -> np.ndarray:
    """int32[B, s], padded with -1."""
    each = [
        sorted({*s.params.stop_token_ids, *(() if s.params.ignore_eos else model.tokenizer.stop_ids)})
        for s in sequences
    ]
    width = max(1, max(len(ids) for ids in each))
    return np.array([ids + [-1] * (width - len(ids)) for ids in each], np.int32)
