"""Tiny random Llama models, as a config or as a GGUF file."""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from specsparse.engine.architectures import ARCHITECTURES
from specsparse.engine.config import PROJECTIONS, ModelConfig
from specsparse.engine.gguf.writer import NewTensor, write_gguf
from specsparse.engine.rope_config import RopeConfig, Scaling
from specsparse.kernels.packing.random_blocks import random_quantised
from specsparse.testing.vocab import bpe_vocabulary, spm_vocabulary

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""A chat template as models carry it."""

_Quant = GGMLQuantizationType | str


def tiny_config(
    *,
    architecture: str = "llama",
    n_layers: int = 2,
    d_model: int = 64,
    n_heads: int = 4,
    n_kv_heads: int = 2,
    head_dim: int | None = None,
    d_ff: int = 96,
    vocab_size: int = 300,
    context_length: int = 256,
    norm_eps: float = 1e-5,
    tied: bool = False,
    bias: bool | Sequence[str] = False,
    gated: bool = True,
    rope_base: float = 10000.0,
    rope_scaling: Scaling = "none",
    rope_factor: float = 1.0,
    original_context: int | None = None,
    attn_factor: float = 1.0,
    freq_factors: bool = False,
    window: int = 0,
    full_every: int | None = None,
) -> ModelConfig:
    """The config of a tiny model; what `ModelConfig.from_gguf` reads from `write_tiny_gguf` of the same keywords.

    Args:
        architecture: a name of `ARCHITECTURES`.
        n_layers, d_model, n_heads, n_kv_heads, d_ff, vocab_size, context_length, norm_eps: as in `ModelConfig`.
        head_dim: d_model / n_heads where not given.
        tied: the output matrix is the embedding.
        bias: which projections have one; True is all. What the architecture needs comes on top.
        gated: whether the FFN has a gate; a file without one must name its activation.
        rope_base, rope_scaling, rope_factor, original_context, attn_factor, freq_factors: as in `RopeConfig`.
        window: of the layers that have one; an architecture that must have it takes 8 where none is given.
        full_every: as in `ModelConfig`; None is the architecture's.
    """
    family = ARCHITECTURES[architecture]
    asked = set(PROJECTIONS) if bias is True else set(bias or ()) | set(family.biases)
    head_dim = head_dim or d_model // n_heads
    window = window or (8 if family.window == "must" else 0)
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
        biases=tuple(name for name in PROJECTIONS if name in asked),
        activation=family.activation,
        gated=gated,
        window=window,
        full_every=(family.full_every if full_every is None else full_every) if window else 0,
        local_rope=local,
    )


def write_tiny_gguf(
    path: str | os.PathLike[str],
    *,
    quant: _Quant = "F32",
    embedding_quant: _Quant | None = None,
    tokenizer: Literal["bpe", "spm", "none"] = "bpe",
    pre: str = "gpt-2",
    chat_template: str | None = CHATML,
    metadata: dict[str, Any] | None = None,
    seed: int = 0,
    **config: Any,
) -> Path:
    """Writes a tiny random valid model and returns its path.

    Weights are of deviation 1/sqrt(inputs), so that activations and logits stay near one.

    Args:
        path: the file, overwritten.
        quant: type of every matrix; any type gguf can dequantise. Widths not given are rounded up to its
            block.
        embedding_quant: type of the embedding and the output, where it is to differ.
        tokenizer: vocabulary family, or "none" (then `vocab_size` may be anything).
        pre: `tokenizer.ggml.pre` of a BPE vocabulary.
        chat_template: of a vocabulary, or None.
        metadata: more keys (int, float, bool, str or lists of those); they replace keys of the same name.
        seed: of the random numbers.
        **config: keywords of `tiny_config`.

    Raises:
        ValueError: a width given that is no multiple of the type's block, or a vocabulary too small for its tokenizer.
    """
    kind, kind_embedding = _kind(quant), _kind(embedding_quant or quant)
    block = max(GGML_QUANT_SIZES[kind][0], GGML_QUANT_SIZES[kind_embedding][0])
    for name, default in (("d_model", 64), ("d_ff", 96)):
        config.setdefault(name, -(-default // block) * block)
    cfg = tiny_config(**config)
    rng, tensors = np.random.default_rng(seed), []
    for name, shape in cfg.tensor_shapes():
        of_kind = GGMLQuantizationType.F32
        if name == "rope_freqs.weight":
            values = np.linspace(1.0, 8.0, shape[0], dtype=np.float32)
        elif len(shape) == 1:
            values = rng.normal(1.0 if name.endswith("norm.weight") else 0.0, 0.1, shape).astype(np.float32)
        else:
            of_kind = kind_embedding if name in ("token_embd.weight", "output.weight") else kind
            values = _matrix(rng, shape, of_kind, 1.0 if "embd" in name else None)
        tensors.append(NewTensor(name, of_kind, shape, lambda values=values: values))
    keys = metadata_of(cfg, tokenizer=tokenizer, pre=pre, chat_template=chat_template)
    return write_gguf(path, {**keys, **(metadata or {})}, tensors)


def _kind(quant: _Quant) -> GGMLQuantizationType:
    return GGMLQuantizationType[quant] if isinstance(quant, str) else quant


def _matrix(
    rng: np.random.Generator, shape: tuple[int, ...], kind: GGMLQuantizationType, std: float | None
) -> np.ndarray:
    """Random weights in `kind`: quantised normal ones where gguf can do that, else random codes."""
    rows, cols = shape
    deviation = std if std is not None else 1.0 / math.sqrt(cols)
    if cols % GGML_QUANT_SIZES[kind][0]:
        raise ValueError(f"a matrix of {cols} columns cannot be {kind.name}: its block is {GGML_QUANT_SIZES[kind][0]}")
    values = rng.normal(0, deviation, shape).astype(np.float32)
    try:
        return quants.quantize(values, kind)
    except NotImplementedError:
        return random_quantised(kind, rows, cols, int(rng.integers(1 << 31)), std=deviation)


def metadata_of(
    cfg: ModelConfig, *, tokenizer: str = "spm", pre: str = "gpt-2", chat_template: str | None = None
) -> dict[str, Any]:
    """The metadata of a model file with a made-up vocabulary of that family; keywords as in `write_tiny_gguf`."""
    return {
        "general.architecture": cfg.architecture,
        **_model_keys(cfg),
        **_tokenizer_keys(cfg, tokenizer, pre, chat_template),
    }


def _model_keys(cfg: ModelConfig) -> dict[str, Any]:
    rope, a = cfg.rope, cfg.architecture
    keys: dict[str, Any] = {
        "general.name": "tiny",
        f"{a}.block_count": cfg.n_layers,
        f"{a}.context_length": cfg.context_length,
        f"{a}.embedding_length": cfg.d_model,
        f"{a}.feed_forward_length": cfg.d_ff,
        f"{a}.attention.head_count": cfg.n_heads,
        f"{a}.attention.head_count_kv": cfg.n_kv_heads,
        f"{a}.attention.layer_norm_rms_epsilon": cfg.norm_eps,
        f"{a}.vocab_size": cfg.vocab_size,
        f"{a}.rope.dimension_count": rope.dim,
        f"{a}.rope.freq_base": rope.base,
    }
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
    if rope.attn_factor != 1.0:
        keys[f"{a}.rope.scaling.attn_factor"] = rope.attn_factor
    return keys


def _tokenizer_keys(cfg: ModelConfig, tokenizer: str, pre: str, chat_template: str | None) -> dict[str, Any]:
    if tokenizer == "none":
        return {}
    keys: dict[str, Any] = {"tokenizer.chat_template": chat_template} if chat_template else {}
    if tokenizer == "bpe":
        tokens, types, merges = bpe_vocabulary(cfg.vocab_size)
        keys |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.merges": merges}
        special = {"bos": 1, "eos": 2, "unknown": 0}
    elif tokenizer == "spm":
        tokens, types, scores = spm_vocabulary(cfg.vocab_size)
        keys |= {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": scores}
        keys |= {"tokenizer.ggml.add_bos_token": True}
        special = {"bos": 1, "eos": 2, "unknown": 0}
    else:
        raise ValueError(f"tokenizer {tokenizer!r} is not one of bpe, spm, none")
    keys |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    return keys | {f"tokenizer.ggml.{name}_token_id": token for name, token in special.items()}
