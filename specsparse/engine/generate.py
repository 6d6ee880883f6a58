"""Decoding without speculation, and what speculative decoding shares with it: the state, the prompt, the stop
conditions.

A step is a pure function `step(params, job, state) -> state`. `run` repeats it inside one `lax.while_loop`; a caller
that streams runs the same loop a few rounds at a time.
"""

import enum
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine import cache as kv
from specsparse.engine.cache import KVCache
from specsparse.engine.llama import ForwardFn, Want
from specsparse.engine.noise import NoiseStream, token_uniforms
from specsparse.engine.pytree import AnyArray, Pytree
from specsparse.engine.sampling.params import SamplingArrays, SamplingConfig
from specsparse.engine.sampling.pipeline import History, Logprobs, logprobs, observe_many, sample
from specsparse.engine.sampling.probs import SamplingKernels


class Finish(enum.IntEnum):
    """Why a sequence ended."""

    RUNNING = 0
    STOP = 1
    LENGTH = 2
    FAILED = 3
    """The model gave no distribution (NaN, or no token left)."""


class Job(NamedTuple):
    """The constants of a batch that is decoded."""

    sampling: SamplingArrays
    stop_ids: AnyArray  # int32[B, s], token ids that end a sequence, -1 for none
    limit: AnyArray  # int32[B], length at which a sequence ends
    seed: AnyArray  # uint32[B, 2], see `engine.noise`
    sample: AnyArray  # int32[B], index among the samples that share a seed


_TOTALS = ("rounds", "drafts", "drafted", "tested", "accepted", "emitted")


class LoopCounters(NamedTuple):
    """The counters of a run, in two arrays: a round adds to each in one operation.

    The columns are attributes: `rounds`, `drafts`, `drafted`, `tested`, `accepted`, `emitted`, `accepted_at`, `alpha`
    and `alpha_var`, as in `runtime.metrics.Counters`. Axes before [B], such as rounds, stay.
    """

    totals: jax.Array  # int32[B, 6 + K]; `accepted_at` are the last K
    alphas: jax.Array  # float32[B, 2]

    def __getattr__(self, name: str) -> jax.Array:
        if name in _TOTALS:
            return self.totals[..., _TOTALS.index(name)]
        if name == "accepted_at":
            return self.totals[..., len(_TOTALS) :]
        if name in ("alpha", "alpha_var"):
            return self.alphas[..., int(name == "alpha_var")]
        raise AttributeError(name)

    def plus(self, **columns: jax.Array) -> "LoopCounters":
        """The counters after so much more of some columns, [B] each and [B, K] for `accepted_at`."""
        more = {name: jnp.zeros_like(getattr(self, name)) for name in (*_TOTALS, "accepted_at", "alpha", "alpha_var")}
        more |= columns
        totals = jnp.concatenate([*(more[n][..., None] for n in _TOTALS), more["accepted_at"]], axis=-1)
        alphas = jnp.stack([more["alpha"], more["alpha_var"]], axis=-1)
        return LoopCounters(self.totals + totals, self.alphas + alphas)


class DecodeState(NamedTuple):
    """A batch in the middle of decoding. Invariant: the cache holds `length - 1` tokens; the next input is the last."""

    tokens: jax.Array  # int32[B, C], prompt and output; anything beyond `length`
    length: jax.Array  # int32[B]
    finish: jax.Array  # int32[B], `Finish`
    cache: KVCache
    counters: LoopCounters
    history: History | None = None  # what penalties and the like remember, or None
    scores: Logprobs | None = None  # log probabilities by position ([B, C] and [B, C, k]), or None
    drafter: Pytree = None  # its state
    policy: Pytree = None  # its state
    # int16[B, C], the source of each token (`speculative.token_sources`), or None for plain decoding
    token_sources: jax.Array | None = None


Step = Callable[..., DecodeState]


def zero_counters(batch: int, max_nodes: int) -> LoopCounters:
    """Counters of B sequences and drafts of up to K nodes (K = 0 for plain decoding)."""
    totals = np.zeros((batch, len(_TOTALS) + max_nodes), np.int32)
    return LoopCounters(*jax.device_put((totals, np.zeros((batch, 2), np.float32))))


def empty_scores(batch: int, capacity: int, k: int) -> Logprobs:
    one, top = (batch, capacity), (batch, capacity, k)
    kinds = (one, np.float32), (one, np.int32), (top, np.float32), (top, np.int32)
    return Logprobs(*jax.device_put([np.zeros(shape, dtype) for shape, dtype in kinds]))


def last_token(state: DecodeState) -> jax.Array:
    """int32[B, 1], the next input of each sequence."""
    return jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)


def running(state: DecodeState) -> jax.Array:
    """The sequences that have not ended, bool[B]."""
    return state.finish == Finish.RUNNING


def target_uniforms(job: Job, position_Bn: jax.Array) -> jax.Array:
    """float32[B, n, 4], the target's noise: a function of seed, sample and absolute position alone (contract C1)."""
    use = {"sample": job.sample[:, None], "stream": NoiseStream.TARGET, "position": position_Bn}
    return token_uniforms(job.seed[:, None], **use)


