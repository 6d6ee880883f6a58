"""A product by look-up tables: a measured negative result, kept with its benchmark (`bench lut`). No model runs on it.

A four-bit code is the sum of 2^b times its bit b, so the product of a row with four activations is a weighted sum of
four entries of one table: the sums of all subsets of the activations (T-MAC, Wei et al. 2024, arXiv:2407.00088).
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.kernels.arena import aligned_empty
from specsparse.kernels.native import cpu
from specsparse.kernels.qtensor import BLOCK, ROWS, Packed, QTensor, packed_pytree

Sums = Literal["int16", "int8", "int6"]
SUMS: tuple[Sums, ...] = ("int16", "int8", "int6")
"""The entries of a table: exact sums of int8 activations; sums of float activations in 127 steps; in 31, so that four
of them can be added as bytes."""
_STEPS = {"int8": 127.0, "int6": 31.0}
_BITS = np.arange(16)[:, None] >> np.arange(4) & 1  # [entry, activation]


@packed_pytree
@dataclass(frozen=True)
class BitPlanes(Packed):
    """A packed matrix of nibble codes, cut into bits.

    Invariant: data is that of the `QTensor` it was made of, uint8[ceil(rows/16), layout.group_bytes(cols)], but for the
    codes: byte 4 r + b of chunk c holds bit b of row r's codes, of columns 4c .. 4c + 3 in its low and of columns
    16 + 4c .. 16 + 4c + 3 in its high four bits, the first column lowest.
    """


def pack_planes(w: QTensor) -> BitPlanes:
    """The same weights as bit planes, on the host: Q4_0 and Q4_1, nibbles with f16 scales for each block."""
    layout, cols = w.layout, w.shape[1]
    assert layout.codes == "nibble" and not layout.lut and layout.scales in ("d", "dm"), layout
    data = aligned_empty(*w.data.shape)
    data[...] = np.asarray(w.data)
    blocks = data.reshape(len(data), cols // BLOCK, -1)
    codes = blocks[..., blocks.shape[-1] - ROWS * BLOCK // 2 :].view("<u4")
    # The low halves of a word's bytes are a 4 x 4 matrix of bits, and so are the high halves: both are transposed.
    for shift, mask in ((7, 0x00AA00AA), (14, 0x0000CCCC)):
        swapped = (codes ^ (codes >> np.uint32(shift))) & np.uint32(mask)
        codes ^= swapped ^ (swapped << np.uint32(shift))
    data.flags.writeable = False
    return BitPlanes(jax.device_put(data), layout, w.shape)


class Tables(NamedTuple):
    """The sums of rows of activations; a block's product is d * (scale * (sum - less) + centre) + m * shift."""

    entries: jax.Array  # int32[R, blocks, 8, 16], one table for each four columns
    scale: jax.Array  # f32[R, blocks], the size of a step
    less: jax.Array  # f32[R, blocks], of the sum of entries
    centre: jax.Array  # f32[R, blocks], the part that bits for -1 and 1 leave out
    shift: jax.Array  # f32[R, blocks], sum of the activations


def _check(x: jax.Array, w: BitPlanes, sums: str, residual: jax.Array | None) -> None:
    assert sums in SUMS, sums
    assert x.ndim == 2 and x.shape[1] == w.shape[1], (x.shape, w.shape)
    assert residual is None or residual.shape == (x.shape[0], w.shape[0]), (residual.shape, x.shape, w.shape)


