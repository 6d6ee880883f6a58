"""What a sparse FFN reads, packed from a PowerInfer file, and the threshold that goes with it."""

import math
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specsparse.engine.gguf import GGUFFile, TensorInfo
from specsparse.engine.weights import pack_matrix
from specsparse.errors import UserError
from specsparse.kernels import QTensor
from specsparse.kernels.dequant import pack_float

THRESHOLD_KEY = "powerinfer.sparse_threshold"
THRESHOLD_ENV = "LLAMA_SPARSE_PRED_THRESHOLD"


class PredictorWeights(NamedTuple):
    """PowerInfer's predictor of one layer: neuron j is computed where (fc2 relu(fc1 x))_j >= threshold.

    Attributes:
        fc1: QTensor [rank, D].
        fc2: QTensor [F, rank].
        threshold: f32[].
    """

    fc1: QTensor
    fc2: QTensor
    threshold: jax.Array


def threshold_of(f: GGUFFile, given: float | None = None) -> float:
    """The threshold in force: `given`, else the environment's, else the file's, else 0, as in PowerInfer.

    Raises:
        UserError: one that is no number, or NaN; infinities are fine (all neurons, or none).
    """
    text = os.environ.get(THRESHOLD_ENV)
    if given is not None:
        return _number(given, "threshold")
    if text is not None:
        return _number(text, THRESHOLD_ENV)
    return _number(f.get(THRESHOLD_KEY, "float", 0.0), f"{f.path}: metadata key '{THRESHOLD_KEY}'")


def _number(value: Any, what: str) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if math.isnan(number):
        raise UserError(f"{what} is {value!r:.40}; a number is needed, such as 0")
    return number


def transposed(tensor: TensorInfo, *, floats: bool) -> QTensor:
    """`ffn_down_t` [F, D] as the matrix [D, F]: an F16 file keeps its bits, other types become float32 without loss."""
    codes = "f16" if tensor.type.name == "F16" and not floats else "f32"
    packed = pack_float(jnp.asarray(tensor.dequantize().T), codes)
    return replace(packed, layout=replace(packed.layout, source=tensor.type.name))


def ffn_packer(threshold: float, *, floats: bool, predictor: bool) -> Callable[[dict[str, TensorInfo]], dict[str, Any]]:
    """A `pack_ffn` for `engine.weights.load_params`.

    Args:
        threshold: of every layer.
        floats: matrices as float32, for kernels that compute so.
        predictor: whether fc1 and fc2 are wanted.
    """

    def pack(own: dict[str, TensorInfo]) -> dict[str, Any]:
        fields: dict[str, Any] = {n: pack_matrix(own[n], floats=floats) for n in ("ffn_gate", "ffn_up") if n in own}
        fields["ffn_down"] = transposed(own["ffn_down_t"], floats=floats)
        if predictor:
            fc1, fc2 = (pack_matrix(own[n], floats=floats) for n in ("fc1", "fc2"))
            fields["sparse"] = PredictorWeights(fc1, fc2, jnp.float32(threshold))
        return fields

    return pack
