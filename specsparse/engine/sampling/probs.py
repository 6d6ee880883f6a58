"""Distributions of single rows: argmax, truncated softmax and inverse-CDF draw, with a fixed order of additions.

Other implementations of the same definitions may replace those of `REFERENCE` here. Contract C1 asks that a row's
result does not depend on the other rows. XLA may split a float reduction as it likes, so none is used here: sums are
spelled out as elementwise additions (`block_sums`, `_pair_levels`), and all other reductions (maximum, counts, argmax)
are exact in any order. The vocabulary is never sorted: top-k and top-p search a threshold bit by bit.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine.sampling.params import Truncation

BLOCK = 256
"""Tokens of one block of a sum."""
_LOWEST = np.float32(-np.inf)


class SamplingKernels(NamedTuple):
    """Implementations under `engine.sampling.pipeline`. The last four are None if the kernels do not have them."""

    # (logits float32[R, V]) -> int32[R], the lowest index of the largest logit
    argmax: Callable[[jax.Array], jax.Array]
    # (logits float32[R, V], Truncation, **steps) -> float32[R, V], see `reference_probs`; may ignore `steps`
    probs: Callable[..., jax.Array]
    # (p float32[R, V], u float32[R, 4]) -> int32[R], see `reference_draw`
    draw: Callable[[jax.Array, jax.Array], jax.Array]
    # (logits float32[R, V]) -> bool[R], whether a row has neither NaN nor +inf and a token left. With it, raw logits
    # are not cleaned first: `argmax`, `probs` and `draw` must then stay inside the vocabulary for any row
    check: Callable[[jax.Array], jax.Array] | None = None
    # (logits float32[R, V], Truncation of B sequences, n_valid int32[B], u float32[R, 4] or None if all are greedy,
    # tokens int32[R] or None) -> (int32[R], bool[R], float32[R]): the token that `draw` draws from `probs`, the result
    # of `check`, and the probability of `tokens`, of rows i < n_valid[b] of each sequence. The others are 0, true, 0
    # and take no time
    sample: Callable[..., tuple[jax.Array, jax.Array, jax.Array]] | None = None
    # (logits float32[R, N], Truncation of the rows or of one for all, u float32[R, 4], ids int32[N] or None, V) ->
    # (int32[R], bool[R], float32[R, V]): the column that `draw` draws from `probs`, the result of `check`, and the
    # distribution over V tokens, in which column i is token ids[i], or i
    propose: Callable[..., tuple[jax.Array, jax.Array, jax.Array]] | None = None
    # (rows float32[R, V], Truncation of B sequences or None, n_valid int32[B], tokens int32[B, K], parents int32[B, K]
    # or None for chains, q float32[B, K, V] or None, coins float32[B, K], u float32[B, 4], *, whole) ->
    # (int32[B, K], int32[B], int32[B], int32[B], bool[B], float32[B, K]): the verdict of `speculative.verify` on chains
    # by `Block` if `whole`, else on chains or trees by `Rejection`: the accepted nodes, their number, positions tested,
    # the token after them, whether that has no distribution, alpha of each position (0 but of chains by `Rejection`).
    # The rows are logits, K + 1 of a sequence, or distributions if the truncation is None
    judge: Callable[..., tuple[jax.Array, ...]] | None = None


def block_sums(x_RV: jax.Array) -> jax.Array:
    """Sums of `BLOCK` neighbours, float32[R, ceil(V / BLOCK)]: lane i adds lane i + 128, then i + 64, and so on."""
    R, V = x_RV.shape
    blocks = -(-V // BLOCK)
    x = jnp.pad(x_RV, ((0, 0), (0, blocks * BLOCK - V))).reshape(R, blocks, BLOCK)
    width = BLOCK
    while width > 1:
        width //= 2
        x = x[..., :width] + x[..., width:]
    return x[..., 0]


def _pair_levels(x_Rm: jax.Array) -> list[jax.Array]:
    """The tree of sums of neighbouring pairs, leaves (padded by zeros to a power of two) first, root [R, 1] last."""
    m = x_Rm.shape[1]
    levels = [jnp.pad(x_Rm, ((0, 0), (0, (1 << (m - 1).bit_length()) - m)))]
    while levels[-1].shape[1] > 1:
        levels.append(levels[-1][:, 0::2] + levels[-1][:, 1::2])
    return levels


def mass(x_RV: jax.Array) -> jax.Array:
    """Row sums float32[R]: inside blocks, then pairs of blocks.

    Additions of non-negative numbers in a fixed tree are monotone, rounding included: a larger set never has less mass.
    """
    return _pair_levels(block_sums(x_RV))[-1][:, 0]


def ordered_bits(x: jax.Array) -> jax.Array:
    """uint32 image of float32 numbers in the same order (NaN excluded); both zeros have one image."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0.0, jnp.float32(0.0), x), jnp.uint32)
    sign = np.uint32(0x80000000)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _highest_threshold(enough: Callable[[jax.Array], jax.Array], rows: int) -> jax.Array:
    """The largest uint32[R] t for which `enough(t)` holds; `enough` holds for 0 and is monotone."""

    def set_bit(step, t_R):
        candidate_R = t_R | (np.uint32(1) << (31 - step).astype(jnp.uint32))
        return jnp.where(enough(candidate_R), candidate_R, t_R)

    return jax.lax.fori_loop(0, 32, set_bit, jnp.zeros((rows,), jnp.uint32))


