"""Trees by name."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from specsparse.errors import UserError
from specsparse.speculative.base import DraftKind
from specsparse.speculative.options import Factory, Option, nearest
from specsparse.speculative.tree import TreeTemplate
from specsparse.speculative.trees.base import TreeShape
from specsparse.speculative.trees.dynamic import DynamicTree
from specsparse.speculative.trees.p_split import PSplit
from specsparse.speculative.trees.sequoia import sequoia
from specsparse.speculative.trees.static import StaticTree
from specsparse.support.registry import Registry

CHAIN = "chain"
"""The name that stands for no tree."""
MAX_NODES = 64
"""Most nodes of a tree: what one verifying forward may hold."""

_DRAWS = {"top": DraftKind.ONE_HOT, "iid": DraftKind.IID, "wor": DraftKind.WOR}


def _numbers(name: str, value: Any, kind: type) -> tuple:
    try:
        return tuple(kind(item) for item in value)
    except (TypeError, ValueError) as error:
        raise UserError(f"tree.{name}={value!r} must be a list of numbers") from error


def _static(widths: Any = None, paths: Any = None, draw: str = "top") -> StaticTree:
    if widths is not None and paths is not None:
        raise UserError("tree.widths and tree.paths are two ways to say it: give one of them")
    if paths is not None:
        if isinstance(paths, str) or not isinstance(paths, Iterable):
            raise UserError(f"tree.paths={paths!r} must be a list of paths, such as [[0,0],[1]]")
        template = TreeTemplate.from_paths(_numbers("paths", path, int) for path in paths)
    else:
        template = TreeTemplate.kary(_numbers("widths", (3, 2, 1) if widths is None else widths, int))
    return StaticTree(template, _DRAWS[draw])


def static_tree(template: TreeTemplate, draw: str) -> StaticTree:
    """A template with its way of drawing by name: top, iid or wor."""
    return StaticTree(template, _DRAWS[draw])


def _sequoia(
    acceptance: Any = (0.6, 0.15, 0.07, 0.03),
    cost: Any = None,
    nodes: int = 15,
    depth: int = 6,
    level_cost: float = 0.0,
    draw: str = "top",
) -> StaticTree:
    """Without a measured `cost` every node counts the same: 1 + n / 16 for n nodes."""
    times: Sequence[float] = [1 + n / 16 for n in range(nodes + 1)] if cost is None else _numbers("cost", cost, float)
    rates = _numbers("acceptance", acceptance, float)
    return StaticTree(sequoia(rates, times, nodes, depth, level_cost=level_cost), _DRAWS[draw])


_NODES = Option(high=MAX_NODES)
_DEPTH = Option(high=MAX_NODES)
_DRAW = Option(str, choices=tuple(_DRAWS))
_TEMPLATE: Mapping[str, Option | None] = {"widths": None, "paths": None}

TREES: dict[str, Factory] = {
    "static": Factory(_static, {**_TEMPLATE, "draw": _DRAW}),
    "sampled_iid": Factory(lambda **o: _static(draw="iid", **o), _TEMPLATE),
    "sampled_wor": Factory(lambda **o: _static(draw="wor", **o), _TEMPLATE),
    "p_split": Factory(
        PSplit,
        {
            "nodes": Option(high=MAX_NODES, aliases=("draft_max",)),
            "depth": _DEPTH,
            "n_parallel": Option(high=MAX_NODES),
            "p_split": Option(float, 0, 1, aliases=("draft_p_split",)),
            "p_min": Option(float, 0, 1, aliases=("draft_p_min",)),
        },
    ),
    "dynamic": Factory(
        DynamicTree,
        {"total": Option(high=MAX_NODES, aliases=("nodes",)), "depth": _DEPTH, "top_k": Option(high=32)},
    ),
    "sequoia": Factory(
        _sequoia,
        {
            "acceptance": None,
            "cost": None,
            "nodes": _NODES,
            "depth": _DEPTH,
            "level_cost": Option(float, 0, 1e6),
            "draw": _DRAW,
        },
    ),
}
"""Factories by name."""


OUTSIDE: Registry[TreeShape] = Registry("tree", "specsparse.speculative.trees.base:TreeShape")
"""Trees of other packages, and anybody's as `module:Class`."""


def get_tree(name: str, **options: Any) -> TreeShape | None:
    """The tree of that name or `module:Class`; None for `chain`.

    Raises:
        UserError: unknown name or option (with the nearest valid one), a value out of range, or too many nodes.
    """
    if name == CHAIN:
        if given := [key for key, value in options.items() if value is not None]:
            raise UserError(f"tree.{given[0]} is no option of chain; its length is policy.gamma")
        return None
    if name not in TREES and not OUTSIDE.holds(name):
        raise UserError(f"tree={name} is unknown; {nearest(str(name), [CHAIN, *TREES, *OUTSIDE.names()])}")
    tree = TREES[name].make("tree", name, options) if name in TREES else OUTSIDE.make(name, options)
    if tree.max_nodes > MAX_NODES:
        raise UserError(f"tree={name} has {tree.max_nodes} nodes; at most {MAX_NODES} are verified at once")
    return tree
