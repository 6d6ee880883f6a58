"""The roofline: what a forward pass reads and computes, what devices can do, and so how long it takes at best.

Bytes are read once a forward, whatever the number of rows, so verifying several tokens at once costs little. A model
need not be here: `outline` reads its shape and tensor types from a file's header or from the catalogue.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from specsparse.data.devices import THIS, Device, known, sheets
from specsparse.engine.architectures import ARCHITECTURES
from specsparse.engine.cache import WHOLE, LayerWindows
from specsparse.engine.config import ModelConfig, woken
from specsparse.engine.gguf.reader import GGUFFile, open_gguf, show
from specsparse.engine.rope import RopeConfig
from specsparse.engine.text.tokenizer import Tokenizer
from specsparse.errors import UserError, refuse
from specsparse.kernels import processor
from specsparse.models import catalogue, hub
from specsparse.models.catalogue import Shape
from specsparse.speculative import vocab
from specsparse.support.hub_names import is_reference

KV_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "q8_0": 34 / 32}
"""Bytes of an element of the cache."""
KERNELS_A_LAYER = 10
"""Kernels that a layer is on an accelerator: two norms, queries to values, rotation and cache, attention, its output,
gate and up, activation, down, and the sums."""
_FLOATS = {"F32": "f32", "F16": "f16", "BF16": "f16"}
_PADDING = 0.01  # rows beyond the vocabulary, as a share of it


def bits_per_weight(type_name: str) -> float:
    """Bits of a weight of a GGUF type, scales included."""
    elements, size = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    return 8 * size / elements


def kv_bytes(config: ModelConfig, tokens: float, kv_dtype: str) -> float:
    """Bytes that hold the keys and values of `tokens` positions in one of `KV_BYTES`; a window spares none."""
    return 2.0 * config.n_layers * config.n_kv_heads * config.head_dim * tokens * KV_BYTES[kv_dtype]


@dataclass(frozen=True)
class Matrix:
    """A tensor that forwards read: GGUF type, bytes, and multiply-adds a row (0 for norms and biases).

    `share` is the part of it that one row reads: of E experts the k that it chooses.
    """

    type_name: str
    nbytes: float
    macs_per_row: float
    share: float = 1.0

    def read(self, rows: float, batch: int = 1, overlap: float | None = None) -> float:
        """Bytes that `rows` rows in each of `batch` sequences read; `overlap` as for `woken`."""
        return self.nbytes * woken(self.share, rows, overlap, batch)


@dataclass(frozen=True)
class Traffic:
    """Bytes and multiply-adds of a model's forward pass."""

    matrices: tuple[Matrix, ...]  # all that is read; an untied embedding is not (one row of it counts as nothing)
    kv_bytes_per_token: float  # keys and values of one position, all layers
    attention_macs: float  # multiply-adds of one row with one position, all layers
    windows: LayerWindows = WHOLE  # of the layers; positions outside are neither read nor multiplied
    overlap: float | None = None  # part of a row's experts that the row before it has too; None: they are by chance

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
                share = config.share_read(name)
                weights = 0 if len(shape) == 1 or name.endswith(".bias") else math.prod(shape) * share
                matrices.append(Matrix(kind, nbytes, weights, share))
        attention = 2 * config.n_layers * config.n_heads * config.head_dim  # scores and values
        return cls(tuple(matrices), kv_bytes(config, 1, kv_dtype), attention, LayerWindows.from_config(config))

    @cached_property
    def weight_bytes(self) -> float:
        return self.read_weights(1)

    def read_weights(self, rows: float, batch: int = 1) -> float:
        return sum(m.read(rows, batch, self.overlap) for m in self.matrices)

    def by_type(self) -> dict[str, float]:
        """Bytes of `weight_bytes` by GGUF type, the most first."""
        size: defaultdict[str, float] = defaultdict(float)
        for m in self.matrices:
            size[m.type_name] += m.read(1)
        return dict(sorted(size.items(), key=lambda item: -item[1]))

    def read_bytes(self, rows: float, kv_length: float, batch: int = 1) -> float:
        """Bytes a forward of `rows` rows in each of `batch` sequences reads, `kv_length` tokens before the first."""
        return self.read_weights(rows, batch) + batch * self.kv_bytes_per_token * self.windows.read(rows, kv_length)

    @cached_property
    def macs_a_row(self) -> dict[str, float]:
        """Multiply-adds of the matrices a row, by arithmetic: quantised ones are multiplied in int8."""
        out: defaultdict[str, float] = defaultdict(float)
        for m in self.matrices:
            out[_FLOATS.get(m.type_name, "int8")] += m.macs_per_row
        return dict(out)

    def macs(self, rows: float, kv_length: float, batch: int = 1) -> dict[str, float]:
        """Multiply-adds of a forward, by arithmetic. Row i attends to kv_length + i + 1 positions, or to a window."""
        out = {kind: batch * rows * macs for kind, macs in self.macs_a_row.items()}
        attention = batch * self.windows.attended(rows, kv_length) * self.attention_macs
        return {**out, "f16": out.get("f16", 0) + attention}

    def requantised(self, type_name: str) -> "Traffic":
        """The same model with every matrix in another type (norms and biases stay)."""
        bits = bits_per_weight(type_name)
        matrices = (
            replace(m, type_name=type_name, nbytes=m.macs_per_row / m.share * bits / 8) if m.macs_per_row else m
            for m in self.matrices
        )
        return replace(self, matrices=tuple(matrices))