def reference_argmax(logits_RV: jax.Array) -> jax.Array:
    """int32[R], the lowest index of the largest logit; 0 if every logit is -inf. NaN is not allowed."""
    return jnp.argmax(logits_RV, axis=1).astype(jnp.int32)


def ranked(kernels: SamplingKernels, logits_RV: jax.Array, count: int) -> jax.Array:
    """The most likely tokens in order, int32[R, count], equal ones by index; by `count` passes, not by a sort."""
    if count == 1:
        return kernels.argmax(logits_RV)[:, None]
    row_R = jnp.arange(logits_RV.shape[0], dtype=jnp.int32)

    def step(i, carry):
        x_RV, found = carry
        token_R = kernels.argmax(x_RV)
        return x_RV.at[row_R, token_R].set(_LOWEST), found.at[:, i].set(token_R)

    empty = jnp.zeros((logits_RV.shape[0], count), jnp.int32)
    return jax.lax.fori_loop(0, count, step, (logits_RV, empty))[1]


def one_hot(token_R: jax.Array, vocab_size: int) -> jax.Array:
    """float32[R, V], all mass on one token of each row."""
    return (token_R[:, None] == jnp.arange(vocab_size, dtype=jnp.int32)[None]).astype(jnp.float32)


def reference_probs(
    logits_RV: jax.Array,
    rows: Truncation,
    *,
    greedy: bool = True,
    min_p: bool = True,
    top_k: bool = True,
    top_p: bool = True,
) -> jax.Array:
    """Distribution of each row after temperature, min-p, top-k and top-p in this order, normalised: float32[R, V].

    With z = (x - max x) / temperature and e = exp(z): min-p keeps z >= log min_p; top-k keeps the tokens that are not
    below the top_k-th largest logit x among those; top-p keeps the smallest set of largest x whose weight e is at least
    top_p times the weight that was left. Equal logits are kept or dropped together. p = e / mass(e) for kept tokens,
    else 0. A row of temperature 0 is the one-hot distribution of its argmax, and so is a row of only -inf (token 0).

    Args:
        logits_RV: float32, finite or -inf.
        rows: temperature and truncation of each row.
        greedy, min_p, top_k, top_p: False if no row uses the step (it is then left out).
    """
    V = logits_RV.shape[1]
    top_R = jnp.max(logits_RV, axis=1)
    alive_R = top_R > _LOWEST
    cold_R = rows.temperature <= 0.0
    scale_R = jnp.where(cold_R, jnp.float32(1.0), rows.temperature)
    z_RV = (logits_RV - jnp.where(alive_R, top_R, jnp.float32(0.0))[:, None]) / scale_R[:, None]
    keep_RV = logits_RV > _LOWEST
    if min_p:
        keep_RV &= z_RV >= rows.log_min_p[:, None]
    key_RV = ordered_bits(logits_RV)
    if top_k:
        kept_RV = keep_RV

        def many_enough(t_R):
            return jnp.sum((kept_RV & (key_RV >= t_R[:, None])).astype(jnp.int32), axis=1) >= rows.top_k

        keep_RV = kept_RV & (key_RV >= _highest_threshold(many_enough, len(key_RV))[:, None])
    # The select also keeps a compiler from fusing the last product of exp with the additions below.
    e_RV = jnp.where(keep_RV, jnp.exp(z_RV), jnp.float32(0.0))
    if top_p:
        fill = ((0, 0), (0, -V % BLOCK))  # once here, or every step of the search would do it
        padded_key_RV, weight_RV = jnp.pad(key_RV, fill), jnp.pad(e_RV, fill)
        # The largest weight is 1, so that it reaches the share also where the product underflows.
        wanted_R = jnp.maximum(rows.top_p * mass(weight_RV), jnp.float32(1e-30))

        def heavy_enough(t_R):
            return mass(jnp.where(padded_key_RV >= t_R[:, None], weight_RV, jnp.float32(0.0))) >= wanted_R

        t_R = _highest_threshold(heavy_enough, len(key_RV))
        keep_RV = keep_RV & ((key_RV >= t_R[:, None]) | (rows.top_p >= 1.0)[:, None])
        e_RV = jnp.where(keep_RV, e_RV, jnp.float32(0.0))
    total_R = jnp.where(alive_R, mass(e_RV), jnp.float32(1.0))
    p_RV = e_RV / total_R[:, None]
    point_R = ~alive_R | cold_R if greedy else ~alive_R
    return jnp.where(point_R[:, None], one_hot(reference_argmax(logits_RV), V), p_RV)


