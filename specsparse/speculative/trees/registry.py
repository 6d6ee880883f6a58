"""Trees by name; jax is imported when one is made."""

from typing import TYPE_CHECKING

from specsparse.errors import UserError
from specsparse.speculative.trees import options as own
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
        CHAIN: ("options:ChainOptions", own.ChainOptions),
        "static": ("static:templated", own.StaticOptions),
        "sampled_iid": ("static:sampled_iid", own.TemplateOptions),
        "sampled_wor": ("static:sampled_wor", own.TemplateOptions),
        "p_split": ("p_split:PSplit", own.PSplitOptions),
        "dynamic": ("dynamic:DynamicTree", own.DynamicOptions),
        "ddtree": ("ddtree:DDTree", own.DDTreeOptions),
        "sequoia": ("sequoia:sequoia_tree", own.SequoiaOptions),
    },
)


def get_tree(name: str, **options: object) -> "TreeShape | None":
    """The tree of that name or `module:Class`; None for `chain`.

    Raises:
        UserError: unknown name or option (with the nearest valid one), a value out of range, or too many nodes.
    """
    if name == CHAIN:
        TREES.read(name, options)
        return None
    tree = TREES.make(name, options)
    if tree.max_nodes > own.MAX_NODES:
        raise UserError(f"tree={name} has {tree.max_nodes} nodes; at most {own.MAX_NODES} are verified at once")
    return tree
