"""The distribution of what runs: the jitted verdict of the decode loop in float32, found by bisection of its uniforms.

`exact` weighs the rules under a driver of its own. Here the driver itself is measured, and nothing is assumed of what
it does with a rule. Jitted, `Rule.verdict` is a function of K+1 uniforms, constant on boxes. Their edges are
thresholds: a coin accepts below its threshold, a token is drawn between two. The cube of all uniforms is cut along the
edges, each found by bisection on the grid that `engine.noise` draws from. So the volume of a box is the probability of
its verdict, exactly. `tests/statistics` tests the noise that the loop passes.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap

from specsparse import kernels
from specsparse.engine.sampling import pipeline
from specsparse.engine.sampling.params import Truncation
from specsparse.speculative.base import PAD, ROOT, Draft, Verdict, Verifier
from specsparse.speculative.proof import boxes
from specsparse.speculative.proof.boxes import LANES, STEPS
from specsparse.speculative.proof.cases import Case
from specsparse.speculative.proof.exact import text_probs
from specsparse.speculative.verify import Draw, LogitRows, Noise, Target, native_judge

CHAIN_ROOM, TREE_ROOM, VOCAB_ROOM = 3, 8, 6
"""Arrays of one size for all cases, so that a rule is compiled once: nodes of a chain, of a tree, and tokens.

A smaller draft is followed by nodes that do not exist but look as if they did. Tokens beyond a smaller vocabulary have
no mass.
"""

Driver = Callable[[Draft, np.ndarray, np.ndarray], Verdict]
"""(draft, p float32[L, B, K+1, V], uniforms float32[L, B, K+1]) -> verdict, all with the leading axes [L, B].

Of a verifier that weighs p, the uniforms are the coins of the K nodes and that of the last token; of `match`, the
target's noise at each row.
"""


class Drafts(NamedTuple):
    """N drafts as a driver takes them: a draft with leading axis N, and p float32[N, K+1, V]."""

    draft: Draft
    p: np.ndarray


class Decided(NamedTuple):
    """Boxes of one verdict each: int[N] draft, float64[N] volume, and the verdict's tokens, count, nodes and failed."""

    draft: np.ndarray
    volume: np.ndarray
    tokens: np.ndarray
    count: np.ndarray
    nodes: np.ndarray
    failed: np.ndarray


@functools.cache
def jitted(verifier: Verifier) -> Driver:
    """The decode loop's verdict for this verifier, with the draw of this machine's kernels; `vmap` over batches."""
    ours = pipeline.kernels_of(kernels.get())
    if (native := native_judge(verifier, ours)) is not None:
        return jax.jit(functools.partial(_at_once, verifier, native))
    draw = _over_batches(ours.draw)

    def run(draft: Draft, p_BnV: jax.Array, uniforms_Bn: jax.Array) -> Verdict:
        (B, n, V), tokens_Bn = p_BnV.shape, None
        if not verifier.needs_p:
            tokens_Bn = draw(p_BnV.reshape(B * n, V), _to_draw_by(uniforms_Bn.reshape(B * n))).reshape(B, n)
        noise = Noise(uniforms_Bn[:, :-1], _to_draw_by(uniforms_Bn[:, -1]))
        return verifier.rule.verdict(draft, Target(p_BnV, tokens_Bn, draw=draw, tree=verifier.tree), noise)

    return jax.jit(jax.vmap(run))


def _to_draw_by(u_R: jax.Array) -> jax.Array:
    """float32[R, 4], as a draw takes them. Of at most 16 tokens (here `VOCAB_ROOM`) the first decides alone."""
    return jnp.stack([u_R, *[jnp.zeros_like(u_R)] * 3], axis=-1)


def _at_once(
    verifier: Verifier, native: Callable, draft: Draft, p_LBnV: jax.Array, uniforms_LBn: jax.Array
) -> Verdict:
    """A driver by kernels that judge rows, as the loop hands them over: logits, here log p, and numbers of a
    distribution that change nothing. Batches become one, since a native call knows no `vmap`."""
    L, B, n, V = p_LBnV.shape
    draft = jax.tree.map(lambda x: x.reshape(L * B, *x.shape[2:]), draft)
    uniforms_Bn = uniforms_LBn.reshape(L * B, n)
    every = jnp.ones((L * B,), jnp.float32)
    as_given = Truncation(every, -jnp.inf * every, jnp.full((L * B,), V, jnp.int32), every)
    rows = LogitRows(jnp.log(p_LBnV).reshape(-1, V), as_given, draft.count + 1, native)
    noise = Noise(uniforms_Bn[:, :-1], _to_draw_by(uniforms_Bn[:, -1]))
    found = verifier.rule.verdict(draft, Target(rows=rows, tree=verifier.tree), noise)
    return jax.tree.map(lambda x: x.reshape(L, B, *x.shape[1:]), found)


def _over_batches(draw: Draw) -> Draw:
    """`draw` for `vmap`: the batches become rows of one call, since a native call knows no `vmap`."""

    @custom_vmap
    def rows(p_RV, u_RU):
        return draw(p_RV, u_RU)

    @rows.def_vmap
    def _(size, batched, p, u):
        p, u = (x if is_so else jnp.broadcast_to(x, (size, *x.shape)) for x, is_so in zip((p, u), batched))
        return draw(p.reshape(-1, p.shape[-1]), u.reshape(-1, u.shape[-1])).reshape(u.shape[:-1]), True

    return rows


