"""Prompts, decoding and v(n) of one engine or several, timed interleaved, the machine's own speed between them.

An engine is a `Side`: it runs one test and returns its seconds. `Ours` is specsparse; the others run in processes of
their own (`specsparse.tools.peers`).
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from specsparse.engine import cache as kv
from specsparse.engine.config import ModelConfig
from specsparse.engine.generate import Finish
from specsparse.engine.gguf import requantise
from specsparse.engine.gguf.reader import open_gguf
from specsparse.engine.llama import Want
from specsparse.engine.model import Model
from specsparse.engine.prefill import Chunk, prefill
from specsparse.engine.sampling.params import SamplingParams
from specsparse.errors import UserError
from specsparse.kernels import processor
from specsparse.measure import manifest
from specsparse.runtime.method import Method
from specsparse.runtime.session import Request, Session
from specsparse.support import terminal
from specsparse.support.files import Json
from specsparse.support.interleaved import alternating, interleaved, seconds

OURS = "specsparse"


class Side(Protocol):
    """One engine with a model loaded and `depth` tokens in its cache; methods return seconds.

    `prompt` processes n further tokens, with the logits of the last; `decode` decodes n tokens one after the other;
    `verify` is one forward pass over n further tokens, with the logits of all.
    """

    name: str

    def prompt(self, n: int) -> float: ...

    def decode(self, n: int) -> float: ...

    def verify(self, n: int) -> float: ...


@dataclass(frozen=True)
class Trial:
    """One test: a method of `Side` and its number of tokens."""

    name: str
    method: str
    n: int

    def run(self, side: Side) -> float:
        return getattr(side, self.method)(self.n)


@dataclass(frozen=True)
class TrialPlan:
    """The tests to time; 0 or () leaves one out."""

    pp: int = 512  # prompt tokens
    tg: int = 128  # tokens to decode
    ns: tuple[int, ...] = ()  # lengths of the verify test, ascending; 1 first
    repeats: int = 5  # timings of each test on each side

    def tests(self) -> tuple[Trial, ...]:
        out = [Trial(f"pp{self.pp}", "prompt", self.pp)] if self.pp else []
        out += [Trial(f"tg{self.tg}", "decode", self.tg)] if self.tg else []
        return (*out, *(Trial(f"v{n}", "verify", n) for n in self.ns))


def summary(values: Sequence[float]) -> dict[str, float]:
    """Mean, sample deviation (0 for one value), median, least and largest."""
    return {
        "mean": statistics.fmean(values),
        "sd": statistics.stdev(values) if len(values) > 1 else 0.0,
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
    }


def paired_ratio(top: Sequence[float], bottom: Sequence[float]) -> dict[str, float]:
    """`top / bottom` repeat by repeat: neighbours in time are compared, so that drift hits both."""
    return summary([a / b for a, b in zip(top, bottom, strict=True)])


def timings(seconds: Sequence[float], tokens: int) -> Json:
    """The seconds of each repeat of a test over so many tokens, with their summary, for a report."""
    return {
        "tokens": tokens,
        "seconds": list(seconds),
        "tokens_per_second": summary([tokens / s for s in seconds]),
        "ms_per_token": 1e3 * statistics.median(seconds) / tokens,
    }


@dataclass
class MachinePeaks:
    """Peaks of the machine in each repeat: bytes read, int8 and float32 multiply-adds, all per second."""

    read: list[float] = field(default_factory=list)
    int8: list[float] = field(default_factory=list)
    f32: list[float] = field(default_factory=list)

    def measure(self, buffer: processor.ReadBuffer) -> None:
        """Adds a measurement of each (about 80 ms); int8 needs the native library."""
        self.read.append(buffer.rate())
        self.f32.append(processor.f32_rate())
        int8 = processor.int8_rate()
        if int8 is not None:
            self.int8.append(int8)


@dataclass(frozen=True)
class TrialResults:
    """Seconds of each repeat by test name and side name, and the machine's peaks meanwhile."""

    seconds: dict[str, dict[str, list[float]]]
    machine: MachinePeaks


def warm_up(plan: TrialPlan, side: Side, done: Callable[[], None] = lambda: None) -> None:
    """Runs every test once: compiles, touches memory, wakes threads."""
    for test in plan.tests():
        test.run(side)
        done()


def run(plan: TrialPlan, sides: Sequence[Side], done: Callable[[], None] = lambda: None) -> TrialResults:
    """Times every test `repeats` times on every side; `done` is called after each timing.

    Sides alternate test by test (A B A B), and the order of the tests turns round with each repeat.
    """
    tests, machine, buffer = plan.tests(), MachinePeaks(), processor.ReadBuffer()

    def order(_, repeat: int) -> Iterator[tuple[Trial, str]]:
        return ((test, side.name) for test in alternating(tests, repeat) for side in sides)

    found = interleaved(
        {(test, side.name): partial(test.run, side) for test in tests for side in sides},
        repeats=plan.repeats, warm_up=0, order=order, before=lambda: machine.measure(buffer), done=done,
    )  # fmt: skip
    return TrialResults({t.name: {s.name: found[t, s.name] for s in sides} for t in tests}, machine)


