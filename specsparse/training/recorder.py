"""A drafter that proposes nothing and keeps the target's features: decoding with it is plain decoding, recorded."""

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from specsparse.engine.pytree import Pytree
from specsparse.speculative.base import Draft, DraftContext, Drafted, Drafter, DraftKind, Feedback


class Recorded(NamedTuple):
    """float16[B, C, D], the target's rows before the output norm by position, and int32[B], tokens emitted so far."""

    rows: jax.Array
    length: jax.Array


@dataclasses.dataclass(frozen=True)
class HiddenRecorder(Drafter):
    """Its state is what was recorded; its drafts have room for one node and hold none.

    Attributes:
        width: D.
    """

    kind: ClassVar[DraftKind] = DraftKind.ONE_HOT
    max_nodes: ClassVar[int] = 1
    wants_hidden: ClassVar[bool] = True
    width: int

    def init(self, params: Pytree, ctx: DraftContext, *, hidden: jax.Array | None = None) -> Recorded:
        """The prompt's features."""
        batch, capacity = ctx.tokens.shape
        rows = jnp.zeros((batch, capacity, self.width), jnp.float16)
        if hidden is not None:
            n = min(capacity, hidden.shape[1])
            rows = rows.at[:, :n].set(hidden[:, :n].astype(jnp.float16))
        return Recorded(rows, ctx.length)

    def draft(self, params: Pytree, state: Recorded, ctx: DraftContext) -> Drafted:
        """An empty draft."""
        zero_B = jnp.zeros((ctx.length.shape[0],), jnp.int32)
        return Drafted(Draft(zero_B[:, None], zero_B[:, None] - 1, zero_B), state, ctx.cache)

    def commit(self, params: Pytree, state: Recorded, ctx: DraftContext, feedback: Feedback) -> Recorded:
        """Adds the row of the token that was fed, if there was one: an ended sequence is fed nothing."""
        assert feedback.hidden is not None
        fed_B = jnp.where(ctx.length > state.length, state.length - 1, state.rows.shape[1])
        row_B = jnp.arange(state.rows.shape[0])
        new_BD = feedback.hidden[:, 0].astype(jnp.float16)
        return Recorded(state.rows.at[row_B, fed_B].set(new_BD, mode="drop"), ctx.length)
