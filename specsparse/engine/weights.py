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

from specsparse.engine.config import EXPERTS, PROJECTIONS, ROUTER, ModelConfig, woken
from specsparse.engine.gguf.reader import GGUFFile, TensorInfo
from specsparse.engine.pytree import Pytree
from specsparse.errors import UserError
from specsparse.kernels import Experts, Fragments, NeuronRows, PlainMatrix, QTensor, pack_neurons
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
    outputs of attention and FFN, f32[D]. `router`, [E, D] in float32, and `experts` stand in place of the FFN's
    matrices; `attn_sinks` are f32[H]. An injected sparse FFN reads `sparse`: neuron-major rows and predictor
    weights; the dense matrices that it replaces may then be None. `SkipWeights` there stand beside them, for the dense
    pass that skips zeros.
    """

    attn_norm: jax.Array | None
    attn_q: QTensor
    attn_k: QTensor
    attn_v: QTensor
    attn_output: QTensor
    ffn_norm: jax.Array | None
    ffn_gate: QTensor | None
    ffn_up: QTensor | None
    ffn_down: QTensor | None
    biases: dict[str, jax.Array]
    sparse: Pytree = None
    attn_q_norm: jax.Array | None = None
    attn_k_norm: jax.Array | None = None
    post_attention_norm: jax.Array | None = None
    post_ffw_norm: jax.Array | None = None
    attn_sinks: jax.Array | None = None
    router: QTensor | None = None
    experts: Experts | None = None

    def bias(self, *names: str) -> tuple[jax.Array | None, ...] | None:
        """Biases of the named projections, or None if the layer has no bias at all."""
        return tuple(self.biases.get(n) for n in names) if self.biases else None

    @property
    def dense(self) -> DenseFFN:
        """The FFN's dense matrices; UserError if the layer keeps none."""
        if self.ffn_up is None or self.ffn_down is None:
            hint = ": its FFN is experts" if self.experts else ': load it with ffn="dense"'
            raise UserError(f"the FFN of this model keeps no dense matrices{hint}")
        return DenseFFN(self.ffn_gate, self.ffn_up, self.ffn_down)


class Params(NamedTuple):
    """All weights of a model; an argument of every jitted function, never a closure."""

    embedding: QTensor  # [V, D]
    layers: tuple[Layer, ...]  # L
    output_norm: jax.Array  # f32[D]
    output: QTensor  # [V, D], the embedding itself if the two are tied
    # cos, sin: f32[T, C, r/2] rotary tables of the cache's capacity (`engine.rope.model_tables`), set by whoever makes
    # the cache
    cos: jax.Array | None = None
    sin: jax.Array | None = None


class Footprint(NamedTuple):
    """Bytes of the weights that one decoding step reads, as packed and as in the file."""

    packed: int
    file: int
    experts: int = 0  # of `file`, those of experts
    share: float = 1.0  # of the experts that one row reads

    def v(self, rows: int) -> float:
        """Bytes that so many rows read over those of one, if they choose experts by chance."""
        return 1 + self.experts / max(self.file, 1) * (woken(self.share, rows) / self.share - 1)


def pack_matrix(tensor: TensorInfo, *, floats: bool) -> QTensor:
    """One matrix on the device; `floats` keeps its dequantised values, for kernels that compute in float32."""
    return jax.device_put(_pack(tensor, floats=floats))


def _pack(tensor: TensorInfo, *, floats: bool) -> QTensor:
    if len(tensor.shape) == 3:  # experts, each of whole groups of rows
        count, rows, cols = tensor.shape
        flat = _pack(replace(tensor, shape=(count * rows, cols)), floats=floats)
        return QTensor(flat.data.reshape(count, -1, flat.data.shape[1]), flat.layout, (rows, cols))
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
_OF_FFN = (*FFN_NAMES, *EXPERTS)


def unfused(f: GGUFFile, config: ModelConfig) -> dict[str, TensorInfo]:
    """The tensors that a model of `config` reads, in their order; rows of a fused one are a tensor for each part."""
    out = {}
    for name in (name for name, _ in config.tensor_shapes() if name != "rope_freqs.weight"):
        block, _, rest = name.rpartition(".")[0].rpartition(".")
        tensor, at = f.tensors[name], 0
        parts = config.family.fused.get(rest, ()) if name.endswith(".weight") else ()
        for part in parts:
            shape = config.part_shape(part)
            own = replace(tensor, name=f"{block}.{part}.weight", shape=shape, raw=tensor.raw[at : at + shape[0]])
            out[own.name], at = own, at + shape[0]
        if not parts:
            out[name] = tensor
    return out


