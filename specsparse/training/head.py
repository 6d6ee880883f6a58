"""The head as a function to differentiate: all drafted positions of a window at once.

A head reads the target's row h_i and the token after it and says what the target's row i + 1 will be (EAGLE, Li et
al., arXiv:2401.15077). When it drafts on, it reads its own output in place of h; `training.unroll` does so.

As EAGLE-3 does, it may read rows of further layers of the target beside h_i, and its own output by a matrix of its own.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specsparse.engine.config import ModelConfig
from specsparse.speculative.drafters.heads.eagle3_head import HeadRows
from specsparse.training import unroll
from specsparse.training.layer import LayerWeights, feed_forward, linear, rms_norm
from specsparse.training.products import times
from specsparse.training.unroll import Frozen, Window


class HeadWeights(NamedTuple):
    """Matrices are [outputs, inputs].

    Attributes:
        hidden_norm: [D], RMS norm of h_i.
        fc_hidden: [D, D], of normalised h_i.
        token_norm, fc_token: likewise, of the token after it.
        below_norm: [b, D], RMS norms of the rows of b layers below, none for a head that reads h_i alone.
        fc_below: [D, b D], of those rows, normalised, side by side.
        own_norm, fc_own: in place of `hidden_norm` and `fc_hidden` where the head reads its own row; None: the same.
        layer: a plain Llama's of the target's sizes.
        output_norm: [D], before the output matrix, which is the target's.
    """

    hidden_norm: jax.Array
    fc_hidden: jax.Array
    token_norm: jax.Array
    fc_token: jax.Array
    layer: LayerWeights
    output_norm: jax.Array
    below_norm: jax.Array | None = None
    fc_below: jax.Array | None = None
    own_norm: jax.Array | None = None
    fc_own: jax.Array | None = None


def streams(
    config: ModelConfig, weights: HeadWeights, frozen: Frozen, embedded_nD: jax.Array, window: Window, count: int
) -> list[jax.Array]:
    """[m, D] for each of `count` streams, as `unroll.streams`: the head's rows before the output norm."""
    eps = config.norm_eps
    told_nD = times(rms_norm(embedded_nD, weights.token_norm, eps), weights.fc_token)
    own_norm = weights.hidden_norm if weights.own_norm is None else weights.own_norm
    fc_own = weights.fc_hidden if weights.fc_own is None else weights.fc_own

    layer = weights.layer

    def enter(x_RD: jax.Array) -> HeadRows:
        q, k, v = linear(x_RD, (layer.attn_q, layer.attn_k, layer.attn_v), norm=layer.attn_norm, eps=eps)
        return HeadRows(q, k, v, x_RD)

    def again(y_mD: jax.Array) -> HeadRows:
        return enter(told_nD[window.rows] + times(rms_norm(y_mD, own_norm, eps), fc_own))

    def leave(attended: jax.Array, residual_mD: jax.Array) -> jax.Array:
        return feed_forward(config, layer, residual_mD + times(attended, layer.attn_output))

    first = enter(told_nD + _features(config, weights, window.hidden))
    how = {"head_dim": config.head_dim, "pairing": config.rope.pairing}
    return unroll.streams(frozen, window, first, again, leave, count, **how)


def _features(config: ModelConfig, w: HeadWeights, hidden_nW: jax.Array) -> jax.Array:
    """[n, D]: what the head makes of the target's rows."""
    D, n = config.d_model, len(hidden_nW)
    x_nD = times(rms_norm(hidden_nW[:, -D:], w.hidden_norm, config.norm_eps), w.fc_hidden)
    if w.below_norm is None or w.fc_below is None:
        return x_nD
    below_nbD = hidden_nW[:, :-D].reshape(n, -1, D)
    below_nbD = below_nbD * jax.lax.rsqrt(jnp.mean(below_nbD**2, axis=-1, keepdims=True) + jnp.float32(config.norm_eps))
    return x_nD + times((below_nbD * w.below_norm[None]).reshape(n, -1), w.fc_below)


def logits(config: ModelConfig, weights: HeadWeights, frozen: Frozen, y_mD: jax.Array) -> jax.Array:
    """float32[m, N] over the draft vocabulary."""
    return times(rms_norm(y_mD, weights.output_norm, config.norm_eps), frozen.head)
