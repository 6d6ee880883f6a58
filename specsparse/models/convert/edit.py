"""Changes of GGUF files: one metadata value in its place, and the difference of a model to another.

A difference holds the tensors and metadata values that are not the same. It names its base by a hash of all of its
tensors, and is applied to no other.
"""

import hashlib
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGUFValueType

from specsparse.engine.gguf.reader import DEFAULT_ALIGNMENT, GGUFFile, TensorInfo, open_gguf, open_one, show
from specsparse.engine.gguf.writer import NewTensor, write_gguf
from specsparse.errors import UserError, refuse
from specsparse.support.files import atomically, is_unicode

ARCHITECTURE = "specsparse-delta"
BASE_KEY, BASE_NAME_KEY = "specsparse.delta.base_sha256", "specsparse.delta.base_name"
_SET = "specsparse.delta.set."  # before the keys that the result has and the base has not, or not so
_CODES = {
    "uint8": "B", "int8": "b", "uint16": "H", "int16": "h", "uint32": "I", "int32": "i", "uint64": "Q", "int64": "q",
    "float32": "f", "float64": "d", "bool": "?",
}  # fmt: skip
TYPES = (*_CODES, "string")
"""Types of a metadata value, by name."""
_FIXED = ("general.alignment", "split.count", "split.no", "split.tensors.count")
_CHUNK = 1 << 22
_TRUTH = {"true": True, "1": True, "false": False, "0": False}


