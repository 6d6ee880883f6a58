"""Packed weights back to float32, in plain jnp: the oracle of the kernels, and the fallback without them.

Every product below is exact in float32 (an f16 scale has 11 bits, byte scales and codes at most 13 more), so that only
the final sum with a min rounds, and fusing it with a product changes no bit. The one exception is MXFP4 with a scale of
2^-127 or less: XLA may take such subnormal scales for zero, an error below 2^-123.
"""

from functools import partial

import jax
import jax.numpy as jnp

from specsparse.kernels.qtensor import BLOCK, ROWS, Codes, Fields, Layout, QTensor

FLOATS = {"f32": jnp.float32, "f16": jnp.float16, "bf16": jnp.bfloat16}


@partial(jax.jit, inline=True)  # one program a shape; step by step it would be twenty
def dequantize(w: QTensor) -> jax.Array:
    """The whole matrix, float32[rows, cols]; equal to gguf's dequantiser."""
    rows, cols = w.shape
    values = dequantize_groups(w.data, w.layout, cols)
    return values.transpose(0, 2, 1).reshape(-1, cols)[:rows]


def dequantize_groups(data: jax.Array, layout: Layout, cols: int) -> jax.Array:
    """Groups uint8[N, group_bytes] as float32[N, cols, 16], the rows of a group innermost."""
    return _values(layout.split(data, cols), layout)


def embed_rows(w: QTensor, ids: jax.Array) -> jax.Array:
    """Rows `ids` int32[R] as float32[R, cols], read from their groups only. Ids out of range are clipped."""
    ids = jnp.clip(ids, 0, w.shape[0] - 1)
    groups = w.data.at[ids // ROWS].get(mode="promise_in_bounds")
    lane = (ids % ROWS).reshape(-1, 1, 1, 1)
    fields = w.layout.split(groups, w.shape[1])
    row = jax.tree.map(lambda field: jnp.take_along_axis(field, lane, axis=2, mode="promise_in_bounds"), fields)
    return _values(row, w.layout)[..., 0]


def pack_float(array: jax.Array, codes: Codes = "f32") -> QTensor:
    """float32[rows, cols] as a float QTensor, rounded to nearest even for the two-byte codes."""
    rows, cols = array.shape
    return QTensor(_float_groups(array, codes), Layout(codes, source=codes.upper()), (rows, cols))


@partial(jax.jit, static_argnames="codes")  # one program a shape; step by step it would be eight
def _float_groups(array: jax.Array, codes: str) -> jax.Array:
    rows, cols = array.shape
    values = jnp.pad(array.astype(FLOATS[codes]), ((0, -rows % ROWS), (0, 0)))
    values = values.reshape(-1, ROWS, cols).transpose(0, 2, 1)
    return jax.lax.bitcast_convert_type(values, jnp.uint8).reshape(values.shape[0], -1)


def _values(fields: Fields, layout: Layout) -> jax.Array:
    """float32[N, cols, lanes] of fields [N, count, lanes, bytes]."""
    codes = fields.codes
    if layout.is_float:
        return jax.lax.bitcast_convert_type(codes, FLOATS[layout.codes]).astype(jnp.float32)
    n, _, lanes, _ = codes.shape
    codes = codes.transpose(0, 1, 3, 2)
    if layout.codes == "nibble":
        codes = codes.reshape(n, -1, 1, BLOCK // 2, lanes)
        codes = jnp.concatenate([codes & jnp.uint8(0x0F), codes >> jnp.uint8(4)], axis=2)
    return scaled(numbers(codes.reshape(n, -1, lanes), layout), fields, layout)


def numbers(codes: jax.Array, layout: Layout) -> jax.Array:
    """Codes uint8[..] as the float32[..] that scales multiply."""
    if layout.codes == "int8":
        return jax.lax.bitcast_convert_type(codes, jnp.int8).astype(jnp.float32)
    if not layout.lut:
        return codes.astype(jnp.float32) - float(layout.zero)
    # table[code] as a tree of selects: unlike a gather it vectorises and fuses
    level = [jnp.float32(value) for value in layout.lut]
    for bit in range(4):
        odd = (codes >> jnp.uint8(bit)) & jnp.uint8(1) != jnp.uint8(0)
        level = [jnp.where(odd, high, low) for low, high in zip(level[::2], level[1::2], strict=True)]
    return level[0]


def scaled(codes: jax.Array, fields: Fields, layout: Layout) -> jax.Array:
    """Codes float32[N, cols, lanes] times their scales, plus or minus their mins."""
    n, cols, lanes = codes.shape

    def widened(coarse: jax.Array, fine: jax.Array | None, dtype: jnp.dtype) -> jax.Array:
        """float32[N, scales, 1, lanes] of scales [N, S, lanes, bytes], times byte scales if there are any."""
        found = jax.lax.bitcast_convert_type(coarse, jnp.float32 if coarse.shape[-1] == 4 else jnp.float16)
        found = found.astype(jnp.float32)[:, :, None]
        if fine is not None:
            fine = jax.lax.bitcast_convert_type(fine[..., 0], dtype).astype(jnp.float32)
            found = found * fine.reshape(n, coarse.shape[1], -1, lanes)
        return found.reshape(n, -1, 1, lanes)

    scale = widened(fields.d, fields.sc, jnp.int8)
    values = codes.reshape(n, scale.shape[1], -1, lanes) * scale
    if fields.m is not None:
        least = widened(fields.m, fields.mn, jnp.uint8)
        values = values + least if layout.scales == "dm" else values - least
    return values.reshape(n, cols, lanes)
