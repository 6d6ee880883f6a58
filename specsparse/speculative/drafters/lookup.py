"""What the drafters without weights share: comparing the text with its own end, and copying what followed."""

import jax
import jax.numpy as jnp

from specsparse.speculative.base import PAD, Draft, DraftContext, Drafted
from specsparse.speculative.tree import TreeTemplate


def suffix_matches(tokens_BC: jax.Array, length_B: jax.Array, *, longest: int) -> jax.Array:
    """int32[B, C]: how many tokens that end at each position equal the last ones of the text, at most `longest`.

    0 at the text's own last position and beyond it. `longest` passes over C, which XLA fuses into one.
    """
    alive_BC = jnp.arange(tokens_BC.shape[1], dtype=jnp.int32)[None] < length_B[:, None] - 1
    match_BC = jnp.zeros_like(tokens_BC)
    for k in range(longest):
        last_B1 = jnp.take_along_axis(tokens_BC, jnp.maximum(length_B - 1 - k, 0)[:, None], axis=1)
        alive_BC = alive_BC & (later(tokens_BC, k, fill=PAD) == last_B1)
        match_BC = match_BC + alive_BC.astype(jnp.int32)
    return match_BC


def later(values_BC: jax.Array, k: int, *, fill: int) -> jax.Array:
    """`values_BC` moved k places to the right, `fill` before it; a roll is three operations that no pass fuses."""
    return jnp.pad(values_BC, ((0, 0), (k, 0)), constant_values=fill)[:, : values_BC.shape[1]]


def copy_chain(ctx: DraftContext, start_B: jax.Array, count_B: jax.Array, *, max_nodes: int) -> Draft:
    """The chain `ctx.tokens[start : start + count]`; slots at and beyond `count` hold 0."""
    batch, C = ctx.tokens.shape
    node_K = jnp.arange(max_nodes, dtype=jnp.int32)[None]
    copied_BK = jnp.take_along_axis(ctx.tokens, jnp.clip(start_B[:, None] + node_K, 0, C - 1), axis=1)
    tokens_BK = jnp.where(node_K < count_B[:, None], copied_BK, 0)
    return Draft(tokens_BK, TreeTemplate.chain(max_nodes).parents_array(batch), count_B)


def allowed(ctx: DraftContext, count_B: jax.Array, *, max_nodes: int) -> jax.Array:
    """int32[B]: `count` cut to the budget and to the room a draft has."""
    return jnp.clip(count_B, 0, jnp.clip(ctx.budget, 0, max_nodes))


def drafted(draft: Draft, state, ctx: DraftContext) -> Drafted:
    """The draft of a drafter that leaves the cache alone."""
    return Drafted(draft, state, ctx.cache)
