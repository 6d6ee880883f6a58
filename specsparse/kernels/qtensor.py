"""Packed weight matrices, the operands of all kernels.

A matrix is cut into groups of 16 rows. Within a group the columns follow each other in tiles, scales before codes, so
that one thread reads one stream of memory. `docs/layouts.md` gives the byte layout.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

ROWS = 16
"""Rows of a group: one lane each of a vector of 16 floats."""
BLOCK = 32
"""Columns that share one activation scale."""
SUPER = 256
"""Columns under one super-block header."""

Codes = Literal["nibble", "int8", "f32", "f16", "bf16"]
Scales = Literal["none", "d", "dm", "f32", "super", "super_min"]


class Fields(NamedTuple):
    """The parts of packed blocks. The axes between the first and the last run along the columns.

    Of a packed group they are uint8[N, count, 16, bytes of one item]. A decoder of a file's blocks gives
    them as [rows, *blocks, items] in the types below.
    """

    codes: Any  # 4-byte words: 4 words of 2 x 4 nibbles a block, or 8 words of 4 int8, see `Layout.codes`
    d: Any = None  # f16 scales of blocks or super-blocks, or float32 scales if `Layout.scales` is "f32"
    m: Any = None  # f16 mins: m of "dm", dmin of "super_min"
    sc: Any = None  # int8 scales of "super" and "super_min"
    mn: Any = None  # uint8 mins of "super_min"


@dataclass(frozen=True)
class Layout:
    """How the bytes of a group are read. Static under jit."""

    codes: Codes  # type of a stored weight
    scales: Scales = "none"  # how its scale (and min) is coded
    sub: int = BLOCK  # columns under one scale, 32 or 16
    zero: int = 0  # subtracted from a nibble code (8 for Q4_0)
    lut: tuple[int, ...] = ()  # the 16 int8 values of nibble codes, or () if a code is its own value
    source: str = ""  # the GGUF type it was packed from, for reports

    @property
    def is_float(self) -> bool:
        return self.codes in ("f32", "f16", "bf16")

    @property
    def has_min(self) -> bool:
        return self.scales in ("dm", "super_min")

    @property
    def unit(self) -> int:
        """Columns that stay together: 1, a block or a super-block. A multiple of them is a range of bytes."""
        if self.is_float:
            return 1
        return SUPER if self.scales in ("super", "super_min") else BLOCK

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Bytes of 16 rows: a super-block's header, the scales of a block of 32 columns, a whole block."""
        if self.is_float:
            return 0, 0, BLOCK * ROWS * (4 if self.codes == "f32" else 2)
        subs = BLOCK // self.sub
        header = {"super": 32, "super_min": 64}.get(self.scales, 0)
        scales = {"d": 32, "dm": 64, "f32": 64 * subs, "super": 16 * subs, "super_min": 32 * subs}[self.scales]
        return header, scales, scales + ROWS * BLOCK // (2 if self.codes == "nibble" else 1)

    def group_bytes(self, cols: int) -> int:
        """Bytes of one group of 16 rows with `cols` columns."""
        header, _, block = self.sizes
        return cols * block // BLOCK + cols // SUPER * header

    def split(self, data: Any, cols: int) -> Fields:
        """The fields of groups [N, group_bytes], an array of numpy or jax."""
        header, scales, block = self.sizes
        if self.is_float:
            return Fields(data.reshape(len(data), -1, ROWS, block // (BLOCK * ROWS)))
        heads, blocks = None, data
        if header:
            supers = data.reshape(len(data), cols // SUPER, -1)
            heads, blocks = supers[..., :header], supers[..., header:]
        blocks = blocks.reshape(len(data), cols // BLOCK, block)

        def cut(field: Any, item: int) -> Iterator[Any]:
            """Scales, then mins if there are any: [N, count, 16, item]."""
            size = field.shape[-1] // (2 if self.has_min else 1)
            for at in range(0, field.shape[-1], size):
                yield field[..., at : at + size].reshape(len(data), -1, ROWS, item)

        coarse = cut(heads if header else blocks[..., :scales], 4 if self.scales == "f32" else 2)
        fine = cut(blocks[..., :scales], 1) if header else ()
        found = dict(zip(("d", "m"), coarse)) | dict(zip(("sc", "mn"), fine))
        return Fields(blocks[..., scales:].reshape(len(data), -1, ROWS, 4), **found)


@dataclass(frozen=True)
class Packed:
    """Base of packed matrices; `packed_pytree` makes a subclass a pytree with static layout and shape."""

    data: jax.Array  # uint8
    layout: Layout  # codes and scales
    shape: tuple[int, int]  # (rows, cols) = (outputs, inputs)

    @property
    def nbytes(self) -> int:
        return int(self.data.size)


packed_pytree = partial(jax.tree_util.register_dataclass, data_fields=["data"], meta_fields=["layout", "shape"])


@packed_pytree
@dataclass(frozen=True)
class QTensor(Packed):
    """A packed weight matrix.

    Invariant: data is uint8[ceil(rows/16), layout.group_bytes(cols)]; padding rows are zero.
    """


def take_rows(w: QTensor, ids: np.ndarray) -> QTensor:
    """Rows `ids` int64[N] of a matrix, in that order: shape (N, cols), same layout, same values. Runs on the host."""
    cols, data = w.shape[1], np.asarray(w.data)
    # int64[16, bytes of a row]: the place of each row's bytes in a group, in one order for all rows
    fields = w.layout.split(np.arange(data.shape[1])[None], cols)
    place = np.concatenate([f[0].transpose(1, 0, 2).reshape(ROWS, -1) for f in fields if f is not None], axis=1)
    out = np.zeros((-(-len(ids) // ROWS), data.shape[1]), np.uint8)
    new = np.arange(len(ids))
    out[(new // ROWS)[:, None], place[new % ROWS]] = data[(ids // ROWS)[:, None], place[ids % ROWS]]
    return QTensor(jax.device_put(out), w.layout, (len(ids), cols))
