"""Sign bits of a gate's rows: what the training-free predictor of SparseInfer (arXiv:2411.12692) compares."""

from dataclasses import dataclass
from functools import partial

import jax
import numpy as np

from specsparse.errors import UserError

WORD_BYTES = 8
"""Sign bits are counted by 64-bit words."""


@partial(jax.tree_util.register_dataclass, data_fields=["data"], meta_fields=["shape"])
@dataclass(frozen=True)
class SignRows:
    """One bit a weight. Invariant: data is uint8[F, 8 * ceil(D / 64)]; bits past the last column are 0.

    Attributes:
        data: bit c % 8 of byte c / 8 of row j says whether weight c of neuron j is below 0.
        shape: (neurons, columns) = (F, D).
    """

    data: jax.Array
    shape: tuple[int, int]

    @property
    def nbytes(self) -> int:
        """Bytes read by one prediction."""
        return int(self.data.size)


def pack_signs(weights_FD: np.ndarray, norm_D: np.ndarray | None = None) -> SignRows:
    """Sign bits of a gate's weights, on the host.

    Args:
        weights_FD: float[F, D].
        norm_D: weight of the norm before the gate; with it the bits go with rows that are not normalised yet, since the
            sign of w * norm * x is what counts.

    Raises:
        UserError: no matrix, or a norm of another length.
    """
    weights = np.asarray(weights_FD)
    if weights.ndim != 2 or not weights.size or (norm_D is not None and np.shape(norm_D) != weights.shape[1:]):
        raise UserError(f"sign bits need weights [F, D] and a norm [D], not {weights.shape} and {np.shape(norm_D)}")
    below = weights < 0
    if norm_D is not None:
        below ^= (np.asarray(norm_D) < 0)[None]
    bits = np.packbits(below, axis=1, bitorder="little")
    out = np.zeros((len(bits), -(-bits.shape[1] // WORD_BYTES) * WORD_BYTES), np.uint8)
    out[:, : bits.shape[1]] = bits
    return SignRows(jax.device_put(out), weights.shape)
