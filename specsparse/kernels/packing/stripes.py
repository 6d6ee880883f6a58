"""A down projection cut into stripes of outputs: what skipping zero neurons reads of it.

For each stripe of 128 outputs: for each block of 32 neurons f16 scales of the outputs, in order; then 64 bytes for each
neuron, where nibble k of lane l of 16 bits is the code of output 32 k + l. Codes and scales are those of the Q4_0
matrix, whose blocks run along the neurons, so that nothing is rounded again. Zeros fill outputs up to whole stripes.
"""

from typing import NamedTuple

import jax
import numpy as np

from specsparse.errors import UserError
from specsparse.kernels.arena import aligned_empty
from specsparse.kernels.neurons import NeuronRows, regroup_neurons
from specsparse.kernels.packing import dequant
from specsparse.kernels.qtensor import BLOCK, ROWS, QTensor

STRIPE = 128
"""Outputs of a stripe."""
_LANES = 32


class SkipWeights(NamedTuple):
    """What skipping zeros reads beside the gate.

    Attributes:
        up: NeuronRows [F, D].
        down: `stripes` of the down projection [D, F].
    """

    up: NeuronRows
    down: jax.Array


def skip_weights(up: QTensor, down: QTensor) -> SkipWeights:
    """Of one layer's matrices; see `stripes`."""
    return SkipWeights(regroup_neurons(up), stripes(down))


def skippable(matrix: QTensor) -> bool:
    """Whether its layout is Q4_0's, the one that zeros are skipped in."""
    layout = matrix.layout
    return layout.codes == "nibble" and layout.scales == "d" and layout.zero == 8 and not layout.lut


def stripes(down: QTensor) -> jax.Array:
    """uint8[stripes, neurons / 32 * (256 + 32 * 64)] of a down projection [D, F]. Runs on the host.

    Raises:
        UserError: the matrix is not Q4_0.
    """
    if not skippable(down):
        raise UserError(f"zeros are skipped in Q4_0 matrices, and down is {down.layout.source or down.layout.codes}")
    outputs, neurons = down.shape
    blocks, count = neurons // BLOCK, -(-outputs // STRIPE)
    out = aligned_empty(count, blocks * (2 * STRIPE + BLOCK * STRIPE // 2))
    data = np.asarray(down.data)
    groups = STRIPE // ROWS
    for s in range(count):
        part = np.zeros((groups, data.shape[1]), np.uint8)
        some = data[s * groups : (s + 1) * groups]
        part[: len(some)] = some
        fields = dequant._split(part, down.layout, neurons)
        scales = np.asarray(fields.d).reshape(groups, blocks, ROWS, 2).transpose(1, 0, 2, 3)
        out[s, : 2 * STRIPE * blocks] = scales.reshape(-1)
        out[s, 2 * STRIPE * blocks :] = _nibbles(np.asarray(fields.codes), blocks)
    out.flags.writeable = False
    return jax.device_put(out)


def _nibbles(codes: np.ndarray, blocks: int) -> np.ndarray:
    """uint8[blocks * 32 * 64] of codes uint8[groups, chunks, 16, 4], four chunks of two columns a byte in a block."""
    groups = len(codes)
    bytes_ = codes.reshape(groups, blocks, 4, ROWS, 4).transpose(1, 2, 4, 0, 3).reshape(blocks, BLOCK // 2, STRIPE)
    values = np.concatenate([bytes_ & 15, bytes_ >> 4], axis=1).astype(np.uint16)  # [blocks, neuron, output]
    lanes = values.reshape(blocks, BLOCK, STRIPE // _LANES, _LANES)
    words = sum(lanes[:, :, k] << np.uint16(4 * k) for k in range(STRIPE // _LANES))
    return words.astype("<u2").view(np.uint8).reshape(-1)
