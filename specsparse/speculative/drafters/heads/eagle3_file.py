"""EAGLE-3 heads as files: what all three forms hold, and GGUF of architecture `eagle3` as llama.cpp reads it.

The authors' form and that of the speculators library are read by `models.convert.eagle3` into the same `Eagle3File`.
Tensors go by their GGUF names. Rows of queries and keys are as in transformers (RoPE turns the two halves of a head).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from specsparse.engine.config import MAX_CONTEXT, SCALINGS, ModelConfig, RopeConfig
from specsparse.engine.gguf.reader import GGUFFile, TensorInfo, can_dequantise, show
from specsparse.engine.gguf.writer import NewTensor, encode, write_gguf
from specsparse.errors import UserError
from specsparse.speculative.drafters.heads.eagle3_head import PROJECTIONS, HeadShape
from specsparse.support.json_files import Json

ARCHITECTURE = "eagle3"
"""`general.architecture` of these files."""
EMBEDDING, OUTPUT, DRAFT_IDS, ROPE_FACTORS = "token_embd.weight", "output.weight", "d2t", "rope_freqs.weight"
"""Tensors that a file may have: without them embedding and output matrix are the target's, for all its ids."""
FEATURE_NORM = "enc.output_norm.weight"
_FC_NORM = "fc_norm"  # no GGUF file has it
_MAX_SIZE = 1 << 24
_READ = {
    "block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
    "attention.head_count_kv", "attention.layer_norm_rms_epsilon", "attention.key_length", "attention.value_length",
    "rope.freq_base", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.attn_factor", "vocab_size", "target_layers",
    "target_hidden_size", "norm_before_residual", "norm_before_fc",
}  # fmt: skip
"""Keys of GGUF files behind `eagle3.`; another one is an option that is not known here."""


