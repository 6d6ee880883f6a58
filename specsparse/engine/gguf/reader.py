"""Reading a GGUF file: metadata and memory-mapped tensors.

The header is parsed here and not by `gguf.GGUFReader`, for two measured reasons: that reader trusts its input (a count
of 2**60 makes it loop, a cut file gives shapes that do not fit, an offset past the end an opaque numpy error), and it
takes 3.5 s for a vocabulary of 49k tokens, where this takes 0.06 s. Everything else is the library's: type codes, block
sizes and dequantisation. The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import os
import stat
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from specsparse.engine.gguf.cursor import Cursor
from specsparse.engine.gguf.shards import shard_names
from specsparse.errors import UserError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMS = 4
MAX_ENTRIES = 1 << 17
"""Tensors or metadata keys; the largest models have some thousands, and each costs far more memory than its bytes."""
DEFAULT_ALIGNMENT = 32

POWERINFER_MAGIC = b"PWRI"
"""PowerInfer's files: the same container, the type codes of ggml in November 2023."""

_OLD_INTEGERS = {16: GGMLQuantizationType.I8, 17: GGMLQuantizationType.I16, 18: GGMLQuantizationType.I32}

# A container is known by its magic and its own table of type codes.
TYPE_CODES: dict[bytes, dict[int, GGMLQuantizationType]] = {
    MAGIC: {int(kind): kind for kind in GGML_QUANT_SIZES},
    POWERINFER_MAGIC: {int(kind): kind for kind in GGML_QUANT_SIZES if kind < 16} | _OLD_INTEGERS,
}
"""Type code -> type, by magic."""

FLOAT_TYPES = ("F32", "F16", "BF16")
"""Types whose weights are not quantised."""

SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}

# The fewest bytes an entry can take: what bounds a count before anything is allocated for it.
_MIN_KEY_VALUE = 8 + 1 + 4 + 1
_MIN_TENSOR = 8 + 1 + 4 + 8 + 4 + 8


@cache
def can_dequantise(kind: GGMLQuantizationType) -> bool:
    """Whether the library turns `kind` into floats; it does not for integers and run-time formats."""
    try:
        quants.dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def supported_types() -> list[GGMLQuantizationType]:
    """Every tensor type whose weights can be used, in order of type code."""
    return [kind for kind in sorted(GGML_QUANT_SIZES) if can_dequantise(kind)]


def show(name: object) -> str:
    """A name from the file for an error line: quoted, escaped, cut at 80 characters."""
    text = repr(name)
    return text if len(text) <= 80 else text[:77] + "..."


@dataclass(frozen=True, eq=False)
class TensorInfo:
    """One tensor of the file. Invariant: `raw` holds exactly the bytes of `shape` in `type`.

    Attributes:
        name: as in the file.
        type: how the weights are coded.
        shape: numpy order, (rows, cols) for a matrix: the reverse of the file's `ne`.
        raw: read-only uint8 view of the mapped file, [*shape[:-1], bytes of a row].
        source: the file, for error lines.
    """

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    raw: np.ndarray = field(repr=False)
    source: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return int(self.raw.nbytes)

    def dequantize(self) -> np.ndarray:
        """The weights as float32 `shape` (read-only view for F32).

        Raises:
            UserError: the library has no dequantiser for this type.
        """
        if not can_dequantise(self.type):
            raise UserError(f"{self.source}: tensor {show(self.name)} of type {self.type.name} holds no weights")
        with np.errstate(all="ignore"):  # a NaN scale is the file's own; it shows in the result, not as a warning
            return quants.dequantize(self.raw, self.type).reshape(self.shape)


@dataclass(frozen=True)
class FileLayout:
    """Where in the file things are, for those who copy it.

    Attributes:
        keys: first byte and end of each metadata value, its type code included.
        tensors: first byte and end of the table of tensors.
        data: first byte of the tensors' data.
    """

    keys: Mapping[str, tuple[int, int]]
    tensors: tuple[int, int]
    data: int


Value: TypeAlias = int | float | bool | str | list[str] | np.ndarray
"""Of a metadata key."""
Kind = Literal["int", "float", "str", "bool"]
_REQUIRED: Any = object()


