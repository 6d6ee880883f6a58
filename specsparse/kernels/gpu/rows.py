"""Rows of activations as the GPU's product reads them: int8 codes, and a scale for each block of 32."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from specsparse.kernels.gpu.fragments import PIECE, Fragments
from specsparse.kernels.qtensor import BLOCK


@partial(jax.tree_util.register_dataclass, data_fields=["codes", "scales"], meta_fields=["tiles"])
@dataclass(frozen=True)
class PackedRows:
    """R rows in n tiles of eight, P pieces of 64 columns.

    Attributes:
        codes: int32[P, 32 n, 4]: lane 4 g + t of a tile has columns 16 h + 4 t + 0..3 of row g, block by block.
        scales: f32[P, 4 n, 4]: for rows 2 t and 2 t + 1 of a tile, block by block.
        tiles: n.
    """

    codes: jax.Array
    scales: jax.Array
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
    """Sums of codes beside a weight's scale, [R, K / sub]: int32 where a zero is subtracted from codes, f32 times the
    row's scale where a weight has a min; None elsewhere."""
    layout = w.layout
    if not layout.zero and w.layout.scales not in ("dm", "super_min"):
        return None
    sums = jnp.sum(codes.reshape(len(codes), -1, layout.sub).astype(jnp.int32), axis=-1)
    if layout.zero:
        return sums
    return jnp.repeat(scales, BLOCK // layout.sub, axis=-1) * sums.astype(jnp.float32)


def pack_rows(codes: jax.Array, scales: jax.Array) -> PackedRows:
    """Quantised rows for matrices; rows are padded to eight and columns to whole pieces, with zeros."""
    pieces = -(-codes.shape[1] // PIECE)
    tiles = -(-codes.shape[0] // 8)

    def laid(values: jax.Array, per_piece: int) -> jax.Array:
        """[n, 8, P, per_piece]."""
        short = tiles * 8 - values.shape[0], pieces * per_piece - values.shape[1]
        return jnp.pad(values, ((0, short[0]), (0, short[1]))).reshape(tiles, 8, pieces, per_piece)

    def by_pair(values: jax.Array, per_piece: int) -> jax.Array:
        """[P, 4 n, 2 per_piece]."""
        a = laid(values, per_piece).reshape(tiles, 4, 2, pieces, per_piece)
        return a.transpose(3, 0, 1, 4, 2).reshape(pieces, 4 * tiles, 2 * per_piece)

    a = laid(codes, PIECE).reshape(tiles, 8, pieces, 2, 2, 4, 4).transpose(2, 0, 1, 5, 3, 4, 6)
    words = jax.lax.bitcast_convert_type(a, jnp.int32).reshape(pieces, 32 * tiles, 4)
    return PackedRows(words, by_pair(scales, 2), tiles)
