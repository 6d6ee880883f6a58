"""Attention of a step's few rows over the cache as a Pallas kernel (Mosaic GPU): keys and values are read once.

`reference.dense.attend_batched` is the definition. A block of threads has a group of heads of one sequence; scores stay
in registers and shared memory. A row's newest n positions are taken by the positions on its own path, in their order,
and all before them by their slots, so that its bits depend neither on the tree nor on the other rows.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from specsparse.kernels.gpu.registers import Replicated, arrangement, registers
from specsparse.support import jax_versions

SLOTS = 256
"""Of a warpgroup: two a thread."""
_BLOCKS, _LANES = 4, 16
"""Of keys: blocks a warp, positions a block."""
_SHARED = 228_000
"""Bytes of shared memory that a block may take of an H200's 232,448, some of which the compiler takes."""
_LOWEST = float(jnp.finfo(jnp.float32).min)


def parts_of(rows: int, heads: int, d: int, capacity: int) -> int:
    """Warpgroups of a block for so many rows, heads a group, numbers a head and slots; 0 where the kernel cannot."""
    parts = capacity // SLOTS
    lines = d + parts * (SLOTS + 8 + 4 * d) + 1 + rows  # numbers a row and head
    size = 4 * rows * heads * lines + 4 * rows * d
    fits = 1 <= parts <= 4 and capacity % SLOTS == 0 and d % 32 == 0 and rows % 8 == 0
    return parts if fits and rows * heads <= 32 and size <= _SHARED else 0


