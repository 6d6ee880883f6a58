"""N-gram lookup: what followed the last n tokens earlier in the text follows again. No weights."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from specsparse.engine.pytree import Pytree
from specsparse.errors import UserError
from specsparse.speculative.base import DraftContext, Drafted, Drafter, DraftKind
from specsparse.speculative.drafters import lookup
from specsparse.speculative.gamma import SHORT_GAMMA


@dataclasses.dataclass(frozen=True)
class NGram(Drafter):
    """Looks up the last n tokens of prompt and output earlier in them, for n from `ngram_max` down to `ngram_min`.

    The first n with enough matches wins; the draft copies what followed one of them. A match may overlap the last n
    tokens (it does in a text that repeats itself) but is never those tokens themselves. Stateless; `params` is unused.

    Presets, by the names of the originals:

    * `prompt_lookup` (Saxena 2023; HF's `prompt_lookup_num_tokens`, vLLM's `ngram`): the *first* match in the text.
    * `ngram_simple` (llama.cpp `ngram-simple`): one n, the *most recent* match, and no draft at all unless at least n
      tokens follow it.
    * `ngram_map` (llama.cpp `ngram-map-k`): one n, the most recent match that a whole m-gram follows, for keys seen
      `min_hits` times.

    llama.cpp's two also ignore a match at position 0, do not copy the last token, stay silent in texts of under
    n + m + 2 tokens, and count as hits the rounds in which the key was looked up; here a hit is a match in the text.

    Attributes:
        max_nodes: K, tokens drafted at most.
        ngram_max: longest n-gram to look up.
        ngram_min: shortest n-gram to look up, 1..ngram_max.
        newest: whether the most recent match wins, or the first one in the text.
        min_hits: matches an n-gram must have.
        min_follow: tokens that must follow a match for it to count.
        copy_max: tokens copied at most (llama.cpp's m, before the draft is cut to K); None for no such limit.
        min_copy: tokens that must follow the winner, else the draft is empty.
    """

    max_nodes: int = SHORT_GAMMA
    ngram_max: int = 3
    ngram_min: int = 2
    newest: bool = False
    min_hits: int = 1
    min_follow: int = 1
    copy_max: int | None = None
    min_copy: int = 0
    kind: ClassVar[DraftKind] = DraftKind.ONE_HOT

    def __post_init__(self):
        if self.ngram_max < self.ngram_min:
            raise UserError(f"drafter.ngram_max={self.ngram_max} must be at least ngram_min={self.ngram_min}")

    @classmethod
    def ngram_simple(cls, max_nodes: int, size_n: int, size_m: int) -> "NGram":
        """llama.cpp's `ngram-simple`."""
        return cls(max_nodes, size_n, size_n, newest=True, copy_max=size_m, min_copy=size_n)

    @classmethod
    def ngram_map(cls, max_nodes: int, size_n: int, size_m: int, min_hits: int = 1) -> "NGram":
        """llama.cpp's `ngram-map-k`."""
        return cls(max_nodes, size_n, size_n, newest=True, min_hits=min_hits, min_follow=size_m, copy_max=size_m)

    def draft(self, params: Pytree, state: Pytree, ctx: DraftContext) -> Drafted:
        """What followed the match; consumes no noise."""
        start_B, found_B = self.find(ctx.tokens, ctx.length)
        follow_B = jnp.where(found_B, ctx.length - start_B, 0)
        if self.copy_max is not None:
            follow_B = jnp.minimum(follow_B, self.copy_max)
        follow_B = jnp.where(follow_B >= self.min_copy, follow_B, 0)
        count_B = lookup.allowed(ctx, follow_B, max_nodes=self.max_nodes)
        return lookup.drafted(lookup.copy_chain(ctx, start_B, count_B, max_nodes=self.max_nodes), state, ctx)

    def find(self, tokens_BC: jax.Array, length_B: jax.Array) -> tuple[jax.Array, jax.Array]:
        """int32[B] position after the winning match, bool[B] whether there is one."""
        C = tokens_BC.shape[1]
        position_C = jnp.arange(C, dtype=jnp.int32)[None]
        match_BC = lookup.suffix_matches(tokens_BC, length_B, longest=self.ngram_max)
        match_BC = jnp.where(position_C < length_B[:, None] - self.min_follow, match_BC, 0)
        if self.min_hits == 1:  # one reduction finds the longest match and among those the one that wins
            rank_C = position_C if self.newest else C - 1 - position_C
            best_B = jnp.max(jnp.where(match_BC >= self.ngram_min, match_BC * C + rank_C, -1), axis=1)
            rank_B = best_B % C
            return jnp.where(best_B >= 0, (rank_B if self.newest else C - 1 - rank_B) + 1, 0), best_B >= 0
        n_B = self._longest(match_BC)
        hit_BC = (match_BC >= n_B[:, None]) & (n_B[:, None] > 0)
        if self.newest:
            end_B = jnp.max(jnp.where(hit_BC, position_C, -1), axis=1)
        else:
            end_B = jnp.min(jnp.where(hit_BC, position_C, C), axis=1)
        return end_B + 1, n_B > 0

    def _longest(self, match_BC: jax.Array) -> jax.Array:
        """int32[B]: the n that is looked up, 0 if none has enough matches."""
        n_B = jnp.zeros_like(match_BC[:, 0])
        for n in range(self.ngram_min, self.ngram_max + 1):
            hits_B = jnp.sum(match_BC >= n, axis=1, dtype=jnp.int32)
            n_B = jnp.where(hits_B >= self.min_hits, n, n_B)
        return n_B
