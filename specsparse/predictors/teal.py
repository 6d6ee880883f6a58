"""TEAL: small inputs of a matrix count as zero. For quality only: no kernel here skips columns."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from specsparse.engine.activation import activate
from specsparse.engine.weights import Layer
from specsparse.predictors.base import OfText, as_mask, require_rows
from specsparse.predictors.ffn import gate_matrix
from specsparse.predictors.gate_threshold import above_zero


class TealWeights(NamedTuple):
    """Weights of one layer.

    Attributes:
        inputs: f32[], on |z|, the input of gate and up.
        threshold: f32[], on |a|, the input of down.
    """

    inputs: jax.Array
    threshold: jax.Array


@dataclass(frozen=True)
class Teal(OfText):
    """Inputs under a quantile of their size are zero (TEAL, arXiv:2408.14690, eq. 2), in the FFN's three matrices.

    Attention keeps all its inputs. `keep` is the mask of down's inputs; `neurons` is what the FFN computes with.

    Attributes:
        ffn: the FFN.
        share: of the inputs to keep, the same for every matrix.
    """

    name: ClassVar[str] = "teal"

    def fit(self, layer: Layer, rows_ND: jax.Array | None = None, *, index: int = 0) -> TealWeights:
        """Quantiles over `rows_ND`, those of down with the inputs of gate and up thresholded already."""
        rows_ND = require_rows(self, rows_ND)
        n, at = jnp.asarray([rows_ND.shape[0]], jnp.int32), jnp.float32(1 - self.share)
        inputs = jnp.quantile(jnp.abs(self._normed(layer, rows_ND)), at)
        values = self._values(TealWeights(inputs, jnp.float32(0)), layer, rows_ND, n)
        return TealWeights(inputs, above_zero(jnp.quantile(jnp.abs(values), at)))

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
        """uint8[R, F]: which inputs of down stay."""
        values_RF = self._values(weights, layer, x_RD, n_valid_B)
        return as_mask(jnp.abs(values_RF) >= weights.threshold, n_valid_B)

    def neurons(self, weights: TealWeights, layer: Layer, x_RD: jax.Array, n_valid_B: jax.Array) -> jax.Array:
        """The neurons' values f32[R, F] from thresholded inputs, small ones zero."""
        values_RF = self._values(weights, layer, x_RD, n_valid_B)
        return jnp.where(jnp.abs(values_RF) >= weights.threshold, values_RF, jnp.float32(0))
