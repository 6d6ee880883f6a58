"""The sparse FFN as an injected `ffn`: a predictor names the neurons of each row, and only their weights are read.

    keep = predictor(x)                                       x is the residual before ffn_norm
    a    = act(gate z) * up_act(up z), z = rmsnorm(x) * ffn_norm
    y    = x + sum of a_j down_t[j] over the kept j, ascending

Song et al. 2023 (arXiv:2312.12456). A mask belongs to its row at any batch size; rows that share a call share the
reading of their neurons, which lie row by row in `SparseWeights`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from gguf import GGMLQuantizationType as GGML
from gguf import quants

from specsparse.engine.config import ModelConfig, parse_activation
from specsparse.engine.gguf.reader import TensorInfo
from specsparse.engine.llama import ChosenNeurons
from specsparse.engine.pytree import Pytree
from specsparse.engine.weights import Layer, PackFFN, Params, pack_matrix, pack_rows
from specsparse.errors import UserError
from specsparse.kernels import (
    ChosenFfn,
    Kernels,
    NeuronRows,
    SparseStats,
    neuron_blocks,
    pack_neurons,
    regroup_neurons,
    skippable,
)  # fmt: skip
from specsparse.kernels.native.layers import MOST_CHOSEN_ROWS
from specsparse.kernels.packing.dequant import dequantize, pack_float
from specsparse.kernels.packing.pack import pack_qtensor
from specsparse.kernels.qtensor import BLOCK
from specsparse.kernels.reference.dense import activate
from specsparse.predictors.base import InOneCall, Predictor, as_mask
from specsparse.predictors.rules import GateThreshold, Oracle, Teal
from specsparse.predictors.scored import Factors


class SparseWeights(NamedTuple):
    """One layer's sparse FFN: rows [F, D] of neurons; row j of down_t is column j of the down projection.

    `gate` is None for an FFN without one; `predictor` has the predictor's weights for this layer. With `blocks` in
    place of `down_t` the FFN is the masked one of the dense matrices, which stay beside these.
    """

    gate: NeuronRows | None
    up: NeuronRows
    down_t: NeuronRows | None
    predictor: Pytree = None
    blocks: jax.Array | None = None


def by_gate(predictor: Predictor) -> bool:
    """Whether the gate itself decides which neurons are kept, so that it is read for all of them."""
    return isinstance(predictor, Oracle | GateThreshold)


def make_ffn(config: ModelConfig, kernels: Kernels, predictor: Predictor) -> Callable:
    """ffn(layer, x_RD, n_valid_B) -> (y_RD, SparseStats) for `engine.llama.make_forward`; `layer.sparse` is its
    `SparseWeights`, and no dense matrix is needed.

    The oracle and CATS decide by the gate, so it is read for all neurons and the other two matrices for the kept ones.
    What native kernels can decide themselves is a `ChosenNeurons`. The FFN has no biases (`FFN.from_config` refuses
    others), and TEAL, which leaves out inputs and not neurons, cannot run.
    """
    assert not isinstance(predictor, Teal)
    if isinstance(predictor, InOneCall):
        return _InOneCall(config, kernels, predictor)
    return _OneByOne(config, kernels, predictor)


def runs_densely(weights: SparseWeights, rows: int, kept: float) -> bool:
    """Whether a native pass of rows that keep this share of the neurons in the mean takes the dense kernels, as
    `ZeroSkip::choose` decides it."""
    few = 1 / 8 if rows > 1 else 1 / 5 if weights.up.data.shape[1] < 512 else 1 / 3
    return weights.blocks is not None and (rows > MOST_CHOSEN_ROWS or kept > few)


def masks(predictor: Predictor) -> bool:
    """Whether the predictor's mask can lie on dense matrices."""
    return isinstance(predictor, InOneCall) and not by_gate(predictor)


def maskable(params: Params, config: ModelConfig, kernels: Kernels, predictor: Predictor) -> bool:
    """Whether the predictor's mask can be laid on dense matrices of these parameters that are also kept by neuron."""
    if not (masks(predictor) and config.gated and config.activation in ("silu", "relu", "relu2")):
        return False
    if kernels.layers is None or config.head_dim % 16:
        return False
    return all(m is not None and skippable(m) for layer in params.layers for m in layer.dense)


