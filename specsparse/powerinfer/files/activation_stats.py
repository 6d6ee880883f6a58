"""How often each neuron was active: PowerInfer's `activation_{i}.pt`, and ours in one safetensors file."""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from specsparse.errors import UserError
from specsparse.powerinfer.files.torch_zip import read_torch, write_torch
from specsparse.support.files import atomically


@dataclass(frozen=True, eq=False)
class ActivationStats:
    """Counts or frequencies; larger is hotter. Invariants: finite, not negative, one length for all layers.

    Attributes:
        counts: L arrays [F].
        tokens: tokens counted over, or None where a file does not say.
    """

    counts: tuple[np.ndarray, ...]
    tokens: int | None = None

    def validate(self, *, layers: int, d_ff: int, where: str) -> "ActivationStats":
        """Itself.

        Raises:
            UserError: another number of layers or neurons, or a count that is none; `where` begins the line.
        """
        if len(self.counts) != layers:
            raise UserError(f"{where}: has activation counts of {len(self.counts)} layers, the model has {layers}")
        for i, c in enumerate(self.counts):
            if not isinstance(c, np.ndarray) or c.shape != (d_ff,) or c.dtype.kind not in "iufV":
                shape = getattr(c, "shape", type(c).__name__)
                raise UserError(f"{where}: layer {i} has counts of shape {shape}, ({d_ff},) numbers are needed")
            values = c.astype(np.float64)
            if not (np.isfinite(values) & (values >= 0)).all():
                raise UserError(f"{where}: layer {i} holds a count that is negative or not finite")
        return self


def read_activations(directory: str | os.PathLike[str], *, layers: int, d_ff: int) -> ActivationStats:
    """Reads `activation_0.pt` .. by number (PowerInfer's own exporter takes them in the order of their names as text).

    Raises:
        UserError: one is missing, damaged or of another length.
    """
    counts = tuple(read_torch(Path(directory) / f"activation_{i}.pt") for i in range(layers))
    return ActivationStats(counts).validate(layers=layers, d_ff=d_ff, where=str(directory))


def write_activations(directory: str | os.PathLike[str], stats: ActivationStats) -> Path:
    """Writes `activation_{i}.pt`. With more than ten layers PowerInfer's exporter pairs them with the wrong layers."""
    for i, counts in enumerate(stats.counts):
        write_torch(Path(directory) / f"activation_{i}.pt", counts)
    return Path(directory)


def save_stats(path: str | os.PathLike[str], stats: ActivationStats) -> Path:
    """Writes one safetensors file; raises UserError where it cannot."""
    about = {} if stats.tokens is None else {"tokens": str(stats.tokens)}
    with atomically(path) as file:
        file.write(save({f"activation_{i}": np.ascontiguousarray(c) for i, c in enumerate(stats.counts)}, about))
    return Path(path)


def load_stats(path: str | os.PathLike[str], *, layers: int, d_ff: int) -> ActivationStats:
    """Reads what `save_stats` wrote.

    Raises:
        UserError: the file is missing, damaged, or of another model.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            names, about = set(file.keys()), file.metadata() or {}
            counts = tuple(file.get_tensor(f"activation_{i}") for i in range(len(names)))
        tokens = int(about["tokens"]) if "tokens" in about else None
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: is no readable file of activation counts: {error!s:.80}") from None
    return ActivationStats(counts, tokens).validate(layers=layers, d_ff=d_ff, where=str(path))
