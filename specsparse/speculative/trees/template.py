"""Trees of one shape, without tokens. Importing this costs no jax."""

import dataclasses
import functools
import heapq
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from specsparse.errors import UserError, refuse
from specsparse.speculative.base import MOST_ROOM, ROOT

if TYPE_CHECKING:
    import jax


@dataclasses.dataclass(frozen=True)
class TreeTemplate:
    """A fixed tree of draft nodes, without its root. Frozen and hashable: static in the jit."""

    # node index of each node's parent, `ROOT` for the children of the root; a parent precedes its children, and
    # siblings stand in draw order
    parents: tuple[int, ...]

    def __post_init__(self):
        assert all(ROOT <= parent < node for node, parent in enumerate(self.parents)), self.parents

    @classmethod
    def chain(cls, gamma: int) -> "TreeTemplate":
        return cls(tuple(range(-1, gamma - 1)))

    @classmethod
    def kary(cls, widths: Sequence[int]) -> "TreeTemplate":
        """Every node of depth d has `widths[d]` children; level by level."""
        parents: list[int] = []
        level = [ROOT]
        for width in widths:
            start, nodes = len(parents), len(level) * width
            refuse({
                f"tree width {width} must be at least 1": width < 1,
                f"tree widths {list(widths)} are more than {MOST_ROOM} nodes on a level": nodes > MOST_ROOM,
            })  # fmt: skip
            parents += [node for node in level for _ in range(width)]
            level = list(range(start, len(parents)))
        return cls(tuple(parents))

    @classmethod
    def from_paths(cls, paths: Iterable[Sequence[int]]) -> "TreeTemplate":
        """The tree of paths of sibling ranks, Medusa's notation: (0, 1) is the second child of the root's first child.

        Missing prefixes and elder siblings are added, since a child of rank r is drawn after r others.
        """
        wanted: set[tuple[int, ...]] = set()
        for path in paths:
            for depth, rank in enumerate(path):
                if rank < 0:
                    raise UserError(f"tree path {tuple(path)} has a negative rank")
                wanted |= {(*path[:depth], elder) for elder in range(rank + 1)}
        order = sorted(wanted, key=lambda path: (len(path), path))
        index = {path: node for node, path in enumerate(order)}
        return cls(tuple(index.get(path[:-1], ROOT) for path in order))

    @classmethod
    def best_first(cls, chances: Sequence[float], size: int) -> "TreeTemplate":
        """The `size` nodes that are likeliest to be accepted, the likeliest first, if the child of rank r is accepted
        with `chances[r]`, which fall and lie between 0 and 1, wherever its parent is."""
        paths: list[tuple[int, ...]] = []
        waiting: list[tuple[float, tuple[int, ...]]] = [(-chances[0], (0,))]
        while len(paths) < size:
            _, path = heapq.heappop(waiting)
            paths.append(path)
            for more in (*path, 0), (*path[:-1], path[-1] + 1):  # its first child, its next sibling
                if more[-1] < len(chances):
                    heapq.heappush(waiting, (-math.prod(chances[rank] for rank in more), more))
        index = {path: node for node, path in enumerate(paths)}
        return cls(tuple(index.get(path[:-1], ROOT) for path in paths))

    @property
    def size(self) -> int:
        return len(self.parents)

    @functools.cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node; children of the root have depth 1."""
        found: list[int] = []
        for parent in self.parents:
            found.append(1 if parent == ROOT else found[parent] + 1)
        return tuple(found)

    @property
    def max_depth(self) -> int:
        """Longest path, 0 for the empty tree."""
        return max(self.depths, default=0)

    @functools.cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Children of each row in draw order: entry 0 the root's, entry 1+i node i's."""
        return tuple(
            tuple(node for node, parent in enumerate(self.parents) if parent == row - 1) for row in range(self.size + 1)
        )

    @property
    def width(self) -> int:
        """Most children of any node; 1 for a chain."""
        return max(map(len, self.children))

    @functools.cached_property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self.children[parent + 1].index(node) for node, parent in enumerate(self.parents))

    def path(self, node: int) -> tuple[int, ...]:
        """Nodes from the root's child down to `node`; empty for `ROOT`."""
        return () if node == ROOT else (*self.path(self.parents[node]), node)

    def parents_array(self, batch: int) -> "jax.Array":
        import jax.numpy as jnp

        return jnp.tile(jnp.array(self.parents, jnp.int32)[None], (batch, 1))
