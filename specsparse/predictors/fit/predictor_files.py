"""Predictors and half-trained ones as safetensors; a file appears whole or not at all."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from specsparse.errors import UserError
from specsparse.predictors.mlp import MlpWeights, mlp_weights
from specsparse.support.atomic import atomically

_FORMAT = "specsparse.predictors.mlp"


def save_predictors(
    path: Path, pairs: Sequence[tuple[np.ndarray, np.ndarray]], *, threshold: float = 0.0, dtype: type = np.float32
) -> None:
    """Writes (fc1 [r, D], fc2 [F, r]) of every layer, in layer order, as float32 or float16."""
    tensors = {}
    for i, (fc1, fc2) in enumerate(pairs):
        tensors |= {f"layers.{i}.fc1.weight": fc1.astype(dtype), f"layers.{i}.fc2.weight": fc2.astype(dtype)}
    write_tensors(path, tensors, {"format": _FORMAT, "layers": len(pairs), "threshold": threshold})


def load_pairs(path: Path) -> tuple[list[tuple[np.ndarray, np.ndarray]], float]:
    """What `save_predictors` wrote: pairs and threshold.

    Raises:
        UserError: no such file, a damaged one, or one of another kind.
    """
    tensors, meta = read_tensors(path)
    if meta.get("format") != _FORMAT:
        raise UserError(f"{path}: holds no predictors of specsparse; train some with +experiment=train_predictors")
    pairs = []
    for i in range(int(meta["layers"])):
        names = f"layers.{i}.fc1.weight", f"layers.{i}.fc2.weight"
        missing = [name for name in names if name not in tensors]
        if missing:
            raise UserError(f"{path}: tensor {missing[0]} is missing; train the predictors again")
        pairs.append((tensors[names[0]], tensors[names[1]]))
    return pairs, float(meta["threshold"])


def load_predictors(path: Path, *, codes: str = "f16") -> tuple[MlpWeights, ...]:
    """The weights of every layer for `Mlp`."""
    pairs, threshold = load_pairs(path)
    return tuple(mlp_weights(fc1, fc2, threshold, codes=codes) for fc1, fc2 in pairs)


def save_state(path: Path, state: Any, meta: Mapping[str, Any]) -> None:
    """Writes a pytree of arrays by the order of its leaves."""
    leaves = jax.tree.leaves(state)
    write_tensors(path, {str(i): np.asarray(leaf) for i, leaf in enumerate(leaves)}, meta)


def load_state(path: Path, like: Any) -> tuple[Any, dict[str, Any]]:
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


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray], meta: Mapping[str, Any]) -> None:
    """One safetensors file, `meta` as JSON in its header; raises UserError where it cannot be written."""
    plain = {name: np.asarray(t, order="C") for name, t in tensors.items()}
    with atomically(path) as file:
        file.write(save(plain, metadata={"specsparse": json.dumps(dict(meta))}))


def read_tensors(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Tensors and `meta` of such a file."""
    try:
        with safe_open(path, framework="numpy") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
            meta = json.loads((file.metadata() or {}).get("specsparse", "{}"))
    except FileNotFoundError:
        raise UserError(f"no such file of predictors: {path}") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as safetensors ({error})") from error
    return tensors, meta
