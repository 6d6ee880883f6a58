"""The parameters of a model: a GGUF file's tensors, packed once for the kernels."""

import math
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from gguf import GGMLQuantizationType as GGML

from specsparse.engine.config import PROJECTIONS, ModelConfig
from specsparse.engine.gguf.reader import GGUFFile, TensorInfo
from specsparse.engine.pytree import Pytree
from specsparse.errors import UserError
from specsparse.kernels import Fragments, NeuronRows, PlainMatrix, QTensor, pack_neurons
from specsparse.kernels.packing.dequant import pack_float
from specsparse.kernels.packing.pack import pack
from specsparse.kernels.qtensor import Layout


class DenseFFN(NamedTuple):
    """The dense matrices of a layer's FFN; without a gate the activation is of `up`."""

    gate: QTensor | None
    up: QTensor
    down: QTensor


class Layer(NamedTuple):
    """Weights of one layer. Matrices are [outputs, inputs], norms f32[D], biases f32[outputs] or None.

    Norms that not all architectures have may be None: those of each head of queries and keys, f32[d], and of the
    outputs of attention and FFN, f32[D]. An injected sparse FFN reads `sparse`: neuron-major rows and predictor
    weights; the dense matrices that it replaces may then be None. `SkipWeights` there stand beside them, for the dense
    pass that skips zeros.
    """

    attn_norm: jax.Array
    attn_q: QTensor
    attn_k: QTensor
    attn_v: QTensor
    attn_output: QTensor
    ffn_norm: jax.Array
    ffn_gate: QTensor | None
    ffn_up: QTensor | None
    ffn_down: QTensor | None
    biases: dict[str, jax.Array]
    sparse: Pytree = None
    attn_q_norm: jax.Array | None = None
    attn_k_norm: jax.Array | None = None
    post_attention_norm: jax.Array | None = None
    post_ffw_norm: jax.Array | None = None

    def bias(self, *names: str) -> tuple[jax.Array | None, ...] | None:
        """Biases of the named projections, or None if the layer has no bias at all."""
        return tuple(self.biases.get(n) for n in names) if self.biases else None

    @property
    def dense(self) -> DenseFFN:
        """The FFN's dense matrices; UserError if the layer keeps none."""
        if self.ffn_up is None or self.ffn_down is None:
            raise UserError('the FFN of this model keeps no dense matrices: load it with ffn="dense"')
        return DenseFFN(self.ffn_gate, self.ffn_up, self.ffn_down)


class Params(NamedTuple):
    """All weights of a model; an argument of every jitted function, never a closure.

    Attributes:
        embedding: QTensor [V, D].
        layers: L of them.
        output_norm: f32[D].
        output: QTensor [V, D], the embedding itself if the two are tied.
        cos, sin: f32[T, C, r/2] rotary tables of the cache's capacity (`engine.rope.model_tables`), set by whoever
            makes the cache.
    """

    embedding: QTensor
    layers: tuple[Layer, ...]
    output_norm: jax.Array
    output: QTensor
    cos: jax.Array | None = None
    sin: jax.Array | None = None


class Footprint(NamedTuple):
    """Bytes of the weights that one decoding step reads, as packed and as in the file."""

    packed: int
    file: int


def pack_matrix(tensor: TensorInfo, *, floats: bool) -> QTensor:
    """One matrix on the device; `floats` keeps its dequantised values, for kernels that compute in float32."""
    return jax.device_put(_pack(tensor, floats=floats))


def _pack(tensor: TensorInfo, *, floats: bool) -> QTensor:
    if floats:
        packed = pack_float(jnp.asarray(tensor.dequantize()), "f32")
        return replace(packed, layout=replace(packed.layout, source=tensor.type.name))
    rows, cols = tensor.shape
    on_host: tuple[Any, Layout] = pack(tensor.raw, tensor.type, (rows, cols))  # numpy's until it is placed
    return QTensor(*on_host, (rows, cols))


def pack_rows(tensor: TensorInfo, *, floats: bool) -> NeuronRows:
    """`pack_matrix` for a matrix of neurons, one row each."""
    rows, cols = tensor.shape
    if floats:
        return pack_neurons(np.ascontiguousarray(tensor.dequantize(), np.float32), GGML.F32, (rows, cols))
    return pack_neurons(tensor.raw, tensor.type, (rows, cols))


PackFFN = Callable[[dict[str, TensorInfo]], dict[str, Pytree]]
"""Tensors of a layer's FFN by short name ("ffn_up") -> fields of its `Layer`."""

FFN_NAMES = ("ffn_gate", "ffn_up", "ffn_down", "ffn_down_t", "fc1", "fc2")


