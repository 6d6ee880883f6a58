"""DFlash drafters as files: GGUF of architecture `dflash`, as llama.cpp reads and writes it, and what both forms hold.

The authors' and the speculators library's checkpoints are read by `models.convert.dflash` into the same `DFlashFile`.
Tensors go by their GGUF names. Rows of queries and keys are as in transformers (RoPE turns the two halves of a head).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from specsparse.engine.config import MAX_CONTEXT, SCALINGS, RopeConfig
from specsparse.engine.gguf.reader import GGUFFile, TensorInfo, can_dequantise, show
from specsparse.engine.gguf.writer import NewTensor, encode, write_gguf
from specsparse.errors import UserError
from specsparse.speculative.drafters.heads.dflash_block import BlockShape
from specsparse.support.json_files import Json

ARCHITECTURE = "dflash"
"""`general.architecture` of these files."""
EMBEDDING, OUTPUT, DRAFT_IDS, ROPE_FACTORS = "token_embd.weight", "output.weight", "d2t", "rope_freqs.weight"
"""Tensors that a file may have: without them embedding and output matrix are the target's, for all its ids."""
MASK = "tokenizer.ggml.mask_token_id"
MAX_BLOCK = 64
"""Rows of a block: what one verifying forward may hold."""
_MAX_SIZE = 1 << 24
_OTHERS = {
    "markov_w1.weight": "DSpark (a Markov bias from the token before)",
    "selector_hidden.weight": "DFlash2 (convolutions and a selector of candidates)",
    "layer_fusion": "DFly (a fusion by layer)",
    "blk.0.attn_sinks.weight": "a drafter with attention sinks",
}
"""Tensors that tell a drafter of another kind, which share the architecture's name."""


