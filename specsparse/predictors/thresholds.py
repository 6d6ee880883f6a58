"""Predictors by a threshold that is a quantile over a text: CATS on the gate, TEAL on the inputs of matrices."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from specsparse.engine.weights import Layer
from specsparse.kernels import NeuronChoice
from specsparse.kernels.reference.sparse import apply as activate
from specsparse.predictors.base import FFN, InOneCall, Needs, Predictor, as_mask, gate_matrix, require_rows
from specsparse.support.options import Internal, Share


class GateWeights(NamedTuple):
    """One layer's threshold, f32[], on |act(gate)|."""

    threshold: jax.Array


@dataclass(frozen=True)
class GateThreshold(Predictor, InOneCall):
    """keep_j where |act(gate_j z)| >= threshold, a quantile over a text (CATS, arXiv:2404.08763, eq. 3).

    The gate is computed in full; neurons with a small activation are left out of up and down.

    Attributes:
        ffn: the FFN it predicts for.
        share: of the neurons to keep, on average over the text, the same in every layer.
    """

    name: ClassVar[str] = "gate_threshold"
    needs: ClassVar[Needs] = Needs.TEXT
    ffn: Annotated[FFN, Internal()]
    share: Share = 0.5

    def fit(self, layer: Layer, rows_ND: jax.Array | None = None, *, index: int = 0) -> GateWeights:
        rows_ND = require_rows(self, rows_ND)
        score_NF = self.score(layer, rows_ND, jnp.asarray([rows_ND.shape[0]], jnp.int32))
        return GateWeights(_above_zero(jnp.quantile(score_NF, jnp.float32(1 - self.share))))

    def score(self, layer: Layer, x_RD: jax.Array, n_valid_B: jax.Array) -> jax.Array:
        """|act(gate z)|, f32[R, F]."""
        return jnp.abs(activate(self.ffn.gate(layer, x_RD, n_valid_B), self.ffn.act))

    def keep(self, weights: GateWeights, layer: Layer, x_RD: jax.Array, n_valid_B: jax.Array) -> jax.Array:
        return as_mask(self.score(layer, x_RD, n_valid_B) >= weights.threshold, n_valid_B)

    def choice(self, weights: GateWeights, layer: Layer) -> NeuronChoice:
        return NeuronChoice(least=weights.threshold)


def _above_zero(threshold: jax.Array) -> jax.Array:
    """`threshold`, or the least positive number: if a text has more zeros than are to go, 0 would keep them all."""
    return jnp.maximum(threshold, jnp.finfo(jnp.float32).tiny)


class TealWeights(NamedTuple):
    """One layer's thresholds, f32[]: `inputs` on |z|, the input of gate and up, `threshold` on |a|, that of down."""

    inputs: jax.Array
    threshold: jax.Array


@dataclass(frozen=True)
class Teal(Predictor):
    """Inputs under a quantile of their size are zero (TEAL, arXiv:2408.14690, eq. 2), in the FFN's three matrices.

    For quality only: no kernel here skips columns. Attention keeps all its inputs. `keep` is the mask of down's inputs;
    `neurons` is what the FFN computes with.

    Attributes:
        ffn: the FFN.
        share: of the inputs to keep, the same for every matrix.
    """

    name: ClassVar[str] = "teal"
    needs: ClassVar[Needs] = Needs.TEXT
    ffn: Annotated[FFN, Internal()]
    share: Share = 0.5

    def fit(self, layer: Layer, rows_ND: jax.Array | None = None, *, index: int = 0) -> TealWeights:
        """Quantiles over `rows_ND`, those of down with the inputs of gate and up thresholded already."""
        rows_ND = require_rows(self, rows_ND)
        n, at = jnp.asarray([rows_ND.shape[0]], jnp.int32), jnp.float32(1 - self.share)
        inputs = jnp.quantile(jnp.abs(self._normed(layer, rows_ND)), at)
        values = self._values(TealWeights(inputs, jnp.float32(0)), layer, rows_ND, n)
        return TealWeights(inputs, _above_zero(jnp.quantile(jnp.abs(values), at)))

    def _normed(self, layer: Layer, x_RD: jax.Array) -> jax.Array:
        """rmsnorm(x) * ffn_norm, row by row, so that no row depends on how many there are."""

        def one(x_D):
            return x_D * jax.lax.rsqrt(jnp.mean(x_D * x_D) + jnp.float32(self.ffn.eps)) * layer.ffn_norm

        return jax.lax.map(one, x_RD)

    def _values(self, weights: TealWeights, layer: Layer, x_RD: jax.Array, n_valid_B: jax.Array) -> jax.Array:
        z_RD = self._normed(layer, x_RD)
        z_RD = jnp.where(jnp.abs(z_RD) >= weights.inputs, z_RD, jnp.float32(0))
        matrices = [gate_matrix(layer), *([] if layer.ffn_gate is None else [layer.ffn_up])]
        gate_RF, *up = self.ffn.kernels.linear(z_RD, tuple(matrices), n_valid=n_valid_B)
        a_RF = activate(gate_RF, self.ffn.act)
        return a_RF * activate(up[0], self.ffn.up_act) if up else a_RF

    def keep(self, weights: TealWeights, layer: Layer, x_RD: jax.Array, n_valid_B: jax.Array) -> jax.Array:
        values_RF = self._values(weights, layer, x_RD, n_valid_B)
        return as_mask(jnp.abs(values_RF) >= weights.threshold, n_valid_B)

    def neurons(self, weights: TealWeights, layer: Layer, x_RD: jax.Array, n_valid_B: jax.Array) -> jax.Array:
        """The neurons' values f32[R, F] from thresholded inputs, small ones zero."""
        values_RF = self._values(weights, layer, x_RD, n_valid_B)
        return jnp.where(jnp.abs(values_RF) >= weights.threshold, values_RF, jnp.float32(0))