@dataclass(frozen=True, eq=False)
class Eagle3File:
    """A head as its file describes it, whatever form that has.

    Attributes:
        path: the file or folder.
        shape: of the head, and its options.
        target_width: D of the target.
        layers: ids of the target's layers whose incoming rows it reads; () for 2, L/2 and L - 3 of the target's L.
        rope: the rotary embedding; `rope_factors` divide its angles (f32[d/2]) or are None.
        context: positions the head was made for.
        vocab_size: ids of the target.
        ids: int64[N], the target's ids of the rows of the output matrix, or None for all.
        tensors: shapes by GGUF name, without `d2t` and `rope_freqs.weight`.
        load: reads a tensor by GGUF name.
        target: what the file says it is for, "" for nothing.
        accept_k: how many of the target's best tokens the file would accept; above 1 is lossy elsewhere, never here.
        rope_scaling: what config.json says of the rotation beside its base, None where there is no config.json.
    """

    path: Path
    shape: HeadShape
    target_width: int
    layers: tuple[int, ...]
    rope: RopeConfig
    rope_factors: np.ndarray | None
    context: int
    vocab_size: int
    ids: np.ndarray | None
    tensors: Mapping[str, tuple[int, ...]]
    load: Callable[[str], TensorInfo]
    target: str = ""
    accept_k: int = 1
    rope_scaling: Mapping[str, object] | None = None

    def __post_init__(self):
        s = self.shape
        if s.heads % s.kv_heads or s.head_dim % 2:
            raise UserError(
                f"{self.path}: {s.heads} heads of {s.head_dim} elements with {s.kv_heads} of keys: heads must divide "
                "and have an even size"
            )
        if self.layers and len(self.layers) != s.features:
            raise UserError(
                f"{self.path}: fc.weight reads {s.features} layers' features of width {self.target_width}, the file "
                f"names {len(self.layers)} layers: {', '.join(map(str, self.layers))}"
            )
        if not self.layers and s.features != 3:
            raise UserError(f"{self.path}: fc.weight reads {s.features} layers' features, and the file names no layers")
        if self.rope_factors is not None and self.rope_factors.shape != (s.head_dim // 2,):
            raise UserError(f"{self.path}: {ROPE_FACTORS} must hold {s.head_dim // 2} numbers")
        self._check_tensors()
        self._check_ids()

    def _check_tensors(self) -> None:
        wanted = dict(tensor_shapes(self.shape, self.target_width))
        for name, shape in wanted.items():
            if name not in self.tensors:
                raise UserError(f"{self.path}: tensor {name} of shape {shape} is missing")
            if self.tensors[name] != shape:
                raise UserError(f"{self.path}: tensor {name} is {self.tensors[name]}, its config asks for {shape}")
        D = self.shape.width
        for name in self.tensors.keys() - wanted.keys():
            found = self.tensors[name]
            if name in (EMBEDDING, OUTPUT):
                if len(found) != 2 or found[1] != D:
                    raise UserError(f"{self.path}: tensor {name} is {found}, rows of {D} are needed")
            else:
                raise UserError(f"{self.path}: tensor {show(name)} is none of an EAGLE-3 head with these options")

    def _check_ids(self) -> None:
        rows = self.tensors.get(OUTPUT, (None,))[0]
        if self.ids is None:
            return
        if rows is not None and len(self.ids) != rows:
            raise UserError(f"{self.path}: d2t names {len(self.ids)} ids, {OUTPUT} has {rows} rows")
        if not len(self.ids) or len(np.unique(self.ids)) < len(self.ids) or self.ids.min() < 0:
            raise UserError(f"{self.path}: d2t must name different ids of the target, none below 0")
        if self.ids.max() >= self.vocab_size:
            raise UserError(f"{self.path}: d2t names id {self.ids.max()}, the head is for {self.vocab_size} ids")

    def values(self, name: str) -> np.ndarray:
        """A tensor as float32."""
        return np.ascontiguousarray(self.load(name).dequantize(), np.float32).reshape(self.tensors[name])


def of_arrays(
    arrays: Mapping[str, np.ndarray],
    shape: HeadShape,
    *,
    target: ModelConfig,
    layers: tuple[int, ...],
    ids: np.ndarray | None = None,
    path: Path = Path("head"),
) -> Eagle3File:
    """A head of arrays, such as a trained one: base of its rotation, context and vocabulary are the target's.

    Args:
        arrays: float32 by the GGUF names of `tensor_shapes`, queries and keys as in transformers; without
            `token_embd.weight` and `output.weight` those of the target.
        shape: of the head.
        target: the target's config.
        layers: ids of the target's layers whose incoming rows it reads.
        ids: int[N], the target's ids of the rows of the output matrix; None for all.
        path: names it in messages.

    Raises:
        UserError: an array is missing, is of another shape, or is none of a head's.
    """
    values = {name: np.ascontiguousarray(array, np.float32) for name, array in arrays.items()}

    def load(name: str) -> TensorInfo:
        raw = values[name].view(np.uint8).reshape(*values[name].shape[:-1], -1)
        return TensorInfo(name, GGMLQuantizationType.F32, values[name].shape, raw, str(path))

    return Eagle3File(
        path=path,
        shape=shape,
        target_width=target.d_model,
        layers=layers,
        rope=RopeConfig(target.rope.base, shape.head_dim, "neox"),
        rope_factors=None,
        context=target.context_length,
        vocab_size=target.vocab_size,
        ids=None if ids is None else np.asarray(ids, np.int64),
        tensors={name: array.shape for name, array in values.items()},
        load=load,
    )


def tensor_shapes(shape: HeadShape, target_width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor that a head of that shape must have."""
    D, F, q, kv = shape.width, shape.d_ff, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield "fc.weight", (D, shape.features * target_width)
    if shape.norm_before_fc:
        yield FEATURE_NORM, (shape.features * target_width,)
    if shape.fc_norm:
        yield from ((f"{_FC_NORM}.{i}.weight", (target_width,)) for i in range(shape.features))
    for name in ("attn_norm", "attn_norm_2", "ffn_norm"):
        yield f"blk.0.{name}.weight", (D,)
    sizes = {
        "attn_q": (q, 2 * D), "attn_k": (kv, 2 * D), "attn_v": (kv, 2 * D), "attn_output": (D, q),
        "ffn_gate": (F, D), "ffn_up": (F, D), "ffn_down": (D, F),
    }  # fmt: skip
    for name in PROJECTIONS:
        yield f"blk.0.{name}.weight", sizes[name]
        if name in shape.biases:
            yield f"blk.0.{name}.bias", sizes[name][:1]
    if shape.qk_norm:
        yield from ((f"blk.0.{name}.weight", (shape.head_dim,)) for name in ("attn_q_norm", "attn_k_norm"))
    yield "output_norm.weight", (D,)


def features_of(fc: tuple[int, ...] | None, target_width: int, where: Path) -> int:
    """How many layers' features a matrix of that shape reads.

    Raises:
        UserError: it is missing, or no multiple of the target's width.
    """
    if fc is None or len(fc) != 2 or not fc[1] or fc[1] % target_width:
        found = "is missing" if fc is None else f"is {fc}"
        raise UserError(f"{where}: tensor fc.weight {found}; it reads some layers' features of width {target_width}")
    return fc[1] // target_width


def read_gguf(f: GGUFFile) -> Eagle3File:
    """A head of an open GGUF file.

    Raises:
        UserError: another architecture, a key or tensor that is missing or wrong, or an option that is not known.
    """
    if f.get("general.architecture", "str", "") != ARCHITECTURE:
        found = show(f.get("general.architecture", "str", ""))
        raise UserError(f"{f.path}: is no EAGLE-3 head: its architecture is {found}")
    keys = _Keys(f)
    keys.refuse_unknown()
    D, H = keys.size("embedding_length"), keys.size("attention.head_count")
    d, G = keys.size("attention.key_length", max(D // H, 1)), keys.size("attention.head_count_kv", H)
    if keys.size("attention.value_length", d) != d:
        raise UserError(f"{f.path}: values of another size than keys ({d}) are not supported")
    if keys.size("block_count") != 1:
        raise UserError(f"{f.path}: has {keys.size('block_count')} layers; an EAGLE-3 head of one layer is supported")
    for name, t in f.tensors.items():
        if name != DRAFT_IDS and not can_dequantise(t.type):
            raise UserError(f"{f.path}: tensor {show(name)} has type {t.type.name}, which is not supported")
    shapes = {name: t.shape for name, t in f.tensors.items() if name not in (DRAFT_IDS, ROPE_FACTORS)}
    target_width = keys.size("target_hidden_size", D)
    factors = f.tensors.get(ROPE_FACTORS)

    def load(name: str) -> TensorInfo:
        heads = {"blk.0.attn_q": H, "blk.0.attn_k": G}.get(name.rpartition(".")[0])
        t = f.tensors[name]
        if heads is None:
            return t
        rows = t.raw.reshape(t.shape[0], -1)  # of a bias, one element each
        return replace(t, raw=halves(rows, heads).reshape(t.raw.shape))

    return Eagle3File(
        path=f.path,
        shape=HeadShape(
            width=D,
            heads=H,
            kv_heads=G,
            head_dim=d,
            d_ff=keys.size("feed_forward_length"),
            eps=keys.number("attention.layer_norm_rms_epsilon", most=1.0),
            features=features_of(shapes.get("fc.weight"), target_width, f.path),
            norm_before_residual=f.get(f"{ARCHITECTURE}.norm_before_residual", "bool", False),
            norm_before_fc=f.get(f"{ARCHITECTURE}.norm_before_fc", "bool", False),
            qk_norm="blk.0.attn_q_norm.weight" in shapes,
            biases=tuple(name for name in PROJECTIONS if f"blk.0.{name}.bias" in shapes),
        ),
        target_width=target_width,
        layers=keys.layers(),
        rope=_rope(f, keys, d),
        rope_factors=None if factors is None else factors.dequantize().reshape(-1),
        context=keys.size("context_length", most=MAX_CONTEXT),
        vocab_size=_vocab_size(f, keys),
        ids=_ids(f),
        tensors=shapes,
        load=load,
    )


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys for a rotation of neighbours (llama.cpp), where halves of a head were turned."""
    return _turned(rows, (heads, 2, rows.shape[0] // heads // 2))


def halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """The inverse of `interleaved`."""
    return _turned(rows, (heads, rows.shape[0] // heads // 2, 2))


def _turned(rows: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if shape[0] * shape[1] * shape[2] != rows.shape[0]:
        return rows  # the shape is refused elsewhere
    return np.ascontiguousarray(rows.reshape(*shape, *rows.shape[1:]).swapaxes(1, 2)).reshape(rows.shape)


def _vocab_size(f: GGUFFile, keys: "_Keys") -> int:
    tokens = f.get_strings("tokenizer.ggml.tokens")
    embedding = f.tensors.get(EMBEDDING)
    rows = embedding.shape[0] if embedding is not None else len(tokens or ()) or _MAX_SIZE
    return keys.size("vocab_size", rows)


def _rope(f: GGUFFile, keys: "_Keys", head_dim: int) -> RopeConfig:
    factor = keys.number("rope.scaling.factor", 1.0, most=1e6)
    scaling = f.get(f"{ARCHITECTURE}.rope.scaling.type", "str", "linear" if factor != 1.0 else "none")
    if scaling not in SCALINGS or keys.size("rope.dimension_count", head_dim) != head_dim:
        raise UserError(f"{f.path}: rope scaling {show(scaling)}, or a rotation of a part of a head, is not supported")
    if scaling == "yarn" and factor < 1.0:
        raise UserError(f"{f.path}: rope scaling has factor={factor:g}, YaRN needs at least 1")
    return RopeConfig(
        base=keys.number("rope.freq_base", 10000.0, low=1.0),
        dim=head_dim,
        pairing="neox",
        scaling=scaling,
        factor=1.0 if scaling == "none" else factor,
        original_context=keys.size("rope.scaling.original_context_length", MAX_CONTEXT, most=MAX_CONTEXT),
        attn_factor=keys.number("rope.scaling.attn_factor", 1.0, most=1e3),
        freq_factors=ROPE_FACTORS in f.tensors,
    )


def _ids(f: GGUFFile) -> np.ndarray | None:
    t = f.tensors.get(DRAFT_IDS)
    if t is None:
        return None
    if t.type is not GGMLQuantizationType.I64 or len(t.shape) != 1:
        raise UserError(f"{f.path}: tensor {DRAFT_IDS} must be a row of I64")
    return np.frombuffer(t.raw.tobytes(), "<i8")


class _Keys:
    """Reads `eagle3.*` keys, each with its range."""

    def __init__(self, f: GGUFFile):
        self.f = f

    def refuse_unknown(self) -> None:
        """An option that is not known would change what the head computes."""
        for key in self.f.metadata:
            if key.startswith(f"{ARCHITECTURE}.") and key.removeprefix(f"{ARCHITECTURE}.") not in _READ:
                raise UserError(f"{self.f.path}: the option {show(key)} is not supported")

    def size(self, key: str, default: int | None = None, most: int = _MAX_SIZE) -> int:
        """An int in 1..most."""
        full = f"{ARCHITECTURE}.{key}"
        value = self.f.get(full, "int") if default is None else self.f.get(full, "int", default)
        if not 1 <= value <= most:
            raise UserError(f"{self.f.path}: metadata key '{full}' is {value}, 1 to {most} is allowed")
        return value

    def number(self, key: str, default: float | None = None, low: float = 0.0, most: float = 1e12) -> float:
        """A finite float in (low, most]."""
        full = f"{ARCHITECTURE}.{key}"
        value = self.f.get(full, "float") if default is None else self.f.get(full, "float", default)
        if not low < value <= most:
            raise UserError(
                f"{self.f.path}: metadata key '{full}' is {value}, above {low:g} and up to {most:g} is allowed"
            )
        return value

    def layers(self) -> tuple[int, ...]:
        """The target's layers, () where the file names none."""
        full = f"{ARCHITECTURE}.target_layers"
        if full not in self.f.metadata:
            return ()
        value = self.f.get_numbers(full)
        if value is None or value.dtype.kind not in "iu" or not len(value) or value.min() < 0:
            raise UserError(f"{self.f.path}: metadata key '{full}' must be a list of layers")
        return tuple(int(layer) for layer in value)


def write_eagle3_gguf(
    file: Eagle3File, path: Path, *, tokenizer: Mapping[str, object], quant: str = "F32", name: str = ""
) -> Path:
    """Writes a head as GGUF with llama.cpp's names and keys; the file appears whole or not at all.

    Args:
        file: the head, in whatever form it was read.
        path: the file, overwritten.
        tokenizer: the `tokenizer.ggml.*` keys of the target's GGUF file, which llama.cpp reads from the head's.
        quant: type of the matrices: F32, F16, BF16, Q8_0, Q4_0, Q4_1 or whatever else can be written. Norms are F32.
        name: `general.name`.

    Raises:
        UserError: a type that cannot be written, or an option of the head that llama.cpp has no key for.
    """
    kind, s = _kind(file, quant), file.shape
    for option in ("fc_norm", "norm_output", "qk_norm"):
        if getattr(s, option):
            raise UserError(
                f"{file.path}: {option} has no place in a GGUF file: llama.cpp loads one and computes something else; "
                "write the original form or that of speculators"
            )
    metadata = {"general.architecture": ARCHITECTURE, "general.name": name or path.stem, **tokenizer}
    metadata |= {f"{ARCHITECTURE}.{key}": value for key, value in _metadata(file).items()}
    tensors = []
    for tensor, shape in file.tensors.items():
        of = kind if len(shape) == 2 else GGMLQuantizationType.F32
        tensors.append(NewTensor(tensor, of, shape, lambda n=tensor, t=of: encode(_interleaved(file, n), t)))
    if file.rope_factors is not None:
        tensors.append(NewTensor.of(ROPE_FACTORS, file.rope_factors, GGMLQuantizationType.F32))
    if file.ids is not None:
        ids = file.ids.astype(np.int64)
        tensors.append(NewTensor(DRAFT_IDS, GGMLQuantizationType.I64, ids.shape, lambda: ids))
    return write_gguf(path, metadata, tensors)


def _interleaved(file: Eagle3File, name: str) -> np.ndarray:
    heads = {"blk.0.attn_q": file.shape.heads, "blk.0.attn_k": file.shape.kv_heads}.get(name.rpartition(".")[0])
    values = file.values(name)
    return values if heads is None else interleaved(values, heads)


def _metadata(file: Eagle3File) -> Json:
    """Keys without the architecture before them.

    Raises:
        UserError: the file does not say what a GGUF file must.
    """
    s, rope = file.shape, file.rope
    if not file.layers:
        raise UserError(
            f"{file.path}: names no layers (eagle_aux_hidden_state_layer_ids), and a GGUF file must: give the target"
        )
    keys: Json = {
        "context_length": file.context,
        "embedding_length": s.width,
        "block_count": 1,
        "feed_forward_length": s.d_ff,
        "attention.head_count": s.heads,
        "attention.head_count_kv": s.kv_heads,
        "attention.key_length": s.head_dim,
        "attention.value_length": s.head_dim,
        "attention.layer_norm_rms_epsilon": s.eps,
        "rope.dimension_count": s.head_dim,
        "rope.freq_base": rope.base,
        "vocab_size": file.vocab_size,
        "target_layers": list(file.layers),
        "target_hidden_size": file.target_width,
        "norm_before_residual": s.norm_before_residual,
        "norm_before_fc": s.norm_before_fc,
    }
    if rope.scaling != "none":
        keys |= {
            "rope.scaling.type": rope.scaling,
            "rope.scaling.factor": rope.factor,
            "rope.scaling.original_context_length": rope.original_context,
        }
        if (rope.beta_fast, rope.beta_slow) != (32.0, 1.0):
            raise UserError(f"{file.path}: YaRN with other bounds than 32 and 1 has no place in a GGUF file")
    if rope.attn_factor != 1.0:
        keys["rope.scaling.attn_factor"] = rope.attn_factor
    return keys


def _kind(file: Eagle3File, quant: str) -> GGMLQuantizationType:
    try:
        kind = GGMLQuantizationType[quant.upper()]
        encode(np.zeros((1, GGML_QUANT_SIZES[kind][0]), np.float32), kind)
    except (KeyError, NotImplementedError) as error:
        raise UserError(f"type {quant} cannot be written: choose F32, F16, BF16, Q8_0, Q4_0 or Q4_1") from error
    block = GGML_QUANT_SIZES[kind][0]
    if any(len(shape) == 2 and shape[1] % block for shape in file.tensors.values()):
        raise UserError(f"{file.path}: its widths are no multiples of {block}, which {kind.name} needs; choose F16")
    return kind
