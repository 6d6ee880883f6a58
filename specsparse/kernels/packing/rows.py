"""Rows of a packed matrix as a packed matrix of their own, without unpacking it: the lanes of a group are alike."""

import jax
import numpy as np

from specsparse.errors import UserError
from specsparse.kernels.packing import dequant
from specsparse.kernels.qtensor import ROWS, Layout, QTensor


def lane_bytes(layout: Layout, cols: int) -> np.ndarray:
    """int64[16, bytes of a row]: where the bytes of each row lie in a group of `cols` columns, in one order for all."""
    place = np.arange(layout.group_bytes(cols))[None]
    fields = [f for f in dequant._split(place, layout, cols) if f is not None]
    return np.concatenate([f[0].transpose(1, 0, 2).reshape(ROWS, -1) for f in fields], axis=1)


def checked_ids(ids: np.ndarray, rows: int) -> np.ndarray:
    """Ids int64[N] of rows to take; UserError for none, or one outside a matrix of so many."""
    ids = np.asarray(ids, np.int64)
    if ids.size == 0 or ids.min() < 0 or ids.max() >= rows:
        raise UserError(f"rows to take must be at least one and lie in 0..{rows - 1}")
    return ids


def take_rows(w: QTensor, ids: np.ndarray) -> QTensor:
    """Rows `ids` int[N] of a matrix, in that order: shape (N, cols), same layout, same values.

    Runs on the host, once, when a model is built.

    Raises:
        UserError: no ids, or one outside the matrix.
    """
    rows, cols = w.shape
    ids = checked_ids(ids, rows)
    data, place = np.asarray(w.data), lane_bytes(w.layout, cols)
    taken = data[(ids // ROWS)[:, None], place[ids % ROWS]]
    out = np.zeros((-(-len(ids) // ROWS), data.shape[1]), np.uint8)
    new = np.arange(len(ids))
    out[(new // ROWS)[:, None], place[new % ROWS]] = taken
    return QTensor(jax.device_put(out), w.layout, (len(ids), cols))
