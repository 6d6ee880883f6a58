"""The product of `gpu.ops` as a Pallas kernel for NVIDIA's matrix units (Mosaic GPU): mma.m16n8k32, int8 to int32.

Codes go from memory to registers in one long load a thread, are masked there, and never lie in memory as numbers. A
warpgroup multiplies `Plan.tiles` tiles with a range of the columns; the warpgroups of a block take ranges beside each
other and add them up in order. Every element is one exact integer sum a block and float32 sums in one order, so its
bits depend neither on the rows beside it nor on the place of its row.
"""

from collections.abc import Sequence
from functools import partial, reduce
from operator import add
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector
from jaxlib.mlir.dialects import math as mlir_math

from specsparse.kernels.gpu.fragments import PIECE, TILE, Fragments, PackedRows, Plan, unpack
from specsparse.kernels.gpu.pallas_calls import (
    InArrays,
    InRegisters,
    Replicated,
    arrangement,
    meet,
    mosaic_kernel,
    tiled,
)
from specsparse.kernels.qtensor import BLOCK, Layout
from specsparse.kernels.reference.dense import activate

_ACC = arrangement(((64, 8), (16, 8), (8, 8), (2,)), (-7,), (-3, -2))
_ROWS = arrangement(((32, 4), (1, 4)), (Replicated(4),), (-4,))
"""Codes of rows, [32 n, 4]: a line a lane, the same in each warp."""
_ROW_SCALES = arrangement(((4, 4), (1, 4)), (Replicated(4),), (Replicated(8), -4))  # [4 n, 4]: a line every fourth lane


