"""The DFlash drafter as functions: keys and values of the context, and a block of rows over them (arXiv:2602.06036).

A layer is one of Qwen3. Its keys and values are projections of two kinds of rows: the target's features of the context,
fused by one matrix, and the block's own rows [last token, mask, mask, ...]; its queries are of the block only. So the
context is read once, and the whole block is drafted in one pass.

The products are an argument, `kernels.api.Kernels.linear` or `training.layer.linear`, so that the same lines decode
with quantised weights and are differentiated in float32 (`training.dflash_form`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specsparse.kernels import QTensor
from specsparse.kernels.reference.dense import rotate
from specsparse.speculative.drafters.heads.layer_shape import LayerShape

_HIGHEST = jax.lax.Precision.HIGHEST
_NOT = -1e30

Linear = Callable[..., tuple[jax.Array, ...]]
"""(x f32[R, I], matrices, *, norm, eps, residual, act) -> f32[R, O] of each, as `kernels.reference.dense.linear`."""
Matrix = QTensor | jax.Array
"""[outputs, inputs]: packed for the kernels, or float32 for `training.layer.linear`."""


@dataclass(frozen=True)
class BlockShape(LayerShape):
    """The static facts of a drafter.

    Attributes:
        features: layers of the target whose incoming rows are fused, in order; its number of layers is what comes out
            of the last one.
        feature_width: of one of them, the target's width.
        windows: of each layer, positions that a row sees back, itself among them; None for all.
        causal: of each layer, whether a row of the block sees only those before it and itself.
        pairing: of the rotation.
    """

    features: tuple[int, ...]
    feature_width: int
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    pairing: str = "neox"

    @property
    def layers(self) -> int:
        """L."""
        return len(self.windows)


class BlockLayer(NamedTuple):
    """Norms f32[D], of heads f32[d], and matrices of a layer."""

    attn_norm: jax.Array
    attn_q: Matrix
    attn_k: Matrix
    attn_v: Matrix
    attn_q_norm: jax.Array
    attn_k_norm: jax.Array
    attn_output: Matrix
    ffn_norm: jax.Array
    ffn_gate: Matrix
    ffn_up: Matrix
    ffn_down: Matrix


class BlockWeights(NamedTuple):
    """The weights of a drafter, without embedding and output matrix, which are mostly the target's.

    Attributes:
        fc: [D, features * feature_width].
        hidden_norm: f32[D], after it.
        layers: L of them.
        output_norm: f32[D].
    """

    fc: Matrix
    hidden_norm: jax.Array
    layers: tuple[BlockLayer, ...]
    output_norm: jax.Array


class BlockKeys(NamedTuple):
    """Keys, rotated, and values of R rows in one layer: f32[R, G, d] each."""

    k: jax.Array
    v: jax.Array


Each = Callable[..., jax.Array]
"""(function of a row of each array, arrays) -> the function's results by row: all at once, or one after the other."""


def at_once(function: Callable[..., jax.Array], *rows: jax.Array) -> jax.Array:
    """The function of all rows as one batch, whose bits may depend on how many there are."""
    return jax.vmap(function)(*rows)


def one_by_one(function: Callable[..., jax.Array], *rows: jax.Array) -> jax.Array:
    """The function of each row by itself, so that its bits are its own (contract C1)."""
    return jax.lax.map(lambda row: function(*row), rows)


Attend = Callable[[int, jax.Array, BlockKeys], jax.Array]
"""(layer, queries f32[R, H, d] of the block's rows, their own keys and values) -> f32[R, H * d]."""


def context_keys(
    linear: Linear, shape: BlockShape, w: BlockWeights, features_RE: jax.Array, cos_RP: jax.Array, sin_RP: jax.Array,
    each: Each = at_once,
) -> list[BlockKeys]:  # fmt: skip
    """Keys and values of rows of the context in every layer.

    Args:
        linear: the products.
        shape: of the drafter.
        w: its weights.
        features_RE: f32[R, features * feature_width], the target's rows side by side.
        cos_RP, sin_RP: f32[R, d/2], the rotation at their positions.
        each: how norms of heads go over rows.
    """
    (fused_RD,) = linear(features_RE, (w.fc,))
    found = []
    for layer in w.layers:
        k, v = linear(fused_RD, (layer.attn_k, layer.attn_v), norm=w.hidden_norm, eps=shape.eps)
        found.append(_keys(shape, layer, k, v, cos_RP, sin_RP, each))
    return found


