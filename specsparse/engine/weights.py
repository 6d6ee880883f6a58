"""The parameters of a model: a GGUF file's tensors, packed once for the kernels."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine.config import PROJECTIONS, ModelConfig
from specsparse.engine.gguf import GGUFFile, TensorInfo
from specsparse.errors import UserError
from specsparse.kernels import QTensor
from specsparse.kernels.dequant import pack_float
from specsparse.kernels.packing import pack_qtensor


class Layer(NamedTuple):
    """Weights of one layer. Matrices are [outputs, inputs], norms f32[D], biases f32[outputs] or None.

    `sparse` is what an injected sparse FFN reads: neuron-major rows and predictor weights; the dense matrices it replaces
    may then be None.
    """

    attn_norm: jax.Array
    attn_q: QTensor
    attn_k: QTensor
    attn_v: QTensor
    attn_output: QTensor
    ffn_norm: jax.Array
    ffn_gate: QTensor
    ffn_up: QTensor
    ffn_down: QTensor
    biases: dict[str, jax.Array]
    sparse: Any = None

    def bias(self, *names: str) -> tuple[jax.Array | None, ...] | None:
        """Biases of the named projections, None where there is none at all."""
        return tuple(self.biases.get(n) for n in names) if self.biases else None


class Params(NamedTuple):
    """All weights of a model; an argument of every jitted function, never a closure.

    Attributes:
        embedding: QTensor [V, D].
        layers: L of them.
        output_norm: f32[D].
        output: QTensor [V, D], the embedding itself where the two are tied.
        cos, sin: f32[C, r/2] rotary table of the cache's capacity, set by whoever makes the cache.
    """

    embedding: QTensor
    layers: tuple[Layer, ...]
    output_norm: jax.Array
    output: QTensor
    cos: jax.Array | None = None
    sin: jax.Array | None = None


@dataclass(frozen=True)
class Footprint:
    """Bytes of the weights that one decoding step reads, as packed and as in the file."""

    packed: int
    file: int


def _vector(tensor: TensorInfo) -> jax.Array:
    return jnp.asarray(np.ascontiguousarray(tensor.dequantize(), np.float32).reshape(-1))


def _matrix(tensor: TensorInfo, *, floats: bool) -> QTensor:
    """Packs one matrix; `floats` keeps its dequantised values instead, for kernels that compute in float32."""
    if floats:
        return pack_float(jnp.asarray(tensor.dequantize()), "f32")
    return pack_qtensor(tensor.raw, tensor.type, tensor.shape)


def load_params(f: GGUFFile, config: ModelConfig, *, floats: bool = False, progress=None) -> Params:
    """Packs every tensor of `f`.

    Args:
        f: an open file whose tensors `config` was checked against.
        config: the model.
        floats: dequantise to float32 at load, for the kernels that have no quantised product.
        progress: called with the bytes done after each tensor, or None.

    Raises:
        UserError: a tensor holds values that are not finite.
    """

    def tensor(name: str) -> TensorInfo:
        return f.tensors[name]

    def load(name: str):
        t = tensor(name)
        out = _vector(t) if name.endswith(("norm.weight", ".bias")) else _matrix(t, floats=floats)
        _check_finite(f, name, out)
        if progress is not None:
            progress(t.nbytes)
        return out

    names = [name for name, _ in config.tensor_shapes() if name != "rope_freqs.weight"]
    with ThreadPoolExecutor(2) as pool:  # numpy's copies release the lock
        loaded = dict(zip(names, pool.map(load, names), strict=True))
    embedding = loaded["token_embd.weight"]
    return Params(
        embedding=embedding,
        layers=tuple(_layer(loaded, i) for i in range(config.n_layers)),
        output_norm=loaded["output_norm.weight"],
        output=embedding if config.tied_output else loaded["output.weight"],
    )


def _layer(loaded: dict, i: int) -> Layer:
    prefix = f"blk.{i}."
    fields = {name: loaded[f"{prefix}{name}.weight"] for name in ("attn_norm", "ffn_norm", *PROJECTIONS)}
    biases = {name: loaded[f"{prefix}{name}.bias"] for name in PROJECTIONS if f"{prefix}{name}.bias" in loaded}
    return Layer(**fields, biases=biases)


def _check_finite(f: GGUFFile, name: str, value) -> None:
    """Refuses float32 data that is NaN or infinite.

    Half-precision and quantised tensors are not looked through at load: what is not finite there ends a generation with
    a clear error when its logits are checked.
    """
    if isinstance(value, QTensor):
        if value.layout.codes != "f32":
            return
        value = jax.lax.bitcast_convert_type(value.data.reshape(-1, 4), jnp.float32)
    if not bool(jnp.isfinite(value).all()):
        raise UserError(f"{f.path}: tensor {name} holds values that are not finite; the file is damaged")


def rope_factors(f: GGUFFile, config: ModelConfig) -> np.ndarray | None:
    """f32[r/2] divisors of the rotary angles (Llama 3.1), or None."""
    return f.tensors["rope_freqs.weight"].dequantize().reshape(-1) if config.rope.freq_factors else None


def footprint(params: Params, f: GGUFFile) -> Footprint:
    """Bytes that one decoding step reads: every matrix but an untied embedding, of which one row counts as nothing."""
    tied = params.output is params.embedding
    packed = (
        sum(w.nbytes for w in jax.tree.leaves(params.layers, is_leaf=_is_matrix) if _is_matrix(w))
        + params.output.nbytes
    )
    skip = {"rope_freqs.weight"} | (set() if tied else {"token_embd.weight"})
    return Footprint(packed=packed, file=sum(t.nbytes for n, t in f.tensors.items() if n not in skip))


def _is_matrix(x) -> bool:
    return isinstance(x, QTensor)
