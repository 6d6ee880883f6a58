"""A drafter of one screen, outside the package: what notebook 06 shows."""

from dataclasses import dataclass
from typing import Annotated

import jax.numpy as jnp

from specsparse.speculative.base import Drafter, DraftKind
from specsparse.speculative.drafters import lookup
from specsparse.support.options import Range


@dataclass(frozen=True)
class LastSeen(Drafter):
    """Copies what followed the newest earlier occurrence of the last token."""

    max_nodes: Annotated[int, Range(1, 64)] = 4
    kind = DraftKind.ONE_HOT

    def draft(self, params, state, ctx):
        """The tokens after it."""
        position = jnp.arange(ctx.tokens.shape[1], dtype=jnp.int32)[None]
        last = jnp.take_along_axis(ctx.tokens, ctx.length[:, None] - 1, axis=1)
        seen = (ctx.tokens == last) & (position < ctx.length[:, None] - 1)
        start = jnp.max(jnp.where(seen, position, -1), axis=1) + 1
        count = lookup.allowed(ctx, jnp.where(start > 0, ctx.length - start, 0), max_nodes=self.max_nodes)
        return lookup.drafted(lookup.copy_chain(ctx, start, count, max_nodes=self.max_nodes), state, ctx)
