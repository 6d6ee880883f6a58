"""The FFN with a predictor's mask, computed densely and masked: what quality is judged by."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from specsparse.engine.pytree import Pytree
from specsparse.engine.weights import Layer, Params
from specsparse.predictors.base import Predictor
from specsparse.predictors.ffn import FFN
from specsparse.predictors.teal import Teal


def kept_neurons(
    predictor: Predictor, ffn: FFN, weights: Pytree, layer: Layer, x_RD: jax.Array, n_valid_B: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(neurons f32[R, F] with those left out at zero, mask uint8[R, F])."""
    keep_RF = predictor.keep(weights, layer, x_RD, n_valid_B)
    if isinstance(predictor, Teal):
        return predictor.neurons(weights, layer, x_RD, n_valid_B), keep_RF
    a_RF = ffn.neurons(layer, x_RD, n_valid_B)
    return jnp.where(keep_RF != 0, a_RF, jnp.float32(0)), keep_RF


def masked_ffn(predictor: Predictor, ffn: FFN) -> Callable:
    """`ffn(layer, x_RD, n_valid_B) -> (y_RD, kept i32[R])` for `make_forward`; `layer.sparse` holds the weights."""

    def sparse(layer: Layer, x_RD, n_valid_B):
        a_RF, keep_RF = kept_neurons(predictor, ffn, layer.sparse, layer, x_RD, n_valid_B)
        return ffn.down(layer, a_RF, n_valid_B, residual=x_RD), jnp.sum(keep_RF, axis=1, dtype=jnp.int32)

    return sparse


def with_weights(params: Params, weights: Sequence[Pytree]) -> Params:
    """`params` with a predictor's weights in each layer's `sparse`."""
    pairs = zip(params.layers, weights, strict=True)
    return params._replace(layers=tuple(layer._replace(sparse=w) for layer, w in pairs))
