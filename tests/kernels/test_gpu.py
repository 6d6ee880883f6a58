"""Packed products for a GPU: the order of bytes that its threads read, the arithmetic, and the kernel in Pallas's
interpreter.

Where a thread's registers lie in the matrices is written here from the PTX manual (mma.m16n8k32, integer types): what
the kernel hands to the instruction is multiplied as the instruction multiplies it. A card is not needed; whether one
does the same is for `tests/gpu_aot` and a card to say.
"""

from functools import cache, partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as GGML

from specsparse.kernels import take_rows
from specsparse.kernels.gpu import fragments as fr
from specsparse.kernels.gpu import ops
from specsparse.kernels.gpu.fragments import Plan, plan
from specsparse.kernels.packing import dequant
from specsparse.kernels.packing.pack import pack_qtensor
from specsparse.kernels.qtensor import take_rows as packed_rows
from specsparse.kernels.reference import dense
from specsparse.kernels.reference.dense import activate, normalise
from specsparse.testing import random_quantised
from tests.kernels import emulation
from tests.other_process import found_by
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

    @jax.jit
    def quantised(x):
        codes, scales = fr.quantise(x)
        return codes, scales, fr.pack_rows(codes, scales)

    return quantised(some_rows(name, count))


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
        return fr.widened(f, jnp.float32), fr.embed_rows(f, ids), ops._in_order(f, *fr.quantise(x), how)

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


