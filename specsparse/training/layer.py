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


def keys(config: ModelConfig, w: LayerWeights, x_RD: jax.Array, cos: jax.Array, sin: jax.Array) -> Keys:
    """Keys, rotated, and values of rows before the layer's norm."""
    z = rms_norm(x_RD, w.attn_norm, config.norm_eps)
    k = _heads(config, times(z, w.attn_k), cos, sin)
    v = times(z, w.attn_v).reshape(len(z), -1, config.head_dim)
    return Keys(k.swapaxes(0, 1), v.swapaxes(0, 1))


def attend(
    config: ModelConfig, w: LayerWeights, x_mD: jax.Array, cos: jax.Array, sin: jax.Array,
    base: Keys, seen_mn: jax.Array, drafted: Sequence[Keys] = (),
) -> jax.Array:  # fmt: skip
    """x and its attention: each row over the rows of `base` that it sees, and over its own row of each of `drafted`."""
    z = rms_norm(x_mD, w.attn_norm, config.norm_eps)
    q = _heads(config, times(z, w.attn_q), cos, sin) * (1.0 / float(np.sqrt(config.head_dim)))
    bias_mn = jnp.where(seen_mn, 0.0, _NOT)
    per = config.n_heads // config.n_kv_heads
    heads = []
    for h in range(config.n_heads):
        g = h // per
        own = [Keys(x.k[g], x.v[g]) for x in drafted]
        heads.append(_one_head(q[:, h], *(a[g].astype(w.attn_k.dtype) for a in base), bias_mn, own))
    return x_mD + times(jnp.concatenate(heads, axis=-1), w.attn_output)


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


def feed_forward(config: ModelConfig, w: LayerWeights, x_mD: jax.Array) -> jax.Array:
    """x and its feed-forward part."""
    z = rms_norm(x_mD, w.ffn_norm, config.norm_eps)
    return x_mD + times(jax.nn.silu(times(z, w.ffn_gate)) * times(z, w.ffn_up), w.ffn_down)
