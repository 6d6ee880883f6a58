"""Two drafters, one round at a time: the first where it has something to say, else the second."""

import dataclasses
from operator import attrgetter
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specsparse.engine.pytree import Pytree
from specsparse.errors import UserError
from specsparse.speculative.base import DraftContext, Drafted, Drafter, DraftKind, Feedback
from specsparse.speculative.tree import TreeTemplate


class EitherState(NamedTuple):
    """The states of the two, and bool[B], whether the last draft was the first one's."""

    first: Pytree
    second: Pytree
    took: jax.Array


@dataclasses.dataclass(frozen=True)
class Either(Drafter):
    """Drafts with `first` (which needs no weights) and, for sequences it leaves empty, with `second`. Chains.

    Where `second` draws its tokens, those of `first` count as drawn from laws that hold nothing else: `token` and
    `block` then accept one with its probability under p, and leave it out of what is drawn instead.

    A sequence that `first` drafts for gives `second` no budget, so that a drafter whose time follows its tokens costs
    nothing then. Each learns of its own drafts only.

    Attributes:
        first: such as prompt lookup.
        second: such as a head; its weights are this drafter's.
    """

    first: Drafter
    second: Drafter

    def __post_init__(self):
        if self.first.kind is not DraftKind.ONE_HOT or self.first.tree or self.second.tree:
            raise UserError("lookup_head drafts chains: leave tree out")

    kind = property(attrgetter("second.kind"))

    @property
    def max_nodes(self) -> int:
        """The larger of the two."""
        return max(self.first.max_nodes, self.second.max_nodes)

    @property
    def wants_hidden(self) -> bool | tuple[int, ...]:
        """What one of them does."""
        return self.first.wants_hidden or self.second.wants_hidden

    def init(self, params: Pytree, ctx: DraftContext, *, hidden: jax.Array | None = None) -> EitherState:
        """Both begin."""
        first = self.first.init(None, ctx, hidden=hidden)
        second = self.second.init(params, ctx, hidden=hidden)
        return EitherState(first, second, jnp.zeros((ctx.length.shape[0],), bool))

    def draft(self, params: Pytree, state: EitherState, ctx: DraftContext) -> Drafted:
        """The first one's draft, or the second one's."""
        a = self.first.draft(None, state.first, ctx)
        took_B = a.draft.count > 0
        rest = ctx._replace(budget=jnp.where(took_B, 0, ctx.budget), cache=a.cache)
        b = self.second.draft(params, state.second, rest)
        tokens_BK = jnp.where(took_B[:, None], self._wide(a.draft.tokens), self._wide(b.draft.tokens))
        draft = a.draft._replace(
            tokens=tokens_BK,
            parents=TreeTemplate.chain(self.max_nodes).parents_array(tokens_BK.shape[0]),
            count=jnp.where(took_B, a.draft.count, b.draft.count),
            q=None if b.draft.q is None else self._laws(took_B, tokens_BK, b.draft.q),
        )
        return Drafted(draft, EitherState(a.state, b.state, took_B), b.cache)

    def commit(self, params: Pytree, state: EitherState, ctx: DraftContext, feedback: Feedback) -> EitherState:
        """Both learn the verdict; the one that did not draft sees an empty draft."""
        draft, zero_B = feedback.draft, jnp.zeros_like(feedback.draft.count)
        mine = feedback._replace(draft=draft._replace(count=jnp.where(state.took, draft.count, zero_B)))
        other = feedback._replace(draft=draft._replace(count=jnp.where(state.took, zero_B, draft.count)))
        first = self.first.commit(None, state.first, ctx, mine)
        second = self.second.commit(params, state.second, ctx, other)
        return EitherState(first, second, state.took)

    def _laws(self, took_B: jax.Array, tokens_BK: jax.Array, q_BkV: jax.Array) -> jax.Array:
        """float32[B, K, V]: the second one's, and laws of one token."""
        q_BKV = jnp.pad(q_BkV, ((0, 0), (0, self.max_nodes - q_BkV.shape[1]), (0, 0)))
        return jnp.where(took_B[:, None, None], jax.nn.one_hot(tokens_BK, q_BKV.shape[-1]), q_BKV)

    def _wide(self, tokens_Bk: jax.Array) -> jax.Array:
        return jnp.pad(tokens_Bk, ((0, 0), (0, self.max_nodes - tokens_Bk.shape[1])))
