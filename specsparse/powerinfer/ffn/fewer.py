"""A model with fewer neurons and otherwise the same weights, to draft for the model on the model's own cache.

    hot    one set of neurons for all tokens, those with the most energy on a text, packed as a smaller dense FFN
    gate   for each token the neurons whose |act(gate)| is largest (CATS, arXiv:2404.08763); a dense model's
    own    the model's own predictors with a higher threshold; a sparse model's

What it drafts is verified by the model itself, so that nothing is lost but time.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from gguf import quants
from gguf.constants import GGMLQuantizationType

from specsparse.engine.llama import make_forward
from specsparse.engine.model import Model
from specsparse.engine.weights import Layer
from specsparse.errors import UserError
from specsparse.kernels import QTensor
from specsparse.kernels.packing.dequant import dequantize, pack_float
from specsparse.kernels.packing.pack import pack_qtensor
from specsparse.kernels.packing.rows import take_rows
from specsparse.kernels.qtensor import BLOCK
from specsparse.powerinfer.ffn.gated import gated
from specsparse.predictors.base import FFN
from specsparse.predictors.collect import collect, self_generated, windows
from specsparse.predictors.evaluate import fit_layers
from specsparse.predictors.thresholds import GateThreshold

RULES = ("hot", "gate", "own")
_WINDOW = 128


def with_fewer_neurons(
    model: Model,
    *,
    rule: str = "hot",
    share: float = 0.5,
    threshold: float | None = None,
    text: Sequence[int] | None = None,
) -> Model:
    """A model that shares `model`'s attention and embeddings and computes fewer neurons.

    Args:
        model: with dense matrices for `hot` and `gate`, with predictors for `own`.
        rule: of `RULES`.
        share: of the neurons to compute, for `hot` (in steps of 32 neurons) and, on average over the text, `gate`.
        threshold: for `own`.
        text: token ids that `hot` and `gate` choose by; None: what the model itself writes.

    Raises:
        UserError: a rule that the model has no matrices or predictors for, or a text without ids or with ids that are
            none of its vocabulary.
    """
    if rule == "own":
        return _with_threshold(model, threshold)
    if model.ffn != "dense":
        raise UserError(f"a draft by rule={rule} needs a dense target and this one runs ffn={model.ffn}: give rule=own")
    model.check_packed("a draft with fewer neurons")
    cut = self_generated(model) if text is None else _cut(model, list(text))
    rows_LND = collect(model, cut)
    if rule == "hot":
        return _hot(model, share, rows_LND)
    predictor = GateThreshold(FFN.from_config(model.config, model.kernels), share)
    return gated(model, predictor, fit_layers(predictor, model.params.layers, rows_LND))


def _cut(model: Model, text: list[int]) -> np.ndarray:
    """int32[W, n]: the text in windows that the context holds."""
    last = model.config.vocab_size - 1
    outside = [i for i in text if not 0 <= i <= last]
    if outside or not text:
        raise UserError(f"drafter.text holds {outside[:1] or 'no ids'}; ids lie in 0..{last}")
    return windows([text], min(_WINDOW, len(text), model.config.context_length))


def _with_threshold(model: Model, threshold: float | None) -> Model:
    if threshold is None:
        raise UserError("a draft by rule=own raises the threshold of the target's predictors: give drafter.threshold")

    def raised(layer: Layer) -> Layer:
        own = layer.sparse.predictor._replace(threshold=jnp.float32(threshold))
        return layer._replace(sparse=layer.sparse._replace(predictor=own))

    try:
        layers = tuple(map(raised, model.params.layers))
    except (AttributeError, TypeError, ValueError):
        raise UserError(f"the target (ffn={model.ffn}) has no predictors with a threshold: give rule=hot") from None
    return _replaced(model, params=model.params._replace(layers=layers), rule=f"threshold={threshold:g}")


def _hot(model: Model, share: float, rows_LND: np.ndarray) -> Model:
    """A dense model of fewer neurons: gate and up keep their codes, down is packed again."""
    count = min(max(BLOCK, round(share * model.config.d_ff / BLOCK) * BLOCK), model.config.d_ff)
    ffn = FFN.from_config(model.config, model.kernels)
    energy = jax.jit(lambda layer, x_RD: _energy(ffn, layer, x_RD))
    layers = []
    for layer, rows_ND in zip(model.params.layers, rows_LND, strict=True):
        ids = np.sort(np.argsort(-np.asarray(energy(layer, jnp.asarray(rows_ND))), kind="stable")[:count])
        layers.append(_smaller(layer, ids))
    config = dataclasses.replace(model.config, d_ff=count)
    return _replaced(
        model,
        config=config,
        params=model.params._replace(layers=tuple(layers)),
        forward=make_forward(config, model.kernels),
        ffn="hot",
        rule=f"neurons={count}",
    )


def _energy(ffn: FFN, layer: Layer, x_RD: jax.Array) -> jax.Array:
    """f32[F]: the squares that each neuron adds to the FFN's output over the rows, |down_j|^2 sum of a_j^2."""
    a_RF = ffn.neurons(layer, x_RD, jnp.asarray([x_RD.shape[0]], jnp.int32))
    return jnp.sum(a_RF**2, axis=0) * jnp.sum(dequantize(layer.ffn_down) ** 2, axis=0)


def _smaller(layer: Layer, ids: np.ndarray) -> Layer:
    gate = None if layer.ffn_gate is None else take_rows(layer.ffn_gate, ids)
    return layer._replace(ffn_gate=gate, ffn_up=take_rows(layer.ffn_up, ids), ffn_down=_columns(layer.ffn_down, ids))


def _columns(w: QTensor, ids: np.ndarray) -> QTensor:
    """Columns of a matrix: floats as they are, others as Q8_0, since their blocks lie along the columns."""
    values = np.asarray(dequantize(w))[:, ids]
    if w.layout.is_float:
        return pack_float(jnp.asarray(values), w.layout.codes)
    kind = GGMLQuantizationType.Q8_0
    return pack_qtensor(quants.quantize(np.ascontiguousarray(values), kind), kind, values.shape)


def _replaced(model: Model, **changes) -> Model:
    return dataclasses.replace(model, **changes, programs={}, drafters={}, _tables={})
