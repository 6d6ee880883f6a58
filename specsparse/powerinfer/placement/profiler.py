"""How often each neuron is read over a text: what a placement goes by. PowerInfer's own profiler is not released."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine.gguf.reader import GGUFFile
from specsparse.engine.llama import Want, dense_ffn, make_forward
from specsparse.engine.model import Model
from specsparse.engine.weights import Layer, Params, pack_matrix
from specsparse.errors import UserError
from specsparse.powerinfer.ffn.sparse_weights import threshold_of
from specsparse.powerinfer.files.activation_stats import ActivationStats
from specsparse.predictors.base import FFN, Predictor
from specsparse.predictors.evaluate import with_weights
from specsparse.predictors.scored import Mlp, MlpWeights

Active = Callable[[Layer, jax.Array, jax.Array], jax.Array]
"""active(layer, x_RD, n_valid_B) -> bool or uint8 [R, F], true where a neuron is read for a row."""


def nonzero(ffn: FFN) -> Active:
    """Neurons whose activation is not 0: what an oracle reads.

    Raises:
        UserError: an activation without zeros.
    """
    if not ffn.has_zeros:
        raise UserError("with SiLU no neuron is ever zero: give placement.active_share=0.3 to count the largest 30 %")
    return lambda layer, x_RD, n_valid_B: ffn.neurons(layer, x_RD, n_valid_B) != jnp.float32(0)


def largest(ffn: FFN, share: float) -> Active:
    """The share of neurons, the largest of each row by |a|; rows of padding count none."""
    if not 0 < share <= 1:
        raise UserError(f"placement.active_share={share} must be a number above 0 and at most 1")

    def active(layer: Layer, x_RD, n_valid_B):
        size_RF = jnp.abs(ffn.neurons(layer, x_RD, n_valid_B))
        count = max(round(share * size_RF.shape[1]), 1)
        least_R = jax.lax.top_k(size_RF, count)[0][:, -1:]
        return (size_RF >= least_R) & (size_RF > jnp.float32(0))

    return active


def predicted(predictor: Predictor) -> Active:
    """Neurons that a predictor keeps, its weights in `layer.sparse`: what the sparse model reads."""
    return lambda layer, x_RD, n_valid_B: predictor.keep(layer.sparse, layer, x_RD, n_valid_B)


def of_file(f: GGUFFile, model: Model, *, threshold: float | None = None) -> tuple[Active, Params]:
    """The rule of a PowerInfer file's own predictors, for a model loaded from it with ffn="dense".

    Returns:
        The rule, and the model's parameters with the predictors in them.
    """
    limit, layers = jnp.float32(threshold_of(f, threshold)), range(model.config.n_layers)
    floats = model.kernels.name != "native"
    pairs = [[pack_matrix(f.tensors[f"blk.{i}.{n}.weight"], floats=floats) for n in ("fc1", "fc2")] for i in layers]
    weights = [MlpWeights(fc1, fc2, limit) for fc1, fc2 in pairs]
    return predicted(Mlp(FFN.from_config(model.config, model.kernels))), with_weights(model.params, weights)


def make_profiler(model: Model, active: Active) -> Callable:
    """program(params, tokens_1n, cache) -> int32[L, F], rows that read each neuron, on the dense model's residuals."""
    dense = dense_ffn(model.config, model.kernels)

    def counting_ffn(layer: Layer, x_RD, n_valid_B):
        y_RD, _ = dense(layer, x_RD, n_valid_B)
        return y_RD, jnp.sum(active(layer, x_RD, n_valid_B).astype(bool), axis=0, dtype=jnp.int32)

    forward = make_forward(model.config, model.kernels, counting_ffn)
    return jax.jit(lambda params, tokens_1n, cache: forward(params, tokens_1n, cache, want=Want("none"))[0].stats)


def profile(
    model: Model,
    windows_Wn: np.ndarray,
    active: Active,
    *,
    params=None,
    progress: Callable[[int], None] | None = None,
) -> ActivationStats:
    """Counts over windows of text, each on its own.

    Args:
        model: with its dense matrices.
        windows_Wn: int32[W, n] token ids (`predictors.collect.windows`), n at most the model's context.
        active: what counts.
        params: in place of the model's, such as `of_file` returns.
        progress: called with the windows done.
    """
    count, n = windows_Wn.shape
    program, capacity = make_profiler(model, active), model.capacity_for(n)
    tables = model.params_for(capacity)
    params = tables if params is None else params._replace(cos=tables.cos, sin=tables.sin)
    total = np.zeros((model.config.n_layers, model.config.d_ff), np.int64)
    for w in range(count):
        total += np.asarray(program(params, jnp.asarray(windows_Wn[w : w + 1]), model.new_cache(1, capacity)))
        if progress is not None:
            progress(w + 1)
    return ActivationStats(tuple(total), count * n)


def probabilities(stats: ActivationStats, *, rows: int = 1) -> tuple[np.ndarray, ...]:
    """L arrays f64[F]: the probability that a forward pass of `rows` tokens reads a neuron, were tokens independent.

    Frequencies count as they are; counts of a file that does not say over how many tokens are taken as shares of the
    hottest neuron, which is then read always: that ranks neurons rightly and overstates the time.

    Raises:
        UserError: a count above the number of tokens.
    """
    most = max(float(c.max(initial=0)) for c in stats.counts)
    tokens = stats.tokens or (1.0 if most <= 1 else most)
    if most > tokens:
        raise UserError(f"activation counts go up to {most:g} over {tokens:g} tokens: they belong to another text")
    return tuple(1 - (1 - c.astype(np.float64) / tokens) ** rows for c in stats.counts)
