"""What a forward pass must read and compute: bytes by tensor and cache, multiply-adds by arithmetic.

Bytes are read once a forward, whatever the number of rows; that is what verifying several tokens at once lives on.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from specsparse.engine.config import ModelConfig
from specsparse.engine.gguf.reader import GGUFFile
from specsparse.engine.windows import WHOLE, LayerWindows

KV_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "q8_0": 34 / 32}
"""Bytes of an element of the cache."""

_EMBEDDING = "token_embd.weight"
_FLOATS = {"F32": "f32", "F16": "f16", "BF16": "f16"}


def arithmetic(type_name: str) -> str:
    """What a matrix of this GGUF type is multiplied in: "int8" where it is quantised, else "f16" or "f32"."""
    return _FLOATS.get(type_name, "int8")


def bits_per_weight(type_name: str) -> float:
    """Bits of a weight of a GGUF type, scales included."""
    elements, size = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    return 8 * size / elements


@dataclass(frozen=True)
class Matrix:
    """A tensor that every forward reads. `macs_per_row` is 0 for norms and biases.

    Attributes:
        type_name: GGUF type.
        nbytes: in the file.
        macs_per_row: multiply-adds a row.
    """

    type_name: str
    nbytes: float
    macs_per_row: float


@dataclass(frozen=True)
class Traffic:
    """Bytes and multiply-adds of a model's forward pass.

    Attributes:
        matrices: all that is read; an untied embedding is not (one row of it counts as nothing).
        kv_bytes_per_token: of all layers' keys and values of one position.
        attention_macs: multiply-adds of one row with one position, all layers.
        windows: of the layers; what lies outside is neither read nor multiplied.
    """

    matrices: tuple[Matrix, ...]
    kv_bytes_per_token: float
    attention_macs: float
    windows: LayerWindows = WHOLE

    @cached_property
    def weight_bytes(self) -> float:
        """Bytes of weights a forward reads."""
        return sum(m.nbytes for m in self.matrices)

    def by_type(self) -> dict[str, float]:
        """Bytes by GGUF type, the most first."""
        size: Counter[str] = Counter()
        for m in self.matrices:
            size[m.type_name] += m.nbytes
        return dict(size.most_common())

    def read_bytes(self, rows: int, kv_length: float, batch: int = 1) -> float:
        """Bytes a forward of `rows` rows in each of `batch` sequences reads, `kv_length` tokens before the first."""
        return self.weight_bytes + batch * self.kv_bytes_per_token * self.windows.read(rows, kv_length)

    def macs(self, rows: int, kv_length: float, batch: int = 1) -> dict[str, float]:
        """Multiply-adds of a forward, by arithmetic. Row i attends to kv_length + i + 1 positions, or to a window."""
        out = {kind: batch * rows * macs for kind, macs in self._macs_a_row.items()}
        attention = batch * self.windows.attended(rows, kv_length) * self.attention_macs
        return {**out, "f16": out.get("f16", 0) + attention}

    @cached_property
    def _macs_a_row(self) -> dict[str, float]:
        """Of all matrices, by arithmetic."""
        out: Counter[str] = Counter()
        for m in self.matrices:
            out[arithmetic(m.type_name)] += m.macs_per_row
        return dict(out)

    def requantised(self, type_name: str) -> "Traffic":
        """The same model with every matrix in another type (norms and biases stay)."""
        bits = bits_per_weight(type_name)
        matrices = (
            Matrix(type_name, m.macs_per_row * bits / 8, m.macs_per_row) if m.macs_per_row else m for m in self.matrices
        )
        return replace(self, matrices=tuple(matrices))


def kv_bytes(config: ModelConfig, tokens: float, kv_dtype: str) -> float:
    """Bytes that hold the keys and values of `tokens` positions in one of `KV_BYTES`; a window spares none."""
    return 2.0 * config.n_layers * config.n_kv_heads * config.head_dim * tokens * KV_BYTES[kv_dtype]


def from_gguf(f: GGUFFile, config: ModelConfig, *, kv_dtype: str = "f16") -> Traffic:
    """The traffic of an open file: each tensor in its own type."""
    tensors = ((name, t.type.name, t.nbytes) for name, t in f.tensors.items())
    return of_tensors(config, tensors, kv_dtype=kv_dtype)


def of_tensors(config: ModelConfig, tensors: Iterable[tuple[str, str, float]], *, kv_dtype: str = "f16") -> Traffic:
    """The traffic of tensors given as (name, GGUF type, bytes); those that a forward does not read are left out."""
    shapes = dict(config.tensor_shapes())
    matrices = []
    for name, kind, nbytes in tensors:
        shape = shapes.get(name)
        if shape is None or name == "rope_freqs.weight" or (name == _EMBEDDING and not config.tied_output):
            continue
        matrices.append(Matrix(kind, nbytes, shape[0] * shape[1] if len(shape) == 2 else 0))
    attention = 2 * config.n_layers * config.n_heads * config.head_dim  # scores and values
    return Traffic(tuple(matrices), kv_bytes(config, 1, kv_dtype), attention, LayerWindows.of(config))
