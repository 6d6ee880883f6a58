"""From repeated timings to times, and from times to slopes: medians and least squares, no measuring."""

from collections.abc import Mapping, Sequence

import numpy as np

from specsparse.runtime.times.kept import DraftCost


def polish(seconds: Mapping[str, Sequence[float]]) -> tuple[dict[str, float], dict[str, float]]:
    """Time of each thing at the repeats' median speed, and its relative deviation: log t = thing + repeat, by medians.

    A machine whose speed changes between repeats (a neighbour, its clock) slows all things of a repeat alike.
    """
    logs = np.log(np.asarray(list(seconds.values())))  # [things, repeats]
    thing, repeat = np.zeros(logs.shape[0]), np.zeros(logs.shape[1])
    for _ in range(10):
        thing += np.median(logs - thing[:, None] - repeat[None], axis=1)
        repeat += np.median(logs - thing[:, None] - repeat[None], axis=0)
    rest = logs - thing[:, None] - repeat[None]
    level = np.median(repeat)
    times = dict(zip(seconds, np.exp(thing + level).tolist(), strict=True))
    return times, dict(zip(seconds, np.sqrt((rest**2).mean(axis=1)).tolist(), strict=True))


def rising(values: Sequence[float]) -> list[float]:
    """The non-decreasing values nearest to these (isotonic regression): more rows never take less time."""
    pools: list[tuple[float, int]] = []
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, i), (b, j) = pools[-2:]
            pools[-2:] = [((a * i + b * j) / (i + j), i + j)]
    return [mean for mean, count in pools for _ in range(count)]


def fit_kv(
    ns: tuple[int, ...], near: list[float], far: list[float], distance: float
) -> tuple[float, float, list[float]]:
    """Fits far(n) - near(n) = distance (a + b n) by least squares, a and b at least 0.

    Args:
        ns: rows.
        near, far: seconds of a forward of n rows at two cache lengths.
        distance: tokens between the two that are read; 0 where a window is shorter than both.

    Returns:
        a, b in seconds a token (and row), and the fit's error at each n relative to far(n).
    """
    rows = np.asarray(ns, np.float64)
    if not distance:
        return 0.0, 0.0, [n / f - 1 for n, f in zip(near, far, strict=True)]
    more = (np.asarray(far) - np.asarray(near)) / distance
    design = np.stack([np.ones_like(rows), rows], axis=1)
    scale = 1 / np.asarray(far)  # relative errors count
    (a, b), *_ = np.linalg.lstsq(design * scale[:, None], more * scale, rcond=None)
    if b < 0:
        a, b = float(np.average(more, weights=scale**2)), 0.0
    elif a < 0:
        a, b = 0.0, float((more * rows * scale**2).sum() / (rows**2 * scale**2).sum())
    a, b = max(float(a), 0.0), max(float(b), 0.0)
    found = np.asarray(near) + distance * (a + b * rows)
    return a, b, ((found - np.asarray(far)) / np.asarray(far)).tolist()


def overhead(gammas: tuple[int, int], more: list[float]) -> tuple[float, float]:
    """Seconds a round and a token of room, from what rounds of two lengths add; neither below 0."""
    (g0, g1), (m0, m1) = gammas, more
    slope = max((m1 - m0) / (g1 - g0), 0.0) if g1 > g0 else 0.0
    fixed = (m0 + m1) / 2 - slope * (g0 + g1) / 2
    if fixed < 0:  # all of it by the token
        fixed, slope = 0.0, (m0 + m1) / (g0 + g1)
    return fixed, max(slope, 0.0)


def draft_line(points: list[tuple[float, float]]) -> DraftCost:
    """token_s and fixed_s from (tokens, seconds) of one or two lengths, neither below 0."""
    if not points:
        return DraftCost()
    (m0, t0), (m1, t1) = points[0], points[-1]
    if m1 - m0 < 0.5:
        return DraftCost(0.0, sum(t for _, t in points) / len(points))
    slope = min(max((t1 - t0) / (m1 - m0), 0.0), t1 / m1)
    return DraftCost(slope, max(t1 - slope * m1, 0.0))
