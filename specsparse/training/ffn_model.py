"""A model's layers as a function of its FFNs, to differentiate: attention and norms stay as they are."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine.architectures import LayerKind
from specsparse.engine.config import ModelConfig
from specsparse.engine.model import Model
from specsparse.engine.pytree import Pytree
from specsparse.engine.rope import model_tables
from specsparse.errors import UserError
from specsparse.kernels import QTensor
from specsparse.kernels.packing.dequant import dequantize
from specsparse.training.data import Text
from specsparse.training.layer import HeadNorms, LayerWeights, rms_norm, whole
from specsparse.training.products import Precision, halved, times

_ATTENTION = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm")


class FfnMatrices(NamedTuple):
    """float32 matrices [outputs, inputs] of one layer, or of all with a leading axis L.

    Attributes:
        gate, up: [F, D].
        down: [D, F].
    """

    gate: jax.Array
    up: jax.Array
    down: jax.Array


class FrozenLayers(NamedTuple):
    """What stays as it is.

    Attributes:
        layers: norms and attention, with a leading axis L; their FFNs are left out.
        norms: of heads, with a leading axis L, or None.
        kinds: int32[L] each, `ModelConfig.kind` of every layer.
        cos, sin: float32[T, positions, d / 2], the tables that layers choose from.
    """

    layers: LayerWeights
    norms: HeadNorms | None
    kinds: LayerKind
    cos: jax.Array
    sin: jax.Array


class PackedTexts(NamedTuple):
    """Texts side by side in n rows.

    Attributes:
        tokens: int32[n].
        position: int32[n], in its text.
        text: int32[n], which text a row belongs to; -1 for none.
        hidden: float32[n, D], the original's rows before the output norm; [n, 0] where the texts are without.
        answer: bool[n], rows that the answer's tokens are said by: its own, and the prompt's last.
    """

    tokens: np.ndarray
    position: np.ndarray
    text: np.ndarray
    hidden: np.ndarray
    answer: np.ndarray


def check(config: ModelConfig) -> None:
    """Refuses a model that this function is not of.

    Raises:
        UserError: its FFN has no gate or no SiLU, what it adds is normalised, or it has biases.
    """
    config.check_sums("turning FFNs to ReLU")
    if config.activation != "silu":
        raise UserError(f"only SiLU is turned to ReLU here, and this model's activation is {config.activation}")
    if not config.gated:
        raise UserError("only a gated FFN is turned to ReLU here, and this model's has no gate")
    if config.biases:
        raise UserError(f"a model with biases ({config.biases[0]}) cannot be turned to ReLU here")


def frozen_layers(model: Model, positions: int) -> FrozenLayers:
    """The norms and the attention of a dense model, dequantised.

    Raises:
        UserError: kernels that do not keep matrices packed.
    """
    model.check_packed("training")
    layers, config = model.params.layers, model.config

    def stacked(name: str) -> jax.Array:
        return jnp.stack([_floats(getattr(layer, name)) for layer in layers])

    norms = HeadNorms(stacked("attn_q_norm"), stacked("attn_k_norm")) if config.family.qk_norm else None
    kinds = LayerKind(*(jnp.asarray(each, jnp.int32) for each in zip(*map(config.kind, range(config.n_layers)))))
    tables = map(jnp.asarray, model_tables(config, positions, model.rope_factors))
    return FrozenLayers(LayerWeights(**{name: stacked(name) for name in _ATTENTION}), norms, kinds, *tables)


def ffn_of(model: Model, layer: int) -> FfnMatrices:
    """The matrices of one layer, dequantised."""
    found = model.params.layers[layer]
    return FfnMatrices(*(dequantize(getattr(found, f"ffn_{n}")) for n in FfnMatrices._fields))


def ffns_of(model: Model) -> FfnMatrices:
    """The matrices of all layers, stacked."""
    return jax.tree.map(lambda *each: jnp.stack(each), *(ffn_of(model, i) for i in range(model.config.n_layers)))


def _floats(weight: jax.Array | QTensor) -> jax.Array:
    return jnp.asarray(weight if isinstance(weight, jax.Array) else dequantize(weight), jnp.float32)


def pack_texts(texts: Sequence[Text], rows: int) -> PackedTexts:
    """Texts one after the other in `rows` rows; what does not fit is cut off."""
    width = 0 if texts[0].hidden is None else texts[0].hidden.shape[1]
    out = PackedTexts(
        np.zeros(rows, np.int32),
        np.zeros(rows, np.int32),
        np.full(rows, -1, np.int32),
        np.zeros((rows, width), np.float32),
        np.zeros(rows, bool),
    )
    at = 0
    for index, text in enumerate(texts):
        count = min(len(text.tokens), rows - at)
        here = slice(at, at + count)
        out.tokens[here], out.position[here] = text.tokens[:count], np.arange(count)
        out.text[here] = index
        if text.hidden is not None:
            out.hidden[here] = text.hidden[:count]
        out.answer[at + text.prompt - 1 : at + count] = True
        at += count
    return out


def forward(
    config: ModelConfig,
    frozen: FrozenLayers,
    ffn: FfnMatrices,
    x_nD: jax.Array,
    texts: PackedTexts,
    act: Callable[[jax.Array], jax.Array],
    watch: Callable[[jax.Array, jax.Array], Pytree],
    *,
    precision: Precision = "float32",
) -> tuple[jax.Array, Pytree]:
    """All layers on embedded rows [n, D].

    Args:
        config: the model's.
        frozen: its norms and attention.
        ffn: with the leading axis L.
        x_nD: embedded tokens.
        texts: which rows see which.
        act: of the gate.
        precision: of the products, see `training.products`.
        watch: called with the FFN's normalised inputs z [n, D] and act(gate z) [n, F]; what it returns is stacked.

    Returns:
        Rows before the output norm [n, D], and what `watch` returned with a leading axis L.
    """
    before_nn = texts.position[:, None] - texts.position[None]
    sees_nn = (texts.text[None] == texts.text[:, None]) & (before_nn >= 0)

    def layer(x, weights):
        (w, f), norms, kind = halved(weights[:2], precision), weights[2], weights[3]
        cos, sin = (each[kind.table][texts.position] for each in (frozen.cos, frozen.sin))
        x = whole(config, w, x, cos, sin, sees_nn & ((kind.window == 0) | (before_nn < kind.window)), norms)
        z = rms_norm(x, w.ffn_norm, config.norm_eps)
        a = act(times(z, f.gate))
        return x + times(a * times(z, f.up), f.down), watch(z, a)

    # A layer is run again for its gradient: keeping what it made, 30 MB and its halved weights, takes longer.
    return jax.lax.scan(jax.checkpoint(layer), x_nD, (frozen.layers, ffn, frozen.norms, frozen.kinds))
