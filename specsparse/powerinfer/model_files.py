"""PowerInfer's model file: a dense GGUF joined with the predictors of a directory, and split into them again.

A directory of predictors is as PowerInfer's converter reads it: `model_{i}.pt` for each layer, and perhaps config.json.
"""

import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as GGML

from specsparse.engine.config import ACTIVATION_KEY, ModelConfig
from specsparse.engine.gguf.reader import MAGIC, POWERINFER_MAGIC, TensorInfo, open_gguf
from specsparse.engine.gguf.writer import NewTensor, encode, write_gguf
from specsparse.errors import UserError, refuse
from specsparse.powerinfer.modes import THRESHOLD_KEY, number, threshold_of
from specsparse.powerinfer.torch_zip import read_torch, write_torch
from specsparse.support.files import atomically

OUT_TYPES = {"f16": GGML.F16, "q4_0": GGML.Q4_0}
"""Types that PowerInfer's down projection computes rightly; every other type gives NaN or garbage there."""

_FILE_TYPES = {GGML.F16: 1, GGML.Q4_0: 2}
_SMALLEST_FFN = 1000
_CARRIED = ("attn_norm", "ffn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up")


class PredictorFile(NamedTuple):
    """One layer's predictor: fc1, float [rank, D], and fc2, float [F, rank]."""

    fc1: np.ndarray
    fc2: np.ndarray


def read_predictor(directory: str | os.PathLike[str], layer: int, *, d_model: int, d_ff: int) -> PredictorFile:
    """The predictor of one layer, checked. UserError: the file is missing or damaged, has a bias, or shapes that do not
    fit the model."""
    path = Path(directory) / f"model_{layer}.pt"
    state = read_torch(path)
    matrices = state if isinstance(state, dict) else {type(state).__name__: state}
    found = ", ".join(f"{name} {getattr(w, 'dtype', type(w).__name__)}" for name, w in matrices.items())
    floats = all(isinstance(w, np.ndarray) and w.ndim == 2 and w.dtype.kind not in "iub" for w in matrices.values())
    finite = floats and all(np.isfinite(w.astype(np.float32)).all() for w in matrices.values())
    if set(matrices) != {"fc1.weight", "fc2.weight"} or not finite:
        raise UserError(f"{path}: holds {found:.100}: fc1.weight and fc2.weight, matrices of finite floats, are needed")
    fc1, fc2 = state["fc1.weight"], state["fc2.weight"]
    if fc1.shape[1] != d_model or fc2.shape != (d_ff, fc1.shape[0]) or not fc1.shape[0]:
        raise UserError(
            f"{path}: fc1 {fc1.shape} and fc2 {fc2.shape} do not fit: [rank, {d_model}] and [{d_ff}, rank] are needed"
        )
    return PredictorFile(fc1, fc2)


def read_threshold(directory: str | os.PathLike[str]) -> float | None:
    """`sparse_threshold` of the directory's config.json; None if there is none. UserError: the file is no JSON object,
    or the threshold no number."""
    path = Path(directory) / "config.json"
    if not path.exists():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8")).get("sparse_threshold")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{path}: is no JSON object: {error!s:.80}") from None
    return None if value is None else number(value, f"{path}: sparse_threshold")


def write_predictors(
    directory: str | os.PathLike[str], predictors: Sequence[PredictorFile], *, threshold: float | None = None
) -> Path:
    """Writes `model_{i}.pt` for each layer, and config.json if a threshold is given."""
    directory = Path(directory)
    for i, p in enumerate(predictors):
        write_torch(directory / f"model_{i}.pt", {"fc1.weight": p.fc1, "fc2.weight": p.fc2})
    if threshold is not None:
        with atomically(directory / "config.json") as file:
            file.write(json.dumps({"sparse_threshold": threshold}).encode() + b"\n")
    return directory


def unreadable(config: ModelConfig) -> dict[str, object]:
    """Reasons why PowerInfer's loader cannot read a model, true if they hold."""
    arch = config.architecture
    return {
        f"PowerInfer's sparse loader knows llama and bamboo, not {arch}": arch not in ("llama", "bamboo"),
        "has biases or no gate, which PowerInfer's llama cannot hold": not config.gated or config.biases,
        f"head dimension {config.head_dim} is not width / heads, which PowerInfer needs":
            config.head_dim * config.n_heads != config.d_model,
        "has rope_freqs.weight, which PowerInfer does not read: the result would differ": config.rope.freq_factors,
    }  # fmt: skip


