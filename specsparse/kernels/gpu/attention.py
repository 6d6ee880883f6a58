"""Attention of a step's few rows over the cache as a Pallas kernel (Mosaic GPU): keys and values are read once.

`reference.dense.attend_batched` is the definition. A block of threads has a group of heads of one sequence; scores stay
in registers and shared memory. A row's newest n positions are taken by the positions on its own path, in their order,
and all before them by their slots, so that its bits depend neither on the tree nor on the other rows.
"""

import itertools
from functools import partial, reduce

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from specsparse.kernels.gpu.pallas_calls import Replicated, arrangement, meet, mosaic_kernel, registers

SLOTS = 256
"""Slots of a warpgroup: two a thread."""
_BLOCKS, _LANES = 4, 16  # blocks of keys a warp, positions a block
_SHARED = 228_000  # bytes of shared memory that a block may take of an H200's 232,448, some of which the compiler takes
_LOWEST = float(jnp.finfo(jnp.float32).min)


def parts_of(rows: int, heads: int, d: int, capacity: int) -> int:
    """Warpgroups of a block for so many rows, heads a group, numbers a head and slots; 0 if the kernel cannot."""
    parts = capacity // SLOTS
    lines = d + parts * (SLOTS + 8 + 4 * d) + 1 + rows  # numbers a row and head
    size = 4 * rows * heads * lines + 4 * rows * d
    fits = 1 <= parts <= 4 and capacity % SLOTS == 0 and d % 32 == 0 and rows % 8 == 0
    return parts if fits and rows * heads <= 32 and size <= _SHARED else 0


