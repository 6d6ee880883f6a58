"""SparseInfer: the sign of a gate product guessed by the signs of its factors."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from specsparse.engine.weights import Layer
from specsparse.kernels import NeuronChoice, SignRows, pack_signs
from specsparse.kernels.reference.sparse import signs_alike
from specsparse.predictors.base import InOneCall, Scored
from specsparse.predictors.svd import normed_gate
from specsparse.support.options import Positive


class SignBitWeights(NamedTuple):
    """Weights of one layer.

    Attributes:
        signs: SignRows [F, D] of gate * ffn_norm.
        threshold: f32[], products that must agree in sign.
    """

    signs: SignRows
    threshold: jax.Array


@dataclass(frozen=True)
class SignBit(Scored, InOneCall):
    """keep_j where alpha * positives_j >= negatives_j, the products w_jk x_k counted by sign (arXiv:2411.12692).

    The signs of `ffn_norm` are folded into those of the gate, so that x is the residual and no norm is computed.

    Attributes:
        alpha: above 1 keeps more neurons.
    """

    name: ClassVar[str] = "signbit"
    alpha: Positive = 1.0

    def own_weights(self, layer: Layer) -> SignBitWeights:
        """alpha p >= D - p is p >= D / (1 + alpha)."""
        gate = normed_gate(layer)
        return SignBitWeights(pack_signs(gate), jnp.float32(gate.shape[1] / (1 + self.alpha)))

    def score(self, weights: SignBitWeights, layer: Layer, x_RD: jax.Array, n_valid_B: jax.Array) -> jax.Array:
        """Products that are positive by sign."""
        return signs_alike(x_RD, weights.signs)

    def keep(self, weights: SignBitWeights, layer: Layer, x_RD: jax.Array, n_valid_B: jax.Array) -> jax.Array:
        """uint8[R, F]: score >= threshold, counted by the kernels."""
        kernels = self.ffn.kernels
        return kernels.signbit_keep(x_RD, weights.signs, threshold=weights.threshold, n_valid=n_valid_B)

    def choice(self, weights: SignBitWeights, layer: Layer) -> NeuronChoice:
        """See `InOneCall`."""
        return NeuronChoice("signs", signs=weights.signs, threshold=weights.threshold)
