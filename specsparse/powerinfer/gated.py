"""A predictor's mask in every FFN of a model that was loaded dense."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax

from specsparse.engine.llama import make_forward
from specsparse.powerinfer.sparse_ffn import make_ffn
from specsparse.powerinfer.weights import SparseWeights, sparse_params
from specsparse.predictors.base import Predictor
from specsparse.predictors.gate_threshold import GateThreshold
from specsparse.predictors.oracle import Oracle

if TYPE_CHECKING:
    from specsparse.model import Model

PREDICTED = "predicted"


def gated(model: "Model", predictor: Predictor, weights: Sequence[Any], *, down_type: str | None = None) -> "Model":
    """The model that computes the neurons which `predictor` keeps.

    It shares all matrices with `model` and has the FFN's once more, as rows of neurons.

    Args:
        model: with dense matrices.
        predictor: of the model's FFN.
        weights: of each layer, from `predictor.fit` or from a file.
        down_type: of the transposed down projection, see `powerinfer.weights.sparse_params`.

    Returns:
        A model whose forward passes have `SparseStats`; its own programs and drafters.
    """
    model.check_whole(f"predictor={predictor.name}")
    return dataclasses.replace(
        model,
        params=sparse_params(model.params, weights, down_type=down_type, keep_dense=True),
        forward=make_forward(model.config, model.kernels, make_ffn(model.config, model.kernels, predictor)),
        ffn=PREDICTED,
        rule=describe(predictor),
        programs={},
        drafters={},
        _tables={},
    )


def bytes_read(model: "Model", predictor: Predictor) -> tuple[int, int]:
    """What the FFNs of a pass read of a model whose neurons lie in rows: (bytes whatever it keeps, bytes that follow
    the share of the neurons that its rows keep), all layers. A predictor that decides by the gate reads all of it."""
    by_gate = isinstance(predictor, Oracle | GateThreshold)
    own = rest = 0
    for layer in model.params.layers:
        w: SparseWeights = layer.sparse
        gate = 0 if w.gate is None else w.gate.nbytes
        own += sum(leaf.nbytes for leaf in jax.tree.leaves(w.predictor)) + by_gate * gate
        rest += w.up.nbytes + w.down_t.nbytes + (not by_gate) * gate
    return own, rest


def describe(predictor: Predictor) -> str:
    """The predictor's name and options, such as "gate_threshold(share=0.5)"."""
    own = {f.name: getattr(predictor, f.name) for f in dataclasses.fields(predictor) if f.name != "ffn"}
    return f"{predictor.name}({', '.join(f'{key}={value}' for key, value in own.items() if value is not None)})"