@dataclass(frozen=True)
class ModelOutline:
    """A model's shape and tensors; no weights."""

    name: str
    config: ModelConfig
    tensors: tuple[tuple[str, str, float], ...]  # (name, GGUF type, bytes) of each
    source: str  # where that is from, in words
    path: Path | None = None  # the file, if it is on this machine; `file` is an open header
    file: GGUFFile | None = None

    @classmethod
    def from_file(cls, name: str, path: Path, *, source: str = "the header of the file") -> "ModelOutline":
        f = open_gguf(path)
        config = ModelConfig.from_gguf(f)
        tensors = tuple((key, t.type.name, float(t.nbytes)) for key, t in f.tensors.items())
        return cls(name, config, tensors, source, None if hub.is_header(path) else path, f)

    @classmethod
    def from_shape(cls, name: str, shape: Shape) -> "ModelOutline":
        """The outline of a shape of the catalogue. UserError: an architecture that is not supported."""
        known = ", ".join(ARCHITECTURES)
        wrong = f"architecture {show(shape.architecture)} is not supported; supported are {known}"
        refuse({wrong: shape.architecture not in ARCHITECTURES}, name)
        config = config_from_shape(shape)
        typed = shape.typed(config.tensor_shapes())
        tensors = tuple((key, kind, math.prod(size) * bits_per_weight(kind) / 8) for key, kind, size in typed)
        return cls(name, config, tensors, f"its shape in the catalogue, weights in {shape.weights}")

    @cached_property
    def nbytes(self) -> float:
        return sum(size for _, _, size in self.tensors)

    def traffic(self, *, kv_dtype: str = "f16", layers: tuple[int, ...] | None = None) -> Traffic:
        """The traffic of a forward; `layers`: of those alone, and the output."""
        left_out = [f"blk.{i}." for i in range(self.config.n_layers) if layers is not None and i not in layers]
        kept = [t for t in self.tensors if not any(t[0].startswith(prefix) for prefix in left_out)]
        whole = Traffic.from_tensors(self.config, kept, kv_dtype=kv_dtype)
        share = 1.0 if layers is None else len(layers) / self.config.n_layers
        cache, attention = whole.kv_bytes_per_token * share, whole.attention_macs * share
        return replace(whole, kv_bytes_per_token=cache, attention_macs=attention)

    def kernels(self, layers: int | None = None) -> int:
        """Kernels that a forward starts on an accelerator."""
        return KERNELS_A_LAYER * (self.config.n_layers if layers is None else layers) + 2

    def kv_bytes(self, tokens: float, kv_dtype: str = "f16") -> float:
        return kv_bytes(self.config, tokens, kv_dtype)


def outline(spec: str) -> ModelOutline:
    """The model of a name, a path or a reference to the Hub; weights are neither needed nor read. UserError: an unknown
    name, a file that is no model, or a model that is not here and whose shape nobody knows."""
    if is_reference(spec):
        return ModelOutline.from_file(spec, hub.download_header(spec), source="its header on the Hub")
    entry = catalogue.find(spec)
    if entry is None:
        return ModelOutline.from_file(spec, catalogue.resolve(spec))
    path = catalogue.locate(entry, make=True)
    if path is not None and not path.is_dir():
        return ModelOutline.from_file(spec, path)
    if entry.shape is None:
        raise UserError(f"{spec} is not on this machine and the catalogue has no shape of it: give the file")
    return ModelOutline.from_shape(spec, entry.shape)


