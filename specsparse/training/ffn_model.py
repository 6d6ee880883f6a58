"""A model's layers as a function of its FFNs, to differentiate: attention and norms stay as they are.

Beside it stand the inputs of every FFN over texts, in files that a restart finds again, and the model's file with other
FFNs.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from gguf import GGMLQuantizationType as GGML
from safetensors import SafetensorError, safe_open

from specsparse.engine.architectures import LayerKind
from specsparse.engine.config import ACTIVATION_KEY, ModelConfig
from specsparse.engine.gguf.reader import GGUFFile, TensorInfo
from specsparse.engine.gguf.writer import NewTensor, write_gguf
from specsparse.engine.model import Model
from specsparse.engine.pytree import Pytree
from specsparse.engine.rope import model_tables
from specsparse.errors import UserError
from specsparse.kernels.packing.dequant import dequantize, embed_rows
from specsparse.support.files import write_tensors
from specsparse.training.corpus import Text
from specsparse.training.layer import LayerWeights, Precision, attend, halved, rms_norm, times

_PART = 8
"""Windows of a file of inputs."""


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
    """The norms and the attention.

    Attributes:
        layers: with a leading axis L; their FFNs are left out.
        norms: of heads of queries and of keys, with a leading axis L, or (None, None).
        kinds: int32[L] each, `ModelConfig.kind` of every layer.
        cos, sin: float32[T, positions, d / 2], the tables that layers choose from.
    """

    layers: LayerWeights
    norms: tuple[jax.Array | None, jax.Array | None]
    kinds: LayerKind
    cos: jax.Array
    sin: jax.Array


class PackedTexts(NamedTuple):
    """Texts side by side in n rows.

    Attributes:
        tokens: int32[n].
        position: int32[n], in its text.
        text: int32[n], which text a row belongs to; -1 for none.
        hidden: float32[n, D], the original's rows before the output norm; [n, 0] if the texts are without.
        answer: bool[n], rows that the answer's tokens are said by: its own, and the prompt's last.
    """

    tokens: np.ndarray
    position: np.ndarray
    text: np.ndarray
    hidden: np.ndarray
    answer: np.ndarray


def check(config: ModelConfig) -> None:
    """Refuses, with a UserError, a model whose FFN has no gate or no SiLU or is normalised, or that has biases."""
    config.check_sums("turning FFNs to ReLU")
    if config.activation != "silu" or not config.gated or config.biases:
        found = f"biases ({config.biases[0]})" if config.biases else f"activation={config.activation}"
        raise UserError(
            f"only a gated FFN of SiLU without biases is turned to ReLU here, and this model has "
            f"{found if config.gated else 'no gate'}"
        )


def frozen_layers(model: Model, positions: int) -> FrozenLayers:
    """The norms and the attention of a dense model, dequantised."""
    model.check_packed("training")
    layers, config = model.params.layers, model.config

    def stacked(name: str) -> jax.Array:
        each = [getattr(layer, name) for layer in layers]
        return jnp.stack([jnp.asarray(w if isinstance(w, jax.Array) else dequantize(w), jnp.float32) for w in each])

    attention = {name: stacked(name) for name in LayerWeights._fields[:6]}
    norms = (stacked("attn_q_norm"), stacked("attn_k_norm")) if config.family.qk_norm else (None, None)
    kinds = LayerKind(*(jnp.asarray(each, jnp.int32) for each in zip(*map(config.kind, range(config.n_layers)))))
    tables = map(jnp.asarray, model_tables(config, positions, model.rope_factors))
    return FrozenLayers(LayerWeights(**attention), norms, kinds, *tables)


def ffn_of(model: Model, layer: int) -> FfnMatrices:
    """The matrices of one layer, dequantised."""
    found = model.params.layers[layer]
    return FfnMatrices(*(dequantize(getattr(found, f"ffn_{n}")) for n in FfnMatrices._fields))


def ffns_of(model: Model) -> FfnMatrices:
    """The matrices of all layers, stacked."""
    return jax.tree.map(lambda *each: jnp.stack(each), *(ffn_of(model, i) for i in range(model.config.n_layers)))


def pack_texts(texts: Sequence[Text], rows: int) -> PackedTexts:
    """Texts one after the other in `rows` rows; the last one loses its end if it does not fit."""
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
        precision: of the products, see `training.layer`.
        watch: called with the FFN's normalised inputs z [n, D] and act(gate z) [n, F]; what it returns is stacked.

    Returns:
        Rows before the output norm [n, D], and the stacked results of `watch`, with a leading axis L.
    """
    before_nn = texts.position[:, None] - texts.position[None]
    sees_nn = (texts.text[None] == texts.text[:, None]) & (before_nn >= 0)

    def layer(x, weights):
        (w, f), norms, kind = halved(weights[:2], precision), weights[2], weights[3]
        cos, sin = (each[kind.table][texts.position] for each in (frozen.cos, frozen.sin))
        x = attend(config, w, x, cos, sin, sees_nn & ((kind.window == 0) | (before_nn < kind.window)), norms)
        z = rms_norm(x, w.ffn_norm, config.norm_eps)
        a = act(times(z, f.gate))
        return x + times(a * times(z, f.up), f.down), watch(z, a)

    # A layer is run again for its gradient: keeping what it made, 30 MB and its halved weights, takes longer.
    return jax.lax.scan(jax.checkpoint(layer), x_nD, (frozen.layers, ffn, frozen.norms, frozen.kinds))


