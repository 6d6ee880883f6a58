"""The same model in another tensor type: every matrix dequantised and quantised again, metadata kept.

Quantising twice loses twice: a file made here is for measuring speed, or for types as good as its source.
"""

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType

from specsparse.engine.gguf.reader import GGUFFile, TensorInfo, show
from specsparse.engine.gguf.writer import NewTensor, encode, write_gguf
from specsparse.errors import UserError
from specsparse.support.files import need_folder
from specsparse.support.options import nearest

_T = GGMLQuantizationType
_FALLBACK: Mapping[GGMLQuantizationType, GGMLQuantizationType] = {_T.Q4_K: _T.Q5_0, _T.Q5_K: _T.Q5_1, _T.Q6_K: _T.Q8_0}
"""The type that llama.cpp takes if a row is not a multiple of 256 (`tensor_type_fallback` of llama-quant.cpp)."""


def targets() -> tuple[str, ...]:
    """Types that can be quantised to, by name: those of the gguf library, and our K-quants."""
    out = []
    for kind in sorted(GGML_QUANT_SIZES):
        try:
            encode(np.zeros((1, GGML_QUANT_SIZES[kind][0]), np.float32), kind)
        except NotImplementedError:
            continue
        out.append(kind.name)
    return tuple(out)


def kind_of(name: str) -> GGMLQuantizationType:
    """The type called `name` (any case); UserError, with the types there are, if it cannot be quantised to."""
    known = targets()
    if name.upper() not in known:
        raise UserError(f"cannot quantise to {name!r}: choose one of {', '.join(known)}{nearest(name.upper(), known)}")
    return _T[name.upper()]


def type_for(name: str, shape: tuple[int, ...], kind: GGMLQuantizationType, *, tied: bool) -> GGMLQuantizationType:
    """The type of a tensor (`shape` in numpy order) in a file of `kind`, by the rules of llama.cpp's quantiser.

    Vectors, biases and routers of experts stay float32. MXFP4 is of experts alone, beside Q8_0. The output matrix is
    Q6_K beside K-quants, and Q8_0 beside other types under eight bits (there llama.cpp takes Q6_K). Rows that are not a
    multiple of 256 get llama.cpp's fallback for the K-quant, and rows that are not a multiple of the block get F16.
    """
    if len(shape) < 2 or name.endswith(".bias") or "ffn_gate_inp" in name:
        return _T.F32
    if kind == _T.MXFP4 and len(shape) < 3:
        kind = _T.Q8_0
    block, size = GGML_QUANT_SIZES[kind]
    is_output = name == ("token_embd.weight" if tied else "output.weight")
    if is_output and 8 * size / block < 8:
        kind = _T.Q6_K if kind in _FALLBACK else _T.Q8_0
    if shape[-1] % GGML_QUANT_SIZES[kind][0]:
        kind = _FALLBACK.get(kind, kind)
    return kind if shape[-1] % GGML_QUANT_SIZES[kind][0] == 0 else _T.F16


def requantise(
    f: GGUFFile,
    path: str | os.PathLike[str],
    kind: GGMLQuantizationType,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Path:
    """Writes `f` with its matrices in `kind`, one of `targets`, to `path`, which appears only when it is whole.

    `progress` is called with (bytes of the source done, bytes in all) after each tensor. Raises UserError if the file
    cannot be written (its folder must be there), or a tensor holds no weights, or values that are not finite.
    """
    need_folder(path)
    total, done = sum(t.nbytes for t in f.tensors.values()), 0

    def data(tensor: TensorInfo, to: GGMLQuantizationType) -> np.ndarray:
        nonlocal done
        raw = tensor.raw
        if to != tensor.type:
            values = tensor.dequantize()
            if not np.isfinite(values).all():  # codes would hide them
                raise UserError(f"{f.path}: tensor {show(tensor.name)} holds values that are not finite: it is damaged")
            raw = encode(values, to)
        done += tensor.nbytes
        progress(done, total)
        return raw

    tied, tensors = "output.weight" not in f.tensors, []
    for t in f.tensors.values():
        to = type_for(t.name, t.shape, kind, tied=tied)
        tensors.append(NewTensor(t.name, to, t.shape, partial(data, t, to)))
    f.get("general.architecture", "str")
    keys = {**f.metadata, "general.file_type": file_type(kind), "general.quantization_version": 2}
    return write_gguf(path, keys, tensors)


def file_type(kind: GGMLQuantizationType) -> int:
    """`general.file_type` of a file whose matrices are of `kind`."""
    small = "_S" if kind in (_T.Q4_K, _T.Q5_K) else ""  # llama.cpp has no name for a file of one K-quant
    small = "_MOE" if kind == _T.MXFP4 else small
    name = "ALL_F32" if kind == _T.F32 else f"MOSTLY_{kind.name}{small}"
    return int(LlamaFileType[name]) if name in LlamaFileType.__members__ else int(LlamaFileType.GUESSED)