@partial(jax.jit, static_argnames="interpret")  # one kernel for all layers
def attend(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    first: jax.Array,
    low: jax.Array,
    near: jax.Array,
    start: jax.Array,
    keep: jax.Array,
    *,
    interpret: bool = False,
) -> jax.Array:
    """f32[B, n, G, h, d] of n rows of a sequence.

    Args:
        q: f32[B, n, G, h, d], turned and scaled.
        keys: f16[B, G, C/16, d, 16].
        values: f16[B, G, C, d].
        first: int32[B, n], a row sees slots under it..
        low: int32[B, n], .. and above this one,
        near: int32[B, n, n], and its newest positions in the slots `start` + near; -1 where there is none.
        start: int32[B], such that near < 2 n.
        keep: int32[B, n], rows where it is 0 come out as zeros.
        interpret: runs it on a CPU, very slowly.
    """
    batch, n, groups, h, d = q.shape
    capacity = values.shape[2]
    parts = parts_of(n, h, d, capacity)
    rows, vector, ops = -(-n // parts), d // 32, registers(interpret)
    square = (n, h, 4, _BLOCKS, _LANES)
    by_slot = arrangement(
        ((1, 1, 4, _BLOCKS, _LANES), (1, 1, 1, 1, 2)), (-8,), (-7, -6)
    )  # [n, h, warp, block, lane], two lanes a thread
    summed = arrangement(((4, 1, 1, d), (1, 1, 1, vector)), (-8,), (-5,))  # [warp, n, h, d]
    row = arrangement(((1, d), (1, vector)), (Replicated(4),), (-3,))  # [h, d], the same in each warp
    one = row.reduce((1,))
    moved = arrangement(((8, 1, d), (2, 1, d), (1, 1, vector)), (-9,), (-4,))  # [n, h, d]
    window = arrangement(((8, d), (2, d), (1, vector)), (-6,), (-3,))  # [2 n, d]
    per_row, slots_of, per_warp = by_slot.reduce((1, 2, 3, 4)), by_slot.reduce((0, 1)), by_slot.reduce((3, 4))
    per_head = by_slot.reduce((2, 3, 4))

    def body(
        q, keys, values, cache, first, low, near, start, keep, out,
        turned, newest, weights, tops, totals, sums, top_2, weights_2, barrier,
    ):  # fmt: skip
        b, g, part = (jax.lax.axis_index(name) for name in ("sequence", "group", "part"))

        def meet():
            plgpu.barrier_arrive(barrier)
            plgpu.barrier_wait(barrier)

        @pl.when(part == 0)
        def _():
            ops.write(turned, ops.read(q.at[b, :, g], moved), moved, (2, 0, 1))
            at = start[b]
            ops.write(newest, ops.read(cache.at[b, g, pl.ds(at, 2 * n)], window))

        meet()

        def scored(i, scores):
            for j in range(8):
                at = i * 8 + j
                column = ops.read(keys.at[b, g, part, :, :, at], slots_of).astype(jnp.float32)
                of_rows = ops.read(turned.at[at], per_head)
                scores = scores + ops.spread(of_rows, square, (0, 1), by_slot) * ops.spread(
                    column, square, (2, 3, 4), by_slot
                )
            return scores

        scores = jax.lax.fori_loop(0, d // 8, scored, ops.cast(jnp.zeros(square, jnp.float32), by_slot))
        place = [ops.cast(jax.lax.broadcasted_iota(jnp.int32, square, axis), by_slot) for axis in (2, 3, 4)]
        slot = part * SLOTS + place[0] * (SLOTS // 4) + place[1] * _LANES + place[2]
        bounds = [ops.spread(ops.read(ref.at[b], per_row), square, (0,), by_slot) for ref in (first, low)]
        seen = jnp.where((slot < bounds[0]) & (slot > bounds[1]), scores, jnp.float32(_LOWEST))
        ops.write(weights.at[part], scores, by_slot, (2, 3, 4, 0, 1))
        ops.write(tops.at[part], jnp.max(jnp.max(seen, axis=4), axis=3), per_warp, (2, 0, 1))
        meet()

        def newest_of(i, _):
            r = jnp.minimum(part * rows + i, n - 1)  # the last may be done twice, alike
            found = []
            for j in range(n):
                a = near[b, r, j]
                s = start[b] + jnp.maximum(a, 0)
                score = ops.read(weights.at[s // SLOTS, (s // 64) % 4, (s // _LANES) % _BLOCKS, s % _LANES, r], one)
                found.append(jnp.where(a >= 0, score, jnp.float32(_LOWEST)))
            top = found[0]
            for score in found[1:]:
                top = jnp.maximum(top, score)
            ops.write(top_2.at[r], top, one, (0,))
            for j, score in enumerate(found):
                ops.write(weights_2.at[r, j], jnp.exp(score - top), one, (0,))
            return 0

        jax.lax.fori_loop(0, rows, newest_of, 0)

        def highest(i, top):
            return jnp.maximum(top, ops.read(tops.at[i // 4, i % 4], per_head))

        lowest = ops.cast(jnp.full((n, h), _LOWEST, jnp.float32), per_head)
        top = jax.lax.fori_loop(0, 4 * parts, highest, lowest)
        weighed = jnp.exp(seen - ops.spread(top, square, (0, 1), by_slot))
        ops.write(totals.at[part], jnp.sum(jnp.sum(weighed, axis=4), axis=3), per_warp, (2, 0, 1))
        meet()  # nobody reads scores any more
        ops.write(weights.at[part], weighed, by_slot, (2, 3, 4, 0, 1))
        meet()

        shape = 4, n, h, d

        def added(i, acc):
            for j in range(8):
                at = i * 8 + j
                line = ops.read(values.at[b, g, part, :, at], summed.reduce((1, 2)))
                weight = ops.read(weights.at[part, :, at // _LANES, at % _LANES], summed.reduce((3,)))
                acc = acc + ops.spread(weight, shape, (0, 1, 2), summed) * ops.spread(
                    line.astype(jnp.float32), shape, (0, 3), summed
                )
            return acc

        acc = jax.lax.fori_loop(0, SLOTS // 4 // 8, added, ops.cast(jnp.zeros(shape, jnp.float32), summed))
        ops.write(sums.at[part], acc)
        meet()

        def joined(i, _):
            r = jnp.minimum(part * rows + i, n - 1)
            total, all_of_it, top = None, None, None
            for p in range(parts):
                for w in range(4):
                    of_part = ops.read(sums.at[p, w, r], row)
                    all_of_it = of_part if all_of_it is None else all_of_it + of_part
                    of_part = ops.read(totals.at[p, w, r], one)
                    total = of_part if total is None else total + of_part
                    of_part = ops.read(tops.at[p, w, r], one)
                    top = of_part if top is None else jnp.maximum(top, of_part)
            total_2 = ops.cast(jnp.zeros((h,), jnp.float32), one)
            added = ops.cast(jnp.zeros((h, d), jnp.float32), row)
            for j in range(n):
                weight = ops.read(weights_2.at[r, j], one)
                line = ops.read(newest.at[jnp.maximum(near[b, r, j], 0)], row.reduce((0,))).astype(jnp.float32)
                total_2 = total_2 + weight
                added = added + ops.spread(weight, (h, d), (0,), row) * ops.spread(line, (h, d), (1,), row)
            newer = ops.read(top_2.at[r], one)
            both = jnp.maximum(top, newer)
            old, new = jnp.exp(top - both), jnp.exp(newer - both)
            of_both = ops.spread(old, (h, d), (0,), row) * all_of_it + ops.spread(new, (h, d), (0,), row) * added
            result = of_both / ops.spread(old * total + new * total_2, (h, d), (0,), row)
            ops.write(out.at[b, r, g], jnp.where(keep[b, r] > 0, result, jnp.float32(0)))
            return 0

        jax.lax.fori_loop(0, rows, joined, 0)

    f32, shared = jnp.float32, plgpu.SMEM
    return jax_versions.mosaic_kernel(
        body,
        out=jax.ShapeDtypeStruct(q.shape, f32),
        scratch=[
            shared((d, n, h), f32),
            shared((2 * n, d), values.dtype),
            shared((parts, 4, _BLOCKS, _LANES, n, h), f32),
            shared((parts, 4, n, h), f32),
            shared((parts, 4, n, h), f32),
            shared((parts, 4, n, h, d), f32),
            shared((n, h), f32),
            shared((n, n, h), f32),
            plgpu.Barrier(num_arrivals=parts),
        ],
        grid=(batch, groups),
        grid_names=("sequence", "group"),
        num_threads=parts,
        thread_name="part",
        interpret=interpret,
    )(
        q, keys.reshape(batch, groups, parts, 4, _BLOCKS, d, _LANES),
        values.reshape(batch, groups, parts, 4, SLOTS // 4, d), values, first, low, near, start, keep,
    )  # fmt: skip


def core(step, q: jax.Array, first: jax.Array, low: jax.Array, near: jax.Array, *, interpret: bool = False):
    """`reference.dense.Core` by the kernel, None where it cannot."""
    _, n, _, h, d = q.shape
    capacity = step.cache_v.shape[2]
    if step.cache_v.dtype != jnp.float16 or not parts_of(n, h, d, capacity):
        return None
    start = jnp.clip(step.length - n, 0, capacity - 2 * n)
    near = jnp.where(near < 0, -1, jnp.clip(near - start[:, None, None], 0, 2 * n - 1))
    return attend(
        q, step.cache_k, step.cache_v, first, low, near, start, step.keep.astype(jnp.int32), interpret=interpret
    )
