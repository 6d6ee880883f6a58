"""A dense GGUF and predictors into a file that PowerInfer loads, and back."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as GGML

from specsparse.engine.config import ACTIVATION_KEY, ModelConfig
from specsparse.engine.gguf.reader import MAGIC, POWERINFER_MAGIC, GGUFFile, TensorInfo, open_gguf
from specsparse.engine.gguf.writer import NewTensor, encode, write_gguf
from specsparse.errors import UserError
from specsparse.powerinfer.ffn.sparse_weights import THRESHOLD_KEY, number, threshold_of
from specsparse.powerinfer.files.checkpoints import PredictorFile, read_predictor, read_threshold, write_predictors

OUT_TYPES = {"f16": GGML.F16, "q4_0": GGML.Q4_0}
"""What PowerInfer's down projection computes rightly; every other type gives NaN or garbage there."""

_FILE_TYPES = {GGML.F16: 1, GGML.Q4_0: 2}
_SMALLEST_FFN = 1000
_CARRIED = ("attn_norm", "ffn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up")


def to_powerinfer(
    source: str | os.PathLike[str],
    predictors: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    out_type: str = "f16",
    threshold: float | None = None,
) -> list[str]:
    """Joins a dense GGUF with a directory of predictors.

    Args:
        source: a GGUF of architecture llama or bamboo.
        predictors: holds `model_{i}.pt`, and perhaps config.json with `sparse_threshold`.
        path: of the new file; it appears when it is whole.
        out_type: of `OUT_TYPES`; beside Q4_0 the output matrix is Q6_K, or Q8_0 where its rows are no multiple of 256.
        threshold: to write down; default the directory's.

    Returns:
        What PowerInfer will do differently from here, one line each.

    Raises:
        UserError: anything PowerInfer could not load, or that does not fit.
    """
    f, config = _opened(source, MAGIC, "is a PowerInfer file already; --back makes a dense one of it")
    _check_representable(f, config)
    if out_type not in OUT_TYPES:
        raise UserError(f"type {out_type!r}: PowerInfer computes {' and '.join(OUT_TYPES)} only")
    kind = OUT_TYPES[out_type]
    threshold = read_threshold(predictors) if threshold is None else number(threshold, "threshold")
    shape = {"d_model": config.d_model, "d_ff": config.d_ff}
    for i in range(config.n_layers):  # all of them before the first byte is written
        _check_blocks(read_predictor(predictors, i, **shape), kind, i)
    keys = {**f.metadata, "general.file_type": _FILE_TYPES[kind]}
    if threshold is not None:
        keys[THRESHOLD_KEY] = threshold

    def load(i: int) -> PredictorFile:
        return read_predictor(predictors, i, **shape)

    write_gguf(path, keys, list(_sparse_tensors(f, config, kind, load)), magic=POWERINFER_MAGIC)
    return _notes(config)


def _opened(source: str | os.PathLike[str], magic: bytes, otherwise: str) -> tuple[GGUFFile, ModelConfig]:
    """A file of that kind and its model."""
    f = open_gguf(source)
    if f.magic != magic:
        raise UserError(f"{f.path}: {otherwise}")
    return f, ModelConfig.from_gguf(f)


def _check_representable(f: GGUFFile, config: ModelConfig) -> None:
    """PowerInfer's loader knows no other tensors and no other head size."""
    if config.architecture not in ("llama", "bamboo"):
        raise UserError(f"{f.path}: PowerInfer's sparse loader knows llama and bamboo, not {config.architecture}")
    if not config.gated or config.biases:
        raise UserError(
            f"{f.path}: has {'biases' if config.biases else 'no gate'}, which PowerInfer's llama cannot hold"
        )
    if config.head_dim * config.n_heads != config.d_model:
        raise UserError(f"{f.path}: head dimension {config.head_dim} is not width / heads, which PowerInfer needs")
    if config.rope.freq_factors:
        raise UserError(f"{f.path}: has rope_freqs.weight, which PowerInfer does not read: the result would differ")


def _check_blocks(p: PredictorFile, kind: GGML, layer: int) -> None:
    block = GGML_QUANT_SIZES[kind][0]
    if p.fc1.shape[0] % block:
        raise UserError(
            f"layer {layer}: rank {p.fc1.shape[0]} is no multiple of {kind.name}'s block of {block}; use f16"
        )


