"""A head's file: GGUF of an architecture of its own, read for one target. Those that travel with specsparse have
names."""

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from gguf.constants import GGMLQuantizationType
from jax.typing import ArrayLike

from specsparse.engine.config import ModelConfig
from specsparse.engine.gguf.reader import GGUFFile, TensorInfo, open_gguf
from specsparse.engine.gguf.writer import NewTensor, write_gguf
from specsparse.engine.model import Model
from specsparse.engine.weights import Layer, pack_matrix
from specsparse.errors import UserError
from specsparse.kernels import QTensor
from specsparse.speculative.drafters.heads.head_source import HeadParams, Input
from specsparse.speculative.drafters.heads.published_file import matrix_type

ARCHITECTURE = "specsparse-head"
"""`general.architecture` of these files."""
TARGET, DRAFT_IDS, VOCAB_SIZE, BELOW = (
    f"{ARCHITECTURE}.{key}" for key in ("target", "draft_ids", "vocab_size", "layers_below")
)
"""Keys: `fingerprint` of the target, ids of the head's columns in ascending order, size of the target's vocabulary, ids
of the layers whose entering rows the head reads beside the last ones (absent where it reads none)."""
SHIPPED = Path(__file__).parents[3] / "data" / "heads"
"""Heads that travel with specsparse, by file name."""
NORMS = ("hidden_norm", "token_norm", "output_norm")
LAYER_MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


@dataclass(frozen=True)
class HeadFile:
    """What a head's file holds for a target.

    Attributes:
        params: the packed weights.
        ids: int32[N], ascending, the target's ids of its columns.
        below: ids of the layers whose entering rows it reads beside the last ones.
        path: the file.
    """

    params: HeadParams
    ids: np.ndarray
    below: tuple[int, ...]
    path: Path


def fingerprint(output_norm: ArrayLike) -> str:
    """What a target is known by, however its matrices are quantised: a hash of its output norm f32[D]."""
    return hashlib.sha256(np.asarray(output_norm, np.float32).tobytes()).hexdigest()[:16]


def find(spec: str | Path | None, output_norm: ArrayLike | None) -> Path:
    """The file of a head: a path, the name of a shipped one, or None for the shipped one that fits the target.

    Raises:
        UserError: there is none.
    """
    shipped = sorted(SHIPPED.glob("*.gguf"))
    if spec is None:
        if (own := shipped_for(output_norm)) is not None:
            return own.path
        raise UserError("no head was trained for this model: give drafter.head=FILE, or +experiment=train_drafter")
    for path in (SHIPPED / f"{spec}.gguf", Path(os.path.expanduser(spec))):
        if path.is_file():
            return path
    names = ", ".join(path.stem for path in shipped) or "none"
    raise UserError(f"drafter.head={spec}: no such file; heads with a name: {names}")


def shipped_for(output_norm: ArrayLike | None) -> GGUFFile | None:
    """The head that travels with specsparse for a target of that output norm f32[D], open; None where there is none."""
    wanted = fingerprint(output_norm)
    return next((f for f in map(open_gguf, sorted(SHIPPED.glob("*.gguf"))) if f.get(TARGET, "str", "") == wanted), None)


def matrix_shapes(config: ModelConfig, below: int = 0) -> dict[str, tuple[int, int]]:
    """Shapes [outputs, inputs] of a head's matrices by tensor name, of one that reads so many layers below."""
    D, F = config.d_model, config.d_ff
    q, kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    layer = dict(zip(LAYER_MATRICES, ((q, D), (kv, D), (kv, D), (D, q), (F, D), (F, D), (D, F)), strict=True))
    return {
        "fc_hidden.weight": (D, D),
        "fc_token.weight": (D, D),
        **({"fc_own.weight": (D, D)} if below else {}),
        **{f"fc_below.{i}.weight": (D, D) for i in range(below)},
        **{f"blk.0.{name}.weight": shape for name, shape in layer.items()},
    }


def vector_names(below: int = 0) -> tuple[str, ...]:
    """Names of the norms f32[D]."""
    names = ("own_norm", *(f"below_norm.{i}" for i in range(below))) if below else ()
    further = (f"{name}.weight" for name in names)
    own = (f"{name}.weight" for name in NORMS)
    return (*own, *further, "blk.0.attn_norm.weight", "blk.0.ffn_norm.weight")


