"""Writing GGUF containers, PowerInfer's among them: its magic, and its codes for integer tensors.

`gguf.GGUFWriter` knows neither. A file appears only when it is whole.
"""

import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from specsparse.engine.gguf.reader import DEFAULT_ALIGNMENT, POWERINFER_MAGIC, TYPE_CODES
from specsparse.errors import UserError
from specsparse.support.atomic import atomically

VERSION = 3

_OF_DTYPE = {
    "u1": GGUFValueType.UINT8, "i1": GGUFValueType.INT8, "u2": GGUFValueType.UINT16, "i2": GGUFValueType.INT16,
    "u4": GGUFValueType.UINT32, "i4": GGUFValueType.INT32, "u8": GGUFValueType.UINT64, "i8": GGUFValueType.INT64,
    "f4": GGUFValueType.FLOAT32, "f8": GGUFValueType.FLOAT64, "b1": GGUFValueType.BOOL,
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class NewTensor:
    """A tensor to write.

    Attributes:
        name: in the file.
        type: how its bytes code the weights.
        shape: numpy order.
        data: makes the bytes when their turn comes, so that one tensor at a time is in memory.
    """

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    data: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        block, size = GGML_QUANT_SIZES[self.type]
        return prod(self.shape) // block * size


def write_container(
    path: str | os.PathLike[str],
    metadata: Mapping[str, Any],
    tensors: Sequence[NewTensor],
    *,
    magic: bytes = POWERINFER_MAGIC,
) -> Path:
    """Writes a GGUF v3 file, little-endian, aligned to 32.

    Args:
        path: of the file; replaced if it is there.
        metadata: ints become uint32 where they fit, floats float32; numpy scalars and arrays keep their own type.
        tensors: in file order.
        magic: b"PWRI" or b"GGUF".

    Raises:
        UserError: the file cannot be written, or a type has no code in a file of this magic.
    """
    metadata = {k: v for k, v in metadata.items() if k != "general.alignment" and not _is_empty(v)}
    head = [magic, struct.pack("<IQQ", VERSION, len(tensors), len(metadata))]
    head += [_string(key) + _value(value) for key, value in metadata.items()]
    at = 0
    for t in tensors:
        ne = t.shape[::-1]
        code = _code(t, magic, path)
        head.append(_string(t.name) + struct.pack(f"<I{len(ne)}QIQ", len(ne), *ne, code, at))
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


def _code(t: NewTensor, magic: bytes, path: Any) -> int:
    for code, kind in TYPE_CODES[magic].items():
        if kind == t.type:
            return code
    raise UserError(f"{path}: tensor '{t.name}' of type {t.type.name} has no place in a {magic.decode()} file")


def _padded(n: int) -> int:
    return -(-n // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT


def _is_empty(value: Any) -> bool:
    return isinstance(value, list | np.ndarray) and len(value) == 0


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    """Type code and bytes of a metadata value."""
    if isinstance(value, str):
        return struct.pack("<I", GGUFValueType.STRING) + _string(value)
    if isinstance(value, list):
        items = b"".join(map(_string, value))
        return struct.pack("<IIQ", GGUFValueType.ARRAY, GGUFValueType.STRING, len(value)) + items
    if isinstance(value, np.ndarray):
        of = _OF_DTYPE[value.dtype.str[1:]]
        return struct.pack("<IIQ", GGUFValueType.ARRAY, of, value.size) + value.tobytes()
    value = _scalar(value)
    return struct.pack("<I", _OF_DTYPE[value.dtype.str[1:]]) + value.tobytes()


def _scalar(value: Any) -> np.generic:
    """In the width that files have: uint32 and float32 where they hold the value."""
    if isinstance(value, np.generic):
        return value
    if isinstance(value, bool):
        return np.bool_(value)
    if isinstance(value, float):
        return np.float32(value)
    return np.int64(value) if value < 0 else np.uint32(value) if value < 1 << 32 else np.uint64(value)
