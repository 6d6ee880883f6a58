"""Suffix decoding: the longest earlier match of the text's end, weighed by what followed each occurrence."""

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from specsparse.engine.pytree import Pytree
from specsparse.speculative.base import DraftContext, Drafted, Drafter, DraftKind, Feedback
from specsparse.speculative.drafters import lookup
from specsparse.speculative.drafters.options import SuffixOptions


class SuffixState(NamedTuple):
    """Matches of the end of the text so far.

    Attributes:
        match: int32[B, C], length of the common suffix of the text up to each position (included) and the whole text,
            at most `longest`; 0 at the last position and beyond.
        seen: int32[B], tokens of the text that `match` knows.
    """

    match: jax.Array
    seen: jax.Array


@dataclasses.dataclass(frozen=True)
class Suffix(SuffixOptions, Drafter):
    """Copies what followed the longest suffix of prompt and output that occurs earlier in them (SuffixDecoding).

    After Oliaro et al., SuffixDecoding (arXiv:2411.04975), with the request's own text for a corpus and a chain for a
    draft. Their suffix tree answers two questions, where the longest match is and how often each continuation
    followed it; a table of match lengths updated by one vector pass a token answers them with fixed shapes.

    Of the (at most `candidates` most recent) longest matches, each votes for its continuation: f_i is the share of
    matches whose first i tokens agree with the candidate's, and the candidate with the largest sum of f_i wins, the
    expected number of accepted tokens if the past repeats itself (their SCORE); ties go to the most recent. The draft
    is as long as `factor` times the match, plus `offset`, and ends where f falls under `min_share`. All of it is a
    function of the text before the draft. `params` is unused.
    """

    kind: ClassVar[DraftKind] = DraftKind.ONE_HOT

    def init(self, params: Pytree, ctx: DraftContext, *, hidden: jax.Array | None = None) -> SuffixState:
        """Matches of the prompt's end, by as many passes over C as its longest match is long."""
        C = ctx.tokens.shape[1]
        position_C = jnp.arange(C, dtype=jnp.int32)[None]

        def step(carry):
            k, alive_BC, match_BC = carry
            last_B1 = jnp.take_along_axis(ctx.tokens, jnp.maximum(ctx.length - 1 - k, 0)[:, None], axis=1)
            same_BC = (jnp.roll(ctx.tokens, k, axis=1) == last_B1) & (position_C >= k)
            alive_BC = alive_BC & same_BC
            return k + 1, alive_BC, match_BC + alive_BC.astype(jnp.int32)

        start = (jnp.int32(0), position_C < ctx.length[:, None] - 1, jnp.zeros_like(ctx.tokens))
        match_BC = jax.lax.while_loop(lambda c: (c[0] < self.longest) & c[1].any(), step, start)[2]
        return SuffixState(match_BC, ctx.length)

    def draft(self, params: Pytree, state: SuffixState, ctx: DraftContext) -> Drafted:
        """The winning continuation; consumes no noise."""
        ends_BW, best_B = self._latest(state.match, ctx.length)
        follow_BWK, known_BWK = self._continuations(ctx, ends_BW)
        share_BWK = self._shares(follow_BWK, known_BWK)
        wanted_B = jnp.floor(best_B.astype(jnp.float32) * jnp.float32(self.factor)).astype(jnp.int32) + self.offset
        wanted_B = jnp.where(best_B >= self.min_match, lookup.allowed(ctx, wanted_B, max_nodes=self.max_nodes), 0)
        keep_BWK = jnp.arange(self.max_nodes, dtype=jnp.int32)[None, None] < wanted_B[:, None, None]
        keep_BWK = keep_BWK & known_BWK & (share_BWK.astype(jnp.float32) >= self._least(ends_BW))
        score_BW = jnp.sum(jnp.where(keep_BWK, share_BWK, 0), axis=2, dtype=jnp.int32)
        winner_B1 = jnp.argmax(score_BW, axis=1, keepdims=True).astype(jnp.int32)
        count_B = jnp.take_along_axis(jnp.sum(keep_BWK, axis=2, dtype=jnp.int32), winner_B1, axis=1)[:, 0]
        start_B = jnp.take_along_axis(ends_BW, winner_B1, axis=1)[:, 0] + 1
        return lookup.drafted(lookup.copy_chain(ctx, start_B, count_B, max_nodes=self.max_nodes), state, ctx)

    def commit(self, params: Pytree, state: SuffixState, ctx: DraftContext, feedback: Feedback) -> SuffixState:
        """One pass over C for each token emitted: a match grows by one where the text repeats that token."""
        C = ctx.tokens.shape[1]
        position_C = jnp.arange(C, dtype=jnp.int32)[None]

        def add(state):
            seen_B1 = state.seen[:, None]
            token_B1 = jnp.take_along_axis(ctx.tokens, jnp.minimum(seen_B1, C - 1), axis=1)
            longer_BC = lookup.later(state.match, 1, fill=0) + 1
            same_BC = (ctx.tokens == token_B1) & (position_C < seen_B1)
            grown_BC = jnp.where(same_BC, jnp.minimum(longer_BC, self.longest), 0)
            more_B = state.seen < ctx.length
            return SuffixState(jnp.where(more_B[:, None], grown_BC, state.match), state.seen + more_B.astype(jnp.int32))

        return jax.lax.while_loop(lambda s: (s.seen < ctx.length).any(), add, state)

    def _latest(self, match_BC: jax.Array, length_B: jax.Array) -> tuple[jax.Array, jax.Array]:
        """int32[B, W] ends of the longest matches, latest first, padded with -1; int32[B] their length."""
        position_C = jnp.arange(match_BC.shape[1], dtype=jnp.int32)[None]
        best_B = jnp.max(match_BC, axis=1)
        end_BC = jnp.where((match_BC == best_B[:, None]) & (best_B[:, None] > 0), position_C, -1)
        slot_W = jnp.arange(self.candidates, dtype=jnp.int32)[None]

        def step(carry):
            w, before_B, ends_BW = carry
            end_B = jnp.max(jnp.where(end_BC < before_B[:, None], end_BC, -1), axis=1)
            return w + 1, end_B, jnp.where(slot_W == w, end_B[:, None], ends_BW)

        start = (jnp.int32(0), length_B, jnp.full((match_BC.shape[0], self.candidates), -1, jnp.int32))
        ends_BW = jax.lax.while_loop(lambda c: (c[0] < self.candidates) & (c[1] >= 0).any(), step, start)[2]
        return ends_BW, best_B

    def _continuations(self, ctx: DraftContext, ends_BW: jax.Array) -> tuple[jax.Array, jax.Array]:
        """int32[B, W, K] tokens after each match and bool[B, W, K] whether they are there."""
        batch, C = ctx.tokens.shape
        at_BWK = ends_BW[:, :, None] + 1 + jnp.arange(self.max_nodes, dtype=jnp.int32)[None, None]
        flat = jnp.take_along_axis(ctx.tokens, jnp.clip(at_BWK, 0, C - 1).reshape(batch, -1), axis=1)
        known_BWK = (ends_BW[:, :, None] >= 0) & (at_BWK < ctx.length[:, None, None])
        return flat.reshape(at_BWK.shape), known_BWK

    def _shares(self, follow_BWK: jax.Array, known_BWK: jax.Array) -> jax.Array:
        """int32[B, W, K]: matches that agree with each one's continuation from its start up to each token."""
        same_BWWK = follow_BWK[:, :, None] == follow_BWK[:, None]
        same_BWWK = same_BWWK & known_BWK[:, :, None] & known_BWK[:, None]
        agree = [same_BWWK[..., 0]]
        for i in range(1, self.max_nodes):
            agree.append(agree[-1] & same_BWWK[..., i])
        return jnp.stack([jnp.sum(a, axis=2, dtype=jnp.int32) for a in agree], axis=2)

    def _least(self, ends_BW: jax.Array) -> jax.Array:
        """float32[B, 1, 1]: matches that must agree."""
        matches_B = jnp.sum(ends_BW >= 0, axis=1, dtype=jnp.int32)
        return (matches_B.astype(jnp.float32) * jnp.float32(self.min_share))[:, None, None]