def config_from_shape(shape: Shape) -> ModelConfig:
    """The config of a shape; what no traffic depends on (epsilon, base of the rotation) is made up."""
    family, head_dim = ARCHITECTURES[shape.architecture], shape.head_dim or shape.width // shape.heads
    return ModelConfig(
        architecture=shape.architecture, n_layers=shape.layers, d_model=shape.width, n_heads=shape.heads,
        n_kv_heads=shape.kv_heads or shape.heads, head_dim=head_dim, d_ff=shape.ff, vocab_size=shape.vocab,
        context_length=shape.context, norm_eps=1e-5, rope=RopeConfig(10000.0, head_dim, family.pairing),
        tied_output=shape.tied, biases=family.biases, activation=family.activation, window=shape.window,
        full_every=family.full_every if shape.window else 0, n_experts=shape.experts or 0, n_chosen=shape.chosen or 0,
    )  # fmt: skip


def another_vocabulary(target: ModelOutline, draft: ModelOutline) -> str | None:
    """A line if the draft model cannot draft the target's ids, and why; None if the two fit.

    Of shapes only the sizes are compared; a difference of a hundredth is taken for a padded matrix.
    """
    if target.file is not None and draft.file is not None:
        differences = vocab.compare(
            *(Tokenizer.from_metadata(f.metadata, where=str(f.path)) for f in (target.file, draft.file))
        )
        special, why = all(d.special for d in differences), None
        if differences and special:
            why = "special ids differ; drafter.special_tokens=target goes on with the target's"
        elif differences:
            why = "its vocabulary is another; drafter.vocabulary=tli or slem drafts all the same, less often"
        return why and f"{draft.name}: {why}"
    own, wanted = draft.config.vocab_size, target.config.vocab_size
    alike = abs(own - wanted) <= _PADDING * wanted
    return None if alike else f"{draft.name}: {own} ids, the target has {wanted}: is it a pair?"


def get_device(name: str) -> Device:
    """The device of that name; "this" is measured here, in a fraction of a second. UserError: an unknown name."""
    return measure_device() if known(name) == THIS else sheets()[name]


def measure_device() -> Device:
    """This machine: the best of three measurements of each figure, on the kernels' own threads."""
    buffer, figures = processor.ReadBuffer(), (processor.int8_rate, processor.f32_rate)
    read = max(buffer.rate() for _ in range(3))
    int8, f32 = (max((rate for _ in range(3) if (rate := figure()) is not None), default=None) for figure in figures)
    assert f32 is not None  # int8 alone needs the native library
    return Device(THIS, processor.cpu_info()["model"], read, f32, None, int8, overlap=0.0, measured=True)


@dataclass(frozen=True)
class Roofline:
    """A forward takes as long as the slower of its reading and its arithmetic; no time a real run takes is shorter."""

    device: Device
    traffic: Traffic

    def memory_s(self, n: float, kv_length: float = 0, batch: int = 1) -> float:
        """Seconds to read the weights once and the caches of `batch` sequences."""
        return self.traffic.read_bytes(n, kv_length, batch) / self.device.bandwidth

    def compute_s(self, n: float, kv_length: float = 0, batch: int = 1) -> float:
        """Seconds of the multiply-adds of n rows a sequence."""
        return sum(m / self.device.peak(kind) for kind, m in self.traffic.macs(n, kv_length, batch).items())

    def forward_s(self, n: float = 1, kv_length: float = 0, batch: int = 1) -> float:
        """Seconds of a forward of n rows a sequence after `kv_length` tokens: max(compute, memory)."""
        return max(self.memory_s(n, kv_length, batch), self.compute_s(n, kv_length, batch))

    def v(self, n: float, kv_length: float = 0) -> float:
        """v(n): time of an n-row forward over that of one row."""
        return self.forward_s(n, kv_length) / self.forward_s(1, kv_length)

    def tokens_per_second(self, kv_length: float = 0, batch: int = 1) -> float:
        """Speed of plain decoding, the tokens of all sequences together."""
        return batch / self.forward_s(1, kv_length, batch)

    def balance(self) -> int:
        """Rows up to which v(n) is 1 because reading takes longer, at most 512; 0 if one row is too many."""
        return next((n - 1 for n in range(1, 513) if self.compute_s(n) > self.memory_s(n)), 512)
