"""The same model in another tensor type: every matrix dequantised and quantised again, metadata kept.

What is lost by quantising twice is lost: a file made here is for measuring speed, or for types as good as its source.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from gguf import GGUFValueType, GGUFWriter, quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType

from specsparse.engine.gguf import k_quants
from specsparse.engine.gguf.reader import GGUFFile
from specsparse.errors import UserError
from specsparse.support.atomic import need_folder, replacing

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


def encode(values: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """The bytes of float32[..., n] in `kind`, n a multiple of its block.

    Raises:
        NotImplementedError: nothing here writes that type.
    """
    values = np.ascontiguousarray(values, np.float32)
    if kind in k_quants.KINDS:
        return k_quants.quantize(values, kind)
    with np.errstate(all="ignore"):  # values beyond a half float become infinite, as in llama.cpp
        return quants.quantize(values, kind)


def kind_of(name: str) -> GGMLQuantizationType:
    """The type called `name` (any case); UserError, with the types there are, where it cannot be quantised to."""
    known = targets()
    if name.upper() not in known:
        raise UserError(f"cannot quantise to {name!r}: choose one of {', '.join(known)}")
    return _T[name.upper()]


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
    progress: Callable[[int, int], None] | None = None,
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
    with replacing(path) as temporary:
        _write(f, temporary, kind, progress)
    return Path(path)


def _write(f: GGUFFile, path: Path, kind: GGMLQuantizationType, progress) -> None:
    writer = GGUFWriter(path, f.get("general.architecture", "str"), use_temp_file=False)
    keys = {**f.metadata, "general.file_type": file_type(kind), "general.quantization_version": 2}
    for key, value in keys.items():
        if key == "general.alignment":
            writer.add_custom_alignment(int(value))
        elif key != "general.architecture":  # the writer's own
            add_key(writer, key, value)
    tied, total, done = "output.weight" not in f.tensors, sum(t.nbytes for t in f.tensors.values()), 0
    plan = [(t, type_for(t, kind, tied=tied)) for t in f.tensors.values()]
    for tensor, to in plan:  # the header first, so that one tensor at a time is in memory
        rows_bytes = tensor.shape[-1] // GGML_QUANT_SIZES[to][0] * GGML_QUANT_SIZES[to][1]
        nbytes = int(np.prod(tensor.shape[:-1], dtype=np.int64)) * rows_bytes
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), nbytes, raw_dtype=to)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor, to in plan:
        raw = tensor.raw if to == tensor.type else encode(tensor.dequantize(), to)
        writer.write_tensor_data(np.ascontiguousarray(raw))
        done += tensor.nbytes
        if progress is not None:
            progress(done, total)
    writer.close()


def file_type(kind: GGMLQuantizationType) -> int:
    """`general.file_type` of a file whose matrices are of `kind`."""
    small = "_S" if kind in (_T.Q4_K, _T.Q5_K) else ""  # llama.cpp has no name for a file of one K-quant
    name = "ALL_F32" if kind == _T.F32 else f"MOSTLY_{kind.name}{small}"
    return int(LlamaFileType[name]) if name in LlamaFileType.__members__ else int(LlamaFileType.GUESSED)


_NUMPY = {
    "u1": GGUFValueType.UINT8, "i1": GGUFValueType.INT8, "u2": GGUFValueType.UINT16, "i2": GGUFValueType.INT16,
    "u4": GGUFValueType.UINT32, "i4": GGUFValueType.INT32, "u8": GGUFValueType.UINT64, "i8": GGUFValueType.INT64,
    "f4": GGUFValueType.FLOAT32, "f8": GGUFValueType.FLOAT64, "b1": GGUFValueType.BOOL,
}  # fmt: skip


def add_key(writer: GGUFWriter, key: str, value: Any) -> None:
    """One key: scalars in the width that files have (uint32, float32), arrays in their own."""
    if isinstance(value, np.ndarray):
        of = _NUMPY[value.dtype.str[1:]]
        if value.size:
            writer.add_key_value(key, value.tolist(), GGUFValueType.ARRAY, sub_type=of)
    elif isinstance(value, list):
        if value:  # the writer has no empty arrays
            writer.add_key_value(key, value, GGUFValueType.ARRAY, sub_type=GGUFValueType.STRING)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        small = GGUFValueType.UINT32 if value < 1 << 32 else GGUFValueType.UINT64
        writer.add_key_value(key, value, small if value >= 0 else GGUFValueType.INT64)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)
