"""What a sparse FFN reads: neurons row by row, and the weights of its predictor."""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from gguf import GGMLQuantizationType as GGML
from gguf import quants

from specsparse.engine.gguf.reader import GGUFFile, TensorInfo
from specsparse.engine.pytree import Pytree
from specsparse.engine.weights import Layer, Params, pack_matrix, pack_rows
from specsparse.errors import UserError
from specsparse.kernels import NeuronRows, QTensor, pack_neurons, regroup_neurons
from specsparse.kernels.packing.dequant import dequantize, pack_float
from specsparse.predictors.scored import MlpWeights

THRESHOLD_KEY = "powerinfer.sparse_threshold"
THRESHOLD_ENV = "LLAMA_SPARSE_PRED_THRESHOLD"


class SparseWeights(NamedTuple):
    """One layer's sparse FFN.

    Attributes:
        gate: NeuronRows [F, D], or None for an FFN without gate.
        up, down_t: NeuronRows [F, D]; row j of down_t is column j of the down projection.
        predictor: the predictor's weights for this layer.
    """

    gate: NeuronRows | None
    up: NeuronRows
    down_t: NeuronRows
    predictor: Pytree = None


def threshold_of(f: GGUFFile, given: float | None = None) -> float:
    """The threshold in force: `given`, else the environment's, else the file's, else 0, as in PowerInfer.

    Raises:
        UserError: one that is no number, or NaN; infinities are fine (all neurons, or none).
    """
    text = os.environ.get(THRESHOLD_ENV)
    if given is not None:
        return number(given, "threshold")
    if text is not None:
        return number(text, THRESHOLD_ENV)
    return number(f.get(THRESHOLD_KEY, "float", 0.0), f"{f.path}: metadata key '{THRESHOLD_KEY}'")


def number(value: object, what: str) -> float:
    """A threshold as a float; `what` begins the line of the error.

    Raises:
        UserError: it is no number, or NaN.
    """
    try:
        found = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        found = math.nan
    if math.isnan(found):
        raise UserError(f"{what} is {value!r:.40}; a number is needed, such as 0")
    return found


PackOne = Callable[[dict[str, TensorInfo]], dict[str, Pytree]]
"""A `pack_ffn` for `engine.weights.load_params`."""


def rows_packer(threshold: float, *, floats: bool, predictor: bool) -> PackOne:
    """Packs neurons row by row.

    Args:
        threshold: of every layer's predictor.
        floats: matrices as float32, for kernels that compute so.
        predictor: whether fc1 and fc2 are wanted.
    """

    def pack(own: dict[str, TensorInfo]) -> dict[str, Pytree]:
        gate, up = (pack_rows(own[n], floats=floats) if n in own else None for n in ("ffn_gate", "ffn_up"))
        if "ffn_down_t" in own:
            down_t = pack_rows(own["ffn_down_t"], floats=floats)
        else:
            down = own["ffn_down"]
            down_t = down_rows(down.dequantize(), "F16" if down.type.name == "F16" and not floats else "F32")
        mlp = _mlp(own, threshold, floats) if predictor else None
        return {"sparse": SparseWeights(gate, up, down_t, mlp)}

    return pack


def dense_packer(threshold: float, *, floats: bool) -> PackOne:
    """Packs the dense matrices of a PowerInfer file, and its predictor as `Layer.sparse`, to judge or to mask by it."""

    def pack(own: dict[str, TensorInfo]) -> dict[str, Pytree]:
        fields: dict[str, Pytree] = {n: pack_matrix(own[n], floats=floats) for n in ("ffn_gate", "ffn_up") if n in own}
        fields["ffn_down"] = transposed(own["ffn_down_t"], floats=floats)
        return {**fields, "sparse": _mlp(own, threshold, floats)}

    return pack


def _mlp(own: dict[str, TensorInfo], threshold: float, floats: bool) -> MlpWeights:
    fc1, fc2 = (pack_matrix(own[n], floats=floats) for n in ("fc1", "fc2"))
    return MlpWeights(fc1, fc2, jnp.float32(threshold))


def transposed(tensor: TensorInfo, *, floats: bool) -> QTensor:
    """`ffn_down_t` [F, D] as the matrix [D, F]: an F16 file keeps its bits, other types become float32 without loss."""
    codes = "f16" if tensor.type.name == "F16" and not floats else "f32"
    packed = pack_float(jnp.asarray(tensor.dequantize().T), codes)
    return replace(packed, layout=replace(packed.layout, source=tensor.type.name))


def sparse_params(
    params: Params, weights: Sequence[Pytree], *, down_type: str | None = None, keep_dense: bool = False
) -> Params:
    """A dense model's parameters for `make_ffn`.

    Args:
        params: with dense matrices.
        weights: of the predictor, one of each layer.
        down_type: GGUF type to quantise the transposed down projection to, such as "Q8_0". Its blocks run along the
            other axis, so this is lossy; None keeps every value, in F16 where they were and in float32 otherwise.
        keep_dense: whether the dense matrices stay beside the rows, for predictors that are asked for their mask alone.

    Raises:
        UserError: no dense matrices, or a type that nothing here quantises to.
    """
    if len(weights) != len(params.layers):
        raise UserError(f"predictors of {len(weights)} layers do not fit a model of {len(params.layers)}")
    pairs = zip(params.layers, weights, strict=True)
    layers = [_sparse_layer(layer, own, down_type) for layer, own in pairs]
    if not keep_dense:
        layers = [layer._replace(ffn_gate=None, ffn_up=None, ffn_down=None) for layer in layers]
    return params._replace(layers=tuple(layers))


def _sparse_layer(layer: Layer, predictor: Pytree, down_type: str | None) -> Layer:
    down = layer.ffn_down
    if layer.ffn_up is None or down is None:
        raise UserError("neurons are packed from dense matrices, and this model keeps none: load it with ffn='dense'")
    gate, up = (None if m is None else regroup_neurons(m) for m in (layer.ffn_gate, layer.ffn_up))
    exact = "F16" if down.layout.codes == "f16" else "F32"
    down_t = down_rows(np.asarray(dequantize(down)), down_type or exact)
    return layer._replace(sparse=SparseWeights(gate, up, down_t, predictor))


def down_rows(down_DF: np.ndarray, kind: str) -> NeuronRows:
    """A down projection f32[D, F] as rows of neurons of a GGUF type.

    Raises:
        UserError: a type that nothing here quantises to, or whose blocks do not fit D.
    """
    turned = np.ascontiguousarray(down_DF.T)
    try:
        raw = quants.quantize(turned, GGML[kind])
    except (KeyError, NotImplementedError, quants.QuantError):
        raise UserError(f"down_type={kind!r}: {turned.shape[1]} columns become F32, F16, Q8_0, Q4_0 or Q4_1") from None
    return pack_neurons(raw, GGML[kind], turned.shape)