@partial(jax.jit, static_argnames=("plan", "act", "interpret"))  # one kernel for all layers
def product(
    weights: Sequence[Fragments], rows: PackedRows, plan: Plan, *, act: str | None = None, residual=None, keep=None,
    interpret: bool = False,
) -> jax.Array:  # fmt: skip
    """A matrix times 8 n rows, or act(gate product) * up product of two.

    Args:
        weights: the matrix, or gate and up, of one shape and one layout.
        rows: n tiles.
        plan: with splits there is no act, residual or keep.
        act: of the gate, as `reference.dense.activate` names it; two matrices.
        residual: f32[8 n, 64 T], added to the product.
        keep: int32[8 n]; 0 makes a row zeros.
        interpret: runs it on a CPU, very slowly.

    Returns:
        f32[8 n, 64 T], or partial sums f32[splits, 8 n, 64 T] if there are splits.
    """
    w, width = weights[0], rows.tiles * 8
    ops = (_Interpreted if interpret else _Compiled)(w.layout)
    arrays = {(i, name): getattr(m, name) for i, m in enumerate(weights) for name in ("codes", "scales", "subs")}
    arrays |= {"x": rows.codes, "dx": rows.scales, "residual": residual, "keep": keep}
    arrays = {key: a for key, a in arrays.items() if a is not None}

    def body(*refs):
        ins, (out, shared, barrier) = dict(zip(arrays, refs)), refs[len(arrays) :]
        group, split, part = (jax.lax.axis_index(name) for name in ("group", "split", "part"))
        first = (split * plan.parts + part) * plan.steps
        tiles = [(i, group * plan.tiles + t) for i in range(len(weights)) for t in range(plan.tiles)]

        def step(i, sums):
            for u in range(plan.unit):
                piece = (first + i) * plan.unit + u
                x, dx = ops.rows(ins["x"].at[piece]), ops.row_scales(ins["dx"].at[piece])
                row_sums, new = ops.row_sums(x, dx), []
                for (m, tile), acc in zip(tiles, sums, strict=True):
                    at = piece if (m, "subs") not in ins else first + i  # headers are of super-blocks
                    codes = ops.codes(ins[m, "codes"].at[tile, piece])
                    scales = ops.scales(ins[m, "scales"].at[tile, at])
                    subs = ops.scales(ins[m, "subs"].at[tile, piece]) if (m, "subs") in ins else None
                    new.append(ops.add(acc, codes, scales, subs, x, dx, row_sums))
                sums = tuple(new)
            return sums

        sums = jax.lax.fori_loop(0, plan.steps, step, tuple(ops.zeros(width) for _ in tiles))
        for t, acc in enumerate(sums):
            ops.write(shared.at[part, pl.ds(t * TILE, TILE)], acc)
        meet(barrier)

        def total(t: int) -> jax.Array:
            """The warpgroups' sums of a tile, added in order."""
            return reduce(add, (ops.read(shared.at[p, pl.ds(t * TILE, TILE)], _ACC) for p in range(plan.parts)))

        for t in range(plan.tiles):

            @pl.when(part == t % plan.parts)
            def _(t=t):
                columns = pl.ds(tiles[t][1] * TILE, TILE)
                y = total(t)
                if act is not None:
                    y = activate(y, act) * total(plan.tiles + t)
                if residual is not None:
                    y = ops.read_across(ins["residual"].at[:, columns], _ACC) + y
                if keep is not None:
                    counts = ops.read(ins["keep"], _ACC.reduce((0,)))
                    y = jnp.where(ops.spread(counts, (TILE, width), (1,), _ACC) > 0, y, jnp.float32(0))
                ops.write(out.at[split, :, columns], y, _ACC, (1, 0))

    added = mosaic_kernel(
        body,
        out=jax.ShapeDtypeStruct((plan.splits, width, w.tiles * TILE), jnp.float32),
        scratch=[
            plgpu.SMEM((plan.parts, len(weights) * plan.tiles * TILE, width), jnp.float32),
            plgpu.Barrier(num_arrivals=plan.parts),
        ],
        grid=(w.tiles // plan.tiles, plan.splits),
        grid_names=("group", "split"),
        num_threads=plan.parts,
        thread_name="part",
        interpret=interpret,
    )(*arrays.values())
    return added[0] if plan.splits == 1 else added


class _Interpreted(InArrays):
    """The steps of the kernel on whole arrays, for Pallas's interpreter."""

    def __init__(self, layout: Layout):
        self.layout = layout

    def rows(self, ref):
        words = ref[...]
        x = jax.lax.bitcast_convert_type(words, jnp.int8).reshape(-1, 8, 4, 2, 2, 4)  # n g t block h byte
        return x.transpose(0, 1, 3, 4, 2, 5).reshape(-1, 2 * BLOCK).astype(jnp.int32)

    def row_scales(self, ref):
        scales = ref[...].reshape(-1, 4, 2, 2)
        return scales.transpose(0, 1, 3, 2).reshape(-1, 2)

    def row_sums(self, x, dx):
        per = PIECE // self.layout.sub
        return jnp.sum(x.reshape(len(x), per, -1), axis=-1)

    def codes(self, ref):
        return ref[...]

    scales = codes

    def zeros(self, width):
        return jnp.zeros((TILE, width), jnp.float32)

    def add(self, acc, codes, scales, subs, x, dx, row_sums):
        numbers, d, m = unpack(codes[None], scales[None], None if subs is None else subs[None], self.layout)
        sub = self.layout.sub
        for k in range(PIECE // sub):
            columns, scale = slice(k * sub, (k + 1) * sub), dx[None, :, k * sub // BLOCK]
            dot = jnp.einsum("mk,nk->mn", numbers[:, columns].astype(jnp.int32), x[:, columns])
            if self.layout.zero:
                dot = dot - jnp.int32(self.layout.zero) * row_sums[None, :, k]
            acc = acc + d[:, k, None] * scale * dot.astype(jnp.float32)
            if m is not None:
                acc = acc + m[:, k, None] * (scale * row_sums[None, :, k].astype(jnp.float32))
        return acc


class _Compiled(InRegisters):
    """The steps of the kernel on the registers of a warpgroup."""

    def __init__(self, layout: Layout):
        self.layout = layout

    def rows(self, ref):
        return self.read(ref, _ROWS)

    def row_scales(self, ref):
        return self.read(ref, _ROW_SCALES)

    def row_sums(self, x, dx):
        """Of each scale's columns: what the zero subtracts from sums (int32), or the sum times the row's scale."""
        if not self.layout.zero and not self.layout.has_min:
            return ()
        layout, width, count = self.layout, x.shape[0] // 4, PIECE // self.layout.sub
        one = plgpu.ShapeDtypeStruct((TILE, width), jnp.int32 if layout.zero else jnp.float32, layout=tiled(_ACC))

        @plgpu.inline_mgpu(arg_types=(tiled(_ROWS), tiled(_ROW_SCALES)), return_type=(one,) * count)
        def run(ctx, x, dx):
            # By `mma` with a matrix of equal numbers: then the sums lie where products do.
            f32, equal = ir.F32Type.get(), np.array([-layout.zero or 1] * 4, np.int8).view("<i4")[0]
            word = _i32(int(equal))
            a = _fragment([word] * 4, mgpu.MMALayouts(ir.IntegerType.get_signless(8)).lhs, (TILE, BLOCK))
            found, scales = [], dx.registers.flatten()
            for k in range(count):
                sums = mgpu.mma(_nothing((TILE, width)), a, _rows_of(layout, x, k, width))
                if not layout.zero:
                    at = 2 * (k * layout.sub // BLOCK)
                    values = [
                        [arith.mulf(_at(scales[i // 2], at + c), arith.sitofp(f32, _at(reg, c))) for c in range(2)]
                        for i, reg in enumerate(sums.registers.flatten())
                    ]
                    sums = _sums_of(values, sums)
                found.append(sums)
            return tuple(found)

        return run(x, dx)

    def codes(self, ref):
        return self.read(ref, _code_layout(ref.shape[-1]))

    def scales(self, ref):
        return self.read(ref, _scale_layout(ref.shape[-1]))

    def zeros(self, width):
        return self.cast(jnp.zeros((TILE, width), jnp.float32), _ACC)

    def add(self, acc, codes, scales, subs, x, dx, row_sums):
        arrays = [acc, codes, scales, subs, x, dx, *row_sums]
        layouts = [
            _ACC, _code_layout(codes.shape[-1]), _scale_layout(scales.shape[-1]),
            None if subs is None else _scale_layout(subs.shape[-1]), _ROWS, _ROW_SCALES, *[_ACC for _ in row_sums],
        ]  # fmt: skip
        given = [i for i, a in enumerate(arrays) if a is not None]

        @plgpu.inline_mgpu(
            arg_types=tuple(tiled(layout) for layout in layouts if layout is not None),
            return_type=plgpu.ShapeDtypeStruct(acc.shape, jnp.float32, layout=tiled(_ACC)),
        )
        def run(ctx, *values):
            have = dict(zip(given, values))
            acc, codes, scales, subs, x, dx = (have.get(i) for i in range(6))
            return _add(self.layout, acc, codes, scales, subs, x, dx, [have[i] for i in range(6, len(arrays))])

        return run(*(arrays[i] for i in given))


def _code_layout(words: int):
    """The layout of codes [128, words]: each thread has one row."""
    return arrangement(((128, words), (32, words), (1, words)), (-6,), (-4,))


def _scale_layout(words: int):
    """The layout of scales [32, words]: four threads have one row."""
    return arrangement(((32, words), (8, words), (1, words)), (-6,), (-4, Replicated(4)))


def _add(layout: Layout, acc, codes, scales, subs, x, dx, row_sums):
    """`acc` and the products of one piece, register by register."""
    i8, f32 = ir.IntegerType.get_signless(8), ir.F32Type.get()
    forms = mgpu.MMALayouts(i8)
    assert forms.acc == _ACC, "Mosaic GPU lays sums out in another way"
    (word,), (scale,) = codes.registers.flatten(), scales.registers.flatten()
    per, x_scales = PIECE // layout.sub, dx.registers.flatten()
    d, m = _weight_scales(layout, scale, None if subs is None else subs.registers.flatten()[0], per)
    sums = [[_at(reg, c) for c in range(2)] for reg in acc.registers.flatten()]  # (n, e), then c
    for k in range(per):
        block = k * layout.sub // BLOCK
        a = _fragment([_codes(layout, word, block, r) for r in range(4)], forms.lhs, (TILE, BLOCK))
        dots = mgpu.mma(row_sums[k] if layout.zero else _nothing(acc.shape), a, _rows_of(layout, x, k, acc.shape[1]))
        for i, reg in enumerate(dots.registers.flatten()):
            for c in range(2):
                scale_of_both = arith.mulf(d[k][i % 2], _at(x_scales[i // 2], 2 * block + c))
                # A product and a sum with one rounding, whatever the compiler does.
                total = mlir_math.fma(scale_of_both, arith.sitofp(f32, _at(reg, c)), sums[i][c])
                if m is not None:
                    total = mlir_math.fma(m[k][i % 2], _at(row_sums[k].registers.flatten()[i], c), total)
                sums[i][c] = total
    return _sums_of(sums, acc)


def _rows_of(layout: Layout, x, k: int, width: int):
    """The rows' operand of `mma` for the columns of scale k."""
    block, half = divmod(k * layout.sub, BLOCK)
    none, whole = _i32(0), layout.sub == BLOCK
    words = [
        _at(reg, 2 * block + h) if whole or h == half // 16 else none for reg in x.registers.flatten() for h in range(2)
    ]
    return _fragment(words, mgpu.MMALayouts(ir.IntegerType.get_signless(8)).rhs, (BLOCK, width))


def _nothing(shape):
    return mgpu.FragmentedArray.splat(_i32(0), shape, _ACC, is_signed=True)


def _sums_of(pairs, like):
    """Floats, two a register, arranged as `like`."""
    registers = np.empty(len(pairs), object)
    for i, pair in enumerate(pairs):
        registers[i] = vector.from_elements(ir.VectorType.get((2,), ir.F32Type.get()), pair)
    return mgpu.FragmentedArray(_registers=registers.reshape(like.registers.shape), _layout=_ACC, _is_signed=None)


def _weight_scales(layout: Layout, scale, subs, per: int):
    """Float32 scales [per][2] d, and m or None: of the k-th scale of the piece and row g + 8 e."""
    f32 = ir.F32Type.get()

    def wide(i):
        value = _at(scale, i)
        return value if layout.scales == "f32" else arith.extf(f32, value)

    def by_scale(of):
        return [[of(k, e) for e in range(2)] for k in range(per)]

    if subs is None:
        d = by_scale(lambda k, e: wide(2 * k + e))
        return d, by_scale(lambda k, e: wide(2 * (per + k) + e)) if layout.scales == "dm" else None
    head = [wide(e) for e in range(2)]
    d = by_scale(lambda k, e: arith.mulf(head[e], _byte(subs, 2 * k + e, signed=True)))
    if layout.scales == "super":
        return d, None
    low = [arith.negf(wide(2 + e)) for e in range(2)]
    return d, by_scale(lambda k, e: arith.mulf(low[e], _byte(subs, 2 * (per + k) + e, signed=False)))


def _byte(words, i: int, *, signed: bool):
    """Byte i of a vector of words as float32."""
    f32, word = ir.F32Type.get(), _at(words, i // 4)
    if signed:
        up = arith.shli(word, _i32(24 - 8 * (i % 4)))
        return arith.sitofp(f32, arith.shrsi(up, _i32(24)))
    return arith.sitofp(f32, arith.andi(arith.shrui(word, _i32(8 * (i % 4))), _i32(255)))


def _codes(layout: Layout, words, block: int, r: int):
    """Word r of a thread's fragment of a block: four int8."""
    if layout.codes == "int8":
        return _at(words, 4 * block + r)
    word = _at(words, r)
    if block:
        word = arith.shrui(word, _i32(4))
    nibbles = arith.andi(word, _i32(0x0F0F0F0F))
    return _looked_up(nibbles, layout.lut) if layout.lut else nibbles


def _looked_up(nibbles, table: tuple[int, ...]):
    """table[nibble] for the four bytes of a word: two permutations of eight bytes and a choice by the fourth bit."""
    packed = np.array(table, np.int8).view("<u4")
    low = arith.andi(nibbles, _i32(0x07070707))
    select = arith.ori(low, arith.shrui(low, _i32(4)))  # bytes 0 and 2: two nibbles each
    select = arith.ori(arith.andi(select, _i32(0xFF)), arith.andi(arith.shrui(select, _i32(8)), _i32(0xFF00)))
    i32 = ir.IntegerType.get_signless(32)

    def permute(*words) -> Any:
        """PTX's prmt.b32: byte i is byte (select >> 4 i) & 7 of the eight bytes of two words, the low one first."""
        both = [_i32(int(word.view(np.int32))) for word in words]
        return llvm.inline_asm(i32, [*both, select], "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", has_side_effects=False)

    first, second = permute(packed[0], packed[1]), permute(packed[2], packed[3])
    upper = arith.muli(arith.andi(arith.shrui(nibbles, _i32(3)), _i32(0x01010101)), _i32(0xFF))
    return arith.ori(arith.andi(second, upper), arith.andi(first, arith.xori(upper, _i32(-1))))


def _fragment(words, layout, shape):
    """Words of four int8 as an operand of `mma`."""
    four = ir.VectorType.get((4,), ir.IntegerType.get_signless(8))
    registers = np.empty(len(words), object)
    for i, word in enumerate(words):
        registers[i] = mgpu.utils.bitcast(word, four)
    return mgpu.FragmentedArray(
        _registers=registers.reshape(layout.registers_shape(shape)), _layout=layout, _is_signed=True
    )


def _at(value, i: int):
    return vector.extract(value, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([i]))


def _i32(value: int):
    dtype = ir.IntegerType.get_signless(32)
    return arith.constant(dtype, ir.IntegerAttr.get(dtype, value))
