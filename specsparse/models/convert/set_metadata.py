"""A GGUF file with one metadata value changed; every other byte of header and tensors stays what it was."""

import os
import struct
from collections.abc import Callable

from gguf.constants import GGUFValueType

from specsparse.engine.gguf.reader import DEFAULT_ALIGNMENT, GGUFFile, open_one, show
from specsparse.errors import UserError
from specsparse.support.atomic import atomically
from specsparse.support.json_files import is_unicode

_CODES = {
    "uint8": "B", "int8": "b", "uint16": "H", "int16": "h", "uint32": "I", "int32": "i", "uint64": "Q", "int64": "q",
    "float32": "f", "float64": "d",
}  # fmt: skip
TYPES = (*_CODES, "bool", "string")
"""Types of a value, by name."""
_FIXED = ("general.alignment", "split.count", "split.no", "split.tensors.count")
_CHUNK = 1 << 22
_TRUTH = {"true": True, "1": True, "false": False, "0": False}


def set_metadata(
    source: str | os.PathLike[str],
    key: str,
    value: str,
    path: str | os.PathLike[str] | None = None,
    *,
    type_name: str | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[str, str]:
    """Writes `source` with `key` set to `value`.

    Args:
        source: a GGUF file, a shard or a PowerInfer file too.
        key: replaced where it is there, else appended.
        value: as text, read as the type that the key has.
        path: of the new file; None replaces `source`. It appears when it is whole.
        type_name: of `TYPES`; needed for a key that is not there, refused where it differs from what is.
        progress: called with (bytes done, bytes in all).

    Returns:
        The old value ("nothing" where there was none) and the new one, as text.

    Raises:
        UserError: an array, a value that is not of the type, a key that the layout of the file depends on.
    """
    f = open_one(source)
    kind = _type_of(f, key, type_name)
    encoded, shown = encode(value, kind, where=f"{f.path}: {key}")
    old = str(f.metadata.get(key, "nothing"))
    with f.path.open("rb") as file, atomically(path or f.path) as out:
        head = _header(f, file.read(f.layout.data), key, encoded)
        out.write(head)
        total = f.path.stat().st_size - f.layout.data
        done = 0
        while chunk := file.read(_CHUNK):
            out.write(chunk)
            done += len(chunk)
            progress(done, total)
    return old, shown


def _type_of(f: GGUFFile, key: str, wanted: str | None) -> str:
    """The type that the value of `key` is to have."""
    if key in _FIXED:
        raise UserError(f"{f.path}: {key} says how the file is laid out, and cannot be set")
    if not key:
        raise UserError(f"{f.path}: a key is needed, such as tokenizer.ggml.eos_token_id")
    if not is_unicode(key):
        raise UserError(f"{f.path}: the key {show(key)} is no UTF-8 text: write it in UTF-8")
    if wanted is not None and wanted not in TYPES:
        raise UserError(f"type {wanted!r} does not exist; choose one of {', '.join(TYPES)}")
    if key not in f.metadata:
        if wanted is None:
            raise UserError(f"{f.path}: has no key {show(key)}; to add it give --type, one of {', '.join(TYPES)}")
        return wanted
    start = f.layout.keys[key][0]
    with f.path.open("rb") as file:
        file.seek(start)
        kind = GGUFValueType(struct.unpack("<I", file.read(4))[0])
    if kind == GGUFValueType.ARRAY:
        raise UserError(f"{f.path}: {key} is an array of {len(f.metadata[key])}; only single values can be set")
    name = kind.name.lower()
    if wanted not in (None, name):
        raise UserError(f"{f.path}: {key} is of type {name}, not {wanted}")
    return name


def encode(value: str, kind: str, *, where: str) -> tuple[bytes, str]:
    """Type code and bytes of a value given as text, and the value as it will read.

    Raises:
        UserError: it is no value of that type.
    """
    code = struct.pack("<I", GGUFValueType[kind.upper()])
    if kind == "string":
        if not is_unicode(value):
            raise UserError(f"{where}: the value is no UTF-8 text, and a string of a GGUF file is: write it in UTF-8")
        data = value.encode()
        return code + struct.pack("<Q", len(data)) + data, value
    if kind == "bool":
        if value.lower() not in _TRUTH:
            raise UserError(f"{where}={value}: true or false is needed")
        return code + struct.pack("<?", _TRUTH[value.lower()]), str(_TRUTH[value.lower()])
    try:
        number = float(value) if kind.startswith("float") else int(value)
        data = struct.pack("<" + _CODES[kind], number)
    except (ValueError, struct.error, OverflowError):
        raise UserError(f"{where}={value}: is no {kind}") from None
    return code + data, str(struct.unpack("<" + _CODES[kind], data)[0])


def _header(f: GGUFFile, head: bytes, key: str, encoded: bytes) -> bytes:
    """Everything before the tensors' data, with the value in its place."""
    layout = f.layout
    if key in layout.keys:
        start, end = layout.keys[key]
        new = head[:start] + encoded + head[end : layout.tensors[1]]
    else:
        name = key.encode()
        count = struct.pack("<Q", len(layout.keys) + 1)
        begin = layout.tensors[0]
        new = head[:16] + count + head[24:begin] + struct.pack("<Q", len(name)) + name + encoded
        new += head[begin : layout.tensors[1]]
    alignment = f.alignment or DEFAULT_ALIGNMENT
    return new.ljust(-(-len(new) // alignment) * alignment, b"\0")
