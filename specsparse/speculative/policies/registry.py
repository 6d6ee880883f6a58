"""Draft-length policies by name, with the option names of llama.cpp, vLLM and Hugging Face. Imports no jax."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from specsparse.speculative.gamma import SHORT_GAMMA
from specsparse.speculative.policies.options import (
    DEFAULT_GAMMA,
    AutoOffOptions,
    ConfidenceOptions,
    CostOptimalOptions,
    EntropyOptions,
    FixedOptions,
    HeuristicOptions,
    NMinOptions,
    PMinOptions,
    PolicyOptions,
)
from specsparse.support.registry import Registry

if TYPE_CHECKING:
    from specsparse.speculative.policies.base import Policy

POLICIES: "Registry[Policy]" = Registry(
    "policy",
    "specsparse.speculative.policies.base:Policy",
    "specsparse.speculative.policies",
    {
        "fixed": ("base:Fixed", FixedOptions),
        "n_min": ("base:Fixed", NMinOptions),
        "p_min": ("base:PMin", PMinOptions),
        "confidence": ("base:Confidence", ConfidenceOptions),
        "entropy": ("base:Entropy", EntropyOptions),
        "heuristic": ("base:Heuristic.starting", HeuristicOptions),
        "cost": ("cost:cost_optimal", CostOptimalOptions),
        "auto_off": ("cost:auto_off", AutoOffOptions),
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

    None is an option that was not given.

    Raises:
        UserError: unknown name or option (with the nearest valid one), or a value out of range.
    """
    given = {key: value for key, value in options.items() if value is not None}
    return POLICIES.make(name, given if POLICIES.is_builtin(name) else {"gamma": DEFAULT_GAMMA, **given})


def over_tree(name: str, options: Mapping[str, object], nodes: int) -> dict[str, object]:
    """Options of a policy for drafts that are trees of so many nodes, which are no draft lengths.

    Raises:
        UserError: as `get_policy`.
    """
    chains = POLICIES.read(name, options)
    return vars(chains.over_tree(nodes)) if isinstance(chains, PolicyOptions) else dict(options)


def default_policy(times: Mapping[str, object], *, gamma: int = SHORT_GAMMA, tree: bool = False) -> "Policy":
    """What nobody chose: short drafts of the length that pays best, and none where none pays; a tree whole or not.

    Args:
        times: `v`, `c` and `c0` of the cost model.
        gamma: most tokens, or the nodes of the tree.
        tree: whether drafts are trees.
    """
    options = {"gamma": gamma, **times}
    return get_policy("auto_off", **(over_tree("auto_off", options, gamma) if tree else options))
