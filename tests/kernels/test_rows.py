"""Rows taken out of a packed matrix."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from specsparse.kernels.packing.dequant import dequantize
from specsparse.kernels.packing.pack import pack_qtensor
from specsparse.kernels.qtensor import take_rows
from specsparse.testing import random_quantised

IDS = np.array([39, 0, 16, 15, 7, 7, 31, 32, 3, 20, 21, 22, 1, 2, 38, 37, 36, 5])


KINDS = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_1", "Q8_0", "Q2_K", "Q4_K", "Q6_K", "IQ4_NL"]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_keep_their_values(kind):
    qtype = GGMLQuantizationType[kind]
    whole = pack_qtensor(random_quantised(qtype, 40, 256), qtype, (40, 256))
    taken = take_rows(whole, IDS)
    assert taken.shape == (len(IDS), 256) and taken.layout == whole.layout
    assert taken.data.shape == (2, whole.data.shape[1])
    np.testing.assert_array_equal(dequantize(taken), np.asarray(dequantize(whole))[IDS])
