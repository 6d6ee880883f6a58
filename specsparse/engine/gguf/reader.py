"""Reading a GGUF file: metadata and memory-mapped tensors.

The header is parsed here and not by `gguf.GGUFReader`, for two measured reasons: that reader trusts its input (a count
of 2**60 makes it loop, a cut file gives shapes that do not fit, an offset past the end an opaque numpy error), and it
takes 3.5 s for a vocabulary of 49k tokens, where this takes 0.06 s. Everything else is the library's: type codes, block
sizes and dequantisation. The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import hashlib
import mmap
import os
import stat
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeAlias

import numpy as np
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from specsparse.engine.gguf.shards import shard_names
from specsparse.errors import UserError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMS = 4
MAX_ENTRIES = 1 << 17
"""Tensors or metadata keys; the largest models have some thousands, and each costs far more memory than its bytes."""
_PROBE = 1 << 12  # bytes of each tensor that `model_digest` reads
DEFAULT_ALIGNMENT = 32

POWERINFER_MAGIC = b"PWRI"
"""PowerInfer's files: the same container, the type codes of ggml in November 2023."""

_OLD_INTEGERS = {16: GGMLQuantizationType.I8, 17: GGMLQuantizationType.I16, 18: GGMLQuantizationType.I32}

TYPE_CODES: dict[bytes, dict[int, GGMLQuantizationType]] = {
    MAGIC: {int(kind): kind for kind in GGML_QUANT_SIZES},
    POWERINFER_MAGIC: {int(kind): kind for kind in GGML_QUANT_SIZES if kind < 16} | _OLD_INTEGERS,
}
"""Type code -> type, by magic."""

FLOAT_TYPES = ("F32", "F16", "BF16")

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

_VALUE_TYPES = {*map(int, GGUFValueType)}

# The fewest bytes an entry can take: they bound a count before anything is allocated for it.
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
    """One tensor of the file. Invariant: `raw` holds exactly the bytes of `shape` in `type`."""

    name: str
    type: GGMLQuantizationType  # how the weights are coded
    shape: tuple[int, ...]  # numpy order, (rows, cols) for a matrix: the reverse of the file's `ne`
    raw: np.ndarray = field(repr=False)  # read-only uint8 view of the mapped file, [*shape[:-1], bytes of a row]
    source: str = ""  # the file, for error lines

    @property
    def nbytes(self) -> int:
        return int(self.raw.nbytes)

    def dequantize(self) -> np.ndarray:
        """The weights as float32 `shape` (read-only view for F32). Raises UserError for a type of no weights."""
        if not can_dequantise(self.type):
            raise UserError(f"{self.source}: tensor {show(self.name)} of type {self.type.name} holds no weights")
        with np.errstate(all="ignore"):  # a NaN scale is the file's own; it shows in the result, not as a warning
            return quants.dequantize(self.raw, self.type).reshape(self.shape)


@dataclass(frozen=True)
class FileLayout:
    """Places in a file, for those who copy it."""

    keys: Mapping[str, tuple[int, int]]  # first byte and end of each metadata value, its type code included
    tensors: tuple[int, int]  # first byte and end of the table of tensors
    data: int  # first byte of the tensors' data


Value: TypeAlias = int | float | bool | str | list[str] | np.ndarray
"""Of a metadata key."""
Kind = Literal["int", "float", "str", "bool", "strings", "numbers"]
_KINDS: dict[Kind, tuple[type, str]] = {
    "int": (int, "an integer"),
    "float": (float, "a number"),
    "str": (str, "a string"),
    "bool": (bool, "true or false"),
    "strings": (list, "an array of strings"),
    "numbers": (np.ndarray, "an array of numbers"),
}
_REQUIRED: Any = object()


