"""A model as a difference to another: the tensors and metadata values that are not the same, in a GGUF file.

The file names its base by a hash of all of its tensors, and is applied to no other.
"""

import hashlib
import os
from pathlib import Path

import numpy as np

from specsparse.engine.gguf.reader import GGUFFile, TensorInfo, open_gguf
from specsparse.engine.gguf.writer import NewTensor, write_gguf
from specsparse.errors import UserError

ARCHITECTURE = "specsparse-delta"
BASE_KEY, BASE_NAME_KEY = "specsparse.delta.base_sha256", "specsparse.delta.base_name"
_SET = "specsparse.delta.set."
"""Before the keys that the result has and the base has not, or not so."""


def tensors_hash(f: GGUFFile) -> str:
    """SHA-256 in hex of all tensors: names, types, shapes and bytes, by name."""
    found = hashlib.sha256()
    for name in sorted(f.tensors):
        t = f.tensors[name]
        found.update(f"{name} {t.type.name} {t.shape}\n".encode())
        found.update(np.ascontiguousarray(t.raw).data)
    return found.hexdigest()


def make_delta(base: str | os.PathLike[str], model: str | os.PathLike[str], path: str | os.PathLike[str]) -> int:
    """Writes what `model` has that `base` has not.

    Args:
        base, model: GGUF files with tensors of the same names and shapes.
        path: of the new file; it appears when it is whole.

    Returns:
        Tensors in the file.

    Raises:
        UserError: other names or shapes, a key that only the base has, or nothing that differs.
    """
    old, new = open_gguf(base), open_gguf(model)
    _check_alike(old, new)
    tensors = [NewTensor.copy(t) for name, t in new.tensors.items() if not _same(old.tensors[name], t)]
    keys = {key: value for key, value in new.metadata.items() if not _equal(old.metadata.get(key), value)}
    if not tensors and not keys:
        raise UserError(f"{new.path}: is the same model as {old.path}; there is no difference to write")
    about = {
        "general.architecture": ARCHITECTURE,
        "general.name": f"difference to {_name(old)}",
        BASE_NAME_KEY: _name(old),
        BASE_KEY: tensors_hash(old),
    }
    write_gguf(path, about | {_SET + key: value for key, value in keys.items()}, tensors)
    return len(tensors)


def apply_delta(base: str | os.PathLike[str], delta: str | os.PathLike[str], path: str | os.PathLike[str]) -> Path:
    """Writes the model that `delta` was made of.

    Args:
        base: the GGUF file that it was made for.
        delta: from `make_delta`.
        path: of the new file; it appears when it is whole.

    Raises:
        UserError: no such difference, another base, or a file that cannot be written.
    """
    old, change = open_gguf(base), open_gguf(delta)
    if change.metadata.get("general.architecture") != ARCHITECTURE:
        raise UserError(f"{change.path}: is no difference to a model; make one with `specsparse convert make-delta`")
    if change.get(BASE_KEY, "str") != tensors_hash(old):
        wanted = change.get(BASE_NAME_KEY, "str", "another model")
        raise UserError(f"{old.path}: has other weights than the file that {change.path} is a difference to ({wanted})")
    foreign = [name for name in change.tensors if name not in old.tensors]
    if foreign:
        raise UserError(f"{change.path}: tensor {foreign[0]} has no place in {old.path}; the file is damaged")
    given = {key.removeprefix(_SET): v for key, v in change.metadata.items() if key.startswith(_SET)}
    tensors = [NewTensor.copy(change.tensors.get(name, t)) for name, t in old.tensors.items()]
    return write_gguf(path, {**old.metadata, **given}, tensors)


def _check_alike(old: GGUFFile, new: GGUFFile) -> None:
    here, there = ({(name, t.shape) for name, t in f.tensors.items()} for f in (old, new))
    if here != there:
        first = min(name for name, _ in here ^ there)
        raise UserError(f"{new.path}: tensor {first} is in one only of this file and {old.path}, or of another shape")
    gone = sorted(old.metadata.keys() - new.metadata.keys())
    if gone:
        raise UserError(f"{new.path}: has no key {gone[0]}, which {old.path} has; a difference takes no key away")


def _name(f: GGUFFile) -> str:
    return f.get("general.name", "str", f.path.name)


def _same(a: TensorInfo, b: TensorInfo) -> bool:
    return a.type == b.type and np.array_equal(a.raw, b.raw)


def _equal(a: object, b: object) -> bool:
    return type(a) is type(b) and (np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b)
