"""Packed weights back to float32, in plain jnp: the oracle of the kernels, and what runs where there are none.

Every product below is exact in float32 (an f16 scale has 11 bits, byte scales and codes at most 13 more), so that only
the final sum with a min rounds, and fusing it with a product changes no bit. The one exception is MXFP4 with a scale of
2^-127 or less: XLA may take such subnormal scales for zero, an error below 2^-123.
"""

from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from specsparse.kernels.qtensor import BLOCK, ROWS, SUPER, Layout, QTensor

_FLOATS = {"f32": jnp.float32, "f16": jnp.float16, "bf16": jnp.bfloat16}
_NIBBLE_BYTES, _INT8_BYTES = ROWS * BLOCK // 2, ROWS * BLOCK


class _Fields(NamedTuple):
    """The bytes of N groups by field, uint8[N, count, lanes, bytes of one item]; count runs along the columns."""

    codes: jax.Array
    d: jax.Array | None = None
    m: jax.Array | None = None
    sc: jax.Array | None = None
    mn: jax.Array | None = None


def dequantize(w: QTensor) -> jax.Array:
    """The whole matrix, float32[rows, cols]; equal to gguf's dequantiser."""
    rows, cols = w.shape
    values = dequantize_groups(w.data, w.layout, cols)
    return values.transpose(0, 2, 1).reshape(-1, cols)[:rows]


def dequantize_groups(data: jax.Array, layout: Layout, cols: int) -> jax.Array:
    """Groups uint8[N, group_bytes] as float32[N, cols, 16], the rows of a group innermost."""
    return _values(_split(data, layout, cols), layout)


