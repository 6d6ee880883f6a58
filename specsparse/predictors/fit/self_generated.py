"""Text that a model writes itself: what predictors are fitted to where nobody gives a text."""

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine import cache as kv
from specsparse.engine.model import Model


def self_generated(model: Model, *, tokens: int = 128, texts: int = 4, seed: int = 0) -> np.ndarray:
    """int32[texts, tokens]: texts from the model's own law at temperature 1, each after its first token (BOS).

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
