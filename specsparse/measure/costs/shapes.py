"""The shapes of drafts that are looked at: chains of some length, and the tree that suits an acceptance best."""

import abc
import functools
from collections.abc import Sequence
from dataclasses import dataclass

from specsparse.measure.costs.accepted import Accepted, AcceptedRates
from specsparse.measure.costs.candidates import Candidate
from specsparse.measure.costs.clocks import Clock
from specsparse.speculative import expected
from specsparse.speculative.tree import TreeTemplate
from specsparse.speculative.trees.sequoia import GUESSED_ACCEPTANCE, sequoia

MOST_LEVELS = 8
"""Of a tree."""


class DraftShape(abc.ABC):
    """What a round drafts.

    Attributes:
        room: tokens or nodes that it may have.
        levels: of a tree, None for a chain.
    """

    room: int
    levels: int | None = None

    @abc.abstractmethod
    def tokens(self, a: Accepted) -> float:
        """E[tokens] of a round, the bonus included."""

    @abc.abstractmethod
    def rows(self, a: Accepted) -> float:
        """Drafted tokens of a round that drafts."""

    def steps(self, clock: Clock, candidate: Candidate, a: Accepted) -> float:
        """Time of a mean round in plain steps."""
        rows = self.rows(a)
        steps = rows if self.levels is None else float(self.levels)
        c, c0 = clock.costs(candidate, self.room, width=rows / steps if steps else 1.0)
        if not rows:
            return clock.v(1)
        return expected.round_cost(clock.v, rows, c=c * steps / rows, c0=c0, share=a.share)


@dataclass(frozen=True)
class DraftChain(DraftShape):
    """Drafts of up to `room` tokens."""

    room: int

    def tokens(self, a: Accepted) -> float:
        """See `DraftShape`."""
        return a.tokens(self.room)

    def rows(self, a: Accepted) -> float:
        """See `DraftShape`; fewer than there is room for where drafts are shorter."""
        return a.rows(self.room)


@dataclass(frozen=True)
class DraftTree(DraftShape):
    """The same tree every round."""

    template: TreeTemplate

    @property
    def room(self) -> int:
        """Its nodes."""
        return self.template.size

    @property
    def levels(self) -> int:
        """Its depth."""
        return self.template.max_depth

    def tokens(self, a: Accepted) -> float:
        """See `DraftShape`: what is counted of a chain's positions holds for the levels."""
        t = self.template
        rates = siblings(a)
        further = [_at_depth(a, rates, depth) for depth in range(1, t.max_depth + 1)]
        chances = [(rates[r] if r < len(rates) else 0.0) * further[d - 1] for r, d in zip(t.ranks, t.depths)]
        return expected.mean_tokens(expected.expected_tokens_tree(t.parents, chances), a.share)

    def rows(self, a: Accepted) -> float:
        """See `DraftShape`."""
        return float(self.room)


def siblings(a: Accepted) -> tuple[float, ...]:
    """Chance of each child of a node to be the accepted one, by rank: as counted, else supposed.

    What the first child leaves is shared by the others as in `sequoia.GUESSED_ACCEPTANCE`, and less of it where the
    first is right less often than there.
    """
    if a.ranks:
        return tuple(rate / max(sum(a.ranks), 1.0) for rate in a.ranks)  # rounded rates may add up to 1.001
    first = min(a.reach[0] if a.reach else a.alpha, 1.0)
    guessed, *others = GUESSED_ACCEPTANCE
    left = (1 - first) * min(first / guessed, 1.0)
    return (first, *(left * rate / (1 - guessed) for rate in others))


def _at_depth(a: Accepted, rates: Sequence[float], depth: int) -> float:
    """How much rarer a node on that level is accepted, once its parent was, than one on the first."""
    if depth == 1 or not a.reach or not a.reach[0]:
        return 1.0
    known = min(depth, len(a.reach))
    if known < 2 or not a.reach[known - 2]:
        return 0.0
    rarer = a.reach[known - 1] / a.reach[known - 2] / a.reach[0]
    return min(rarer, 1 / sum(rates)) if sum(rates) else 0.0


def tree_for(clock: Clock, candidate: Candidate, acceptance: AcceptedRates, nodes: int) -> DraftTree:
    """The tree of at most so many nodes that Sequoia's programme finds for the mean acceptance by rank."""
    whole = sum(a.weight for a in acceptance.tasks.values())
    each = [(a.weight / whole, siblings(a)) for a in acceptance.tasks.values()]
    most = max(len(rates) for _, rates in each)
    mean = tuple(sum(w * rates[r] for w, rates in each if r < len(rates)) for r in range(most))
    return DraftTree(_sequoia(*_priced(clock, candidate, nodes), mean, nodes))


def tree_break_even(clock: Clock, candidate: Candidate, nodes: int) -> float | None:
    """The least acceptance of first children at which some tree pays, the others as `siblings` supposes; None: none."""
    cost, level = _priced(clock, candidate, nodes)

    def pays(alpha: float) -> bool:
        rates = siblings(Accepted(alpha))
        template = _sequoia(cost, level, rates, nodes)
        tokens = DraftTree(template).tokens(Accepted(alpha))
        return tokens >= cost[template.size] + level * template.max_depth

    return expected.least(pays, steps=12)


def _priced(clock: Clock, candidate: Candidate, nodes: int) -> tuple[tuple[float, ...], float]:
    """Rounds of 0 .. nodes nodes but for their levels, and a level, in plain steps."""
    costs = [clock.costs(candidate, n) for n in range(nodes + 1)]
    return tuple(round(clock.v(n + 1) + costs[n][1], 4) for n in range(nodes + 1)), round(costs[0][0], 4)


@functools.lru_cache(maxsize=4096)
def _sequoia(cost: tuple[float, ...], level: float, rates: tuple[float, ...], nodes: int) -> TreeTemplate:
    return sequoia(rates, cost, nodes, min(MOST_LEVELS, nodes), level_cost=level)
