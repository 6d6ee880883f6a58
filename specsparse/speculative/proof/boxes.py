"""A function of uniforms, constant on boxes, whose edges are found by bisection.

A verdict is a function of n uniforms: a coin accepts below a threshold, a token is drawn between two. So the cube of
all uniforms falls into boxes of one verdict each, and the volume of a box is the probability of its verdict.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

STEPS = 1 << 24
"""Values of a uniform of the decode loop: multiples of 2^-24 in [0, 1)."""

LANES = 1024
"""Verdicts of one call, at most."""

MOST_BOXES = 500
"""Boxes a draft may be cut into, on average: a verdict that needs more is no function of thresholds."""

SPOT_ROUNDS, FEW_SPOTS = 20, 1024
"""How often points are drawn anew, boxes in which they still differ are left out; and how many at first."""

Verdicts = Callable[[np.ndarray], np.ndarray]
"""int64[N, n] ticks -> int[N, R], the verdict of each row."""

Judge = Callable[[np.ndarray], Verdicts]
"""int[N] drafts, N at most `LANES` -> their verdicts at any ticks."""


class Boxes(NamedTuple):
    draft: np.ndarray  # int[N], whose uniforms they are
    low: np.ndarray  # int64[N, n], least tick of each uniform
    high: np.ndarray  # int64[N, n], the tick beyond the largest


class Probed(NamedTuple):
    """Boxes whose lowest corner has the verdict int[N, R]. `goal` is a point that has another one; of a settled box,
    which has one verdict, it is the highest corner."""

    draft: np.ndarray
    low: np.ndarray
    high: np.ndarray
    verdict: np.ndarray
    goal: np.ndarray

    def volume(self, steps: int) -> np.ndarray:
        """float64[N]: the probability of each box, if a uniform has `steps` values."""
        return ((self.high - self.low) / steps).prod(axis=1)


def settle(
    judge: Judge, *, drafts: int, uniforms: int, steps: int, seed: int, inside: int = 1, most: int = MOST_BOXES,
    spots: int = 0,
) -> Probed:  # fmt: skip
    """The cube of uniforms of each draft, cut into boxes of one verdict.

    A box is settled when its lowest corner, its highest and points drawn inside have one verdict. Otherwise the way
    from the lowest corner to the point that differs, one uniform after the other, is bisected, and the box is cut
    there. Boxes beyond `most` a draft are left out if unsettled; so is a point whose verdict changes by itself.

    Args:
        judge: what to measure.
        drafts: how many drafts.
        uniforms: n, uniforms of a draft.
        steps: values of a uniform, the ticks 0 to `steps` - 1.
        seed: of the points inside.
        inside: points drawn inside a box.
        most: boxes a draft may be cut into, on average.
        spots: points drawn at the end over all drafts, one in each `spots`-th part of every uniform, and a quarter as
            many near the edges of boxes. If one has another verdict than its box, the box is cut there and points
            are drawn anew, until all have the verdict of their box.
    """
    rng, shape = np.random.default_rng([seed, 2]), (drafts, uniforms)
    whole = Boxes(np.arange(drafts), np.zeros(shape, np.int64), np.full(shape, steps))
    found = _settle(judge, whole, None, rng, inside, most * drafts)
    few, rounds = min(spots, FEW_SPOTS), SPOT_ROUNDS  # a few show a verdict without thresholds
    while few and found.draft.size:
        divided, rest = _surprises(judge, found, rng, steps, few)
        if divided.draft.size and not rounds:
            return rest
        if divided.draft.size:
            more = _settle(judge, _take(whole, slice(0)), divided, rng, inside, most * drafts)
            found, rounds = _join(rest, more), rounds - 1
        elif few == spots:
            break
        else:
            few = min(4 * few, spots)
    return found


def _take(several, index):
    return type(several)(*(a[index] for a in several))


def _join(*several):
    """Tuples of arrays, one behind the other."""
    return type(several[0])(*map(np.concatenate, zip(*several)))


def _settle(
    judge: Judge, boxes: Boxes, divided: Probed | None, rng: np.random.Generator, inside: int, most: int
) -> Probed:
    last, others = slice(-LANES, None), slice(None, -LANES)
    found, probed = [], 0
    while probed < most and (boxes.draft.size or divided):
        if boxes.draft.size:
            chunk, boxes = _take(boxes, last), _take(boxes, others)
            settled, more = _probe(judge, chunk, rng, inside)
            found.append(settled)
            divided = more if divided is None else _join(divided, more)
            probed += chunk.draft.size
        if divided is not None and (divided.draft.size >= LANES or not boxes.draft.size):
            boxes = _join(boxes, *_cut(judge, _take(divided, last)))
            divided = _take(divided, others) if divided.draft.size > LANES else None
    return _join(*found)


def _probe(judge: Judge, boxes: Boxes, rng: np.random.Generator, inside: int) -> tuple[Probed, Probed]:
    """The boxes that are settled, and the others."""
    verdicts = judge(boxes.draft)
    at_low, goal = verdicts(boxes.low), boxes.high - 1
    done = (verdicts(goal) == at_low).all(axis=1)
    for _ in range(inside):
        point = rng.integers(boxes.low, boxes.high)
        other = done & ~(verdicts(point) == at_low).all(axis=1)
        goal, done = np.where(other[:, None], point, goal), done & ~other
    probed = Probed(*boxes, at_low, goal)
    # No cut helps a point with two verdicts.
    return _take(probed, done), _take(probed, ~done & (goal != boxes.low).any(axis=1))


def _cut(judge: Judge, divided: Probed) -> tuple[Boxes, Boxes]:
    """Both parts of each box, cut at the end of the lowest corner's verdict on the way to the goal."""
    draft, low, high, at_low, goal = divided
    verdicts = judge(draft)
    width_Nn = goal - low
    before_Nn = width_Nn.cumsum(axis=1) - width_Nn

    def point(step_N):
        return low + np.clip(step_N[:, None] - before_Nn, 0, width_Nn)

    same_N, other_N = np.zeros(len(goal), np.int64), width_Nn.sum(axis=1)
    while (other_N - same_N > 1).any():
        middle_N = (same_N + other_N) // 2
        same = (verdicts(point(middle_N)) == at_low).all(axis=1) | (middle_N == same_N)
        same_N, other_N = np.where(same, middle_N, same_N), np.where(same, other_N, middle_N)
    edge_Nn = point(other_N)
    cut_Nn = edge_Nn != point(same_N)  # the one uniform that was raised last
    return Boxes(draft, low, np.where(cut_Nn, edge_Nn, high)), Boxes(draft, np.where(cut_Nn, edge_Nn, low), high)