def make_tables(x_RD: jax.Array, zero: int, sums: Sums) -> Tables:
    """The tables of rows f32[R, D] for a matrix whose codes count from `zero`.

    "int16" rounds activations to int8 as every product of quantised weights does, and adds them exactly. The others add
    float activations, each with the sign + or -, and round the sums in steps of the block's largest.
    """
    x = x_RD.reshape(x_RD.shape[0], -1, BLOCK)
    if sums == "int16":
        largest = jnp.max(jnp.abs(x), axis=-1)
        inverse = jnp.where(largest > 0, 127.0 / jnp.where(largest > 0, largest, 1.0), 0.0)
        q = jnp.round(x * inverse[..., None])
        scale, total = largest / 127.0, jnp.sum(q, axis=-1)
        entries = jnp.einsum("rbqk,ik->rbqi", q.reshape(*x.shape[:2], -1, 4), jnp.asarray(_BITS, jnp.float32))
        return Tables(entries.astype(jnp.int32), scale, zero * total, jnp.zeros_like(scale), scale * total)
    steps, signs = _STEPS[sums], (2 * _BITS - 1).astype(np.float32)
    quads = x.reshape(*x.shape[:2], -1, 4)
    exact = sum(quads[..., k, None] * signs[None, None, None, :, k] for k in range(4))
    largest = jnp.max(jnp.abs(exact), axis=(-1, -2))
    inverse = jnp.where(largest > 0, steps / jnp.where(largest > 0, largest, 1.0), 0.0)
    entries = jnp.round(exact * inverse[..., None, None]).astype(jnp.int32)
    total = jnp.sum(x, axis=-1)
    return Tables(entries, 0.5 * (largest / steps), jnp.zeros_like(total), (7.5 - zero) * total, total)


def lut_linear(x_RD: jax.Array, w: BitPlanes, *, sums: Sums = "int16", residual: jax.Array | None = None) -> jax.Array:
    """`reference_linear` by the C++ kernels behind `jax.ffi`; with "int16" sums `native.cpu.linear`, bit for bit.
    UserError: the kernels were not built."""
    _check(x_RD, w, sums, residual)
    shape = (x_RD.shape[0], w.shape[0])
    attributes = {"matrices": cpu.describe(w), "sums": np.int64(SUMS.index(sums))}
    return cpu.call("lut_linear", (shape, jnp.float32), x_RD, w.data, cpu.given(residual), **attributes)


def reference_linear(
    x_RD: jax.Array, w: BitPlanes, *, sums: Sums = "int16", residual: jax.Array | None = None
) -> jax.Array:
    """f32[R, O]: w [O, D] times rows f32[R, D] by tables of their sums, in jnp; the oracle of `lut_linear`.

    `residual` f32[R, O] is added to the product.
    """
    _check(x_RD, w, sums, residual)
    tables = make_tables(x_RD, w.layout.zero, sums)
    d, m = _scales(w)

    def group(one: tuple[jax.Array, ...]) -> jax.Array:
        chosen, d, m = one  # [blocks, 16, 8, 4], [blocks, 16] twice
        at = chosen.transpose(0, 2, 1, 3).reshape(*chosen.shape[::2], -1)[None]
        found = jnp.take_along_axis(tables.entries, at, axis=-1).reshape(len(x_RD), *at.shape[1:3], ROWS, 4)
        dot = jnp.einsum("rbqlp,p->rbl", found, jnp.array([1, 2, 4, 8], jnp.int32)).astype(jnp.float32)
        dot = tables.scale[..., None] * (dot - tables.less[..., None]) + tables.centre[..., None]
        return jnp.sum(d[None] * dot + m[None] * tables.shift[..., None], axis=1)

    y_RO = jax.lax.map(group, (_indices(w), d, m)).transpose(1, 0, 2).reshape(len(x_RD), -1)[:, : w.shape[0]]
    return y_RO if residual is None else residual + y_RO


def _scales(w: BitPlanes) -> tuple[jax.Array, jax.Array]:
    """d and m (zeros if there is none) f32[groups, blocks, 16]."""
    blocks = w.data.reshape(len(w.data), w.shape[1] // BLOCK, -1)
    d, m = (
        jax.lax.bitcast_convert_type(blocks[..., at : at + 2 * ROWS].reshape(*blocks.shape[:2], ROWS, 2), jnp.float16)
        for at in (0, 2 * ROWS)
    )
    d = d.astype(jnp.float32)
    return d, m.astype(jnp.float32) if w.layout.scales == "dm" else jnp.zeros_like(d)


def _indices(w: BitPlanes) -> jax.Array:
    """Entries to look up, int32[groups, blocks, 16 rows, 8 quads, 4 bits]."""
    blocks = w.data.reshape(len(w.data), w.shape[1] // BLOCK, -1)
    codes = blocks[..., blocks.shape[-1] - ROWS * BLOCK // 2 :].reshape(*blocks.shape[:2], 4, ROWS, 4)
    return jnp.concatenate([codes & 15, codes >> 4], axis=2).astype(jnp.int32).swapaxes(2, 3)
