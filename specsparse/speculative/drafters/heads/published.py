"""Heads that other projects publish: what their files have in common, and what their specs do."""

import abc
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import ArrayLike

from specsparse.engine.config import MAX_CONTEXT, SCALINGS, RopeConfig
from specsparse.engine.gguf.reader import GGUFFile, TensorInfo, can_dequantise, show
from specsparse.engine.gguf.writer import NewTensor, encode, write_gguf
from specsparse.engine.model import Model
from specsparse.engine.rope import rope_tables
from specsparse.engine.weights import pack_matrix
from specsparse.errors import UserError, refuse
from specsparse.kernels import QTensor
from specsparse.speculative.drafters.heads.feature_source import FeatureSource, of_target
from specsparse.speculative.drafters.sources import DraftWeights
from specsparse.speculative.drafters.spec import DrafterSpec, Load, LoadedDrafter
from specsparse.support.files import Json
from specsparse.support.hub_names import is_reference
from specsparse.support.options import instance_of


@dataclass(frozen=True)
class LayerShape:
    width: int  # D, of the head's rows
    # heads, kv_heads, head_dim: H, G, d of its attention
    heads: int
    kv_heads: int
    head_dim: int
    d_ff: int  # F, neurons
    eps: float  # of every RMS norm


class PublishedWeights(NamedTuple):
    """The weights of a head, beside its output matrix."""

    layers: Any  # all but embedding and output matrix
    # cos, sin: f32[positions, d/2], its own rotary table
    cos: jax.Array
    sin: jax.Array
    embedding: QTensor | None  # [V, D]; None for the target's


EMBEDDING, OUTPUT, DRAFT_IDS, ROPE_FACTORS = "token_embd.weight", "output.weight", "d2t", "rope_freqs.weight"
"""Optional tensors of a file. Without the first two, embedding and output matrix are the target's, for all its ids."""
MAX_SIZE = 1 << 24
LAYER_KEYS = frozenset({
    "block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
    "attention.head_count_kv", "attention.layer_norm_rms_epsilon", "attention.key_length", "attention.value_length",
    "rope.freq_base", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.attn_factor", "vocab_size", "target_layers",
    "target_hidden_size",
})  # fmt: skip
"""Keys behind the architecture that both kinds of heads have."""


