"""Draft-length policies by name, with the option names of llama.cpp, vLLM and Hugging Face. Imports no jax."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from specsparse.speculative.base import SHORT_GAMMA
from specsparse.support.options import values_of
from specsparse.support.registry import Registry

if TYPE_CHECKING:
    from specsparse.speculative.policies.base import Policy

POLICIES: "Registry[Policy]" = Registry(
    "policy",
    "specsparse.speculative.policies.base:Policy",
    "specsparse.speculative.policies",
    {
        "fixed": "base:Fixed",
        "n_min": "base:NMin",
        "p_min": "base:PMin",
        "confidence": "base:Confidence",
        "entropy": "base:Entropy",
        "heuristic": "base:Heuristic",
        "cost": "cost:CostOptimal",
        "auto_off": "cost:AutoOff",
    },
    aliases={
        "constant": "fixed",
        "hf_heuristic": "heuristic",
        "hf_confidence": "confidence",
        "cost_optimal": "cost",
        "auto-off": "auto_off",
    },
)


def get_policy(name: str, **options: object) -> "Policy":
    """The policy of that name or `module:Class`, with its options under their own or other projects' names.

    None is an option that was not given. UserError: unknown name or option (with the nearest valid one), a value out of
    range, or times that are needed and were not given."""
    policy = POLICIES.make(name, {key: value for key, value in options.items() if value is not None})
    policy.check_times()
    return policy


def over_tree(name: str, options: Mapping[str, object], nodes: int) -> dict[str, Any]:
    """Options of a policy for drafts that are trees of so many nodes, which are no draft lengths."""
    return values_of(POLICIES.make(name, options).over_tree(nodes))


def default_policy(times: Mapping[str, object], *, gamma: int = SHORT_GAMMA, tree: bool = False) -> "Policy":
    """What nobody chose: short drafts of the length that pays best, and none where none pays; a tree whole or not.

    Args:
        times: `v`, `c`, `c0`, `kv`, `kv_row` and `kv_draft` of the cost model.
        gamma: most tokens, or the nodes of the tree.
        tree: whether drafts are trees.
    """
    options = {"gamma": gamma, **times}
    return get_policy("auto_off", **(over_tree("auto_off", options, gamma) if tree else options))
