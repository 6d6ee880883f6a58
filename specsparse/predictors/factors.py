"""The matrices of a predictor and the types that they are kept in."""

from typing import Literal, TypeAlias

import jax.numpy as jnp
import numpy as np
from gguf import quants
from gguf.constants import GGMLQuantizationType

from specsparse.kernels import QTensor
from specsparse.kernels.packing.dequant import pack_float
from specsparse.kernels.packing.pack import pack_qtensor
from specsparse.kernels.qtensor import BLOCK

Codes: TypeAlias = Literal["f32", "f16", "bf16", "q8_0", "q4_0"]
"""Floats, or GGUF's blocks of 32 columns."""


def pack_factor(matrix: np.ndarray, codes: Codes) -> QTensor:
    """A matrix f32[rows, columns] in that type, or in F16 where its columns are no whole blocks."""
    if not codes.startswith("q"):
        return pack_float(jnp.asarray(matrix), codes)
    if matrix.shape[1] % BLOCK:
        return pack_float(jnp.asarray(matrix), "f16")
    kind, matrix = GGMLQuantizationType[codes.upper()], np.ascontiguousarray(matrix, np.float32)
    return pack_qtensor(quants.quantize(matrix, kind), kind, matrix.shape)
