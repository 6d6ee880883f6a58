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


class HeadNorms(NamedTuple):
    """RMS norms [d] of each head of queries and of keys, before they are rotated."""

    q: jax.Array
    k: jax.Array


class Keys(NamedTuple):
    """Keys and values of some rows: [G, r, d] each."""

    k: jax.Array
    v: jax.Array


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) * weight over the last axis."""
    weight = weight.reshape((1,) * (x.ndim - 1) + weight.shape)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + jnp.float32(eps)) * weight


def linear(
    x_RI: jax.Array, weights: Sequence[jax.Array], *, norm: jax.Array | None = None, eps: float = 0.0,
    biases: object = None, residual: jax.Array | None = None, act: str | None = None,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """`kernels.api.Kernels.linear` by the products of a training, for drafters whose functions take their products.

    Raises:
        ValueError: biases, or an activation other than SiLU: no drafter that is trained has them.
    """
    if biases is not None or act not in (None, "silu"):
        raise ValueError("training has products without biases, and SiLU")
    if norm is not None:
        x_RI = rms_norm(x_RI, norm, eps)
    outs = tuple(times(x_RI, w) for w in weights)
    if act is not None:
        outs = (jax.nn.silu(outs[0]) * outs[1],)
    return outs if residual is None else tuple(residual + y for y in outs)


def split_heads(
    x_RO: jax.Array, cos: jax.Array | None = None, sin: jax.Array | None = None, *, head_dim: int,
    pairing: str = "norm", norm: jax.Array | None = None, eps: float = 0.0,
) -> jax.Array:  # fmt: skip
    """[R, heads, d], normalised where a norm [d] is given, rotated where cos and sin [R, d / 2] are."""
    x = x_RO.reshape(len(x_RO), -1, head_dim)
    x = x if norm is None else rms_norm(x, norm, eps)
    return x if cos is None or sin is None else rotate(x, cos[:, None], sin[:, None], pairing)


def whole(
    config: ModelConfig, w: LayerWeights, x_nD: jax.Array, cos: jax.Array, sin: jax.Array, sees_nn: jax.Array,
    norms: HeadNorms | None = None,
) -> jax.Array:  # fmt: skip
    """x and the layer's attention over its own rows."""
    eps = config.norm_eps
    q, k, v = linear(x_nD, (w.attn_q, w.attn_k, w.attn_v), norm=w.attn_norm, eps=eps)
    how = {"cos": cos, "sin": sin, "head_dim": config.head_dim, "pairing": config.rope.pairing, "eps": eps}
    of_q, of_k = (None, None) if norms is None else norms
    base = Keys(
        split_heads(k, norm=of_k, **how).swapaxes(0, 1), split_heads(v, head_dim=config.head_dim).swapaxes(0, 1)
    )
    return x_nD + times(attention(split_heads(q, norm=of_q, **how), base, sees_nn), w.attn_output)


def attention(q_mHd: jax.Array, base: Keys, seen_mn: jax.Array, drafted: Sequence[Keys] = ()) -> jax.Array:
    """[m, H d]: each query over the rows of `base` that it sees, and over its own row of each of `drafted`.

    Its products are bfloat16 where `base` is.
    """
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


def feed_forward(config: ModelConfig, w: LayerWeights, x_mD: jax.Array) -> jax.Array:
    """x and its feed-forward part."""
    z = rms_norm(x_mD, w.ffn_norm, config.norm_eps)
    return x_mD + times(jax.nn.silu(times(z, w.ffn_gate)) * times(z, w.ffn_up), w.ffn_down)
