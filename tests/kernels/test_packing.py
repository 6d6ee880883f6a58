"""Packing and dequantising against gguf's own dequantiser, for every type it knows."""

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as GGML
from gguf.constants import GGML_QUANT_SIZES

from specsparse.kernels.native import cpu
from specsparse.kernels.packing import pack as packing
from specsparse.kernels.packing.dequant import dequantize, dequantize_groups, embed_rows, pack_float
from specsparse.kernels.packing.pack import SUPPORTED, pack, pack_qtensor
from specsparse.kernels.qtensor import BLOCK, ROWS, SUPER

F16_SCALES_AT = {
    **dict.fromkeys((GGML.Q4_0, GGML.Q5_0, GGML.Q8_0, GGML.IQ4_NL, GGML.IQ4_XS), (0,)),
    **dict.fromkeys((GGML.IQ2_XXS, GGML.IQ2_XS, GGML.IQ2_S, GGML.IQ3_XXS, GGML.IQ3_S, GGML.IQ1_S), (0,)),
    **dict.fromkeys((GGML.Q4_1, GGML.Q5_1, GGML.Q4_K, GGML.Q5_K), (0, 2)),
    GGML.Q2_K: (80, 82),
    GGML.Q3_K: (108,),
    GGML.Q6_K: (208,),
    GGML.TQ1_0: (52,),
    GGML.TQ2_0: (64,),
}
"""Byte offsets of the f16 scales in a block."""

jitted_groups = jax.jit(dequantize_groups, static_argnums=(1, 2))
all_types = pytest.mark.parametrize("qtype", SUPPORTED, ids=lambda t: t.name)


def columns(qtype: GGML) -> int:
    """An odd number of the largest unit of a type."""
    return {1: 50, 32: 96, 64: 192, 256: 768}[GGML_QUANT_SIZES[qtype][0]]


