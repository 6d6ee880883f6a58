"""Predictors of all layers in one safetensors file."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from specsparse.errors import UserError
from specsparse.predictors.factors import Codes
from specsparse.predictors.mlp import MlpWeights, mlp_weights
from specsparse.support.tensor_files import read_tensors, write_tensors

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
    if not path.is_file():
        raise UserError(f"no such file of predictors: {path}")
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


def load_predictors(path: Path, *, codes: Codes = "f16") -> tuple[MlpWeights, ...]:
    """The weights of every layer for `Mlp`, packed in the type that `predictors.mlp.settled` says."""
    pairs, threshold = load_pairs(path)
    return tuple(mlp_weights(fc1, fc2, threshold, codes=codes) for fc1, fc2 in pairs)
