"""K-quants by our own quantiser: gguf's reading of them, and errors no larger than those of llama.cpp's own."""

import numpy as np
import pytest
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as GGML

import specsparse
from specsparse.engine.gguf import k_quants, requantise
from specsparse.engine.gguf.reader import open_gguf
from specsparse.errors import UserError
from specsparse.models import catalogue
from specsparse.testing import write_tiny_gguf
from tests.tolerances import FORWARD_NMSE, nmse

SAMPLINGS = {
    "normal": lambda rng: rng.normal(size=(64, 256)),
    "heavy tails": lambda rng: rng.standard_t(3, size=(32, 512)),
    "positive": lambda rng: rng.random((32, 512)),
    "negative": lambda rng: -1 - rng.random((32, 512)),
    "one large weight": lambda rng: rng.normal(size=(32, 512)) + 40 * (np.arange(512) == 77),
}
LLAMA_CPP = {
    "normal": {"Q4_K": 5.0399e-03, "Q5_K": 1.3140e-03, "Q6_K": 3.1213e-04},
    "heavy tails": {"Q4_K": 8.5338e-03, "Q5_K": 2.2367e-03, "Q6_K": 6.7113e-04},
    "positive": {"Q4_K": 8.5595e-04, "Q5_K": 2.0766e-04, "Q6_K": 1.7367e-04},
    "negative": {"Q4_K": 1.1989e-04, "Q5_K": 3.4194e-05, "Q6_K": 9.7246e-05},
    "one large weight": {"Q4_K": 9.4955e-03, "Q5_K": 2.2769e-03, "Q6_K": 1.0053e-03},
    "blk.0.ffn_down.weight": {"Q4_K": 3.5860e-04, "Q5_K": 3.8093e-04, "Q6_K": 3.1692e-04},
    "blk.15.ffn_down.weight": {"Q4_K": 3.9423e-04, "Q5_K": 4.3080e-04, "Q6_K": 3.3835e-04},
    "blk.29.ffn_down.weight": {"Q4_K": 4.4943e-04, "Q5_K": 4.3226e-04, "Q6_K": 3.5165e-04},
}
"""NMSE of `ggml_quantize_chunk` without an importance matrix (llama-cpp-python 0.3.36) on the same arrays, and on the
first 64 rows of SmolLM2's `blk.N.ffn_down.weight`, dequantised from Q4_1, by type."""


def weights(name):
    if name in SAMPLINGS:
        return SAMPLINGS[name](np.random.default_rng(0)).astype(np.float32)
    return open_gguf(catalogue.resolve("smollm2-135m")).tensors[name].dequantize()[:64]