def set_metadata(
    source: str | os.PathLike[str], key: str, value: str, path: str | os.PathLike[str] | None = None, *,
    type_name: str | None = None, progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[str, str]:  # fmt: skip
    """Writes `source` with `key` set to `value`, to `path` or in its place.

    Args:
        source: a GGUF file, a shard or a PowerInfer file too.
        value: as text, read as the type that the key has.
        type_name: of `TYPES`; needed for a key that is not there, refused if the key has another type.
        progress: called with (bytes done, bytes in all).

    Returns:
        The old value ("nothing" if there was none) and the new one, as text.
    """
    f, kind = open_one(source), type_name
    layout = f.layout
    assert layout is not None, "a file that was opened by itself has one"
    there = f.metadata.get(key)
    refuse({
        "says how the file is laid out, and cannot be set": key in _FIXED,
        "is an array; only single values can be set": isinstance(there, list | np.ndarray),
        "a key is needed, such as tokenizer.ggml.eos_token_id": not key,
        "key and value must be UTF-8 text": not (is_unicode(key) and is_unicode(value)),
        f"there is no such key; to add it give --type, one of {', '.join(TYPES)}": there is None and kind not in TYPES,
    }, f"{f.path}: {show(key)}")  # fmt: skip
    if there is not None:
        with f.path.open("rb") as file:
            file.seek(layout.keys[key][0])
            kind = GGUFValueType(struct.unpack("<I", file.read(4))[0]).name.lower()
        if type_name not in (None, kind):
            raise UserError(f"{f.path}: {key} is of type {kind}, not {type_name}")
    encoded, shown = _encode(value, str(kind), where=f"{f.path}: {key}")
    old = str(f.metadata.get(key, "nothing"))
    with f.path.open("rb") as file, atomically(path or f.path) as out:
        head = file.read(layout.data)
        begin, end = layout.tensors
        if key in layout.keys:
            start, stop = layout.keys[key]
            new = head[:start] + encoded + head[stop:end]
        else:
            count, name = struct.pack("<Q", len(layout.keys) + 1), key.encode()
            new = head[:16] + count + head[24:begin] + struct.pack("<Q", len(name)) + name + encoded + head[begin:end]
        alignment = f.alignment or DEFAULT_ALIGNMENT
        out.write(new.ljust(-(-len(new) // alignment) * alignment, b"\0"))
        total = f.path.stat().st_size - layout.data
        done = 0
        while chunk := file.read(_CHUNK):
            out.write(chunk)
            done += len(chunk)
            progress(done, total)
    return old, shown


def _encode(value: str, kind: str, *, where: str) -> tuple[bytes, str]:
    """Type code and bytes of a value given as text, and the value as it will read; UserError for another type."""
    code = struct.pack("<I", GGUFValueType[kind.upper()])
    if kind == "string":
        data = value.encode()
        return code + struct.pack("<Q", len(data)) + data, value
    try:
        number = _TRUTH[value.lower()] if kind == "bool" else float(value) if kind.startswith("float") else int(value)
        data = struct.pack("<" + _CODES[kind], number)
    except (KeyError, ValueError, struct.error, OverflowError):
        raise UserError(f"{where}={value}: is no {kind}") from None
    return code + data, str(struct.unpack("<" + _CODES[kind], data)[0])


def tensors_hash(f: GGUFFile) -> str:
    """SHA-256 in hex of all tensors: names, types, shapes and bytes, by name."""
    digest = hashlib.sha256()
    for name, t in sorted(f.tensors.items()):
        digest.update(f"{name} {t.type.name} {t.shape}\n".encode())
        digest.update(np.ascontiguousarray(t.raw).data)
    return digest.hexdigest()


def make_delta(base: str | os.PathLike[str], model: str | os.PathLike[str], path: str | os.PathLike[str]) -> int:
    """Writes the tensors and metadata of `model` that `base` has not, or not so; returns how many tensors. UserError:
    tensors of other names or shapes, a key that only the base has, or nothing that differs."""

    def same(a: Any, b: Any) -> bool:
        if isinstance(a, TensorInfo) and isinstance(b, TensorInfo):
            return a.type == b.type and np.array_equal(a.raw, b.raw)
        return type(a) is type(b) and (np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b)

    old, new = open_gguf(base), open_gguf(model)
    here, there = ({(name, t.shape) for name, t in f.tensors.items()} for f in (old, new))
    other, gone = sorted(name for name, _ in here ^ there), sorted(old.metadata.keys() - new.metadata.keys())
    if other:
        raise UserError(
            f"{new.path}: tensor {other[0]} is in one only of this file and {old.path}, or of another shape"
        )
    tensors = [NewTensor.from_file(t) for name, t in new.tensors.items() if not same(old.tensors[name], t)]
    keys = {key: value for key, value in new.metadata.items() if not same(old.metadata.get(key), value)}
    if gone or not (tensors or keys):
        why = f"has no key {gone[0]}, and a difference takes no key away" if gone else "is the same model"
        raise UserError(f"{new.path}: {why} (beside {old.path})")
    name = old.get("general.name", "str", old.path.name)
    about = {
        "general.architecture": ARCHITECTURE,
        "general.name": f"difference to {name}",
        BASE_NAME_KEY: name,
        BASE_KEY: tensors_hash(old),
    }
    write_gguf(path, about | {_SET + key: value for key, value in keys.items()}, tensors)
    return len(tensors)


def apply_delta(base: str | os.PathLike[str], delta: str | os.PathLike[str], path: str | os.PathLike[str]) -> Path:
    """Writes the model that `delta` was made of; UserError for another base or another kind of file."""
    old, change = open_gguf(base), open_gguf(delta)
    if change.metadata.get("general.architecture") != ARCHITECTURE:
        raise UserError(f"{change.path}: is no difference to a model; make one with `specsparse convert make-delta`")
    if change.get(BASE_KEY, "str") != tensors_hash(old):
        wanted = change.get(BASE_NAME_KEY, "str", "another model")
        raise UserError(f"{old.path}: has other weights than the file that {change.path} is a difference to ({wanted})")
    given = {key.removeprefix(_SET): v for key, v in change.metadata.items() if key.startswith(_SET)}
    tensors = [NewTensor.from_file(change.tensors.get(name, t)) for name, t in old.tensors.items()]
    return write_gguf(path, {**old.metadata, **given}, tensors)
