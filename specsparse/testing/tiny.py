"""Tiny random models as a config or a GGUF file, small vocabularies of both families, and a dummy tokenizer."""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from specsparse import kernels
from specsparse.engine import llama, weights
from specsparse.engine.architectures import ARCHITECTURES, Gating
from specsparse.engine.config import EXPERTS, GATINGS, PROJECTIONS, ROUTER, ModelConfig
from specsparse.engine.gguf.reader import GGUFFile
from specsparse.engine.gguf.writer import NewTensor, write_gguf
from specsparse.engine.model import Model
from specsparse.engine.rope import RopeConfig, Scaling
from specsparse.engine.text.bpe import byte_characters
from specsparse.engine.weights import Params
from specsparse.kernels.packing.random_blocks import random_quantised
from specsparse.models.convert.write import keys_of

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""A chat template as models carry it."""

_Quant = GGMLQuantizationType | str


def tiny_config(
    *, architecture: str = "llama", n_layers: int = 2, d_model: int = 64, n_heads: int = 4, n_kv_heads: int = 2,
    head_dim: int | None = None, d_ff: int = 96, vocab_size: int = 300, context_length: int = 256,
    norm_eps: float = 1e-5, tied: bool = False, bias: bool | Sequence[str] = False, gated: bool = True,
    rope_base: float = 10000.0, rope_scaling: Scaling = "none", rope_factor: float = 1.0,
    original_context: int | None = None, attn_factor: float = 1.0, freq_factors: bool = False, window: int = 0,
    full_every: int | None = None, n_experts: int = 8, n_chosen: int = 2, gating: Gating = "softmax",
) -> ModelConfig:  # fmt: skip
    """The config of a tiny model, as `ModelConfig.from_gguf` reads it from `write_tiny_gguf` of the same keywords.

    Args:
        architecture: a name of `ARCHITECTURES`.
        n_layers, d_model, n_heads, n_kv_heads, d_ff, vocab_size, context_length, norm_eps: as in `ModelConfig`.
        head_dim: by default d_model / n_heads.
        tied: the output matrix is the embedding.
        bias: which projections have one; True is all. Those that the architecture needs are added.
        gated: whether the FFN has a gate; a file without one must name its activation.
        rope_base, rope_scaling, rope_factor, original_context, attn_factor, freq_factors: as in `RopeConfig`.
        window: of the layers that have one; an architecture that must have one takes 8 by default.
        full_every: as in `ModelConfig`; None is the architecture's.
        n_experts, n_chosen: of an architecture with experts.
        gating: of one whose files say it.
    """
    family = ARCHITECTURES[architecture]
    routing = family.routing
    matrices = (*PROJECTIONS[:4], ROUTER, *EXPERTS) if routing else PROJECTIONS
    asked = set(matrices) if bias is True else set(bias or ()) | set(family.biases)
    head_dim = head_dim or d_model // n_heads
    window = (window and family.only_window) or window or (8 if family.window == "must" else 0)
    local = None
    if window and family.local_rope_base is not None:
        local = RopeConfig(family.local_rope_base, head_dim, family.pairing)
    rope = RopeConfig(
        base=rope_base,
        dim=head_dim,
        pairing=family.pairing,
        scaling=rope_scaling,
        factor=rope_factor,
        original_context=original_context or context_length,
        attn_factor=attn_factor,
        freq_factors=freq_factors,
        rounds_yarn=family.rounds_yarn,
    )
    return ModelConfig(
        architecture=architecture,
        n_layers=n_layers,
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        d_ff=d_ff,
        vocab_size=vocab_size,
        context_length=context_length,
        norm_eps=float(np.float32(norm_eps)),  # the file holds float32
        rope=rope,
        tied_output=tied,
        biases=tuple(name for name in matrices if name in asked),
        activation=family.activation,
        gated=gated,
        window=window,
        full_every=(family.full_every if full_every is None else full_every) if window else 0,
        local_rope=local,
        n_experts=n_experts if routing else 0,
        n_chosen=n_chosen if routing else 0,
        gating=routing.gating or gating if routing else "softmax",
    )


def write_tiny_gguf(
    path: str | os.PathLike[str], *, quant: _Quant = "F32", embedding_quant: _Quant | None = None,
    tokenizer: Literal["bpe", "spm", "none"] = "bpe", pre: str = "gpt-2", chat_template: str | None = CHATML,
    metadata: dict[str, Any] | None = None, seed: int = 0, **config: Any,
) -> Path:  # fmt: skip
    """Writes a tiny random valid model and returns its path.

    Weights are of deviation 1/sqrt(inputs), so that activations and logits stay near one.

    Args:
        path: the file, overwritten.
        quant: type of every matrix; any type gguf can dequantise. Widths not given are rounded up to its block.
        embedding_quant: type of the embedding and the output, if it differs.
        tokenizer: vocabulary family, or "none" (then `vocab_size` may be anything).
        pre: `tokenizer.ggml.pre` of a BPE vocabulary.
        chat_template: of a vocabulary, or None.
        metadata: more keys (int, float, bool, str or lists of those); they replace keys of the same name.
        seed: of the random numbers.
        **config: keywords of `tiny_config`.

    Raises:
        ValueError: a width that is not a multiple of the type's block, or a vocabulary too small for its tokenizer.
    """
    kind, kind_embedding = (
        GGMLQuantizationType[q] if isinstance(q, str) else q for q in (quant, embedding_quant or quant)
    )
    block = max(GGML_QUANT_SIZES[kind][0], GGML_QUANT_SIZES[kind_embedding][0])
    for name, default in (("d_model", 64), ("d_ff", 96)):
        config.setdefault(name, -(-default // block) * block)
    cfg = tiny_config(**config)
    rng, tensors = np.random.default_rng(seed), []
    for name, shape in cfg.tensor_shapes():
        of_kind = GGMLQuantizationType.F32
        if name == "rope_freqs.weight":
            values = np.linspace(1.0, 8.0, shape[0], dtype=np.float32)
        elif len(shape) == 1 or name.endswith(".bias"):
            values = rng.normal(1.0 if name.endswith("norm.weight") else 0.0, 0.1, shape).astype(np.float32)
        else:
            of_kind, deviation = kind, 1.0 if "embd" in name else 1.0 / math.sqrt(shape[-1])
            if ROUTER in name:
                of_kind = GGMLQuantizationType.F32
            if name in ("token_embd.weight", "output.weight"):
                of_kind = kind_embedding
            if shape[-1] % (block := GGML_QUANT_SIZES[of_kind][0]):
                raise ValueError(f"a matrix of {shape[-1]} columns cannot be {of_kind.name}: its block is {block}")
            values = rng.normal(0, deviation, shape).astype(np.float32)
            try:
                values = quants.quantize(values, of_kind)
            except NotImplementedError:  # random codes, of types that gguf cannot make
                rows = math.prod(shape[:-1])
                values = random_quantised(of_kind, rows, shape[-1], int(rng.integers(1 << 31)), std=deviation)
        tensors.append(NewTensor(name, of_kind, shape, lambda values=values: values))
    keys = metadata_of(cfg, tokenizer=tokenizer, pre=pre, chat_template=chat_template)
    return write_gguf(path, {**keys, **(metadata or {})}, tensors)


def model_of(f: GGUFFile, config: ModelConfig, tokenizer: Any, params: Params | None = None) -> Model:
    """The model of an open file on this machine's kernels, without the checks and choices of `load`.

    `params` are its weights if they are packed already.
    """
    chosen = kernels.get()
    params = packed(f, config) if params is None else params
    return Model(
        config=config,
        tokenizer=tokenizer,
        params=params,
        forward=llama.make_forward(config, chosen),
        kernels=chosen,
        kv_dtype="f16",
        path=f.path,
        footprint=weights.footprint(params, f, config),
    )


def packed(f: GGUFFile, config: ModelConfig) -> Params:
    """The weights of an open file for this machine's kernels."""
    return weights.load_params(f, config, floats=kernels.get().name != "native")


