"""Rows of activations as the GPU's product reads them: int8 codes, a scale and a sum for each block of 32."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from specsparse.kernels.gpu.fragments import PIECE, Fragments
from specsparse.kernels.qtensor import BLOCK


@dataclass(frozen=True)
class PackedRows:
    """R rows in n tiles of eight, P pieces of 64 columns.

    Attributes:
        codes: int32[P, 32 n, 4]: lane 4 g + t of a tile has columns 16 h + 4 t + 0..3 of row g, block by block.
        scales: f32[P, 4 n, 4]: for rows 2 t and 2 t + 1 of a tile, block by block.
        sums: sums of codes, [P, 4 n, 2 k]: int32 where a zero is subtracted from codes, f32 times the scale where a
            weight has a min, for k scales of a piece; None elsewhere.
        tiles: n.
    """

    codes: jax.Array
    scales: jax.Array
    sums: jax.Array | None
    tiles: int


def quantise(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rows f32[R, K] as int8[R, K] and a scale f32[R, K / 32], as docs/layouts.md defines them."""
    blocks = x.reshape(x.shape[0], -1, BLOCK)
    largest = jnp.max(jnp.abs(blocks), axis=-1)
    some = largest > jnp.float32(0)
    inverse = jnp.where(some, jnp.float32(127) / jnp.where(some, largest, jnp.float32(1)), jnp.float32(0))
    codes = jnp.round(blocks * inverse[..., None]).astype(jnp.int8)
    return codes.reshape(x.shape), largest / jnp.float32(127)


def block_sums(codes: jax.Array, scales: jax.Array, w: Fragments) -> jax.Array | None:
    """What `PackedRows.sums` holds, [R, K / sub]; None where nothing needs it."""
    layout = w.layout
    if not layout.zero and w.layout.scales not in ("dm", "super_min"):
        return None
    sums = jnp.sum(codes.reshape(len(codes), -1, layout.sub).astype(jnp.int32), axis=-1)
    if layout.zero:
        return sums
    return jnp.repeat(scales, BLOCK // layout.sub, axis=-1) * sums.astype(jnp.float32)


def pack_rows(codes: jax.Array, scales: jax.Array, w: Fragments) -> PackedRows:
    """Quantised rows for a matrix; rows are padded to eight and columns to the matrix's pieces, with zeros."""
    tiles = -(-codes.shape[0] // 8)

    def laid(values: jax.Array, per_piece: int) -> jax.Array:
        """[n, 8, P, per_piece]."""
        short = tiles * 8 - values.shape[0], w.pieces * per_piece - values.shape[1]
        return jnp.pad(values, ((0, short[0]), (0, short[1]))).reshape(tiles, 8, w.pieces, per_piece)

    def by_pair(values: jax.Array, per_piece: int) -> jax.Array:
        """[P, 4 n, 2 per_piece]."""
        a = laid(values, per_piece).reshape(tiles, 4, 2, w.pieces, per_piece)
        return a.transpose(3, 0, 1, 4, 2).reshape(w.pieces, 4 * tiles, 2 * per_piece)

    a = laid(codes, PIECE).reshape(tiles, 8, w.pieces, 2, 2, 4, 4).transpose(2, 0, 1, 5, 3, 4, 6)
    words = jax.lax.bitcast_convert_type(a, jnp.int32).reshape(w.pieces, 32 * tiles, 4)
    sums = block_sums(codes, scales, w)
    return PackedRows(words, by_pair(scales, 2), None if sums is None else by_pair(sums, w.per_piece), tiles)