@partial(jax.jit, static_argnames="interpret")  # one kernel for all layers
def attend(q, keys, values, first, low, near, start, keep, *, interpret: bool = False) -> jax.Array:
    """Attention of n rows of each sequence, f32[B, n, G, h, d].

    A block of threads has a group of h heads of one sequence; each of its `parts` warpgroups has `SLOTS` slots.

    Args:
        q: f32[B, n, G, h, d], rotated and scaled.
        keys: f16[B, G, C/16, d, 16].
        values: f16[B, G, C, d].
        first, low: int32[B, n]; a row sees slots under `first` and above `low`,
        near: int32[B, n, n]; and its newest positions in the slots `start` + near; -1 for no slot.
        start: int32[B], such that near < 2 n.
        keep: int32[B, n]; 0 makes a row zeros.
        interpret: runs it on a CPU, very slowly.
    """
    batch, n, groups, h, d = q.shape
    parts, vector = parts_of(n, h, d, values.shape[2]), d // 32
    f32, shared, ops = jnp.float32, plgpu.SMEM, registers(interpret)
    # Which thread has which numbers of
    # scores and weights [n, h, warp, block, lane], two lanes a thread;
    by_slot = arrangement(((1, 1, 4, _BLOCKS, _LANES), (1, 1, 1, 1, 2)), (-8,), (-7, -6))
    # sums of values [warp, n, h, d], and a row [h, d], the same in each warp;
    summed = arrangement(((4, 1, 1, d), (1, 1, 1, vector)), (-8,), (-5,))
    row = arrangement(((1, d), (1, vector)), (Replicated(4),), (-3,))
    # queries [n, h, d], and the newest values [2 n, d].
    of_queries = arrangement(((8, 1, d), (2, 1, d), (1, 1, vector)), (-9,), (-4,))
    of_newest = arrangement(((8, d), (2, d), (1, vector)), (-6,), (-3,))
    per_head, per_warp, one = by_slot.reduce((2, 3, 4)), by_slot.reduce((3, 4)), row.reduce((1,))
    slot_shape, sum_shape = (n, h, 4, _BLOCKS, _LANES), (4, n, h, d)

    def body(
        q, keys, values, values_by_slot, first, low, near, start, keep, out,
        queries, newest, weights, tops, totals, sums, newest_tops, newest_weights, barrier,
    ):  # fmt: skip
        sequence, group, part = (jax.lax.axis_index(name) for name in ("sequence", "group", "part"))

        def each_row(step):
            """`step(r)` for the rows that this warpgroup joins; the last may be done twice, alike."""
            count = -(-n // parts)
            jax.lax.fori_loop(0, count, lambda i, _: step(jnp.minimum(part * count + i, n - 1)), 0)

        # Queries and the newest values go to shared memory.
        @pl.when(part == 0)
        def _():
            ops.write(queries, ops.read(q.at[sequence, :, group], of_queries), of_queries, (2, 0, 1))
            slots = pl.ds(start[sequence], 2 * n)
            ops.write(newest, ops.read(values_by_slot.at[sequence, group, slots], of_newest))

        meet(barrier)

        # Scores of this warpgroup's slots, and the highest that each row sees.
        def add_scores(i, scores):
            for j in range(8):
                at = i * 8 + j
                column = ops.read(keys.at[sequence, group, part, :, :, at], by_slot.reduce((0, 1))).astype(f32)
                query = ops.spread(ops.read(queries.at[at], per_head), slot_shape, (0, 1), by_slot)
                scores = scores + query * ops.spread(column, slot_shape, (2, 3, 4), by_slot)
            return scores

        scores = jax.lax.fori_loop(0, d // 8, add_scores, ops.cast(jnp.zeros(slot_shape, f32), by_slot))
        place = [ops.cast(jax.lax.broadcasted_iota(jnp.int32, slot_shape, axis), by_slot) for axis in (2, 3, 4)]
        slot = part * SLOTS + place[0] * (SLOTS // 4) + place[1] * _LANES + place[2]
        end, before = (
            ops.spread(ops.read(ref.at[sequence], by_slot.reduce((1, 2, 3, 4))), slot_shape, (0,), by_slot)
            for ref in (first, low)
        )
        seen = jnp.where((slot < end) & (slot > before), scores, f32(_LOWEST))
        ops.write(weights.at[part], scores, by_slot, (2, 3, 4, 0, 1))  # scores at first
        ops.write(tops.at[part], jnp.max(jnp.max(seen, axis=4), axis=3), per_warp, (2, 0, 1))
        meet(barrier)

        # Weights of each row's newest positions, from scores in shared memory.
        def weigh_newest(r):
            own = []
            for j in range(n):
                place = near[sequence, r, j]
                s = start[sequence] + jnp.maximum(place, 0)
                score = ops.read(weights.at[s // SLOTS, (s // 64) % 4, (s // _LANES) % _BLOCKS, s % _LANES, r], one)
                own.append(jnp.where(place >= 0, score, f32(_LOWEST)))
            top = reduce(jnp.maximum, own)
            ops.write(newest_tops.at[r], top, one, (0,))
            for j, score in enumerate(own):
                ops.write(newest_weights.at[r, j], jnp.exp(score - top), one, (0,))
            return 0

        each_row(weigh_newest)

        # Weights of this warpgroup's slots below the highest score of all.
        def highest(i, top):
            return jnp.maximum(top, ops.read(tops.at[i // 4, i % 4], per_head))

        top = jax.lax.fori_loop(0, 4 * parts, highest, ops.cast(jnp.full((n, h), _LOWEST, f32), per_head))
        weight = jnp.exp(seen - ops.spread(top, slot_shape, (0, 1), by_slot))
        ops.write(totals.at[part], jnp.sum(jnp.sum(weight, axis=4), axis=3), per_warp, (2, 0, 1))
        meet(barrier)  # nobody reads scores any more
        ops.write(weights.at[part], weight, by_slot, (2, 3, 4, 0, 1))
        meet(barrier)

        # Values of this warpgroup's slots by their weights, a sum a warp.
        def add_values(i, acc):
            for j in range(8):
                at = i * 8 + j
                line = ops.read(values.at[sequence, group, part, :, at], summed.reduce((1, 2)))
                weight = ops.read(weights.at[part, :, at // _LANES, at % _LANES], summed.reduce((3,)))
                weight = ops.spread(weight, sum_shape, (0, 1, 2), summed)
                acc = acc + weight * ops.spread(line.astype(f32), sum_shape, (0, 3), summed)
            return acc

        acc = jax.lax.fori_loop(0, SLOTS // 4 // 8, add_values, ops.cast(jnp.zeros(sum_shape, f32), summed))
        ops.write(sums.at[part], acc)
        meet(barrier)

        def join(r):
            """Adds up the warps' sums and those of the newest positions."""
            refs = (sums, row, jnp.add), (totals, one, jnp.add), (tops, one, jnp.maximum)
            found: list = [None] * len(refs)
            for p, w in itertools.product(range(parts), range(4)):
                for k, (ref, layout, join_two) in enumerate(refs):
                    more = ops.read(ref.at[p, w, r], layout)
                    found[k] = more if found[k] is None else join_two(found[k], more)
            old_sum, old_total, old_top = found
            new_total, new_sum = ops.cast(jnp.zeros((h,), f32), one), ops.cast(jnp.zeros((h, d), f32), row)
            for j in range(n):
                weight = ops.read(newest_weights.at[r, j], one)
                slot = jnp.maximum(near[sequence, r, j], 0)
                line = ops.read(newest.at[slot], row.reduce((0,))).astype(f32)
                new_total = new_total + weight
                new_sum = new_sum + ops.spread(weight, (h, d), (0,), row) * ops.spread(line, (h, d), (1,), row)
            new_top = ops.read(newest_tops.at[r], one)
            highest = jnp.maximum(old_top, new_top)
            old, new = jnp.exp(old_top - highest), jnp.exp(new_top - highest)
            both = ops.spread(old, (h, d), (0,), row) * old_sum + ops.spread(new, (h, d), (0,), row) * new_sum
            result = both / ops.spread(old * old_total + new * new_total, (h, d), (0,), row)
            ops.write(out.at[sequence, r, group], jnp.where(keep[sequence, r] > 0, result, f32(0)))
            return 0

        each_row(join)

    return mosaic_kernel(
        body,
        out=jax.ShapeDtypeStruct(q.shape, f32),
        scratch=[
            shared((d, n, h), f32),  # queries
            shared((2 * n, d), values.dtype),  # newest: values of the slots from `start` on
            shared((parts, 4, _BLOCKS, _LANES, n, h), f32),  # weights of each slot: part, warp, block, lane
            shared((parts, 4, n, h), f32),  # tops: the highest score of a warp's slots
            shared((parts, 4, n, h), f32),  # totals of their weights
            shared((parts, 4, n, h, d), f32),  # sums of weighted values
            shared((n, h), f32),  # newest_tops: the highest score of a row's newest positions
            shared((n, n, h), f32),  # newest_weights of those
            plgpu.Barrier(num_arrivals=parts),
        ],
        grid=(batch, groups),
        grid_names=("sequence", "group"),
        num_threads=parts,
        thread_name="part",
        interpret=interpret,
    )(
        q,
        keys.reshape(batch, groups, parts, 4, _BLOCKS, d, _LANES),
        values.reshape(batch, groups, parts, 4, SLOTS // 4, d),
        *(values, first, low, near, start, keep),
    )


def core(step, q: jax.Array, first: jax.Array, low: jax.Array, near: jax.Array, *, interpret: bool = False):
    """`reference.dense.Core` by the kernel, None if it cannot."""
    _, n, _, h, d = q.shape
    capacity = step.cache_v.shape[2]
    if step.cache_v.dtype != jnp.float16 or not parts_of(n, h, d, capacity):
        return None
    start = jnp.clip(step.length - n, 0, capacity - 2 * n)
    near = jnp.where(near < 0, -1, jnp.clip(near - start[:, None, None], 0, 2 * n - 1))
    return attend(
        q, step.cache_k, step.cache_v, first, low, near, start, step.keep.astype(jnp.int32), interpret=interpret
    )
