"""Tiny PowerInfer models."""

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from specsparse.engine.config import ModelConfig
from specsparse.engine.gguf.reader import open_gguf
from specsparse.powerinfer.model_files import PredictorFile, to_powerinfer, write_predictors
from specsparse.testing.tiny import write_tiny_gguf


def write_tiny_powerinfer(
    path: str | os.PathLike[str],
    *,
    out_type: str = "f16",
    rank: int = 32,
    threshold: float | None = None,
    seed: int = 0,
    **tiny: Any,
) -> Path:
    """Writes a tiny random PowerInfer model and returns its path.

    The predictors are random: they keep about half of the neurons at threshold 0.

    Args:
        path: the file, overwritten.
        out_type: "f16" or "q4_0".
        rank: of every layer's predictor; layer i has rank * (i + 1), since ranks may differ.
        threshold: written into the file if given.
        seed: of the random numbers.
        **tiny: keywords of `write_tiny_gguf`.
    """
    with tempfile.TemporaryDirectory() as folder:
        dense = write_tiny_gguf(Path(folder) / "dense.gguf", quant="F16", seed=seed, **tiny)
        config = ModelConfig.from_gguf(open_gguf(dense))
        write_predictors(folder, random_predictors(config, rank=rank, seed=seed))
        to_powerinfer(dense, folder, path, out_type=out_type, threshold=threshold)
    return Path(path)


def random_predictors(config: ModelConfig, *, rank: int = 32, seed: int = 0) -> list[PredictorFile]:
    """One a layer, of rank * (i + 1), float16."""
    rng = np.random.default_rng(seed + 1)
    out = []
    for i in range(config.n_layers):
        r = rank * (i + 1)
        fc1 = rng.normal(0, config.d_model**-0.5, (r, config.d_model)).astype(np.float16)
        out.append(PredictorFile(fc1, rng.normal(0, r**-0.5, (config.d_ff, r)).astype(np.float16)))
    return out
