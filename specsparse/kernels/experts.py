"""The weights of a layer's experts, as the kernels read them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import jax
import numpy as np

from specsparse.kernels.arena import aligned_empty
from specsparse.kernels.neurons import NeuronRows, SkipWeights, neuron_blocks, regroup_neurons
from specsparse.kernels.qtensor import QTensor

ACTS = ("silu", "relu", "clamped_swiglu")
"""Activations of experts. clamped_swiglu is gpt-oss's: with g = min(gate, 7) and u = clip(up, -7, 7) it is
g sigmoid(1.702 g) (u + 1); the other two are act(gate) up."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["gate", "up", "down", "gate_bias", "up_bias", "down_bias", "skip"],
    meta_fields=["act"],
)
@dataclass(frozen=True)
class Experts:
    """E FFNs of one shape. A matrix is a `QTensor` of one expert's shape, whose data is uint8[E, groups, bytes]."""

    # gate, up: [F, D] each
    gate: QTensor
    up: QTensor
    down: QTensor  # [D, F] each
    act: str  # of `ACTS`
    # gate_bias, up_bias: f32[E, F], or None
    gate_bias: jax.Array | None = None
    up_bias: jax.Array | None = None
    down_bias: jax.Array | None = None  # f32[E, D], or None
    # `SkipWeights` of each expert, one after the other; native kernels then leave idle neurons of an expert out that a
    # single row chose. None: none are left out
    skip: SkipWeights | None = None

    @property
    def count(self) -> int:
        return self.gate.data.shape[0]


def skipping(experts: Experts) -> Experts:
    """ReLU experts without biases, of `skippable` matrices, with what leaving idle neurons out reads beside them."""

    def stacked(matrix: QTensor, packed: Callable[[QTensor], jax.Array]) -> jax.Array:
        each = [np.asarray(packed(replace(matrix, data=data))) for data in matrix.data]
        return jax.device_put(np.stack(each, out=aligned_empty(len(each), *each[0].shape)))

    up = stacked(experts.up, lambda matrix: regroup_neurons(matrix).data)
    rows = NeuronRows(up, experts.up.layout, experts.up.shape)
    return replace(experts, skip=SkipWeights(rows, stacked(experts.down, neuron_blocks)))
