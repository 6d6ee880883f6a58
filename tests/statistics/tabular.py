"""A target and a draft that are tables over a vocabulary of four, under the engine's own loop, drafters and noise.

The forward function does in the plainest way what a model does: the slot of a row in the key/value cache holds the
number of the context that ends there, a row finds its context through its parent, and the logits are those of a table.
So a cache that is committed or rolled back wrongly, a row with another row's distribution or a round that forgets a
token shows in the distribution of the text, as noise that is used twice does.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from specsparse import kernels
from specsparse.engine import cache as kv
from specsparse.engine import generate
from specsparse.engine.generate import DecodeState, Job
from specsparse.engine.llama import ForwardOut, Want
from specsparse.engine.noise import seed_words, token_uniforms, uniform
from specsparse.engine.sampling import pipeline
from specsparse.engine.sampling.params import SamplingParams, compile_params
from specsparse.speculative import loop
from specsparse.speculative.base import Drafter, DraftKind, Verifier
from specsparse.speculative.drafters import sources
from specsparse.speculative.drafters.draft_model import OwnModel
from specsparse.speculative.drafters.model_drafter import ModelDrafter, TreeDrafter
from specsparse.speculative.drafters.self_draft import TargetLayers
from specsparse.speculative.drafters.sources import DraftWeights, VocabMap
from specsparse.speculative.trees.base import TreeShape

VOCAB = 4
LENGTH = 4
"""Tokens whose joint distribution is compared."""
CONTEXTS = sum(VOCAB**d for d in range(LENGTH))
"""Contexts of fewer than LENGTH tokens: 0 is the empty one, the children of c are VOCAB c + 1 and following."""
CHUNK = 4096
"""Sequences that are decoded together: their arrays stay in the cache of a core."""
SAMPLES = 1000
"""Sequences that share a seed and differ in the sample index."""

ALL = Want()
KERNELS = pipeline.kernels_of(kernels.get())
"""This machine's, of distributions, draws and verdicts."""


class Tables(NamedTuple):
    """float32[CONTEXTS + 1, VOCAB] logits each; the last row stands for all longer contexts."""

    target: jax.Array
    draft: jax.Array


def random_tables(seed: int) -> Tables:
    """Distributions that differ from context to context and between target and draft, none with a rare token."""
    rng = np.random.default_rng(seed)
    p, q = (0.9 * rng.dirichlet(np.ones(VOCAB), CONTEXTS + 1) + 0.1 / VOCAB for _ in range(2))
    return Tables(*(jnp.asarray(np.log(probs), jnp.float32) for probs in (p, q)))


def joint_distribution(tables: Tables) -> np.ndarray:
    """float64[VOCAB ** LENGTH]: the distribution of LENGTH tokens drawn one after the other from the target."""
    logits = np.asarray(tables.target, np.float64)
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    probs, context = np.ones(1), np.zeros(1, int)
    for _ in range(LENGTH):
        probs = (probs[:, None] * p[context]).reshape(-1)
        context = (VOCAB * context[:, None] + 1 + np.arange(VOCAB)).reshape(-1)
    return probs


def forward(tables: Tables, tokens_Bn, cache: kv.KVCache, *, n_valid_B=None, parents_Bn=None, want: Want = ALL):
    """An `engine.llama.ForwardFn`; `want.layers` asks for the draft's table. The first token of a text is its BOS."""
    batch, n = tokens_Bn.shape
    n_valid_B = jnp.full((batch,), n, jnp.int32) if n_valid_B is None else n_valid_B
    slots_BC = cache.v[0][:, 0, :, 0]
    before_B = jnp.take_along_axis(slots_BC, jnp.maximum(cache.length - 1, 0)[:, None], axis=1)[:, 0]
    rows = [jnp.where(cache.length > 0, before_B.astype(jnp.int32), -1)]
    for i in range(n):
        parent_B = jnp.full((batch,), i - 1, jnp.int32) if parents_Bn is None else parents_Bn[:, i]
        above_B = jnp.take_along_axis(jnp.stack(rows, axis=1), parent_B[:, None] + 1, axis=1)[:, 0]
        below_B = jnp.minimum(VOCAB * above_B + tokens_Bn[:, i] + 1, CONTEXTS)
        rows.append(jnp.where(above_B < 0, 0, below_B))
    context_Bn = jnp.stack(rows[1:], axis=1)
    row_n = jnp.arange(n, dtype=jnp.int32)[None]
    slot_Bn = jnp.where(row_n < n_valid_B[:, None], cache.length[:, None] + row_n, cache.capacity)
    at_B1 = jnp.arange(batch, dtype=jnp.int32)[:, None]
    v = cache.v[0].at[at_B1, 0, slot_Bn, 0].set(context_Bn.astype(jnp.float32), mode="drop")
    out = ForwardOut(_logits(tables, context_Bn, n_valid_B, want))
    return out, cache._replace(v=(v,))


def _logits(tables: Tables, context_Bn, n_valid_B, want: Want):
    if want.logits == "none":
        return None
    if want.logits == "last":
        context_Bn = jnp.take_along_axis(context_Bn, jnp.maximum(n_valid_B - 1, 0)[:, None], axis=1)
    return (tables.target if want.layers is None else tables.draft)[context_Bn]


