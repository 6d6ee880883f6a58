"""The weights of a layer's experts, as the kernels read them."""

from dataclasses import dataclass
from functools import partial

import jax

from specsparse.kernels.qtensor import QTensor

ACTS = ("silu", "relu", "clamped_swiglu")
"""Activations of experts. clamped_swiglu is gpt-oss's: with g = min(gate, 7) and u = clip(up, -7, 7) it is
g sigmoid(1.702 g) (u + 1); the other two are act(gate) up."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["gate", "up", "down", "gate_bias", "up_bias", "down_bias"],
    meta_fields=["act"],
)
@dataclass(frozen=True)
class Experts:
    """E FFNs of one shape. A matrix is a `QTensor` of one expert's shape, whose data is uint8[E, groups, bytes].

    Attributes:
        gate, up: [F, D] each.
        down: [D, F] each.
        act: of `ACTS`.
        gate_bias, up_bias: f32[E, F], or None.
        down_bias: f32[E, D], or None.
    """

    gate: QTensor
    up: QTensor
    down: QTensor
    act: str
    gate_bias: jax.Array | None = None
    up_bias: jax.Array | None = None
    down_bias: jax.Array | None = None

    @property
    def count(self) -> int:
        return self.gate.data.shape[0]
