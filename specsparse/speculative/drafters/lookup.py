"""Lookup: the end of the text stood in it before, and is continued as it was then. No weights.

Drafters of this kind, also your own (`notebooks/last_seen.py`), are made of three helpers: `allowed` cuts the length of
a draft to the budget, `copy_chain` copies tokens of the text as a draft, `drafted` returns it.
"""

import functools
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Annotated, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine.pytree import Pytree
from specsparse.errors import UserError
from specsparse.speculative.base import (
    MAX_GAMMA,
    PAD,
    SHORT_GAMMA,
    Draft,
    DraftContext,
    Drafted,
    Drafter,
    DraftKind,
    Feedback,
    MaxNodes,
)
from specsparse.speculative.policies.base import Fixed, Policy
from specsparse.speculative.trees.template import TreeTemplate
from specsparse.support.options import Also, Count, Range, check_at_most

NgramSize = Annotated[int, Range(1, 64)]
SizeN = Annotated[int, Range(1, 64), Also("ngram_size_n", "spec_ngram_size_n")]
SizeM = Annotated[int, Range(1, MAX_GAMMA), Also("ngram_size_m", "spec_ngram_size_m")]


def suffix_matches(tokens_BC: jax.Array, length_B: jax.Array, *, longest: int) -> jax.Array:
    """How many tokens that end at each position equal the last ones of the text, int32[B, C], at most `longest`.

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
    """`count` cut to the budget and to the room of a draft, int32[B]."""
    return jnp.clip(count_B, 0, jnp.clip(ctx.budget, 0, max_nodes))


def drafted(draft: Draft, state, ctx: DraftContext) -> Drafted:
    """The result of a drafter that does not use the target's cache."""
    return Drafted(draft, state, ctx.cache)


