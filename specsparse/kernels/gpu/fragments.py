"""Operands of a GPU's packed product in the order in which its threads read them: one long load a thread.

A tile is 64 outputs of four warps, a piece 64 columns of it. Thread (warp, g, t) of a tile holds the operand of the
instruction mma.m16n8k32: of rows 16 warp + g and 8 below, columns 16 h + 4 t + 0..3 of each block of 32, h = 0, 1.
Rows of activations are int8 codes, and a scale for each block of 32.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.kernels.qtensor import BLOCK, SUPER, Fields, Layout, QTensor

TILE = 64
"""Outputs of a tile."""
PIECE = 64
"""Columns of a piece: two blocks. Of nibble codes a byte has a column of the first block low and of the second high."""
_BLOCKS = PIECE // BLOCK

_register = jax.tree_util.register_dataclass


@partial(_register, data_fields=["codes", "scales", "subs"], meta_fields=["layout", "shape"])
@dataclass(frozen=True)
class Fragments:
    """A packed weight matrix of T tiles and P pieces; padding has scale 0."""

    # int32[T, P, 128, w]: words of a thread, 4 of nibbles (word 2 h + e is of row g + 8 e) or 8 of bytes, the first
    # block before the second
    codes: jax.Array
    # of thread groups (warp, g): f16[T, P, 32, 4 or 8], d of rows g and g + 8 of the two blocks, then m; or f16[T, S,
    # 32, 2 or 4] headers of S super-blocks; or f32[T, P, 32, 4 subs]
    scales: jax.Array
    # int32[T, P, 32, words] of byte scales, and then mins, in the order of `scales`; None without super-blocks
    subs: jax.Array | None
    layout: Layout  # of the `QTensor` it was made of
    shape: tuple[int, int]  # (rows, cols) of the matrix

    @property
    def nbytes(self) -> int:
        return sum(a.size * a.dtype.itemsize for a in (self.codes, self.scales, self.subs) if a is not None)

    @property
    def tiles(self) -> int:
        return self.codes.shape[0]

    @property
    def pieces(self) -> int:
        return self.codes.shape[1]


@partial(_register, data_fields=["codes", "scales"], meta_fields=["tiles"])
@dataclass(frozen=True)
class PackedRows:
    """R rows of activations in n tiles of eight, P pieces of 64 columns."""

    codes: jax.Array  # int32[P, 32 n, 4]: lane 4 g + t of a tile has columns 16 h + 4 t + 0..3 of row g, block by block
    scales: jax.Array  # f32[P, 4 n, 4]: for rows 2 t and 2 t + 1 of a tile, block by block
    tiles: int


def fragments(w: QTensor) -> Fragments:
    """Quantised weights in a GPU's order, made on the host once."""
    assert not w.layout.is_float, w.layout
    rows, cols = w.shape
    fields = Fields(*(f if f is None else np.asarray(f) for f in w.layout.split(np.asarray(w.data), cols)))
    chunks = fields.codes  # of four columns, uint8[N, chunks, 16, 4]
    if w.layout.codes == "nibble":
        blocks = chunks.reshape(len(chunks), -1, 1, 4, *chunks.shape[2:])
        chunks = np.concatenate([blocks & 15, blocks >> 4], axis=2).reshape(len(chunks), -1, *chunks.shape[2:])
    tiles, pieces = -(-rows // TILE), -(-cols // PIECE)

    def padded(values: np.ndarray, per_piece: int) -> np.ndarray:
        """[T, 4 warps, 2, 8, pieces or supers, per_piece, bytes] of values [N, count, 16, bytes]."""
        values = values.transpose(0, 2, 1, 3).reshape(-1, values.shape[1], values.shape[3])
        count = -(-values.shape[1] // per_piece) * per_piece
        room = np.zeros((tiles * TILE, count, values.shape[2]), np.uint8)
        some = values[: tiles * TILE]
        room[: len(some), : some.shape[1]] = some
        return room.reshape(tiles, 4, 2, 8, -1, per_piece, values.shape[2])

    a = padded(chunks, 2 * _BLOCKS * 4)  # chunks of four columns: block, half, t
    a = a.reshape(*a.shape[:5], _BLOCKS, 2, 4, 4).transpose(0, 4, 1, 3, 7, 5, 6, 2, 8)  # T P warp g t block h e byte
    if w.layout.codes == "nibble":
        a = a[:, :, :, :, :, 0] | (a[:, :, :, :, :, 1] << np.uint8(4))
    a = np.ascontiguousarray(a).reshape(tiles, pieces, 128, -1).view(np.int32)

    def by_group(values: np.ndarray, per_piece: int, dtype: np.dtype) -> np.ndarray:
        """[T, pieces or supers, 32, 2 per_piece] of a scale of each row."""
        laid = padded(values, per_piece).transpose(0, 4, 1, 3, 5, 2, 6)
        return np.ascontiguousarray(laid).reshape(*laid.shape[:2], 32, -1).view(dtype)

    is_super = fields.sc is not None
    item = np.dtype("<f4" if w.layout.scales == "f32" else "<f2")
    one = 1 if is_super else PIECE // w.layout.sub
    scales = [by_group(field, one, item) for field in (fields.d, fields.m) if field is not None]
    subs = [by_group(f, PIECE // w.layout.sub, np.dtype(np.int32)) for f in (fields.sc, fields.mn) if f is not None]
    put = jax.device_put
    return Fragments(
        codes=put(a),
        scales=put(np.concatenate(scales, axis=-1)),
        subs=put(np.concatenate(subs, axis=-1)) if subs else None,
        layout=w.layout,
        shape=w.shape,
    )


def take_rows(w: Fragments, ids: np.ndarray) -> Fragments:
    """Rows `ids` int64[N] of the matrix, in that order; made on the host."""
    tiles = -(-len(ids) // TILE)

    def taken(array: jax.Array, item: int) -> jax.Array:
        """The rows of an array whose numbers of `item` bytes lie by thread group (warp, g), number, row g or g + 8."""
        held = np.asarray(array)
        laid = held.view(np.uint8).reshape(*held.shape[:2], 4, 8, -1, 2, item).transpose(0, 2, 5, 3, 1, 4, 6)
        own = np.zeros((tiles * TILE, *laid.shape[4:]), np.uint8)
        own[: len(ids)] = laid.reshape(-1, *laid.shape[4:])[ids]
        back = own.reshape(tiles, *laid.shape[1:]).transpose(0, 4, 1, 3, 5, 2, 6)
        return jax.device_put(np.ascontiguousarray(back).reshape(tiles, *held.shape[1:-1], -1).view(held.dtype))

    return Fragments(
        codes=taken(w.codes, 4),
        scales=taken(w.scales, w.scales.dtype.itemsize),
        subs=None if w.subs is None else taken(w.subs, 1),
        layout=w.layout,
        shape=(len(ids), w.shape[1]),
    )


def abstract(layout: Layout, shape: tuple[int, int]) -> Fragments:
    """`fragments` of such a matrix by shapes and types alone (`jax.ShapeDtypeStruct`)."""
    tiles, pieces, subs = -(-shape[0] // TILE), -(-shape[1] // PIECE), PIECE // layout.sub
    fields = 2 if layout.has_min else 1
    of: Any = jax.ShapeDtypeStruct  # stands for an array
    words = 4 if layout.codes == "nibble" else 8
    if layout.scales.startswith("super"):
        scales = of((tiles, -(-shape[1] // SUPER), 32, 2 * fields), jnp.float16)
        below = of((tiles, pieces, 32, subs * fields // 2), jnp.int32)
    else:
        kind = jnp.float32 if layout.scales == "f32" else jnp.float16
        scales, below = of((tiles, pieces, 32, 2 * subs * fields), kind), None
    return Fragments(of((tiles, pieces, 128, words), jnp.int32), scales, below, layout, shape)


def unpack(codes: jax.Array, scales: jax.Array, subs: jax.Array | None, layout: Layout):
    """Fields of `Fragments` of some tiles, any axes before those of P pieces, as numbers; rows of a tile in order.

    With super-blocks P is a multiple of four.

    Returns:
        codes int8[.., 64, 64 P], zero not yet subtracted; d f32[.., 64, 64 P / sub]; m, the same, added to each weight,
        or None.
    """
    lead, pieces = codes.shape[:-3], codes.shape[-3]
    bytes_ = jax.lax.bitcast_convert_type(codes, jnp.uint8)
    if layout.codes == "nibble":
        bytes_ = bytes_.reshape(*lead, pieces, 4, 8, 4, 1, 2, 2, 4)
        bytes_ = jnp.concatenate([bytes_ & jnp.uint8(15), bytes_ >> jnp.uint8(4)], axis=-4)
    bytes_ = bytes_.reshape(-1, pieces, 4, 8, 4, _BLOCKS, 2, 2, 4)
    if layout.lut:
        numbers = jnp.asarray(layout.lut, jnp.int8)[bytes_.astype(jnp.int32)]
    else:
        numbers = jax.lax.bitcast_convert_type(bytes_, jnp.int8)
    # axes: lead P warp g t block h e byte -> lead, warp e g, P block h t byte
    numbers = numbers.transpose(0, 2, 7, 3, 1, 5, 6, 4, 8).reshape(*lead, TILE, pieces * PIECE)

    def rows(values: jax.Array) -> jax.Array:
        """[.., P or S, 32, 2 n] -> [.., 64, n P or n S]."""
        n = values.shape[-1] // 2
        laid = values.reshape(-1, values.shape[-3], 4, 8, n, 2).transpose(0, 2, 5, 3, 1, 4)
        return laid.reshape(*lead, TILE, -1)

    def times(head: jax.Array, words: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """Headers [.., S] times byte scales [.., S * (256 / sub)]."""
        fine = rows(jax.lax.bitcast_convert_type(words, dtype).reshape(*words.shape[:-1], -1))
        return jnp.repeat(head, SUPER // layout.sub, axis=-1)[..., : fine.shape[-1]] * fine.astype(jnp.float32)

    d, m = jnp.split(scales, 2, axis=-1) if layout.has_min else (scales, None)
    d = rows(d.astype(jnp.float32))
    m = None if m is None else rows(m.astype(jnp.float32))
    if subs is not None:
        sc, mn = jnp.split(subs, 2, axis=-1) if layout.has_min else (subs, None)
        d = times(d, sc, jnp.int8)
        m = None if m is None or mn is None else -times(m, mn, jnp.uint8)
    return numbers, d, m


def widened(w: Fragments, dtype: jnp.dtype) -> jax.Array:
    """The whole matrix as floats [rows, cols], the operand of a prompt's product."""
    rows, cols = w.shape
    values = _values(w.codes, w.scales, w.subs, w.layout)
    return values.astype(dtype).reshape(-1, w.pieces * PIECE)[:rows, :cols]


def embed_rows(w: Fragments, ids: jax.Array) -> jax.Array:
    """Rows `ids` int32[R] as f32[R, cols]. Ids out of range are clipped."""
    ids = jnp.clip(ids, 0, w.shape[0] - 1)
    codes, scales, subs = jax.tree.map(lambda a: a[ids // TILE], (w.codes, w.scales, w.subs))
    values = _values(codes, scales, subs, w.layout)
    return jnp.take_along_axis(values, (ids % TILE)[:, None, None], axis=1)[:, 0, : w.shape[1]]


def _values(codes: jax.Array, scales: jax.Array, subs: jax.Array | None, layout: Layout) -> jax.Array:
    """f32[.., 64, 64 P] of fields that `unpack` takes."""
    codes, d, m = unpack(codes, scales, subs, layout)
    numbers = codes.astype(jnp.float32).reshape(*d.shape, layout.sub) - jnp.float32(layout.zero)
    values = numbers * d[..., None]
    if m is not None:
        values = values + m[..., None]
    return values.reshape(codes.shape)


def quantise(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rows f32[R, K] as int8[R, K] and a scale f32[R, K / 32], as docs/layouts.md defines them."""
    blocks = x.reshape(x.shape[0], -1, BLOCK)
    largest = jnp.max(jnp.abs(blocks), axis=-1)
    some = largest > jnp.float32(0)
    inverse = jnp.where(some, jnp.float32(127) / jnp.where(some, largest, jnp.float32(1)), jnp.float32(0))
    codes = jnp.round(blocks * inverse[..., None]).astype(jnp.int8)
    return codes.reshape(x.shape), largest / jnp.float32(127)


def block_sums(codes: jax.Array, scales: jax.Array, w: Fragments) -> jax.Array | None:
    """Sums of codes under a weight's scale, [R, K / sub]: int32 if a zero is subtracted from codes, f32 times the row's
    scale if a weight has a min, else None."""
    layout = w.layout
    if not layout.zero and not layout.has_min:
        return None
    sums = jnp.sum(codes.reshape(len(codes), -1, layout.sub).astype(jnp.int32), axis=-1)
    if layout.zero:
        return sums
    return jnp.repeat(scales, BLOCK // layout.sub, axis=-1) * sums.astype(jnp.float32)


def pack_rows(codes: jax.Array, scales: jax.Array) -> PackedRows:
    """Quantised rows, padded with zeros to whole tiles and pieces."""
    pieces = -(-codes.shape[1] // PIECE)
    tiles = -(-codes.shape[0] // 8)

    def laid(values: jax.Array, per_piece: int) -> jax.Array:  # [n, 8, P, per_piece]
        short = tiles * 8 - values.shape[0], pieces * per_piece - values.shape[1]
        return jnp.pad(values, ((0, short[0]), (0, short[1]))).reshape(tiles, 8, pieces, per_piece)

    pairs = laid(scales, 2).reshape(tiles, 4, 2, pieces, 2).transpose(3, 0, 1, 4, 2)
    a = laid(codes, PIECE).reshape(tiles, 8, pieces, 2, 2, 4, 4).transpose(2, 0, 1, 5, 3, 4, 6)
    words = jax.lax.bitcast_convert_type(a, jnp.int32).reshape(pieces, 32 * tiles, 4)
    return PackedRows(words, pairs.reshape(pieces, 4 * tiles, 4), tiles)


# The tiles and columns of each warpgroup: static, by shapes alone.

SUMS = 8
"""Tiles times row tiles that a warpgroup sums: four registers of a thread each."""
_MOST_TILES = 4  # tiles of a warpgroup at most
_MOST_PARTS = (4, 2)
"""Warpgroups of a block at most, for up to three row tiles and for more: 512 threads may have 128 registers each."""
_ENOUGH = 264  # blocks that are enough: two for each processor of an H200
_SPLIT_SHARE = 0.06  # share of the weights' bytes that reads of partial sums may add


@dataclass(frozen=True)
class Plan:
    """The division of one product; T = groups * tiles, and columns = splits * parts * steps * unit pieces."""

    tiles: int  # of 64 outputs of each matrix that one warpgroup computes, so that rows are read once for all of them
    parts: int  # ranges of columns in a block, one a warpgroup
    splits: int  # ranges of columns that blocks take; their sums are added up outside
    steps: int  # of a warpgroup
    unit: int  # pieces of 64 columns in a step: four if scales are of super-blocks, else one

    @property
    def ranges(self) -> int:
        """Ranges of columns that are summed on their own."""
        return self.splits * self.parts


def plan(w: Fragments, row_tiles: int, *, matrices: int = 1) -> Plan:
    """The plan for 8 `row_tiles` rows and a matrix, or `matrices` of one shape that one kernel multiplies."""
    unit = SUPER // PIECE if w.subs is not None else 1
    units = w.pieces // unit
    sums = SUMS - w.layout.has_min  # sums of rows take registers too
    at_once = max(1, min(_MOST_TILES, sums // row_tiles) // matrices)
    tiles = max(n for n in range(1, at_once + 1) if w.tiles % n == 0)
    parts = max(n for n in range(1, _MOST_PARTS[row_tiles > 3] + 1) if units % n == 0)
    left, groups = units // parts, w.tiles // tiles
    row_bytes = w.nbytes / (w.tiles * TILE)
    most = max(1.0, _SPLIT_SHARE * row_bytes / (4 * 8 * row_tiles))
    splits = max(n for n in range(1, left + 1) if left % n == 0 and n <= most and (n == 1 or groups * n <= _ENOUGH))
    return Plan(tiles, parts, splits, left // splits, unit)
