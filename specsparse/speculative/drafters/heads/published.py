"""Heads that other projects publish: what their files have in common, and what their specs do."""

import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from specsparse.engine.config import MAX_CONTEXT, SCALINGS, RopeConfig
from specsparse.engine.gguf.reader import GGUFFile, TensorInfo, can_dequantise, show
from specsparse.engine.gguf.writer import NewTensor, encode, write_gguf
from specsparse.engine.model import Model
from specsparse.engine.weights import pack_matrix
from specsparse.errors import UserError
from specsparse.kernels import QTensor
from specsparse.speculative.drafters.sources import DraftWeights
from specsparse.speculative.drafters.spec import DrafterSpec, Drafting, Load
from specsparse.support.files import Json
from specsparse.support.options import instance_of


@dataclass(frozen=True)
class LayerShape:
    """Static sizes.

    Attributes:
        width: D, of the head's rows.
        heads, kv_heads, head_dim: H, G, d of its attention.
        d_ff: F, neurons.
        eps: of every RMS norm.
    """

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    d_ff: int
    eps: float


EMBEDDING, OUTPUT, DRAFT_IDS, ROPE_FACTORS = "token_embd.weight", "output.weight", "d2t", "rope_freqs.weight"
"""Tensors that a file may have: without them embedding and output matrix are the target's, for all its ids."""
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
class PublishedHead:
    """A head as its file describes it, whatever form that has.

    Attributes:
        path: the file or folder.
        shape: of its layers, and its options.
        rope: the rotary embedding; `rope_factors` divide its angles (f32[d/2]) or are None.
        context: positions the head was made for.
        ids: int64[N], the target's ids of the rows of the output matrix, or None for all.
        tensors: shapes by GGUF name, without `d2t` and `rope_freqs.weight`.
        load: reads a tensor by GGUF name.
        target: what the file says it is for, "" for nothing.
        target_classes: classes of transformers of the target, as the file names them.
        accept_k: how many of the target's best tokens the file would accept; above 1 is lossy elsewhere, never here.
        rope_scaling: what config.json says of the rotation beside its base, None where there is no config.json.
    """

    what: ClassVar[str]  # in messages

    path: Path
    shape: LayerShape
    rope: RopeConfig
    rope_factors: np.ndarray | None
    context: int
    ids: np.ndarray | None
    tensors: Mapping[str, tuple[int, ...]]
    load: Callable[[str], TensorInfo]
    target: str = ""
    target_classes: tuple[str, ...] = ()
    accept_k: int = 1
    rope_scaling: Json | None = None

    def values(self, name: str) -> np.ndarray:
        return np.ascontiguousarray(self.load(name).dequantize(), np.float32).reshape(self.tensors[name])

    def matrix(self, name: str, *, floats: bool) -> QTensor:
        """`name.weight`, packed for the kernels."""
        return pack_matrix(self.load(f"{name}.weight"), floats=floats)

    def vector(self, name: str) -> jax.Array:
        """float32, flat."""
        return jnp.asarray(self.values(name).reshape(-1))

    def check(self, wanted: Iterable[tuple[str, tuple[int, ...]]], *, most_ids: int) -> None:
        """Whether tensors and ids are those of such a head.

        Args:
            wanted: name and shape of every tensor that it must have.
            most_ids: ids that it may be for.

        Raises:
            UserError: heads that do not divide, or a tensor or an id that is missing, wrong or of no such head.
        """
        for problem in self._problems(dict(wanted), most_ids):
            raise UserError(f"{self.path}: {problem}")

    def _problems(self, wanted: Mapping[str, tuple[int, ...]], most_ids: int) -> Iterator[str]:
        s = self.shape
        if s.heads % s.kv_heads or s.head_dim % 2:
            sizes = f"{s.heads} heads of {s.head_dim} elements with {s.kv_heads} of keys"
            yield f"{sizes}: heads must divide and have an even size"
        if self.rope_factors is not None and self.rope_factors.shape != (s.head_dim // 2,):
            yield f"{ROPE_FACTORS} must hold {s.head_dim // 2} numbers"
        for name, shape in wanted.items():
            if name not in self.tensors:
                yield f"tensor {name} of shape {shape} is missing"
            elif self.tensors[name] != shape:
                yield f"tensor {name} is {self.tensors[name]}, its config asks for {shape}"
        for name in self.tensors.keys() - wanted.keys():
            found = self.tensors[name]
            if name not in (EMBEDDING, OUTPUT):
                yield f"tensor {show(name)} is none of {self.what}"
            elif len(found) != 2 or found[1] != s.width:
                yield f"tensor {name} is {found}, rows of {s.width} are needed"
        if self.ids is None:
            return
        rows = self.tensors.get(OUTPUT, (len(self.ids),))[0]
        if len(self.ids) != rows:
            yield f"d2t names {len(self.ids)} ids, {OUTPUT} has {rows} rows"
        if not len(self.ids) or np.unique(self.ids).size < len(self.ids) or self.ids.min() < 0:
            yield "d2t must name different ids of the target, none below 0"
        if self.ids.max() >= most_ids:
            yield f"d2t names id {self.ids.max()}, the head is for {most_ids} ids"


def fields_of_arrays(arrays: Mapping[str, np.ndarray], ids: np.ndarray | None, path: Path) -> Json:
    """Fields of a `PublishedHead` of arrays by GGUF name, such as a trained one; `path` names it in messages."""

    def load(name: str) -> TensorInfo:
        values = np.ascontiguousarray(arrays[name], np.float32)
        raw = values.view(np.uint8).reshape(*values.shape[:-1], -1)
        return TensorInfo(name, GGMLQuantizationType.F32, values.shape, raw, str(path))

    tensors = {name: np.shape(values) for name, values in arrays.items()}
    return {"path": path, "ids": None if ids is None else np.asarray(ids, np.int64), "tensors": tensors, "load": load}


class HeadKeys:
    """The keys of an open GGUF file behind its architecture, each with its range."""

    def __init__(self, f: GGUFFile, architecture: str, what: str, own: Iterable[str]):
        """Opens the keys.

        Args:
            f: the file.
            architecture: it must have; `what` it is then, for messages.
            own: keys beside LAYER_KEYS.

        Raises:
            UserError: another architecture, an option that is not known, which would change what the head computes, or
                a tensor of a type that is not supported.
        """
        self.f, self.architecture = f, architecture
        found = f.get("general.architecture", "str", "")
        if found != architecture:
            raise UserError(f"{f.path}: is no {what}: its architecture is {show(found)}")
        known = {f"{architecture}.{key}" for key in (*LAYER_KEYS, *own)}
        for key in f.metadata:
            if key.startswith(f"{architecture}.") and key not in known:
                raise UserError(f"{f.path}: the option {show(key)} is not supported")
        for name, t in f.tensors.items():
            if name != DRAFT_IDS and not can_dequantise(t.type):
                raise UserError(f"{f.path}: tensor {show(name)} has type {t.type.name}, which is not supported")

    def name(self, key: str) -> str:
        return f"{self.architecture}.{key}"

    def size(self, key: str, default: int | None = None, most: int = MAX_SIZE) -> int:
        """An int in 1..most."""
        return self._number(key, "int", default, 0, most)

    def number(self, key: str, default: float | None = None, low: float = 0.0, most: float = 1e12) -> float:
        """A finite float in (low, most]."""
        return self._number(key, "float", default, low, most)

    def _number(self, key: str, kind: Any, default: float | None, low: float, most: float) -> Any:
        full = self.name(key)
        value = self.f.get(full, kind) if default is None else self.f.get(full, kind, default)
        if not low < value <= most:
            raise UserError(f"{self.f.path}: metadata key '{full}' is {value}, above {low:g} to {most:g} is allowed")
        return value

    def flag(self, key: str) -> bool:
        return self.f.get(self.name(key), "bool", False)

    def numbers(self, key: str) -> np.ndarray:
        """An array of integers or truth values."""
        full = self.name(key)
        value = self.f.get(full, "numbers", None)
        if value is None or value.dtype.kind not in "iub":
            raise UserError(f"{self.f.path}: metadata key '{full}' must be an array of integers")
        return value

    @property
    def layers(self) -> tuple[int, ...]:
        """The target's layers whose incoming rows are read, () where the file names none."""
        if self.name("target_layers") not in self.f.metadata:
            return ()
        value = self.numbers("target_layers")
        if value.dtype.kind == "b" or not len(value) or value.min() < 0:
            raise UserError(f"{self.f.path}: metadata key '{self.name('target_layers')}' must be a list of layers")
        return tuple(value.tolist())

    @property
    def head_dim(self) -> int:
        width, heads = self.size("embedding_length"), self.size("attention.head_count")
        d = self.size("attention.key_length", max(width // heads, 1))
        if self.size("attention.value_length", d) != d:
            raise UserError(f"{self.f.path}: values of another size than keys ({d}) are not supported")
        return d

    def of_layers(self) -> Json:
        """The fields of a `LayerShape`."""
        heads = self.size("attention.head_count")
        return {
            "width": self.size("embedding_length"),
            "heads": heads,
            "kv_heads": self.size("attention.head_count_kv", heads),
            "head_dim": self.head_dim,
            "d_ff": self.size("feed_forward_length"),
            "eps": self.number("attention.layer_norm_rms_epsilon", most=1.0),
        }

    def of_file(self) -> Json:
        """The fields of a `PublishedHead` that are read alike in every file, but for `load`."""
        f, factors = self.f, self.f.tensors.get(ROPE_FACTORS)
        return {
            "path": f.path,
            "rope": self._rope(),
            "rope_factors": None if factors is None else factors.dequantize().reshape(-1),
            "context": self.size("context_length", most=MAX_CONTEXT),
            "ids": self._ids(),
            "tensors": {name: t.shape for name, t in f.tensors.items() if name not in (DRAFT_IDS, ROPE_FACTORS)},
        }

    def _rope(self) -> RopeConfig:
        f, head_dim, factor = self.f, self.head_dim, self.number("rope.scaling.factor", 1.0, most=1e6)
        scaling = f.get(self.name("rope.scaling.type"), "str", "linear" if factor != 1.0 else "none")
        if scaling not in SCALINGS or self.size("rope.dimension_count", head_dim) != head_dim:
            raise UserError(
                f"{f.path}: rope scaling {show(scaling)}, or a rotation of a part of a head, is not supported"
            )
        if scaling == "yarn" and factor < 1.0:
            raise UserError(f"{f.path}: rope scaling has factor={factor:g}, YaRN needs at least 1")
        return RopeConfig(
            base=self.number("rope.freq_base", 10000.0, low=1.0),
            dim=head_dim,
            pairing="neox",
            scaling=scaling,
            factor=1.0 if scaling == "none" else factor,
            original_context=self.size("rope.scaling.original_context_length", MAX_CONTEXT, most=MAX_CONTEXT),
            attn_factor=self.number("rope.scaling.attn_factor", 1.0, most=1e3),
            freq_factors=ROPE_FACTORS in f.tensors,
        )

    def _ids(self) -> np.ndarray | None:
        t = self.f.tensors.get(DRAFT_IDS)
        if t is None:
            return None
        if t.type is not GGMLQuantizationType.I64 or len(t.shape) != 1:
            raise UserError(f"{self.f.path}: tensor {DRAFT_IDS} must be a row of I64")
        return np.frombuffer(t.raw.tobytes(), "<i8")


def write_head_gguf(
    file: PublishedHead, path: Path, own: Json, *, architecture: str, tokenizer: Mapping[str, object], quant: str,
    name: str, values: Callable[[str], np.ndarray] | None = None,
) -> Path:  # fmt: skip
    """Writes a head as GGUF with llama.cpp's names and keys; the file appears whole or not at all.

    Args:
        file: the head, in whatever form it was read.
        path: the file, overwritten.
        own: keys behind the architecture beside those that every head has.
        architecture: `general.architecture`.
        tokenizer: the `tokenizer.ggml.*` keys of the target's GGUF file, which llama.cpp reads from the head's.
        quant: type of the matrices: F32, F16, BF16, Q8_0, Q4_0, Q4_1 or whatever else can be written. Norms are F32.
        name: `general.name`, the file's stem by default.
        values: a tensor as the file holds it, where that is not `file.values`.

    Raises:
        UserError: a type that cannot be written, or a rotation that llama.cpp has no key for.
    """
    kind, shape, rope = matrix_type(quant, file.tensors.values(), file.path), file.shape, file.rope
    keys: Json = {
        "context_length": file.context,
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
            raise UserError(f"{file.path}: YaRN with other bounds than 32 and 1 has no place in a GGUF file")
    if rope.attn_factor != 1.0:
        keys["rope.scaling.attn_factor"] = rope.attn_factor
    metadata = {"general.architecture": architecture, "general.name": name or path.stem, **tokenizer}
    metadata |= {f"{architecture}.{key}": value for key, value in (keys | own).items()}
    tensors, values = [], values or file.values
    for tensor, size in file.tensors.items():
        of = kind if len(size) == 2 else GGMLQuantizationType.F32
        tensors.append(NewTensor(tensor, of, size, lambda n=tensor, t=of: encode(values(n), t)))
    if file.rope_factors is not None:
        tensors.append(NewTensor.from_values(ROPE_FACTORS, file.rope_factors, GGMLQuantizationType.F32))
    if file.ids is not None:
        ids = file.ids.astype(np.int64)
        tensors.append(NewTensor(DRAFT_IDS, GGMLQuantizationType.I64, ids.shape, lambda: ids))
    return write_gguf(path, metadata, tensors)


def matrix_type(quant: str, shapes: Iterable[tuple[int, ...]] = (), path: Path | str = "") -> GGMLQuantizationType:
    """The type of that name, for matrices of those shapes; `path` is the file, for messages.

    Raises:
        UserError: nothing writes it, or a matrix has rows that are no multiple of its block.
    """
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
        path: its folder (config.json and safetensors, or pytorch_model.bin of EAGLE-3), a GGUF file, hf://owner/repo,
            or a name of the catalogue.
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
        """The head as its file describes it; what it asks for and does not get is said on stderr."""
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

    @property
    def files(self) -> Mapping[str, str]:
        """The head; one of the Hub is fetched when it is loaded."""
        return {"path": self.path} if isinstance(self.path, str) and not self.path.startswith("hf://") else {}


def check_target(file: PublishedHead, target: Model, *, layers: Sequence[int], width: int) -> None:
    """Whether a head is one for that target.

    Args:
        file: the head.
        target: the model.
        layers: ids of the target's layers whose incoming rows it reads.
        width: of one of these rows.

    Raises:
        UserError: it was made for a model of other shapes or another vocabulary.
    """
    for problem in _misfits(file, target, layers, width):
        raise UserError(f"{file.path}: {problem}")


def _misfits(file: PublishedHead, target: Model, layers: Sequence[int], width: int) -> Iterator[str]:
    c, name, own = target.config, target.path.name, [t for t in (EMBEDDING, OUTPUT) if t in file.tensors]
    if width != c.d_model or (file.shape.width != c.d_model and len(own) < 2):
        yield f"is for a target of width {width} (its own is {file.shape.width}), {name} has {c.d_model}"
    for layer in layers:
        if not 0 <= layer <= c.n_layers:
            has = f"{name} has layers 0 to {c.n_layers - 1}, and {c.n_layers} for what comes out"
            yield f"reads the target's features at layer {layer}; {has}"
    if EMBEDDING in own and file.tensors[EMBEDDING][0] < c.vocab_size:
        yield f"embeds {file.tensors[EMBEDDING][0]} ids, {name} has {c.vocab_size}"
    if file.ids is not None and file.ids.max() >= c.vocab_size:
        yield f"drafts id {file.ids.max()}, {name} has {c.vocab_size} ids"
    if file.ids is None and OUTPUT in own and file.tensors[OUTPUT][0] < c.vocab_size:
        yield f"scores {file.tensors[OUTPUT][0]} ids without saying which (no d2t); {name} has {c.vocab_size}"


def scored(file: PublishedHead, style: Drafting, target: Model, *, floats: bool) -> tuple[DraftWeights, int]:
    """The output matrix, its ids where they are not all, and how many columns logits have."""
    vocab, own = target.config.vocab_size, OUTPUT in file.tensors
    output = pack_matrix(file.load(OUTPUT), floats=floats) if own else target.params.output
    if own and (file.ids is not None or output.shape[0] > vocab):
        return style.trim(target, output, vocab, rows=np.arange(vocab) if file.ids is None else file.ids)
    if file.ids is not None and style.draft_vocab is None:
        style = dataclasses.replace(style, draft_vocab=tuple(file.ids.tolist()))
    weights, columns = style.trim(target, output, vocab)
    return weights if weights.head is not None else weights._replace(head=output), columns
