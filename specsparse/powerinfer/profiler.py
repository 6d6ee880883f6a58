"""How often each neuron is read over a text, for a placement: counted, and in files.

PowerInfer's own profiler is not released; its counts are `activation_{i}.pt`, ours one safetensors file.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from specsparse.engine.gguf.reader import GGUFFile
from specsparse.engine.model import Model
from specsparse.engine.weights import Layer, Params, pack_matrix
from specsparse.errors import UserError
from specsparse.powerinfer.modes import threshold_of
from specsparse.powerinfer.torch_zip import read_torch, write_torch
from specsparse.predictors.base import FFN, Predictor
from specsparse.predictors.collect import watched
from specsparse.predictors.evaluate import with_weights
from specsparse.predictors.scored import Factors, Mlp
from specsparse.support.files import atomically


class ActivationStats(NamedTuple):
    """Counts or frequencies, larger is hotter: L arrays [F], finite, not negative.

    `tokens` is how many were counted over, or None if a file does not say.
    """

    counts: tuple[np.ndarray, ...]
    tokens: int | None = None


def read_activations(path: str | os.PathLike[str], *, layers: int, d_ff: int) -> ActivationStats:
    """Reads a file of `save_stats`, or a folder of `activation_0.pt` ..

    A folder's files are taken by number; PowerInfer's own exporter takes them in the order of their names as text.
    UserError: a file is missing, damaged, or of another model.
    """
    tokens = None
    if Path(path).is_dir():
        counts = tuple(read_torch(Path(path) / f"activation_{i}.pt") for i in range(layers))
    else:
        try:
            with safe_open(path, framework="numpy") as file:
                names, about = set(file.keys()), file.metadata() or {}
                counts = tuple(file.get_tensor(f"activation_{i}") for i in range(len(names)))
            tokens = int(about["tokens"]) if "tokens" in about else None
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}: is no readable file of activation counts: {error!s:.80}") from None
    numbers = all(isinstance(c, np.ndarray) and c.shape == (d_ff,) and c.dtype.kind in "iufV" for c in counts)
    if numbers and len(counts) == layers:
        each = [c.astype(np.float64) for c in counts]
        if all((np.isfinite(c) & (c >= 0)).all() for c in each):
            return ActivationStats(counts, tokens)
    found = f"{len(counts)} layers of {getattr(counts[0], 'shape', '?') if counts else 'nothing'}"
    raise UserError(f"{path}: holds counts of {found}; {layers} of ({d_ff},) finite numbers of at least 0 are needed")


def write_activations(directory: str | os.PathLike[str], stats: ActivationStats) -> Path:
    """Writes `activation_{i}.pt`. With more than ten layers PowerInfer's exporter pairs them with the wrong layers."""
    for i, counts in enumerate(stats.counts):
        write_torch(Path(directory) / f"activation_{i}.pt", counts)
    return Path(directory)


def save_stats(path: str | os.PathLike[str], stats: ActivationStats) -> Path:
    """Writes one safetensors file; raises UserError if it cannot."""
    about = {} if stats.tokens is None else {"tokens": str(stats.tokens)}
    with atomically(path) as file:
        file.write(save({f"activation_{i}": np.ascontiguousarray(c) for i, c in enumerate(stats.counts)}, about))
    return Path(path)


Active = Callable[[Layer, jax.Array, jax.Array], jax.Array]
"""active(layer, x_RD, n_valid_B) -> bool or uint8 [R, F], true if a neuron is read for a row."""


def nonzero(ffn: FFN) -> Active:
    """Neurons whose activation is not 0, those that an oracle reads. UserError: an activation without zeros."""
    if not ffn.has_zeros:
        raise UserError("with SiLU no neuron is ever zero: give placement.active_share=0.3 to count the largest 30 %")
    return lambda layer, x_RD, n_valid_B: ffn.neurons(layer, x_RD, n_valid_B) != jnp.float32(0)


def largest(ffn: FFN, share: float) -> Active:
    """The share of neurons, above 0, the largest of each row by |a|; rows of padding count none."""

    def active(layer: Layer, x_RD, n_valid_B):
        size_RF = jnp.abs(ffn.neurons(layer, x_RD, n_valid_B))
        count = max(round(share * size_RF.shape[1]), 1)
        least_R = jax.lax.top_k(size_RF, count)[0][:, -1:]
        return (size_RF >= least_R) & (size_RF > jnp.float32(0))

    return active


def predicted(predictor: Predictor) -> Active:
    """Neurons that a predictor keeps, its weights in `layer.sparse`."""
    return lambda layer, x_RD, n_valid_B: predictor.keep(layer.sparse, layer, x_RD, n_valid_B)


def of_file(f: GGUFFile, model: Model, *, threshold: float | None = None) -> tuple[Active, Params]:
    """The rule of a PowerInfer file's own predictors, for a model loaded from it with ffn="dense".

    Returns:
        The rule, and the model's parameters with the predictors in them.
    """
    limit, layers = jnp.float32(threshold_of(f, threshold)), range(model.config.n_layers)
    floats = model.kernels.name != "native"
    pairs = [[pack_matrix(f.tensors[f"blk.{i}.{n}.weight"], floats=floats) for n in ("fc1", "fc2")] for i in layers]
    weights = [Factors(fc1, fc2, limit) for fc1, fc2 in pairs]
    return predicted(Mlp(FFN.from_config(model.config, model.kernels))), with_weights(model.params, weights)


def profile(
    model: Model, windows_Wn: np.ndarray, active: Active, *, params=None,
    progress: Callable[[int, float], None] = lambda done, share: None,
) -> ActivationStats:  # fmt: skip
    """Counts of the neurons that `active` says are read, on the residuals of a model with its dense matrices.

    `params`, such as `of_file` returns, stand in place of the model's. `progress` is called with the windows done and
    the share of the neurons that they read.
    """

    def count(layer: Layer, x_RD, n_valid_B):
        return jnp.sum(active(layer, x_RD, n_valid_B).astype(bool), axis=0, dtype=jnp.int32)

    total_LF = np.zeros(1, np.int64)
    for done, counts_LF in enumerate(watched(model, windows_Wn, count, params=params), 1):
        total_LF = total_LF + counts_LF.astype(np.int64)
        progress(done, float(total_LF.mean() / (done * windows_Wn.shape[1])))
    return ActivationStats(tuple(total_LF), windows_Wn.size)


def probabilities(stats: ActivationStats, *, rows: int = 1) -> tuple[np.ndarray, ...]:
    """L arrays f64[F]: the probability that a forward pass of `rows` tokens reads a neuron, were tokens independent.

    Frequencies count as they are; counts of a file that does not say over how many tokens are taken as shares of the
    hottest neuron, which is then read always: that ranks neurons rightly and overstates the time. UserError: a count
    above the number of tokens.
    """
    most = max(float(c.max(initial=0)) for c in stats.counts)
    tokens = stats.tokens or (1.0 if most <= 1 else most)
    if most > tokens:
        raise UserError(f"activation counts go up to {most:g} over {tokens:g} tokens: they belong to another text")
    return tuple(1 - (1 - c.astype(np.float64) / tokens) ** rows for c in stats.counts)
