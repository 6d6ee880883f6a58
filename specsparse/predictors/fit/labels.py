"""What a predictor is to learn: which neurons of a row count as active, as packed bits."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine.weights import Layer
from specsparse.errors import UserError
from specsparse.predictors.ffn import FFN

_PIECE = 256


@dataclass(frozen=True)
class Labels:
    """Of one layer.

    Attributes:
        bits: uint8[N, ceil(F/8)], as `numpy.packbits` of the labels.
        density: share of ones.
        above: a neuron is active where |a| is larger than this; 0 for activations with true zeros.
    """

    bits: np.ndarray
    density: float
    above: float


def need_zeros(ffn: FFN, active_share: float | None) -> None:
    """An FFN without zeros has no active neurons but by a share.

    Raises:
        UserError: such an FFN, and no `active_share`.
    """
    if active_share is None and not ffn.has_zeros:
        raise UserError(
            "with SiLU no neuron is ever zero, so there is nothing to learn: give train.active_share=0.3 to call the "
            "largest 30 % active, or use predictor=gate_threshold, which needs no training"
        )


def label(ffn: FFN, layer: Layer, rows_ND: np.ndarray, *, active_share: float | None = None) -> Labels:
    """Labels of rows f32[N, D]: |a| > 0, or for `active_share` |a| above the quantile that leaves this share.

    The label is on a itself, gate and up together, and on its size: `relu(gate) * up > 0` would drop the neurons whose
    product is negative.

    Raises:
        UserError: an activation without zeros and no `active_share`, or a layer that is never or always active.
    """
    need_zeros(ffn, active_share)
    neurons = jax.jit(ffn.neurons)
    pieces = [rows_ND[i : i + _PIECE] for i in range(0, len(rows_ND), _PIECE)]
    size_NF = np.concatenate([np.abs(neurons(layer, jnp.asarray(p), jnp.asarray([len(p)], jnp.int32))) for p in pieces])
    above = 0.0 if active_share is None else float(np.quantile(size_NF, 1 - active_share))
    active_NF = size_NF > above
    density = float(active_NF.mean())
    if not 0 < density < 1:
        raise UserError(
            f"on this text {'no' if density == 0 else 'every'} neuron of a layer is active: nothing to learn"
        )
    return Labels(np.packbits(active_NF, axis=1), density, above)