def load_params(
    f: GGUFFile,
    config: ModelConfig,
    *,
    floats: bool = False,
    float_types: tuple[str, ...] = (),
    progress=None,
    pack_ffn: PackFFN | None = None,
    place: Callable[[str, Pytree], Pytree] | None = None,
) -> Params:
    """Packs every tensor of `f`.

    Args:
        f: an open file whose tensors `config` was checked against.
        floats: dequantise to float32 at load, for kernels without a quantised product.
        float_types: GGUF types that are dequantised in any case.
        progress: called with the bytes done after each tensor, or None.
        pack_ffn: packs the matrices of a layer's FFN in its own way; None makes the dense one.
        place: called by two threads with name and packed tensor, returns the one to keep (`Devices.place_tensor`).

    Raises:
        UserError: a tensor holds values that are not finite.
    """

    def load(name: str):
        t = f.tensors[name]
        if name.endswith(("norm.weight", ".bias")):
            scale = config.query_scale if name.endswith("attn_q_norm.weight") else 1.0
            out = np.array(t.dequantize(), np.float32).reshape(-1) * np.float32(scale)
        else:
            out = _pack(t, floats=floats or t.type.name in float_types)
        _check_finite(f, name, out)
        if progress is not None:
            progress(t.nbytes)
        return out if place is None else place(name, out)

    def ffn(pack_ffn: PackFFN, i: int) -> dict[str, Pytree]:
        own = {n: f.tensors[f"blk.{i}.{n}.weight"] for n in FFN_NAMES if f"blk.{i}.{n}.weight" in names}
        out = pack_ffn(own)
        for matrix in filter(_is_matrix, jax.tree.leaves(out, is_leaf=_is_matrix)):
            _check_finite(f, f"of the FFN of layer {i}", matrix)
        if progress is not None:
            progress(sum(t.nbytes for t in own.values()))
        return out

    names = [name for name, _ in config.tensor_shapes() if name != "rope_freqs.weight"]
    ours = [n for n in names if pack_ffn is None or n.split(".")[-2] not in FFN_NAMES or n.endswith(".bias")]
    with ThreadPoolExecutor(2) as pool:  # numpy's copies release the lock
        loaded = dict(zip(ours, pool.map(load, ours), strict=True))
        packed = list(pool.map(partial(ffn, pack_ffn), range(config.n_layers))) if pack_ffn else [{}] * config.n_layers

    def on_host(value: Pytree) -> bool:
        return any(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(value))

    # All that is not placed yet at once and as it is: jnp.asarray would compile programs that copy.
    loaded |= jax.device_put({name: value for name, value in loaded.items() if on_host(value)})

    def layer(i: int) -> Layer:
        fields: dict[str, Any] = {n: loaded.get(f"blk.{i}.{n}.weight") for n in (*config.layer_norms, *PROJECTIONS)}
        fields["biases"] = {n: loaded[f"blk.{i}.{n}.bias"] for n in config.projections if f"blk.{i}.{n}.bias" in loaded}
        return Layer(**fields | packed[i])

    embedding = loaded["token_embd.weight"]
    return Params(
        embedding=embedding,
        layers=tuple(map(layer, range(config.n_layers))),
        output_norm=loaded["output_norm.weight"],
        output=embedding if config.tied_output else loaded["output.weight"],
    )


def _check_finite(f: GGUFFile, name: str, value) -> None:
    """Refuses float32 data that is NaN or infinite.

    Half-precision and quantised tensors are not looked through at load: a value there that is not finite ends a
    generation with a clear error when its logits are checked.
    """
    if _is_matrix(value):
        if value.layout.codes != "f32":
            return
        value = np.asarray(value.data).view(np.float32)
    if not np.isfinite(np.asarray(value)).all():
        raise UserError(f"{f.path}: tensor {name} holds values that are not finite; the file is damaged")


def rope_factors(f: GGUFFile, config: ModelConfig) -> np.ndarray | None:
    """f32[r/2] divisors of the rotary angles (Llama 3.1), or None."""
    return f.tensors["rope_freqs.weight"].dequantize().reshape(-1) if config.rope.freq_factors else None


def footprint(params: Params, f: GGUFFile) -> Footprint:
    """Bytes that one decoding step reads: every matrix but an untied embedding, of which it reads one row.

    All neurons of a sparse FFN count, unless they stand beside dense matrices.
    """
    tied = params.output is params.embedding
    read = [layer if layer.ffn_up is None else layer._replace(sparse=None) for layer in params.layers]
    packed = sum(w.nbytes for w in jax.tree.leaves(read, is_leaf=_is_matrix) if _is_matrix(w)) + params.output.nbytes
    skip = {"rope_freqs.weight"} | (set() if tied else {"token_embd.weight"})
    return Footprint(packed=packed, file=sum(t.nbytes for n, t in f.tensors.items() if n not in skip))


def types(params: Params) -> list[str]:
    """GGUF types of the matrices, the one with the most weights first; "Q8_0 as f32" if they were dequantised."""
    sizes: Counter[str] = Counter()
    once = (params.embedding, params.layers) if params.output is params.embedding else params
    for w in filter(_is_matrix, jax.tree.leaves(once, is_leaf=_is_matrix)):
        stored, source = w.layout.codes, w.layout.source
        as_floats = w.layout.is_float and source.lower() != stored
        sizes[f"{source} as {stored}" if as_floats and source else source or stored] += math.prod(w.shape)
    return [name for name, _ in sizes.most_common()]


def _is_matrix(x) -> bool:
    return isinstance(x, QTensor | NeuronRows | Fragments | PlainMatrix)
