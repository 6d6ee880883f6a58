"""One Llama layer as a function to differentiate, over texts that lie side by side.

The type of the matrices is that of the products, see `training.products`; all else is float32.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine.config import ModelConfig
from specsparse.kernels.reference.dense import rotate
from specsparse.training.products import times

_NOT = -1e30


class LayerWeights(NamedTuple):
    """Norms [D] and matrices [outputs, inputs] of a layer; no `ffn_` matrix where something else computes the FFN."""

    attn_norm: jax.Array
    attn_q: jax.Array
    attn_k: jax.Array
    attn_v: jax.Array
    attn_output: jax.Array
    ffn_norm: jax.Array
    ffn_gate: jax.Array | None = None
    ffn_up: jax.Array | None = None
    ffn_down: jax.Array | None = None


def layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of a layer's weights by name, in the order of `LayerWeights`."""
    D, F, q, kv = config.d_model, config.d_ff, config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    shapes = ((D,), (q, D), (kv, D), (kv, D), (D, q), (D,), (F, D), (F, D), (D, F))
    return dict(zip(LayerWeights._fields, shapes, strict=True))


class Keys(NamedTuple):
    """Keys and values of some rows: [G, r, d] each."""

    k: jax.Array
    v: jax.Array


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) * weight over the last axis."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + jnp.float32(eps)) * _wide(weight, x)


def _wide(weight: jax.Array, x: jax.Array) -> jax.Array:
    return weight.reshape((1,) * (x.ndim - 1) + weight.shape)


def _heads(config: ModelConfig, x_RO: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    x = x_RO.reshape(x_RO.shape[0], -1, config.head_dim)
    return rotate(x, cos[:, None], sin[:, None], config.rope.pairing)


def keys(config: ModelConfig, w: LayerWeights, z_RI: jax.Array, cos: jax.Array, sin: jax.Array) -> Keys:
    """Keys, rotated, and values of rows as the layer's norm leaves them."""
    k = _heads(config, times(z_RI, w.attn_k), cos, sin)
    v = times(z_RI, w.attn_v).reshape(len(z_RI), -1, config.head_dim)
    return Keys(k.swapaxes(0, 1), v.swapaxes(0, 1))


def attend(
    config: ModelConfig, w: LayerWeights, x_mD: jax.Array, z_mI: jax.Array, cos: jax.Array, sin: jax.Array,
    base: Keys, seen_mn: jax.Array, drafted: Sequence[Keys] = (),
) -> jax.Array:  # fmt: skip
    """x and the attention of its rows z as the layer's norm leaves them: see `attention`."""
    q_mHd = _heads(config, times(z_mI, w.attn_q), cos, sin)
    base = Keys(*(a.astype(w.attn_k.dtype) for a in base))
    return x_mD + times(attention(q_mHd, base, seen_mn, drafted), w.attn_output)


def attention(q_mHd: jax.Array, base: Keys, seen_mn: jax.Array, drafted: Sequence[Keys] = ()) -> jax.Array:
    """[m, H d]: each query over the rows of `base` that it sees, and over its own row of each of `drafted`."""
    _, H, d = q_mHd.shape
    q_mHd, per = q_mHd * (1.0 / float(np.sqrt(d))), H // len(base.k)
    bias_mn = jnp.where(seen_mn, 0.0, _NOT)
    heads = []
    for h in range(H):
        g = h // per
        heads.append(_one_head(q_mHd[:, h], base.k[g], base.v[g], bias_mn, [Keys(x.k[g], x.v[g]) for x in drafted]))
    return jnp.concatenate(heads, axis=-1)


def _one_head(q_md, k_nd, v_nd, bias_mn, drafted: list[Keys]) -> jax.Array:
    """[m, d]: one head. Plain products, head by head: on a CPU XLA takes a third longer for batched ones."""
    s_mn = times(q_md, k_nd) + bias_mn
    own = [jnp.sum(q_md * key.k, axis=-1) for key in drafted]
    top = jax.lax.stop_gradient(functools.reduce(jnp.maximum, own, s_mn.max(axis=-1)))
    e_mn = jnp.exp(s_mn - top[:, None])
    out, total = times(e_mn, v_nd.T), e_mn.sum(axis=-1)
    for key, s_m in zip(drafted, own, strict=True):
        e_m = jnp.exp(s_m - top)
        out, total = out + e_m[:, None] * key.v, total + e_m
    return out / total[:, None]  # divided last: d divisions a row, not n


def whole(
    config: ModelConfig, w: LayerWeights, x_nD: jax.Array, cos: jax.Array, sin: jax.Array, sees_nn: jax.Array
) -> jax.Array:
    """x and the layer's attention over its own rows."""
    z_nD = rms_norm(x_nD, w.attn_norm, config.norm_eps)
    return attend(config, w, x_nD, z_nD, cos, sin, keys(config, w, z_nD, cos, sin), sees_nn)


def feed_forward(config: ModelConfig, w: LayerWeights, x_mD: jax.Array) -> jax.Array:
    """x and its feed-forward part."""
    z = rms_norm(x_mD, w.ffn_norm, config.norm_eps)
    return x_mD + times(jax.nn.silu(times(z, w.ffn_gate)) * times(z, w.ffn_up), w.ffn_down)