@dataclass(frozen=True, eq=False, kw_only=True)
class PublishedHead(abc.ABC):
    """A head as its file describes it, in any of its forms."""

    architecture: ClassVar[str]  # `general.architecture` of its GGUF files
    what: ClassVar[str]  # names the kind in messages

    path: Path  # the file or folder
    shape: LayerShape  # of its layers, and its options
    rope: RopeConfig  # the rotary embedding; `rope_factors` divide its angles (f32[d/2]) or are None
    rope_factors: np.ndarray | None = None
    context: int  # positions the head was made for
    ids: np.ndarray | None = None  # int64[N], the target's ids of the rows of the output matrix, or None for all
    tensors: Mapping[str, tuple[int, ...]]  # shapes by GGUF name, without `d2t` and `rope_freqs.weight`
    load: Callable[[str], TensorInfo]  # reads a tensor by GGUF name
    target: str = ""  # the name of its target, or ""
    target_classes: tuple[str, ...] = ()  # classes of transformers of the target, as the file names them
    # how many of the target's best tokens the file would accept; above 1 is lossy elsewhere, never here
    accept_k: int = 1
    rope_scaling: Json | None = None  # the rotation in config.json beside its base, or None without config.json

    @property
    def drafter(self) -> str:
        return self.architecture

    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, np.ndarray], *, path: Path, ids: ArrayLike | None = None, **facts: Any
    ) -> Self:
        """A head of float32 arrays by GGUF name, such as a trained one; `facts` are the other fields."""

        def load(name: str) -> TensorInfo:
            values = np.ascontiguousarray(arrays[name], np.float32)
            raw = values.view(np.uint8).reshape(*values.shape[:-1], -1)
            return TensorInfo(name, GGMLQuantizationType.F32, values.shape, raw, str(path))

        tensors = {name: np.shape(values) for name, values in arrays.items()}
        own_ids = None if ids is None else np.asarray(ids, np.int64)
        return cls(path=path, ids=own_ids, tensors=tensors, load=load, **facts)

    def values(self, name: str) -> np.ndarray:
        return np.ascontiguousarray(self.load(name).dequantize(), np.float32).reshape(self.tensors[name])

    def part(self, name: str, *, floats: bool) -> Any:
        """A tensor for the kernels: a matrix packed, a norm or bias as float32."""
        if len(self.tensors[name]) == 1:
            return jnp.asarray(self.values(name))
        return pack_matrix(self.load(name), floats=floats)

    @abc.abstractmethod
    def packed(self, ids: np.ndarray, *, floats: bool) -> Any:
        """Weights but embedding and output matrix; `ids` int[N] are scored, a column each, and `floats` keeps float32
        for kernels without quantised products."""

    def check_tensors(self, wanted: Iterable[tuple[str, tuple[int, ...]]], *, most_ids: int) -> None:
        """UserError for heads that do not divide, and for a tensor or an id that is missing, wrong or does not belong
        here: `wanted` are name and shape of every tensor, and ids lie below `most_ids`."""
        s, shapes, problems = self.shape, dict(wanted), []
        if s.heads % s.kv_heads or s.head_dim % 2:
            sizes = f"{s.heads} heads of {s.head_dim} elements with {s.kv_heads} of keys"
            problems.append(f"{sizes}: heads must divide and have an even size")
        if self.rope_factors is not None and self.rope_factors.shape != (s.head_dim // 2,):
            problems.append(f"{ROPE_FACTORS} must hold {s.head_dim // 2} numbers")
        for name, shape in shapes.items():
            found = self.tensors.get(name, "missing")
            if found != shape:
                problems.append(f"tensor {name} is {found}, its config asks for {shape}")
        for name in sorted(self.tensors.keys() - shapes.keys()):
            found = self.tensors[name]
            if name not in (EMBEDDING, OUTPUT):
                problems.append(f"tensor {show(name)} is none of {self.what}")
            elif len(found) != 2 or found[1] != s.width:
                problems.append(f"tensor {name} is {found}, rows of {s.width} are needed")
        if self.ids is not None and not problems:
            rows, ids = self.tensors.get(OUTPUT, (len(self.ids),))[0], np.unique(self.ids)
            if not len(ids) or len(ids) != rows or len(self.ids) != rows or ids[0] < 0 or ids[-1] >= most_ids:
                problems.append(f"d2t must name {rows} different ids of the target, in 0..{most_ids - 1}")
        if problems:
            raise UserError(f"{self.path}: {problems[0]}")

    def check_target(self, target: Model, *, layers: Sequence[int], width: int) -> None:
        """UserError if the head was made for a model of other shapes or another vocabulary. It reads rows of `width`
        numbers that enter `layers`."""
        c, name, own = target.config, target.path.name, [t for t in (EMBEDDING, OUTPUT) if t in self.tensors]
        rows = {tensor: self.tensors[tensor][0] for tensor in own}
        last = -1 if self.ids is None else self.ids.max()
        outside = [layer for layer in layers if not 0 <= layer <= c.n_layers]
        refuse({
            f"is for a target of width {width} (its own is {self.shape.width}), {name} has {c.d_model}":
                width != c.d_model or (self.shape.width != c.d_model and len(own) < 2),
            f"reads the target's features at layer {', '.join(map(str, outside))}; {name} has layers 0 to "
            f"{c.n_layers - 1}, and {c.n_layers} for what comes out": bool(outside),
            f"embeds {rows.get(EMBEDDING)} ids, {name} has {c.vocab_size}": rows.get(EMBEDDING, np.inf) < c.vocab_size,
            f"drafts id {last}, {name} has {c.vocab_size} ids": last >= c.vocab_size,
            f"scores {rows.get(OUTPUT)} ids without saying which (no d2t); {name} has {c.vocab_size}":
                self.ids is None and rows.get(OUTPUT, np.inf) < c.vocab_size,
        }, self.path)  # fmt: skip

    @abc.abstractmethod
    def gguf_keys(self) -> Json:
        """Keys of its GGUF file behind the architecture, beside those of every head, and of the tokenizer; UserError
        if the format has no key for an option of the head."""

    def gguf_values(self, name: str) -> np.ndarray:
        """A tensor as a GGUF file holds it."""
        return self.values(name)

    def write_gguf(self, path: Path, *, tokenizer: Mapping[str, object], quant: str = "F32") -> Path:
        """Writes a head as GGUF with llama.cpp's names and keys; the file appears whole or not at all. UserError: a
        type that cannot be written, or an option or rotation for which the format has no key.

        Args:
            tokenizer: the `tokenizer.ggml.*` keys of the target's GGUF file, which llama.cpp reads from the head's.
            quant: type of the matrices: F32, F16, BF16, Q8_0, Q4_0, Q4_1 or another that can be written. Norms are F32.
        """
        own, kind = self.gguf_keys(), matrix_type(quant, self.tensors.values(), self.path)
        shape, rope = self.shape, self.rope
        keys: Json = {
            "context_length": self.context,
            "embedding_length": shape.width,
            "feed_forward_length": shape.d_ff,
            "attention.head_count": shape.heads,
            "attention.head_count_kv": shape.kv_heads,
            "attention.key_length": shape.head_dim,
            "attention.value_length": shape.head_dim,
            "attention.layer_norm_rms_epsilon": shape.eps,
            "rope.dimension_count": shape.head_dim,
            "rope.freq_base": rope.base,
        }
        if rope.scaling != "none":
            scaling = {"type": rope.scaling, "factor": rope.factor, "original_context_length": rope.original_context}
            keys |= {f"rope.scaling.{key}": value for key, value in scaling.items()}
            if (rope.beta_fast, rope.beta_slow) != (32.0, 1.0):
                raise UserError(f"{self.path}: YaRN with other bounds than 32 and 1 has no place in a GGUF file")
        if rope.attn_factor != 1.0:
            keys["rope.scaling.attn_factor"] = rope.attn_factor
        metadata = {"general.architecture": self.architecture, "general.name": path.stem, **tokenizer}
        for key, value in (keys | own).items():
            metadata[key if key.startswith("tokenizer.") else f"{self.architecture}.{key}"] = value
        tensors = []
        for tensor, size in self.tensors.items():
            of = kind if len(size) == 2 else GGMLQuantizationType.F32
            tensors.append(NewTensor(tensor, of, size, lambda n=tensor, t=of: encode(self.gguf_values(n), t)))
        if self.rope_factors is not None:
            tensors.append(NewTensor.from_values(ROPE_FACTORS, self.rope_factors, GGMLQuantizationType.F32))
        if (ids := self.ids) is not None:
            tensors.append(NewTensor(DRAFT_IDS, GGMLQuantizationType.I64, ids.shape, lambda: ids.astype(np.int64)))
        return write_gguf(path, metadata, tensors)


class HeadKeys:
    """The keys of an open GGUF file behind its architecture, each with its range.

    UserError for another architecture, for a key that is neither in LAYER_KEYS nor `own`, since it would change what
    the head computes, and for a type of tensors that is not supported. `what` names such a head.
    """

    def __init__(self, f: GGUFFile, architecture: str, what: str, own: Iterable[str]):
        self.f, self.architecture = f, architecture
        found, known = f.get("general.architecture", "str", ""), {*LAYER_KEYS, *own}
        if found != architecture:
            raise UserError(f"{f.path}: is no {what}: its architecture is {show(found)}")
        unknown = [
            f"the option {show(key)}"
            for key in f.metadata
            if key.startswith(f"{architecture}.") and key.removeprefix(f"{architecture}.") not in known
        ]
        unknown += [
            f"tensor {show(name)} has type {t.type.name}, which"
            for name, t in f.tensors.items()
            if name != DRAFT_IDS and not can_dequantise(t.type)
        ]
        if unknown:
            raise UserError(f"{f.path}: {unknown[0]} is not supported")

    def size(self, key: str, default: int | None = None, most: int = MAX_SIZE) -> int:
        """A whole number of the file, above 0 and at most `most`."""
        return self._number(key, "int", default, 0, most)

    def number(self, key: str, default: float | None = None, low: float = 0.0, most: float = 1e12) -> float:
        """A finite number of the file, above `low` and at most `most`."""
        return self._number(key, "float", default, low, most)

    def _number(self, key: str, kind: Any, default: float | None, low: float, most: float) -> Any:
        full = f"{self.architecture}.{key}"
        value = self.f.get(full, kind) if default is None else self.f.get(full, kind, default)
        if not low < value <= most:
            raise UserError(f"{self.f.path}: metadata key '{full}' is {value}, above {low:g} to {most:g} is allowed")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        return self.f.get(f"{self.architecture}.{key}", "bool", default)

    def numbers(self, key: str, what: str, kinds: str = "iu") -> np.ndarray:
        """An array of integers from 0, or also of truth values if `kinds` has a "b"; empty if the key is missing."""
        full = f"{self.architecture}.{key}"
        value = self.f.get(full, "numbers", np.zeros(0, np.int32))
        if value.dtype.kind not in kinds or (value < 0).any():
            raise UserError(f"{self.f.path}: metadata key '{full}' must be a list of {what}")
        return value

    def sizes(self) -> Json:
        width, heads = self.size("embedding_length"), self.size("attention.head_count")
        return {
            "width": width,
            "heads": heads,
            "kv_heads": self.size("attention.head_count_kv", heads),
            "head_dim": self.size("attention.key_length", max(width // heads, 1)),
            "d_ff": self.size("feed_forward_length"),
            "eps": self.number("attention.layer_norm_rms_epsilon", most=1.0),
        }

    def fields(self, head_dim: int) -> Json:
        """The fields of a `PublishedHead` that are read alike in every file, without `load`."""
        f, factors, ids = self.f, self.f.tensors.get(ROPE_FACTORS), self.f.tensors.get(DRAFT_IDS)
        factor = self.number("rope.scaling.factor", 1.0, most=1e6)
        scaling = f.get(f"{self.architecture}.rope.scaling.type", "str", "linear" if factor != 1.0 else "none")
        wrong = {
            f"values of another size than keys ({head_dim})": self.size("attention.value_length", head_dim) != head_dim,
            f"rope scaling {show(scaling)} by {factor:g}":
                scaling not in SCALINGS or (scaling == "yarn" and factor < 1),
            "a rotation of a part of a head": self.size("rope.dimension_count", head_dim) != head_dim,
            f"tensor {DRAFT_IDS} that is no row of I64":
                ids is not None and (ids.type is not GGMLQuantizationType.I64 or len(ids.shape) != 1),
        }  # fmt: skip
        refuse({f"{text} is not supported": holds for text, holds in wrong.items()}, f.path)
        rope = RopeConfig(
            base=self.number("rope.freq_base", 10000.0, low=1.0),
            dim=head_dim,
            pairing="neox",
            scaling=scaling,
            factor=1.0 if scaling == "none" else factor,
            original_context=self.size("rope.scaling.original_context_length", MAX_CONTEXT, most=MAX_CONTEXT),
            attn_factor=self.number("rope.scaling.attn_factor", 1.0, most=1e3),
            freq_factors=factors is not None,
        )
        return {
            "path": f.path,
            "rope": rope,
            "rope_factors": None if factors is None else factors.dequantize().reshape(-1),
            "context": self.size("context_length", most=MAX_CONTEXT),
            "ids": None if ids is None else np.frombuffer(ids.raw.tobytes(), "<i8"),
            "tensors": {name: t.shape for name, t in f.tensors.items() if name not in (DRAFT_IDS, ROPE_FACTORS)},
        }


def matrix_type(quant: str, shapes: Iterable[tuple[int, ...]] = (), path: Path | str = "") -> GGMLQuantizationType:
    """The type of that name, for matrices of those shapes of a file; UserError if nothing writes it, or rows of a
    matrix are no multiple of its block."""
    try:
        kind = GGMLQuantizationType[quant.upper()]
        encode(np.zeros((1, GGML_QUANT_SIZES[kind][0]), np.float32), kind)
    except (KeyError, NotImplementedError) as error:
        raise UserError(f"type {quant} cannot be written: choose F32, F16, BF16, Q8_0, Q4_0 or Q4_1") from error
    block = GGML_QUANT_SIZES[kind][0]
    if any(len(shape) == 2 and shape[1] % block for shape in shapes):
        raise UserError(f"{path}: its widths are no multiples of {block}, which {kind.name} needs; choose F16")
    return kind


@dataclasses.dataclass(frozen=True)
class PublishedSpec(DrafterSpec):
    """Base of the specs of heads that other projects publish.

    Attributes:
        path: its folder (config.json and safetensors, or pytorch_model.bin of EAGLE-3), a GGUF file, owner/repo or
            owner/repo:TYPE of the Hub, or a name of the catalogue.
        reader: `module:function` that reads it.
    """

    reader: ClassVar[str]

    path: Annotated[
        PublishedHead | str | Path | None, instance_of("a folder, a GGUF file or a name", PublishedHead, str, Path)
    ] = None

    def check(self) -> None:
        if self.path is None or self.path == "":
            raise UserError(
                "drafter.path: a value is needed, the head's folder or GGUF file, hf://owner/repo or a name of "
                "`python -m specsparse models`"
            )

    def head_file(self, load: Load) -> Any:
        """The head as its file describes it; a note on stderr if it asks for lossy verification, which it does not
        get."""
        if not isinstance(self.path, str | Path):
            return self.path
        file = load(self.reader, str(self.path))
        if isinstance(file, PublishedHead) and file.accept_k > 1:
            print(
                f"note: {file.path} asks for verifier_accept_k={file.accept_k}, which is lossy: the verifier here is "
                "verifier=..., and drafts are verified as it says",
                file=sys.stderr,
            )
        return file

    def loaded(self, file: PublishedHead, target: Model, make: Callable[..., FeatureSource]) -> LoadedDrafter:
        """The drafter of a head's file; `make` takes the fields of `of_target` and gives its source."""
        style, vocab, floats = self.drafting, target.config.vocab_size, target.kernels.name != "native"
        own = OUTPUT in file.tensors
        output, rows = file.part(OUTPUT, floats=floats) if own else target.params.output, None
        if own and (file.ids is not None or output.shape[0] > vocab):
            rows = np.arange(vocab) if file.ids is None else file.ids
        elif file.ids is not None and style.draft_vocab is None:
            style = dataclasses.replace(style, draft_vocab=tuple(file.ids.tolist()))
        weights, columns = style.trim(target, output, vocab, rows=rows)
        head = output if weights.head is None else weights.head
        weights = weights._replace(head=head, norm=file.part("output_norm.weight", floats=floats))
        layers = file.packed(np.arange(columns) if weights.ids is None else np.asarray(weights.ids), floats=floats)
        embedding = file.part(EMBEDDING, floats=floats) if EMBEDDING in file.tensors else None
        source = make(**of_target(target, columns, file.shape.eps))

        @functools.cache
        def weights_for(capacity: int) -> DraftWeights:
            cos, sin = map(jnp.asarray, rope_tables(file.rope, source.capacity(capacity), file.rope_factors))
            return weights._replace(params=PublishedWeights(layers, cos, sin, embedding))

        reads = source.bytes_per_token(layers, head)
        return LoadedDrafter(self.drafting.drafter(source, target), weights_for, reads, source.keys_per_token)

    @property
    def files(self) -> Mapping[str, str]:
        """The head; one of the Hub is fetched when it is loaded."""
        return {} if not isinstance(self.path, str) or is_reference(self.path) else {"path": self.path}