@dataclass(frozen=True, eq=False)
class DFlashFile:
    """A drafter as its file describes it, whatever form that has.

    Attributes:
        path: the file or folder.
        shape: layers and features.
        block_size: rows of a block, the last token among them.
        mask_token: id that stands for the tokens to draft.
        from_anchor: whether the last token's own row drafts too, and so each row the token after its position.
        rope: the rotary embedding; `rope_factors` divide its angles (f32[d/2]) or are None.
        context: positions the drafter was made for.
        ids: int32[N], the ids that it drafts, those of the rows of its output matrix if it has one; None for all.
        tensors: shapes by GGUF name.
        load: reads a tensor by GGUF name.
        embedding_scale, logit_scale: what embedded tokens and logits are multiplied by.
        softcap: logits x become softcap * tanh(x / softcap); 0 for none.
        target: what the file says it is for, "" for nothing.
        accept_k: how many of the target's best tokens the file would accept; above 1 is lossy elsewhere, never here.
    """

    path: Path
    shape: BlockShape
    block_size: int
    mask_token: int
    from_anchor: bool
    rope: RopeConfig
    rope_factors: np.ndarray | None
    context: int
    ids: np.ndarray | None
    tensors: Mapping[str, tuple[int, ...]]
    load: Callable[[str], TensorInfo]
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    softcap: float = 0.0
    target: str = ""
    accept_k: int = 1

    def __post_init__(self):
        least = 1 if self.from_anchor else 2
        if not least <= self.block_size <= MAX_BLOCK:
            raise UserError(f"{self.path}: block_size={self.block_size} must lie in {least}..{MAX_BLOCK}")
        if not 0 <= self.mask_token < _MAX_SIZE:
            raise UserError(f"{self.path}: mask_token_id={self.mask_token} is no token id")
        if self.shape.heads % self.shape.kv_heads or self.shape.head_dim % 2:
            raise UserError(
                f"{self.path}: {self.shape.heads} heads of {self.shape.head_dim} elements with {self.shape.kv_heads} "
                "of keys: heads must divide and have an even size"
            )
        if self.rope_factors is not None and self.rope_factors.shape != (self.shape.head_dim // 2,):
            raise UserError(f"{self.path}: {ROPE_FACTORS} must hold {self.shape.head_dim // 2} numbers")
        self._check_tensors()

    @property
    def drafts(self) -> int:
        """Tokens that a whole block drafts."""
        return self.block_size - (0 if self.from_anchor else 1)

    def _check_tensors(self) -> None:
        wanted = dict(tensor_shapes(self.shape))
        for name, kind in _OTHERS.items():
            if name in self.tensors:
                raise UserError(f"{self.path}: is {kind}, which is not supported: only DFlash itself is")
        for name, shape in wanted.items():
            if name not in self.tensors:
                raise UserError(f"{self.path}: tensor {name} of shape {shape} is missing")
            if self.tensors[name] != shape:
                raise UserError(f"{self.path}: tensor {name} is {self.tensors[name]}, its metadata asks for {shape}")
        D = self.shape.width
        for name in self.tensors.keys() - wanted.keys():
            found = self.tensors[name]
            if name in (EMBEDDING, OUTPUT):
                if len(found) != 2 or found[1] != D:
                    raise UserError(f"{self.path}: tensor {name} is {found}, rows of {D} are needed")
            elif name not in (DRAFT_IDS, ROPE_FACTORS):
                raise UserError(f"{self.path}: tensor {show(name)} is none of a DFlash drafter")
        if self.ids is not None:
            rows = self.tensors.get(OUTPUT, (len(self.ids),))[0]
            if len(self.ids) != rows:
                raise UserError(f"{self.path}: d2t names {len(self.ids)} ids, {OUTPUT} has {rows} rows")
            if not len(self.ids) or np.unique(self.ids).size < len(self.ids) or self.ids.min() < 0:
                raise UserError(f"{self.path}: d2t must name different ids, none below 0")


def of_arrays(
    arrays: Mapping[str, np.ndarray], *, path: Path, shape: BlockShape, block_size: int, mask_token: int,
    rope: RopeConfig, context: int, ids: np.ndarray | None = None, from_anchor: bool = False,
) -> DFlashFile:  # fmt: skip
    """A drafter of float32 arrays by GGUF name (`tensor_shapes` says which): one that was trained, to be written.

    Raises:
        UserError: a tensor is missing, or of another shape.
    """

    def load(name: str) -> TensorInfo:
        values = np.ascontiguousarray(arrays[name], np.float32)
        raw = values.view(np.uint8).reshape(*values.shape[:-1], -1)
        return TensorInfo(name, GGMLQuantizationType.F32, values.shape, raw, str(path))

    shapes = {name: tuple(np.shape(values)) for name, values in arrays.items()}
    return DFlashFile(path, shape, block_size, mask_token, from_anchor, rope, None, context, ids, shapes, load)


def tensor_shapes(shape: BlockShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor that a drafter must have."""
    D, F, d = shape.width, shape.d_ff, shape.head_dim
    q, kv = shape.heads * d, shape.kv_heads * d
    yield "fc.weight", (D, len(shape.features) * shape.feature_width)
    yield "enc.output_norm.weight", (D,)
    yield "output_norm.weight", (D,)
    layer = {
        "attn_norm": (D,), "attn_q": (q, D), "attn_k": (kv, D), "attn_v": (kv, D), "attn_q_norm": (d,),
        "attn_k_norm": (d,), "attn_output": (D, q), "ffn_norm": (D,), "ffn_gate": (F, D), "ffn_up": (F, D),
        "ffn_down": (D, F),
    }  # fmt: skip
    for i in range(shape.layers):
        yield from ((f"blk.{i}.{name}.weight", size) for name, size in layer.items())


def read_gguf(f: GGUFFile) -> DFlashFile:
    """A drafter of an open GGUF file.

    Raises:
        UserError: another architecture, a key or tensor that is missing, wrong, or of a drafter of another kind.
    """
    if f.get("general.architecture", "str", "") != ARCHITECTURE:
        raise UserError(f"{f.path}: is no DFlash drafter: its architecture is {f.get('general.architecture', 'str')}")
    keys = _DFlashKeys(f)
    D, H = keys.size("embedding_length"), keys.size("attention.head_count")
    d, layers = keys.size("attention.key_length", max(D // H, 1)), keys.size("block_count", most=1 << 10)
    if keys.size("attention.value_length", d) != d:
        raise UserError(f"{f.path}: values of another size than keys ({d}) are not supported")
    features = keys.numbers("target_layers")
    fc = f.tensors.get("fc.weight")
    if fc is None or len(fc.shape) != 2 or not len(features) or fc.shape[1] % len(features):
        raise UserError(f"{f.path}: tensor fc.weight is missing, or does not fit the {len(features)} target_layers")
    causal = f.get(f"{ARCHITECTURE}.attention.causal", "bool", False)
    shape = BlockShape(
        width=D,
        heads=H,
        kv_heads=keys.size("attention.head_count_kv", H),
        head_dim=d,
        d_ff=keys.size("feed_forward_length"),
        eps=keys.number("attention.layer_norm_rms_epsilon", most=1.0),
        features=tuple(map(int, features)),
        feature_width=fc.shape[1] // len(features),
        windows=_windows(f, keys, layers),
        causal=(causal,) * layers,
    )
    for name, t in f.tensors.items():
        if name != DRAFT_IDS and not can_dequantise(t.type):
            raise UserError(f"{f.path}: tensor {show(name)} has type {t.type.name}, which is not supported")
    factors = f.tensors.get(ROPE_FACTORS)
    return DFlashFile(
        path=f.path,
        shape=shape,
        block_size=keys.size("block_size", 16, most=MAX_BLOCK),
        mask_token=f.get(MASK, "int"),
        from_anchor=f.get(f"{ARCHITECTURE}.sample_from_anchor", "bool", False),
        rope=_rope(f, keys, d),
        rope_factors=None if factors is None else factors.dequantize().reshape(-1),
        context=keys.size("context_length", most=MAX_CONTEXT),
        ids=_ids(f),
        tensors={name: t.shape for name, t in f.tensors.items()},
        load=f.tensors.__getitem__,
        target=f.get("general.base_model.0.name", "str", ""),
    )


def _windows(f: GGUFFile, keys: "_DFlashKeys", layers: int) -> tuple[int | None, ...]:
    window = f.get(f"{ARCHITECTURE}.attention.sliding_window", "int", 0)
    if not window:
        return (None,) * layers
    key = "attention.sliding_window_pattern"
    pattern = keys.numbers(key)
    if len(pattern) < layers or not 1 <= window <= MAX_CONTEXT:
        raise UserError(f"{f.path}: {ARCHITECTURE}.{key} must say of each of the {layers} layers whether it slides")
    return tuple(window if slides else None for slides in pattern[:layers])


def _rope(f: GGUFFile, keys: "_DFlashKeys", head_dim: int) -> RopeConfig:
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
    ids = np.frombuffer(t.raw.tobytes(), "<i8")
    if ids.min(initial=0) < 0 or ids.max(initial=0) >= _MAX_SIZE:
        raise UserError(f"{f.path}: tensor {DRAFT_IDS} holds numbers that are no ids")
    return ids.astype(np.int32)


class _DFlashKeys:
    """Reads `dflash.*` keys, each with its range."""

    def __init__(self, f: GGUFFile):
        self.f = f

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

    def numbers(self, key: str) -> np.ndarray:
        """An array of integers or truth values."""
        full = f"{ARCHITECTURE}.{key}"
        value = self.f.get_numbers(full)
        if value is None or value.dtype.kind not in "iub":
            raise UserError(f"{self.f.path}: metadata key '{full}' must be an array of integers")
        return value


def write_dflash_gguf(
    file: DFlashFile, path: Path, *, tokenizer: Mapping[str, object], quant: str = "F32", name: str = ""
) -> Path:
    """Writes a drafter as GGUF with llama.cpp's names and keys; the file appears whole or not at all.

    Args:
        file: the drafter, in whatever form it was read.
        path: the file, overwritten.
        tokenizer: the `tokenizer.ggml.*` keys of the target's GGUF file, which llama.cpp reads from the drafter's.
        quant: type of the matrices: F32, F16, BF16, Q8_0, Q4_0, Q4_1 or whatever else can be written. Norms are F32.
        name: `general.name`.

    Raises:
        UserError: a type that cannot be written, or an option of the drafter that the format cannot say.
    """
    kind = _kind(file, quant)
    metadata = dict(tokenizer) | {"general.architecture": ARCHITECTURE, "general.name": name or path.stem}
    metadata |= {f"{ARCHITECTURE}.{key}": value for key, value in _metadata(file).items()} | {MASK: file.mask_token}
    tensors = []
    for tensor in file.tensors:
        if tensor in (DRAFT_IDS, ROPE_FACTORS):
            continue
        shape = file.tensors[tensor]
        of = kind if len(shape) == 2 else GGMLQuantizationType.F32
        tensors.append(NewTensor(tensor, of, shape, lambda n=tensor, t=of: encode(_float(file, n), t)))
    if file.rope_factors is not None:
        tensors.append(NewTensor.of(ROPE_FACTORS, file.rope_factors, GGMLQuantizationType.F32))
    if file.ids is not None:
        ids = file.ids.astype(np.int64)
        tensors.append(NewTensor(DRAFT_IDS, GGMLQuantizationType.I64, ids.shape, lambda: ids))
    return write_gguf(path, metadata, tensors)


def _float(file: DFlashFile, name: str) -> np.ndarray:
    return np.ascontiguousarray(file.load(name).dequantize(), np.float32).reshape(file.tensors[name])


def _metadata(file: DFlashFile) -> Json:
    """Keys without the architecture before them."""
    s, rope = file.shape, file.rope
    inexpressible = {
        "embedding_scale": file.embedding_scale != 1.0,
        "logit_scale": file.logit_scale != 1.0,
        "softcap": file.softcap != 0.0,
    }
    for what, found in inexpressible.items():
        if found:
            raise UserError(f"{file.path}: {what} has no place in a {ARCHITECTURE} GGUF file: write safetensors")
    if len(set(s.causal)) > 1:
        raise UserError(
            f"{file.path}: layers that are causal inside the block beside others that are not (sliding_attention "
            f"beside full_attention) have no place in a {ARCHITECTURE} GGUF file: write safetensors"
        )
    keys: Json = {
        "context_length": file.context,
        "embedding_length": s.width,
        "block_count": s.layers,
        "feed_forward_length": s.d_ff,
        "attention.head_count": s.heads,
        "attention.head_count_kv": s.kv_heads,
        "attention.key_length": s.head_dim,
        "attention.value_length": s.head_dim,
        "attention.layer_norm_rms_epsilon": s.eps,
        "attention.causal": s.causal[0],
        "rope.dimension_count": s.head_dim,
        "rope.freq_base": rope.base,
        "block_size": file.block_size,
        "sample_from_anchor": file.from_anchor,
        "target_layers": list(s.features),
    }
    if file.ids is not None and OUTPUT not in file.tensors:
        raise UserError(f"{file.path}: ids without an output matrix have no place in a {ARCHITECTURE} GGUF file")
    windows = {window for window in s.windows if window is not None}
    if len(windows) > 1:
        raise UserError(f"{file.path}: layers with windows of {sorted(windows)} have no place in one GGUF file")
    if windows:
        keys["attention.sliding_window"] = windows.pop()
        keys["attention.sliding_window_pattern"] = np.array([window is not None for window in s.windows])
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


def _kind(file: DFlashFile, quant: str) -> GGMLQuantizationType:
    try:
        kind = GGMLQuantizationType[quant.upper()]
        encode(np.zeros((1, GGML_QUANT_SIZES[kind][0]), np.float32), kind)
    except (KeyError, NotImplementedError) as error:
        raise UserError(f"type {quant} cannot be written: choose F32, F16, BF16, Q8_0, Q4_0 or Q4_1") from error
    block = GGML_QUANT_SIZES[kind][0]
    if any(len(shape) == 2 and shape[1] % block for shape in file.tensors.values()):
        raise UserError(f"{file.path}: its widths are no multiples of {block}, which {kind.name} needs; choose F16")
    return kind
