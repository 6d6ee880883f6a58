"""EAGLE-3 heads as files: what all three forms hold, and GGUF of architecture `eagle3` as llama.cpp reads it.

The authors' form and that of the speculators library are read by `models.convert.eagle3` into the same `Eagle3File`.
Tensors go by their GGUF names. Rows of queries and keys are as in transformers (RoPE turns the two halves of a head).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from specsparse.engine.config import ModelConfig
from specsparse.engine.gguf.reader import GGUFFile, TensorInfo
from specsparse.engine.rope import halves, interleaved
from specsparse.errors import UserError
from specsparse.speculative.drafters.heads.eagle3_head import PROJECTIONS, HeadShape
from specsparse.speculative.drafters.heads.published_file import (
    EMBEDDING,
    MAX_SIZE,
    HeadKeys,
    PublishedHead,
    loader,
    write_head_gguf,
)

ARCHITECTURE = "eagle3"
"""`general.architecture` of these files."""
FEATURE_NORM = "enc.output_norm.weight"
_FC_NORM = "fc_norm"  # no GGUF file has it
_FLAGS = ("norm_before_residual", "norm_before_fc")
"""Keys of GGUF files beside those of every head."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Eagle3File(PublishedHead):
    """An EAGLE-3 head as its file describes it.

    Attributes:
        shape: of the head, and its options.
        target_width: D of the target.
        layers: ids of the target's layers whose incoming rows it reads; () for 2, L/2 and L - 3 of the target's L.
        vocab_size: ids of the target.
    """

    what: ClassVar[str] = "an EAGLE-3 head with these options"

    shape: HeadShape
    target_width: int
    layers: tuple[int, ...]
    vocab_size: int

    def __post_init__(self):
        s = self.shape
        if self.layers and len(self.layers) != s.features:
            raise UserError(
                f"{self.path}: fc.weight reads {s.features} layers' features of width {self.target_width}, the file "
                f"names {len(self.layers)} layers: {', '.join(map(str, self.layers))}"
            )
        if not self.layers and s.features != 3:
            raise UserError(f"{self.path}: fc.weight reads {s.features} layers' features, and the file names no layers")
        self.check(tensor_shapes(s, self.target_width), most_ids=self.vocab_size)


def of_arrays(
    arrays: Mapping[str, np.ndarray],
    shape: HeadShape,
    *,
    target: ModelConfig,
    layers: tuple[int, ...],
    rope_factors: np.ndarray | None = None,
    ids: np.ndarray | None = None,
    path: Path = Path("head"),
) -> Eagle3File:
    """A head of arrays, such as a trained one: rotation, context and vocabulary are the target's.

    Args:
        arrays: float32 by the GGUF names of `tensor_shapes`, queries and keys as in transformers; without
            `token_embd.weight` and `output.weight` those of the target.
        shape: of the head.
        target: the target's config.
        layers: ids of the target's layers whose incoming rows it reads.
        rope_factors: of the target's rotation, where it has any.
        ids: int[N], the target's ids of the rows of the output matrix; None for all.
        path: names it in messages.

    Raises:
        UserError: an array is missing, is of another shape, or is none of a head's.
    """
    return Eagle3File(
        path=path,
        shape=shape,
        target_width=target.d_model,
        layers=layers,
        rope=replace(target.rope, dim=shape.head_dim, pairing="neox"),
        rope_factors=rope_factors,
        context=target.context_length,
        vocab_size=target.vocab_size,
        ids=None if ids is None else np.asarray(ids, np.int64),
        tensors={name: array.shape for name, array in arrays.items()},
        load=loader(arrays, path),
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
    keys = HeadKeys(f, ARCHITECTURE, "EAGLE-3 head", _FLAGS)
    if keys.size("block_count") != 1:
        raise UserError(f"{f.path}: has {keys.size('block_count')} layers; an EAGLE-3 head of one layer is supported")
    sizes, known = keys.of_layers(), keys.of_file()
    target_width = keys.size("target_hidden_size", sizes["width"])

    def load(name: str) -> TensorInfo:
        heads = _turned_heads(name, shape)
        t = f.tensors[name]
        if heads is None:
            return t
        rows = t.raw.reshape(t.shape[0], -1)  # of a bias, one element each
        return replace(t, raw=halves(rows, heads).reshape(t.raw.shape))

    shape = HeadShape(
        **sizes,
        features=features_of(known["tensors"].get("fc.weight"), target_width, f.path),
        **{flag: keys.flag(flag) for flag in _FLAGS},
        qk_norm="blk.0.attn_q_norm.weight" in f.tensors,
        biases=tuple(name for name in PROJECTIONS if f"blk.0.{name}.bias" in f.tensors),
    )
    return Eagle3File(
        **known,
        shape=shape,
        target_width=target_width,
        layers=keys.layers,
        vocab_size=_vocab_size(f, keys),
        load=load,
    )


def _turned_heads(name: str, shape: HeadShape) -> int | None:
    """How many heads the rows of a tensor are of, where llama.cpp rotates neighbours; None for other tensors."""
    return {"blk.0.attn_q": shape.heads, "blk.0.attn_k": shape.kv_heads}.get(name.rpartition(".")[0])


def _vocab_size(f: GGUFFile, keys: HeadKeys) -> int:
    tokens = f.get_strings("tokenizer.ggml.tokens")
    embedding = f.tensors.get(EMBEDDING)
    rows = embedding.shape[0] if embedding is not None else len(tokens or ()) or MAX_SIZE
    return keys.size("vocab_size", rows)


def write_eagle3_gguf(
    file: Eagle3File, path: Path, *, tokenizer: Mapping[str, object], quant: str = "F32", name: str = ""
) -> Path:
    """Writes a head as GGUF; the arguments are those of `published_file.write_head_gguf`.

    Raises:
        UserError: a type that cannot be written, or an option of the head that llama.cpp has no key for.
    """
    s = file.shape
    for option in ("fc_norm", "norm_output", "qk_norm"):
        if getattr(s, option):
            raise UserError(
                f"{file.path}: {option} has no place in a GGUF file: llama.cpp loads one and computes something else; "
                "write the original form or that of speculators"
            )
    if not file.layers:
        raise UserError(
            f"{file.path}: names no layers (eagle_aux_hidden_state_layer_ids), and a GGUF file must: give the target"
        )
    own = {
        "block_count": 1,
        "vocab_size": file.vocab_size,
        "target_layers": list(file.layers),
        "target_hidden_size": file.target_width,
        **{flag: getattr(s, flag) for flag in _FLAGS},
    }

    def values(name: str) -> np.ndarray:
        heads = _turned_heads(name, s)
        return file.values(name) if heads is None else interleaved(file.values(name), heads)

    return write_head_gguf(
        file, path, own, architecture=ARCHITECTURE, tokenizer=tokenizer, quant=quant, name=name, values=values
    )