def token_ids(count: int, vocab_size: int, seed: int = 0) -> np.ndarray:
    """Random tokens int32[count], the same for every engine and run."""
    return np.random.default_rng(seed).integers(0, vocab_size, count, dtype=np.int32)


def need_room(config: ModelConfig, tokens: int, options: str) -> None:
    """UserError if the context does not hold so many tokens; `options` are those to choose smaller."""
    if tokens > (holds := config.context_length):
        raise UserError(f"{tokens} tokens are needed and the context holds {holds}: choose a smaller {options}")


class Loop:
    """The decode loop with a method, run a few rounds at a time from one place in one text."""

    def __init__(self, model: Model, method: Method, ids: np.ndarray, *, room: int, loop: str = "jit"):
        self._length = jnp.asarray([len(ids)], jnp.int32)
        params = SamplingParams(temperature=0.0, max_tokens=room, ignore_eos=True)
        self.session = Session(model, [Request(ids, params, seed=0)], method, loop=loop)

    def run(self, rounds: int) -> float:
        """Decodes up to `rounds` rounds, and returns the seconds they took."""
        before = self.session.times.total
        self.session.advance(rounds)
        return self.session.times.total - before

    def drafts_of(self, tokens: int) -> None:
        """With policy=fixed: drafts are of so many tokens, or nodes of a tree, from now on."""
        state = self.session.state
        sources = jax.tree.map(lambda a: jnp.asarray(np.full(a.shape, tokens, a.dtype)), state.policy.sources)
        self.session.state = state._replace(policy=state.policy._replace(sources=sources))

    def again(self, rounds: int, *, start: int | None = None, drafted: int | None = None) -> float:
        """Seconds of up to `rounds` rounds behind the first `start` tokens, by default the whole prompt; only for
        drafters without a state, which goes on. `drafted` as for `drafts_of`."""
        if drafted is not None:
            self.drafts_of(drafted)
        state = self.session.state
        length = self._length if start is None else jnp.asarray([start], jnp.int32)
        self.session.state = state._replace(
            length=jnp.copy(length),
            finish=jnp.full((1,), int(Finish.RUNNING), jnp.int32),
            cache=state.cache._replace(length=length - jnp.int32(1)),
        )
        jax.block_until_ready(self.session.state)
        return self.run(rounds)


@dataclass(frozen=True)
class Compiled:
    """A program that had to be compiled, and whether the persistent cache had it."""

    program: str
    seconds: float
    cached: bool


