"""How a product is divided over a GPU: the tiles and columns of each warpgroup. Static, by shapes alone."""

from dataclasses import dataclass

from specsparse.kernels.gpu.fragments import PIECE, TILE, Fragments
from specsparse.kernels.qtensor import SUPER

SUMS = 8
"""Tiles times row tiles that a warpgroup sums: four registers of a thread each."""
_TILES = 4
"""Tiles of a warpgroup at most."""
_PARTS = (4, 2)
"""Warpgroups of a block at most, for up to three row tiles and for more: 512 threads may have 128 registers each."""
_BLOCKS = 264
"""Blocks that are enough: two for each processor of an H200."""
_SPLIT_SHARE = 0.06
"""Share of the weights' bytes that reads of partial sums may add."""


@dataclass(frozen=True)
class Plan:
    """The division of one product; T = groups * tiles, and columns = splits * parts * steps * unit pieces.

    Attributes:
        tiles: of 64 outputs of each matrix that one warpgroup computes, so that rows are read once for all of them.
        parts: ranges of columns in a block, one a warpgroup.
        splits: ranges of columns that blocks take; their sums are added up outside.
        steps: of a warpgroup.
        unit: pieces of 64 columns in a step: four if scales are of super-blocks, else one.
    """

    tiles: int
    parts: int
    splits: int
    steps: int
    unit: int

    @property
    def ranges(self) -> int:
        """Ranges of columns that are summed on their own."""
        return self.splits * self.parts


def plan(w: Fragments, row_tiles: int, *, matrices: int = 1) -> Plan:
    """The plan for 8 `row_tiles` rows and a matrix, or `matrices` of one shape that one kernel multiplies."""
    unit = SUPER // PIECE if w.subs is not None else 1
    units = w.pieces // unit
    sums = SUMS - w.layout.has_min  # sums of rows take registers too
    at_once = max(1, min(_TILES, sums // row_tiles) // matrices)
    tiles = max(n for n in range(1, at_once + 1) if w.tiles % n == 0)
    parts = max(n for n in range(1, _PARTS[row_tiles > 3] + 1) if units % n == 0)
    left, groups = units // parts, w.tiles // tiles
    row_bytes = w.nbytes / (w.tiles * TILE)
    most = max(1.0, _SPLIT_SHARE * row_bytes / (4 * 8 * row_tiles))
    splits = max(n for n in range(1, left + 1) if left % n == 0 and n <= most and (n == 1 or groups * n <= _BLOCKS))
    return Plan(tiles, parts, splits, left // splits, unit)
