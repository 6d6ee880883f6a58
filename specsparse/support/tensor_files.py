"""Arrays by name, and trees of arrays, in safetensors files that appear whole or not at all."""

import json
import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from specsparse.errors import UserError
from specsparse.support.atomic import atomically

T = TypeVar("T")
_DAMAGED = (
    OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, EOFError, MemoryError, RuntimeError,
    struct.error, zipfile.BadZipFile, zlib.error,
)  # fmt: skip
"""What zipfile, zlib and numpy raise for bytes that are no archive of arrays."""


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray], meta: Mapping[str, object]) -> None:
    """Writes arrays by name, and `meta` as JSON in the header.

    Raises:
        UserError: the file cannot be written.
    """
    plain = {name: np.asarray(t, order="C") for name, t in tensors.items()}
    with atomically(path) as file:
        file.write(save(plain, metadata={"specsparse": json.dumps(dict(meta))}))


def read_tensors(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """What `write_tensors` wrote: the arrays and `meta`.

    Raises:
        UserError: no such file, or a damaged one.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
            meta = json.loads((file.metadata() or {}).get("specsparse", "{}"))
    except FileNotFoundError:
        raise UserError(f"no such file: {path}") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as safetensors ({error})") from error
    return tensors, meta


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a numpy archive, all of them read; Python objects are refused.

    Raises:
        UserError: no such file, or a damaged one.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()  # a wrong sum
        if broken is not None:
            raise ValueError(f"{broken} is damaged")
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except FileNotFoundError:
        raise UserError(f"no such file: {path}") from None
    except _DAMAGED as error:
        raise UserError(f"{path}: cannot be read as .npz ({error}): a whole copy is needed") from error


def save_state(path: Path, state: object, meta: Mapping[str, object]) -> None:
    """Writes a pytree of arrays by the order of its leaves."""
    leaves = jax.tree.leaves(state)
    write_tensors(path, {str(i): np.asarray(leaf) for i, leaf in enumerate(leaves)}, meta)


def load_state(path: Path, like: T) -> tuple[T, dict[str, Any]]:
    """What `save_state` wrote, in the structure of `like`.

    Raises:
        UserError: a damaged file, or one of other shapes.
    """
    tensors, meta = read_tensors(path)
    wanted = jax.tree.leaves(like)
    found = [tensors.get(str(i)) for i in range(len(wanted))]
    if len(tensors) != len(wanted) or any(
        f is None or f.shape != w.shape or f.dtype != w.dtype for f, w in zip(found, wanted, strict=True)
    ):
        raise UserError(f"{path}: is a checkpoint of another training; remove it to begin again")
    return jax.tree.unflatten(jax.tree.structure(like), [jnp.asarray(f) for f in found]), meta
