"""Rows packed for products by a Pallas kernel (Mosaic GPU): RMS norm and int8 codes, read once.

`fragments.quantise` and `fragments.pack_rows` are the definition. A block of threads has eight rows, so that a row's
bits depend neither on its place nor on the other rows; a piece of 64 columns is one word of four codes a thread.
"""

from functools import partial, reduce
from operator import add

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from specsparse.kernels.gpu.fragments import PIECE, PackedRows
from specsparse.kernels.gpu.pallas_calls import InArrays, InRegisters, arrangement, meet, mosaic_kernel, registers

_SHAPE = (4, 2, 2, 2, 4, 4)
"""Eight rows of a piece: rows as (t, c), blocks, halves of a block, words of a half, columns of a word."""
_WORDS = arrangement((_SHAPE, (1, 1, 1, 1, 1, 4)), (-12,), (-11, -10, -9, -8))
_KEPT = 16
"""Pieces whose numbers a warpgroup keeps in registers; if there are more, it reads rows twice, for norm and codes."""
_PARTS = 4


@partial(jax.jit, static_argnames=("eps", "interpret"))  # one kernel for all layers
def pack(x: jax.Array, norm: jax.Array | None, eps: float, *, interpret: bool = False) -> PackedRows:
    """Rows f32[R, K] as packed products take them, after an RMS norm with weights f32[K], if any."""
    rows, columns = x.shape
    tiles, pieces = -(-rows // 8), -(-columns // PIECE)
    short = tiles * 8 - rows, pieces * PIECE - columns
    if any(short):
        x = jnp.pad(x, ((0, short[0]), (0, short[1])))
        norm = None if norm is None else jnp.pad(norm, (0, short[1]))
    parts = max(n for n in range(1, _PARTS + 1) if pieces % n == 0)
    count = 1 if norm is None else pieces // parts
    ops, of = registers(interpret), jax.ShapeDtypeStruct
    given, scratch = [x.reshape(tiles, 4, 2, pieces, *_SHAPE[2:])], []
    if norm is not None:
        given.append(norm.reshape(pieces, *_SHAPE[2:]))
        scratch = [plgpu.SMEM((parts, 4, 2), jnp.float32), plgpu.Barrier(num_arrivals=parts)]

    def body(x, *refs):
        weights, (codes, scales, *more) = (None, refs) if norm is None else (refs[0], refs[1:])
        tile, block, part = (jax.lax.axis_index(name) for name in ("tile", "block", "part"))
        first = (block * parts + part) * count

        def load(i):
            return ops.read(x.at[tile, :, :, first + i], _WORDS)

        kept = [load(i) for i in range(count)] if count <= _KEPT else None

        def each(step, state):
            """`step(i, numbers of piece i, state)` for the warpgroup's pieces in order; a loop if they are many."""
            if kept is None:
                return jax.lax.fori_loop(0, count, lambda i, state: step(i, load(i), state), state)
            for i, numbers in enumerate(kept):
                state = step(i, numbers, state)
            return state

        scale = None
        if weights is not None:
            squares = each(lambda _, v, sums: sums + v * v, ops.cast(jnp.zeros(_SHAPE, jnp.float32), _WORDS))
            for axis in (5, 4, 3, 2):
                squares = jnp.sum(squares, axis=axis)
            shared, barrier = more
            ops.write(shared.at[part], squares)
            meet(barrier)
            total = reduce(add, (ops.read(shared.at[i], _WORDS.reduce((2, 3, 4, 5))) for i in range(parts)))
            scale = jax.lax.rsqrt(total / jnp.float32(columns) + jnp.float32(eps))

        def write(i, v, _):
            if weights is not None and scale is not None:
                weight = ops.read(weights.at[first + i], _WORDS.reduce((0, 1)))
                v = v * ops.spread(scale, _SHAPE, (0, 1), _WORDS) * ops.spread(weight, _SHAPE, (2, 3, 4, 5), _WORDS)
            words, largest = _quantised(ops, v)
            ops.write(codes.at[first + i, tile], words, _WORDS.reduce((5,)), (0, 1, 4, 2, 3))
            ops.write(scales.at[first + i, tile], largest / jnp.float32(127), _WORDS.reduce((3, 4, 5)), (0, 2, 1))
            return 0

        each(write, 0)

    codes, scales = mosaic_kernel(
        body,
        out=(of((pieces, tiles, 4, 2, 4, 2, 2), jnp.int32), of((pieces, tiles, 4, 2, 2), jnp.float32)),
        scratch=scratch,
        grid=(tiles, pieces // parts // count),
        grid_names=("tile", "block"),
        num_threads=parts,
        thread_name="part",
        interpret=interpret,
    )(*given)
    return PackedRows(codes.reshape(pieces, 32 * tiles, 4), scales.reshape(pieces, 4 * tiles, 4), tiles)


def _quantised(ops: InArrays | InRegisters, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Codes of a piece, four a word, and the largest magnitude of each block."""
    largest = jnp.abs(v)
    for axis in (5, 4, 3):
        largest = jnp.max(largest, axis=axis)
    some = largest > jnp.float32(0)
    inverse = jnp.where(some, jnp.float32(127) / jnp.where(some, largest, jnp.float32(1)), jnp.float32(0))
    code = jnp.round(v * ops.spread(inverse, _SHAPE, (0, 1, 2), _WORDS)).astype(jnp.int32)
    place = ops.cast(jax.lax.broadcasted_iota(jnp.int32, _SHAPE, 5), _WORDS)
    return jnp.sum((code & jnp.int32(255)) << (place * jnp.int32(8)), axis=5), largest
