"""Sequoia's dynamic programme: the tree that yields the most tokens a second, from measured acceptance and time."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specsparse.errors import UserError
from specsparse.speculative.tree import TreeTemplate
from specsparse.speculative.trees.static import StaticTree, static_tree

GUESSED_ACCEPTANCE = (0.6, 0.15, 0.07, 0.03)
"""By rank, where nothing was measured."""


class _Tables(NamedTuple):
    """gain[d, r, n]: most tokens that n nodes give as children of rank r and up (and their subtrees) of one node, with
    paths of at most d; first[d, r, n]: nodes of the subtree of child r in that optimum, 0 for no child."""

    gain: np.ndarray
    first: np.ndarray


def sequoia(
    acceptance_by_rank: Sequence[float],
    cost_of_n: Sequence[float],
    max_nodes: int,
    max_depth: int,
    *,
    level_cost: float = 0.0,
) -> TreeTemplate:
    """The tree of the highest predicted speed (Chen et al., Sequoia, arXiv:2402.12374, section 3.1 and 3.3).

    A tree T is expected to yield 1 + sum over its nodes of the product of acceptances on the node's path; it takes
    cost_of_n[size] + level_cost * depth. Unlike the paper's, the cost is measured and may have steps.

    Args:
        acceptance_by_rank: chance that the child of rank r is the one accepted at a node.
        cost_of_n: time of a round that verifies n nodes, n = 0 .. max_nodes, in any unit (a table of v(n + 1)).
        max_nodes: at least 1.
        max_depth: at least 1.
        level_cost: time of drafting one level, same unit.

    Returns:
        The tree, nodes level by level; at least one node, since no draft at all is a policy's business.

    Raises:
        UserError: an argument out of range.
    """
    rates, cost = np.asarray(acceptance_by_rank, np.float64), np.asarray(cost_of_n, np.float64)
    if rates.ndim != 1 or rates.size == 0 or (rates < 0).any() or rates.sum() > 1 + 1e-9:
        raise UserError("tree.acceptance must hold the chance of each rank: at least 0, in all at most 1")
    if max_nodes < 1 or max_depth < 1 or cost.ndim != 1 or cost.size <= max_nodes or not (cost > 0).all():
        raise UserError(f"tree.cost must hold times above 0 for 0..{max_nodes} nodes, and depth be at least 1")
    tables = _solve(rates, max_nodes, min(max_depth, max_nodes))
    depths, sizes = range(1, tables.gain.shape[0]), range(1, max_nodes + 1)
    _, depth, size = max(
        ((1 + tables.gain[d, 0, n]) / (cost[n] + level_cost * d), -d, -n) for d in depths for n in sizes
    )
    return TreeTemplate.from_paths(_paths(tables, -depth, 0, -size))


def sequoia_tree(
    acceptance: Sequence[float] | None,
    cost: Sequence[float] | None,
    level_cost: float | None,
    nodes: int,
    depth: int,
    draw: str,
) -> StaticTree:
    """From options; without measured ones a guess of the acceptance, every node costs the same, and levels nothing."""
    rates = GUESSED_ACCEPTANCE if acceptance is None else acceptance
    times = [1 + n / 16 for n in range(nodes + 1)] if cost is None else cost
    return static_tree(sequoia(rates, times, nodes, depth, level_cost=level_cost or 0.0), draw)


def expected_tokens(template: TreeTemplate, acceptance_by_rank: Sequence[float]) -> float:
    """Mean acceptance length of a tree, bonus token included, if each rank is accepted as often at every node."""
    chance = [0.0] * template.size
    for node, (parent, rank) in enumerate(zip(template.parents, template.ranks)):
        rate = acceptance_by_rank[rank] if rank < len(acceptance_by_rank) else 0.0
        chance[node] = rate * (1.0 if parent < 0 else chance[parent])
    return 1.0 + sum(chance)


def _solve(rates: np.ndarray, nodes: int, depth: int) -> _Tables:
    ranks = len(rates)
    gain = np.zeros((depth + 1, ranks + 1, nodes + 1))
    first = np.zeros((depth + 1, ranks + 1, nodes + 1), np.int64)
    for d in range(1, depth + 1):
        for r in reversed(range(ranks)):
            for n in range(1, nodes + 1):
                m = np.arange(1, n + 1)  # nodes of this child's subtree, itself among them
                worth = rates[r] * (1 + gain[d - 1, 0, m - 1]) + gain[d, r + 1, n - m]
                best = int(np.argmax(worth))
                gain[d, r, n], first[d, r, n] = worth[best], m[best]
    return _Tables(gain, first)


def _paths(tables: _Tables, d: int, r: int, n: int, path: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    """Paths of ranks of the optimum's nodes below one node."""
    if d == 0 or n == 0 or tables.first[d, r, n] == 0:
        return []
    m = int(tables.first[d, r, n])
    here = (*path, r)
    return [here, *_paths(tables, d - 1, 0, m - 1, here), *_paths(tables, d, r + 1, n - m, path)]
