"""Rows on their way into packed products as a Pallas kernel (Mosaic GPU): RMS norm and int8 codes, read once.

`rows.quantise` and `rows.pack_rows` are the definition. A block of threads has eight rows, so that a row's bits depend
neither on its place nor on the other rows; a piece of 64 columns is one word of four codes a thread.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from specsparse.kernels.gpu.fragments import PIECE
from specsparse.kernels.gpu.registers import arrangement, registers
from specsparse.kernels.gpu.rows import PackedRows
from specsparse.support import jax_versions

_SHAPE = (4, 2, 2, 2, 4, 4)
"""Eight rows of a piece: rows as (t, c), blocks, halves of a block, words of a half, columns of a word."""
_WORDS = arrangement((_SHAPE, (1, 1, 1, 1, 1, 4)), (-12,), (-11, -10, -9, -8))
_KEPT = 16
"""Pieces whose numbers a warpgroup keeps in registers; of more it reads rows twice, for the norm and for the codes."""
_PARTS = 4


@partial(jax.jit, static_argnames=("eps", "interpret"))  # one kernel for all layers
def pack(x: jax.Array, norm: jax.Array | None, eps: float, *, interpret: bool = False) -> PackedRows:
    """Rows f32[R, K] as packed products take them, after an RMS norm with weights f32[K] where there are any."""
    rows, columns = x.shape
    tiles, pieces = -(-rows // 8), -(-columns // PIECE)
    short = tiles * 8 - rows, pieces * PIECE - columns
    if any(short):
        x = jnp.pad(x, ((0, short[0]), (0, short[1])))
        norm = None if norm is None else jnp.pad(norm, (0, short[1]))
    parts = max(n for n in range(1, _PARTS + 1) if pieces % n == 0)
    count = 1 if norm is None else pieces // parts
    blocks = pieces // parts // count
    ops = registers(interpret)
    lines = _WORDS.reduce((2, 3, 4, 5))  # one number a row

    def body(x, *refs):
        weights, refs = (None, refs) if norm is None else (refs[0], refs[1:])
        codes, scales, *more = refs
        tile, block, part = (jax.lax.axis_index(name) for name in ("tile", "block", "part"))
        first = (block * parts + part) * count

        def piece_of(i):
            return ops.read(x.at[tile, :, :, first + i], _WORDS)

        kept = [piece_of(i) for i in range(count)] if count <= _KEPT else None

        def squares(i, total):
            v = piece_of(i) if kept is None else kept[i]
            return total + v * v

        scale = None
        if norm is not None:
            total = ops.cast(jnp.zeros(_SHAPE, jnp.float32), _WORDS)
            if kept is None:
                total = jax.lax.fori_loop(0, count, squares, total)
            else:
                for i in range(count):
                    total = squares(i, total)
            for axis in (5, 4, 3, 2):
                total = jnp.sum(total, axis=axis)
            shared, barrier = more
            ops.write(shared.at[part], total)
            plgpu.barrier_arrive(barrier)
            plgpu.barrier_wait(barrier)
            total = ops.read(shared.at[0], lines)
            for other in range(1, parts):
                total = total + ops.read(shared.at[other], lines)
            scale = jax.lax.rsqrt(total / jnp.float32(columns) + jnp.float32(eps))

        def write(i, _):
            v = piece_of(i) if kept is None else kept[i]
            if scale is not None:
                weight = ops.read(weights.at[first + i], _WORDS.reduce((0, 1)))
                v = v * ops.spread(scale, _SHAPE, (0, 1), _WORDS) * ops.spread(weight, _SHAPE, (2, 3, 4, 5), _WORDS)
            largest = jnp.abs(v)
            for axis in (5, 4, 3):
                largest = jnp.max(largest, axis=axis)
            some = largest > jnp.float32(0)
            inverse = jnp.where(some, jnp.float32(127) / jnp.where(some, largest, jnp.float32(1)), jnp.float32(0))
            code = jnp.round(v * ops.spread(inverse, _SHAPE, (0, 1, 2), _WORDS)).astype(jnp.int32)
            place = ops.cast(jax.lax.broadcasted_iota(jnp.int32, _SHAPE, 5), _WORDS)
            words = jnp.sum((code & jnp.int32(255)) << (place * jnp.int32(8)), axis=5)
            ops.write(codes.at[first + i, tile], words, _WORDS.reduce((5,)), (0, 1, 4, 2, 3))
            ops.write(scales.at[first + i, tile], largest / jnp.float32(127), _WORDS.reduce((3, 4, 5)), (0, 2, 1))
            return 0

        if kept is None:
            jax.lax.fori_loop(0, count, write, 0)
        else:
            for i in range(count):
                write(i, 0)

    of, scratch = jax.ShapeDtypeStruct, []
    if norm is not None:
        scratch = [plgpu.SMEM((parts, 4, 2), jnp.float32), plgpu.Barrier(num_arrivals=parts)]
    given = [x.reshape(tiles, 4, 2, pieces, *_SHAPE[2:])]
    if norm is not None:
        given.append(norm.reshape(pieces, *_SHAPE[2:]))
    codes, scales = jax_versions.mosaic_kernel(
        body,
        out=(of((pieces, tiles, 4, 2, 4, 2, 2), jnp.int32), of((pieces, tiles, 4, 2, 2), jnp.float32)),
        scratch=scratch,
        grid=(tiles, blocks),
        grid_names=("tile", "block"),
        num_threads=parts,
        thread_name="part",
        interpret=interpret,
    )(*given)
    return PackedRows(codes.reshape(pieces, 32 * tiles, 4), scales.reshape(pieces, 4 * tiles, 4), tiles)
