"""The head as a function to differentiate: all drafted positions of a window at once.

A head reads the target's row h_i and the token after it and says what the target's row i + 1 will be (EAGLE, Li et
al., arXiv:2401.15077). When it drafts on, it reads its own output in place of h. Stream s is that: all rows as the
s-th token of a draft. A row of stream s sees the rows of stream 1 up to where its draft began and one row of each
stream since, as when decoding (HASS, Zhang et al., arXiv:2408.15766; EAGLE-3, arXiv:2503.01840).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine.config import ModelConfig
from specsparse.engine.rope import rope_tables
from specsparse.training.layer import Keys, LayerWeights, attend, feed_forward, keys, rms_norm
from specsparse.training.products import times


class HeadWeights(NamedTuple):
    """Matrices are [outputs, inputs].

    Attributes:
        hidden_norm, token_norm: [D], RMS norms of the two inputs.
        fc: [D, 2 D], of the two normalised inputs side by side, hidden first.
        layer: of the target's shape.
        output_norm: [D], before the output matrix, which is the target's.
    """

    hidden_norm: jax.Array
    token_norm: jax.Array
    fc: jax.Array
    layer: LayerWeights
    output_norm: jax.Array


class Window(NamedTuple):
    """Texts side by side in n rows, of which m are drafted from. Row i stands for h_i and the token after it.

    Attributes:
        hidden: [n, D], h_i.
        after: [m, D], h_{i+1} of the drafting rows: what they should find.
        tokens: int32[n], the token after each row.
        position: int32[n], of h_i in its text.
        text: int32[n], which text a row belongs to; -1 for none.
        rows: int32[m], the drafting rows, ascending, those of a text one after the other.
        depth: int32[m], drafting rows of the same text before this one; -1 where there is no row.
    """

    hidden: jax.Array
    after: jax.Array
    tokens: jax.Array
    position: jax.Array
    text: jax.Array
    rows: jax.Array
    depth: jax.Array


class Frozen(NamedTuple):
    """What is the target's and stays as it is.

    Attributes:
        output_norm: float32[D].
        head: float32[N, D], the output rows of the draft vocabulary.
        ids: int32[N], which ids those are.
        cos, sin: float32[positions, d / 2].
    """

    output_norm: jax.Array
    head: jax.Array
    ids: jax.Array
    cos: jax.Array
    sin: jax.Array


def rotary(config: ModelConfig, positions: int, factors: np.ndarray | None = None) -> tuple[jax.Array, jax.Array]:
    """cos and sin float32[positions, d / 2]."""
    cos, sin = rope_tables(config.rope, positions, factors)
    return jnp.asarray(cos), jnp.asarray(sin)


def streams(
    config: ModelConfig, weights: HeadWeights, frozen: Frozen, embedded_nD: jax.Array, window: Window, count: int
) -> list[jax.Array]:
    """[m, D] for each of `count` streams: the head's rows before the output norm, the first stream first.

    A row of stream s counts where its depth is at least s - 1.
    """
    rows = window.rows
    cos, sin = frozen.cos[window.position], frozen.sin[window.position]
    x_nD = _enter(config, weights, window.hidden, embedded_nD)
    base = keys(config, weights.layer, x_nD, cos, sin)
    gone = jnp.where(window.depth >= 0, window.text[rows], -2)
    place = jnp.arange(len(window.text))
    own: list[Keys] = []
    found = []
    x_mD, token_mD = x_nD[rows], embedded_nD[rows]
    for s in range(count):
        if s:
            x_mD = _enter(config, weights, _down(found[-1], 1), token_mD)
            own.append(keys(config, weights.layer, x_mD, cos[rows], sin[rows]))
        seen_mn = (window.text[None] == gone[:, None]) & (place[None] <= rows[:, None] - s)
        drafted = [Keys(*(_down(a, s - 1 - j, axis=1) for a in key)) for j, key in enumerate(own)]
        x_mD = attend(config, weights.layer, x_mD, cos[rows], sin[rows], base, seen_mn, drafted)
        found.append(feed_forward(config, weights.layer, x_mD))
    return found


def logits(config: ModelConfig, weights: HeadWeights, frozen: Frozen, y_mD: jax.Array) -> jax.Array:
    """float32[m, N] over the draft vocabulary."""
    return times(rms_norm(y_mD, weights.output_norm, config.norm_eps), frozen.head)


def target_logits(config: ModelConfig, frozen: Frozen, after_mD: jax.Array) -> jax.Array:
    """float32[m, N]: the target's own, from its rows."""
    return times(rms_norm(after_mD, frozen.output_norm, config.norm_eps), frozen.head)


def _down(x: jax.Array, by: int, axis: int = 0) -> jax.Array:
    """Row r holds what row r - `by` held: a row's predecessor in its draft."""
    return jnp.roll(x, by, axis=axis) if by else x


def _enter(config: ModelConfig, w: HeadWeights, hidden_RD: jax.Array, embedded_RD: jax.Array) -> jax.Array:
    both = (rms_norm(hidden_RD, w.hidden_norm, config.norm_eps), rms_norm(embedded_RD, w.token_norm, config.norm_eps))
    return times(jnp.concatenate(both, axis=-1), w.fc)