class _OneByOne:
    """`make_ffn` of any predictor."""

    def __init__(self, config: ModelConfig, kernels: Kernels, predictor: Predictor):
        act, up_act = parse_activation(config.activation)
        self.acts = act, up_act if config.gated else None
        self._config, self._kernels, self._predictor = config, kernels, predictor
        self._masked = masked_ffn(config, kernels, predictor)

    def __call__(self, layer: Layer, x_RD, n_valid_B):
        w: SparseWeights = layer.sparse
        if w.blocks is not None:
            return self._masked(layer._replace(sparse=w.predictor), x_RD, n_valid_B)
        predictor = self._predictor
        if by_gate(predictor):
            keep_RF = jnp.ones((x_RD.shape[0], w.up.shape[0]), jnp.uint8)
        else:
            keep_RF = predictor.keep(w.predictor, layer, x_RD, n_valid_B)
        y_RD, stats = self._kernels.sparse_ffn(
            x_RD, keep_RF, w.gate, w.up, w.down_t, norm=layer.ffn_norm, eps=self._config.norm_eps, n_valid=n_valid_B,
            act=self.acts[0], up_act=self.acts[1], residual=x_RD,
            least=w.predictor.threshold if isinstance(predictor, GateThreshold) else None,
        )  # fmt: skip
        return y_RD, self.seen(stats)

    def seen(self, stats: SparseStats) -> SparseStats:
        """If the gate decides, the kept neurons are those that are not zero."""
        return stats._replace(kept=stats.nonzero, union=stats.active) if by_gate(self._predictor) else stats


class _InOneCall(_OneByOne, ChosenNeurons):
    """`make_ffn` of a predictor that the kernels know."""

    def __init__(self, config: ModelConfig, kernels: Kernels, predictor: InOneCall):
        super().__init__(config, kernels, predictor)
        self._choice = predictor.choice

    def of_layer(self, layer: Layer) -> ChosenFfn:
        w: SparseWeights = layer.sparse
        return ChosenFfn(w.gate, w.up, w.down_t, self._choice(w.predictor, layer), w.blocks)


def masked_ffn(config: ModelConfig, kernels: Kernels, predictor: Predictor | None) -> Callable:
    """The same computed densely and masked, from the layer's dense matrices: the definition, with biases and with
    whatever rounding `kernels` do between the products (F16-faithful mode).

    `layer.sparse` is the predictor's own weights. A predictor None keeps every activation that is not zero.
    """
    act, up_act = parse_activation(config.activation)
    names = ("ffn_gate", "ffn_up") if config.gated else ("ffn_up",)
    fused = config.gated and up_act is None and isinstance(act, str)  # as in `dense_ffn`, whose bits these are

    def ffn(layer: Layer, x_RD, n_valid_B):
        outs = kernels.linear(
            x_RD,
            tuple(getattr(layer, name) for name in names),
            norm=layer.ffn_norm,
            eps=config.norm_eps,
            biases=layer.bias(*names),
            n_valid=n_valid_B,
            act=act if fused else None,
        )
        a_RF = outs[0] if fused else activate(outs[0], act)
        a_RF = a_RF * activate(outs[1], up_act) if config.gated and not fused else a_RF
        if predictor is None:
            keep_RF = as_mask(a_RF != jnp.float32(0), n_valid_B)
        else:
            keep_RF = predictor.keep(layer.sparse, layer, x_RD, n_valid_B)
        keep_RF = keep_RF != jnp.uint8(0)
        a_RF = jnp.where(keep_RF, a_RF, jnp.float32(0))
        (y_RD,) = kernels.linear(
            a_RF, (layer.ffn_down,), biases=layer.bias("ffn_down"), residual=x_RD, n_valid=n_valid_B
        )
        live_RF = a_RF != jnp.float32(0)
        (kept, union), (nonzero, active) = (
            (jnp.sum(mask, axis=1, dtype=jnp.int32), jnp.sum(jnp.any(mask, axis=0), dtype=jnp.int32))
            for mask in (keep_RF, live_RF)
        )
        return y_RD, SparseStats(kept=kept, union=union, nonzero=nonzero, active=active)

    return ffn


def rows_packer(threshold: float, *, floats: bool, predictor: bool) -> PackFFN:
    """A `pack_ffn` for `engine.weights.load_params` that packs neurons row by row.

    `floats` makes all matrices float32, for kernels that compute so; `predictor` packs fc1 and fc2, too.
    """

    def pack(own: dict[str, TensorInfo]) -> dict[str, Pytree]:
        gate = pack_rows(own["ffn_gate"], floats=floats) if "ffn_gate" in own else None
        up = pack_rows(own["ffn_up"], floats=floats)
        if "ffn_down_t" in own:
            down_t = pack_rows(own["ffn_down_t"], floats=floats)
        else:
            down = own["ffn_down"]
            down_t = _down_rows(down.dequantize(), "F16" if down.type.name == "F16" and not floats else "F32")
        return {"sparse": SparseWeights(gate, up, down_t, _mlp(own, threshold, floats) if predictor else None)}

    return pack


