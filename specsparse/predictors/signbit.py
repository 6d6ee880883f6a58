"""SparseInfer: the sign of a gate product guessed by the signs of its factors."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine.weights import Layer
from specsparse.errors import UserError
from specsparse.predictors.base import Scored
from specsparse.predictors.svd import normed_gate


class SignBitWeights(NamedTuple):
    """Weights of one layer.

    Attributes:
        bits: uint8[F, ceil(D/8)], 1 where gate * ffn_norm is negative; the most significant bit first, padding 0.
        threshold: f32[], products that must agree in sign.
    """

    bits: jax.Array
    threshold: jax.Array


@dataclass(frozen=True)
class SignBit(Scored):
    """keep_j where alpha * positives_j >= negatives_j, the products w_jk x_k counted by sign (arXiv:2411.12692).

    The signs of `ffn_norm` are folded into those of the gate, so that x is the residual and no norm is computed.

    Attributes:
        alpha: above 1 keeps more neurons.
    """

    name: ClassVar[str] = "signbit"
    alpha: float = 1.0

    def __post_init__(self):
        super().__post_init__()
        if not self.alpha > 0:
            raise UserError(f"signbit: alpha={self.alpha} must be above 0")

    def own_weights(self, layer: Layer) -> SignBitWeights:
        """alpha p >= D - p is p >= D / (1 + alpha)."""
        gate = normed_gate(layer)
        bits = np.packbits(gate < 0, axis=1)
        return SignBitWeights(jnp.asarray(bits), jnp.float32(gate.shape[1] / (1 + self.alpha)))

    def score(self, weights: SignBitWeights, layer: Layer, x_RD: jax.Array, n_valid_B: jax.Array) -> jax.Array:
        """Products that are positive by sign: D less the bits that differ."""
        x_Rb = jnp.packbits(x_RD < jnp.float32(0), axis=1)

        def count(x_b):
            return jnp.sum(jax.lax.population_count(weights.bits ^ x_b[None]), axis=1, dtype=jnp.int32)

        return (x_RD.shape[1] - jax.lax.map(count, x_Rb)).astype(jnp.float32)
