"""Rules that answer a placement problem: the optimum, PowerInfer's, llama.cpp's, and no hot neurons.

**The optimum.** For a given number of hot neurons k of a layer the time depends on their mass m alone. Up to the mass
where both devices take equally long, more mass is less time, so the k hottest are best. A layer is thus a menu of
(bytes, seconds), one item for each allowed k, and the whole a multiple-choice knapsack, which a table over the budget
solves exactly. Beyond that balance colder neurons could serve a little better than the hottest; `bound_s` counts that
in: it is the linear relaxation over menus in which every mass up to that of the k hottest may be had, so that no choice
of neurons in multiples of the granularity is faster.
"""

import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np

from specsparse.errors import UserError
from specsparse.powerinfer.placement.problem import Placement, Problem, layer_bytes, layers_placed, neurons_placed

_CELLS = 1 << 18
"""Of the table over the budget; with more, sizes are rounded up to a coarser unit."""
_COUNTED = {2: 2.0, 3: 4.5}
"""Matrices of an FFN -> c where PowerInfer counts 4 neurons as c F elements (llama.cpp:3115), not as what they have."""


def optimal(problem: Problem) -> Placement:
    """The fastest placement within the budget: exact over the hottest neurons of each layer."""
    menus = [_menu(problem, i) for i in range(problem.layers)]
    counts = _knapsack(menus, problem.neuron_budget)
    hot = tuple(_hottest(problem, i, int(menus[i][0][k])) for i, k in enumerate(counts))
    rest = (sum(problem.dense_bytes) + problem.output_bytes) / problem.hardware.hot_bandwidth
    relaxed = [_menu(problem, i, relaxed=True) for i in range(problem.layers)]
    return neurons_placed("optimal", problem, hot, bound_s=rest + _relaxation(relaxed, problem.neuron_budget))