def drafter(shape: int | TreeShape, kind: DraftKind | None = None, *, own: bool = False) -> Drafter:
    """The engine's drafter over the draft's table: chains of `shape` tokens, or trees of that shape.

    Args:
        shape: a length or a tree.
        kind: how the tokens of a chain are drawn; a tree says it itself.
        own: as a second model with a cache of its own, else as a part of the target on the target's cache.
    """
    sampling = sources.DraftSampling(SamplingParams(temperature=1.0), VOCAB, KERNELS)
    vocab = VocabMap(VOCAB, VOCAB, VOCAB)
    source = OwnModel(vocab, forward, 64, (0,), 1, 1, 1, jnp.float32) if own else TargetLayers(vocab, forward, 64, (0,))
    if isinstance(shape, int):
        return ModelDrafter(source, sampling, shape, kind)
    return TreeDrafter(source, sampling, shape)


class Key(NamedTuple):
    """Which parts of a key count, 1 or 0 each; the engine's own keys are `Key()`."""

    position: int = 1
    round: int = 1
    node: int = 1
    sample: int = 1
    stream: int = 1


OWN = Key()


@contextlib.contextmanager
def keyed(key: Key) -> Iterator[None]:
    """While it is open, traced code draws its noise without the parts of the key that are 0 (`key` may be traced)."""

    def part(of):
        def masked(seed, **use):
            return of(seed, **{name: jnp.asarray(word, jnp.int32) * getattr(key, name) for name, word in use.items()})

        return masked

    with contextlib.ExitStack() as stack:
        for module in (generate, loop, sources):
            stack.enter_context(mock.patch.object(module, "token_uniforms", part(token_uniforms)))
        stack.enter_context(mock.patch.object(loop, "uniform", part(uniform)))
        yield


@dataclasses.dataclass(frozen=True)
class Decoded:
    """What came of N runs: how often each text of LENGTH tokens came, and the rounds' counters summed up.

    Attributes:
        counts: int64[VOCAB ** LENGTH], in the order of `joint_distribution`.
        rounds: all rounds.
        complete: rounds that accepted as many tokens as a path has, so that a bonus token followed.
    """

    counts: np.ndarray
    rounds: int
    complete: int


class Engine:
    """The engine's loop over tables, as one compiled program of `CHUNK` sequences side by side.

    Every text begins with one token and runs for LENGTH rounds, which write LENGTH tokens at least. Run r has seed
    r // SAMPLES and sample r % SAMPLES.

    Args:
        draft, verifier: the method; None is plain decoding.
        masked: whether the noise may be drawn by parts of its key; False leaves the engine as it is.
    """

    def __init__(self, draft: Drafter | None, verifier: Verifier | None, *, masked: bool = True):
        self.draft, self.masked = draft, masked
        self.config, self.sampling = compile_params(SamplingParams(temperature=1.0), vocab_size=VOCAB)
        if draft is None:
            self.step = generate.make_step(forward, self.config, KERNELS)
        else:
            self.step = loop.make_step(loop.Round(forward, self.config, KERNELS, draft, verifier))
        self._chunk = jax.jit(self._texts)

    def __call__(self, tables: Tables, runs: int, key: Key = OWN) -> Decoded:
        """The texts of that many runs, summed up."""
        words = jax.tree.map(jnp.int32, key)
        counts, totals = np.zeros(VOCAB**LENGTH, np.int64), np.zeros(2, np.int64)
        for start in range(0, runs, CHUNK):
            run = np.arange(start, start + CHUNK)
            seeds = np.stack([seed_words(s) for s in run // SAMPLES])
            tokens, c = self._chunk(tables, words, jnp.asarray(seeds), jnp.asarray((run % SAMPLES).astype(np.int32)))
            kept = np.asarray(tokens)[: runs - start]
            counts += np.bincount(kept @ VOCAB ** np.arange(LENGTH)[::-1], minlength=counts.size)
            totals += np.asarray(c)[: runs - start].sum(axis=0)
        return Decoded(counts, *(int(x) for x in totals))

    def _texts(self, tables: Tables, key: Key, seed_B2, sample_B):
        """int32[B, LENGTH] tokens, and int32[B, 2] rounds and complete rounds of each run."""
        with keyed(key) if self.masked else contextlib.nullcontext():
            job, state = _start(self.sampling, self.draft.max_nodes if self.draft else 0, seed_B2, sample_B)
            params = tables
            if self.draft is not None:
                params = tables, DraftWeights(params=tables)
                pieces = loop.Round(forward, self.config, KERNELS, self.draft, None)
                state = state._replace(drafter=pieces.init(params, job, state)[0])
            end, _ = generate.run(self.step, params, job, state, jnp.int32(LENGTH))
        c = end.counters
        complete = c.accepted_at[:, self.draft.max_depth - 1] if self.draft else c.rounds
        return end.tokens[:, 1 : LENGTH + 1], jnp.stack([c.rounds, complete], axis=1)


def _start(sampling, nodes: int, seed_B2, sample_B) -> tuple[Job, DecodeState]:
    """Sequences that hold their first token. Their limit leaves every round up to the last counted token its draft."""
    batch = len(sample_B)
    length = jnp.ones((batch,), jnp.int32)
    job = Job(
        sampling=jax.tree.map(lambda a: jnp.repeat(a, batch, axis=0), sampling),
        stop_ids=jnp.full((batch, 1), -1, jnp.int32),
        limit=length + LENGTH + nodes,
        seed=seed_B2,
        sample=sample_B,
    )
    capacity = 1 + LENGTH + 2 * nodes
    cache = kv.init(layers=1, batch=batch, kv_heads=1, capacity=capacity, head_dim=1, dtype=jnp.float32)
    return job, DecodeState(
        tokens=jnp.zeros((batch, cache.capacity), jnp.int32),
        length=length,
        finish=jnp.zeros((batch,), jnp.int32),
        cache=cache,
        counters=generate.zero_counters(batch, nodes),
    )