class Ours:
    """specsparse: the programs that `generate` and the speculative loop run, on fixed tokens, random by default.

    Attributes:
        depth: tokens in the cache before each test; fewer may be set later on.
        compiled: programs, in the order in which they were compiled, each when a test first needed it.
        forwards: forward passes of one `verify` timing, in one loop on the device.
    """

    name = OURS

    def __init__(
        self, model: Model, *, depth: int = 0, room: int, rows: int | None = None, forwards: int = 8,
        ids: np.ndarray | None = None,
    ):  # fmt: skip
        """Feeds `depth` tokens, which are in the cache before each test.

        Args:
            room: most tokens of a prompt or verify test.
            rows: rows of the verify program, with n of them valid; None compiles one of n rows for each n, as a loop
                with drafts of n - 1 tokens does.
        """
        self.model, self.depth, self.rows, self.forwards = model, depth, rows, forwards
        self.compiled: list[Compiled] = []
        capacity = model.capacity_for(depth + room)
        self._params = model.params_for(capacity)
        self._cache = model.new_cache(1, capacity)
        self._ids = token_ids(depth + room, model.config.vocab_size) if ids is None else ids
        self._programs: dict = {}
        self._loops: dict[int, Loop] = {}
        if depth:
            self._feed(self._ids[:depth])

    def _timed(self, program: str, compile_it: Callable[[], float | None]) -> None:
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
            self.compiled.append(Compiled(program, taken, hits > 0))

    def _program(self, name: str, function: Callable, *args) -> Callable:
        """`function` compiled for such arguments once; it takes over the memory of the fourth, the cache."""

        def compile_it() -> None:
            self._programs[name] = jax.jit(function, donate_argnums=3).lower(*args).compile()

        if name not in self._programs:
            self._timed(name, compile_it)
        return self._programs[name]

    def _feed(self, ids: np.ndarray) -> None:
        """Appends `ids` to the cache in the engine's chunks; waits for the last one's logits."""
        forward, logits = self.model.forward, None

        def program(chunk: Chunk, cache: kv.KVCache):
            want = "last" if chunk.last else "none"

            def run(params, tokens, count, cache):
                out, cache = forward(params, tokens, cache, n_valid_B=count, want=Want(logits=want))
                return out.logits, kv.commit(cache, count)

            args = (self._params, *chunk.arrays, cache)
            return self._program(f"prompt of {chunk.tokens.shape[1]} rows, {want} logits", run, *args)(*args)

        for _, out, after in prefill(program, [ids], self._cache):
            logits, self._cache = out, after
        jax.block_until_ready(logits)

    def _rewind(self) -> None:
        self._cache = self._cache._replace(length=jnp.asarray([self.depth], jnp.int32))
        jax.block_until_ready(self._cache.length)

    def prompt(self, n: int) -> float:
        self._rewind()
        return seconds(lambda: self._feed(self._ids[self.depth : self.depth + n]))

    def decode(self, n: int) -> float:
        """Greedy, in the one-jit loop, the argmax included; no token ends it."""
        if n not in self._loops:
            ids = token_ids(self.depth + 1, self.model.config.vocab_size)

            def prefill() -> float:
                self._loops[n] = Loop(self.model, Method(), ids, room=n)
                return self._loops[n].session.compile_s

            def compile_loop() -> float:
                session = self._loops[n].session
                before = session.compile_s
                session.advance(0)
                return session.compile_s - before

            self._timed("prompt of the decode loop", prefill)
            self._timed("decode loop", compile_loop)
        return self._loops[n].again(n)

    def verify(self, n: int) -> float:
        """The mean of `forwards` passes of the same rows in one loop, each after the argmax of the one before."""
        rows, forward, argmax = self.rows or n, self.model.forward, self.model.kernels.argmax

        def passes(params, tokens_1R, count, cache, forwards):
            def body(_, carry):
                tokens, cache = carry
                out, cache = forward(params, tokens, cache, n_valid_B=count, want=Want(logits="all"))
                return tokens + jnp.minimum(argmax(out.logits[0])[None], 0), cache  # they stay as they are

            return jax.lax.fori_loop(jnp.int32(0), forwards, body, (tokens_1R, cache))

        self._rewind()
        tokens = jnp.asarray(self._ids[None, self.depth : self.depth + rows])
        args = (self._params, tokens, jnp.asarray([n], jnp.int32), self._cache, jnp.int32(self.forwards))
        program = self._program(f"verify of {rows} rows", passes, *args)
        start = time.perf_counter()
        out, self._cache = program(*args)
        out.block_until_ready()
        return (time.perf_counter() - start) / self.forwards

    def attention(self, n: int) -> float:
        """The mean of `forwards` passes of the layers' attention alone, of n rows; not on a mesh."""
        config, attend, count = self.model.config, self.model.kernels.attend, jnp.asarray([n], jnp.int32)
        shapes = [(n, heads * config.head_dim) for heads in (config.n_heads, config.n_kv_heads, config.n_kv_heads)]

        def passes(params, rows, forwards, cache):
            def body(_, cache):
                found = []
                for i, (k, v) in enumerate(zip(cache.k, cache.v, strict=True)):
                    kind = config.kind(i)
                    found.append(attend(
                        *rows, k, v, cos=params.cos, sin=params.sin, length=cache.length, n_valid=count,
                        pairing=config.rope.pairing, window=kind.window, table=kind.table,
                    ))  # fmt: skip
                return cache._replace(k=tuple(k for _, k, _ in found), v=tuple(v for _, _, v in found))

            return jax.lax.fori_loop(jnp.int32(0), forwards, body, cache)

        self._rewind()
        rows = [jnp.zeros(shape, jnp.float32) for shape in shapes]
        args = (self._params, rows, jnp.int32(self.forwards), self._cache)
        program = self._program(f"attention of {n} rows", passes, *args)

        def run() -> None:
            self._cache = program(*args)
            self._cache.length.block_until_ready()

        return seconds(run) / self.forwards


def requantised(path: Path, name: str, out: Console) -> Path:
    """The file of the same model in another type of weights, made once and kept in the user's cache."""
    kind, source = requantise.kind_of(name), open_gguf(path)
    made = manifest.cache_dir() / "requantised" / f"{path.stem}-{manifest.sha256_of(path)[:12]}-as-{kind.name}.gguf"
    if not made.exists():
        made.parent.mkdir(parents=True, exist_ok=True)
        with terminal.counting(out, f"re-quantising to {kind.name}", 100) as step:
            requantise.requantise(source, made, kind, progress=lambda done, total: step(100 * done // total))
    return made
