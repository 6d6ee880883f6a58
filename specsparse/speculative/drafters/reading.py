"""The committed text as a draft model reads it: in the target's ids, or token by token in ids of its own."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specsparse.speculative.base import DraftContext


class Images(NamedTuple):
    """What a draft model with a vocabulary of its own is fed for each of the target's tokens.

    Attributes:
        starts: int32[V + 1]; token t is fed as `pieces[starts[t] : starts[t + 1]]`, nothing where that is empty.
        pieces: int32[P], draft ids.
        bos: int32[], fed first where the text does not begin with it; -1 for nothing.
    """

    starts: jax.Array
    pieces: jax.Array
    bos: jax.Array

    def first(self, tokens: jax.Array) -> jax.Array:
        """The first piece of tokens, the only one of those that both vocabularies have."""
        start = self.starts[jnp.clip(tokens, 0, self.starts.shape[0] - 2)]
        return self.pieces[jnp.minimum(start, self.pieces.shape[0] - 1)]


class DraftIds(NamedTuple):
    """The committed text in a draft model's ids: each token's image after that of the tokens before it.

    So a longer text begins with what a shorter one was read as, and a cache that holds some of it stays right.

    Attributes:
        tokens: int32[B, C], the target's ids.
        length: int32[B], draft ids.
        ends: int32[B, C], draft ids up to each target token, itself included; None where they are the target's.
        bos: int32[B], 1 where a BOS of the draft's own comes first.
    """

    tokens: jax.Array
    length: jax.Array
    ends: jax.Array | None = None
    bos: jax.Array | None = None

    def at(self, images: Images | None, at_Bn: jax.Array) -> jax.Array:
        """int32[B, n]: the ids at these places; anything beyond the text. Without images the target's own ids."""
        last = self.tokens.shape[1] - 1
        if images is None or self.ends is None:
            return jnp.take_along_axis(self.tokens, jnp.clip(at_Bn, 0, last), axis=1)
        before_Bn = jnp.sum(self.ends[:, None, :] <= at_Bn[:, :, None], axis=2, dtype=jnp.int32)
        token_Bn = jnp.clip(before_Bn, 0, last)
        # Places count from the end of the token before; a BOS of the draft's own comes before the first one.
        began_Bn = jnp.where(token_Bn > 0, jnp.take_along_axis(self.ends, jnp.maximum(token_Bn - 1, 0), axis=1), 0)
        piece_Bn = at_Bn - began_Bn - jnp.where(token_Bn > 0, 0, self.bos[:, None])
        tokens_Bn = jnp.clip(jnp.take_along_axis(self.tokens, token_Bn, axis=1), 0, images.starts.shape[0] - 2)
        index_Bn = jnp.clip(images.starts[tokens_Bn] + piece_Bn, 0, images.pieces.shape[0] - 1)
        return jnp.where(piece_Bn < 0, images.bos, images.pieces[index_Bn])


def read(images: Images | None, ctx: DraftContext) -> DraftIds:
    """What the draft model reads for `ctx.tokens[:, :length]`."""
    if images is None:
        return DraftIds(ctx.tokens, ctx.length)
    known_BC = jnp.arange(ctx.tokens.shape[1], dtype=jnp.int32)[None] < ctx.length[:, None]
    tokens_BC = jnp.where(known_BC, jnp.clip(ctx.tokens, 0, images.starts.shape[0] - 2), 0)
    count_BC = jnp.where(known_BC, images.starts[tokens_BC + 1] - images.starts[tokens_BC], 0)
    begins_B = (count_BC[:, 0] > 0) & (images.first(tokens_BC[:, 0]) == images.bos)
    bos_B = ((images.bos >= 0) & ~begins_B).astype(jnp.int32)
    ends_BC = jnp.cumsum(count_BC.at[:, 0].add(bos_B), axis=1, dtype=jnp.int32)
    return DraftIds(ctx.tokens, ends_BC[:, -1], ends_BC, bos_B)
