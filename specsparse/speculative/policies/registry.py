"""Draft-length policies by name, with the option names of llama.cpp, vLLM and Hugging Face."""

from collections.abc import Callable, Mapping
from typing import Any

from specsparse.errors import UserError
from specsparse.speculative.gamma import SHORT_GAMMA
from specsparse.speculative.options import Factory, Option, gamma_option, nearest
from specsparse.speculative.policies.base import Confidence, Entropy, Fixed, Heuristic, PMin, Policy
from specsparse.speculative.policies.cost import AutoOff, CostModel, CostOptimal
from specsparse.support.registry import Registry

DEFAULT_GAMMA = 7
"""8 positions a forward pass."""

_COST = ("v", "c", "c0", "prior", "weight", "memory")


def _heuristic(gamma: int = 16, start: int | None = None) -> Heuristic:
    return Heuristic(gamma, min(5, gamma) if start is None else start)


def _cost(cls: Callable[..., Policy], gamma: int, options: dict[str, Any]) -> Policy:
    """A policy with its cost model's options beside its own."""
    if options.get("v") is None:
        raise UserError("policy.v is needed: measured times v(1)..v(gamma+1) of a forward of n positions, v(1) = 1")
    try:
        options["v"] = tuple(float(t) for t in options["v"])
    except (TypeError, ValueError) as error:
        raise UserError(f"policy.v={options['v']!r} must be a list of numbers") from error
    cost = CostModel(**{key: options.pop(key) for key in _COST if key in options})
    return cls(gamma, cost=cost, **options)


def _optimal(gamma: int = DEFAULT_GAMMA, **options: Any) -> Policy:
    return _cost(CostOptimal, gamma, options)


def _auto_off(gamma: int = SHORT_GAMMA, inner: Any = "cost", inner_options: Any = None, **options: Any) -> Policy:
    """`inner` is a policy, or the name of one: made with `inner_options` over this gamma and cost model."""
    options = {"weight": 6.0, "memory": 0.95, **options}
    if not isinstance(inner, Policy):
        given = {"gamma": gamma, **(inner_options or {})}
        if ALIASES.get(inner, inner) == "cost":
            given = {key: options[key] for key in _COST if key in options} | given
        inner = get_policy(inner, **given)
    most = max(AutoOff.most, options.get("every", AutoOff.every))
    return _cost(AutoOff, gamma, {"inner": inner, "most": most, **options})


_UNIT = Option(float, 0, 1)
_GAMMA = gamma_option("gamma")
_N_MIN = Option(low=0, aliases=("draft_min",))
_COST_OPTIONS: Mapping[str, Option | None] = {
    "v": None,
    "c": Option(float, 0, 1e6, aliases=("draft_cost",)),
    "c0": Option(float, 0, 1e6),
    "prior": _UNIT,
    "weight": Option(float, 1e-3, 1e6),
    "memory": Option(float, 1e-3, 1),
}

POLICIES: dict[str, Factory] = {
    "fixed": Factory(lambda gamma=DEFAULT_GAMMA, **o: Fixed(gamma, **o), {"gamma": _GAMMA, "n_min": _N_MIN}),
    "p_min": Factory(
        lambda gamma=DEFAULT_GAMMA, **o: PMin(gamma, **o),
        {"gamma": _GAMMA, "n_min": _N_MIN, "p_min": Option(float, 0, 1, aliases=("draft_p_min",))},
    ),
    "confidence": Factory(
        lambda gamma=20, **o: Confidence(gamma, **o),
        {"gamma": _GAMMA, "threshold": Option(float, 0, 1, aliases=("assistant_confidence_threshold",))},
    ),
    "entropy": Factory(
        lambda gamma=DEFAULT_GAMMA, **o: Entropy(gamma, **o),
        {"gamma": _GAMMA, "threshold": _UNIT, "scale": Option(float, 1e-6, 1e6)},
    ),
    "heuristic": Factory(
        _heuristic,
        {
            "gamma": gamma_option("gamma", "num_assistant_tokens"),
            "start": Option(aliases=("num_assistant_tokens",)),
        },
    ),
    "cost": Factory(_optimal, {"gamma": _GAMMA, "least": Option(low=0), **_COST_OPTIONS}),
    "auto_off": Factory(
        _auto_off,
        {
            "gamma": _GAMMA,
            "inner": None,
            "inner_options": None,
            "margin": Option(float, 1e-3, 1e3),
            "probe": Option(),
            "every": Option(high=2**30),
            "most": Option(high=2**30),
            "probe_share": Option(float, 1e-6, 1e6),
            "probe_memory": Option(float, 1e-3, 1),
            **_COST_OPTIONS,
        },
    ),
}
"""Factories by name."""

ALIASES = {
    "n_min": "fixed",
    "constant": "fixed",
    "hf_heuristic": "heuristic",
    "hf_confidence": "confidence",
    "cost_optimal": "cost",
    "auto-off": "auto_off",
}
"""Other names of the same policies."""


OUTSIDE: Registry[Policy] = Registry("policy", "specsparse.speculative.policies.base:Policy")
"""Policies of other packages, and anybody's as `module:Class`."""


def name_of(policy: Policy) -> str:
    """The name under which configs know a policy; that of the inner one where `auto_off` stands around it."""
    if isinstance(policy, AutoOff):
        return name_of(policy.inner)
    return _NAMES.get(type(policy), type(policy).__name__)


_NAMES = {
    Fixed: "fixed", PMin: "p_min", Confidence: "confidence", Entropy: "entropy", Heuristic: "heuristic",
    CostOptimal: "cost",
}  # fmt: skip


def get_policy(name: str, **options: Any) -> Policy:
    """The policy of that name or `module:Class`, with its options under their own or other projects' names.

    Raises:
        UserError: unknown name or option (with the nearest valid one), or a value out of range.
    """
    key = ALIASES.get(name, name)
    if key not in POLICIES:
        if OUTSIDE.holds(name):
            return OUTSIDE.make(name, {"gamma": DEFAULT_GAMMA, **options})
        raise UserError(f"policy={name} is unknown; {nearest(str(name), [*POLICIES, *ALIASES, *OUTSIDE.names()])}")
    return POLICIES[key].make("policy", name, options)


def default_policy(times: Mapping[str, Any], *, gamma: int = SHORT_GAMMA, tree: bool = False) -> Policy:
    """What nobody chose: short drafts of the length that pays best, and none where none pays; a tree whole or not.

    Args:
        times: `v`, `c` and `c0` of the cost model.
        gamma: most tokens, or the nodes of the tree.
        tree: whether drafts are trees, whose nodes are no draft lengths.
    """
    return get_policy("auto_off", gamma=gamma, inner="fixed" if tree else "cost", **times)
