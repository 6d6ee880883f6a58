"""Four-bit codes as bit planes: the matrices of the look-up kernels (T-MAC, Wei et al. 2024, arXiv:2407.00088)."""

from dataclasses import dataclass

import jax
import numpy as np

from specsparse.errors import UserError
from specsparse.kernels.arena import aligned_empty
from specsparse.kernels.qtensor import BLOCK, ROWS, Packed, QTensor, packed_pytree

_SWAPS = ((7, 0x00AA00AA), (14, 0x0000CCCC))
"""Which bits of a word change places, and how far apart: bit k of byte b with bit b of byte k, in either half."""


@packed_pytree
@dataclass(frozen=True)
class BitPlanes(Packed):
    """A packed matrix of nibble codes, cut into bits.

    Invariant: data is that of the `QTensor` it was made of, uint8[ceil(rows/16), layout.group_bytes(cols)], but for the
    codes: byte 4 r + b of chunk c holds bit b of row r's codes, of columns 4c .. 4c + 3 in its low and of columns
    16 + 4c .. 16 + 4c + 3 in its high four bits, the first column lowest.
    """


def pack_planes(w: QTensor) -> BitPlanes:
    """The same weights as bit planes, on the host.

    Raises:
        UserError: codes other than nibbles that stand for themselves, with f16 scales for each block (Q4_0, Q4_1).
    """
    layout, cols = w.layout, w.shape[1]
    if layout.codes != "nibble" or layout.lut or layout.scales not in ("d", "dm"):
        raise UserError(f"{layout.source or layout.codes} weights have no bit planes; use Q4_0 or Q4_1")
    data = aligned_empty(*w.data.shape)
    data[...] = np.asarray(w.data)
    blocks = data.reshape(len(data), cols // BLOCK, -1)
    codes = blocks[..., blocks.shape[-1] - ROWS * BLOCK // 2 :]
    codes.view("<u4")[...] = transpose_bits(codes.view("<u4"))
    data.flags.writeable = False
    return BitPlanes(jax.device_put(data), layout, w.shape)


def transpose_bits(words: np.ndarray) -> np.ndarray:
    """uint32[..] whose bytes' low halves, and high halves, are 4 x 4 matrices of bits: transposed. Its own inverse."""
    for shift, mask in _SWAPS:
        swapped = (words ^ (words >> np.uint32(shift))) & np.uint32(mask)
        words = words ^ swapped ^ (swapped << np.uint32(shift))
    return words
