"""The FFN of a PowerInfer model as an injected `ffn`: neurons are kept or left out row by row.

    idx = fc2 relu(fc1 x), keep = idx >= threshold        x is the residual before ffn_norm
    a   = act(gate z) * up z, z = rmsnorm(x) * ffn_norm
    y   = x + sum of a_j down_t[j] over the kept j, ascending

Song et al. 2023 (arXiv:2312.12456). This is the definition, computed densely and masked; a mask belongs to its row
at any batch size.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specsparse.engine.activation import activate, parse_activation
from specsparse.engine.config import ModelConfig
from specsparse.engine.weights import Layer
from specsparse.kernels import Kernels
from specsparse.powerinfer.weights import PredictorWeights


class SparseStats(NamedTuple):
    """What one call of a sparse FFN did; rows that do not count have kept nothing.

    Attributes:
        kept: i32[R], neurons kept in each row.
        union: i32[], neurons that some row kept.
        nonzero: i32[R], kept neurons whose activation is not zero.
    """

    kept: jax.Array
    union: jax.Array
    nonzero: jax.Array


Keep = Callable[[Layer, jax.Array, jax.Array, jax.Array], jax.Array]
"""keep(layer, x_RD, n_valid_B, a_RF) -> bool[R, F]."""


def predicted(kernels: Kernels) -> Keep:
    """PowerInfer's rule: the raw output of the predictor is at least the threshold; exactly equal is kept."""

    def keep(layer: Layer, x_RD, n_valid_B, a_RF):
        w: PredictorWeights = layer.sparse
        (h_RK,) = kernels.linear(x_RD, (w.fc1,), n_valid=n_valid_B)
        (idx_RF,) = kernels.linear(activate(h_RK, "relu"), (w.fc2,), n_valid=n_valid_B)
        return idx_RF >= w.threshold

    return keep


def true_activations(layer: Layer, x_RD, n_valid_B, a_RF):
    """The oracle's rule: the activation is not zero."""
    return a_RF != jnp.float32(0)


def masked_ffn(config: ModelConfig, kernels: Kernels, keep: Keep) -> Callable:
    """ffn(layer, x_RD, n_valid_B) -> (y_RD, SparseStats) for `engine.llama.make_forward`."""
    act, up_act = parse_activation(config.activation)
    names = ("ffn_gate", "ffn_up") if config.gated else ("ffn_up",)

    def ffn(layer: Layer, x_RD, n_valid_B):
        outs = kernels.linear(
            x_RD,
            tuple(getattr(layer, name) for name in names),
            norm=layer.ffn_norm,
            eps=config.norm_eps,
            biases=layer.bias(*names),
            n_valid=n_valid_B,
        )
        a_RF = activate(outs[0], act)
        a_RF = a_RF * activate(outs[1], up_act) if config.gated else a_RF
        keep_RF = keep(layer, x_RD, n_valid_B, a_RF) & valid_rows(n_valid_B, x_RD.shape[0])[:, None]
        a_RF = jnp.where(keep_RF, a_RF, jnp.float32(0))
        (y_RD,) = kernels.linear(
            a_RF, (layer.ffn_down,), biases=layer.bias("ffn_down"), residual=x_RD, n_valid=n_valid_B
        )
        return y_RD, _stats(keep_RF, a_RF)

    return ffn


def valid_rows(n_valid_B, rows: int):
    """bool[R]: whether row i of sequence b is below n_valid[b]."""
    n = rows // n_valid_B.shape[0]
    return (jnp.arange(n, dtype=jnp.int32)[None] < n_valid_B[:, None]).reshape(rows)


def _stats(keep_RF, a_RF) -> SparseStats:
    return SparseStats(
        kept=jnp.sum(keep_RF, axis=1, dtype=jnp.int32),
        union=jnp.sum(jnp.any(keep_RF, axis=0), dtype=jnp.int32),
        nonzero=jnp.sum(a_RF != jnp.float32(0), axis=1, dtype=jnp.int32),
    )