def _notes(config: ModelConfig) -> list[str]:
    notes = []
    if config.d_ff <= _SMALLEST_FFN:
        notes.append(f"feed_forward_length is {config.d_ff}: up to {_SMALLEST_FFN} PowerInfer applies another rule")
    wanted = "drelu" if config.architecture == "bamboo" else "relu"
    if config.activation != wanted:
        notes.append(f"the activation is {config.activation}: PowerInfer computes {wanted}")
    return notes


def _sparse_tensors(f: GGUFFile, config: ModelConfig, kind: GGML, load: Callable) -> Iterator[NewTensor]:
    yield _recoded(f.tensors["token_embd.weight"], kind)
    for i in range(config.n_layers):
        for name in _CARRIED:
            yield _recoded(f.tensors[f"blk.{i}.{name}.weight"], kind)
        yield _transposed(f.tensors[f"blk.{i}.ffn_down.weight"], f"blk.{i}.ffn_down_t.weight", kind)
        rank = load(i).fc1.shape[0]
        for name, shape in (("fc1", (rank, config.d_model)), ("fc2", (config.d_ff, rank))):
            yield NewTensor(
                f"blk.{i}.{name}.weight", kind, shape, lambda i=i, name=name: encode(getattr(load(i), name), kind)
            )
    yield _recoded(f.tensors["output_norm.weight"], kind)
    output = f.tensors["token_embd.weight" if config.tied_output else "output.weight"]
    yield _recoded(output, _output_type(config, kind), name="output.weight")


def _output_type(config: ModelConfig, kind: GGML) -> GGML:
    """As PowerInfer's quantiser chooses it."""
    if kind != GGML.Q4_0:
        return kind
    return GGML.Q8_0 if config.d_model % GGML_QUANT_SIZES[GGML.Q6_K][0] else GGML.Q6_K


def _recoded(t: TensorInfo, kind: GGML, *, name: str | None = None) -> NewTensor:
    """The tensor in `kind` (vectors in F32); its own bytes where it has that type already."""
    kind = GGML.F32 if len(t.shape) == 1 else kind
    if t.shape[-1] % GGML_QUANT_SIZES[kind][0]:
        raise UserError(
            f"{t.source}: tensor '{t.name}' has rows of {t.shape[-1]}, which {kind.name} cannot hold; use f16"
        )
    return NewTensor(name or t.name, kind, t.shape, lambda: t.raw if t.type == kind else encode(t.dequantize(), kind))


def _transposed(t: TensorInfo, name: str, kind: GGML) -> NewTensor:
    return NewTensor(name, kind, t.shape[::-1], lambda: encode(t.dequantize().T, kind))


def from_powerinfer(
    source: str | os.PathLike[str], path: str | os.PathLike[str], predictors: str | os.PathLike[str]
) -> Path:
    """Splits a PowerInfer file into a dense GGUF, which says its activation in a key of ours, and its predictors.

    Matrices keep their bytes; the down matrix is transposed, in F16 where it was F16, else in F32: nothing is lost.

    Raises:
        UserError: it is no PowerInfer file, or something cannot be written.
    """
    f, config = _opened(source, POWERINFER_MAGIC, "is no PowerInfer file (magic PWRI)")
    tensors = []
    for t in f.tensors.values():
        short = t.name.split(".")[-2]
        if short == "ffn_down_t":
            kind = GGML.F16 if t.type == GGML.F16 else GGML.F32
            tensors.append(_transposed(t, t.name.replace("ffn_down_t", "ffn_down"), kind))
        elif short not in ("fc1", "fc2"):
            tensors.append(_recoded(t, t.type))
    keys = {k: v for k, v in f.metadata.items() if k != THRESHOLD_KEY}
    layers = [PredictorFile(*(_predictor(f, i, name) for name in ("fc1", "fc2"))) for i in range(config.n_layers)]
    threshold = threshold_of(f, f.get(THRESHOLD_KEY, "float")) if THRESHOLD_KEY in f.metadata else None
    write_predictors(predictors, layers, threshold=threshold)
    return write_gguf(path, {**keys, ACTIVATION_KEY: config.activation}, tensors)


def _predictor(f: GGUFFile, i: int, name: str) -> np.ndarray:
    t = f.tensors[f"blk.{i}.{name}.weight"]
    return t.dequantize().astype(np.float16) if t.type == GGML.F16 else t.dequantize()
