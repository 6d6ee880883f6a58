"""A small Llama as a function to differentiate: the target's vocabulary, one matrix for embedding and output."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine.config import ModelConfig
from specsparse.engine.rope import rope_tables
from specsparse.engine.rope_config import RopeConfig
from specsparse.errors import UserError
from specsparse.support.options import Count
from specsparse.training.layer import LayerWeights, feed_forward, layer_shapes, rms_norm, whole
from specsparse.training.products import times
from specsparse.training.unroll import Window


@dataclass(frozen=True)
class SmallOptions:
    """The shape of a small model.

    Attributes:
        width, heads, ffn, layers: D, H, F and L of docs/notation.md; every query head has keys of its own.
    """

    width: Count = 128
    heads: Count = 4
    ffn: Count = 512
    layers: Count = 3

    def __post_init__(self):
        if self.width % (2 * self.heads):
            raise UserError(f"train.width={self.width} must be a multiple of 2 train.heads, {2 * self.heads}")


class SmallWeights(NamedTuple):
    """Weights of a small Llama.

    Attributes:
        embedding: [V, D], of the input and of the output.
        layers: one after the other.
        output_norm: [D].
    """

    embedding: jax.Array
    layers: tuple[LayerWeights, ...]
    output_norm: jax.Array


def small_config(target: ModelConfig, options: SmallOptions) -> ModelConfig:
    """A Llama of that shape with the target's vocabulary, context and base of rotation."""
    dim = options.width // options.heads
    return ModelConfig(
        architecture="llama",
        n_layers=options.layers,
        d_model=options.width,
        n_heads=options.heads,
        n_kv_heads=options.heads,
        head_dim=dim,
        d_ff=options.ffn,
        vocab_size=target.vocab_size,
        context_length=target.context_length,
        norm_eps=target.norm_eps,
        rope=RopeConfig(target.rope.base, dim, "norm", original_context=target.context_length),
        tied_output=True,
    )


def logits(config: ModelConfig, weights: SmallWeights, ids: jax.Array, window: Window) -> jax.Array:
    """float32[m, N] over `ids` for the token after each drafting row and its own.

    Row i of a window holds the token that follows it: a text is seen from its second token on.
    """
    positions = len(window.tokens)
    cos, sin = (jnp.asarray(table)[window.position] for table in rope_tables(config.rope, positions))
    place = jnp.arange(positions)
    seen_nn = (window.text[None] == window.text[:, None]) & (place[None] <= place[:, None])
    x_nD = weights.embedding[window.tokens].astype(jnp.float32)
    for layer in weights.layers:
        x_nD = whole(config, layer, x_nD, cos, sin, seen_nn)
        x_nD = feed_forward(config, layer, x_nD)
    y_mD = rms_norm(x_nD[window.rows], weights.output_norm, config.norm_eps)
    return times(y_mD, weights.embedding[ids])


def first_layers(config: ModelConfig, seed: int) -> tuple[LayerWeights, ...]:
    """Random layers that add nothing yet: their two output matrices are 0."""
    rng = np.random.default_rng(seed)

    def array(name: str, shape: tuple[int, ...]) -> jax.Array:
        if len(shape) == 1:
            return jnp.ones(shape, jnp.float32)
        if name in ("attn_output", "ffn_down"):
            return jnp.zeros(shape, jnp.float32)
        return jnp.asarray(rng.normal(0, shape[1] ** -0.5, shape), jnp.float32)

    shapes = layer_shapes(config)
    return tuple(LayerWeights(**{name: array(name, shapes[name]) for name in shapes}) for _ in range(config.n_layers))