def block_rows(
    linear: Linear, shape: BlockShape, w: BlockWeights, x_RD: jax.Array, cos_RP: jax.Array, sin_RP: jax.Array,
    attend: Attend, each: Each = at_once,
) -> jax.Array:  # fmt: skip
    """f32[R, D]: rows of blocks after all layers, before the output norm.

    Args:
        linear: the products.
        shape: of the drafter.
        w: its weights.
        x_RD: the embedded tokens of the blocks.
        cos_RP, sin_RP: f32[R, d/2], the rotation at their positions.
        attend: attention over the context and the block.
        each: how norms of heads go over rows.
    """
    for i, layer in enumerate(w.layers):
        with jax.named_scope(f"block{i}"):
            q, k, v = linear(
                x_RD, (layer.attn_q, layer.attn_k, layer.attn_v), norm=layer.attn_norm, eps=shape.eps
            )  # fmt: skip
            q_RHd = _heads(shape, q, layer.attn_q_norm, cos_RP, sin_RP, each)
            out = attend(i, q_RHd, _keys(shape, layer, k, v, cos_RP, sin_RP, each))
            (x_RD,) = linear(out, (layer.attn_output,), residual=x_RD)
            (h,) = linear(x_RD, (layer.ffn_gate, layer.ffn_up), norm=layer.ffn_norm, eps=shape.eps, act="silu")
            (x_RD,) = linear(h, (layer.ffn_down,), residual=x_RD)
    return x_RD


def masked_attention(
    shape: BlockShape, q_nHd: jax.Array, keys: Sequence[BlockKeys], seen_nm: Sequence[jax.Array]
) -> jax.Array:
    """f32[n, H * d]: each query over those rows of several lots of keys that it sees; at least one."""
    q = q_nHd.reshape(len(q_nHd), shape.kv_heads, -1, shape.head_dim) * (shape.head_dim**-0.5)
    scores = [
        jnp.where(seen[None, None], jnp.einsum("ngid,mgd->ginm", q, key.k, precision=_HIGHEST), _NOT)
        for key, seen in zip(keys, seen_nm, strict=True)
    ]
    p = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1)
    v_mGd = jnp.concatenate([key.v for key in keys])
    return jnp.einsum("ginm,mgd->ngid", p, v_mGd, precision=_HIGHEST).reshape(len(q_nHd), -1)


def sees_context(window: int | None, position_n: jax.Array, context_m: jax.Array) -> jax.Array:
    """bool[n, m]: whether rows at `position` see keys at `context`, which stand before them."""
    back_nm = position_n[:, None] - context_m[None]
    return back_nm >= 0 if window is None else (back_nm >= 0) & (back_nm < window)


def sees_block(causal: bool, window: int | None, rows: int) -> jax.Array:
    """bool[n, n]: whether a row of a block sees another of it."""
    ahead = jnp.arange(rows)[None] - jnp.arange(rows)[:, None]
    seen = ahead <= 0 if causal else jnp.ones((rows, rows), bool)
    return seen if window is None else seen & (ahead < window) & (-ahead < window)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) * weight over the last axis."""
    square = jnp.mean(x * x, axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(square + jnp.float32(eps)) * weight.reshape((1,) * (x.ndim - 1) + weight.shape)


def _heads(shape: BlockShape, x_RO: jax.Array, norm_d: jax.Array, cos_RP, sin_RP, each: Each) -> jax.Array:
    """Heads, each normed, then rotated: f32[R, heads, d]."""

    def row(x_O, cos_P, sin_P):
        x_Hd = rms_norm(x_O.reshape(-1, shape.head_dim), norm_d, shape.eps)
        return rotate(x_Hd, cos_P[None], sin_P[None], shape.pairing)

    return each(row, x_RO, cos_RP, sin_RP)


def _keys(shape: BlockShape, layer: BlockLayer, k_RO, v_RO, cos_RP, sin_RP, each: Each) -> BlockKeys:
    k_RGd = _heads(shape, k_RO, layer.attn_k_norm, cos_RP, sin_RP, each)
    return BlockKeys(k_RGd, v_RO.reshape(v_RO.shape[0], -1, shape.head_dim))
