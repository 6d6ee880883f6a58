"""How far a model's laws are from the dense model's when it reads a text a few tokens at a time."""

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine import cache as kv
from specsparse.engine.feed import feed
from specsparse.engine.llama import Want
from specsparse.engine.model import Model
from specsparse.predictors.fit.quality import ModelQuality, model_sums


def quality_in_chunks(dense: Model, model: Model, windows_Wn: np.ndarray, *, rows: int) -> ModelQuality:
    """Both models on the second half of each window, after the dense one has read the first for both.

    By contract C1 `rows` changes nothing; where a rule looks at the rows of a pass together (`predictors.union_cap`) it
    does, and passes of `rows` right tokens are what a verification sees at best.

    Args:
        dense: the model that is compared with.
        model: another FFN on the same weights.
        windows_Wn: int32[W, n], n even.
        rows: tokens that `model` reads at once.
    """
    half = windows_Wn.shape[1] // 2
    whole, pieces = _reader(dense), _reader(model)
    capacity = dense.capacity_for(2 * half + rows)
    params, own = dense.params_for(capacity), model.params_for(capacity)
    total = None
    for tokens in windows_Wn:
        count_B = jnp.full((1,), half, jnp.int32)
        _, cache = whole(params, jnp.asarray(tokens[None, :half]), count_B, dense.new_cache(1, capacity))
        wanted, _ = whole(params, jnp.asarray(tokens[None, half : 2 * half]), count_B, cache)
        found = [
            np.asarray(fed.out)[: fed.piece.count[0]]
            for fed in feed(lambda p, c: pieces(own, *p.arrays, c), [tokens[half : 2 * half]], cache, rows=rows)
        ]
        sums = model_sums(
            wanted[:-1], jnp.asarray(np.concatenate(found))[:-1], jnp.asarray(tokens[half + 1 : 2 * half])
        )
        sums = jax.tree.map(np.float64, sums)
        total = sums if total is None else jax.tree.map(np.add, total, sums)
    return ModelQuality.of(total)


def _reader(model: Model):
    """program(params, tokens_1n, count_B, cache) -> (logits f32[n, V], cache with `count` tokens more)."""

    @jax.jit
    def program(params, tokens_1n, count_B, cache):
        out, cache = model.forward(params, tokens_1n, cache, n_valid_B=count_B, want=Want())
        return out.logits[0], kv.commit(cache, count_B)

    return program