def load_params(
    f: GGUFFile, config: ModelConfig, *, floats: bool = False, float_types: tuple[str, ...] = (), progress=None,
    pack_ffn: PackFFN | None = None, place: Callable[[str, Pytree], Pytree] | None = None,
) -> Params:  # fmt: skip
    """Packs every tensor of `f`. UserError: a tensor holds values that are not finite.

    Args:
        f: an open file whose tensors `config` was checked against.
        floats: dequantise to float32 at load, for kernels without a quantised product.
        float_types: GGUF types that are dequantised in any case.
        progress: called with the bytes done after each tensor, or None.
        pack_ffn: packs the matrices of a layer's FFN in its own way; None makes the dense one.
        place: called by two threads with name and packed tensor, returns the one to keep (`Devices.place_tensor`).
    """

    tensors = unfused(f, config)

    def load(name: str):
        t = tensors[name]
        if name.endswith(("norm.weight", "sinks.weight", ".bias")):
            scale = config.query_scale if name.endswith("attn_q_norm.weight") else 1.0
            scale = config.logit_multiplier if name == "output_norm.weight" else scale
            out = np.array(t.dequantize(), np.float32) * np.float32(scale)
        else:
            out = _pack(t, floats=floats or t.type.name in float_types or f".{ROUTER}." in name)
        _check_finite(f, name, out)
        if progress is not None:
            progress(t.nbytes)
        return out if place is None else place(name, out)

    def ffn(pack_ffn: PackFFN, i: int) -> dict[str, Pytree]:
        own = {n: tensors[f"blk.{i}.{n}.weight"] for n in _OF_FFN if f"blk.{i}.{n}.weight" in tensors}
        out = pack_ffn(own)
        for matrix in filter(_is_matrix, jax.tree.leaves(out, is_leaf=_is_matrix)):
            _check_finite(f, f"of the FFN of layer {i}", matrix)
        if progress is not None:
            progress(sum(t.nbytes for t in own.values()))
        return out

    ours = [n for n in tensors if pack_ffn is None or n.split(".")[-2] not in _OF_FFN or n.endswith(".bias")]
    with ThreadPoolExecutor(2) as pool:  # numpy's copies release the lock
        loaded = dict(zip(ours, pool.map(load, ours), strict=True))
        packed = list(pool.map(partial(ffn, pack_ffn), range(config.n_layers))) if pack_ffn else [{}] * config.n_layers

    def on_host(value: Pytree) -> bool:
        return any(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(value))

    # All that is not placed yet at once and as it is: jnp.asarray would compile programs that copy.
    loaded |= jax.device_put({name: value for name, value in loaded.items() if on_host(value)})

    def layer(i: int) -> Layer:
        def weight(name: str) -> Any:
            return loaded.get(f"blk.{i}.{name}.weight")

        fields: dict[str, Any] = {n: weight(n) for n in (*config.layer_norms, *PROJECTIONS, "attn_sinks")}
        fields |= {"attn_norm": weight("attn_norm"), "ffn_norm": fields.pop(config.family.ffn_norm, None)}
        given = {n: loaded.get(f"blk.{i}.{n}.bias") for n in config.projections}
        biases: dict[str, Any] = {n: bias for n, bias in given.items() if bias is not None}
        if config.n_experts:
            of_experts = {f"{n.split('_')[1]}_bias": biases.pop(n) for n in EXPERTS if n in biases}
            gate, up, down = map(weight, EXPERTS)
            fields["experts"] = Experts(gate, up, down, config.activation, **of_experts)
            fields["router"] = weight(ROUTER)
        fields["biases"] = biases
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


def footprint(params: Params, f: GGUFFile, config: ModelConfig) -> Footprint:
    """Bytes that one decoding step reads: every matrix but an untied embedding, of which it reads one row.

    All neurons of a sparse FFN count, unless they stand beside dense matrices, and of the experts those of one row.
    """

    def nbytes(tree: Pytree) -> int:
        return sum(w.nbytes for w in jax.tree.leaves(tree, is_leaf=_is_matrix) if _is_matrix(w))

    def without_copies(layer: Layer) -> Layer:
        if layer.experts is not None:
            return layer._replace(experts=replace(layer.experts, skip=None))
        return layer if layer.ffn_up is None else layer._replace(sparse=None)

    read = list(map(without_copies, params.layers))
    share = config.share_read(f"{EXPERTS[0]}.weight")
    packed = nbytes(read) - round((1 - share) * nbytes([layer.experts for layer in read])) + params.output.nbytes
    skip = {"rope_freqs.weight"} | (set() if params.output is params.embedding else {"token_embd.weight"})
    each = {name: t.nbytes * config.share_read(name) for name, t in f.tensors.items() if name not in skip}
    experts = sum(size for name, size in each.items() if config.share_read(name) < 1)
    return Footprint(packed, round(sum(each.values())), round(experts), share)


def types(params: Params) -> list[str]:
    """GGUF types of the matrices, the one with the most weights first; "Q8_0 as f32" if they were dequantised."""
    sizes: Counter[str] = Counter()
    once = (params.embedding, params.layers) if params.output is params.embedding else params
    for w in filter(_is_matrix, jax.tree.leaves(once, is_leaf=_is_matrix)):
        stored, source = w.layout.codes, w.layout.source
        as_floats = w.layout.is_float and source.lower() != stored
        count = math.prod(w.shape) * (len(w.data) if isinstance(w, QTensor) and w.data.ndim == 3 else 1)
        sizes[f"{source} as {stored}" if as_floats and source else source or stored] += count
    return [name for name, _ in sizes.most_common()]


def _is_matrix(x) -> bool:
    return isinstance(x, QTensor | NeuronRows | Fragments | PlainMatrix)