def dense_packer(threshold: float, *, floats: bool) -> PackFFN:
    """Packs the dense matrices of a PowerInfer file, and its predictor as `Layer.sparse`, to judge or to mask by it.

    The transposed down matrix is turned back: an F16 file keeps its bits, Q4_0 of a single scale its codes, and others
    become float32 without loss.
    """

    def pack(own: dict[str, TensorInfo]) -> dict[str, Pytree]:
        fields: dict[str, Pytree] = {n: pack_matrix(own[n], floats=floats) for n in ("ffn_gate", "ffn_up") if n in own}
        down_t = own["ffn_down_t"]
        if not floats and (turned := _turned_q4_0(down_t)) is not None:
            fields["ffn_down"] = jax.device_put(pack_qtensor(turned, GGML.Q4_0, (down_t.shape[1], down_t.shape[0])))
        else:
            codes = "f16" if down_t.type.name == "F16" and not floats else "f32"
            down = pack_float(jnp.asarray(down_t.dequantize().T), codes)
            fields["ffn_down"] = replace(down, layout=replace(down.layout, source=down_t.type.name))
        return {**fields, "sparse": _mlp(own, threshold, floats)}

    return pack


def _turned_q4_0(t: TensorInfo) -> np.ndarray | None:
    """A Q4_0 matrix transposed, as bytes, or None if its blocks differ in scale or do not fit the other direction."""
    (rows, cols), bytes_of_block = t.shape, 2 + BLOCK // 2
    if t.type != GGML.Q4_0 or rows % BLOCK:
        return None
    blocks = np.asarray(t.raw).view(np.uint8).reshape(rows, cols // BLOCK, bytes_of_block)
    if (blocks[..., :2] != blocks[0, 0, :2]).any():
        return None
    pairs = blocks[..., 2:]
    codes = np.concatenate([pairs & np.uint8(15), pairs >> np.uint8(4)], axis=2).reshape(rows, cols).T
    halves = codes.reshape(cols, rows // BLOCK, 2, BLOCK // 2)
    out = np.empty((cols, rows // BLOCK, bytes_of_block), np.uint8)
    out[..., :2] = blocks[0, 0, :2]
    out[..., 2:] = halves[:, :, 0] | halves[:, :, 1] << np.uint8(4)
    return out


def _mlp(own: dict[str, TensorInfo], threshold: float, floats: bool) -> Factors:
    fc1, fc2 = (pack_matrix(own[n], floats=floats) for n in ("fc1", "fc2"))
    return Factors(fc1, fc2, jnp.float32(threshold))


def sparse_params(
    params: Params, weights: Sequence[Pytree], *, down_type: str | None = None, keep_dense: bool = False,
    masked: bool = False,
) -> Params:  # fmt: skip
    """A dense model's parameters for `make_ffn`. UserError: a width whose rows the type does not fit.

    Args:
        params: with dense matrices.
        weights: of the predictor, one of each layer.
        down_type: GGUF type to quantise the transposed down projection to, such as "Q8_0". Its blocks run along the
            other axis, so this is lossy; None keeps every value, in F16 if they were F16, else in float32.
        keep_dense: whether the dense matrices stay beside the rows, for predictors that are asked for their mask alone.
        masked: whether the FFN is the dense one with a mask: down becomes `neuron_blocks`, without loss.
    """
    layers = []
    for layer, predictor in zip(params.layers, weights, strict=True):
        gate, up, down = layer.dense
        exact = "F16" if down.layout.codes == "f16" else "F32"
        down_t = None if masked else _down_rows(np.asarray(dequantize(down)), down_type or exact)
        gate_rows = None if gate is None else regroup_neurons(gate)
        rows = SparseWeights(gate_rows, regroup_neurons(up), down_t, predictor, neuron_blocks(down) if masked else None)
        layer = layer._replace(sparse=rows)
        layers.append(layer if keep_dense else layer._replace(ffn_gate=None, ffn_up=None, ffn_down=None))
    return params._replace(layers=tuple(layers))


def _down_rows(down_DF: np.ndarray, kind: str) -> NeuronRows:
    """A down projection f32[D, F] as rows of neurons of a GGUF type."""
    down_FD = np.ascontiguousarray(down_DF.T)
    try:
        raw = quants.quantize(down_FD, GGML[kind])
    except (KeyError, NotImplementedError, quants.QuantError):
        raise UserError(f"down_type={kind!r}: {down_FD.shape[1]} columns become F32, F16, Q8_0, Q4_0 or Q4_1") from None
    return pack_neurons(raw, GGML[kind], down_FD.shape)