class NGrams(Drafter):
    """Looks up the last n tokens of prompt and output earlier in them, for n from `ngram_max` down to `ngram_min`.

    The first n with enough matches wins; the draft copies what followed one of them. A match may overlap the last n
    tokens (it does in a text that repeats itself) but is never those tokens themselves. Stateless; `params` is unused.

    llama.cpp's two also ignore a match at position 0, do not copy the last token, stay silent in texts of under
    n + m + 2 tokens, and count as hits the rounds in which the key was looked up; here a hit is a match in the text.

    Attributes:
        max_nodes: K, tokens drafted at most.
        ngram_max: longest n-gram to look up.
        ngram_min: shortest n-gram to look up, 1..ngram_max.
        newest: whether the most recent match wins, or the first one in the text.
        min_follow: tokens that must follow a match for it to count.
        copy_max: tokens copied at most (llama.cpp's m, before the draft is cut to K); None for no such limit.
        min_copy: tokens that must follow the winner, else the draft is empty.
    """

    kind = DraftKind.ONE_HOT
    ngram_max: int
    ngram_min: int
    newest = False
    min_follow = 1
    copy_max: int | None = None
    min_copy = 0

    @property
    def min_hits(self) -> int:
        """How many matches an n-gram must have to be followed."""
        return 1

    def draft(self, params: Pytree, state: Pytree, ctx: DraftContext) -> Drafted:
        """Copies the tokens behind the match; consumes no noise."""
        start_B, match_B = self.find(ctx.tokens, ctx.length)
        follow_B = jnp.where(match_B > 0, ctx.length - start_B, 0)
        if self.copy_max is not None:
            follow_B = jnp.minimum(follow_B, self.copy_max)
        follow_B = jnp.where(follow_B >= self.min_copy, follow_B, 0)
        count_B = allowed(ctx, follow_B, max_nodes=self.max_nodes)
        return drafted(copy_chain(ctx, start_B, count_B, max_nodes=self.max_nodes), state, ctx)

    def find(self, tokens_BC: jax.Array, length_B: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Position after the winning match, and its length, 0 if there is none, both int32[B]."""
        C = tokens_BC.shape[1]
        position_C = jnp.arange(C, dtype=jnp.int32)[None]
        match_BC = suffix_matches(tokens_BC, length_B, longest=self.ngram_max)
        match_BC = jnp.where(position_C < length_B[:, None] - self.min_follow, match_BC, 0)
        if self.min_hits == 1:  # one reduction finds the longest match and among those the one that wins
            rank_C = position_C if self.newest else C - 1 - position_C
            best_B = jnp.max(jnp.where(match_BC >= self.ngram_min, match_BC * C + rank_C, -1), axis=1)
            rank_B = best_B % C
            start_B = jnp.where(best_B >= 0, (rank_B if self.newest else C - 1 - rank_B) + 1, 0)
            return start_B, jnp.maximum(best_B, 0) // C
        n_B = jnp.zeros_like(match_BC[:, 0])  # the n that is looked up, 0 if none has enough matches
        for n in range(self.ngram_min, self.ngram_max + 1):
            hits_B = jnp.sum(match_BC >= n, axis=1, dtype=jnp.int32)
            n_B = jnp.where(hits_B >= self.min_hits, n, n_B)
        hit_BC = (match_BC >= n_B[:, None]) & (n_B[:, None] > 0)
        if self.newest:
            end_B = jnp.max(jnp.where(hit_BC, position_C, -1), axis=1)
        else:
            end_B = jnp.min(jnp.where(hit_BC, position_C, C), axis=1)
        return end_B + 1, n_B


@dataclass(frozen=True)
class NGramSizes:
    """Which n-grams are looked up.

    Attributes:
        ngram_max: longest; by default 3, or `ngram_min` if that is more.
        ngram_min: shortest; by default 2, or `ngram_max` if that is less. 1 in the original: one-token matches draft
            more than they win.
    """

    ngram_max: Annotated[NgramSize | None, Also("prompt_lookup_max", "max_matching_ngram_size")] = None
    ngram_min: Annotated[NgramSize | None, Also("prompt_lookup_min")] = None

    def __post_init__(self):
        low = self.ngram_min if self.ngram_min is not None else min(2, self.ngram_max or 2)
        high = self.ngram_max if self.ngram_max is not None else max(3, low)
        if high < low:
            raise UserError(f"drafter.ngram_max={high} must be at least ngram_min={low}")
        object.__setattr__(self, "ngram_min", low)
        object.__setattr__(self, "ngram_max", high)


@dataclass(frozen=True)
class PromptLookup(NGramSizes, NGrams):
    """The first match in the text (Saxena 2023; HF's `prompt_lookup_num_tokens`, vLLM's `ngram`).

    Attributes:
        max_nodes: tokens drafted at most.
    """

    max_nodes: MaxNodes = SHORT_GAMMA


@dataclass(frozen=True)
class NGramSimple(NGrams):
    """llama.cpp's `ngram-simple`: one n, the most recent match, and no draft unless at least n tokens follow it.

    Attributes:
        max_nodes: tokens drafted at most.
        size_n: tokens looked up.
        size_m: tokens copied at most, before `max_nodes` cuts them.
    """

    max_nodes: MaxNodes = SHORT_GAMMA
    size_n: SizeN = 12
    size_m: SizeM = 48

    newest = True
    ngram_max = ngram_min = min_copy = property(attrgetter("size_n"))
    copy_max = property(attrgetter("size_m"))


@dataclass(frozen=True)
class NGramMap(NGramSimple):
    """llama.cpp's `ngram-map-k`: one n, the most recent match that a whole m-gram follows, of keys seen often enough.

    Attributes:
        size_m: tokens that must follow, and are copied at most.
        min_hits: times the n-gram must have occurred.
    """

    min_hits: Annotated[Count, Also("ngram_min_hits", "spec_ngram_min_hits")] = 1

    min_follow = property(attrgetter("size_m"))
    min_copy = 0


class SuffixState(NamedTuple):
    """Matches of the end of the text so far."""

    # int32[B, C], length of the common suffix of the text up to each position (included) and the whole text, at most
    # `longest`; 0 at the last position and beyond
    match: jax.Array
    seen: jax.Array  # int32[B], tokens of the text that `match` knows


@dataclass(frozen=True)
class Suffix(Drafter):
    """Continues as the longest suffix of prompt and output that occurs earlier in them did there (SuffixDecoding).

    After Oliaro et al., SuffixDecoding (arXiv:2411.04975), with the request's own text for a corpus and a chain for a
    draft. Their suffix tree answers two questions, where the longest match is and how often each continuation
    followed it; a table of match lengths updated by one vector pass a token answers them with fixed shapes.

    Of the (at most `candidates` most recent) longest matches, each votes for its continuation: f_i is the share of
    matches whose first i tokens agree with the candidate's, and the candidate with the largest sum of f_i wins, the
    expected number of accepted tokens if the past repeats itself (their SCORE); ties go to the most recent. The draft
    is as long as `factor` times the match, plus `offset`, and ends where f falls under `min_share`. All of it is a
    function of the text before the draft. `params` is unused.

    Attributes:
        max_nodes: tokens drafted at most.
        longest: match lengths are counted up to this (the depth of the suffix tree).
        min_match: shortest match that is drafted from.
        factor: draft tokens per matched token.
        offset: draft tokens more.
        min_share: share of the candidates that must agree with the draft up to each token.
        candidates: matches that vote at most.
    """

    kind = DraftKind.ONE_HOT
    max_nodes: MaxNodes = SHORT_GAMMA
    longest: Annotated[int, Range(1, 4096), Also("suffix_decoding_max_tree_depth")] = 64
    min_match: Annotated[int, Range(1, 4096)] = 1
    factor: Annotated[float, Range(0.01, 1024), Also("suffix_decoding_max_spec_factor")] = 1.0
    offset: Annotated[int, Range(-MAX_GAMMA, MAX_GAMMA)] = 0
    min_share: Annotated[float, Range(0, 1), Also("suffix_decoding_min_token_prob")] = 0.1
    candidates: Annotated[int, Range(1, 64)] = 8

    def __post_init__(self):
        check_at_most("drafter", self, min_match="longest")

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
        batch, C = ctx.tokens.shape
        ends_BW, best_B = self._latest(state.match, ctx.length)
        at_BWK = ends_BW[:, :, None] + 1 + jnp.arange(self.max_nodes, dtype=jnp.int32)[None, None]
        follow_BWK = jnp.take_along_axis(ctx.tokens, jnp.clip(at_BWK, 0, C - 1).reshape(batch, -1), axis=1)
        known_BWK = (ends_BW[:, :, None] >= 0) & (at_BWK < ctx.length[:, None, None])
        share_BWK = self._shares(follow_BWK.reshape(at_BWK.shape), known_BWK)
        matches_B = jnp.sum(ends_BW >= 0, axis=1, dtype=jnp.int32)
        least_B11 = (matches_B.astype(jnp.float32) * jnp.float32(self.min_share))[:, None, None]
        wanted_B = jnp.floor(best_B.astype(jnp.float32) * jnp.float32(self.factor)).astype(jnp.int32) + self.offset
        wanted_B = jnp.where(best_B >= self.min_match, allowed(ctx, wanted_B, max_nodes=self.max_nodes), 0)
        keep_BWK = jnp.arange(self.max_nodes, dtype=jnp.int32)[None, None] < wanted_B[:, None, None]
        keep_BWK = keep_BWK & known_BWK & (share_BWK.astype(jnp.float32) >= least_B11)
        score_BW = jnp.sum(jnp.where(keep_BWK, share_BWK, 0), axis=2, dtype=jnp.int32)
        winner_B1 = jnp.argmax(score_BW, axis=1, keepdims=True).astype(jnp.int32)
        count_B = jnp.take_along_axis(jnp.sum(keep_BWK, axis=2, dtype=jnp.int32), winner_B1, axis=1)[:, 0]
        start_B = jnp.take_along_axis(ends_BW, winner_B1, axis=1)[:, 0] + 1
        return drafted(copy_chain(ctx, start_B, count_B, max_nodes=self.max_nodes), state, ctx)

    def commit(self, params: Pytree, state: SuffixState, ctx: DraftContext, feedback: Feedback) -> SuffixState:
        """One pass over C for each token emitted: a match grows by one if the text repeats that token."""
        C = ctx.tokens.shape[1]
        position_C = jnp.arange(C, dtype=jnp.int32)[None]

        def add(state):
            seen_B1 = state.seen[:, None]
            token_B1 = jnp.take_along_axis(ctx.tokens, jnp.minimum(seen_B1, C - 1), axis=1)
            longer_BC = later(state.match, 1, fill=0) + 1
            same_BC = (ctx.tokens == token_B1) & (position_C < seen_B1)
            grown_BC = jnp.where(same_BC, jnp.minimum(longer_BC, self.longest), 0)
            more_B = state.seen < ctx.length
            return SuffixState(jnp.where(more_B[:, None], grown_BC, state.match), state.seen + more_B.astype(jnp.int32))

        return jax.lax.while_loop(lambda s: (s.seen < ctx.length).any(), add, state)

    def _latest(self, match_BC: jax.Array, length_B: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Ends of the longest matches, int32[B, W], latest first, padded with -1; their length, int32[B]."""
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

    def _shares(self, follow_BWK: jax.Array, known_BWK: jax.Array) -> jax.Array:
        """Matches that agree with each one's continuation from its start up to each token, int32[B, W, K]."""
        same_BWWK = follow_BWK[:, :, None] == follow_BWK[:, None]
        same_BWWK = same_BWWK & known_BWK[:, :, None] & known_BWK[:, None]
        agree = [same_BWWK[..., 0]]
        for i in range(1, self.max_nodes):
            agree.append(agree[-1] & same_BWWK[..., i])
        return jnp.stack([jnp.sum(a, axis=2, dtype=jnp.int32) for a in agree], axis=2)


class EitherState(NamedTuple):
    """The states of the two, and bool[B], whether the last draft was the first one's."""

    first: Pytree
    second: Pytree
    took: jax.Array


@dataclass(frozen=True)
class Either(Drafter):
    """Drafts with `first` (which needs no weights) and, for sequences it leaves empty, with `second`. Chains.

    If `second` draws its tokens, those of `first` count as drawn from one-hot distributions: `token` and `block` accept
    one with its probability under p, and leave it out of the residual.

    If `first` drafts for a sequence, `second` has no budget for it, so that a drafter whose time follows its tokens
    costs nothing then. Each learns of its own drafts only.
    """

    first: Drafter  # such as prompt lookup
    second: Drafter  # such as a head; its weights are this drafter's

    def __post_init__(self):
        assert self.first.kind is DraftKind.ONE_HOT and not self.first.tree and not self.second.tree

    kind = property(attrgetter("second.kind"))
    asks_stop = property(attrgetter("second.asks_stop"))
    has_sources = True

    @property
    def max_nodes(self) -> int:
        return max(self.first.max_nodes, self.second.max_nodes)

    @property
    def wants_hidden(self) -> bool | tuple[int, ...]:
        return self.first.wants_hidden or self.second.wants_hidden

    def with_room(self, nodes: int) -> Self:
        return replace(self, second=self.second.with_room(nodes))

    def source_policies(self, policy: Policy) -> tuple[Policy, ...]:
        """A lookup costs nothing; a policy that reads draft distributions leaves it alone."""
        return Fixed(self.first.max_nodes) if policy.needs else policy.zero_cost(), policy

    def init(self, params: Pytree, ctx: DraftContext, *, hidden: jax.Array | None = None) -> EitherState:
        first = self.first.init(None, ctx, hidden=hidden)
        second = self.second.init(params, ctx, hidden=hidden)
        return EitherState(first, second, jnp.zeros((ctx.length.shape[0],), bool))

    def draft(self, params: Pytree, state: EitherState, ctx: DraftContext) -> Drafted:
        ours = ctx.from_source(0)
        a = self.first.draft(None, state.first, ours)
        first_B = ours.keep(a.draft.count)
        took_B = first_B > 0
        rest = ctx._replace(budget=jnp.where(took_B, 0, ctx.budget), cache=a.cache).from_source(1)
        b = self.second.draft(params, state.second, rest)
        K = self.max_nodes
        ours_BK, theirs_BK = (jnp.pad(x.draft.tokens, ((0, 0), (0, K - x.draft.max_nodes))) for x in (a, b))
        tokens_BK, q_BKV = jnp.where(took_B[:, None], ours_BK, theirs_BK), None
        if (q_BkV := b.draft.q) is not None:
            q_BKV = jnp.pad(q_BkV, ((0, 0), (0, K - q_BkV.shape[1]), (0, 0)))
            q_BKV = jnp.where(took_B[:, None, None], jax.nn.one_hot(tokens_BK, q_BKV.shape[-1]), q_BKV)
        count_B = jnp.where(took_B, first_B, rest.keep(b.draft.count))
        draft = Draft(tokens_BK, TreeTemplate.chain(K).parents_array(tokens_BK.shape[0]), count_B, q_BKV)
        failed = [each.failed for each in (a, b) if each.failed is not None]
        state = EitherState(a.state, b.state, took_B)
        failed_B = functools.reduce(jnp.logical_or, failed) if failed else None
        return Drafted(draft, state, b.cache, jnp.where(took_B, 0, 1), failed_B)

    def commit(self, params: Pytree, state: EitherState, ctx: DraftContext, feedback: Feedback) -> EitherState:
        """Both learn the verdict; to the one that did not draft, the draft is empty."""
        draft, zero_B = feedback.draft, jnp.zeros_like(feedback.draft.count)
        mine = feedback._replace(draft=draft._replace(count=jnp.where(state.took, draft.count, zero_B)))
        other = feedback._replace(draft=draft._replace(count=jnp.where(state.took, zero_B, draft.count)))
        first = self.first.commit(None, state.first, ctx, mine)
        second = self.second.commit(params, state.second, ctx, other)
        return EitherState(first, second, state.took)

    def failure(self, tokens: np.ndarray) -> str | None:
        return self.first.failure(tokens) or self.second.failure(tokens)