@dataclass(frozen=True, eq=False)
class GGUFFile:
    """An open file. The mapping lives as long as this object or any tensor's `raw` does.

    Attributes:
        path: where it was read.
        magic: the first four bytes, b"GGUF" or b"PWRI".
        version: 2 or 3.
        alignment: of tensor data, bytes.
        metadata: key -> int, float, bool, str, list[str] or 1-D numpy array.
        tensors: name -> tensor, in file order.
        layout: of a file that was opened by itself; None for one that was joined or made.
    """

    path: Path
    magic: bytes
    version: int
    alignment: int
    metadata: Mapping[str, Value] = field(repr=False)
    tensors: Mapping[str, TensorInfo] = field(repr=False)
    layout: FileLayout | None = field(default=None, repr=False)

    def get(self, key: str, kind: Kind, default: Any = _REQUIRED) -> Any:
        """The value of `key` as a plain int, float, str or bool; `default` where it is missing.

        An int counts as a float; nothing else is converted.

        Raises:
            UserError: the key is missing and there is no default, or its value is of another kind.
        """
        if key not in self.metadata:
            if default is _REQUIRED:
                raise UserError(f"{self.path}: metadata key {show(key)} is missing")
            return default
        value = self.metadata[key]
        if kind == "float" and type(value) is int:
            return float(value)
        if type(value).__name__ != kind:
            found = show(value) if isinstance(value, (str, int, float)) else f"an array of {len(value)}"
            raise UserError(f"{self.path}: metadata key {show(key)} should be {_ARTICLE[kind]}, found {found}")
        return value

    def sizes(self, *, layers_only: bool = False) -> dict[str, Any]:
        """Weights, bytes, bits per weight and bytes by type, the most first, of all tensors or of the layers' alone."""
        tensors = [t for t in self.tensors.values() if t.name.startswith("blk.") or not layers_only]
        weights, nbytes = sum(prod(t.shape) for t in tensors), sum(t.nbytes for t in tensors)
        by_type: Counter[str] = Counter()
        for t in tensors:
            by_type[t.type.name] += t.nbytes
        bits = 8 * nbytes / weights if weights else 0.0
        kinds = dict(by_type.most_common())
        return {"weights": weights, "bytes": nbytes, "bits_per_weight": bits, "bytes_by_type": kinds}

    def main_type(self) -> str:
        """The type that most bytes of the layers are in."""
        return next(iter(self.sizes(layers_only=True)["bytes_by_type"]), "F32")

    def get_strings(self, key: str) -> list[str] | None:
        """The value of `key` as a list of strings, None where it is missing; UserError where it is something else."""
        value = self.metadata.get(key)
        if value is None or (isinstance(value, list) and all(isinstance(item, str) for item in value)):
            return value
        raise UserError(f"{self.path}: metadata key {show(key)} should be an array of strings")

    def get_numbers(self, key: str) -> np.ndarray | None:
        """The value of `key` as a 1-D numpy array, None where it is missing; UserError where it is something else."""
        value = self.metadata.get(key)
        if value is None or isinstance(value, np.ndarray):
            return value
        raise UserError(f"{self.path}: metadata key {show(key)} should be an array of numbers")


_ARTICLE = {"int": "an integer", "float": "a number", "str": "a string", "bool": "true or false"}


def _read_value(cur: Cursor, what: str) -> Value:
    """One metadata value, its type code first."""
    kind = _value_type(cur, what)
    if kind == GGUFValueType.STRING:
        return cur.string(what)
    if kind != GGUFValueType.ARRAY:
        return cur.scalar(SCALARS[kind], what)
    kind = _value_type(cur, f"the items of {what}")
    if kind == GGUFValueType.ARRAY:
        cur.fail(f"{what} is an array of arrays, which is not supported")
    if kind == GGUFValueType.STRING:
        return cur.strings(cur.count(8, f"the length of {what}"), what)
    dtype = np.dtype("<" + SCALARS[kind])
    n = cur.count(dtype.itemsize, f"the length of {what}")
    start = cur.take(n * dtype.itemsize, what)
    return np.frombuffer(cur.buffer, dtype, n, start).copy()


