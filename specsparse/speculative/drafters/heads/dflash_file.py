"""DFlash drafters as files: GGUF of architecture `dflash`, as llama.cpp reads and writes it, and what both forms hold.

The authors' and the speculators library's checkpoints are read by `models.convert.dflash` into the same `DFlashFile`.
Tensors go by their GGUF names. Rows of queries and keys are as in transformers (RoPE turns the two halves of a head).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from specsparse.engine.config import MAX_CONTEXT, RopeConfig
from specsparse.engine.gguf.reader import GGUFFile
from specsparse.errors import UserError
from specsparse.speculative.drafters.heads.dflash_block import BlockShape
from specsparse.speculative.drafters.heads.published_file import (
    MAX_SIZE,
    OUTPUT,
    HeadKeys,
    PublishedHead,
    loader,
    write_head_gguf,
)

ARCHITECTURE = "dflash"
"""`general.architecture` of these files."""
MASK = "tokenizer.ggml.mask_token_id"
MAX_BLOCK = 64
"""Rows of a block: what one verifying forward may hold."""
_OWN_KEYS = ("attention.causal", "attention.sliding_window", "attention.sliding_window_pattern", "block_size",
             "sample_from_anchor")  # fmt: skip
"""Keys beside those of every head."""
_OTHERS = {
    "markov_w1.weight": "DSpark (a Markov bias from the token before)",
    "selector_hidden.weight": "DFlash2 (convolutions and a selector of candidates)",
    "layer_fusion": "DFly (a fusion by layer)",
    "blk.0.attn_sinks.weight": "a drafter with attention sinks",
}
"""Tensors that tell a drafter of another kind, which share the architecture's name."""


@dataclass(frozen=True, eq=False, kw_only=True)
class DFlashFile(PublishedHead):
    """A drafter as its file describes it.

    Attributes:
        shape: layers and features.
        block_size: rows of a block, the last token among them.
        mask_token: id that stands for the tokens to draft.
        from_anchor: whether the last token's own row drafts too, and so each row the token after its position.
        embedding_scale, logit_scale: what embedded tokens and logits are multiplied by.
        softcap: logits x become softcap * tanh(x / softcap); 0 for none.
    """

    what: ClassVar[str] = "a DFlash drafter"

    shape: BlockShape
    block_size: int
    mask_token: int
    from_anchor: bool
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    softcap: float = 0.0

    def __post_init__(self):
        least = 1 if self.from_anchor else 2
        if not least <= self.block_size <= MAX_BLOCK:
            raise UserError(f"{self.path}: block_size={self.block_size} must lie in {least}..{MAX_BLOCK}")
        if not 0 <= self.mask_token < MAX_SIZE:
            raise UserError(f"{self.path}: mask_token_id={self.mask_token} is no token id")
        for name, kind in _OTHERS.items():
            if name in self.tensors:
                raise UserError(f"{self.path}: is {kind}, which is not supported: only DFlash itself is")
        self.check(tensor_shapes(self.shape), most_ids=MAX_SIZE)

    @property
    def drafts(self) -> int:
        """Tokens that a whole block drafts."""
        return self.block_size - (0 if self.from_anchor else 1)


def of_arrays(
    arrays: Mapping[str, np.ndarray], *, path: Path, shape: BlockShape, block_size: int, mask_token: int,
    rope: RopeConfig, context: int, ids: np.ndarray | None = None, from_anchor: bool = False,
) -> DFlashFile:  # fmt: skip
    """A drafter of float32 arrays by GGUF name (`tensor_shapes` says which): one that was trained, to be written.

    Raises:
        UserError: a tensor is missing, or of another shape.
    """
    return DFlashFile(
        path=path,
        shape=shape,
        block_size=block_size,
        mask_token=mask_token,
        from_anchor=from_anchor,
        rope=rope,
        rope_factors=None,
        context=context,
        ids=None if ids is None else np.asarray(ids, np.int64),
        tensors={name: np.shape(values) for name, values in arrays.items()},
        load=loader(arrays, path),
    )


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
    keys = HeadKeys(f, ARCHITECTURE, "DFlash drafter", _OWN_KEYS)
    sizes, layers, features = keys.of_layers(), keys.size("block_count", most=1 << 10), keys.layers
    fc = f.tensors.get("fc.weight")
    if fc is None or len(fc.shape) != 2 or not features or fc.shape[1] % len(features):
        raise UserError(f"{f.path}: tensor fc.weight is missing, or does not fit the {len(features)} target_layers")
    feature_width = fc.shape[1] // len(features)
    if keys.size("target_hidden_size", feature_width) != feature_width:
        raise UserError(f"{f.path}: tensor fc.weight reads features of {feature_width}, not of the target_hidden_size")
    return DFlashFile(
        **keys.of_file(),
        shape=BlockShape(
            **sizes,
            features=features,
            feature_width=feature_width,
            windows=_windows(keys, layers),
            causal=(keys.flag("attention.causal"),) * layers,
        ),
        block_size=keys.size("block_size", 16, most=MAX_BLOCK),
        mask_token=f.get(MASK, "int"),
        from_anchor=keys.flag("sample_from_anchor"),
        load=f.tensors.__getitem__,
        target=f.get("general.base_model.0.name", "str", ""),
    )


def _windows(keys: HeadKeys, layers: int) -> tuple[int | None, ...]:
    window = keys.f.get(keys.name("attention.sliding_window"), "int", 0)
    if not window:
        return (None,) * layers
    key = "attention.sliding_window_pattern"
    pattern = keys.numbers(key)
    if len(pattern) < layers or not 1 <= window <= MAX_CONTEXT:
        raise UserError(f"{keys.f.path}: {keys.name(key)} must say of each of the {layers} layers whether it slides")
    return tuple(window if slides else None for slides in pattern[:layers])


def write_dflash_gguf(
    file: DFlashFile, path: Path, *, tokenizer: Mapping[str, object], quant: str = "F32", name: str = ""
) -> Path:
    """Writes a drafter as GGUF; the arguments are those of `published_file.write_head_gguf`.

    Raises:
        UserError: a type that cannot be written, or an option of the drafter that the format cannot say.
    """
    s = file.shape
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
    if file.ids is not None and OUTPUT not in file.tensors:
        raise UserError(f"{file.path}: ids without an output matrix have no place in a {ARCHITECTURE} GGUF file")
    windows = {window for window in s.windows if window is not None}
    if len(windows) > 1:
        raise UserError(f"{file.path}: layers with windows of {sorted(windows)} have no place in one GGUF file")
    own = {
        "block_count": s.layers,
        "attention.causal": s.causal[0],
        "block_size": file.block_size,
        "sample_from_anchor": file.from_anchor,
        "target_layers": list(s.features),
    }
    if windows:
        own["attention.sliding_window"] = windows.pop()
        own["attention.sliding_window_pattern"] = np.array([window is not None for window in s.windows])
    return write_head_gguf(
        file, path, own, architecture=ARCHITECTURE, tokenizer={**tokenizer, MASK: file.mask_token}, quant=quant,
        name=name,
    )  # fmt: skip