def emit(state: DecodeState, job: Job, tokens_Bm, count_B, failed_B) -> tuple[DecodeState, jax.Array]:
    """Appends tokens up to the first stop id and to the limit, and says which sequences that ends.

    Args:
        state: before the tokens; `cache`, `drafter` and `scores` are left alone.
        tokens_Bm: int32[B, m], the first `count_B` count.
        failed_B: bool[B], sequences whose last token came from no distribution; they end without it.

    Returns:
        The state and int32[B], tokens appended.
    """
    place_m = jnp.arange(tokens_Bm.shape[1], dtype=jnp.int32)[None]
    count_B = jnp.where(failed_B, count_B - 1, count_B)
    count_B = jnp.where(running(state), jnp.minimum(count_B, job.limit - state.length), 0)
    stops_Bm = jnp.any(tokens_Bm[:, :, None] == job.stop_ids[:, None, :], axis=2) & (place_m < count_B[:, None])
    stopped_B = jnp.any(stops_Bm, axis=1)
    count_B = jnp.where(stopped_B, jnp.argmax(stops_Bm, axis=1).astype(jnp.int32) + 1, count_B)
    tokens = put(state.tokens, tokens_Bm, count_B, state.length)
    length = state.length + count_B
    finish = jnp.where(length >= job.limit, jnp.int32(Finish.LENGTH), jnp.int32(Finish.RUNNING))
    finish = jnp.where(failed_B & ~stopped_B, jnp.int32(Finish.FAILED), finish)
    finish = jnp.where(stopped_B, jnp.int32(Finish.STOP), finish)
    state = state._replace(tokens=tokens, length=length, finish=jnp.where(running(state), finish, state.finish))
    if state.history is not None:
        state = state._replace(history=observe_many(state.history, tokens_Bm, count_B))
    return state, count_B


def put(old_BC, new_Bm, count_B, start_B) -> jax.Array:
    """`old_BC` with the first `count_B` of `new_Bm` from position `start_B` on; both may have further axes."""
    B, m = new_Bm.shape[:2]
    place_m = jnp.arange(m, dtype=jnp.int32)[None]
    column_Bm = jnp.where(place_m < count_B[:, None], start_B[:, None] + place_m, old_BC.shape[1])
    return old_BC.at[jnp.arange(B)[:, None], column_Bm].set(new_Bm, mode="drop")


def score(scores: Logprobs, logits_BmV, tokens_Bm, count_B, start_B) -> Logprobs:
    """The scores with the log probabilities of the first `count_B` tokens, which stand at `start_B` and after."""
    B, m, V = logits_BmV.shape
    new = logprobs(logits_BmV.reshape(B * m, V), tokens_Bm.reshape(-1), scores.top.shape[-1])

    def store(old, rows):
        return put(old, rows.reshape(B, m, *rows.shape[1:]), count_B, start_B)

    return jax.tree.map(store, scores, new)


def make_step(forward: ForwardFn, sampling: SamplingConfig, kernels: SamplingKernels) -> Step:

    def step(params, job: Job, state: DecodeState) -> DecodeState:
        live_B = running(state).astype(jnp.int32)
        out, cache = forward(params, last_token(state), state.cache, n_valid_B=live_B)
        logits_BV = out.logits[:, 0]
        with jax.named_scope("sample"):
            u_BU = None if sampling.greedy else target_uniforms(job, state.length[:, None])[:, 0]
            token_B, ok_B, _ = sample(sampling, job.sampling, logits_BV, state.history, u_RU=u_BU, kernels=kernels)
        start_B = state.length
        state, count_B = emit(state._replace(cache=cache), job, token_B[:, None], live_B, ~ok_B & (live_B > 0))
        if state.scores is not None:
            scores = score(state.scores, logits_BV[:, None], token_B[:, None], count_B, start_B)
            state = state._replace(scores=scores)
        counters = state.counters.plus(rounds=live_B, emitted=count_B)
        return state._replace(cache=kv.commit(state.cache, count_B), counters=counters)

    return step


def run(
    step: Step, params, job: Job, state: DecodeState, max_rounds, *, note: Callable | None = None, room: int = 0
) -> tuple[DecodeState, Pytree]:
    """Repeats `step` until every sequence has ended, or `max_rounds` (int32) times.

    `note` gives arrays to remember of the state after each of at most `room` rounds; they are returned beside the
    state, [room, ..] each, None without it.
    """

    def more(carry):
        i, s, _ = carry
        return (i < max_rounds) & jnp.any(running(s))

    def body(carry):
        i, s, notes = carry
        s = step(params, job, s)
        if note is not None:
            notes = jax.tree.map(lambda a, x: a.at[i].set(x), notes, note(s))
        return i + 1, s, notes

    notes = None if note is None else jax.tree.map(lambda x: jnp.zeros((room, *x.shape), x.dtype), note(state))
    return jax.lax.while_loop(more, body, (jnp.int32(0), state, notes))[1:]


def prefill_chunk(
    forward: ForwardFn, params, tokens_Bn, n_valid_B, cache: KVCache, *, hidden: bool | tuple[int, ...] = False
):
    """Feeds a chunk of the prompts; returns the hidden rows of `Want(hidden=hidden)` or None, and the cache."""
    want = Want(logits="none", hidden=hidden)
    out, cache = forward(params, tokens_Bn, cache, n_valid_B=n_valid_B, want=want)
    return out.hidden, kv.commit(cache, n_valid_B)
