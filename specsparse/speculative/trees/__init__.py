"""Shapes of draft trees by name; importing this costs no jax."""

from typing import TYPE_CHECKING

from specsparse.errors import UserError
from specsparse.speculative.base import MAX_NODES
from specsparse.support.registry import Registry

if TYPE_CHECKING:
    from specsparse.speculative.trees.base import TreeShape

CHAIN = "chain"
"""The name that stands for no tree."""

TREES: "Registry[TreeShape]" = Registry(
    "tree",
    "specsparse.speculative.trees.base:TreeShape",
    "specsparse.speculative.trees",
    {
        "static": "static:Static",
        "sampled_iid": "static:SampledIid",
        "sampled_wor": "static:SampledWor",
        "p_split": "dynamic:PSplit",
        "dynamic": "dynamic:DynamicTree",
        "ddtree": "dynamic:DDTree",
        "sequoia": "static:Sequoia",
    },
)


def get_tree(name: str, **options: object) -> "TreeShape | None":
    """The tree of that name or `module:Class`; None for `chain`. UserError: unknown name or option (with the nearest
    valid one), a value out of range, or too many nodes."""
    if name == CHAIN:
        if options:
            raise UserError(f"tree.{next(iter(options))} is no option of tree={CHAIN}")
        return None
    tree = TREES.make(name, options)
    if tree.max_nodes > MAX_NODES:
        raise UserError(f"tree={name} has {tree.max_nodes} nodes; at most {MAX_NODES} are verified at once")
    return tree
