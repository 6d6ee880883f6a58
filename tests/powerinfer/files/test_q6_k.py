"""Q6_K by our own quantiser: gguf's reading of it, and errors of six bits."""

import numpy as np
import pytest
from gguf import quants
from gguf.constants import GGMLQuantizationType as GGML

from specsparse.powerinfer.files.q6_k import BYTES, quantize_q6_k

LAWS = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "heavy tails": lambda rng, shape: rng.standard_t(3, size=shape),
    "positive": lambda rng, shape: rng.random(shape),
    "one large weight": lambda rng, shape: rng.normal(size=shape) + 40 * (np.arange(shape[1]) == 77),
}


def error(values, data, kind):
    """Squared error to squared weights."""
    return float(((quants.dequantize(data, kind) - values) ** 2).sum() / (values**2).sum())


@pytest.mark.parametrize("law", LAWS)
def test_error_is_that_of_six_bits(law):
    """Under a fifth of Q5_0's, whose steps are twice as large at least; with one bit lost it would be over it."""
    values = LAWS[law](np.random.default_rng(0), (32, 512)).astype(np.float32)
    data = quantize_q6_k(values)
    assert data.shape == (32, 2 * BYTES) and data.dtype == np.uint8
    assert error(values, data, GGML.Q6_K) < 0.2 * error(values, quants.quantize(values, GGML.Q5_0), GGML.Q5_0)


def test_what_six_bits_can_hold_comes_back():
    """Steps that are whole multiples of a power of two, as d and the scales hold them."""
    rng = np.random.default_rng(1)
    codes = rng.integers(-31, 32, (4, 16, 16)).astype(np.float32)
    codes[:, :, 0] = -32
    scales = rng.integers(1, 128, (4, 16, 1)).astype(np.float32)
    scales[:, 0] = 128
    values = (codes * scales * np.float32(2**-10)).reshape(2, 512)
    np.testing.assert_array_equal(quants.dequantize(quantize_q6_k(values), GGML.Q6_K), values)


def test_nothing_and_nan_are_zeros():
    for values in (np.zeros((2, 256)), np.full((2, 256), np.nan)):
        assert not quants.dequantize(quantize_q6_k(values.astype(np.float32)), GGML.Q6_K).any()