def embed_rows(w: QTensor, ids: jax.Array) -> jax.Array:
    """Rows `ids` int32[R] as float32[R, cols], read from their groups only. Ids out of range are clipped."""
    ids = jnp.clip(ids, 0, w.shape[0] - 1)
    groups = w.data.at[ids // ROWS].get(mode="promise_in_bounds")
    lane = (ids % ROWS).reshape(-1, 1, 1, 1)
    fields = _split(groups, w.layout, w.shape[1])
    row = jax.tree.map(lambda field: jnp.take_along_axis(field, lane, axis=2, mode="promise_in_bounds"), fields)
    return _values(row, w.layout)[..., 0]


def pack_float(array: jax.Array, codes: Literal["f32", "f16", "bf16"] = "f32") -> QTensor:
    """float32[rows, cols] as a float QTensor, rounded to nearest even for the two-byte codes."""
    return QTensor(_float_groups(array, codes), Layout(codes, source=codes.upper()), array.shape)


@partial(jax.jit, static_argnames="codes")  # one program a shape; step by step it would be eight
def _float_groups(array: jax.Array, codes: str) -> jax.Array:
    """uint8[N, group_bytes] of a matrix."""
    rows, cols = array.shape
    values = jnp.pad(array.astype(_FLOATS[codes]), ((0, -rows % ROWS), (0, 0)))
    values = values.reshape(-1, ROWS, cols).transpose(0, 2, 1)
    return jax.lax.bitcast_convert_type(values, jnp.uint8).reshape(values.shape[0], -1)


def _split(data: jax.Array, layout: Layout, cols: int) -> _Fields:
    """Cuts groups uint8[N, group_bytes] into their fields."""
    n = data.shape[0]
    if layout.is_float:
        return _Fields(_lanes(data, _FLOATS[layout.codes].dtype.itemsize))
    if layout.scales in ("super", "super_min"):
        return _split_super(data.reshape(n, cols // SUPER, -1), layout)
    blocks = data.reshape(n, cols // BLOCK, -1)
    if layout.scales == "dm":
        return _Fields(_lanes(blocks[..., 64:], 4), _lanes(blocks[..., :32], 2), _lanes(blocks[..., 32:64], 2))
    item = 4 if layout.scales == "f32" else 2
    size = item * ROWS * (BLOCK // layout.sub if layout.scales == "f32" else 1)
    return _Fields(_lanes(blocks[..., size:], 4), _lanes(blocks[..., :size], item))


def _split_super(supers: jax.Array, layout: Layout) -> _Fields:
    """The same for super-blocks uint8[N, S, bytes]."""
    n, count, _ = supers.shape
    has_min = layout.scales == "super_min"
    header = 64 if has_min else 32
    blocks = supers[..., header:].reshape(n, count * SUPER // BLOCK, -1)
    size = ROWS * (BLOCK // layout.sub)
    d, sc = _lanes(supers[..., :32], 2), _lanes(blocks[..., :size], 1)
    if not has_min:
        return _Fields(_lanes(blocks[..., size:], 4), d, sc=sc)
    m, mn = _lanes(supers[..., 32:64], 2), _lanes(blocks[..., size : 2 * size], 1)
    return _Fields(_lanes(blocks[..., 2 * size :], 4), d, m, sc, mn)


def _lanes(field: jax.Array, item: int) -> jax.Array:
    """uint8[N, .., bytes] -> uint8[N, count, 16, item]."""
    return field.reshape(field.shape[0], -1, ROWS, item)


def _values(fields: _Fields, layout: Layout) -> jax.Array:
    """float32[N, cols, lanes]."""
    if layout.is_float:
        return jax.lax.bitcast_convert_type(fields.codes, _FLOATS[layout.codes]).astype(jnp.float32)
    if fields.sc is None:
        scale = _float(fields.d)
        mins = None if fields.m is None else _float(fields.m)
    else:
        scale = _scaled(fields.d, fields.sc, jnp.int8)
        mins = None if fields.mn is None else -_scaled(fields.m, fields.mn, jnp.uint8)
    codes = _codes(fields.codes, layout)
    n, cols, lanes = codes.shape
    values = codes.reshape(n, scale.shape[1], -1, lanes) * scale[:, :, None]
    if mins is not None:
        values = values + mins[:, :, None]
    return values.reshape(n, cols, lanes)


def _float(field: jax.Array) -> jax.Array:
    """Two or four bytes in the last axis as one float32."""
    dtype = jnp.float16 if field.shape[-1] == 2 else jnp.float32
    return jax.lax.bitcast_convert_type(field, dtype).astype(jnp.float32)


def _scaled(d: jax.Array, sub: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Super scales [N, S, lanes, 2] times byte scales of `dtype` [N, S * k, lanes, 1]: float32[N, S * k, lanes]."""
    scale = jax.lax.bitcast_convert_type(sub[..., 0], dtype).astype(jnp.float32)
    n, supers, lanes = d.shape[:3]
    return (_float(d)[:, :, None] * scale.reshape(n, supers, -1, lanes)).reshape(scale.shape)


def _codes(chunks: jax.Array, layout: Layout) -> jax.Array:
    """Chunks uint8[N, count, lanes, 4] as the float32[N, cols, lanes] that scales multiply."""
    n, _, lanes, _ = chunks.shape
    if layout.codes == "int8":
        signed = jax.lax.bitcast_convert_type(chunks, jnp.int8).astype(jnp.float32)
        return signed.transpose(0, 1, 3, 2).reshape(n, -1, lanes)
    chunks = chunks.transpose(0, 1, 3, 2).reshape(n, -1, 1, BLOCK // 2, lanes)
    halves = jnp.concatenate([chunks & jnp.uint8(0x0F), chunks >> jnp.uint8(4)], axis=2).reshape(n, -1, lanes)
    if layout.lut:
        return _lookup(halves, layout.lut)
    return halves.astype(jnp.float32) - float(layout.zero)


def _lookup(codes: jax.Array, table: tuple[int, ...]) -> jax.Array:
    """table[codes] for a table of 16 as a tree of selects: unlike a gather it vectorises and fuses."""
    level = [jnp.float32(value) for value in table]
    for bit in range(4):
        odd = (codes >> jnp.uint8(bit)) & jnp.uint8(1) != jnp.uint8(0)
        level = [jnp.where(odd, high, low) for low, high in zip(level[::2], level[1::2], strict=True)]
    return level[0]