@dataclass(frozen=True, eq=False)
class GGUFFile:
    """An open file. The mapping lives as long as this object or any tensor's `raw` does."""

    path: Path
    magic: bytes  # the first four bytes, b"GGUF" or b"PWRI"
    version: int  # 2 or 3
    alignment: int  # of tensor data, bytes
    metadata: Mapping[str, Value] = field(repr=False)  # key -> int, float, bool, str, list[str] or 1-D numpy array
    tensors: Mapping[str, TensorInfo] = field(repr=False)  # name -> tensor, in file order
    # of a file that was opened by itself; None for one that was joined or made
    layout: FileLayout | None = field(default=None, repr=False)

    def get(self, key: str, kind: Kind, default: Any = _REQUIRED) -> Any:
        """The value of `key` as int, float, str, bool, list[str] or 1-D numpy array; `default` if it is missing.

        An int counts as a float; nothing else is converted. UserError: the key is missing and there is no default, or
        its value is of another kind."""
        if key not in self.metadata and default is not _REQUIRED:
            return default
        value, (wanted, name) = self.metadata.get(key), _KINDS[kind]
        if type(value) is wanted:
            return value
        if kind == "float" and type(value) is int:
            return float(value)
        problem = "is missing"
        if value is not None:
            found = show(value) if isinstance(value, str | int | float) else f"an array of {len(value)}"
            problem = f"should be {name}, found {found}"
        raise UserError(f"{self.path}: metadata key {show(key)} {problem}")

    def sizes(self, *, layers_only: bool = False) -> dict[str, Any]:
        """Weights, bytes, bits per weight and bytes by type, the most first, of all tensors or of the layers' alone."""
        weights, by_type = 0, Counter()
        for t in self.tensors.values():
            if t.name.startswith("blk.") or not layers_only:
                weights += prod(t.shape)
                by_type[t.type.name] += t.nbytes
        bits = 8 * by_type.total() / weights if weights else 0.0
        kinds = dict(by_type.most_common())
        return {"weights": weights, "bytes": by_type.total(), "bits_per_weight": bits, "bytes_by_type": kinds}

    def main_type(self) -> str:
        """The type that most bytes of the layers are in."""
        return next(iter(self.sizes(layers_only=True)["bytes_by_type"]), "F32")


def model_digest(f: GGUFFile) -> str:
    """Tells model files apart: names, types and shapes of the tensors, and the beginning of each one's data."""
    seen = hashlib.sha256(f.magic)
    for name, t in f.tensors.items():
        seen.update(f"{name} {t.type.name} {tuple(t.shape)} ".encode())
        seen.update(np.ascontiguousarray(t.raw.reshape(-1)[:_PROBE]).tobytes())
    return seen.hexdigest()[:32]


_U64 = struct.Struct("<Q")


class Cursor:
    """A bounds-checked position in the header; every error names the file and the entry."""

    def __init__(self, buffer: mmap.mmap, path: Path):
        self.buffer, self.path = buffer, path
        self.size, self.at = len(buffer), 0

    def fail(self, what: str) -> NoReturn:
        raise UserError(f"{self.path}: {what}")

    def need(self, holds: bool, problem: str) -> None:
        if not holds:
            self.fail(problem)

    def take(self, n: int, what: str) -> int:
        """Moves past n bytes and returns where they start."""
        if n > self.size - self.at:
            self.fail(f"truncated: {what} needs {n} bytes at offset {self.at}, the file has {self.size}")
        start, self.at = self.at, self.at + n
        return start

    def scalar(self, code: str, what: str) -> Any:
        """The next little-endian value of a `struct` code."""
        form = "<" + code
        return struct.unpack_from(form, self.buffer, self.take(struct.calcsize(form), what))[0]

    def count(self, smallest: int, what: str) -> int:
        """A u64 count of entries of at least `smallest` bytes, refused if they could not fit in the rest."""
        n = self.scalar("Q", what)
        self.need(
            n <= (self.size - self.at) // smallest, f"{what} is {n}, more than the file's {self.size} bytes can hold"
        )
        return n

    def string(self, what: str) -> str:
        """A u64 length and as many bytes of UTF-8."""
        n = self.count(1, f"the length of {what}")
        start = self.take(n, what)
        try:
            return str(self.buffer[start : start + n], "utf-8")
        except UnicodeDecodeError:
            self.fail(f"{what} at offset {start} is not valid UTF-8")

    def name(self, what: str) -> str:
        """The name of an entry. Padding reads as an empty one if a count is too high."""
        what = f"the name of {what}"
        return self.string(what) or self.fail(f"{what} is empty")

    def strings(self, n: int, what: str) -> list[str]:
        """n strings; one loop without calls, because vocabularies are long."""
        out: list[str] = []
        append, buffer, size, at, read = out.append, self.buffer, self.size, self.at, _U64.unpack_from
        for i in range(n):
            start = at + 8
            end = start + read(buffer, at)[0] if start <= size else size + 1
            if end > size:
                self.fail(f"truncated: string {i} of {what} at offset {at} runs past the file's {size} bytes")
            try:
                append(buffer[start:end].decode())
            except UnicodeDecodeError:
                self.fail(f"string {i} of {what} at offset {start} is not valid UTF-8")
            at = end
        self.at = at
        return out


