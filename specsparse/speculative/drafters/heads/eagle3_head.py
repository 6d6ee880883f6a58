"""What an EAGLE-3 head computes (Li et al., arXiv:2503.01840), as functions of arrays for decoding and training.

At position i the head reads the target's features of position i and the embedding of token i + 1, and scores the token
after it. From the second drafted token on it reads its own row in place of the features.

    g = fuse(features)                          # or again(y) of the row before
    entered = enter(embedding, g)               # q, k, v of one layer over 2 D inputs, and the residual
    y = leave(attention of q, k, v, entered.residual)
    logits = output times RMS norm(y, output_norm)

Arrays are rows: [R, ..]. The products are injected: those of `kernels` on packed weights, or any that can be
differentiated.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specsparse.speculative.drafters.heads.layer_shape import LayerShape

PROJECTIONS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
"""Matrices of the layer by their GGUF names."""


@dataclass(frozen=True)
class HeadShape(LayerShape):
    """Shape and options of a head.

    Attributes:
        features: how many layers' features it reads.
        norm_before_residual: the residual is the normalised row, not the row itself.
        norm_before_fc: one RMS norm over all features before they are fused.
        fc_norm: one RMS norm for each layer's features before they are fused (EAGLE-3.1).
        norm_output: what the head reads in place of features is its row after the output norm, not before (EAGLE-3.1).
        qk_norm: an RMS norm over each head of queries and keys (Qwen3).
        biases: projections with a bias.
    """

    features: int = 3
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    qk_norm: bool = False
    biases: tuple[str, ...] = ()


class Eagle3Weights(NamedTuple):
    """Weights of a head. Matrices are [outputs, inputs], packed for decoding, plain arrays for training.

    Attributes:
        fc: [D, features * target's D].
        feature_norm: [features * target's D] with `norm_before_fc`, else None.
        fc_norms: [target's D] for each layer with `fc_norm`, else ().
        token_norm, hidden_norm: [D], of the embedding and of the fused features.
        attn_q, attn_k, attn_v: [heads * head_dim, 2 D] and so on; embedding first.
        attn_output, ffn_gate, ffn_up, ffn_down: as in a Llama layer.
        ffn_norm, output_norm: [D].
        q_norm, k_norm: [head_dim] with `qk_norm`, else None.
        biases: by projection.
    """

    fc: Any
    token_norm: jax.Array
    hidden_norm: jax.Array
    attn_q: Any
    attn_k: Any
    attn_v: Any
    attn_output: Any
    ffn_norm: jax.Array
    ffn_gate: Any
    ffn_up: Any
    ffn_down: Any
    output_norm: jax.Array
    feature_norm: jax.Array | None = None
    fc_norms: tuple[jax.Array, ...] = ()
    q_norm: jax.Array | None = None
    k_norm: jax.Array | None = None
    biases: dict[str, jax.Array] = {}  # noqa: RUF012 (never changed)

    def bias(self, *names: str) -> tuple[jax.Array | None, ...] | None:
        """Biases of the named projections, None where there is none at all."""
        return tuple(self.biases.get(name) for name in names) if self.biases else None


class Products(NamedTuple):
    """What the head is computed with.

    Attributes:
        linear: linear(x, weights, norm=None, biases=None, residual=None, act=None) -> a tuple of rows, as
            `kernels.reference.dense.linear` defines it.
        normalise: normalise(x, norm): RMS norm over the last axis.
    """

    linear: Callable[..., tuple[jax.Array, ...]]
    normalise: Callable[[jax.Array, jax.Array], jax.Array]


class HeadRows(NamedTuple):
    """Rows on their way into the head's attention.

    Attributes:
        q: [R, heads * head_dim], before RoPE.
        k, v: [R, kv_heads * head_dim], keys before RoPE.
        residual: [R, D].
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    residual: jax.Array


def default_layers(n_layers: int) -> tuple[int, int, int]:
    """Ids of the target's layers whose incoming rows a head reads that names none."""
    return 2, n_layers // 2, n_layers - 3


def fuse(shape: HeadShape, w: Eagle3Weights, products: Products, features_RE: jax.Array) -> jax.Array:
    """g [R, D]: what the head reads of the target's features."""
    if shape.fc_norm:
        parts = jnp.split(features_RE, shape.features, axis=-1)
        parts = [products.normalise(part, norm) for part, norm in zip(parts, w.fc_norms, strict=True)]
        features_RE = jnp.concatenate(parts, axis=-1)
    (g_RD,) = products.linear(features_RE, (w.fc,), norm=w.feature_norm)
    return g_RD


def enter(shape: HeadShape, w: Eagle3Weights, products: Products, embedded_RD: jax.Array, g_RD: jax.Array) -> HeadRows:
    """Queries, keys and values of rows, and the residual to add to what attention finds."""
    normed_RD = products.normalise(g_RD, w.hidden_norm)
    both_RD = jnp.concatenate([products.normalise(embedded_RD, w.token_norm), normed_RD], axis=-1)
    names = ("attn_q", "attn_k", "attn_v")
    q, k, v = products.linear(both_RD, (w.attn_q, w.attn_k, w.attn_v), biases=w.bias(*names))
    if shape.qk_norm:
        q, k = (_by_head(products, x, norm) for x, norm in ((q, w.q_norm), (k, w.k_norm)))
    return HeadRows(q, k, v, normed_RD if shape.norm_before_residual else g_RD)


def leave(w: Eagle3Weights, products: Products, attended: jax.Array, residual_RD: jax.Array) -> jax.Array:
    """y [R, D]: the head's rows, before the output norm, of what attention found."""
    (x_RD,) = products.linear(attended, (w.attn_output,), biases=w.bias("attn_output"), residual=residual_RD)
    biases = w.bias("ffn_gate", "ffn_up")
    (h_RF,) = products.linear(x_RD, (w.ffn_gate, w.ffn_up), norm=w.ffn_norm, biases=biases, act="silu")
    (y_RD,) = products.linear(h_RF, (w.ffn_down,), biases=w.bias("ffn_down"), residual=x_RD)
    return y_RD


def again(shape: HeadShape, w: Eagle3Weights, products: Products, y_RD: jax.Array) -> jax.Array:
    """What the head reads in place of g at the next position, of its own rows y."""
    return products.normalise(y_RD, w.output_norm) if shape.norm_output else y_RD


def _by_head(products: Products, x: jax.Array, norm: jax.Array) -> jax.Array:
    return products.normalise(x.reshape(-1, norm.shape[0]), norm).reshape(x.shape)
