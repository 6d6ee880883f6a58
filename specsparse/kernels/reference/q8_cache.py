"""Keys and values of a `q8_0` cache: 32 codes and a float16 scale, the scale's two bytes behind all codes of a row.

A row of d values is int8[d + d / 16]: d codes, then for each block of 32 the low and the high byte of its scale. The
value is `scale * code` in float32. Keys have the same bytes with sixteen positions innermost.
"""

import jax
import jax.numpy as jnp

from specsparse.errors import UserError

BLOCK = 32
DTYPE = jnp.int8
"""Type of the cache's arrays; no other cache has it."""


def row_size(d: int) -> int:
    """Bytes of a row of d values. Raises UserError if d is no multiple of 32."""
    if d % BLOCK:
        raise UserError(f"kv_dtype=q8_0 needs heads whose size is a multiple of {BLOCK}, these have {d}; use f16")
    return d + d // BLOCK * 2


def head_size(cache_v: jax.Array) -> int:
    """Values of a head in a cache [B, G, C, row] of any type."""
    size = cache_v.shape[-1]
    return size // (BLOCK + 2) * BLOCK if cache_v.dtype == DTYPE else size


def encode(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """f32[..., d] as rows of a cache of that type: int8[..., row] for q8_0."""
    if dtype != DTYPE:
        return x.astype(dtype)
    blocks = x.reshape(*x.shape[:-1], -1, BLOCK)
    largest = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True)
    inverse = jnp.where(largest > 0, jnp.float32(127) / largest, jnp.float32(0))
    codes = jnp.round(blocks * inverse).astype(jnp.int8).reshape(x.shape)
    scales = (largest[..., 0] / jnp.float32(127)).astype(jnp.float16)
    halves = jax.lax.bitcast_convert_type(scales, jnp.int8)
    return jnp.concatenate([codes, halves.reshape(*x.shape[:-1], -1)], axis=-1)


def decode(rows: jax.Array) -> jax.Array:
    """f32[..., d] of rows of a cache of any type."""
    if rows.dtype != DTYPE:
        return rows.astype(jnp.float32)
    blocks = rows.shape[-1] // (BLOCK + 2)
    codes, halves = rows[..., : blocks * BLOCK], rows[..., blocks * BLOCK :]
    scales = jax.lax.bitcast_convert_type(halves.reshape(*rows.shape[:-1], blocks, 2), jnp.float16)
    values = codes.reshape(*rows.shape[:-1], blocks, BLOCK).astype(jnp.float32) * scales.astype(jnp.float32)[..., None]
    return values.reshape(*rows.shape[:-1], -1)