def _surprises(judge: Judge, found: Probed, rng: np.random.Generator, steps: int, spots: int) -> tuple[Probed, Probed]:
    """Boxes in which a point has another verdict, with the point as their goal; and the other boxes."""

    def other(home, ticks):
        home, ticks = home[home >= 0], ticks[home >= 0]
        parts = (slice(i, i + LANES) for i in range(0, len(home), LANES))
        got = [judge(draft[home[part]])(ticks[part]) for part in parts]
        wrong = (np.concatenate(got) != found.verdict[home]).any(axis=1) if got else home < 0
        return home[wrong], ticks[wrong]

    draft, low, high = found[:3]
    n, known = low.shape[1], np.unique(draft)
    # one point in each of as many parts of every uniform
    part = rng.permuted(np.tile(np.arange(spots)[:, None], n), axis=0) + rng.random((spots, n))
    ticks = np.minimum((part * (steps / spots)).astype(np.int64), steps - 1)
    home = _home(found, rng.choice(known, spots), ticks)
    # at every scale from the edges of boxes, which are the verdict's own thresholds
    near = rng.integers(len(draft), size=spots // 4)
    width = high[near] - low[near]
    scale = np.exp(rng.random(width.shape) * np.log(width)).astype(np.int64) - 1
    at = np.stack([low[near] + scale, high[near] - 1 - scale, rng.integers(low[near], high[near])])
    at = np.take_along_axis(at, rng.integers(3, size=(1, *width.shape)), axis=0)[0]
    home, ticks = other(np.concatenate([home, near]), np.concatenate([ticks, at]))
    if home.size:  # other boxes may hide the same verdict at the same place
        place = [(low[:, j] <= ticks[0, j]) & (ticks[0, j] < high[:, j]) for j in range(n)]
        there = [np.where(np.arange(n) == j, ticks[0], low[boxes]) for j, boxes in enumerate(place)]
        more = other(np.concatenate([np.flatnonzero(boxes) for boxes in place]), np.concatenate(there))
        home, ticks = (np.concatenate(both) for both in zip((home, ticks), more))
    boxes, spot = np.unique(home, return_index=True)
    rest = np.delete(np.arange(len(draft)), boxes)
    return _take(found, boxes)._replace(goal=ticks[spot]), _take(found, rest)


def _home(boxes: Probed, draft_N: np.ndarray, ticks_Nn: np.ndarray) -> np.ndarray:
    """int[N]: which of the boxes each point of a draft lies in, -1 if it lies in none."""
    order = np.argsort(boxes.draft, kind="stable")
    low, high = boxes.low[order], boxes.high[order]
    first, end = (np.searchsorted(boxes.draft[order], draft_N, side) for side in ("left", "right"))
    home = np.full(len(draft_N), -1)
    for start in range(0, len(home), LANES):
        many = (end - first)[start : start + LANES]
        spot = np.repeat(np.arange(start, start + len(many)), many)
        box = np.arange(many.sum()) + np.repeat(first[start : start + LANES] - many.cumsum() + many, many)
        here = ((low[box] <= ticks_Nn[spot]) & (ticks_Nn[spot] < high[box])).all(axis=1)
        home[spot[here]] = order[box[here]]
    return home