@pytest.mark.parametrize("kind", k_quants.KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", LLAMA_CPP)
def test_the_error_is_at_most_llama_cpps(name, kind):
    values = weights(name)
    data = k_quants.quantize(values, kind)
    block, size = GGML_QUANT_SIZES[kind]
    assert data.dtype == np.uint8 and data.shape == (len(values), values.shape[1] // block * size)
    assert nmse(quants.dequantize(data, kind), values) <= LLAMA_CPP[name][kind.name]


def test_what_six_bits_can_hold_comes_back():
    """Steps that are whole multiples of a power of two, as d and the scales hold them."""
    rng = np.random.default_rng(1)
    codes = rng.integers(-31, 32, (4, 16, 16)).astype(np.float32)
    codes[:, :, 0] = -32
    scales = rng.integers(1, 128, (4, 16, 1)).astype(np.float32)
    scales[:, 0] = 128
    values = (codes * scales * np.float32(2**-10)).reshape(2, 512)
    np.testing.assert_array_equal(quants.dequantize(k_quants.quantize(values, GGML.Q6_K), GGML.Q6_K), values)


@pytest.mark.parametrize(("kind", "most"), [(GGML.Q4_K, 15), (GGML.Q5_K, 31)])
def test_what_scales_and_minima_can_hold_comes_back(kind, most):
    """Every scale and minimum of six bits is in some block, so that a bit in a wrong place shows."""
    rng = np.random.default_rng(2)
    codes = rng.integers(0, most + 1, (64, 8, 32)).astype(np.float32)
    codes[..., 0], codes[..., 1] = 0, most
    scales, minima = (rng.permuted(np.tile(np.arange(64), (8, 1)), axis=1).T[..., None] for _ in range(2))
    scales, minima = np.maximum(scales, 1).astype(np.float32), minima.astype(np.float32)
    scales[:, 0], minima[:, 1] = 63, 63
    values = (codes * scales * np.float32(2**-8) - minima * np.float32(2**-7)).reshape(32, 512)
    np.testing.assert_array_equal(quants.dequantize(k_quants.quantize(values, kind), kind), values)


@pytest.mark.parametrize("kind", k_quants.KINDS, ids=lambda kind: kind.name)
def test_nothing_and_what_is_not_finite_are_zeros(kind):
    for value in (0.0, np.nan, np.inf):
        values = np.full((2, 256), value, np.float32)
        assert not quants.dequantize(k_quants.quantize(values, kind), kind).any()
    small = np.full((1, 256), 1e-9, np.float32)  # under what a half float can scale
    assert np.abs(quants.dequantize(k_quants.quantize(small, kind), kind)).max() <= 1e-6


@pytest.mark.parametrize("kind", k_quants.KINDS, ids=lambda kind: kind.name)
def test_a_file_loads_and_decodes_as_gguf_reads_it(tmp_path, kind):
    shape = {"d_model": 256, "n_heads": 4, "n_kv_heads": 1, "d_ff": 512, "vocab_size": 300, "n_layers": 1}
    source = open_gguf(write_tiny_gguf(tmp_path / "f32.gguf", quant="F32", **shape))
    made = open_gguf(requantise.requantise(source, tmp_path / "made.gguf", kind))
    types = {name.split(".")[-2]: t.type.name for name, t in made.tensors.items() if len(t.shape) > 1}
    assert types.pop("output") == "Q6_K" and set(types.values()) == {kind.name}
    read = specsparse.load(made.path, kv_dtype="f32")
    floats = specsparse.load(made.path, kv_dtype="f32", float_weights=True)  # gguf's values
    ids = [1, 5, 9, 200, 33, 7]
    assert nmse(read.logits(ids), np.asarray(floats.logits(ids))) <= FORWARD_NMSE["Q8_0/f16"]


@pytest.mark.parametrize(("kind", "instead"), [("Q4_K", "Q5_0"), ("Q5_K", "Q5_1"), ("Q6_K", "Q8_0")])
def test_rows_that_are_no_multiple_of_256_get_llama_cpps_fallback(tmp_path, kind, instead):
    """As `llama_model_quantize` gave SmolLM2: 1,536 columns keep the K-quant, 576 do not, the output is Q8_0."""
    shape = {"d_model": 96, "n_heads": 6, "n_kv_heads": 3, "d_ff": 512, "n_layers": 1}
    source = open_gguf(write_tiny_gguf(tmp_path / "f32.gguf", quant="F32", **shape))
    made = open_gguf(requantise.requantise(source, tmp_path / "made.gguf", requantise.kind_of(kind)))
    types = {name: t.type.name for name, t in made.tensors.items()}
    assert types["blk.0.ffn_down.weight"] == kind and types["blk.0.ffn_up.weight"] == instead
    assert types["output.weight"] == "Q8_0" and types["blk.0.ffn_norm.weight"] == "F32"
    assert made.metadata["general.file_type"] == {"Q4_K": 14, "Q5_K": 16, "Q6_K": 18}[kind]


def test_a_type_that_nothing_writes_is_refused():
    with pytest.raises(UserError, match=r"cannot quantise to 'q3_k': choose one of .*Q4_K, Q5_K, Q6_K"):
        requantise.kind_of("q3_k")
