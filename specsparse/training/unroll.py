"""A drafter of one layer run on its own rows: all tokens of all drafts of a window at once ("training-time test").

Stream s is all rows as the s-th token of a draft. A row of stream s sees the rows of stream 1 up to where its draft
began and one row of each stream since, as when decoding (HASS, Zhang et al., arXiv:2408.15766; EAGLE-3,
arXiv:2503.01840).
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine.config import ModelConfig
from specsparse.engine.rope import rope_tables
from specsparse.speculative.drafters.heads.eagle3_head import HeadRows
from specsparse.training.layer import Keys, attention, rms_norm, split_heads
from specsparse.training.products import times


class Window(NamedTuple):
    """Texts side by side in n rows, of which m are drafted from. Row i stands for h_i and the token after it.

    Attributes:
        hidden: [n, W], what the target has at the token before each row: D numbers for each of `Form.layers`.
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
    frozen: Frozen, window: Window, first: HeadRows, again: Callable[[jax.Array], HeadRows],
    leave: Callable[[jax.Array, jax.Array], jax.Array], count: int, *, head_dim: int, pairing: str,
) -> list[jax.Array]:  # fmt: skip
    """[m, D] for each of `count` streams: the layer's rows, the first stream first.

    A row of stream s counts where its depth is at least s - 1.

    Args:
        frozen: the rotation.
        window: the rows.
        first: all n rows, made of the target's.
        again: makes the m drafting rows of [m, D], the layer's own rows one token earlier.
        leave: (what attention found [m, H d], residual [m, D]) -> the layer's rows [m, D].
        count: tokens of a draft.
        head_dim, pairing: of the attention and its rotation.
    """
    rows = window.rows
    cos, sin = frozen.cos[window.position], frozen.sin[window.position]
    turn = partial(split_heads, head_dim=head_dim, pairing=pairing)
    base = Keys(turn(first.k, cos, sin).swapaxes(0, 1), split_heads(first.v, head_dim=head_dim).swapaxes(0, 1))
    cos, sin = cos[rows], sin[rows]
    place = jnp.arange(len(window.text))
    own: list[Keys] = []
    found = []
    entered = HeadRows(*(x[rows] for x in first))
    for s in range(count):
        if s:
            entered = again(down(found[-1], 1))
            k, v = turn(entered.k, cos, sin), split_heads(entered.v, head_dim=head_dim)
            own.append(Keys(k.swapaxes(0, 1), v.swapaxes(0, 1)))
        seen_mn = same_text(window) & (place[None] <= rows[:, None] - s)
        drafted = [Keys(*(down(a, s - 1 - j, axis=1) for a in key)) for j, key in enumerate(own)]
        attended = attention(turn(entered.q, cos, sin), base, seen_mn, drafted)
        found.append(leave(attended, entered.residual))
    return found


def target_logits(config: ModelConfig, frozen: Frozen, after_mD: jax.Array) -> jax.Array:
    """float32[m, N]: the target's own, from its rows."""
    return times(rms_norm(after_mD, frozen.output_norm, config.norm_eps), frozen.head)


def same_text(window: Window) -> jax.Array:
    """bool[m, n]: whether a row is of the drafting row's text; none for a drafting row that there is not."""
    mine = jnp.where(window.depth >= 0, window.text[window.rows], -2)
    return window.text[None] == mine[:, None]


def down(x: jax.Array, by: int, axis: int = 0) -> jax.Array:
    """Row r holds what row r - `by` held: a row's predecessor in its draft."""
    return jnp.roll(x, by, axis=axis) if by else x
