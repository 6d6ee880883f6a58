"""The same model in another tensor type: every matrix dequantised and quantised again, metadata kept.

What is lost by quantising twice is lost: a file made here is for measuring speed, or for types as good as its source.
"""

import difflib
import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType

from specsparse.engine.gguf.reader import GGUFFile, TensorInfo
from specsparse.engine.gguf.writer import NewTensor, encode, write_gguf
from specsparse.errors import UserError
from specsparse.support.files import need_folder

_T = GGMLQuantizationType


_FALLBACK: Mapping[GGMLQuantizationType, GGMLQuantizationType] = {_T.Q4_K: _T.Q5_0, _T.Q5_K: _T.Q5_1, _T.Q6_K: _T.Q8_0}
"""What llama.cpp takes where a row is no multiple of 256 (`tensor_type_fallback` of llama-quant.cpp)."""


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
    """The type called `name` (any case); UserError, with the types there are, where it cannot be quantised to."""
    known = targets()
    if name.upper() not in known:
        raise UserError(f"cannot quantise to {name!r}: choose one of {', '.join(known)}{nearest(name, known)}")
    return _T[name.upper()]


def nearest(name: str, known: Iterable[str]) -> str:
    """Names the type that an unknown name is nearest to: of a mix of llama.cpp's, such as Q4_K_M, its main type."""
    near = difflib.get_close_matches(name.upper(), {kind.upper(): kind for kind in known}, n=1)
    return f"; the nearest is {near[0]}" if near else ""


class Named(Protocol):
    """A tensor that is there, or one that is to be written."""

    @property
    def name(self) -> str:
        """In the file."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Numpy order."""


def type_for(tensor: Named, kind: GGMLQuantizationType, *, tied: bool) -> GGMLQuantizationType:
    """The type that `tensor` gets in a file of `kind`, by the rules of llama.cpp's quantiser where gguf can.

    Vectors stay float32. The output matrix is Q6_K beside K-quants, and Q8_0 beside other types under eight bits (where
    llama.cpp takes Q6_K). Rows that are no multiple of 256 get llama.cpp's fallback for the K-quant, and those that are
    no multiple of the block at all F16.
    """
    if len(tensor.shape) < 2:
        return _T.F32
    block, size = GGML_QUANT_SIZES[kind]
    is_output = tensor.name == ("token_embd.weight" if tied else "output.weight")
    if is_output and 8 * size / block < 8:
        kind = _T.Q6_K if kind in _FALLBACK else _T.Q8_0
    if tensor.shape[-1] % GGML_QUANT_SIZES[kind][0]:
        kind = _FALLBACK.get(kind, kind)
    return kind if tensor.shape[-1] % GGML_QUANT_SIZES[kind][0] == 0 else _T.F16


def requantise(
    f: GGUFFile,
    path: str | os.PathLike[str],
    kind: GGMLQuantizationType,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Path:
    """Writes `f` with its matrices in `kind` to `path`, which appears only when it is whole.

    Args:
        f: an open file.
        path: of the new file; replaced if it is there.
        kind: from `kind_of`.
        progress: called with (bytes of the source done, bytes in all) after each tensor.

    Raises:
        UserError: the file cannot be written (its folder must be there), or a tensor holds no weights.
    """
    need_folder(path)
    total, done = sum(t.nbytes for t in f.tensors.values()), 0

    def data(tensor: TensorInfo, to: GGMLQuantizationType) -> np.ndarray:
        nonlocal done
        raw = tensor.raw if to == tensor.type else encode(tensor.dequantize(), to)
        done += tensor.nbytes
        progress(done, total)
        return raw

    tied, tensors = "output.weight" not in f.tensors, []
    for t in f.tensors.values():
        to = type_for(t, kind, tied=tied)
        tensors.append(NewTensor(t.name, to, t.shape, partial(data, t, to)))
    f.get("general.architecture", "str")
    keys = {**f.metadata, "general.file_type": file_type(kind), "general.quantization_version": 2}
    return write_gguf(path, keys, tensors)


def file_type(kind: GGMLQuantizationType) -> int:
    """`general.file_type` of a file whose matrices are of `kind`."""
    small = "_S" if kind in (_T.Q4_K, _T.Q5_K) else ""  # llama.cpp has no name for a file of one K-quant
    name = "ALL_F32" if kind == _T.F32 else f"MOSTLY_{kind.name}{small}"
    return int(LlamaFileType[name]) if name in LlamaFileType.__members__ else int(LlamaFileType.GUESSED)
