"""Writing a GGUF file, PowerInfer's among them: header, metadata and tensors, one tensor in memory at a time.

All files of the package are written here and not by `gguf.GGUFWriter`, which knows neither PowerInfer's magic nor its
type codes, and which leaves half a file behind when it fails. Here a file appears only when it is whole.
"""

import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from specsparse.engine.gguf import k_quants
from specsparse.engine.gguf.reader import DEFAULT_ALIGNMENT, MAGIC, MAX_DIMS, SCALARS, TYPE_CODES, TensorInfo
from specsparse.errors import UserError
from specsparse.support.files import atomically

VERSION = 3

_OF_DTYPE = {np.dtype(code).str[1:]: kind for kind, code in SCALARS.items()}


def encode(values: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """The bytes of float32[..., n] in `kind`, n a multiple of its block. Raises NotImplementedError for other types."""
    values = np.ascontiguousarray(values, np.float32)
    if kind in k_quants.KINDS:
        return k_quants.quantize(values, kind)
    with np.errstate(all="ignore"):  # values beyond a half float become infinite, as in llama.cpp
        return quants.quantize(values, kind)


@dataclass(frozen=True, eq=False)
class NewTensor:
    """A tensor to write, its shape in numpy order.

    `data` makes the bytes when their turn comes, so that one tensor at a time is in memory.
    """

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    data: Callable[[], np.ndarray]

    @classmethod
    def from_values(cls, name: str, values: np.ndarray, kind: GGMLQuantizationType) -> "NewTensor":
        """Float32 values, coded in `kind` when their turn comes."""
        return cls(name, kind, values.shape, lambda: encode(values, kind))

    @classmethod
    def from_file(cls, tensor: TensorInfo) -> "NewTensor":
        """A tensor of another file, byte for byte."""
        return cls(tensor.name, tensor.type, tensor.shape, lambda: tensor.raw)

    @property
    def nbytes(self) -> int:
        block, size = GGML_QUANT_SIZES[self.type]
        return prod(self.shape) // block * size


def write_gguf(
    path: str | os.PathLike[str],
    metadata: Mapping[str, object],
    tensors: Sequence[NewTensor],
    *,
    magic: bytes = MAGIC,
) -> Path:
    """Writes a GGUF v3 file, little-endian, aligned to 32.

    Args:
        metadata: ints become uint32 if they fit, floats float32, and lists of them int32 and float32; numpy scalars
            and arrays keep their own type. Empty lists and the alignment of another file are left out.
        tensors: in file order.
        magic: b"GGUF" or b"PWRI".

    Raises:
        UserError: the file cannot be written, a text is not valid Unicode, or a type has no code in a file of this
            magic or does not fit the rows.
        ValueError: a key or a tensor that no reader would take.
    """
    metadata = {
        k: v for k, v in metadata.items()
        if k != "general.alignment" and not (isinstance(v, list | np.ndarray) and len(v) == 0)
    }  # fmt: skip
    names, codes = [t.name for t in tensors], {kind: code for code, kind in TYPE_CODES[magic].items()}
    if len(set(names)) < len(names) or "" in names:
        raise ValueError(f"{path}: tensors need names of their own: {', '.join(names)}")
    head = [magic, struct.pack("<IQQ", VERSION, len(tensors), len(metadata))]
    head += [_string(key) + _value(key, value) for key, value in metadata.items()]
    at = 0
    for t in tensors:
        if not 1 <= len(t.shape) <= MAX_DIMS:
            raise ValueError(f"{path}: tensor {t.name} has {len(t.shape)} dimensions, 1 to {MAX_DIMS} are allowed")
        if t.type not in codes or t.shape[-1] % GGML_QUANT_SIZES[t.type][0]:
            raise UserError(
                f"{path}: tensor {t.name} with rows of {t.shape[-1]}: type {t.type.name} cannot hold them in a "
                f"{magic.decode()} file"
            )
        ne = t.shape[::-1]
        head.append(_string(t.name) + struct.pack(f"<I{len(ne)}QIQ", len(ne), *ne, codes[t.type], at))
        at += _padded(t.nbytes)
    blob = b"".join(head)
    with atomically(path) as file:
        file.write(blob.ljust(_padded(len(blob)), b"\0"))
        for t in tensors:
            data = np.ascontiguousarray(t.data()).tobytes()
            if len(data) != t.nbytes:
                raise ValueError(f"tensor {t.name} has {len(data)} bytes, its type and shape ask for {t.nbytes}")
            file.write(data.ljust(_padded(len(data)), b"\0"))
    return Path(path)


def _padded(n: int) -> int:
    return -(-n // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT


def _string(text: str) -> bytes:
    try:
        data = text.encode()
    except UnicodeEncodeError:
        raise UserError(f"{text!r:.60} cannot be written: it is not valid Unicode") from None
    return struct.pack("<Q", len(data)) + data


def _value(key: str, value: object) -> bytes:
    """Type code and bytes of a metadata value."""
    if not key:
        raise ValueError(f"a metadata key is empty; its value is {value!r}")
    if isinstance(value, str):
        return struct.pack("<I", GGUFValueType.STRING) + _string(value)
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        items = b"".join(map(_string, value))
        return struct.pack("<IIQ", GGUFValueType.ARRAY, GGUFValueType.STRING, len(value)) + items
    array = np.asarray(value)
    if not isinstance(value, np.ndarray | np.generic):  # numpy's own types stay; else the width that files have
        if array.dtype == np.float64:
            array = array.astype(np.float32)
        elif array.dtype == np.int64:
            widths = (np.int32, np.int64) if array.ndim else (np.uint32, np.uint64, np.int64)
            low, high = array.min(), array.max()
            array = array.astype(next(t for t in widths if np.iinfo(t).min <= low and high <= np.iinfo(t).max))
    if array.dtype.str[1:] not in _OF_DTYPE or array.ndim > 1:
        raise ValueError(f"metadata key {key} holds {value!r:.60}, which GGUF has no type for")
    of = _OF_DTYPE[array.dtype.str[1:]]
    head = struct.pack("<IIQ", GGUFValueType.ARRAY, of, array.size) if array.ndim else struct.pack("<I", of)
    return head + array.tobytes()
