"""The same model in another tensor type: every matrix dequantised and quantised again, metadata kept.

What is lost by quantising twice is lost: a file made here is for measuring speed, or for types as good as its source.
"""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from gguf import GGUFValueType, GGUFWriter, quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType

from specsparse.engine.gguf.reader import GGUFFile
from specsparse.errors import UserError

_T = GGMLQuantizationType


def targets() -> tuple[str, ...]:
    """Types the gguf library can quantise to, by name."""
    out = []
    for kind in sorted(GGML_QUANT_SIZES):
        try:
            quants.quantize(np.zeros((1, GGML_QUANT_SIZES[kind][0]), np.float32), kind)
        except NotImplementedError:
            continue
        out.append(kind.name)
    return tuple(out)


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

    Vectors stay float32. The output matrix is never under eight bits (Q8_0, where llama.cpp takes Q6_K or, for widths
    that are no multiple of 256, Q8_0). Rows that are no multiple of the block become F16.
    """
    if len(tensor.shape) < 2:
        return _T.F32
    block, size = GGML_QUANT_SIZES[kind]
    is_output = tensor.name == ("token_embd.weight" if tied else "output.weight")
    if is_output and 8 * size / block < 8:
        kind = _T.Q8_0
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
        UserError: the file cannot be written, or a tensor holds no weights.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)  # mkstemp's file is the owner's alone
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from None
    try:
        _write(f, Path(temporary), kind, progress)
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from None
    finally:
        Path(temporary).unlink(missing_ok=True)
    return path


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
        with np.errstate(all="ignore"):  # values beyond a half float become infinite, as in llama.cpp
            raw = tensor.raw if to == tensor.type else quants.quantize(tensor.dequantize(), to)
        writer.write_tensor_data(np.ascontiguousarray(raw))
        done += tensor.nbytes
        if progress is not None:
            progress(done, total)
    writer.close()


def file_type(kind: GGMLQuantizationType) -> int:
    """`general.file_type` of a file whose matrices are of `kind`."""
    name = "ALL_F32" if kind == _T.F32 else f"MOSTLY_{kind.name}"
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
