"""Packed products for a GPU: the order of bytes that its threads read, the arithmetic, and the kernel in Pallas's
interpreter.

Where a thread's registers lie in the matrices is written here from the PTX manual (mma.m16n8k32, integer types): what
the kernel hands to the instruction is multiplied as the instruction multiplies it. A card is not needed; whether one
does the same is for `tests/gpu_aot` and a card to say.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as GGML

from specsparse.kernels.gpu import fragments as fr
from specsparse.kernels.gpu import product, rows
from specsparse.kernels.gpu.plan import Plan, plan
from specsparse.kernels.packing import dequant
from specsparse.kernels.packing.pack import pack_qtensor
from specsparse.testing import random_quantised
from tests.kernels import emulation
from tests.tolerances import LINEAR_NMSE, nmse

OUT = 70
KINDS = {"Q4_0": 96, "Q4_1": 96, "Q8_0": 96, "IQ4_NL": 96, "NVFP4": 256, "Q2_K": 512, "Q4_K": 512, "Q6_K": 512}
"""Columns by type: of each way to code weights and scales one."""
QUICK = ("Q4_0", "Q4_K")
"""Nibbles with a zero, and byte scales and mins below super-blocks."""


@cache
def matrix(name: str):
    """(QTensor, Fragments) of a random matrix."""
    shape = (OUT, KINDS[name])
    w = pack_qtensor(random_quantised(GGML[name], *shape), GGML[name], shape)
    return w, fr.fragments(w)


def some_rows(name: str, count: int) -> np.ndarray:
    x = np.random.default_rng(count).normal(size=(count, KINDS[name])).astype(np.float32)
    x[0, :40] = 0
    return x


@cache
def row_arrays(name: str, count: int):
    """(int8 codes, scales, `PackedRows`) of `some_rows`, in one program."""
    f, x = matrix(name)[1], some_rows(name, count)

    @jax.jit
    def quantised(x):
        codes, scales = rows.quantise(x)
        packed = rows.pack_rows(codes, scales, f)
        return codes, scales, (packed.codes, packed.scales, packed.sums)

    codes, scales, arrays = quantised(x)
    return codes, scales, rows.PackedRows(*arrays, -(-len(x) // 8))


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(n, marks=pytest.mark.slow) for n in KINDS if n not in QUICK)])
def test_fragments_hold_the_weights_and_their_product_is_the_native_definition(name):
    """Range by range of the columns: here two of a block's warpgroups, each of half the steps."""
    w, f = matrix(name)
    abstract = fr.abstract(w.layout, w.shape)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), f) == jax.tree.map(lambda a: (a.shape, a.dtype), abstract)
    unit = 4 if f.subs is not None else 1
    how = Plan(1, 2, 1, f.pieces // unit // 2, unit)
    x = some_rows(name, 3)
    ids = jnp.array([3, 69, 64, 1000])

    @jax.jit
    def found(f, x):
        return fr.widened(f, jnp.float32), fr.embed_rows(f, ids), product._in_order(f, *rows.quantise(x), how)

    values, embedded, got = (np.asarray(a) for a in found(f, x))
    dense = np.asarray(dequant.dequantize(w))
    np.testing.assert_array_equal(values, dense)
    np.testing.assert_array_equal(embedded, dense[[3, 69, 64, 69]])
    wanted = np.zeros((3, OUT), np.float32)
    span = f.pieces * fr.PIECE // how.ranges
    for at in range(0, KINDS[name], span):
        part = np.zeros_like(x)
        part[:, at : at + span] = x[:, at : at + span]
        wanted = wanted + emulation.product(part, np.asarray(w.data), w.layout, w.shape)
    assert nmse(got[:, :OUT], wanted) <= LINEAR_NMSE["float"]
    assert nmse(wanted, x.astype(np.float64) @ dense.T.astype(np.float64)) <= LINEAR_NMSE["plain"]


def instruction_operands(words: np.ndarray, x_words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A int8[64, 32] and B int8[32, 8] of registers [4 warps, 32 lanes, 4] and [32 lanes, 2], by the PTX manual.

    Byte i of a register of A: row lane / 4 (+ 8 for registers 1 and 3), column 4 (lane % 4) + i (+ 16 for 2 and 3). Of
    B: row 4 (lane % 4) + i (+ 16 for register 1), column lane / 4.
    """
    a, b = np.zeros((64, 32), np.int8), np.zeros((32, 8), np.int8)
    for lane in range(32):
        for i in range(4):
            for r in range(4):
                row, column = lane // 4 + 8 * (r % 2), 4 * (lane % 4) + i + 16 * (r // 2)
                a[np.arange(4) * 16 + row, column] = words[:, lane, r].copy().view(np.int8).reshape(4, 4)[:, i]
            for r in range(2):
                b[4 * (lane % 4) + i + 16 * r, lane // 4] = x_words[lane, r : r + 1].copy().view(np.int8)[i]
    return a, b


@pytest.mark.parametrize("name", ["Q4_0", "Q8_0"])
def test_registers_are_what_the_instruction_wants(name):
    """Both blocks of a piece, as the kernel takes its words apart."""
    w, f = matrix(name)
    codes, _, packed = row_arrays(name, 11)
    all_codes = np.asarray(emulation.unpack(np.asarray(w.data), w.layout, *w.shape)[0]) + w.layout.zero
    for piece in range(f.pieces):
        for block in range(min(2, KINDS[name] // 32 - 2 * piece)):
            words = np.asarray(f.codes)[1, piece].reshape(4, 32, -1)
            if w.layout.codes == "nibble":
                words = (words >> (4 * block)) & 0x0F0F0F0F
            else:
                words = words[..., 4 * block : 4 * block + 4]
            at = slice((2 * piece + block) * 32, (2 * piece + block + 1) * 32)
            for tile, rows_of_it in enumerate((np.asarray(codes)[:8, at], np.asarray(codes)[8:, at])):
                x_words = np.asarray(packed.codes)[piece, 32 * tile : 32 * tile + 32, 2 * block : 2 * block + 2]
                a, b = instruction_operands(words.astype(np.int32), x_words)
                np.testing.assert_array_equal(a[: OUT - 64], all_codes[64:, at])
                np.testing.assert_array_equal(b[:, : len(rows_of_it)], rows_of_it.T)
                assert not a[OUT - 64 :].any() and not b[:, len(rows_of_it) :].any()


def test_scales_lie_where_sums_do():
    """Sum c of a register pair: row lane / 4 (+ 8 for the second pair), column 2 (lane % 4) + c."""
    w, f = matrix("Q4_0")
    codes, scales, packed = row_arrays("Q4_0", 11)
    d = np.asarray(emulation.unpack(np.asarray(w.data), w.layout, *w.shape)[1])
    sums = np.asarray(codes).reshape(11, 3, 32).astype(np.int32).sum(-1)
    for lane in range(32):
        for warp in range(4):
            for e in range(2):
                row = 16 * warp + lane // 4 + 8 * e
                got = np.asarray(f.scales)[0, 0, 8 * warp + lane // 4, e::2]
                np.testing.assert_array_equal(got, d[row, :2])
        for n in range(2):
            for c in range(2):
                row = 8 * n + 2 * (lane % 4) + c
                for array, wanted in ((packed.scales, np.asarray(scales)), (packed.sums, sums)):
                    got = np.asarray(array)[0, 4 * n + lane % 4, c::2]
                    np.testing.assert_array_equal(got, wanted[row, :2] if row < 11 else 0)


@pytest.mark.parametrize(
    ("name", "shape", "count", "how"),
    [
        ("Q4_0", (64, 128), 3, Plan(1, 2, 1, 1, 1)),
        pytest.param("Q4_K", (128, 512), 9, Plan(2, 2, 1, 1, 4), marks=pytest.mark.slow),
        pytest.param("Q8_0", (192, 256), 9, Plan(1, 2, 2, 1, 1), marks=pytest.mark.slow),
    ],
)
def test_the_kernel_in_the_interpreter_is_the_product(name, shape, count, how):
    mosaic = pytest.importorskip("specsparse.kernels.gpu.mosaic")
    f = fr.fragments(pack_qtensor(random_quantised(GGML[name], *shape), GGML[name], shape))
    x = np.random.default_rng(count).normal(size=(count, shape[1])).astype(np.float32)

    @jax.jit
    def found(f, x):
        codes, scales = rows.quantise(x)
        packed = rows.pack_rows(codes, scales, f)
        return mosaic.product(f, packed, how, interpret=True), product._in_order(f, codes, scales, how)

    got, wanted = found(f, x)
    np.testing.assert_allclose(np.asarray(got).sum(0).T[:count], wanted, rtol=2e-6, atol=1e-6)


def test_a_plan_covers_the_matrix_and_reads_little_beside_it():
    """Shapes of SmolLM2-135M, a 7B and odd ones: all tiles and pieces once; rows and partial sums under 15 %."""
    for outputs, inputs in ((576, 576), (1536, 576), (576, 1536), (4096, 4096), (11008, 4096), (4096, 11008), (70, 96)):
        w = fr.abstract(matrix("Q4_0")[0].layout, (outputs, inputs))
        for tiles in (1, 2, 8):
            how = plan(w, tiles)
            assert how.ranges * how.steps * how.unit == w.pieces and w.tiles % how.tiles == 0
            if tiles == 1 and inputs > 1000:
                x_bytes = inputs * 8 * (1 + 4 / 32 + 4 / 32) * w.tiles / how.tiles
                assert x_bytes + how.splits * 8 * 4 * outputs <= 0.15 * w.nbytes, (outputs, inputs, how)
