"""Attention of a step's few rows over the cache as a Pallas kernel (Mosaic GPU): keys and values are read once.

`reference.dense.attend_batched` is the definition. A block of threads has a group of heads of one sequence; scores stay
in registers and shared memory. A row's newest n positions are taken by the positions on its own path, in their order,
and all before them by their slots, so that its bits depend neither on the tree nor on the other rows.
"""

import functools
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from specsparse.kernels.gpu.pallas_calls import (
    InArrays,
    InRegisters,
    Layout,
    Replicated,
    arrangement,
    meet,
    mosaic_kernel,
    registers,
)

SLOTS = 256
"""Slots of a warpgroup: two a thread."""
_BLOCKS, _LANES = 4, 16
"""Blocks of keys a warp, positions a block."""
_SHARED = 228_000
"""Bytes of shared memory that a block may take of an H200's 232,448, some of which the compiler takes."""
_LOWEST = float(jnp.finfo(jnp.float32).min)


def parts_of(rows: int, heads: int, d: int, capacity: int) -> int:
    """Warpgroups of a block for so many rows, heads a group, numbers a head and slots; 0 if the kernel cannot."""
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
    """Attention of n rows of each sequence, f32[B, n, G, h, d].

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
    parts = parts_of(n, h, d, values.shape[2])
    f32, shared = jnp.float32, plgpu.SMEM
    scratch = [
        shared((d, n, h), f32),
        shared((2 * n, d), values.dtype),
        shared((parts, 4, _BLOCKS, _LANES, n, h), f32),
        shared((parts, 4, n, h), f32),
        shared((parts, 4, n, h), f32),
        shared((parts, 4, n, h, d), f32),
        shared((n, h), f32),
        shared((n, n, h), f32),
        plgpu.Barrier(num_arrivals=parts),
    ]  # of `_Scratch`
    vector = d // 32
    layouts = _Layouts(
        by_slot=arrangement(((1, 1, 4, _BLOCKS, _LANES), (1, 1, 1, 1, 2)), (-8,), (-7, -6)),
        summed=arrangement(((4, 1, 1, d), (1, 1, 1, vector)), (-8,), (-5,)),
        row=arrangement(((1, d), (1, vector)), (Replicated(4),), (-3,)),
        queries=arrangement(((8, 1, d), (2, 1, d), (1, 1, vector)), (-9,), (-4,)),
        newest=arrangement(((8, d), (2, d), (1, vector)), (-6,), (-3,)),
    )
    ops = registers(interpret)

    def body(*refs):
        ins, out, own = _Inputs(*refs[:9]), refs[9], _Scratch(*refs[10:])
        at = [jax.lax.axis_index(name) for name in ("sequence", "group", "part")]
        block = _Heads(n, h, d, parts, layouts, ops, ins, own, *at)
        block.load_queries_and_newest_values()
        meet(own.barrier)
        seen = block.write_scores()
        meet(own.barrier)
        block.weigh_newest()
        weights = block.weigh(seen)
        meet(own.barrier)  # nobody reads scores any more
        ops.write(own.weights.at[block.part], weights, layouts.by_slot, (2, 3, 4, 0, 1))
        meet(own.barrier)
        block.sum_values()
        meet(own.barrier)
        block.write_rows(out)

    by_block = keys.reshape(batch, groups, parts, 4, _BLOCKS, d, _LANES)
    by_part = values.reshape(batch, groups, parts, 4, SLOTS // 4, d)
    return mosaic_kernel(
        body,
        out=jax.ShapeDtypeStruct(q.shape, f32),
        scratch=scratch,
        grid=(batch, groups),
        grid_names=("sequence", "group"),
        num_threads=parts,
        thread_name="part",
        interpret=interpret,
    )(q, by_block, by_part, values, first, low, near, start, keep)


class _Inputs(NamedTuple):
    """References to the arguments of `attend`; keys and values by warpgroup and warp, and the values by slot too."""

    q: jax.Ref
    keys: jax.Ref
    values: jax.Ref
    values_by_slot: jax.Ref
    first: jax.Ref
    low: jax.Ref
    near: jax.Ref
    start: jax.Ref
    keep: jax.Ref


class _Scratch(NamedTuple):
    """A block's shared memory.

    Attributes:
        queries: f32[d, n, h].
        newest: [2 n, d], values of the slots from `start` on.
        weights: f32[parts, warp, block, lane, n, h] of each slot: scores at first.
        tops, totals: f32[parts, warp, n, h], the highest score of a warp's slots and the sum of their weights.
        sums: f32[parts, warp, n, h, d] of weighted values.
        newest_tops: f32[n, h], the highest score of a row's newest positions.
        newest_weights: f32[n, n, h] of those.
        barrier: of its warpgroups.
    """

    queries: jax.Ref
    newest: jax.Ref
    weights: jax.Ref
    tops: jax.Ref
    totals: jax.Ref
    sums: jax.Ref
    newest_tops: jax.Ref
    newest_weights: jax.Ref
    barrier: jax.Ref


class _Layouts(NamedTuple):
    """Which thread has which numbers.

    Attributes:
        by_slot: [n, h, warp, block, lane], two lanes a thread.
        summed: [warp, n, h, d].
        row: [h, d], the same in each warp.
        queries: [n, h, d].
        newest: [2 n, d].
    """

    by_slot: Layout
    summed: Layout
    row: Layout
    queries: Layout
    newest: Layout


@dataclass(frozen=True)
class _Heads:
    """The work of a block of threads: a group of h heads of one sequence, n rows of d numbers a head, `parts`
    warpgroups with `SLOTS` slots of the cache each. `ins` lie in memory, `own` in shared memory; `sequence`, `group`
    and `part` are indices."""

    n: int
    h: int
    d: int
    parts: int
    layouts: _Layouts
    ops: InArrays | InRegisters
    ins: _Inputs
    own: _Scratch
    sequence: jax.Array
    group: jax.Array
    part: jax.Array

    @property
    def by_slot_shape(self) -> tuple[int, ...]:
        """Shape of scores and weights of a warpgroup."""
        return self.n, self.h, 4, _BLOCKS, _LANES

    @property
    def rows(self) -> int:
        """Rows that a warpgroup joins."""
        return -(-self.n // self.parts)

    def load_queries_and_newest_values(self) -> None:
        """To shared memory, by the first warpgroup."""

        @pl.when(self.part == 0)
        def _():
            ops, ins = self.ops, self.ins
            queries = ops.read(ins.q.at[self.sequence, :, self.group], self.layouts.queries)
            ops.write(self.own.queries, queries, self.layouts.queries, (2, 0, 1))
            slots = pl.ds(ins.start[self.sequence], 2 * self.n)
            newest = ops.read(ins.values_by_slot.at[self.sequence, self.group, slots], self.layouts.newest)
            ops.write(self.own.newest, newest)

    def write_scores(self) -> jax.Array:
        """Scores of this warpgroup's slots and the highest that a row sees go to shared memory.

        Returns:
            The scores, the lowest number if a row does not see the slot.
        """
        ops, by_slot, shape = self.ops, self.layouts.by_slot, self.by_slot_shape
        slots_of, per_head = by_slot.reduce((0, 1)), by_slot.reduce((2, 3, 4))

        def add(i, scores):
            for j in range(8):
                at = i * 8 + j
                column = ops.read(self.ins.keys.at[self.sequence, self.group, self.part, :, :, at], slots_of)
                column = column.astype(jnp.float32)
                queries = ops.spread(ops.read(self.own.queries.at[at], per_head), shape, (0, 1), by_slot)
                scores = scores + queries * ops.spread(column, shape, (2, 3, 4), by_slot)
            return scores

        scores = jax.lax.fori_loop(0, self.d // 8, add, ops.cast(jnp.zeros(shape, jnp.float32), by_slot))
        place = [ops.cast(jax.lax.broadcasted_iota(jnp.int32, shape, axis), by_slot) for axis in (2, 3, 4)]
        slot = self.part * SLOTS + place[0] * (SLOTS // 4) + place[1] * _LANES + place[2]
        per_row, per_warp = by_slot.reduce((1, 2, 3, 4)), by_slot.reduce((3, 4))
        first, low = (
            ops.spread(ops.read(ref.at[self.sequence], per_row), shape, (0,), by_slot)
            for ref in (self.ins.first, self.ins.low)
        )
        seen = jnp.where((slot < first) & (slot > low), scores, jnp.float32(_LOWEST))
        ops.write(self.own.weights.at[self.part], scores, by_slot, (2, 3, 4, 0, 1))
        ops.write(self.own.tops.at[self.part], jnp.max(jnp.max(seen, axis=4), axis=3), per_warp, (2, 0, 1))
        return seen

    def weigh_newest(self) -> None:
        """The highest score of each row's newest positions, and their weights, from scores in shared memory."""
        ops, ins, one = self.ops, self.ins, self.layouts.row.reduce((1,))

        def weigh(i, _):
            r = jnp.minimum(self.part * self.rows + i, self.n - 1)  # the last may be done twice, alike
            scores = []
            for j in range(self.n):
                near = ins.near[self.sequence, r, j]
                s = ins.start[self.sequence] + jnp.maximum(near, 0)
                at = s // SLOTS, (s // 64) % 4, (s // _LANES) % _BLOCKS, s % _LANES, r
                score = ops.read(self.own.weights.at[at], one)
                scores.append(jnp.where(near >= 0, score, jnp.float32(_LOWEST)))
            top = functools.reduce(jnp.maximum, scores)
            ops.write(self.own.newest_tops.at[r], top, one, (0,))
            for j, score in enumerate(scores):
                ops.write(self.own.newest_weights.at[r, j], jnp.exp(score - top), one, (0,))
            return 0

        jax.lax.fori_loop(0, self.rows, weigh, 0)

    def weigh(self, seen: jax.Array) -> jax.Array:
        """Weights of this warpgroup's slots below the highest score of all; their sums go to shared memory."""
        ops, by_slot = self.ops, self.layouts.by_slot
        per_warp, per_head = by_slot.reduce((3, 4)), by_slot.reduce((2, 3, 4))

        def highest(i, top):
            return jnp.maximum(top, ops.read(self.own.tops.at[i // 4, i % 4], per_head))

        lowest = ops.cast(jnp.full((self.n, self.h), _LOWEST, jnp.float32), per_head)
        top = jax.lax.fori_loop(0, 4 * self.parts, highest, lowest)
        weights = jnp.exp(seen - ops.spread(top, self.by_slot_shape, (0, 1), by_slot))
        ops.write(self.own.totals.at[self.part], jnp.sum(jnp.sum(weights, axis=4), axis=3), per_warp, (2, 0, 1))
        return weights

    def sum_values(self) -> None:
        """Values of this warpgroup's slots by their weights, a sum a warp."""
        ops, summed, shape = self.ops, self.layouts.summed, (4, self.n, self.h, self.d)

        def add(i, acc):
            for j in range(8):
                at = i * 8 + j
                line = ops.read(self.ins.values.at[self.sequence, self.group, self.part, :, at], summed.reduce((1, 2)))
                weight = ops.read(self.own.weights.at[self.part, :, at // _LANES, at % _LANES], summed.reduce((3,)))
                acc = acc + ops.spread(weight, shape, (0, 1, 2), summed) * ops.spread(
                    line.astype(jnp.float32), shape, (0, 3), summed
                )
            return acc

        acc = jax.lax.fori_loop(0, SLOTS // 4 // 8, add, ops.cast(jnp.zeros(shape, jnp.float32), summed))
        ops.write(self.own.sums.at[self.part], acc)

    def write_rows(self, out: jax.Ref) -> None:
        """Joins the warps' sums and the newest positions of this warpgroup's rows."""
        ops, row, one = self.ops, self.layouts.row, self.layouts.row.reduce((1,))
        shape = self.h, self.d

        def join(i, _):
            r = jnp.minimum(self.part * self.rows + i, self.n - 1)
            total, summed, top = None, None, None
            for p in range(self.parts):
                for w in range(4):
                    more = ops.read(self.own.sums.at[p, w, r], row)
                    summed = more if summed is None else summed + more
                    more = ops.read(self.own.totals.at[p, w, r], one)
                    total = more if total is None else total + more
                    more = ops.read(self.own.tops.at[p, w, r], one)
                    top = more if top is None else jnp.maximum(top, more)
            newest_total, newest_sum = self._of_newest(r)
            newest_top = ops.read(self.own.newest_tops.at[r], one)
            highest = jnp.maximum(top, newest_top)
            old, new = jnp.exp(top - highest), jnp.exp(newest_top - highest)
            of_both = ops.spread(old, shape, (0,), row) * summed + ops.spread(new, shape, (0,), row) * newest_sum
            result = of_both / ops.spread(old * total + new * newest_total, shape, (0,), row)
            keep = self.ins.keep[self.sequence, r] > 0
            ops.write(out.at[self.sequence, r, self.group], jnp.where(keep, result, jnp.float32(0)))
            return 0

        jax.lax.fori_loop(0, self.rows, join, 0)

    def _of_newest(self, r: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Sum of weights and weighted values of a row's newest positions."""
        ops, row, one = self.ops, self.layouts.row, self.layouts.row.reduce((1,))
        shape = self.h, self.d
        total = ops.cast(jnp.zeros((self.h,), jnp.float32), one)
        summed = ops.cast(jnp.zeros(shape, jnp.float32), row)
        for j in range(self.n):
            weight = ops.read(self.own.newest_weights.at[r, j], one)
            slot = jnp.maximum(self.ins.near[self.sequence, r, j], 0)
            line = ops.read(self.own.newest.at[slot], row.reduce((0,))).astype(jnp.float32)
            total = total + weight
            summed = summed + ops.spread(weight, shape, (0,), row) * ops.spread(line, shape, (1,), row)
        return total, summed


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
