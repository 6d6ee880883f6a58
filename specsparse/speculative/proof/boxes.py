"""A function of uniforms, constant on boxes, whose edges are found by bisection.

A verdict is a function of n uniforms: a coin accepts below a threshold, a token is drawn between two. So the cube of
all uniforms falls into boxes of one verdict each, and the volume of a box is the probability of its verdict.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

LANES = 1024
"""Verdicts of one call, at most."""

MOST_BOXES = 500
"""Boxes a draft may be cut into, on average: a verdict that needs more is no function of thresholds."""

SPOT_ROUNDS = 50
"""How often points are drawn anew; boxes in which they still differ are left out."""

Verdicts = Callable[[np.ndarray], np.ndarray]
"""int64[N, n] ticks -> int[N, R], the verdict of each row."""

Judge = Callable[[np.ndarray], Verdicts]
"""int[N] drafts, N at most `LANES` -> their verdicts at any ticks."""


class Boxes(NamedTuple):
    """Boxes of uniforms.

    Attributes:
        draft: int[N], whose uniforms they are.
        low: int64[N, n], least tick of each uniform.
        high: int64[N, n], the tick beyond the largest.
    """

    draft: np.ndarray
    low: np.ndarray
    high: np.ndarray


class Divided(NamedTuple):
    """Boxes with more than one verdict: that of the lowest corner, one row each, and a point that has another."""

    boxes: Boxes
    at_low: np.ndarray
    goal: np.ndarray


class Settled(NamedTuple):
    """Boxes of one verdict each: the boxes, and the verdict int[N, R] of each."""

    boxes: Boxes
    verdict: np.ndarray

    def volume(self, steps: int) -> np.ndarray:
        """float64[N]: the probability of each box, where a uniform has `steps` values."""
        return ((self.boxes.high - self.boxes.low) / steps).prod(axis=1)


def settle(
    judge: Judge, *, drafts: int, uniforms: int, steps: int, seed: int, inside: int = 1, most: int = MOST_BOXES,
    spots: int = 0,
) -> Settled:  # fmt: skip
    """The cube of uniforms of each draft, cut into boxes of one verdict.

    A box is settled when its lowest corner, its highest and points drawn inside have one verdict. Otherwise the way
    from the lowest corner to the point that differs, one uniform after the other, is bisected, and the box is cut
    there. What is not settled after `most` boxes a draft is left out; so is a point whose verdict changes by itself.

    Args:
        judge: what to measure.
        drafts: how many drafts.
        uniforms: n, uniforms of a draft.
        steps: values of a uniform, the ticks 0 to `steps` - 1.
        seed: of the points inside.
        inside: points drawn inside a box.
        most: boxes a draft may be cut into, on average.
        spots: points drawn at the end over all drafts. Where one has another verdict than its box, the box is cut
            there and points are drawn anew, until all have the verdict of their box.
    """
    rng, shape = np.random.default_rng([seed, 2]), (drafts, uniforms)
    whole = Boxes(np.arange(drafts), np.zeros(shape, np.int64), np.full(shape, steps))
    found = _settle(judge, whole, None, rng, inside, most * drafts)
    for _ in range(SPOT_ROUNDS if spots else 0):
        divided, rest = _surprises(judge, found, rng, drafts, steps, spots)
        if not divided.goal.size:
            return found
        none = jax.tree.map(lambda a: a[:0], whole)
        found = _join(rest, _settle(judge, none, divided, rng, inside, most * drafts))
    return rest if spots else found


def _settle(
    judge: Judge, boxes: Boxes, divided: Divided | None, rng: np.random.Generator, inside: int, most: int
) -> Settled:
    found, probed = [], 0
    while probed < most and (boxes.draft.size or divided):
        if boxes.draft.size:
            chunk, boxes = _last(boxes)
            settled, more = _probe(judge, chunk, rng, inside)
            found.append(settled)
            divided = more if divided is None else _join(divided, more)
            probed += chunk.draft.size
        if divided.goal.shape[0] >= LANES or not boxes.draft.size:
            chunk, divided = _last(divided)
            boxes = _join(boxes, *_cut(judge, chunk))
            divided = divided if divided.goal.size else None
    return _join(*found)


def _surprises(
    judge: Judge, found: Settled, rng: np.random.Generator, drafts: int, steps: int, spots: int
) -> tuple[Divided, Settled]:
    """Boxes in which a random point has another verdict, with the point; and the other boxes."""
    draft, ticks = rng.integers(drafts, size=spots), rng.integers(steps, size=(spots, found.boxes.low.shape[1]))
    order = np.argsort(found.boxes.draft, kind="stable")
    first = np.searchsorted(found.boxes.draft[order], np.arange(drafts + 1))
    home = np.full(spots, -1)
    for spot, d in enumerate(draft):
        own = order[first[d] : first[d + 1]]
        here = ((found.boxes.low[own] <= ticks[spot]) & (ticks[spot] < found.boxes.high[own])).all(axis=1)
        home[spot] = own[here.argmax()] if here.any() else -1
    parts = range(0, spots, LANES)
    got = np.concatenate([judge(draft[i : i + LANES])(ticks[i : i + LANES]) for i in parts])
    other = np.flatnonzero((home >= 0) & (got != found.verdict[home]).any(axis=1))
    boxes, spot = np.unique(home[other], return_index=True)
    divided = Divided(jax.tree.map(lambda a: a[boxes], found.boxes), found.verdict[boxes], ticks[other[spot]])
    return divided, jax.tree.map(lambda a: np.delete(a, boxes, axis=0), found)


def _last(several):
    """The last `LANES` entries of a tuple of arrays, and the others."""
    return jax.tree.map(lambda a: a[-LANES:], several), jax.tree.map(lambda a: a[:-LANES], several)


def _join(*several):
    """Tuples of arrays, one behind the other."""
    return jax.tree.map(lambda *parts: np.concatenate(parts), *several)


def _probe(judge: Judge, boxes: Boxes, rng: np.random.Generator, inside: int) -> tuple[Settled, Divided]:
    """The boxes that are settled, and the others."""
    verdicts = judge(boxes.draft)
    at_low, goal = verdicts(boxes.low), boxes.high - 1
    done = (verdicts(goal) == at_low).all(axis=1)
    for _ in range(inside):
        point = rng.integers(boxes.low, boxes.high)
        other = done & ~(verdicts(point) == at_low).all(axis=1)
        goal, done = np.where(other[:, None], point, goal), done & ~other
    settled = Settled(jax.tree.map(lambda a: a[done], boxes), at_low[done])
    divided = ~done & (goal != boxes.low).any(axis=1)  # no cut helps a point with two verdicts
    return settled, jax.tree.map(lambda a: a[divided], Divided(boxes, at_low, goal))


def _cut(judge: Judge, divided: Divided) -> tuple[Boxes, Boxes]:
    """Both parts of each box, cut where the verdict of the lowest corner ends on the way to the goal."""
    boxes, at_low, goal = divided
    verdicts = judge(boxes.draft)
    width_Nn = goal - boxes.low
    before_Nn = width_Nn.cumsum(axis=1) - width_Nn

    def point(step_N):
        return boxes.low + np.clip(step_N[:, None] - before_Nn, 0, width_Nn)

    same_N, other_N = np.zeros(len(goal), np.int64), width_Nn.sum(axis=1)
    while (other_N - same_N > 1).any():
        middle_N = (same_N + other_N) // 2
        same = (verdicts(point(middle_N)) == at_low).all(axis=1) | (middle_N == same_N)
        same_N, other_N = np.where(same, middle_N, same_N), np.where(same, other_N, middle_N)
    edge_Nn = point(other_N)
    cut_Nn = edge_Nn != point(same_N)  # the one uniform that was raised last
    below = boxes._replace(high=np.where(cut_Nn, edge_Nn, boxes.high))
    return below, boxes._replace(low=np.where(cut_Nn, edge_Nn, boxes.low))
