"""Neuron-major weights: any GGUF type packs without loss, and neurons can be taken from a matrix."""

import jax
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize

from specsparse.kernels import pack_neurons, regroup_neurons, unpack_neurons
from specsparse.kernels.neurons import LINE, row_bytes
from specsparse.kernels.packing.pack import SUPPORTED, pack_qtensor
from specsparse.testing import random_quantised

TYPES = {t.name: t for t in SUPPORTED}
F = 21


def columns(name: str) -> int:
    """An odd number of blocks (of columns, for floats)."""
    return {1: 50, 32: 96, 64: 192, 256: 768}[GGML_QUANT_SIZES[TYPES[name]][0]]


def dense(name: str, raw: np.ndarray) -> np.ndarray:
    """The values by gguf."""
    return dequantize(raw.view({"F32": "<f4", "F16": "<f2"}.get(name, np.uint8)), TYPES[name])


@pytest.mark.parametrize("name", TYPES)
def test_packing_loses_nothing(name):
    raw = random_quantised(name, F, columns(name))
    packed = pack_neurons(raw, TYPES[name], (F, columns(name)))
    np.testing.assert_array_equal(jax.jit(unpack_neurons)(packed), dense(name, raw))
    assert packed.data.shape == (F, row_bytes(packed.layout, columns(name)))
    assert packed.data.shape[1] % LINE == 0 and packed.nbytes == packed.data.size


@pytest.mark.parametrize("name", TYPES)
def test_groups_of_rows_become_rows(name):
    """The bytes that packing from the file gives."""
    raw, shape = random_quantised(name, F, columns(name)), (F, columns(name))
    regrouped, packed = regroup_neurons(pack_qtensor(raw, TYPES[name], shape)), pack_neurons(raw, TYPES[name], shape)
    np.testing.assert_array_equal(regrouped.data, packed.data)
    assert regrouped.layout == packed.layout and regrouped.shape == shape


@pytest.mark.parametrize("name", ["F32", "F16", "Q4_0", "Q4_1", "Q8_0"])
def test_a_row_has_the_bytes_that_the_file_has(name):
    """At a real width nothing is filled up."""
    raw = random_quantised(name, 2, 4096)
    assert pack_neurons(raw, TYPES[name], (2, 4096)).data.shape == raw.shape