def read_head(path: Path, config: ModelConfig, *, floats: bool) -> HeadFile:
    """Reads a head for a target of that config; `floats` keeps float32 for kernels without quantised products.

    Raises:
        UserError: another kind of file, or a head for a model of other shapes.
    """
    f = open_gguf(path)
    if f.get("general.architecture", "str", "") != ARCHITECTURE:
        raise UserError(f"{path}: is no head; +experiment=train_drafter makes one")
    size = f.get(VOCAB_SIZE, "int")
    if size != config.vocab_size:
        raise UserError(f"{path}: is a head for {size} ids, the target has {config.vocab_size}")
    below = _below(f, config)
    count = len(below)
    get = _reader(f, {**matrix_shapes(config, count), **dict.fromkeys(vector_names(count), (config.d_model,))})

    def matrix(name: str) -> QTensor:
        return pack_matrix(get(f"{name}.weight"), floats=floats)

    def vector(name: str):
        return jnp.asarray(get(f"{name}.weight").dequantize().astype(np.float32).reshape(-1))

    fields = {name: matrix(f"blk.0.{name}") for name in LAYER_MATRICES}
    norms = {name: vector(f"blk.0.{name}") for name in ("attn_norm", "ffn_norm")}
    params = HeadParams(
        fc_hidden=matrix("fc_hidden"),
        fc_token=matrix("fc_token"),
        layer=Layer(**fields, **norms, biases={}),
        **{name: vector(name) for name in NORMS},
        below=tuple(Input(vector(f"below_norm.{i}"), matrix(f"fc_below.{i}")) for i in range(count)),
        own=Input(vector("own_norm"), matrix("fc_own")) if count else None,
    )
    return HeadFile(params, _ids(f, config), below, path)


def _below(f: GGUFFile, config: ModelConfig) -> tuple[int, ...]:
    found = f.get_numbers(BELOW)
    ids = () if found is None else tuple(int(i) for i in found)
    if any(not 0 <= i <= config.n_layers for i in ids):
        raise UserError(f"{f.path}: {BELOW}={list(ids)}: the target has layers 0 to {config.n_layers}")
    return ids


def _reader(f: GGUFFile, shapes: dict[str, tuple[int, ...]]) -> Callable[[str], TensorInfo]:
    """Tensors by name, checked against their shapes."""

    def get(name: str) -> TensorInfo:
        if name not in f.tensors:
            raise UserError(f"{f.path}: tensor {name} is missing")
        found = f.tensors[name]
        if tuple(found.shape) != shapes[name]:
            raise UserError(f"{f.path}: tensor {name} is {tuple(found.shape)}, the target needs {shapes[name]}")
        return found

    return get


def _ids(f: GGUFFile, config: ModelConfig) -> np.ndarray:
    ids = f.get_numbers(DRAFT_IDS)
    if ids is None or not len(ids) or (np.diff(ids) <= 0).any() or ids[0] < 0 or ids[-1] >= config.vocab_size:
        raise UserError(f"{f.path}: {DRAFT_IDS} must hold ascending ids below {config.vocab_size}")
    return np.asarray(ids, np.int32)


def write_head(
    path: Path, target: Model, tensors: Mapping[str, np.ndarray], ids: np.ndarray, *, quant: str = "F32",
    name: str = "", below: Sequence[int] = (),
) -> Path:  # fmt: skip
    """Writes a head; the file appears whole or not at all.

    Args:
        path: the file, overwritten.
        target: the model it is for.
        tensors: float32 by name, `matrix_shapes` and `vector_names` say which.
        ids: int32[N], ascending, the target's ids of its columns.
        quant: type of the matrices: F32, F16, Q8_0, Q4_0, Q4_1 or whatever else gguf can write.
        name: `general.name`.
        below: ids of the layers whose entering rows it reads beside the last ones.

    Raises:
        UserError: a type that cannot be written, or that does not fit the width.
    """
    kind = matrix_type(quant, matrix_shapes(target.config).values(), path)
    keys = {
        "general.architecture": ARCHITECTURE,
        "general.name": name or path.stem,
        TARGET: fingerprint(target.params.output_norm),
        VOCAB_SIZE: target.config.vocab_size,
        DRAFT_IDS: np.asarray(ids, np.int32),
    }
    if below:
        keys[BELOW] = np.asarray(below, np.int32)
    vector = GGMLQuantizationType.F32
    return write_gguf(
        path, keys, [NewTensor.of(key, value, vector if value.ndim == 1 else kind) for key, value in tensors.items()]
    )
