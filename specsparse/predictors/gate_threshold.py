"""CATS: the gate is computed in full, and neurons with a small activation are left out of up and down."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from specsparse.engine.activation import activate
from specsparse.engine.weights import Layer
from specsparse.kernels import NeuronChoice
from specsparse.predictors.base import InOneCall, OfText, as_mask, require_rows


class GateWeights(NamedTuple):
    """Weights of one layer.

    Attributes:
        threshold: f32[], on |act(gate)|.
    """

    threshold: jax.Array


@dataclass(frozen=True)
class GateThreshold(OfText, InOneCall):
    """keep_j where |act(gate_j z)| >= threshold, a quantile over a text (CATS, arXiv:2404.08763, eq. 3).

    Attributes:
        ffn: the FFN it predicts for.
        share: of the neurons to keep, on average over the text, the same in every layer.
    """

    name: ClassVar[str] = "gate_threshold"

    def fit(self, layer: Layer, rows_ND: jax.Array | None = None, *, index: int = 0) -> GateWeights:
        """The quantile of |act(gate)| over `rows_ND`."""
        rows_ND = require_rows(self, rows_ND)
        score_NF = self.score(layer, rows_ND, jnp.asarray([rows_ND.shape[0]], jnp.int32))
        return GateWeights(above_zero(jnp.quantile(score_NF, jnp.float32(1 - self.share))))

    def score(self, layer: Layer, x_RD: jax.Array, n_valid_B: jax.Array) -> jax.Array:
        """|act(gate z)|, f32[R, F]."""
        return jnp.abs(activate(self.ffn.gate(layer, x_RD, n_valid_B), self.ffn.act))

    def keep(self, weights: GateWeights, layer: Layer, x_RD: jax.Array, n_valid_B: jax.Array) -> jax.Array:
        """uint8[R, F]."""
        return as_mask(self.score(layer, x_RD, n_valid_B) >= weights.threshold, n_valid_B)

    def choice(self, weights: GateWeights, layer: Layer) -> NeuronChoice:
        """See `InOneCall`."""
        return NeuronChoice(least=weights.threshold)


def above_zero(threshold: jax.Array) -> jax.Array:
    """`threshold`, or the least positive number: where a text has more zeros than are to go, 0 would keep them all."""
    return jnp.maximum(threshold, jnp.finfo(jnp.float32).tiny)
