"""The contract of a draft tree's shape, for anybody's own: `check_tree(MyTree())` is one line in a test."""

from specsparse.speculative.base import DraftKind
from specsparse.speculative.drafters import get_drafter
from specsparse.speculative.trees.base import TreeShape
from specsparse.speculative.trees.options import MAX_NODES
from specsparse.testing.contract import check_drafter


def check_tree(shape: TreeShape) -> None:
    """Refuses a shape that breaks the contract of `trees.base`; a tiny random model drafts trees of it.

    Raises:
        AssertionError: says what is broken.
    """
    assert hash(shape) == hash(shape), "its hash changes"
    assert isinstance(shape.kind, DraftKind), f"kind is {shape.kind!r}, not a DraftKind"
    depth, nodes = shape.max_depth, shape.max_nodes
    assert 1 <= depth <= nodes <= MAX_NODES, f"max_depth {depth}, max_nodes {nodes}: at most {MAX_NODES} nodes"
    assert shape.max_rows >= 1, f"max_rows {shape.max_rows}"
    assert shape.branches or depth == nodes, f"without branches it is a chain, of {nodes} nodes and not {depth} levels"
    check_drafter(get_drafter("layer_skip", tree=shape, temperature=0.0 if shape.kind is DraftKind.ONE_HOT else 0.8))