def stack(cases: Sequence[Case], verifier: Verifier, *, seed: int) -> tuple[Drafts, np.ndarray, np.ndarray]:
    """Every draft of the cases, filled up to the room there is; int[N] case and float64[N] probability of each.

    All of the cases have a q, or none.
    """
    rng = np.random.default_rng([seed, 24])
    made = [(c, outcome) for c, case in enumerate(cases) for outcome in case.outcomes()]
    room = TREE_ROOM if verifier.tree else CHAIN_ROOM
    K, V, N = max(room, *(case.template.size for case in cases)), VOCAB_ROOM, len(made)
    tokens_NK = rng.integers(0, 2, (N, K), np.int32)
    parents_NK = np.tile(np.arange(-1, K - 1, dtype=np.int32), (N, 1))
    if verifier.tree:
        parents_NK = rng.integers(ROOT, np.arange(K), (N, K), np.int32)
    p_NnV, q_NKV = (rng.dirichlet(np.ones(V), (N, rows)).astype(np.float32) for rows in (K + 1, K))
    count_N = np.array([outcome.draft.count for _, outcome in made], np.int32)
    for i, (_, (_, draft, p_nV)) in enumerate(made):
        size, vocab = draft.max_nodes, p_nV.shape[1]
        tokens_NK[i, :size], parents_NK[i, :size] = draft.tokens, draft.parents
        p_NnV[i, : size + 1] = np.pad(p_nV, ((0, 0), (0, V - vocab)))
        if draft.q is not None:
            q_NKV[i, :size] = np.pad(draft.q, ((0, 0), (0, V - vocab)))
    with_q = verifier.needs_p and any(outcome.draft.q is not None for _, outcome in made)
    drafts = Drafts(Draft(tokens_NK, parents_NK, count_N, q_NKV if with_q else None), p_NnV)
    return drafts, np.array([c for c, _ in made]), np.array([outcome.weight for _, outcome in made])


def settle(driver: Driver, drafts: Drafts, *, seed: int) -> Decided:
    """The cube of uniforms of each draft, cut into boxes of one verdict; see `boxes.settle`."""
    N, n = drafts.p.shape[:2]

    def judge(index: np.ndarray) -> boxes.Verdicts:
        """The verdict of each of the drafts `index` (at most `LANES`) in one row, two sequences to a batch."""
        shape = (LANES // 2, 2)
        draft, p = jax.tree.map(lambda a: a[np.resize(index, LANES)].reshape(*shape, *a.shape[1:]), drafts)

        def verdicts(ticks_Nn):
            ticks_Ln = np.resize(ticks_Nn, (LANES, ticks_Nn.shape[1]))
            v = driver(draft, p, (ticks_Ln / STEPS).astype(np.float32).reshape(*shape, -1))
            rows = [np.asarray(a, np.int32).reshape(LANES, -1) for a in (v.tokens, v.count, v.nodes, v.failed)]
            return np.concatenate(rows, axis=1)[: index.size]

        return verdicts

    found = boxes.settle(judge, drafts=N, uniforms=n, steps=STEPS, seed=seed)
    tokens, count, nodes, failed = np.split(found.verdict, [n, n + 1, 2 * n], axis=1)
    return Decided(found.draft, found.volume(STEPS), tokens, count[:, 0], nodes, failed[:, 0])


def sound(drafts: Drafts, found: Decided) -> np.ndarray:
    """bool[N]: verdicts that the loop can commit: nodes that are a path of the draft, their tokens and one more."""
    draft = Draft(*(None if a is None else a[found.draft] for a in drafts.draft))
    K, accepted_N1 = draft.max_nodes, found.count[:, None] - 1
    on_path, emitted = np.arange(K) < accepted_N1, np.arange(K + 1) <= accepted_N1
    parent = np.pad(found.nodes, ((0, 0), (1, 0)), constant_values=ROOT)[:, :K]
    node = np.clip(found.nodes, 0, K - 1)
    real = (found.nodes == node) & (node < draft.count[:, None])
    real &= np.take_along_axis(draft.parents, node, axis=1) == parent
    real &= np.take_along_axis(draft.tokens, node, axis=1) == found.tokens[:, :K]
    right = np.where(on_path, real, found.nodes == PAD).all(axis=1)
    right &= np.where(emitted, found.tokens >= 0, found.tokens == PAD).all(axis=1)
    return right & (found.count >= 1) & (found.count <= K + 1) & (found.failed == 0)


def driver_probs(
    driver: Driver, verifier: Verifier, cases: Sequence[Case], *, seed: int
) -> list[tuple[np.ndarray, int]]:
    """The joint distribution [V] * length of one round in each case, continued by plain sampling from p, and the
    number of drafts.

    A verdict that is not `sound`, and one that was not settled, adds nothing: the distribution lacks its mass.

    Args:
        driver: what to measure.
        verifier: whose driver it is.
        cases: all with a q, or none.
        seed: of what fills the drafts up, and of the points inside the boxes.
    """
    drafts, case_N, weight_N = stack(cases, verifier, seed=seed)
    found = settle(driver, drafts, seed=seed)
    vocab_N = np.array([len(case.p[0]) for case in cases])[case_N[found.draft]]
    usable = sound(drafts, found) & (found.tokens < vocab_N[:, None]).all(axis=1)
    texts: list[list[tuple[tuple[int, ...], float]]] = [[] for _ in cases]
    for i, volume, tokens_n, count in zip(*(field[usable] for field in found[:4])):
        texts[case_N[i]].append((tuple(tokens_n[:count]), weight_N[i] * volume))
    drafts_C = np.bincount(case_N, minlength=len(cases)).tolist()
    return [(text_probs(said, case.p, case.length), n) for said, case, n in zip(texts, cases, drafts_C)]
