"""What predictors are fitted to: residuals before `ffn_norm` of every layer, from running a model over text."""

from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine import cache as kv
from specsparse.engine.llama import Want, dense_ffn, make_forward
from specsparse.engine.model import Model
from specsparse.errors import UserError


def make_collector(model: Model, *, logits: bool = False, ffn: Callable | None = None) -> Callable:
    """program(params, tokens_1n, cache) -> (logits f32[n, V] or None, residuals f32[L, n, D], cache), compiled.

    Args:
        model: any.
        logits: whether they are wanted.
        ffn: of the model, if it does not run the dense one.
    """
    model.check_whole("collecting residuals")
    run = ffn or dense_ffn(model.config, model.kernels)

    def collecting_ffn(layer, x_RD, n_valid_B):
        y_RD, _ = run(layer, x_RD, n_valid_B)
        return y_RD, x_RD

    forward = make_forward(model.config, model.kernels, collecting_ffn)
    want = Want(logits="all" if logits else "none")

    @jax.jit
    def program(params, tokens_1n, cache):
        out, cache = forward(params, tokens_1n, cache, want=want)
        cache = kv.commit(cache, jnp.full((1,), tokens_1n.shape[1], jnp.int32))
        return None if out.logits is None else out.logits[0], out.stats, cache

    return program


def windows(texts: Iterable[list[int]], length: int) -> np.ndarray:
    """Texts as token ids, one after the other, cut into int32[W, length]; a rest is dropped.

    Raises:
        UserError: not enough for one window.
    """
    stream = np.concatenate([np.asarray(ids, np.int32) for ids in texts] or [np.zeros(0, np.int32)])
    count = len(stream) // length
    if count == 0:
        raise UserError(f"the text has {len(stream)} tokens and a window {length}: give a longer text")
    return stream[: count * length].reshape(count, length)


def collect(
    model: Model,
    windows_Wn: np.ndarray,
    *,
    out: np.ndarray | None = None,
    ffn: Callable | None = None,
    progress: Callable[[int], None] | None = None,
) -> np.ndarray:
    """Residuals of every token of every window, each window on its own: f32[L, W * n, D].

    Args:
        model: any.
        windows_Wn: int32[W, n] token ids, n at most the model's context.
        out: where to write, such as a memory map.
        ffn: as for `make_collector`.
        progress: called with the windows done.
    """
    count, n = windows_Wn.shape
    if out is None:
        out = np.empty((model.config.n_layers, count * n, model.config.d_model), np.float32)
    program, capacity = make_collector(model, ffn=ffn), model.capacity_for(n)
    params = model.params_for(capacity)
    for w in range(count):
        _, rows_LnD, _ = program(params, jnp.asarray(windows_Wn[w : w + 1]), model.new_cache(1, capacity))
        out[:, w * n : (w + 1) * n] = np.asarray(rows_LnD)
        if progress is not None:
            progress(w + 1)
    return out


def self_generated(model: Model, *, tokens: int = 128, texts: int = 4, seed: int = 0) -> np.ndarray:
    """int32[texts, tokens]: texts that the model writes itself, if nobody gives one: its own distribution at
    temperature 1, each after its first token (BOS).

    Args:
        model: any.
        tokens: of each text, at most the model's context.
        texts: how many, written side by side.
        seed: of the draws.
    """
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
