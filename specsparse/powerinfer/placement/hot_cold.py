"""A sparse FFN whose hot and cold neurons lie apart.

    y = x + (cold partial + hot partial), in that order wherever the two are computed

so that one device and two give equal bits for one placement. Inside a part neurons are added up in ascending order.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine.activation import activate, parse_activation
from specsparse.engine.config import ModelConfig
from specsparse.engine.gguf.reader import TensorInfo
from specsparse.engine.pytree import Pytree
from specsparse.engine.weights import Layer
from specsparse.errors import UserError
from specsparse.kernels import Kernels, NeuronRows, QTensor, SparseStats, pack_neurons
from specsparse.kernels.packing.dequant import pack_float
from specsparse.kernels.packing.pack import pack_qtensor

HOT = ("masked", "dense")
"""Predicted hot neurons are computed, as PowerInfer does, or all of them: other logits, and no prediction for them."""


class Part(NamedTuple):
    """Rows of some neurons, [neurons, D] each; `gate` is None where the FFN has none."""

    gate: NeuronRows | None
    up: NeuronRows
    down_t: NeuronRows

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return sum(m.nbytes for m in self if m is not None)


class Predictors(NamedTuple):
    """PowerInfer's predictor of one layer with its outputs apart; fc2 is None for a part that is not predicted.

    Attributes:
        fc1: QTensor [rank, D].
        fc2_hot, fc2_cold: QTensor [neurons, rank].
        threshold: f32[].
    """

    fc1: QTensor
    fc2_hot: QTensor | None
    fc2_cold: QTensor | None
    threshold: jax.Array


class HotCold(NamedTuple):
    """What the FFN of one layer reads; a part is None where it has no neuron.

    Attributes:
        predictor: of both parts.
        hot, cold: the parts.
        cold_norm: f32[D], the layer's `ffn_norm` again, where the cold part lies on a device of its own.
    """

    predictor: Predictors
    hot: Part | None
    cold: Part | None
    cold_norm: jax.Array | None = None


class HotColdStats(NamedTuple):
    """`SparseStats` of both parts, and int32[R], hot neurons among those kept."""

    kept: jax.Array
    union: jax.Array
    nonzero: jax.Array
    hot: jax.Array


def packer(hot: Sequence[np.ndarray], threshold: float, *, floats: bool, dense_hot: bool = False) -> Callable:
    """A `pack_ffn` for `engine.weights.load_params` that keeps hot and cold rows of a PowerInfer file apart.

    Args:
        hot: L masks bool[F].
        threshold: of every layer's predictor.
        floats: predictors as float32, for kernels that compute so.
        dense_hot: hot neurons are not predicted.
    """

    def pack(own: dict[str, TensorInfo]) -> dict[str, Pytree]:
        mask = hot[int(own["ffn_up"].name.split(".")[1])]

        def part(ids: np.ndarray) -> Part | None:
            if not len(ids):
                return None
            gate = _rows(own["ffn_gate"], ids) if "ffn_gate" in own else None
            return Part(gate, _rows(own["ffn_up"], ids), _rows(own["ffn_down_t"], ids))

        hot_ids, cold_ids = np.flatnonzero(mask), np.flatnonzero(~mask)
        fc1, fc2 = own["fc1"], own["fc2"]
        predictor = Predictors(
            fc1=_matrix(fc1, np.arange(fc1.shape[0]), floats=floats),
            fc2_hot=None if dense_hot else _matrix(fc2, hot_ids, floats=floats),
            fc2_cold=_matrix(fc2, cold_ids, floats=floats),
            threshold=jnp.float32(threshold),
        )
        sparse = HotCold(predictor, part(hot_ids), part(cold_ids))
        return {"ffn_gate": None, "ffn_up": None, "ffn_down": None, "sparse": sparse}

    return pack


def _rows(tensor: TensorInfo, ids: np.ndarray) -> NeuronRows:
    """Some rows of a matrix of the file."""
    return pack_neurons(tensor.raw[ids], tensor.type, (len(ids), tensor.shape[1]))


def _matrix(tensor: TensorInfo, ids: np.ndarray, *, floats: bool) -> QTensor | None:
    """Some rows of a matrix, packed for the dense kernels; None for no rows."""
    if not len(ids):
        return None
    if floats:
        return pack_float(jnp.asarray(tensor.dequantize()[ids]), "f32")
    return pack_qtensor(tensor.raw[ids], tensor.type, (len(ids), tensor.shape[1]))


class Masks(NamedTuple):
    """uint8[R, neurons] of each part, None where all are kept; the kernels mask the rows that do not count."""

    hot: jax.Array | None
    cold: jax.Array | None


def predict(kernels: Kernels, w: Predictors, x_RD, n_valid_B) -> Masks:
    """PowerInfer's rule for each part, (fc2 relu(fc1 x))_j >= threshold, on the residual x before ffn_norm."""
    (h_RK,) = kernels.linear(x_RD, (w.fc1,), n_valid=n_valid_B)
    h_RK = activate(h_RK, "relu")

    def keep(fc2: QTensor | None):
        if fc2 is None:
            return None
        (scores_RF,) = kernels.linear(h_RK, (fc2,), n_valid=n_valid_B)
        return (scores_RF >= w.threshold).astype(jnp.uint8)

    return Masks(keep(w.fc2_hot), keep(w.fc2_cold))


