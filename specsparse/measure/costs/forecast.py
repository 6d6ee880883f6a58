"""Predicted speed-ups: E[tokens] of a round over the time it takes, for each method, length and acceptance."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from specsparse.measure import intervals
from specsparse.measure.costs.accepted import AcceptedRates
from specsparse.measure.costs.candidates import Candidate
from specsparse.measure.costs.clocks import Clock, Clocks
from specsparse.measure.costs.shapes import DraftChain, DraftShape, tree_break_even, tree_for
from specsparse.speculative import expected
from specsparse.support.files import Json

MOST = 16
"""The longest drafts that are looked at."""
LENGTHS = (*range(1, 9), 10, 12, MOST)
"""Draft lengths that are looked at."""


@dataclass(frozen=True)
class AtLength:
    """One method at one draft length, or with one tree.

    Attributes:
        gamma: tokens that a draft may have, or nodes of the tree.
        tokens: emitted a round.
        round_steps: time of a round in plain steps.
        speedup: over plain decoding.
        low, high: its interval: over kinds of text where several were counted, and over what the times may be.
        levels: of the tree, None for chains.
    """

    gamma: int
    tokens: float
    round_steps: float
    speedup: float
    low: float
    high: float
    levels: int | None = None

    @property
    def size(self) -> str:
        """In words: a chain's length, or nodes and levels of a tree."""
        return f"gamma {self.gamma}" if self.levels is None else f"{self.gamma} nodes on {self.levels} levels"


@dataclass(frozen=True)
class Forecast:
    """One method at one acceptance.

    Attributes:
        candidate: what drafts.
        acceptance: how often it is right.
        c: a drafted token in plain steps.
        c0: a round besides, in plain steps, of drafts of one token.
        points: by draft length.
        break_even: least acceptance at which some length pays; None where none does.
        v: of the target, by rows, from v(1).
    """

    candidate: Candidate
    acceptance: AcceptedRates
    c: float
    c0: float
    points: tuple[AtLength, ...]
    break_even: float | None
    v: tuple[float, ...]

    @property
    def best(self) -> AtLength:
        """The fastest length."""
        return max(self.points, key=lambda p: p.speedup)

    @property
    def pays(self) -> bool:
        """Whether some length is faster than plain decoding."""
        return self.best.speedup > 1

    def to_dict(self) -> Json:
        """As plain values."""
        best = asdict(self.best) if self.pays else None
        return {
            "method": self.candidate.name, "drafter": self.candidate.drafter, "assumed_head": self.candidate.assumed,
            "alpha": self.acceptance.alpha, "acceptance": self.acceptance.source,
            "tasks": {task: one.as_dict() for task, one in self.acceptance.tasks.items()},
            "c": self.c, "c0": self.c0, "break_even": self.break_even, "best": best, "why_not": why_not(self),
            "lengths": [asdict(p) for p in self.points],
        }  # fmt: skip


def forecast(
    clocks: Clocks, candidate: Candidate, acceptance: AcceptedRates, *, lengths: Sequence[int] = LENGTHS
) -> Forecast:
    """What a method would do.

    Args:
        clocks: times of the target.
        candidate: the method.
        acceptance: how often it is right.
        lengths: drafts that are looked at, none longer than was counted.
    """
    clock, longest = clocks.expected, acceptance.longest
    if longest is not None and not candidate.tree:
        lengths = sorted({min(gamma, longest) for gamma in lengths})
    c, c0 = clock.costs(candidate, 1)
    shapes = _shapes(clock, candidate, acceptance, lengths)
    points = tuple(at_shape(clocks, candidate, acceptance, shape) for shape in shapes)
    v = tuple(clock.v(n) for n in range(1, max(lengths) + 2))
    if candidate.tree:
        least = tree_break_even(clock, candidate, min(max(lengths), 8))
    else:
        least = expected.break_even(lambda n: v[int(n) - 1], c=c, c0=c0, most=max(lengths))
    return Forecast(candidate, acceptance, c, c0, points, least, v)


def _shapes(clock: Clock, candidate: Candidate, acceptance: AcceptedRates, lengths: Sequence[int]) -> list[DraftShape]:
    """Chains of these lengths, or the best trees of up to so many nodes."""
    if not candidate.tree:
        return [DraftChain(gamma) for gamma in lengths]
    trees = {tree.room: tree for n in lengths for tree in (tree_for(clock, candidate, acceptance, n),)}
    return [trees[n] for n in sorted(trees)]


def at_shape(clocks: Clocks, candidate: Candidate, acceptance: AcceptedRates, shape: DraftShape) -> AtLength:
    """One draft length or tree: tokens of all tasks over the time that they take."""
    middle, slow, fast = (
        _over_tasks(clock, candidate, acceptance, shape) for clock in (clocks.expected, clocks.slow, clocks.fast)
    )
    ends = [end for found in (middle, slow, fast) for end in (found.value, found.low, found.high) if end is not None]
    tasks = acceptance.tasks.values()
    tokens = sum(a.weight for a in tasks) / sum(a.weight / shape.tokens(a) for a in tasks)
    return AtLength(shape.room, tokens, tokens / middle.value, middle.value, min(ends), max(ends), shape.levels)


def _over_tasks(clock: Clock, candidate: Candidate, acceptance: AcceptedRates, shape: DraftShape) -> intervals.Interval:
    """Plain time of all tasks over the method's, as a run computes it over prompts."""
    plain, method = [], []
    for a in acceptance.tasks.values():
        plain.append(a.weight)
        method.append(a.weight / shape.tokens(a) * shape.steps(clock, candidate, a))
    found = intervals.ratio(plain, method)
    assert found is not None  # rounds take time
    return found


def why_not(f: Forecast) -> str | None:
    """Why no length pays, in one sentence; None where one does."""
    if f.pays:
        return None
    alpha, v2 = f.acceptance.alpha, f.v[1]
    free = expected.break_even(lambda n: f.v[int(n) - 1], most=len(f.v) - 1)
    if free is None or free > 0.95:
        return f"the device has no arithmetic to spare: a forward of two rows takes {v2:.2f} plain steps"
    if f.break_even is None:
        return f"a drafted token costs {f.c:.2f} plain steps, which no acceptance wins back"
    if f.break_even > alpha:
        costs = f"{f.c:.2f} plain steps a drafted token, v(2) {v2:.2f}"
        return f"{alpha:.2f} of the drafted tokens are accepted, and {f.break_even:.2f} are needed ({costs})"
    share = sum(a.share * a.weight for a in f.acceptance.tasks.values()) / sum(
        a.weight for a in f.acceptance.tasks.values()
    )
    return f"only {share:.0%} of the rounds find something to draft, and what all rounds pay besides is more"
