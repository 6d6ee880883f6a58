"""Shapes of draft trees: `get_tree` makes one by name."""

from specsparse.speculative.trees.base import TreeShape
from specsparse.speculative.trees.dynamic import DynamicTree
from specsparse.speculative.trees.p_split import PSplit
from specsparse.speculative.trees.registry import get_tree, static_tree
from specsparse.speculative.trees.sequoia import sequoia
from specsparse.speculative.trees.static import StaticTree

__all__ = ["DynamicTree", "PSplit", "StaticTree", "TreeShape", "get_tree", "sequoia", "static_tree"]
