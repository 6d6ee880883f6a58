"""The product of `gpu.product` as a Pallas kernel for NVIDIA's matrix units (Mosaic GPU): mma.m16n8k32, int8 to int32.

Codes go from memory to registers in one long load a thread, are masked there, and never lie in memory as numbers. A
warpgroup multiplies `Plan.tiles` tiles with a range of the columns; the warpgroups of a block take ranges beside each
other and add them up in order. Every element is one exact integer sum a block and float32 sums in one order, so its
bits depend neither on the rows beside it nor on the place of its row.
"""

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector
from jaxlib.mlir.dialects import math as mlir_math

from specsparse.kernels.gpu.fragments import TILE, Fragments, unpack
from specsparse.kernels.gpu.plan import Plan
from specsparse.kernels.gpu.rows import PackedRows
from specsparse.kernels.qtensor import BLOCK, Layout
from specsparse.support import jax_versions

_Tiling, _Replicated = mgpu.fragmented_array.Tiling, mgpu.fragmented_array.Replicated
_ACC = mgpu.TiledLayout(_Tiling(((64, 8), (16, 8), (8, 8), (2,))), warp_dims=(-7,), lane_dims=(-3, -2), vector_dim=-1)


def product(w: Fragments, rows: PackedRows, plan: Plan, *, interpret: bool = False) -> jax.Array:
    """Partial sums f32[splits, 64 T, 8 n] of the matrix times 8 n rows; `interpret` runs it on a CPU, very slowly."""
    layout, width = w.layout, rows.tiles * 8
    arrays = [w.codes, w.scales, w.subs, rows.codes, rows.scales, rows.sums]
    given = [i for i, a in enumerate(arrays) if a is not None]
    ops = _Interpreted(layout) if interpret else _Compiled(layout)

    def body(*refs):
        ins = dict(zip(given, refs))
        out, *more = refs[len(given) :]
        group, split, part = (jax.lax.axis_index(name) for name in ("group", "split", "part"))
        first = (split * plan.parts + part) * plan.steps
        tiles = [group * plan.tiles + t for t in range(plan.tiles)]

        def step(i, sums):
            for u in range(plan.unit):
                piece = (first + i) * plan.unit + u
                x = [None if k not in ins else ops.read(ins[k].at[piece], ops.row_layout(k, ins[k])) for k in (3, 4, 5)]
                new = []
                for tile, acc in zip(tiles, sums, strict=True):
                    codes = ops.read(ins[0].at[tile, piece], ops.code_layout(ins[0]))
                    at = piece if 2 not in ins else first + i  # headers are of super-blocks
                    scales = ops.read(ins[1].at[tile, at], ops.scale_layout(ins[1]))
                    subs = ops.read(ins[2].at[tile, piece], ops.scale_layout(ins[2])) if 2 in ins else None
                    new.append(ops.add(acc, codes, scales, subs, *x))
                sums = tuple(new)
            return sums

        sums = jax.lax.fori_loop(0, plan.steps, step, tuple(ops.zeros(width) for _ in tiles))
        if plan.parts == 1:
            for t, acc in enumerate(sums):
                ops.write(out.at[split, pl.ds(tiles[t] * TILE, TILE)], acc)
            return
        shared, barrier = more
        for t, acc in enumerate(sums):
            ops.write(shared.at[part, pl.ds(t * TILE, TILE)], acc)
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)

        for t in range(plan.tiles):

            @pl.when(part == t % plan.parts)
            def _(t=t):
                total = ops.read(shared.at[0, pl.ds(t * TILE, TILE)], ops.sum_layout)
                for other in range(1, plan.parts):
                    total = total + ops.read(shared.at[other, pl.ds(t * TILE, TILE)], ops.sum_layout)
                ops.write(out.at[split, pl.ds(tiles[t] * TILE, TILE)], total)

    scratch = []
    if plan.parts > 1:
        scratch = [
            plgpu.SMEM((plan.parts, plan.tiles * TILE, width), jnp.float32),
            plgpu.Barrier(num_arrivals=plan.parts),
        ]
    return jax_versions.mosaic_kernel(
        body,
        out=jax.ShapeDtypeStruct((plan.splits, w.tiles * TILE, width), jnp.float32),
        scratch=scratch,
        grid=(w.tiles // plan.tiles, plan.splits),
        grid_names=("group", "split"),
        num_threads=plan.parts,
        thread_name="part",
        interpret=interpret,
    )(*(arrays[i] for i in given))


class _Interpreted:
    """The steps of the kernel on whole arrays, for Pallas's interpreter."""

    sum_layout = None

    def __init__(self, layout: Layout):
        self.layout = layout

    def code_layout(self, ref):
        return None

    def scale_layout(self, ref):
        return None

    def row_layout(self, which, ref):
        return None

    def read(self, ref, layout):
        return ref[...]

    def write(self, ref, value):
        ref[...] = value

    def zeros(self, width):
        return jnp.zeros((TILE, width), jnp.float32)

    def add(self, acc, codes, scales, subs, x, dx, sx):
        u = unpack(codes[None], scales[None], None if subs is None else subs[None], self.layout)
        per, sub = scales_of(u.d), self.layout.sub
        tiles = x.shape[0] // 32
        q = jax.lax.bitcast_convert_type(x, jnp.int8).reshape(tiles, 8, 4, 2, 2, 4)  # n g t block h byte
        q = q.transpose(0, 1, 3, 4, 2, 5).reshape(tiles * 8, 2 * BLOCK).astype(jnp.int32)
        scale = dx.reshape(tiles, 4, 2, 2).transpose(0, 1, 3, 2).reshape(tiles * 8, 2)
        sums = None if sx is None else sx.reshape(tiles, 4, per, 2).transpose(0, 1, 3, 2).reshape(tiles * 8, per)
        for k in range(per):
            columns = slice(k * sub, (k + 1) * sub)
            dot = jnp.einsum("mk,nk->mn", u.codes[:, columns].astype(jnp.int32), q[:, columns])
            if self.layout.zero:
                dot = dot - jnp.int32(self.layout.zero) * sums[None, :, k]
            acc = acc + u.d[:, k, None] * scale[None, :, k * sub // BLOCK] * dot.astype(jnp.float32)
            if u.m is not None:
                acc = acc + u.m[:, k, None] * sums[None, :, k]
        return acc


def scales_of(d: jax.Array) -> int:
    """Scales of one row in a piece."""
    return d.shape[-1]


class _Compiled:
    """The steps of the kernel on the registers of a warpgroup."""

    def __init__(self, layout: Layout):
        self.layout = layout
        self.sum_layout = _tiled(_ACC)

    def code_layout(self, ref):
        """[128, w]: a row a thread."""
        w = ref.shape[-1]
        return _tiled(_layout(_Tiling(((128, w), (32, w), (1, w))), (-6,), (-4,)))

    def scale_layout(self, ref):
        """[32, w]: a row four threads."""
        w = ref.shape[-1]
        return _tiled(_layout(_Tiling(((32, w), (8, w), (1, w))), (-6,), (-4, _Replicated(4))))

    def row_layout(self, which, ref):
        """Codes [32 n, 4]: a row a lane, the same in each warp. Scales and sums [4 n, w]: a row every fourth lane."""
        w = ref.shape[-1]
        if which == 3:
            return _tiled(_layout(_Tiling(((32, w), (1, w))), (_Replicated(4),), (-4,)))
        return _tiled(_layout(_Tiling(((4, w), (1, w))), (_Replicated(4),), (_Replicated(8), -4)))

    def read(self, ref, layout):
        return jax_versions.mosaic_load(ref, layout)

    def write(self, ref, value):
        ref[...] = value

    def zeros(self, width):
        return plgpu.layout_cast(jnp.zeros((TILE, width), jnp.float32), _tiled(_ACC))

    def add(self, acc, codes, scales, subs, x, dx, sx):
        arrays = [acc, codes, scales, subs, x, dx, sx]
        layouts = [
            self.sum_layout, self.code_layout(codes), self.scale_layout(scales),
            None if subs is None else self.scale_layout(subs),
            self.row_layout(3, x), self.row_layout(4, dx), None if sx is None else self.row_layout(5, sx),
        ]  # fmt: skip
        given = [i for i, a in enumerate(arrays) if a is not None]

        @plgpu.inline_mgpu(
            arg_types=tuple(layouts[i] for i in given),
            return_type=plgpu.ShapeDtypeStruct(acc.shape, jnp.float32, layout=self.sum_layout),
        )
        def run(ctx, *values):
            have = dict(zip(given, values))
            return _add(self.layout, *(have.get(i) for i in range(7)))

        return run(*(arrays[i] for i in given))


def _layout(tiling, warp_dims, lane_dims):
    return mgpu.TiledLayout(tiling, warp_dims, lane_dims, -1, _check_canonical=False).canonicalize()


def _tiled(layout: mgpu.TiledLayout):
    return plgpu.Layout.TILED(layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim)


def _add(layout: Layout, acc, codes, scales, subs, x, dx, sx):
    """`acc` and the products of one piece, register by register."""
    i32, i8, f32 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(8), ir.F32Type.get()
    forms = mgpu.MMALayouts(i8)
    assert forms.acc == _ACC, "Mosaic GPU lays sums out in another way"
    (word,), (scale,) = codes.registers.flatten(), scales.registers.flatten()
    n_tiles, per = acc.shape[1] // 8, 64 // layout.sub
    d, m = _weight_scales(layout, scale, None if subs is None else subs.registers.flatten()[0], per)
    x_words, dx_words = x.registers.flatten(), dx.registers.flatten()
    sx_words = None if sx is None else sx.registers.flatten()
    sums = [[_at(reg, c) for c in range(2)] for reg in acc.registers.flatten()]  # (n, e), then c
    none = _constant(0, i32)
    for k in range(per):
        block, half = divmod(k * layout.sub, BLOCK)
        a = _fragment([_codes(layout, word, block, r) for r in range(4)], forms.lhs, (TILE, BLOCK), i8)
        whole = layout.sub == BLOCK
        pairs = [[_at(reg, 2 * block + h) if whole or h == half // 16 else none for h in range(2)] for reg in x_words]
        b = _fragment([v for pair in pairs for v in pair], forms.rhs, (BLOCK, acc.shape[1]), i8)
        zero = mgpu.FragmentedArray.splat(none, acc.shape, _ACC, is_signed=True)
        dots = mgpu.mma(zero, a, b).registers.flatten()
        for n in range(n_tiles):
            for c in range(2):
                x_scale = _at(dx_words[n], 2 * block + c)
                x_sum = None if sx_words is None else _at(sx_words[n], 2 * k + c)
                for e in range(2):
                    dot = _at(dots[2 * n + e], c)
                    if layout.zero:
                        dot = arith.subi(dot, arith.muli(x_sum, _constant(layout.zero, i32)))
                    both = arith.mulf(d[k][e], x_scale)
                    total = _fma(both, arith.sitofp(f32, dot), sums[2 * n + e][c])
                    if m is not None:
                        total = _fma(m[k][e], x_sum, total)
                    sums[2 * n + e][c] = total
    registers = np.empty(acc.registers.size, object)
    for i, pair in enumerate(sums):
        registers[i] = vector.from_elements(ir.VectorType.get((2,), f32), pair)
    return mgpu.FragmentedArray(_registers=registers.reshape(acc.registers.shape), _layout=acc.layout, _is_signed=None)


def _weight_scales(layout: Layout, scale, subs, per: int):
    """([per][2] of d, the same of m or None) as float32: k-th scale of the piece, row g + 8 e."""
    f32 = ir.F32Type.get()

    def wide(i):
        value = _at(scale, i)
        return value if layout.scales == "f32" else arith.extf(f32, value)

    grid = [(k, e) for k in range(per) for e in range(2)]
    if subs is None:
        d = [[wide(2 * k + e) for e in range(2)] for k in range(per)]
        return d, [[wide(2 * (per + k) + e) for e in range(2)] for k in range(per)] if layout.scales == "dm" else None
    head = [wide(e) for e in range(2)]
    d = _pairs(grid, lambda k, e: arith.mulf(head[e], _byte(subs, 2 * k + e, signed=True)))
    if layout.scales == "super":
        return d, None
    low = [arith.negf(wide(2 + e)) for e in range(2)]
    return d, _pairs(grid, lambda k, e: arith.mulf(low[e], _byte(subs, 2 * (per + k) + e, signed=False)))


def _pairs(grid, of):
    out = {}
    for k, e in grid:
        out.setdefault(k, []).append(of(k, e))
    return [out[k] for k in sorted(out)]


def _byte(words, i: int, *, signed: bool):
    """Byte i of a vector of words as float32."""
    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    word = _at(words, i // 4)
    if signed:
        up = arith.shli(word, _constant(24 - 8 * (i % 4), i32))
        return arith.sitofp(f32, arith.shrsi(up, _constant(24, i32)))
    return arith.sitofp(f32, arith.andi(arith.shrui(word, _constant(8 * (i % 4), i32)), _constant(255, i32)))


def _codes(layout: Layout, words, block: int, r: int):
    """Word r of a thread's fragment of a block: four int8."""
    i32 = ir.IntegerType.get_signless(32)
    if layout.codes == "int8":
        return _at(words, 4 * block + r)
    word = _at(words, r)
    if block:
        word = arith.shrui(word, _constant(4, i32))
    nibbles = arith.andi(word, _constant(0x0F0F0F0F, i32))
    return _looked_up(nibbles, layout.lut) if layout.lut else nibbles


def _looked_up(nibbles, table: tuple[int, ...]):
    """table[nibble] for the four bytes of a word: two permutations of eight bytes and a choice by the fourth bit."""
    i32 = ir.IntegerType.get_signless(32)
    packed = np.array(table, np.int8).view("<u4")
    low = arith.andi(nibbles, _constant(0x07070707, i32))
    select = arith.ori(low, arith.shrui(low, _constant(4, i32)))  # bytes 0 and 2: two nibbles each
    select = arith.ori(arith.andi(select, _constant(0xFF, i32)),
                       arith.andi(arith.shrui(select, _constant(8, i32)), _constant(0xFF00, i32)))  # fmt: skip
    first, second = (_permute(packed[i], packed[i + 1], select) for i in (0, 2))
    upper = arith.muli(arith.andi(arith.shrui(nibbles, _constant(3, i32)), _constant(0x01010101, i32)),
                       _constant(0xFF, i32))  # fmt: skip
    return arith.ori(arith.andi(second, upper), arith.andi(first, arith.xori(upper, _constant(-1, i32))))


def _permute(low: np.uint32, high: np.uint32, select):
    """PTX's prmt.b32: byte i is byte (select >> 4 i) & 7 of the eight bytes of high and low."""
    i32 = ir.IntegerType.get_signless(32)
    words = [_constant(int(np.int32(np.uint32(w).view(np.int32))), i32) for w in (low, high)]
    return llvm.inline_asm(i32, [*words, select], "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", has_side_effects=False)


def _fragment(words, layout, shape, dtype):
    """Words of four int8 as an operand of `mma`."""
    four = ir.VectorType.get((4,), dtype)
    registers = np.empty(len(words), object)
    for i, word in enumerate(words):
        registers[i] = mgpu.utils.bitcast(word, four)
    return mgpu.FragmentedArray(
        _registers=registers.reshape(layout.registers_shape(shape)), _layout=layout, _is_signed=True
    )


def _at(value, i: int):
    """Element i of a vector."""
    return vector.extract(value, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([i]))


def _constant(value: int, dtype):
    return arith.constant(dtype, ir.IntegerAttr.get(dtype, value))


def _fma(a, b, c):
    """One rounding, whatever the compiler would make of a product and a sum."""
    return mlir_math.fma(a, b, c)