def metadata_of(
    cfg: ModelConfig, *, tokenizer: str = "spm", pre: str = "gpt-2", chat_template: str | None = None
) -> dict[str, Any]:
    """The metadata of a model file with a made-up vocabulary of that family; keywords as in `write_tiny_gguf`."""
    rope, a = cfg.rope, cfg.architecture
    keys = keys_of(cfg, "tiny")
    if cfg.head_dim * cfg.n_heads != cfg.d_model:
        keys |= {f"{a}.attention.key_length": cfg.head_dim, f"{a}.attention.value_length": cfg.head_dim}
    if rope.scaling != "none":
        keys |= {
            f"{a}.rope.scaling.type": rope.scaling,
            f"{a}.rope.scaling.factor": rope.factor,
            f"{a}.rope.scaling.original_context_length": rope.original_context,
        }
    if cfg.window:
        keys[f"{a}.attention.sliding_window"] = cfg.window
        keys |= {f"{a}.attention.sliding_window_pattern": cfg.full_every} if cfg.full_every else {}
    if cfg.n_experts:
        keys |= {f"{a}.expert_count": cfg.n_experts, f"{a}.expert_used_count": cfg.n_chosen}
        keys |= {f"{a}.expert_feed_forward_length": cfg.d_ff}
        keys |= {f"{a}.expert_gating_func": GATINGS.index(cfg.gating)}
    if rope.attn_factor != 1.0:
        keys[f"{a}.rope.scaling.attn_factor"] = rope.attn_factor
    if tokenizer == "none":
        return keys
    if chat_template:
        keys["tokenizer.chat_template"] = chat_template
    if tokenizer == "bpe":
        tokens, types, merges = bpe_vocabulary(cfg.vocab_size)
        keys |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.merges": merges}
    else:
        tokens, types, scores = spm_vocabulary(cfg.vocab_size)
        keys |= {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": scores}
        keys |= {"tokenizer.ggml.add_bos_token": True}
    keys |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    special = {"bos": 1, "eos": 2, "unknown": 0}
    return keys | {f"tokenizer.ggml.{name}_token_id": token for name, token in special.items()}


TYPE_NORMAL, TYPE_UNKNOWN, TYPE_CONTROL, TYPE_UNUSED, TYPE_BYTE = 1, 2, 3, 5, 6
"""Values of `tokenizer.ggml.token_type` in use here."""

_SPECIAL: tuple[str, ...] = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_MERGES: tuple[str, ...] = (
    "Ġ t", "h e", "Ġ a", "i n", "r e", "Ġt he", "o n", "Ġ s", "e r", "a t", "Ġ w", "o r", "e n", "n d", "Ġ o", "Ġ c",
    "Ġa nd", "in g", "o u", "Ġ f", "e s", "i s", "Ġt o", "Ġ m", "l l", "Ġ Ġ", "Ġo f", "Ġ h", "i t", "l o", "Ġh e",
    "ll o", "Ġhe llo", "Ġw or", "l d", "Ġwor ld", "Ð ¿", "Ã ©", "1 2", "' s", "Ċ Ċ",
)  # fmt: skip
_PIECES: tuple[str, ...] = (
    "▁", "e", "t", "a", "o", "i", "n", "s", "h", "r", "d", "l", "u", "c", "m", "w", "f", "g", "y", "p", "b", "v", "k",
    ".", ",", "'", "▁t", "he", "▁a", "in", "▁the", "er", "on", "re", "▁s", "▁w", "or", "ll", "▁h", "▁he", "llo",
    "▁hello", "ld", "▁world", "▁wor", "é", "an", "nd", "▁and", "▁▁",
)  # fmt: skip


def bpe_vocabulary(size: int = 300) -> tuple[list[str], list[int], list[str]]:
    """Tokens, types and merges of a byte-level BPE: 3 special tokens, 256 bytes, merges, then unused ones up to `size`.

    `<|endoftext|>` is 0, `<|im_start|>` 1 and `<|im_end|>` 2; byte b is 3 + b.

    Raises:
        ValueError: size is below 259.
    """
    tokens = [*_SPECIAL, *byte_characters()]
    if size < len(tokens):
        raise ValueError(f"a byte-level vocabulary needs at least {len(tokens)} tokens, {size} asked for")
    merges = list(_MERGES[: size - len(tokens)])
    tokens += [merge.replace(" ", "") for merge in merges]
    types = [TYPE_CONTROL] * len(_SPECIAL) + [TYPE_NORMAL] * (len(tokens) - len(_SPECIAL))
    unused = range(size - len(tokens))
    return tokens + [f"<unused{i}>" for i in unused], types + [TYPE_UNUSED] * len(unused), merges


def spm_vocabulary(size: int = 309) -> tuple[list[str], list[int], list[float]]:
    """Tokens, types and scores of a SentencePiece vocabulary with byte fallback, unused tokens filling up to `size`.

    `<unk>` is 0, `<s>` 1, `</s>` 2; byte b is 3 + b.

    Raises:
        ValueError: size is below 259.
    """
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    if size < len(tokens):
        raise ValueError(f"a vocabulary with byte fallback needs at least {len(tokens)} tokens, {size} asked for")
    types = [TYPE_UNKNOWN, TYPE_CONTROL, TYPE_CONTROL] + [TYPE_BYTE] * 256
    pieces = list(_PIECES[: size - len(tokens)])
    # Longer pieces score higher, so that every merge that can happen does.
    scores = [0.0] * len(tokens) + [10.0 * len(piece) - rank for rank, piece in enumerate(pieces)]
    tokens, types, unused = [*tokens, *pieces], types + [TYPE_NORMAL] * len(pieces), range(size - len(scores))
    tokens += [f"<unused{i}>" for i in unused]
    return tokens, types + [TYPE_UNUSED] * len(unused), scores + [-1000.0] * len(unused)


class DummyTokenizer:
    """Bytes as tokens: id b + 3 is byte b; 0 is padding, 1 begins a text, 2 ends it.

    Attributes:
        vocab_size: 259 or more; ids past the bytes decode to nothing.
        bos_id, eos_id: 1 and 2.
    """

    type = "bytes"
    add_bos = True
    add_eos = False
    bos_id = 1
    eos_id = 2
    unknown_id = 0
    stop_ids = frozenset({2})

    def __init__(self, vocab_size: int = 259):
        self.vocab_size = vocab_size

    def token_text(self, index: int) -> str:
        """A name for each id, as real tokenizers have a text."""
        return f"<{index}>"

    def encode(self, text: str, add_special: bool = False, parse_special: bool = False) -> list[int]:
        """UTF-8 bytes of the text, after `bos_id` if `add_special`. There are no special strings to parse."""
        return [self.bos_id] * add_special + [byte + 3 for byte in text.encode()]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the byte ids; half a character becomes U+FFFD, every other id nothing."""
        return bytes(i - 3 for i in ids if 3 <= i < 259).decode(errors="replace")

    def apply_chat_template(self, messages: Sequence[dict[str, str]]) -> str:
        """One `role: content` line a message, and the assistant's turn opened."""
        return "".join(f"{m['role']}: {m['content']}\n" for m in messages) + "assistant: "
