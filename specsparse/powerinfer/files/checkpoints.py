"""Predictor checkpoints as PowerInfer's converter reads them: `model_{i}.pt` and `config.json` in one directory."""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from specsparse.errors import UserError
from specsparse.powerinfer.files.torch_zip import read_torch, write_torch
from specsparse.support.files import atomically


@dataclass(frozen=True, eq=False)
class PredictorFile:
    """One layer's predictor.

    Attributes:
        fc1: float [rank, D].
        fc2: float [F, rank].
    """

    fc1: np.ndarray
    fc2: np.ndarray


def read_predictor(directory: str | os.PathLike[str], layer: int, *, d_model: int, d_ff: int) -> PredictorFile:
    """The predictor of one layer, checked.

    Raises:
        UserError: the file is missing or damaged, has a bias, or shapes that do not fit the model.
    """
    path = Path(directory) / f"model_{layer}.pt"
    if not path.exists():
        raise UserError(f"{path}: no such file: layer {layer} has no predictor")
    state = read_torch(path)
    if not isinstance(state, dict) or set(state) != {"fc1.weight", "fc2.weight"}:
        found = ", ".join(map(str, state)) if isinstance(state, dict) else type(state).__name__
        raise UserError(f"{path}: should hold fc1.weight and fc2.weight and nothing else, found {found:.100}")
    fc1, fc2 = state["fc1.weight"], state["fc2.weight"]
    for name, w in state.items():
        if not isinstance(w, np.ndarray) or w.ndim != 2 or w.dtype.kind in "iub":
            raise UserError(f"{path}: {name} should be a matrix of floats")
        if not np.isfinite(w.astype(np.float32)).all():
            raise UserError(f"{path}: {name} holds values that are not finite")
    if fc1.shape[1] != d_model or fc2.shape != (d_ff, fc1.shape[0]) or not fc1.shape[0]:
        raise UserError(
            f"{path}: fc1 {fc1.shape} and fc2 {fc2.shape} do not fit: [rank, {d_model}] and [{d_ff}, rank] are needed"
        )
    return PredictorFile(fc1, fc2)


def read_threshold(directory: str | os.PathLike[str]) -> float | None:
    """`sparse_threshold` of the directory's config.json; None where there is none.

    Raises:
        UserError: the file is no JSON object, or the threshold no number.
    """
    path = Path(directory) / "config.json"
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        value = found.get("sparse_threshold")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{path}: is no JSON object: {error!s:.80}") from None
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise UserError(f"{path}: sparse_threshold is {value!r:.40}; a number is needed")
    return float(value)


def write_predictors(
    directory: str | os.PathLike[str], predictors: Sequence[PredictorFile], *, threshold: float | None = None
) -> Path:
    """Writes `model_{i}.pt` for each layer, and config.json where a threshold is given."""
    directory = Path(directory)
    for i, p in enumerate(predictors):
        write_torch(directory / f"model_{i}.pt", {"fc1.weight": p.fc1, "fc2.weight": p.fc2})
    if threshold is not None:
        with atomically(directory / "config.json") as file:
            file.write(json.dumps({"sparse_threshold": threshold}).encode() + b"\n")
    return directory
