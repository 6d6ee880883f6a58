"""The roofline: what a forward pass reads and computes, what devices can do, and so how long it takes at best.

Bytes are read once a forward, whatever the number of rows; that is what verifying several tokens at once lives on.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from specsparse.data.devices import THIS, Device, known, sheets
from specsparse.engine.config import ModelConfig
from specsparse.engine.gguf.reader import GGUFFile
from specsparse.engine.windows import WHOLE, LayerWindows
from specsparse.kernels import peaks, processor

KV_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "q8_0": 34 / 32}
"""Bytes of an element of the cache."""
_FLOATS = {"F32": "f32", "F16": "f16", "BF16": "f16"}


def bits_per_weight(type_name: str) -> float:
    """Bits of a weight of a GGUF type, scales included."""
    elements, size = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    return 8 * size / elements


def kv_bytes(config: ModelConfig, tokens: float, kv_dtype: str) -> float:
    """Bytes that hold the keys and values of `tokens` positions in one of `KV_BYTES`; a window spares none."""
    return 2.0 * config.n_layers * config.n_kv_heads * config.head_dim * tokens * KV_BYTES[kv_dtype]


@dataclass(frozen=True)
class Matrix:
    """A tensor that every forward reads.

    Attributes:
        type_name: GGUF type.
        nbytes: in the file.
        macs_per_row: multiply-adds a row; 0 for norms and biases.
    """

    type_name: str
    nbytes: float
    macs_per_row: float


@dataclass(frozen=True)
class Traffic:
    """Bytes and multiply-adds of a model's forward pass.

    Attributes:
        matrices: all that is read; an untied embedding is not (one row of it counts as nothing).
        kv_bytes_per_token: keys and values of one position, all layers.
        attention_macs: multiply-adds of one row with one position, all layers.
        windows: of the layers; positions outside are neither read nor multiplied.
    """

    matrices: tuple[Matrix, ...]
    kv_bytes_per_token: float
    attention_macs: float
    windows: LayerWindows = WHOLE

    @classmethod
    def from_gguf(cls, f: GGUFFile, config: ModelConfig, *, kv_dtype: str = "f16") -> "Traffic":
        """The traffic of an open file: each tensor in its own type."""
        tensors = ((name, t.type.name, t.nbytes) for name, t in f.tensors.items())
        return cls.from_tensors(config, tensors, kv_dtype=kv_dtype)

    @classmethod
    def from_tensors(
        cls, config: ModelConfig, tensors: Iterable[tuple[str, str, float]], *, kv_dtype: str = "f16"
    ) -> "Traffic":
        """The traffic of tensors given as (name, GGUF type, bytes); those that a forward does not read are left out."""
        shapes = dict(config.tensor_shapes())
        matrices = []
        for name, kind, nbytes in tensors:
            shape = shapes.get(name)
            unread = name == "rope_freqs.weight" or (name == "token_embd.weight" and not config.tied_output)
            if shape is not None and not unread:
                matrices.append(Matrix(kind, nbytes, shape[0] * shape[1] if len(shape) == 2 else 0))
        attention = 2 * config.n_layers * config.n_heads * config.head_dim  # scores and values
        return cls(tuple(matrices), kv_bytes(config, 1, kv_dtype), attention, LayerWindows.of(config))

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
        """By arithmetic: matrices that are quantised are multiplied in int8."""
        out: Counter[str] = Counter()
        for m in self.matrices:
            out[_FLOATS.get(m.type_name, "int8")] += m.macs_per_row
        return dict(out)

    def requantised(self, type_name: str) -> "Traffic":
        """The same model with every matrix in another type (norms and biases stay)."""
        bits = bits_per_weight(type_name)
        matrices = (
            Matrix(type_name, m.macs_per_row * bits / 8, m.macs_per_row) if m.macs_per_row else m for m in self.matrices
        )
        return replace(self, matrices=tuple(matrices))


def get_device(name: str) -> Device:
    """The device of that name; "this" is measured here, in a fraction of a second.

    Raises:
        UserError: an unknown name.
    """
    return measure_device() if known(name) == THIS else sheets()[name]


def measure_device(rounds: int = 3) -> Device:
    """This machine: the best of `rounds` measurements of each figure, on the kernels' own threads."""
    buffer = peaks.ReadBuffer()
    read = max(buffer.rate() for _ in range(rounds))
    int8 = [rate for rate in (peaks.int8_rate() for _ in range(rounds)) if rate is not None]
    f32 = max(peaks.f32_rate() for _ in range(rounds))
    title = processor.cpu_info()["model"]
    return Device(THIS, title, read, f32, None, max(int8) if int8 else None, overlap=0.0, measured=True)


@dataclass(frozen=True)
class Roofline:
    """A forward takes as long as the slower of its reading and its arithmetic; no time a real run takes is shorter."""

    device: Device
    traffic: Traffic

    def memory_s(self, n: int, kv_length: float = 0, batch: int = 1) -> float:
        """Seconds to read the weights once and the caches of `batch` sequences."""
        return self.traffic.read_bytes(n, kv_length, batch) / self.device.bandwidth

    def compute_s(self, n: int, kv_length: float = 0, batch: int = 1) -> float:
        """Seconds of the multiply-adds of n rows a sequence."""
        return sum(m / self.device.peak(kind) for kind, m in self.traffic.macs(n, kv_length, batch).items())

    def forward_s(self, n: int = 1, kv_length: float = 0, batch: int = 1) -> float:
        """Seconds of a forward of n rows a sequence after `kv_length` tokens: max(compute, memory)."""
        return max(self.memory_s(n, kv_length, batch), self.compute_s(n, kv_length, batch))

    def v(self, n: int, kv_length: float = 0) -> float:
        """v(n): time of an n-row forward over that of one row."""
        return self.forward_s(n, kv_length) / self.forward_s(1, kv_length)

    def tokens_per_second(self, kv_length: float = 0, batch: int = 1) -> float:
        """Plain decoding, all sequences together."""
        return batch / self.forward_s(1, kv_length, batch)

    def balance(self, limit: int = 512) -> int:
        """Rows up to which v(n) is 1 because reading takes longer, at most `limit`; 0 if one row is too many."""
        return next((n - 1 for n in range(1, limit + 1) if self.compute_s(n) > self.memory_s(n)), limit)
