"""The blocks of a DFlash drafter (arXiv:2602.06036) at many places of texts at once: what is trained.

The layers are those that decode (`speculative.drafters.heads.dflash_block`), with the products of training.
"""

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.speculative.drafters.heads.dflash_block import (
    BlockKeys,
    BlockShape,
    BlockWeights,
    block_rows,
    context_keys,
    sees_block,
    sees_context,
)
from specsparse.training.layer import Keys, attention, linear


def blocks(
    shape: BlockShape, w: BlockWeights, features_nE: jax.Array, position_n: jax.Array, embedded_mKD: jax.Array,
    at_m: jax.Array, seen_mn: jax.Array, tables: tuple[jax.Array, ...],
) -> tuple[jax.Array, list[jax.Array]]:  # fmt: skip
    """Blocks at many places of texts at once: f32[m, K, D] before the output norm, and what attention found by layer.

    Args:
        shape: of the drafter.
        w: its weights, float32 or halved.
        features_nE: f32[n, len(read) D], the target's rows.
        position_n: int32[n], of each in its text.
        embedded_mKD: the embedded blocks.
        at_m: int32[m], positions at which they begin.
        seen_mn: bool[m, n], rows of the target that stand before a block in its text.
        tables: cos and sin f32[positions, d/2].
    """
    cos, sin = tables
    m, K, D = embedded_mKD.shape
    context = context_keys(linear, shape, w, features_nE, cos[position_n], sin[position_n])
    at_mK = at_m[:, None] + jnp.arange(K, dtype=jnp.int32)[None]
    found = []

    def attend(i: int, q_RHd: jax.Array, own: BlockKeys) -> jax.Array:
        window = shape.windows[i]
        base = Keys(*(a.swapaxes(0, 1) for a in context[i]))
        k, v = (a.reshape(m, K, *a.shape[1:]) for a in own)
        each = [Keys(k[:, j].swapaxes(0, 1), v[:, j].swapaxes(0, 1)) for j in range(K)]
        q_mKHd = q_RHd.reshape(m, K, *q_RHd.shape[1:])
        with jax.ensure_compile_time_eval():
            block = np.asarray(sees_block(shape.causal[i], window, K))
        out = []
        for s in range(K):
            seen = seen_mn & sees_context(window, at_mK[:, s], position_n)
            out.append(attention(q_mKHd[:, s], base, seen, [key for j, key in enumerate(each) if block[s, j]]))
        found.append(jnp.stack(out, axis=1))
        return found[-1].reshape(m * K, -1)

    at_R = at_mK.reshape(-1)
    y_RD = block_rows(linear, shape, w, embedded_mKD.reshape(m * K, D), cos[at_R], sin[at_R], attend)
    return y_RD.reshape(m, K, D), found