def _descend(levels: list[jax.Array], near_R: jax.Array, far_R: jax.Array) -> jax.Array:
    """Leaf int32[R] that two uniforms choose: `far` decides the upper half of the levels, `near` the lower.

    A leaf of sum 0 is never reached unless all are 0.
    """
    leaves = levels[0].shape[1]
    depth = leaves.bit_length() - 1
    # As a heap: node i has the children 2i and 2i + 1, the root is 1. A loop, since XLA takes seconds to compile the
    # unrolled descent.
    heap = jnp.concatenate([jnp.zeros_like(levels[-1]), *reversed(levels)], axis=1)

    def step(i, state):
        node_R, t_R = state
        sum_R = jnp.take_along_axis(heap, node_R[:, None], axis=1)[:, 0]
        t_R = jnp.where(i == 0, far_R * sum_R, t_R)
        t_R = jnp.where(i == depth // 2, near_R * sum_R, t_R)  # anew, with all the bits that a uniform has
        pair_R2 = jnp.take_along_axis(heap, 2 * node_R[:, None] + jnp.arange(2, dtype=jnp.int32)[None], axis=1)
        left_R, right_R = pair_R2[:, 0], pair_R2[:, 1]
        go_right_R = (t_R >= left_R) & (right_R > 0.0)  # rounding may leave t beyond the last token that counts
        return 2 * node_R + go_right_R.astype(jnp.int32), jnp.where(go_right_R, t_R - left_R, t_R)

    start = (jnp.ones(near_R.shape, jnp.int32), jnp.zeros_like(near_R))
    return jax.lax.fori_loop(0, depth, step, start)[0] - leaves


def reference_draw(p_RV: jax.Array, u_RU: jax.Array) -> jax.Array:
    """Token of each row by inverse CDF in vocabulary order: int32[R], consumes four uniforms in [0, 1) of the row.

    A uniform of 24 bits cannot tell 151,936 tokens apart. So the tree of sums is descended in four parts, each by a
    uniform of its own, t = u * sum of the node: the upper and the lower half of the levels over blocks (u[3], u[2]),
    then groups of 16 tokens in the block (u[1]), then the token (u[0], all that up to 16 tokens need). A part chooses
    among at most 32 nodes in vocabularies of up to 2^18 tokens. So the probability of a token is off by a few 2^-24 of
    its group's, not of the row's.

    A row need not be normalised. A number that is not above 0 (NaN too) counts as 0 and is never drawn. A row of zeros
    gives token 0.
    """
    V = p_RV.shape[1]
    p_RV = jnp.where(p_RV > 0.0, p_RV, jnp.float32(0.0))
    block_R = _descend(_pair_levels(block_sums(p_RV)), u_RU[:, 2], u_RU[:, 3])
    column_RB = block_R[:, None] * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)[None]
    inside_RB = jnp.take_along_axis(p_RV, jnp.minimum(column_RB, V - 1), axis=1)
    inside_RB = jnp.where(column_RB < V, inside_RB, jnp.float32(0.0))
    return block_R * BLOCK + _descend(_pair_levels(inside_RB), u_RU[:, 0], u_RU[:, 1])


REFERENCE = SamplingKernels(reference_argmax, reference_probs, reference_draw)
"""Plain jax: the oracle and the fallback."""