def _value_type(cur: Cursor, what: str) -> GGUFValueType:
    code = cur.scalar("I", f"the type of {what}")
    try:
        return GGUFValueType(code)
    except ValueError:
        cur.fail(f"{what} has unknown value type {code}")


def _read_metadata(cur: Cursor, n: int) -> tuple[dict[str, Value], dict[str, tuple[int, int]]]:
    """Values by key, and where they lie."""
    metadata: dict[str, Value] = {}
    places = {}
    for i in range(n):
        key = cur.name(f"metadata key {i}")
        if key in metadata:
            cur.fail(f"metadata key {show(key)} is there twice")
        start = cur.at
        metadata[key] = _read_value(cur, f"metadata key {show(key)}")
        places[key] = start, cur.at
    return metadata, places


@dataclass(frozen=True)
class _Entry:
    """A tensor as the header has it; `start` is relative to the data section."""

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    start: int
    row_bytes: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape[:-1]) * self.row_bytes


def _read_entry(cur: Cursor, i: int, codes: dict[int, GGMLQuantizationType]) -> _Entry:
    name = cur.name(f"tensor {i}")
    what = f"tensor {show(name)}"
    n_dims = cur.scalar("I", f"the dimensions of {what}")
    if not 1 <= n_dims <= MAX_DIMS:
        cur.fail(f"{what} has {n_dims} dimensions, 1 to {MAX_DIMS} are allowed")
    shape = tuple(cur.scalar("Q", f"the shape of {what}") for _ in range(n_dims))[::-1]
    if 0 in shape and codes is TYPE_CODES[MAGIC]:  # a gpuidx file has empty buckets
        cur.fail(f"{what} has an empty shape {shape}")
    code = cur.scalar("I", f"the type of {what}")
    if code not in codes:
        known = ", ".join(f"{kind.name} ({value})" for value, kind in sorted(codes.items()))
        cur.fail(f"{what} has unknown type {code}; known are {known}")
    block, block_bytes = GGML_QUANT_SIZES[codes[code]]
    if shape[-1] % block:
        cur.fail(f"{what} has rows of {shape[-1]}, not a multiple of {codes[code].name}'s block of {block}")
    return _Entry(name, codes[code], shape, cur.scalar("Q", f"the offset of {what}"), shape[-1] // block * block_bytes)


def _check_places(cur: Cursor, entries: list[_Entry], data: int, alignment: int) -> None:
    """Every tensor lies aligned inside the data section, and none on another."""
    last: _Entry | None = None
    for entry in sorted(entries, key=lambda e: e.start):
        what = f"tensor {show(entry.name)}"
        if entry.start % alignment:
            cur.fail(f"{what} starts at offset {entry.start}, not a multiple of the alignment {alignment}")
        if data + entry.start + entry.nbytes > cur.size:
            end = data + entry.start + entry.nbytes
            cur.fail(f"{what} ends at byte {end}, past the end of the file ({cur.size} bytes): truncated or damaged")
        if last and entry.start < last.start + last.nbytes:
            cur.fail(f"{what} overlaps tensor {show(last.name)}")
        last = entry


def _read_tensors(cur: Cursor, n: int, metadata: dict[str, Value], codes: dict[int, GGMLQuantizationType]):
    """The tensors over the mapped bytes, the alignment, and where their data begins."""
    entries = [_read_entry(cur, i, codes) for i in range(n)]
    seen: set[str] = set()
    for entry in entries:
        if entry.name in seen:
            cur.fail(f"tensor {show(entry.name)} is there twice")
        seen.add(entry.name)
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 8 or alignment & (alignment - 1):
        cur.fail(f"general.alignment is {show(alignment)}, a power of two of at least 8 is needed")
    data = -(-cur.at // alignment) * alignment
    _check_places(cur, entries, data, alignment)
    mapped = np.frombuffer(cur.buffer, np.uint8)
    tensors = {}
    for e in entries:
        raw = mapped[data + e.start :][: e.nbytes].reshape(*e.shape[:-1], e.row_bytes)
        tensors[e.name] = TensorInfo(e.name, e.type, e.shape, raw, str(cur.path))
    return tensors, alignment, data


def _map(path: Path) -> mmap.mmap:
    """The file's bytes, mapped read-only; checked to be a regular file first, since opening a pipe would wait."""
    try:
        mode = os.stat(path)
        if stat.S_ISDIR(mode.st_mode):
            raise UserError(f"{path}: is a directory, a GGUF file is needed")
        if not stat.S_ISREG(mode.st_mode):
            raise UserError(f"{path}: is not a regular file")
        if mode.st_size == 0:
            raise UserError(f"{path}: is empty")
        with open(path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{show(str(path))}: cannot be read: {reason}") from None


def _read_header(cur: Cursor) -> tuple[bytes, int]:
    """Magic and version."""
    start = cur.take(min(4, cur.size), "the magic")
    magic = bytes(cur.buffer[start : start + 4])
    if magic not in TYPE_CODES:
        cur.fail(f"is not a GGUF file: it starts with {magic!r}, not {MAGIC!r} or {POWERINFER_MAGIC!r}")
    version = cur.scalar("I", "the version")
    if version and version & 0xFFFF == 0:
        cur.fail("is a big-endian GGUF file; only little-endian files are supported")
    if version not in VERSIONS:
        cur.fail(f"is GGUF version {version}; versions {VERSIONS[0]} and {VERSIONS[1]} are supported")
    return magic, version


def open_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Opens a GGUF file (version 2 or 3, little-endian) without reading its tensors.

    The first of the files that a model was split into opens all of them. Time and memory are bounded by the size of the
    files, whatever a header claims.

    Raises:
        UserError: it is missing, no GGUF file, truncated or inconsistent; the line names the file and the thing.
    """
    first = open_one(path)
    return first if first.get("split.count", "int", 1) <= 1 else _join_shards(first)


def open_one(path: str | os.PathLike[str]) -> GGUFFile:
    """Opens one file by itself, a shard of a split model too; otherwise as `open_gguf`."""
    path = Path(path)
    cur = Cursor(_map(path), path)
    magic, version = _read_header(cur)
    n_tensors = cur.count(_MIN_TENSOR, "the number of tensors")
    n_keys = cur.count(_MIN_KEY_VALUE, "the number of metadata keys")
    if max(n_tensors, n_keys) > MAX_ENTRIES:
        cur.fail(f"has {n_tensors} tensors and {n_keys} metadata keys; at most {MAX_ENTRIES} of each are supported")
    metadata, places = _read_metadata(cur, n_keys)
    cur.check_count(n_tensors, _MIN_TENSOR, "the number of tensors")
    start = cur.at
    tensors, alignment, data = _read_tensors(cur, n_tensors, metadata, TYPE_CODES[magic])
    return GGUFFile(path, magic, version, alignment, metadata, tensors, FileLayout(places, (start, cur.at), data))


def _join_shards(first: GGUFFile) -> GGUFFile:
    """The whole of a split model: metadata of the first file (without what it says of the split), tensors of all."""
    names = shard_names(first.path.name)
    count, number = first.get("split.count", "int"), first.get("split.no", "int", 0)
    if len(names) != count:
        raise UserError(
            f"{first.path}: says it is one of {count} files, but is not named like -00001-of-{count:05d}.gguf"
        )
    if number != 0:
        raise UserError(f"{first.path}: is file {number + 1} of {count}; give the first one, {names[0]}")
    tensors = dict(first.tensors)
    for i, name in enumerate(names[1:], 1):
        shard = open_one(first.path.with_name(name))
        if shard.magic != first.magic or shard.get("split.count", "int") != count or shard.get("split.no", "int") != i:
            raise UserError(f"{shard.path}: is not file {i + 1} of the {count} that {first.path.name} begins")
        if twice := shard.tensors.keys() & tensors.keys():
            raise UserError(f"{shard.path}: tensor {show(min(twice))} is in another file of the model too")
        tensors |= shard.tensors
    total = first.get("split.tensors.count", "int", len(tensors))
    if len(tensors) != total:
        raise UserError(f"{first.path}: its {count} files hold {len(tensors)} tensors, {total} are needed")
    metadata = {key: value for key, value in first.metadata.items() if not key.startswith("split.")}
    return replace(first, metadata=metadata, tensors=tensors, layout=None)