def _read_value(cur: Cursor, what: str) -> Value:
    """One metadata value, its type code first."""

    def value_type(what: str) -> GGUFValueType:
        code = cur.scalar("I", f"the type of {what}")
        return GGUFValueType(code) if code in _VALUE_TYPES else cur.fail(f"{what} has unknown value type {code}")

    kind = value_type(what)
    if kind == GGUFValueType.STRING:
        return cur.string(what)
    if kind != GGUFValueType.ARRAY:
        return cur.scalar(SCALARS[kind], what)
    kind = value_type(f"the items of {what}")
    cur.need(kind != GGUFValueType.ARRAY, f"{what} is an array of arrays, which is not supported")
    if kind == GGUFValueType.STRING:
        return cur.strings(cur.count(8, f"the length of {what}"), what)
    dtype = np.dtype("<" + SCALARS[kind])
    n = cur.count(dtype.itemsize, f"the length of {what}")
    start = cur.take(n * dtype.itemsize, what)
    return np.frombuffer(cur.buffer, dtype, n, start).copy()


def _read_tensors(cur: Cursor, n: int, metadata: dict[str, Value], magic: bytes):
    """The tensors over the mapped bytes, the alignment, and the first byte of their data."""
    codes, found = TYPE_CODES[magic], {}
    for i in range(n):
        name = cur.name(f"tensor {i}")
        what = f"tensor {show(name)}"
        n_dims = cur.scalar("I", f"the dimensions of {what}")
        cur.need(1 <= n_dims <= MAX_DIMS, f"{what} has {n_dims} dimensions, 1 to {MAX_DIMS} are allowed")
        shape = tuple(cur.scalar("Q", f"the shape of {what}") for _ in range(n_dims))[::-1]
        # A gpuidx file has empty buckets; the sizes beside a 0 are no larger than a file.
        cur.need(0 not in shape or (magic != MAGIC and prod(filter(None, shape)) <= cur.size),
                 f"{what} has an empty shape {shape}")  # fmt: skip
        code = cur.scalar("I", f"the type of {what}")
        if code not in codes:
            known = ", ".join(f"{kind.name} ({value})" for value, kind in sorted(codes.items()))
            cur.fail(f"{what} has unknown type {code}; known are {known}")
        block, block_bytes = GGML_QUANT_SIZES[codes[code]]
        problem = f"{what} has rows of {shape[-1]}, not a multiple of {codes[code].name}'s block of {block}"
        cur.need(shape[-1] % block == 0, problem)
        cur.need(name not in found, f"{what} is there twice")
        start, stored = cur.scalar("Q", f"the offset of {what}"), (*shape[:-1], shape[-1] // block * block_bytes)
        found[name] = start, start + prod(stored), codes[code], shape, stored
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 8 or alignment & (alignment - 1):
        cur.fail(f"general.alignment is {show(alignment)}, a power of two of at least 8 is needed")
    data, last, end = -(-cur.at // alignment) * alignment, "", 0
    for name, (start, stop, *_) in sorted(found.items(), key=lambda item: item[1][0]):
        what = f"tensor {show(name)}"
        misaligned = f"{what} starts at offset {start}, not a multiple of the alignment {alignment}"
        cur.need(start % alignment == 0, misaligned)
        beyond = f"{what} ends at byte {data + stop}, past the end of the file ({cur.size} bytes): truncated"
        cur.need(data + stop <= cur.size, beyond)
        cur.need(start >= end, f"{what} overlaps tensor {show(last)}")
        last, end = name, stop
    mapped = np.frombuffer(cur.buffer, np.uint8)[data:] if data < cur.size else np.empty(0, np.uint8)
    tensors = {
        name: TensorInfo(name, kind, shape, mapped[start:stop].reshape(stored), str(cur.path))
        for name, (start, stop, kind, shape, stored) in found.items()
    }
    return tensors, alignment, data


def _map(path: Path) -> mmap.mmap:
    """The file's bytes, mapped read-only; checked to be a regular file first, since opening a pipe would wait."""
    try:
        found = os.stat(path)
        if stat.S_ISREG(found.st_mode) and found.st_size:
            with open(path, "rb") as file:
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        kinds = {stat.S_IFREG: "is empty", stat.S_IFDIR: "is a directory, a GGUF file is needed"}
        problem = kinds.get(stat.S_IFMT(found.st_mode), "is not a regular file")
    except FileNotFoundError:
        problem = "no such file"
    except (OSError, ValueError) as error:
        problem = f"cannot be read: {getattr(error, 'strerror', None) or error}"
    raise UserError(f"{path if len(str(path)) < 300 else show(str(path))}: {problem}")


def open_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Opens a GGUF file (version 2 or 3, little-endian) without reading its tensors.

    The first of the files that a model was split into opens all of them. Time and memory are bounded by the size of the
    files, whatever a header claims. UserError: it is missing, no GGUF file, truncated or inconsistent; the line names
    the file and the thing."""
    first = open_one(path)
    return first if first.get("split.count", "int", 1) <= 1 else _join_shards(first)


def open_one(path: str | os.PathLike[str]) -> GGUFFile:
    """Opens one file by itself, a shard of a split model too; otherwise as `open_gguf`."""
    path = Path(path)
    cur = Cursor(_map(path), path)
    start = cur.take(min(4, cur.size), "the magic")
    magic = bytes(cur.buffer[start : start + 4])
    kinds = f"it starts with {magic!r}, not {MAGIC!r} or {POWERINFER_MAGIC!r}"
    cur.need(magic in TYPE_CODES, f"is not a GGUF file: {kinds}")
    version = cur.scalar("I", "the version")
    big = "big-endian " if version and version & 0xFFFF == 0 else ""
    known = "versions 2 and 3, little-endian, are supported"
    cur.need(version in VERSIONS, f"is a {big}GGUF file of version {version}; {known}")
    n_tensors = cur.count(_MIN_TENSOR, "the number of tensors")
    n_keys = cur.count(_MIN_KEY_VALUE, "the number of metadata keys")
    if max(n_tensors, n_keys) > MAX_ENTRIES:
        cur.fail(f"has {n_tensors} tensors and {n_keys} metadata keys; at most {MAX_ENTRIES} of each are supported")
    metadata, places = {}, {}
    for i in range(n_keys):
        key = cur.name(f"metadata key {i}")
        cur.need(key not in metadata, f"metadata key {show(key)} is there twice")
        start = cur.at
        metadata[key] = _read_value(cur, f"metadata key {show(key)}")
        places[key] = start, cur.at
    start = cur.at
    tensors, alignment, data = _read_tensors(cur, n_tensors, metadata, magic)
    return GGUFFile(path, magic, version, alignment, metadata, tensors, FileLayout(places, (start, cur.at), data))


def _join_shards(first: GGUFFile) -> GGUFFile:
    """The whole of a split model: metadata of the first file (without the split's own keys), tensors of all."""
    names = shard_names(first.path.name)
    count, number = first.get("split.count", "int"), first.get("split.no", "int", 0)
    if len(names) != count or number:
        hint = (
            f"give the first one, {names[0]}" if len(names) == count else f"its name must be -00001-of-{count:05d}.gguf"
        )
        raise UserError(f"{first.path}: says it is file {number + 1} of {count}: {hint}")
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