def random_bytes(qtype: GGML, rows: int, seed: int = 0) -> np.ndarray:
    """Any bytes at all: uint8[rows, bytes_per_row]."""
    unit, size = GGML_QUANT_SIZES[qtype]
    return np.random.default_rng(seed).integers(0, 256, (rows, columns(qtype) // unit * size), np.uint8)


def valid_bytes(qtype: GGML, rows: int, seed: int = 0) -> np.ndarray:
    """Random codes with finite scales of every size, f16 subnormals among them."""
    rng = np.random.default_rng(seed)
    raw = random_bytes(qtype, rows, seed)
    blocks = raw.reshape(-1, GGML_QUANT_SIZES[qtype][1])
    for at in F16_SCALES_AT.get(qtype, ()):
        scales = rng.standard_normal(len(blocks)) * 2.0 ** rng.integers(-24, 8, len(blocks))
        blocks[:, at : at + 2] = scales.astype(np.float16).view(np.uint8).reshape(-1, 2)
    if qtype is GGML.IQ1_M:  # the top exponent bit of the scale that is spread over four words
        blocks[:, -1] &= 0xBF
    if qtype is GGML.MXFP4:  # scales that are normal in float32, with no overflow of 12 times the scale
        blocks[:, 0] = np.clip(blocks[:, 0], 2, 250)
    if qtype in packing.FLOATS:
        values = rng.standard_normal((rows, columns(qtype))).astype(np.float32)
        raw = gguf.quants.quantize(values, qtype).view(np.uint8)
    return raw


def oracle(raw: np.ndarray, qtype: GGML) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(raw, qtype)


@pytest.mark.skipif(not cpu.available(), reason="no native kernels")
@pytest.mark.parametrize("rows", [32, 37])
def test_compiled_code_packs_the_same_bytes(rows, monkeypatch):
    """Of the types that it knows; the others are packed by numpy in any case."""
    known, call = set(), cpu.pack
    for qtype in SUPPORTED:
        raw = random_bytes(qtype, rows)
        shape = (rows, columns(qtype))
        monkeypatch.setattr(cpu, "pack", lambda *a, q=qtype, **o: call(*a, **o) and not known.add(q))
        got, _ = pack(raw, qtype, shape)
        monkeypatch.setattr(cpu, "pack", lambda *a, **o: False)
        assert np.array_equal(got, pack(raw, qtype, shape)[0]), qtype.name
    plain = {GGML.F32, GGML.F16, GGML.BF16, GGML.Q4_0, GGML.Q4_1, GGML.Q8_0, GGML.IQ4_NL}
    assert known == plain | {GGML.Q4_K, GGML.Q5_K, GGML.Q6_K}


def test_every_type_gguf_can_dequantise_has_a_layout():
    for qtype in GGML:
        raw = np.zeros((1, GGML_QUANT_SIZES[qtype][1]), np.uint8)
        try:
            gguf.quants.dequantize(raw, qtype)
        except NotImplementedError:
            assert qtype not in SUPPORTED
        else:
            assert packing.layout_of(qtype).source == qtype.name


@all_types
def test_dequantize_equals_gguf(qtype):
    raw = valid_bytes(qtype, 17)
    expected = oracle(raw, qtype)
    assert np.isfinite(expected).all()
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        values = dequantize(pack_qtensor(raw, qtype, (17, columns(qtype))))
    np.testing.assert_array_equal(values, expected)


@all_types
def test_any_number_of_rows(qtype):
    counts, cols = (1, 15, 16, 17, 33), columns(qtype)
    raws = [valid_bytes(qtype, rows, seed=rows) for rows in counts]
    packed = [pack(raw, qtype, (rows, cols)) for raw, rows in zip(raws, counts, strict=True)]
    groups = jitted_groups(np.concatenate([data for data, _ in packed]), packed[0][1], cols)
    rows_of = np.split(np.asarray(groups), np.cumsum([len(data) for data, _ in packed])[:-1])
    for values, raw, rows in zip(rows_of, raws, counts, strict=True):
        values = values.transpose(0, 2, 1).reshape(-1, cols)
        np.testing.assert_array_equal(values[:rows], oracle(raw, qtype))
        assert not values[rows:].any()


@pytest.mark.parametrize("qtype", [GGML.Q4_0, GGML.Q4_K, GGML.Q6_K, GGML.F16], ids=lambda t: t.name)
def test_fused_and_unfused_arithmetic_agree(qtype):
    w = pack_qtensor(valid_bytes(qtype, 17), qtype, (17, columns(qtype)))
    np.testing.assert_array_equal(dequantize.__wrapped__(w), dequantize(w))


@all_types
def test_hostile_bytes_pack_without_complaint(qtype):
    raw = random_bytes(qtype, 17, seed=5)
    if qtype is GGML.MXFP4:
        raw.reshape(-1, 17)[:, 0] |= 2
    w = pack_qtensor(raw, qtype, (17, columns(qtype)))
    np.testing.assert_array_equal(dequantize(w), oracle(raw, qtype))


@all_types
def test_embed_rows_are_rows_of_the_matrix(qtype):
    raw = valid_bytes(qtype, 33)
    w = pack_qtensor(raw, qtype, (33, columns(qtype)))
    ids = np.array([32, 0, 17, 17, 15, -3, 99], np.int32)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        rows = jax.jit(embed_rows)(w, jnp.asarray(ids))
    np.testing.assert_array_equal(rows, oracle(raw, qtype)[np.clip(ids, 0, 32)])


@all_types
def test_shape_alignment_and_padding(qtype):
    rows, cols = 17, columns(qtype)
    data, layout = pack(valid_bytes(qtype, rows), qtype, (rows, cols))
    assert data.dtype == np.uint8
    assert data.shape == (2, layout.group_bytes(cols))
    assert data.ctypes.data % 64 == 0
    assert not data.flags.writeable
    full, _ = pack(random_bytes(qtype, ROWS) | np.uint8(1), qtype, (ROWS, cols))
    one, _ = pack((random_bytes(qtype, ROWS) | np.uint8(1))[:1], qtype, (1, cols))
    assert set(np.unique(one[one != full])) <= {0}  # what the one row does not fill is zero


@all_types
def test_chunks_and_unaligned_input_change_nothing(qtype, monkeypatch):
    rows, cols = 70, columns(qtype)
    raw = valid_bytes(qtype, rows)
    expected, _ = pack(raw, qtype, (rows, cols))
    monkeypatch.setattr(packing, "CHUNK_BYTES", 1)
    odd = np.empty(raw.size + 1, np.uint8)[1:]
    odd[:] = raw.ravel()
    np.testing.assert_array_equal(pack(odd, qtype, (rows, cols))[0], expected)


def blocks_of(qtype: GGML, header: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(raw rows, headers, blocks) of one packed group of 16 rows."""
    raw = valid_bytes(qtype, ROWS)
    data, _ = pack(raw, qtype, (ROWS, columns(qtype)))
    if not header:
        return raw, data[:, :0], data.reshape(columns(qtype) // BLOCK, -1)
    supers = data.reshape(columns(qtype) // SUPER, -1)
    return raw, supers[:, :header], supers[:, header:].reshape(columns(qtype) // BLOCK, -1)


def test_layout_of_nibbles_is_the_documented_one():
    raw, _, blocks = blocks_of(GGML.Q4_1)
    fields = raw.reshape(ROWS, -1, 20)
    for k in range(len(blocks)):
        np.testing.assert_array_equal(blocks[k, :32].reshape(ROWS, 2), fields[:, k, 0:2])
        np.testing.assert_array_equal(blocks[k, 32:64].reshape(ROWS, 2), fields[:, k, 2:4])
        for r, c, b in np.ndindex(ROWS, 4, 4):
            byte, source = blocks[k, 64 + 64 * c + 4 * r + b], fields[r, k, 4:]
            assert byte & 15 == source[4 * c + b] & 15  # column 4c+b
            assert byte >> 4 == source[4 * c + b] >> 4  # column 16+4c+b


def test_layout_of_int8_is_the_documented_one():
    raw, _, blocks = blocks_of(GGML.Q8_0)
    fields = raw.reshape(ROWS, -1, 34)
    for k in range(len(blocks)):
        np.testing.assert_array_equal(blocks[k, :32].reshape(ROWS, 2), fields[:, k, :2])
        for r, c, b in np.ndindex(ROWS, 8, 4):
            assert blocks[k, 32 + 64 * c + 4 * r + b] == fields[r, k, 2 + 4 * c + b]


def test_layout_of_super_blocks_is_the_documented_one():
    raw, headers, blocks = blocks_of(GGML.Q2_K, header=64)
    fields = raw.reshape(ROWS, -1, 84)
    for s in range(len(headers)):
        np.testing.assert_array_equal(headers[s, :32].reshape(ROWS, 2), fields[:, s, 80:82])
        np.testing.assert_array_equal(headers[s, 32:].reshape(ROWS, 2), fields[:, s, 82:84])
        for k, sub in np.ndindex(8, 2):
            scales, block = fields[:, s, 2 * k + sub], blocks[8 * s + k]
            np.testing.assert_array_equal(block[16 * sub : 16 * sub + 16], scales & 15)
            np.testing.assert_array_equal(block[32 + 16 * sub : 48 + 16 * sub], scales >> 4)


def test_mxfp4_blocks_with_subnormal_scales_stay_below_2_to_the_minus_123():
    raw = random_bytes(GGML.MXFP4, 16)
    raw.reshape(-1, 17)[:, 0] &= 1
    values = dequantize(pack_qtensor(raw, GGML.MXFP4, (16, columns(GGML.MXFP4))))
    np.testing.assert_allclose(values, oracle(raw, GGML.MXFP4), rtol=0, atol=2.0**-123)


@pytest.mark.parametrize("codes", ["f32", "f16", "bf16"])
def test_pack_float_rounds_like_numpy_and_equals_pack(codes):
    values = np.random.default_rng(0).standard_normal((17, 50)).astype(np.float32)
    w = jax.jit(pack_float, static_argnames="codes")(values, codes=codes)
    qtype = GGML[codes.upper()]
    raw = gguf.quants.quantize(values, qtype)
    data, layout = pack(raw, qtype, values.shape)
    assert w.layout == layout
    assert w.shape == values.shape
    np.testing.assert_array_equal(w.data, data)
    np.testing.assert_array_equal(dequantize(w), oracle(raw.view(np.uint8), qtype))


def test_the_packed_buffer_is_the_device_buffer_on_a_cpu():
    if jax.default_backend() != "cpu":
        pytest.skip("only a CPU shares memory with the host")
    data, _ = pack(valid_bytes(GGML.Q8_0, 64), GGML.Q8_0, (64, 96))
    assert jax.device_put(data).unsafe_buffer_pointer() == data.ctypes.data
