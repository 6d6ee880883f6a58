"""Packed weight matrices: what the kernels read.

A matrix is cut into groups of 16 rows; within a group the columns follow each other in tiles, scales before codes, so
that one
thread reads one stream of memory. `docs/layouts.md` gives the byte layout.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax

ROWS = 16
"""Rows of a group; one lane of a 16-wide float vector each."""
BLOCK = 32
"""Columns that share one activation scale."""
SUPER = 256
"""Columns under one super-block header."""

Codes = Literal["nibble", "int8", "f32", "f16", "bf16"]
Scales = Literal["none", "d", "dm", "f32", "super", "super_min"]


@dataclass(frozen=True)
class Layout:
    """How the bytes of a group are read. Static under jit.

    Attributes:
        codes: what a stored weight is.
        scales: how its scale (and min) is coded.
        sub: columns under one scale, 32 or 16.
        zero: subtracted from a nibble code (8 for Q4_0).
        lut: 16 int8 values a nibble code stands for, or () when it stands for itself.
        source: the GGUF type it was packed from, for reports.
    """

    codes: Codes
    scales: Scales = "none"
    sub: int = BLOCK
    zero: int = 0
    lut: tuple[int, ...] = ()
    source: str = ""

    @property
    def is_float(self) -> bool:
        """Whether weights are stored as floats, without blocks."""
        return self.codes in ("f32", "f16", "bf16")

    @property
    def unit(self) -> int:
        """Columns that cannot be parted: one, a block, or a super-block. A multiple of them is a range of bytes."""
        if self.is_float:
            return 1
        return SUPER if self.scales in ("super", "super_min") else BLOCK

    def group_bytes(self, cols: int) -> int:
        """Bytes of one group of 16 rows with `cols` columns."""
        if self.is_float:
            return cols * ROWS * (4 if self.codes == "f32" else 2)
        subs = BLOCK // self.sub
        code = ROWS * BLOCK // (2 if self.codes == "nibble" else 1)
        per_block = {"d": 32, "dm": 64, "f32": 64 * subs, "super": 16 * subs, "super_min": 32 * subs}[
            self.scales
        ] + code
        header = {"super": 32, "super_min": 64}.get(self.scales, 0)
        return cols // BLOCK * per_block + (cols // SUPER * header if header else 0)


@dataclass(frozen=True)
class Packed:
    """Base of packed matrices; `packed_pytree` makes a subclass a pytree with static layout and shape.

    Attributes:
        data: uint8 bytes.
        layout: what codes and scales are.
        shape: (rows, cols) = (outputs, inputs).
    """

    data: jax.Array
    layout: Layout
    shape: tuple[int, int]

    @property
    def nbytes(self) -> int:
        """Bytes read by one use of the whole matrix."""
        return int(self.data.size)


packed_pytree = partial(jax.tree_util.register_dataclass, data_fields=["data"], meta_fields=["layout", "shape"])


@packed_pytree
@dataclass(frozen=True)
class QTensor(Packed):
    """A packed weight matrix.

    Invariant: data is uint8[ceil(rows/16), layout.group_bytes(cols)]; padding rows are zero.
    """