@pytest.mark.parametrize("name", KINDS)
def test_rows_of_fragments_are_the_fragments_of_rows(name):
    """In any order and twice, a whole tile and a rest: the output matrix of a drafter that scores fewer ids."""
    w, f = matrix(name)
    ids = np.array([OUT - 1, 3, 3, 17, 64, 0, *range(1, OUT)])
    wanted, found = fr.fragments(packed_rows(w, ids)), take_rows(f, ids)
    assert found.shape == wanted.shape and found.layout == wanted.layout
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True))


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
    _, scales, packed = row_arrays("Q4_0", 11)
    d = np.asarray(emulation.unpack(np.asarray(w.data), w.layout, *w.shape)[1])
    for lane in range(32):
        for warp in range(4):
            for e in range(2):
                row = 16 * warp + lane // 4 + 8 * e
                got = np.asarray(f.scales)[0, 0, 8 * warp + lane // 4, e::2]
                np.testing.assert_array_equal(got, d[row, :2])
        for n in range(2):
            for c in range(2):
                row = 8 * n + 2 * (lane % 4) + c
                got = np.asarray(packed.scales)[0, 4 * n + lane % 4, c::2]
                np.testing.assert_array_equal(got, np.asarray(scales)[row, :2] if row < 11 else 0)


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
        codes, scales = fr.quantise(x)
        got = mosaic.product((f,), fr.pack_rows(codes, scales), how, interpret=True)
        return got, ops._in_order(f, codes, scales, how)

    got, wanted = (np.asarray(a) for a in found(f, x))
    got = got if how.splits == 1 else got.sum(0)
    np.testing.assert_allclose(got[:count], wanted, rtol=2e-6, atol=1e-6)


def test_gate_up_residual_and_rows_that_do_not_count_in_the_interpreter():
    mosaic = pytest.importorskip("specsparse.kernels.gpu.mosaic")
    gate, up = (
        fr.fragments(pack_qtensor(random_quantised(GGML["Q4_0"], 64, 64, seed), GGML["Q4_0"], (64, 64)))
        for seed in (1, 2)
    )
    x = np.random.default_rng(3).normal(size=(8, 64)).astype(np.float32)
    keep, how = jnp.arange(8, dtype=jnp.int32) % 3, Plan(1, 1, 1, 1, 1)

    @jax.jit
    def found(gate, up, x):
        codes, scales = fr.quantise(x)
        packed = fr.pack_rows(codes, scales)
        one, two = (ops._in_order(f, codes, scales, how) for f in (gate, up))
        return (
            (mosaic.product((gate, up), packed, how, act="silu", interpret=True), activate(one, "silu") * two),
            (
                mosaic.product((gate,), packed, how, residual=x, keep=keep, interpret=True),
                jnp.where(keep[:, None] > 0, x + one, jnp.float32(0)),
            ),
        )

    for got, wanted in found(gate, up, x):
        np.testing.assert_allclose(got, wanted, rtol=3e-6, atol=1e-6)


@pytest.mark.parametrize("columns", [128, pytest.param(96, marks=pytest.mark.slow)])
def test_the_rows_kernel_in_the_interpreter_norms_and_quantises(columns):
    """Two warpgroups of a piece each, or a piece of which half is padded."""
    entry = pytest.importorskip("specsparse.kernels.gpu.entry")
    x = np.random.default_rng(4).normal(size=(3, columns)).astype(np.float32)
    norm = np.random.default_rng(5).normal(size=columns).astype(np.float32)
    x[1] = 0

    def wanted(x):
        return fr.pack_rows(*fr.quantise(normalise(x, norm, eps=1e-5, over_rows=dense.at_once)))

    got, wanted = entry.pack(x, norm, 1e-5, interpret=True), jax.jit(wanted)(x)
    np.testing.assert_array_equal(got.codes, wanted.codes)
    np.testing.assert_allclose(got.scales, wanted.scales, rtol=1e-6)


def attention_inputs(length: int, parents: list[int], capacity: int = 256):
    """Arguments of attention of eight rows after `length` positions; the same numbers at the same positions."""
    rng = np.random.default_rng(6)

    def some(*shape, dtype=np.float32):
        return rng.normal(size=shape).astype(dtype)

    heads, d = 2, 32
    cache = some(1, 1, capacity // 16, d, 16, dtype=np.float16), some(1, 1, capacity, d, dtype=np.float16)
    tables = {name: some(1, capacity, d // 2) for name in ("cos", "sin")}
    by_position = some(capacity, heads * d), some(capacity, d), some(capacity, d)
    depth = []
    for parent in parents:
        depth.append(depth[parent] + 1 if parent >= 0 else 0)
    q, k, v = (a[length + np.array(depth)] for a in by_position)
    given = {"length": jnp.array([length]), "n_valid": jnp.array([7]), "parents": jnp.array([parents], jnp.int32)}
    return (q, k, v, *cache), tables | given


CHAIN, TREE = list(range(-1, 7)), [-1, 0, 0, 1, 1, 2, 2, 3]


@cache
def attention_kernel(window: int = 0):
    attention = pytest.importorskip("specsparse.kernels.gpu.attention")
    by_kernel = partial(dense.attend_batched, finite=True, window=window)
    return jax.jit(partial(by_kernel, core=partial(attention.core, interpret=True))), jax.jit(by_kernel)


def test_the_attention_kernel_keeps_a_rows_bits_in_chains_trees_and_steps():
    """Rows of equal paths: in a chain, in a tree at other slots, and alone after what is before it was committed."""
    by_kernel, by_xla = attention_kernel()
    args, options = attention_inputs(100, CHAIN)
    chain, *cache = by_kernel(*args, **options)
    np.testing.assert_allclose(chain, by_xla(*args, **options)[0], rtol=2e-5, atol=2e-6)
    args, options = attention_inputs(100, TREE)
    tree = np.asarray(by_kernel(*args, **options)[0])
    np.testing.assert_array_equal(tree[[0, 1, 2, 3, 6]], np.asarray(chain)[[0, 1, 1, 2, 2]])
    args, options = attention_inputs(103, CHAIN)
    np.testing.assert_array_equal(by_kernel(*args[:3], *cache, **options)[0][0], chain[3])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("length", "parents", "window"), [(100, TREE, 0), (2, CHAIN, 0), (248, TREE, 0), (100, TREE, 20)]
)
def test_the_attention_kernel_in_the_interpreter_is_attention(length, parents, window):
    by_kernel, by_xla = attention_kernel(window)
    args, options = attention_inputs(length, parents)
    got, wanted = by_kernel(*args, **options), by_xla(*args, **options)
    np.testing.assert_allclose(got[0], wanted[0], rtol=2e-5, atol=2e-6)
    assert not np.asarray(got[0])[7].any() and np.asarray(got[0])[:7].all()
    for mine, theirs in zip(got[1:], wanted[1:], strict=True):
        np.testing.assert_array_equal(mine, theirs)


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


_THREE_WARPGROUPS = """
import sys
import numpy as np
from tests.kernels import test_gpu as t
args, options = t.attention_inputs(700, t.TREE, 768)
got, wanted = (f(*args, **options)[0] for f in t.attention_kernel())
np.savez(sys.argv[1], got=got, wanted=wanted)
"""


@pytest.mark.slow
def test_three_warpgroups_with_other_numbers_of_rows_are_attention_too(tmp_path):
    """In a process with more threads: the interpreter's warpgroups wait for each other in those of XLA's pool."""
    pytest.importorskip("specsparse.kernels.gpu.attention")
    out = tmp_path / "found.npz"
    found = found_by(_THREE_WARPGROUPS, out, out=out, env={"NPROC": "8", "JAX_PLATFORMS": "cpu"})
    np.testing.assert_allclose(found["got"], found["wanted"], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("backend", "capability", "has"), [("cpu", None, False), ("gpu", "8.0", False), ("gpu", "9.0", True)]
)
def test_cards_before_hopper_take_xlas_operations(monkeypatch, backend, capability, has):
    device = SimpleNamespace(compute_capability=capability)
    monkeypatch.setattr(ops.jax, "default_backend", lambda: backend)
    monkeypatch.setattr(ops.jax, "devices", lambda: [device])
    assert ops.has_kernels() is has
