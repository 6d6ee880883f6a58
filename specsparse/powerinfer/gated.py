"""A predictor's mask in every FFN of a model that was loaded dense."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from specsparse.engine.llama import make_forward
from specsparse.powerinfer.sparse_ffn import masked_ffn
from specsparse.predictors.base import Predictor
from specsparse.predictors.masked import with_weights

if TYPE_CHECKING:
    from specsparse.model import Model

PREDICTED = "predicted"


def gated(model: "Model", predictor: Predictor, weights: Sequence[Any]) -> "Model":
    """The model that computes the neurons which `predictor` keeps; it shares all matrices with `model`.

    Args:
        model: with dense matrices.
        predictor: of the model's FFN.
        weights: of each layer, from `predictor.fit` or from a file.

    Returns:
        A model whose forward passes have `SparseStats`; its own programs and drafters.
    """
    return dataclasses.replace(
        model,
        params=with_weights(model.params, weights),
        forward=make_forward(model.config, model.kernels, gating(model, predictor)),
        ffn=PREDICTED,
        rule=describe(predictor),
        programs={},
        drafters={},
        _tables={},
    )


def gating(model: "Model", predictor: Predictor) -> Callable:
    """ffn(layer, x_RD, n_valid_B) -> (y_RD, SparseStats) of the neurons that `predictor` keeps by `layer.sparse`."""

    def keep(layer, x_RD, n_valid_B, a_RF):
        return predictor.keep(layer.sparse, layer, x_RD, n_valid_B) != 0

    return masked_ffn(model.config, model.kernels, keep)


def describe(predictor: Predictor) -> str:
    """The predictor's name and options, such as "gate_threshold(share=0.5)"."""
    own = {f.name: getattr(predictor, f.name) for f in dataclasses.fields(predictor) if f.name != "ffn"}
    return f"{predictor.name}({', '.join(f'{key}={value}' for key, value in own.items() if value is not None)})"
