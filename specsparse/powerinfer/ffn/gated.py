"""A predictor's mask in every FFN of a model that was loaded dense."""

import dataclasses
from collections.abc import Sequence

import jax

from specsparse.engine.llama import ForwardFn, make_forward
from specsparse.engine.model import Model
from specsparse.engine.pytree import Pytree
from specsparse.engine.weights import Params
from specsparse.kernels import SkipWeights
from specsparse.powerinfer.ffn import zero_skip
from specsparse.powerinfer.ffn.modes import PREDICTED
from specsparse.powerinfer.ffn.sparse_ffn import by_gate, make_ffn
from specsparse.powerinfer.ffn.sparse_weights import SparseWeights, sparse_params
from specsparse.predictors.base import Predictor, gate_matrix
from specsparse.predictors.bounds import Oracle, UnionCap


def gated(model: Model, predictor: Predictor, weights: Sequence[Pytree], *, down_type: str | None = None) -> Model:
    """The model that computes the neurons which `predictor` keeps.

    It shares all matrices with `model` and has the FFN's once more, as rows of neurons; the oracle of a ReLU model
    whose matrices allow it skips the zeros of a dense pass instead (`powerinfer.ffn.zero_skip`).

    Args:
        model: with dense matrices.
        predictor: of the model's FFN.
        weights: of each layer, from `predictor.fit` or from a file.
        down_type: of the transposed down projection, see `ffn.sparse_weights.sparse_params`. By default floats stay
            what they are and codes become Q8_0: their blocks do not survive the transposition, eight bits lose next to
            nothing, and floats are twice as long.

    Returns:
        A model whose forward passes have `SparseStats`; its own programs and drafters.
    """
    model.check_whole(f"predictor={predictor.name}")
    model.check_packed(f"predictor={predictor.name}")
    config, kernels = model.config, model.kernels
    if down_type is None and isinstance(predictor, Oracle) and zero_skip.in_params(model.params, config, kernels):
        return _replaced(model, zero_skip.skipping(model.params), make_forward(config, kernels), predictor)
    if down_type is None and not model.params.layers[0].ffn_down.layout.is_float:
        down_type = "Q8_0"
    params = sparse_params(model.params, weights, down_type=down_type, keep_dense=True)
    return _replaced(model, params, make_forward(config, kernels, make_ffn(config, kernels, predictor)), predictor)


def _replaced(model: Model, params: Params, forward: ForwardFn, predictor: Predictor) -> Model:
    return dataclasses.replace(
        model,
        params=params,
        forward=forward,
        ffn=PREDICTED,
        rule=describe(predictor),
        programs={},
        drafters={},
        _tables={},
    )


def bytes_read(model: Model, predictor: Predictor) -> tuple[int, int]:
    """What the FFNs of a pass read of a model whose neurons lie in rows: (bytes whatever it keeps, bytes that follow
    the share of the neurons that its rows keep), all layers. A predictor that decides by the gate reads all of it; one
    that caps what such a predictor keeps has it read the dense gate first."""
    capped = isinstance(predictor, UnionCap) and by_gate(predictor.inner)
    own = rest = 0
    for layer in model.params.layers:
        if isinstance(layer.sparse, SkipWeights):
            own += layer.ffn_gate.nbytes
            rest += layer.sparse.up.nbytes + layer.sparse.down.nbytes
            continue
        w: SparseWeights = layer.sparse
        decides = w.up if w.gate is None else w.gate
        whole = sum(m.nbytes for m in (w.gate, w.up, w.down_t) if m is not None)
        fixed = decides.nbytes if by_gate(predictor) else 0
        own += sum(leaf.nbytes for leaf in jax.tree.leaves(w.predictor)) + fixed
        own += gate_matrix(layer).nbytes if capped else 0
        rest += whole - fixed
    return own, rest


def describe(predictor: Predictor) -> str:
    """The predictor's name and options, such as "gate_threshold(share=0.5)"."""
    own = {f.name: getattr(predictor, f.name) for f in dataclasses.fields(predictor) if f.name != "ffn"}
    return f"{predictor.name}({', '.join(f'{key}={value}' for key, value in own.items() if value is not None)})"
