"""Acceptance chosen beforehand: made up by rates, to test speed apart from draft quality, or scripted, round by round.

The verdict of `synthetic` ignores what the tokens are, so the output is *not text* and the distribution is not the
target's: it is labelled `synthetic` wherever it is named. Draft, forward, cache commit and counters are the real ones.
"""

import dataclasses
import functools
import itertools
import operator
from operator import attrgetter
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine.pytree import Pytree
from specsparse.errors import UserError, refuse
from specsparse.speculative.base import (
    MAX_GAMMA,
    ROOT,
    SHORT_GAMMA,
    Draft,
    DraftContext,
    Drafted,
    Drafter,
    DraftKind,
    MaxNodes,
    Verdict,
    Verifier,
)
from specsparse.speculative.drafters import lookup
from specsparse.speculative.trees.template import TreeTemplate
from specsparse.speculative.verifiers import SYNTHETIC
from specsparse.speculative.verifiers.draft_rules import match_verdict
from specsparse.speculative.verify import Noise, Rule, Target
from specsparse.support.options import Also, Inline, Range, Read, instance_of


@dataclasses.dataclass(frozen=True)
class SyntheticRates(Rule):
    """Acceptance made up beforehand: the rule of the verifier `synthetic`. LOSSY, and the output is not text.

    For a draft of gamma tokens it is r_i, the chance that token i is accepted once those before it were.

    Attributes:
        process: geometric (llama.cpp), one rate at every position; minimum_variance (vLLM), accepted lengths are the
            two integers around the mean.
        rate: chance that a drafted token is accepted once those before it were; by default 0.7. Of minimum_variance,
            the mean length is then that of the geometric process.
        length: instead of `rate`, the mean acceptance length, bonus token included.
        rates: instead of both, the chance that at least i tokens are accepted, for each i.
    """

    process: Literal["geometric", "minimum_variance"] = "geometric"
    rate: Annotated[float, Range(0, 1)] | None = None
    length: Annotated[
        float | None,
        Range(1, MAX_GAMMA + 1),
        Also("synthetic_acceptance_length", "spec_synthetic_acceptance_length"),
    ] = None
    rates: tuple[float, ...] | None = None

    def __post_init__(self):
        one = sum(given is not None for given in (self.rate, self.length, self.rates)) <= 1
        reach = (1.0, *(self.rates or ()))
        falling = all(0 <= rate <= before for before, rate in itertools.pairwise(reach))
        refuse({
            "synthetic acceptance takes one of rate, length and rates": not one,
            f"synthetic rates {self.rates} must lie in [0, 1] and not increase": not falling,
        })  # fmt: skip

    def conditional(self, gamma: int) -> tuple[float, ...]:
        """r_i of a draft of `gamma` tokens; UserError if `length` is beyond it."""
        if self.rates is not None:
            reach = (1.0, *self.rates, *(0.0,) * gamma)[: gamma + 1]
            return tuple(after / before if before > 0 else 0.0 for before, after in itertools.pairwise(reach))
        if self.length is not None and gamma and self.length > gamma + 1:
            raise UserError(f"mean acceptance length {self.length:g} must lie in 1..{gamma + 1} for gamma={gamma}")
        rate = 0.7 if self.rate is None else self.rate
        if self.process == "geometric":
            return (rate if self.length is None else _solve_geometric(gamma, self.length),) * gamma
        length = SyntheticRates(rate=rate).mean_acceptance_length(gamma) if self.length is None else self.length
        accepted, whole = length - 1, int(length - 1)
        return (*(1.0,) * whole, accepted - whole, *(0.0,) * gamma)[:gamma]

    def unconditional(self, gamma: int) -> tuple[float, ...]:
        """P(accepted >= i + 1) for each position of a draft of `gamma` tokens."""
        return tuple(itertools.accumulate(self.conditional(gamma), operator.mul))

    def mean_acceptance_length(self, gamma: int) -> float:
        """1 + sum_i P(accepted >= i), bonus token included; geometric: (1 - r^(gamma+1)) / (1 - r)."""
        return 1.0 + sum(self.unconditional(gamma))

    needs_p = False

    def measures_alpha(self, *, tree: bool, greedy: bool) -> bool:
        return True

    def verdict(self, draft: Draft, target: Target, noise: Noise) -> Verdict:
        """Accepts the first a tokens of a chain, a drawn from these rates whatever the tokens are: lossy, and not text.

        The accepted tokens are emitted as drafted, then the target's own token at the row it ends on. `alpha` holds the
        rates of the tested positions. Positions beyond them are rejected.
        """
        K = draft.max_nodes
        rate_K = jnp.array(self.conditional(K), jnp.float32)[None]
        node_K = jnp.arange(K, dtype=jnp.int32)[None]
        heads_BK = (noise.coins < rate_K) & (node_K < draft.count[:, None])
        accepted_B = jnp.sum(jnp.cumprod(heads_BK.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
        # The verdict of `match` on the accepted part alone, with a target that agrees with it.
        taken_Bn = jnp.arange(K + 1, dtype=jnp.int32)[None] < accepted_B[:, None]
        forced_Bn = jnp.where(taken_Bn, jnp.pad(draft.tokens, ((0, 0), (0, 1))), target.tokens)
        verdict = match_verdict(draft._replace(count=accepted_B), forced_Bn, tree=False)
        tested_B = jnp.minimum(accepted_B + 1, draft.count)
        tested_BK = node_K < tested_B[:, None]
        return verdict._replace(
            tested=tested_B,
            alpha=jnp.sum(jnp.where(tested_BK, rate_K, 0.0), axis=1),
            alpha_var=jnp.sum(jnp.where(tested_BK, rate_K * (1 - rate_K), 0.0), axis=1),
        )


def _solve_geometric(gamma: int, length: float) -> float:
    """r with 1 + r + ... + r^gamma = length, by bisection to the last bit."""
    low, high = 0.0, 1.0
    if length >= gamma + 1:
        return 1.0
    while low < (middle := (low + high) / 2) < high:
        if 1 + sum(middle**i for i in range(1, gamma + 1)) < length:
            low = middle
        else:
            high = middle
    return low


def synthetic_verifier(rates: SyntheticRates) -> Verifier:
    """The verifier of any chain by these rates. It is not among `VERIFIERS`: it cannot be certified."""
    kinds = frozenset({DraftKind.ONE_HOT, DraftKind.SAMPLED})
    return Verifier(SYNTHETIC, rates, kinds, lossless=False, needs_p=False)


@dataclasses.dataclass(frozen=True)
class Synthetic(Drafter):
    """Drafts the tokens that stand before the last one; the verdict of its `acceptance` decides how many stay.

    Different tokens, so that a sparse target's pass reads for each of them what it would read for a real draft.

    Attributes:
        max_nodes: tokens drafted; as many as there are `rates`, if they are given.
        acceptance: how many are accepted.
    """

    max_nodes: MaxNodes = SHORT_GAMMA
    acceptance: Annotated[SyntheticRates, Inline()] = SyntheticRates()
    kind = DraftKind.ONE_HOT

    def __post_init__(self):
        if self.acceptance.rates is not None:
            object.__setattr__(self, "max_nodes", len(self.acceptance.rates))
        self.acceptance.conditional(self.max_nodes)  # refuses a mean length that is too long

    @property
    def own_verifier(self) -> Verifier:
        return synthetic_verifier(self.acceptance)

    def draft(self, params: Pytree, state: Pytree, ctx: DraftContext) -> Drafted:
        """The K tokens before the last one, of them `budget`; consumes no noise."""
        batch, K = ctx.tokens.shape[0], self.max_nodes
        count_B = lookup.allowed(ctx, jnp.full((batch,), K, jnp.int32), max_nodes=K)
        place_K = jnp.arange(K, dtype=jnp.int32)[None]
        before_BK = jnp.maximum(ctx.length[:, None] - 1 - K + place_K, 0)
        tokens_BK = jnp.where(place_K < count_B[:, None], jnp.take_along_axis(ctx.tokens, before_BK, axis=1), 0)
        return lookup.drafted(Draft(tokens_BK, TreeTemplate.chain(K).parents_array(batch), count_B), state, ctx)


@dataclasses.dataclass(frozen=True)
class Scripted(Drafter):
    """Drafts the true continuation along one path of a tree and wrong tokens everywhere else, for measuring and tests.

    In round r the accepted path ends at node `ends[r % len(ends)]` (`ROOT`: nothing is accepted), if the target goes
    on as the truth says. Wrong siblings differ from the truth and from each other.

    The truth is int32[n] or int32[B, n], ids by absolute position (prompt first): `params`, or the field `truth` where
    `params` is None. Beyond its end everything is wrong.

    Attributes:
        template: the tree; None for a chain.
        ends: last right node of each round, repeated for ever.
        vocab_size: ids are drafted below this; more than a node has children.
        truth: ids of the whole text, if they are not given as `params`.
        max_nodes: tokens of a chain; with a template its nodes.
        accept: right tokens of a chain in each round, instead of `ends`; by default all.
    """

    template: Annotated[TreeTemplate | None, instance_of("a TreeTemplate", TreeTemplate)] = None
    ends: tuple[int, ...] = ()
    vocab_size: Annotated[int, Range(2, 2**31 - 1)] = 256
    truth: Annotated[tuple[int, ...], Read(lambda ids: tuple(map(int, ids)), "a list of ids")] = ()
    max_nodes: MaxNodes = SHORT_GAMMA
    accept: tuple[int, ...] | None = None
    kind = DraftKind.ONE_HOT

    def __post_init__(self):
        object.__setattr__(self, "max_nodes", self.shape.size)
        ends, K, width = self.lasts, self.max_nodes, self.shape.width
        inside = ends and all(ROOT <= end < K for end in ends)
        refuse({
            f"scripted ends {ends} must be nodes of a tree of {K}, or -1": not inside,
            f"scripted vocab_size={self.vocab_size} must be above the tree's width {width}": self.vocab_size <= width,
        })  # fmt: skip

    @classmethod
    def chain(cls, gamma: int, accept: tuple[int, ...], *, vocab_size: int, truth: tuple[int, ...] = ()) -> "Scripted":
        """Drafts of `gamma` tokens of which `accept[r]` are right in round r."""
        return cls(vocab_size=vocab_size, truth=truth, max_nodes=gamma, accept=accept)

    @functools.cached_property
    def shape(self) -> TreeTemplate:
        return TreeTemplate.chain(self.max_nodes) if self.template is None else self.template

    @property
    def lasts(self) -> tuple[int, ...]:
        if self.template is not None:
            return self.ends
        return tuple(right - 1 for right in ((self.max_nodes,) if self.accept is None else self.accept))

    max_depth = property(attrgetter("shape.max_depth"))

    @property
    def tree(self) -> bool:
        return self.shape.width > 1

    def draft(self, params: Pytree, state: Pytree, ctx: DraftContext) -> Drafted:
        """The round's script, cut to the first `budget` nodes; consumes no noise."""
        batch, K = ctx.tokens.shape[0], self.max_nodes
        truth_BK = self._truth(params, ctx)
        right_rK = np.zeros((len(self.lasts), K), bool)  # nodes on the accepted path of each round
        for row, end in enumerate(self.lasts):
            right_rK[row, list(self.shape.path(end))] = True
        right_BK = jnp.take(jnp.asarray(right_rK), ctx.round % len(self.lasts), axis=0) & (truth_BK >= 0)
        miss_K = jnp.array(self.shape.ranks, jnp.int32)[None] + 1
        wrong_BK = (jnp.maximum(truth_BK, 0) + miss_K) % self.vocab_size
        count_B = lookup.allowed(ctx, jnp.full((batch,), K, jnp.int32), max_nodes=K)
        tokens_BK = jnp.where(right_BK, truth_BK, wrong_BK)
        tokens_BK = jnp.where(jnp.arange(K, dtype=jnp.int32)[None] < count_B[:, None], tokens_BK, 0)
        return lookup.drafted(Draft(tokens_BK, self.shape.parents_array(batch), count_B), state, ctx)

    def _truth(self, params: Pytree, ctx: DraftContext) -> jax.Array:
        """int32[B, K]: the true id at each node's position, -1 beyond the end of the truth."""
        given = jnp.array(self.truth, jnp.int32) if params is None else jnp.asarray(params, jnp.int32)
        batch, n = ctx.tokens.shape[0], given.shape[-1]
        at_BK = ctx.length[:, None] + jnp.array(self.shape.depths, jnp.int32)[None] - 1
        if n == 0:
            return jnp.full(at_BK.shape, -1, jnp.int32)
        truth_Bn = jnp.broadcast_to(given.reshape(-1, n), (batch, n))
        return jnp.where(at_BK < n, jnp.take_along_axis(truth_Bn, jnp.minimum(at_BK, n - 1), axis=1), -1)