def to_powerinfer(
    source: str | os.PathLike[str], predictors: str | os.PathLike[str], path: str | os.PathLike[str], *,
    out_type: str = "f16", threshold: float | None = None,
) -> list[str]:  # fmt: skip
    """Joins a dense GGUF with a directory of predictors. UserError: anything PowerInfer could not load, or that does
    not fit.

    Args:
        source: a GGUF of architecture llama or bamboo.
        predictors: holds `model_{i}.pt`, and perhaps config.json with `sparse_threshold`.
        path: of the new file; it appears when it is whole.
        out_type: of `OUT_TYPES`; beside Q4_0 the output matrix is Q6_K, or Q8_0 if its rows are no multiple of 256.
        threshold: to write down; default the directory's.

    Returns:
        What PowerInfer will do differently from here, one line each.
    """
    refuse({f"type {out_type!r}: PowerInfer computes {' and '.join(OUT_TYPES)} only": out_type not in OUT_TYPES})
    f, kind = open_gguf(source), OUT_TYPES[out_type]
    config = ModelConfig.from_gguf(f)
    block = GGML_QUANT_SIZES[kind][0]
    threshold = read_threshold(predictors) if threshold is None else number(threshold, "threshold")

    def load(i: int) -> PredictorFile:
        return read_predictor(predictors, i, d_model=config.d_model, d_ff=config.d_ff)

    wrong = {"is a PowerInfer file already; --back makes a dense one of it": f.magic != MAGIC, **unreadable(config)}
    refuse(wrong, f.path)
    ranks = [load(i).fc1.shape[0] for i in range(config.n_layers)]  # all are read before the first byte is written
    uneven = any(rank % block for rank in ranks)
    refuse({f"ranks {ranks} must be multiples of {kind.name}'s block of {block}; use f16": uneven}, f.path)
    keys = {**f.metadata, "general.file_type": _FILE_TYPES[kind]}
    if threshold is not None:
        keys[THRESHOLD_KEY] = threshold
    tensors = [_recoded(f.tensors["token_embd.weight"], kind)]
    for i, rank in enumerate(ranks):
        tensors += [_recoded(f.tensors[f"blk.{i}.{name}.weight"], kind) for name in _CARRIED]
        tensors.append(_transposed(f.tensors[f"blk.{i}.ffn_down.weight"], f"blk.{i}.ffn_down_t.weight", kind))
        for name, shape in (("fc1", (rank, config.d_model)), ("fc2", (config.d_ff, rank))):
            values = partial(lambda i, name: encode(getattr(load(i), name), kind), i, name)
            tensors.append(NewTensor(f"blk.{i}.{name}.weight", kind, shape, values))
    tensors.append(_recoded(f.tensors["output_norm.weight"], kind))
    output, output_kind = f.tensors["token_embd.weight" if config.tied_output else "output.weight"], kind
    if kind == GGML.Q4_0:  # as PowerInfer's quantiser chooses it
        output_kind = GGML.Q8_0 if config.d_model % GGML_QUANT_SIZES[GGML.Q6_K][0] else GGML.Q6_K
    tensors.append(_recoded(output, output_kind, name="output.weight"))
    write_gguf(path, keys, tensors, magic=POWERINFER_MAGIC)
    notes = []
    if config.d_ff <= _SMALLEST_FFN:
        notes.append(f"feed_forward_length is {config.d_ff}: up to {_SMALLEST_FFN} PowerInfer applies another rule")
    wanted = "drelu" if config.architecture == "bamboo" else "relu"
    if config.activation != wanted:
        notes.append(f"the activation is {config.activation}: PowerInfer computes {wanted}")
    return notes


def _recoded(t: TensorInfo, kind: GGML, *, name: str | None = None) -> NewTensor:
    """The tensor in `kind` (vectors in F32); its own bytes if it has that type already."""
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

    Matrices keep their bytes; the down matrix is transposed, in F16 if it was F16, else in F32: nothing is lost.
    UserError: it is no PowerInfer file, or something cannot be written.
    """
    f, tensors = open_gguf(source), []
    if f.magic != POWERINFER_MAGIC:
        raise UserError(f"{f.path}: is no PowerInfer file (magic PWRI)")
    config = ModelConfig.from_gguf(f)
    for t in f.tensors.values():
        short = t.name.split(".")[-2]
        if short == "ffn_down_t":
            kind = GGML.F16 if t.type == GGML.F16 else GGML.F32
            tensors.append(_transposed(t, t.name.replace("ffn_down_t", "ffn_down"), kind))
        elif short not in ("fc1", "fc2"):
            tensors.append(_recoded(t, t.type))

    def matrix(i: int, name: str) -> np.ndarray:
        t = f.tensors[f"blk.{i}.{name}.weight"]
        return t.dequantize().astype(np.float16) if t.type == GGML.F16 else t.dequantize()

    layers = [PredictorFile(matrix(i, "fc1"), matrix(i, "fc2")) for i in range(config.n_layers)]
    threshold = threshold_of(f, f.get(THRESHOLD_KEY, "float")) if THRESHOLD_KEY in f.metadata else None
    write_predictors(predictors, layers, threshold=threshold)
    keys = {k: v for k, v in f.metadata.items() if k != THRESHOLD_KEY}
    return write_gguf(path, {**keys, ACTIVATION_KEY: config.activation}, tensors)