def powerinfer(problem: Problem) -> Placement:
    """PowerInfer's solver: buckets of neurons, those with the largest sum of frequencies first, whatever the layer.

    Its capacity formula stands, but is never more than fits; its mix-up of layers with more than ten is left out.
    """
    size, d_ff = max(problem.neuron_bytes), max(len(p) for p in problem.read)
    element = size / (problem.matrices * problem.width)
    capacity = int(problem.neuron_budget / (d_ff * element * _COUNTED[problem.matrices])) * 4
    capacity = min(capacity, problem.neuron_budget // size)
    buckets = []
    for i in range(problem.layers):
        ranked, counts = problem.read[i][problem.order(i)], problem.counts(i)
        for first, last in pairwise(counts):
            buckets.append((-float(ranked[first:last].sum()), i, int(last - first)))
    taken = [0] * problem.layers
    for _, i, count in sorted(buckets)[: capacity // problem.granularity]:
        taken[i] += count
    return neurons_placed("powerinfer", problem, tuple(_hottest(problem, i, k) for i, k in enumerate(taken)))


def layers(problem: Problem, *, n_gpu_layers: int | None = None) -> Placement:
    """llama.cpp's offload of the last layers, and of the output with one more; None is as many as fit.

    Raises:
        UserError: fewer than 0 layers, or more than the budget holds.
    """
    most = _layers_that_fit(problem)
    if n_gpu_layers is None:
        n_gpu_layers = most
    if n_gpu_layers < 0:
        raise UserError(f"n_gpu_layers={n_gpu_layers} must be at least 0")
    if min(n_gpu_layers, problem.layers + 1) > most:
        raise UserError(f"n_gpu_layers={n_gpu_layers}: {most} fit the budget; give that many or a larger vram_budget")
    return layers_placed(problem, min(n_gpu_layers, problem.layers), output=n_gpu_layers > problem.layers)


def none(problem: Problem) -> Placement:
    """No hot neurons; the dense parts stay on the accelerator (PowerInfer's --disable-gpu-index)."""
    return neurons_placed("none", problem, tuple(np.zeros(len(p), bool) for p in problem.read))


RULES: dict[str, Callable[..., Placement]] = {
    "optimal": optimal,
    "powerinfer": powerinfer,
    "layers": layers,
    "none": none,
}
"""Rules by name."""


def _hottest(problem: Problem, layer: int, count: int) -> np.ndarray:
    mask = np.zeros(len(problem.read[layer]), bool)
    mask[problem.order(layer)[:count]] = True
    return mask


def _menu(problem: Problem, layer: int, *, relaxed: bool = False) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(counts, bytes, seconds) of every allowed number of hot neurons; `relaxed` may leave mass away."""
    counts = problem.counts(layer)
    mass = np.concatenate([[0.0], np.cumsum(problem.read[layer][problem.order(layer)])])[counts]
    if relaxed and not problem.dense_hot:
        seconds = _best_mass(problem, layer, counts, mass)
    else:
        seconds = problem.ffn_seconds(layer, counts, mass)
    return counts, counts * problem.neuron_bytes[layer], np.asarray(seconds)


def _best_mass(problem: Problem, layer: int, counts: np.ndarray, mass: np.ndarray) -> np.ndarray:
    """Seconds at the best mass up to `mass`: at the ends, or where both devices take equally long."""
    at_none = problem.ffn_seconds(layer, counts, np.zeros_like(mass))
    at_all = problem.ffn_seconds(layer, counts, mass)
    hot, cold = problem.part_seconds(layer, counts, np.zeros_like(mass))
    h, size = problem.hardware, problem.neuron_bytes[layer]
    level = (cold - hot) / (size / h.hot_bandwidth + size / h.cold_bandwidth)
    balanced = problem.ffn_seconds(layer, counts, np.clip(level, 0.0, mass))
    best = np.minimum(np.minimum(at_none, at_all), balanced)
    return np.where(counts < len(problem.read[layer]), best, at_all)  # all neurons have all the mass


def _knapsack(menus, budget: int) -> list[int]:
    """An item of each menu, of least time in all among those that fit."""
    unit = math.gcd(*(int(size) for _, sizes, _ in menus for size in sizes)) or 1
    budget = min(budget, sum(int(sizes[-1]) for _, sizes, _ in menus))
    unit = max(unit, -(-budget // _CELLS))
    cells = budget // unit
    best, chosen = np.zeros(cells + 1), []
    for _, sizes, seconds in menus:
        weights = -(-sizes // unit)
        new = np.full(cells + 1, np.inf)
        choice = np.zeros(cells + 1, np.int32)
        for k, (weight, cost) in enumerate(zip(weights, seconds, strict=True)):
            if weight > cells:
                break
            candidate = best[: cells + 1 - weight] + cost
            better = candidate < new[weight:]
            new[weight:][better] = candidate[better]
            choice[weight:][better] = k
        best = new
        chosen.append((weights, choice))
    out, left = [], cells
    for weights, choice in reversed(chosen):
        out.append(int(choice[left]))
        left -= int(weights[out[-1]])
    return out[::-1]


def _relaxation(menus, budget: int) -> float:
    """The least time where fractions of items may be mixed: along each menu's lower hull, the steepest piece first."""
    total, pieces = 0.0, []
    for _, sizes, seconds in menus:
        hull = [(int(sizes[0]), float(seconds[0]))]
        for point in zip(sizes[1:].tolist(), seconds[1:].tolist()):
            while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], point):
                hull.pop()
            hull.append(point)
        total += hull[0][1]
        pieces += [(_slope(a, b), b[0] - a[0]) for a, b in pairwise(hull) if b[1] < a[1]]
    for slope, size in sorted(pieces):
        part = min(size, budget)
        total, budget = total + slope * part, budget - part
    return total


def _slope(a: tuple[int, float], b: tuple[int, float]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0])


def _layers_that_fit(problem: Problem) -> int:
    """Layers from the last on, and one more for the output after all of them."""
    left = problem.budget
    for count, i in enumerate(reversed(range(problem.layers))):
        left -= layer_bytes(problem, i)
        if left < 0:
            return count
    return problem.layers + (left >= problem.output_bytes)