def collect_inputs(
    model: Model,
    windows: Sequence[Sequence[Text]],
    folder: Path,
    *,
    rows: int,
    progress: Callable[[int], None] | None = None,
) -> list[Path]:
    """Files in `folder` of the normalised inputs float16[L, n, D] of every FFN of a dense original; those that are
    there are not made again. `windows` are texts that share one of `rows` rows, as `text_windows.pack` puts them;
    `progress` is called with the windows done."""

    @jax.jit
    def inputs(embedding, frozen: FrozenLayers, ffn: FfnMatrices, texts: PackedTexts):
        x_nD = embed_rows(embedding, texts.tokens)
        return forward(model.config, frozen, ffn, x_nD, texts, jax.nn.silu, lambda z, a: z.astype(jnp.float16))[1]

    paths = [folder / f"inputs_{i:04d}.safetensors" for i in range(-(-len(windows) // _PART))]
    arguments = None
    for i, path in enumerate(paths):
        part = windows[i * _PART : (i + 1) * _PART]
        if not path.exists():
            arguments = arguments or (model.params.embedding, frozen_layers(model, rows), ffns_of(model))
            packed = [pack_texts(texts, rows) for texts in part]
            found = [np.asarray(inputs(*arguments, p))[:, p.text >= 0] for p in packed]
            write_tensors(path, {"z": np.concatenate(found, axis=1)}, {"format": "specsparse.training.inputs"})
        if progress is not None:
            progress(i * _PART + len(part))
    return paths


def layer_inputs(paths: Sequence[Path], layer: int) -> np.ndarray:
    """float16[n, D]: the inputs of a layer, over all files; a UserError for a damaged one."""
    found = []
    for path in paths:
        try:
            with safe_open(path, framework="numpy") as file:
                found.append(file.get_slice("z")[layer])
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path}: cannot be read ({error}); remove it to have it made again") from error
    return np.concatenate(found)


def write_relu(f: GGUFFile, ffn: FfnMatrices, path: str | os.PathLike[str], kind: GGML) -> Path:
    """Writes `f` with the FFNs of `ffn` (leading axis L) in `kind` and ReLU at the gate, as a plain GGUF that says its
    activation; all else keeps its bytes."""
    named = [(name, i, layer) for name in FfnMatrices._fields for i, layer in enumerate(getattr(ffn, name))]
    new = {f"blk.{i}.ffn_{name}.weight": layer for name, i, layer in named}

    def made(t: TensorInfo) -> NewTensor:
        return NewTensor.of(t.name, np.asarray(new[t.name]), kind) if t.name in new else NewTensor.copy(t)

    keys = {**f.metadata, ACTIVATION_KEY: "relu", "general.name": f"{f.get('general.name', 'str', f.path.stem)} ReLU"}
    return write_gguf(path, keys, [made(t) for t in f.tensors.values()])
