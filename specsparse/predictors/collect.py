"""Residuals before `ffn_norm` of every layer, from running a model over text: predictors are fitted to them."""

from collections.abc import Callable, Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine import cache as kv
from specsparse.engine.llama import Want, dense_ffn, make_forward
from specsparse.engine.model import Model
from specsparse.engine.weights import Params
from specsparse.errors import UserError


def windows(texts: Iterable[list[int]], length: int) -> np.ndarray:
    """Texts as token ids, one after the other, cut into int32[W, length]; a rest is dropped. UserError if there is not
    one window."""
    stream = np.concatenate([np.asarray(ids, np.int32) for ids in texts] or [np.zeros(0, np.int32)])
    count = len(stream) // length
    if count == 0:
        raise UserError(f"the text has {len(stream)} tokens and a window {length}: give a longer text")
    return stream[: count * length].reshape(count, length)


def watched(
    model: Model, windows_Wn: np.ndarray, watch: Callable, *, ffn: Callable | None = None, params: Params | None = None,
    progress: Callable[[int], None] | None = None,
) -> Iterator[np.ndarray]:  # fmt: skip
    """The results of `watch` on every FFN's input, stacked over the layers: window by window, each on its own.

    Args:
        windows_Wn: int32[W, n] token ids, n at most the model's context.
        watch: watch(layer, x_RD, n_valid_B) -> an array.
        ffn: of the model, if it does not run the dense one.
        progress: called with the windows done.
    """
    run = ffn or dense_ffn(model.config, model.kernels)

    def watched_ffn(layer, x_RD, n_valid_B):
        y_RD, _ = run(layer, x_RD, n_valid_B)
        return y_RD, watch(layer, x_RD, n_valid_B)

    forward = make_forward(model.config, model.kernels, watched_ffn)
    program = jax.jit(lambda params, tokens_1n, cache: forward(params, tokens_1n, cache, want=Want("none"))[0].stats)
    capacity = model.capacity_for(windows_Wn.shape[1])
    tables = model.params_for(capacity)
    params = tables if params is None else params._replace(cos=tables.cos, sin=tables.sin)
    for done, tokens in enumerate(windows_Wn, 1):
        yield np.asarray(program(params, jnp.asarray(tokens[None]), model.new_cache(1, capacity)))
        if progress is not None:
            progress(done)


def collect(
    model: Model, windows_Wn: np.ndarray, *, out: np.ndarray | None = None,
    progress: Callable[[int], None] | None = None,
) -> np.ndarray:  # fmt: skip
    """Residuals of every token of every window, f32[L, W * n, D], in `out` if that is given, such as a memory map; see
    `watched`."""
    model.check_whole("collecting residuals")
    count, n = windows_Wn.shape
    if out is None:
        out = np.empty((model.config.n_layers, count * n, model.config.d_model), np.float32)
    found = watched(model, windows_Wn, lambda layer, x_RD, n_valid_B: x_RD, progress=progress)
    for w, rows_LnD in enumerate(found):
        out[:, w * n : (w + 1) * n] = rows_LnD
    return out


def self_generated(model: Model, *, tokens: int = 128, texts: int = 4, seed: int = 0) -> np.ndarray:
    """int32[texts, tokens]: texts that the model writes itself, side by side: draws from its own distribution at
    temperature 1, each after its first token (BOS), cut to the context."""
    tokens = min(tokens, model.config.context_length)
    capacity = model.capacity_for(tokens)
    begin_B = jnp.full((texts,), model.tokenizer.bos_id or 0, jnp.int32)
    one_B = jnp.ones((texts,), jnp.int32)

    @jax.jit
    def program(params, cache, keys):
        def step(carry, key):
            token_B, cache = carry
            out, cache = model.forward(params, token_B[:, None], cache)
            after_B = jax.random.categorical(key, out.logits[:, 0]).astype(jnp.int32)
            return (after_B, kv.commit(cache, one_B)), token_B

        return jax.lax.scan(step, (begin_B, cache), keys)[1]

    keys = jax.random.split(jax.random.key(seed), tokens)
    return np.asarray(program(model.params_for(capacity), model.new_cache(texts, capacity), keys)).T
