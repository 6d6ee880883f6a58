"""How good a mask is: counts and sums over rows first, then rates."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine.pytree import Pytree
from specsparse.engine.weights import Layer
from specsparse.predictors.base import Predictor
from specsparse.predictors.ffn import FFN
from specsparse.predictors.masked import kept_neurons

Sum = jax.Array | np.floating
"""f32[] of one window, on the device, or the float64 of several, on the host."""


class LayerSums(NamedTuple):
    """Sums over the rows and neurons of one layer.

    Attributes:
        neurons: rows times F.
        active, kept, both: neurons that are not zero, that are kept, and that are both.
        energy, kept_energy: squares of all neurons, and of the kept ones.
        output, error: squares of the dense output, and of its difference to the sparse one.
    """

    neurons: Sum
    active: Sum
    kept: Sum
    both: Sum
    energy: Sum
    kept_energy: Sum
    output: Sum
    error: Sum


@dataclass(frozen=True)
class LayerQuality:
    """Rates of one layer; a rate over nothing is NaN.

    Attributes:
        active: share of neurons that are not zero.
        kept: share of neurons that are computed.
        recall: share of the active ones that are kept.
        precision: share of the kept ones that are active.
        energy: share of the squares of all neurons that the kept ones hold.
        error: |sparse - dense| / |dense| of the FFN's output, without the residual.
    """

    active: float
    kept: float
    recall: float
    precision: float
    energy: float
    error: float

    @staticmethod
    def of(sums: LayerSums) -> "LayerQuality":
        """From the sums."""
        s = LayerSums(*(float(x) for x in sums))
        return LayerQuality(
            active=_ratio(s.active, s.neurons),
            kept=_ratio(s.kept, s.neurons),
            recall=_ratio(s.both, s.active),
            precision=_ratio(s.both, s.kept),
            energy=_ratio(s.kept_energy, s.energy),
            error=_ratio(s.error, s.output) ** 0.5,
        )


class ModelSums(NamedTuple):
    """Sums over the tokens of a model.

    Attributes:
        tokens: rows with a next token.
        kl: KL(dense, sparse) in nats.
        dense, sparse: negative log-likelihood of the next token.
        same: rows whose most likely token is the same.
    """

    tokens: Sum
    kl: Sum
    dense: Sum
    sparse: Sum
    same: Sum


@dataclass(frozen=True)
class ModelQuality:
    """The whole model with the predictor in every layer, against the dense one.

    Attributes:
        tokens: judged.
        kl: mean KL(dense, sparse) of the next token's law, nats.
        perplexity_dense, perplexity: of the text.
        same_top: share of tokens with the same most likely successor.
    """

    tokens: int
    kl: float
    perplexity_dense: float
    perplexity: float
    same_top: float

    @staticmethod
    def of(sums: ModelSums) -> "ModelQuality":
        """From the sums."""
        s = ModelSums(*(float(x) for x in sums))
        return ModelQuality(
            tokens=int(s.tokens),
            kl=_ratio(s.kl, s.tokens),
            perplexity_dense=float(np.exp(_ratio(s.dense, s.tokens))),
            perplexity=float(np.exp(_ratio(s.sparse, s.tokens))),
            same_top=_ratio(s.same, s.tokens),
        )


def layer_sums(predictor: Predictor, ffn: FFN, weights: Pytree, layer: Layer, x_RD: jax.Array) -> LayerSums:
    """Sums over rows f32[R, D], all of which count."""
    n = jnp.asarray([x_RD.shape[0]], jnp.int32)
    dense_RF = ffn.neurons(layer, x_RD, n)
    sparse_RF, keep_RF = kept_neurons(predictor, ffn, weights, layer, x_RD, n)
    dense_RD, sparse_RD = ffn.down(layer, dense_RF, n), ffn.down(layer, sparse_RF, n)
    active, kept = dense_RF != 0, keep_RF != 0
    return LayerSums(
        neurons=jnp.float32(dense_RF.size),
        active=_total(active),
        kept=_total(kept),
        both=_total(active & kept),
        energy=_total(dense_RF**2),
        kept_energy=_total(jnp.where(kept, dense_RF, jnp.float32(0)) ** 2),
        output=_total(dense_RD**2),
        error=_total((sparse_RD - dense_RD) ** 2),
    )


def model_sums(dense_RV: jax.Array, sparse_RV: jax.Array, next_R: jax.Array) -> ModelSums:
    """Sums over logits f32[R, V] of both models; `next_R` int32[R] is the token that follows each row."""
    p, q = jax.nn.log_softmax(dense_RV), jax.nn.log_softmax(sparse_RV)
    at = next_R[:, None]
    return ModelSums(
        tokens=jnp.float32(next_R.shape[0]),
        kl=_total(jnp.exp(p) * (p - q)),
        dense=-_total(jnp.take_along_axis(p, at, axis=1)),
        sparse=-_total(jnp.take_along_axis(q, at, axis=1)),
        same=_total(jnp.argmax(p, axis=1) == jnp.argmax(q, axis=1)),
    )


def _total(values: jax.Array) -> jax.Array:
    return jnp.sum(values, dtype=jnp.float32)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else float("nan")