PartFn = Callable[..., tuple[jax.Array, SparseStats]]


def part_ffn(config: ModelConfig, kernels: Kernels) -> PartFn:
    """part(rows, norm, x_RD, keep, n_valid_B) -> (f32[R, D] partial sum without the residual, SparseStats).

    Raises:
        UserError: an FFN with biases, which no PowerInfer file has.
    """
    if any(name.startswith("ffn_") for name in config.biases):
        raise UserError("hot and cold neurons need an FFN without biases, as in PowerInfer's files")
    act, up_act = parse_activation(config.activation)

    def part(rows: Part, norm, x_RD, keep_RF, n_valid_B):
        if keep_RF is None:
            keep_RF = jnp.ones((x_RD.shape[0], rows.up.shape[0]), jnp.uint8)
        return kernels.sparse_ffn(
            x_RD, keep_RF, rows.gate, rows.up, rows.down_t,
            norm=norm, eps=config.norm_eps, n_valid=n_valid_B, act=act, up_act=up_act,
        )  # fmt: skip

    return part


def combine(x_RD, cold_RD, hot_RD):
    """x + (cold + hot); a part that is None adds nothing."""
    if cold_RD is None or hot_RD is None:
        only = cold_RD if hot_RD is None else hot_RD
        return x_RD if only is None else x_RD + only
    return x_RD + (cold_RD + hot_RD)


def stats_of(cold: SparseStats | None, hot: SparseStats | None) -> HotColdStats:
    """Of a layer, from those of its parts; at least one is there."""
    parts = [p for p in (cold, hot) if p is not None]
    kept, union, nonzero, _ = (sum(each[1:], each[0]) for each in zip(*parts))
    return HotColdStats(kept, union, nonzero, jnp.zeros_like(kept) if hot is None else hot.kept)


def hot_cold_ffn(config: ModelConfig, kernels: Kernels) -> Callable:
    """ffn(layer, x_RD, n_valid_B) -> (y_RD, HotColdStats) for `engine.llama.make_forward`: both parts on one device."""
    part = part_ffn(config, kernels)

    def ffn(layer: Layer, x_RD, n_valid_B):
        w: HotCold = layer.sparse
        keep = predict(kernels, w.predictor, x_RD, n_valid_B)
        outs = [
            (None, None) if rows is None else part(rows, layer.ffn_norm, x_RD, mask, n_valid_B)
            for rows, mask in ((w.cold, keep.cold), (w.hot, keep.hot))
        ]
        (cold_RD, cold), (hot_RD, hot) = outs
        return combine(x_RD, cold_RD, hot_RD), stats_of(cold, hot)

    return ffn
