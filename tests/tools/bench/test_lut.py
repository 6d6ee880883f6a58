"""The look-up kernels, an ablation: bit planes, exact tables, rounded tables.

Promised: tables of exact sums give the bits of the product kernels' definition, on every instruction set, for every
number of threads and rows; tables of rounded sums give the same bits everywhere, agree with the jnp reference, and lie
within `error_bound` of the exact product.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf.quants import dequantize

from specsparse.kernels.native import cpu
from specsparse.kernels.packing.pack import pack_qtensor
from specsparse.testing import random_quantised
from specsparse.tools.bench import lut_product as lut
from specsparse.tools.bench.lut_product import SUMS, _scales, make_tables, pack_planes
from tests.kernels import emulation
from tests.kernels.test_kernels import TYPES, same_bits, use
from tests.tolerances import LINEAR_NMSE, nmse

pytestmark = pytest.mark.skipif(not cpu.available(), reason=f"no native kernels: {cpu.why_missing()}")

KINDS = ("Q4_0", "Q4_1")
SHAPE = (37, 96)
WIDE = (16, 2400)
"""More blocks than one item builds the tables of."""
RUNS = (("portable", 1), ("avx2", 1), ("avx2", 2), ("avx512", 2))


@cache
def raw_of(kind: str, shape: tuple[int, int] = SHAPE) -> np.ndarray:
    return random_quantised(kind, *shape, seed=3)


@cache
def matrix(kind: str, shape: tuple[int, int] = SHAPE):
    """A matrix and its bit planes."""
    w = pack_qtensor(raw_of(kind, shape), TYPES[kind], shape)
    return w, pack_planes(w)


@cache
def activations(cols: int = SHAPE[1], rows: int = 9) -> np.ndarray:
    """Rows of several magnitudes; one of zeros, one with a block of zeros, one with a peak."""
    rng = np.random.default_rng(cols)
    x = rng.normal(size=(rows, cols)).astype(np.float32) * np.exp2(rng.integers(-8, 8, (rows, 1))).astype(np.float32)
    x[3], x[4, :32] = 0, 0
    x[5, 7] *= 1000
    return x


reference = jax.jit(lut.reference_linear, static_argnames="sums")


def test_planes_hold_bit_b_of_four_neighbours():
    w, planes = matrix("Q4_1")
    rows, cols = SHAPE
    codes, *_ = emulation.unpack(np.asarray(w.data), w.layout, rows, cols)
    blocks = np.asarray(planes.data).reshape(-1, cols // 32, 64 + 256)
    for row, block, quad, bit in np.ndindex(rows, cols // 32, 8, 4):
        byte = blocks[row // 16, block, 64 + 64 * (quad % 4) + 4 * (row % 16) + bit]
        at = 32 * block + 4 * quad
        wanted = sum((int(codes[row, at + k]) >> bit & 1) << k for k in range(4))
        assert (byte >> 4 if quad >= 4 else byte & 15) == wanted
    np.testing.assert_array_equal(blocks[..., :64], np.asarray(w.data).reshape(blocks.shape)[..., :64])


@pytest.mark.parametrize("isa, threads", RUNS)
@pytest.mark.parametrize("kind", KINDS)
def test_exact_tables_give_the_bits_of_the_product(kind, isa, threads):
    use(isa, threads)
    for shape in (SHAPE, WIDE):
        w, planes = matrix(kind, shape)
        x = activations(shape[1])
        wanted = emulation.product(x, np.asarray(w.data), w.layout, shape)
        for n in (1, 2, 3, 4, 5, 9):
            got = lut.lut_linear(x[:n], planes, sums="int16")
            same_bits(got, wanted[:n], f"{shape}, {n} rows")
    same_bits(got, cpu.linear(jnp.asarray(x), (w,), n_valid=jnp.array([9], jnp.int32))[0])


@pytest.mark.parametrize("kind", KINDS)
def test_rounded_tables_give_the_same_bits_everywhere(kind):
    for sums in ("int8", "int6"):
        for shape in (SHAPE, WIDE):
            _, planes = matrix(kind, shape)
            x = activations(shape[1])
            use("portable", 1)
            wanted = np.asarray(lut.lut_linear(x, planes, sums=sums))
            use("avx2", 2)
            for n in (1, 2, 3, 4, 9):
                same_bits(lut.lut_linear(x[:n], planes, sums=sums), wanted[:n], f"{sums}, {n} rows")


@pytest.mark.parametrize("sums", SUMS)
@pytest.mark.parametrize("kind", KINDS)
def test_reference_agrees(kind, sums):
    use("avx2")
    _, planes = matrix(kind)
    x = activations()
    residual = np.arange(len(x) * SHAPE[0], dtype=np.float32).reshape(len(x), -1)
    for more in (None, residual):
        got = lut.lut_linear(x, planes, sums=sums, residual=more)
        wanted = reference(x, planes, sums=sums, residual=more)
        for a, b in zip(np.asarray(got), np.asarray(wanted)):  # rows differ in magnitude
            assert nmse(a, b) < LINEAR_NMSE["float"]


def error_bound(x_RD, w, sums):
    """How far f32[R, rows] a product by rounded tables can lie from the exact one, roundings of float32 aside.

    An entry is off by half a step at most, a step counts half, and 8 tables times 15 make a block: 60 d * scale.
    """
    d = np.abs(np.asarray(_scales(w)[0]))
    scale = np.asarray(make_tables(x_RD, w.layout.zero, sums).scale)
    return 60.0 * np.einsum("gbl,rb->rgl", d, scale).reshape(len(x_RD), -1)[:, : w.shape[0]]


@pytest.mark.parametrize("kind", KINDS)
def test_rounded_tables_lie_within_the_bound(kind):
    use("avx2")
    dense = dequantize(raw_of(kind), TYPES[kind]).astype(np.float64)
    _, planes = matrix(kind)
    x = activations()
    exact = x.astype(np.float64) @ dense.T
    rounding = 1e-5 * (np.abs(x).astype(np.float64) @ np.abs(dense).T)  # of float32
    worst = {}
    for sums in ("int8", "int6"):
        bound = error_bound(x, planes, sums)
        error = np.abs(np.asarray(lut.lut_linear(x, planes, sums=sums)) - exact)
        assert np.all(error <= bound + rounding)
        worst[sums] = np.max(error[0] / bound[0])
        assert worst[sums] > 0.05  # not an empty promise
    half_steps = error_bound(x, planes, "int6")[0] / error_bound(x, planes, "int8")[0]
    np.testing.assert_allclose(half_steps, 127 / 31, rtol=1e-6)


@pytest.mark.parametrize("sums", SUMS)
@pytest.mark.parametrize("kind", KINDS)
def test_largest_sums_do_not_overflow(kind, sums):
    """All codes 15 or 0 and all activations +1 or -1: the largest sums that words and bytes have to hold."""
    use("avx2")
    for byte, sign in ((0xFF, 1), (0xFF, -1), (0x00, 1), (0x00, -1)):
        raw = raw_of(kind).copy().reshape(SHAPE[0], 3, -1)
        raw[..., -16:] = byte
        w = pack_qtensor(raw.reshape(SHAPE[0], -1), TYPES[kind], SHAPE)
        x = np.full((2, SHAPE[1]), sign, np.float32)
        wanted = emulation.product(x, np.asarray(w.data), w.layout, SHAPE)
        got = np.asarray(lut.lut_linear(x, pack_planes(w), sums=sums))
        if sums == "int16":
            same_bits(got, wanted)
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)  # the largest sum is a whole number of steps
