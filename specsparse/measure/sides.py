"""What is compared: specsparse itself. A side runs one test and returns its seconds; `peers.Peer` is the other one."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine import cache as kv
from specsparse.engine.feed import Piece, feed
from specsparse.engine.generate import Finish
from specsparse.engine.llama import Want
from specsparse.engine.model import Model
from specsparse.engine.sampling.params import SamplingParams
from specsparse.runtime.device_batch import Method, Request
from specsparse.runtime.session import Session
from specsparse.support.interleaved import seconds

OURS = "specsparse"


class Side(Protocol):
    """One engine with a model loaded and `depth` tokens in its cache."""

    name: str

    def prompt(self, n: int) -> float:
        """Seconds to process n further prompt tokens, with the logits of the last."""

    def decode(self, n: int) -> float:
        """Seconds to decode n tokens, one after the other."""

    def verify(self, n: int) -> float:
        """Seconds of one forward pass over n further tokens, with the logits of all."""


@dataclass(frozen=True)
class Compiled:
    """A program that had to be compiled: seconds, and whether the persistent cache had it."""

    program: str
    seconds: float
    cached: bool


@dataclass
class CompileLog:
    """What was compiled, and what of it the persistent cache held."""

    entries: list[Compiled] = field(default_factory=list)

    def timed(self, program: str, compile_it: Callable[[], float | None]) -> None:
        """Runs `compile_it`; it may return the seconds of compilation alone."""
        hits = 0

        def listen(event: str, **_) -> None:
            nonlocal hits
            hits += event == "/jax/compilation_cache/cache_hits"

        jax.monitoring.register_event_listener(listen)
        start = time.perf_counter()
        try:
            spent = compile_it()
        finally:
            jax.monitoring.unregister_event_listener(listen)
        taken = time.perf_counter() - start if spent is None else spent
        if taken:
            self.entries.append(Compiled(program, taken, hits > 0))


def token_ids(count: int, vocab_size: int, seed: int = 0) -> np.ndarray:
    """Random tokens int32[count], the same for every engine and run."""
    return np.random.default_rng(seed).integers(0, vocab_size, count, dtype=np.int32)


class Ours:
    """specsparse: the programs that `generate` and the speculative loop run, on fixed random tokens.

    Attributes:
        log: what was compiled; programs compile when a test first runs.
        forwards: forward passes of one `verify` timing, in one loop on the device.
    """

    name = OURS

    def __init__(self, model: Model, *, depth: int = 0, room: int, rows: int | None = None, forwards: int = 8):
        """Loads nothing, feeds `depth` tokens.

        Args:
            model: the model.
            depth: tokens in the cache before each test.
            room: most tokens of a prompt or verify test.
            rows: rows of the verify program, with n of them valid; None compiles one of n rows for each n, as a loop
                with drafts of n - 1 tokens does.
            forwards: see the class.
        """
        self.model, self.depth, self.rows, self.forwards = model, depth, rows, forwards
        self.log = CompileLog()
        capacity = model.capacity_for(depth + room)
        self._params = model.params_for(capacity)
        self._cache = model.new_cache(1, capacity)
        self._ids = token_ids(depth + room, model.config.vocab_size)
        self._programs: dict = {}
        self._sessions: dict[int, Session] = {}
        if depth:
            self._feed(self._ids[:depth])
        self._length = jnp.asarray([depth], jnp.int32)

    def _run(self, name: str, function: Callable, *args, donate: int):
        if name not in self._programs:
            self.log.timed(name, lambda: self._compile(name, function, args, donate))
        return self._programs[name](*args)

    def _compile(self, name: str, function: Callable, args: tuple, donate: int) -> None:
        self._programs[name] = jax.jit(function, donate_argnums=donate).lower(*args).compile()

    def _feed(self, ids: np.ndarray) -> None:
        """Appends `ids` to the cache in the engine's pieces; waits for the last one's logits."""
        forward, logits = self.model.forward, None

        def program(piece: Piece, cache: kv.KVCache):
            want = "last" if piece.last else "none"

            def run(params, tokens, count, cache):
                out, cache = forward(params, tokens, cache, n_valid_B=count, want=Want(logits=want))
                return out.logits, kv.commit(cache, count)

            args = (self._params, *piece.arrays, cache)
            return self._run(f"prompt of {piece.rows} rows, {want} logits", run, *args, donate=3)

        for fed in feed(program, [ids], self._cache):
            logits, self._cache = fed.out, fed.cache
        jax.block_until_ready(logits)

    def _rewind(self) -> None:
        self._cache = self._cache._replace(length=jnp.copy(self._length))
        jax.block_until_ready(self._cache.length)

    def prompt(self, n: int) -> float:
        """See `Side`."""
        self._rewind()
        return seconds(lambda: self._feed(self._ids[self.depth : self.depth + n]))

    def decode(self, n: int) -> float:
        """See `Side`: greedy, in the one-jit loop, the argmax included; no token ends it."""
        if n not in self._sessions:
            self._sessions[n] = self._open_session(n)
        session = self._sessions[n]
        state = session.state
        session.state = state._replace(
            length=self._length + jnp.int32(1),
            finish=jnp.full((1,), int(Finish.RUNNING), jnp.int32),
            cache=state.cache._replace(length=jnp.copy(self._length)),
        )
        jax.block_until_ready(session.state)
        before = session.decode_s
        session.advance()
        return session.decode_s - before

    def _open_session(self, n: int) -> Session:
        prompt = token_ids(self.depth + 1, self.model.config.vocab_size)
        params = SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True)
        opened: list[Session] = []

        def prefill() -> float:
            opened.append(Session(self.model, [Request(prompt, params, seed=0)], Method()))
            return opened[0].compile_s

        self.log.timed("prompt of the decode loop", prefill)
        session = opened[0]
        before = session.compile_s

        def compile_loop() -> float:
            session.advance(0)
            return session.compile_s - before

        self.log.timed("decode loop", compile_loop)
        return session

    def verify(self, n: int) -> float:
        """See `Side`: the mean of `forwards` passes in one loop, each fed the argmax of the one before."""
        rows, forward, argmax = self.rows or n, self.model.forward, self.model.kernels.argmax

        def program(params, tokens_1R, count, cache, passes):
            def body(_, carry):
                tokens, cache = carry
                out, cache = forward(params, tokens, cache, n_valid_B=count, want=Want(logits="all"))
                return argmax(out.logits[0])[None], cache

            return jax.lax.fori_loop(jnp.int32(0), passes, body, (tokens_1R, cache))

        self._rewind()
        tokens = jnp.asarray(self._ids[None, self.depth : self.depth + rows])
        args = (self._params, tokens, jnp.asarray([n], jnp.int32), self._cache, jnp.int32(self.forwards))
        name = f"verify of {rows} rows"
        if name not in self._programs:
            self.log.timed(name, lambda: self._compile(name, program, args, 3))
        start = time.perf_counter()
        out, self._cache = self._programs[name](*args)
        out.block_until_ready()
        return (time.perf_counter() - start) / self.forwards
