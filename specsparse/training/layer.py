"""One Llama layer as a function to differentiate, over texts that lie side by side, and its products.

Products are float32, or bfloat16 factors with float32 sums (mixed precision, Micikevicius et al. 2018,
arXiv:1710.03740), by the type of the weight; all else is float32. A training keeps float32 weights and differentiates
through `halved` ones. Processors with matrix units for bfloat16 (AMX, GPUs) train several times faster so, those with
AVX-512 products of it 1.3 times (a head on Zen 4); others are slower, which is what `pays` is for.
"""

import functools
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine.config import ModelConfig
from specsparse.kernels import processor
from specsparse.kernels.reference.dense import rms_norm, rotate

Precision = Literal["auto", "float32", "bfloat16"]
"""Type of a training's products; `auto` is bfloat16 if the processor has units for it."""

_NOT = -1e30
_Tree = TypeVar("_Tree")


def pays() -> bool:
    """True if bfloat16 products are faster than float32 ones here."""
    return jax.default_backend() != "cpu" or not {"amx_bf16", "avx512_bf16"}.isdisjoint(processor.cpu_info()["flags"])


def halved(weights: _Tree, precision: Precision) -> _Tree:
    """The weights with their matrices as bfloat16 if `precision` says so."""
    if precision == "float32" or (precision == "auto" and not pays()):
        return weights
    return jax.tree.map(lambda w: w.astype(jnp.bfloat16) if w.ndim > 1 else w, weights)


def times(x_RI: jax.Array, w_OI: jax.Array) -> jax.Array:
    """x w^T, float32[R, O]; a bfloat16 `w` has x rounded too, and both of their gradients made from rounded factors."""
    return _half(x_RI, w_OI) if w_OI.dtype == jnp.bfloat16 else x_RI @ w_OI.T


@jax.custom_vjp
def _half(x_RI: jax.Array, w_OI: jax.Array) -> jax.Array:
    return _dot(x_RI.astype(jnp.bfloat16), w_OI, 1)


def _half_forward(x_RI: jax.Array, w_OI: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    x = x_RI.astype(jnp.bfloat16)
    return _dot(x, w_OI, 1), (x, w_OI)


def _half_backward(kept: tuple[jax.Array, jax.Array], g_RO: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_RI, w_OI = kept
    g = g_RO.astype(jnp.bfloat16)
    return _dot(g, w_OI, 0), _dot(_transposed(g), x_RI, 0).astype(jnp.bfloat16)


_half.defvjp(_half_forward, _half_backward)


def _dot(x: jax.Array, w: jax.Array, axis: int) -> jax.Array:
    """The product over the last axis of x and `axis` of w. XLA's CPU backend has a fast product for these two and
    float32 sums."""
    return jax.lax.dot_general(x, w, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32)


def _transposed(x: jax.Array) -> jax.Array:
    """x^T in memory. XLA would make the transposition part of the product, for which its CPU backend has no fast one;
    it cannot move it out of a loop whose one turn it does not know."""
    if jax.default_backend() != "cpu":
        return x.T
    once = 1 + (x[0, 0] != x[0, 0]).astype(jnp.int32)
    return jax.lax.fori_loop(0, once, lambda _, __: x.T, jnp.zeros(x.shape[::-1], x.dtype))


class LayerWeights(NamedTuple):
    """Norms [D] and matrices [outputs, inputs] of a layer; no `ffn_` matrix if something else computes the FFN."""

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
    seen: jax.Array | np.ndarray | None = None  # bool[r], of drafted rows: whether a query sees its own; None if all do


def linear(
    x_RI: jax.Array, weights: Sequence[jax.Array], *, norm: jax.Array | None = None, eps: float = 0.0,
    biases: object = None, residual: jax.Array | None = None, act: str | None = None,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """`kernels.Kernels.linear` by the products of a training, for drafters whose functions take their products.

    No drafter that is trained has biases, or an activation other than SiLU.
    """
    assert biases is None and act in (None, "silu")
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
    """[R, heads, d], normalised if a norm [d] is given, rotated if cos and sin [R, d / 2] are."""
    x = x_RO.reshape(len(x_RO), -1, head_dim)
    x = x if norm is None else rms_norm(x, norm, eps)
    return x if cos is None or sin is None else rotate(x, cos[:, None], sin[:, None], pairing)


def attend(
    config: ModelConfig, w: LayerWeights, x_nD: jax.Array, cos: jax.Array, sin: jax.Array, sees_nn: jax.Array,
    norms: tuple[jax.Array | None, jax.Array | None] = (None, None),
) -> jax.Array:  # fmt: skip
    """x and the layer's attention over its own rows; `norms` [d] are of each head of queries and of keys."""
    eps = config.norm_eps
    q, k, v = linear(x_nD, (w.attn_q, w.attn_k, w.attn_v), norm=w.attn_norm, eps=eps)
    how = {"cos": cos, "sin": sin, "head_dim": config.head_dim, "pairing": config.rope.pairing, "eps": eps}
    k, v = split_heads(k, norm=norms[1], **how), split_heads(v, head_dim=config.head_dim)
    base = Keys(k.swapaxes(0, 1), v.swapaxes(0, 1))
    return x_nD + times(attention(split_heads(q, norm=norms[0], **how), base, sees_nn), w.attn_output)


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
        own = [Keys(x.k[g], x.v[g], x.seen) for x in drafted]
        heads.append(_one_head(q_mHd[:, h], base.k[g], base.v[g], bias_mn, own))
    return jnp.concatenate(heads, axis=-1)


def _one_head(q_md, k_nd, v_nd, bias_mn, drafted: list[Keys]) -> jax.Array:
    """[m, d]: one head. Plain products, head by head: on a CPU XLA takes a third longer for batched ones."""
    s_mn = times(q_md, k_nd) + bias_mn
    own = [jnp.sum(q_md * key.k, axis=-1) for key in drafted]
    own = [s if key.seen is None else jnp.where(key.seen, s, _NOT) for key, s in zip(drafted, own, strict=True)]
    top = jax.lax.stop_gradient(functools.reduce(jnp.maximum, own, s_mn.max(axis=-1)))
    e_mn = jnp.exp(s_mn - top[:, None])
    out, total = times(e_mn, v_nd.T), e_mn.sum(axis=-1)
    for key, s_m in zip(drafted, own, strict=True):
        e_m = jnp.exp(s_m - top)
        out, total = out + e_m[:, None] * key.v, total + e_m
    return out / total[:, None]  # divided last: d divisions a row, not n


def feed_forward(config: ModelConfig, w: LayerWeights, x_mD: jax.Array) -> jax.Array:
    assert w.ffn_gate is not None and w.ffn_up is not None and w.ffn_down is not None
    z = rms_norm(x_mD, w.ffn_norm, config.norm_eps)
    return x_mD + times(jax.nn.silu(times(z, w.ffn_gate)) * times(z, w.ffn_up), w.ffn_down)
