"""Shapes of draft trees: `registry.get_tree` makes one by name; importing this costs no jax."""

from specsparse.speculative.trees.registry import get_tree

__all__ = ["get_tree"]
