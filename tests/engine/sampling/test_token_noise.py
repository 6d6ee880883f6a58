"""The distribution that a draw really has: its uniforms have 24 bits, so their grid is counted, not sampled."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine.sampling import probs
from specsparse.engine.sampling.probs import BLOCK, REFERENCE
from specsparse.kernels.native import cpu

VOCAB, STEPS = 151_936, 2**24
TAIL = 7e-9


def uniforms(ticks):
    return jnp.asarray(ticks).astype(jnp.float32) * np.float32(1 / STEPS)


@jax.jit
def leaves(sums_Gm, near_TG, far_TG):
    """The leaf int32[T, G] that the engine's descent reaches in each of G trees, by pairs of ticks."""
    descend = functools.partial(probs._descend, probs._pair_levels(sums_Gm))
    return jax.vmap(descend)(uniforms(near_TG), uniforms(far_TG))


def first_ticks(reached, wanted):
    """The least tick from which on `reached(ticks)` is at least `wanted`, of its shape; STEPS where it never is."""
    low, high = np.zeros(wanted.shape, np.int32), np.full(wanted.shape, STEPS, np.int32)
    while (low < high).any():
        middle = (low + high) // 2
        there = np.asarray(reached(np.minimum(middle, STEPS - 1))) >= wanted
        low, high = np.where(there | (low == high), low, middle + 1), np.where(there, middle, high)
    return low


def parts(sums_Gm):
    """Of each leaf, the first tick and the number of ticks of the near and of the far uniform: int[2, G, m, 2]."""
    G, m = sums_Gm.shape
    lower = m >> (m.bit_length() - 1) // 2
    leaf_mG = np.repeat(np.arange(m, dtype=np.int32)[:, None], G, axis=1)
    far = first_ticks(lambda t: leaves(sums_Gm, 0 * t, t) // lower, leaf_mG // lower)
    near = first_ticks(lambda t: leaves(sums_Gm, t, np.minimum(far, STEPS - 1)), leaf_mG)
    near_count = np.diff(near.reshape(-1, lower, G), axis=1, append=STEPS).reshape(m, G)
    far_count = np.diff(far[::lower], axis=0, append=STEPS).repeat(lower, axis=0)
    return np.stack([np.stack([near, far]), np.stack([near_count, far_count])]).transpose(0, 3, 2, 1)


def grid(p_V):
    """int[V, 4], the first tick of each uniform that draws a token, and float64[V], what `reference_draw` follows."""
    inside = np.pad(p_V, (0, -len(p_V) % BLOCK)).reshape(-1, BLOCK)
    sums = probs._pair_levels(probs.block_sums(p_V[None]))[0]
    blocks = parts(np.asarray(sums))[:, 0, : len(inside), None].repeat(BLOCK, axis=2)
    alike, which = np.unique(inside, axis=0, return_inverse=True)
    alike = np.resize(alike, (4, BLOCK))  # one shape, so that one program serves all
    both = np.concatenate([parts(alike)[:, which.reshape(-1)], blocks], axis=-1).reshape(2, -1, 4)[:, : len(p_V)]
    return both[0], (both[1] / STEPS).prod(axis=-1)


@functools.cache
def with_tail():
    """A distribution of three likely tokens, and 7e-9 for every other one; which these are; its grid."""
    p = np.full(VOCAB, TAIL, np.float32)
    is_tail = np.ones(VOCAB, bool)
    is_tail[[5, VOCAB // 2, VOCAB - 7]] = False
    p[~is_tail] = (1 - TAIL * is_tail.sum()) / 3
    return p, is_tail, *grid(p)


def total_variation(probs, p):
    return np.abs(probs - p.astype(np.float64) / p.sum(dtype=np.float64)).sum() / 2


def test_noise_is_fine_enough_for_a_flat_distribution():
    p = np.full(VOCAB, 1 / VOCAB, np.float32)
    _, probs = grid(p)
    assert abs(probs.sum() - 1) < 1e-12
    assert total_variation(probs, p) < 1e-6  # 2.2e-3 by one uniform
    assert np.abs(probs * VOCAB - 1).max() < 1e-5


def test_noise_reaches_a_tail():
    p, is_tail, _, probs = with_tail()
    assert total_variation(probs, p) < 2e-6
    assert abs(probs[is_tail].mean() / TAIL - 1) < 1e-3
    # Only tokens that share a block with a likely one may be off, and only those of its group of 16 may never come.
    block, group = (np.isin(ids, ids[~is_tail]) for ids in (np.arange(VOCAB) // BLOCK, np.arange(VOCAB) // 16))
    assert np.abs(probs[~block] / TAIL - 1).max() < 0.1
    assert (probs[~group] > 0).all()


def test_native_noise_draws_the_same_tail_token():
    """At the very edges of the grid, and one tick of one uniform below them."""
    p, is_tail, first, probs = with_tail()
    rng = np.random.default_rng(0)
    heads = np.flatnonzero(~is_tail)
    token = np.concatenate([rng.choice(VOCAB, 40), heads, heads ^ 20, [0, VOCAB - 1]])
    token = token[probs[token] > 0]
    ticks = first[token]
    below = np.maximum(ticks - np.eye(4, dtype=ticks.dtype)[rng.integers(0, 4, len(ticks))], 0)
    rows = np.broadcast_to(p, (len(token), VOCAB))
    native, reference = jax.jit(cpu.draw), jax.jit(REFERENCE.draw)
    np.testing.assert_array_equal(native(rows, uniforms(ticks)), token)
    np.testing.assert_array_equal(reference(rows, uniforms(ticks)), token)
    np.testing.assert_array_equal(native(rows, uniforms(below)), reference(rows, uniforms(below)))
