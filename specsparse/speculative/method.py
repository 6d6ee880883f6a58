"""From names to a drafter under its policy and a verifier that fits it: what configs and the API both ask for."""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from specsparse.errors import UserError
from specsparse.speculative.base import Drafter, DraftKind, Verifier, check_facts
from specsparse.speculative.drafters.options import draw_temperature
from specsparse.speculative.drafters.plan import DrafterPlan
from specsparse.speculative.drafters.registry import DRAFTERS, get_drafter, takes
from specsparse.speculative.drafters.synthetic import Synthetic, SyntheticRates, synthetic_verifier
from specsparse.speculative.drafters.with_policy import WithPolicy, with_policy
from specsparse.speculative.gamma import GAMMA_NAMES
from specsparse.speculative.policies.base import Policy
from specsparse.speculative.trees.base import TreeShape
from specsparse.speculative.verifiers.registry import RULES, SYNTHETIC
from specsparse.speculative.verify import check_pair, get_verifier, valid_verifiers


def drafts_trees(name: str) -> bool:
    """Whether the drafter of that name takes the shape of a tree."""
    return "tree" in takes(name)


def make_drafter(
    name: str, options: Mapping[str, Any], policy: Policy, *, tree: TreeShape | None = None
) -> Drafter | DrafterPlan:
    """The drafter of that name under a policy: its own where it looks at draft laws, else wrapped.

    Raises:
        UserError: an unknown name or option, or a policy or tree that does not go with the drafter.
    """
    known = takes(name)
    if tree is not None:
        if known and "tree" not in known:
            names = ", ".join(filter(drafts_trees, DRAFTERS.names()))
            raise UserError(f"drafter={name} drafts chains: trees are for drafter={names}")
        options = {**options, "tree": tree}
    said = [key for key in options if key in ("max_nodes", *GAMMA_NAMES) and options[key] is not None]
    if "policy" in known:
        if said:
            raise UserError(f"drafter.{said[0]}: how long drafts are is said by the policy, as policy.gamma")
        return get_drafter(name, **options, **({"max_nodes": policy.gamma} if policy.always else {"policy": policy}))
    room = {"max_nodes": policy.gamma} if "max_nodes" in known and not said else {}
    drafter = get_drafter(name, **options, **room)
    if policy.needs and not isinstance(drafter, DrafterPlan):
        raise UserError(
            f"policy={policy.name} looks at the laws of the draft, and drafter={name} has none: "
            "choose policy=fixed, heuristic, cost or auto_off"
        )
    return drafter if isinstance(drafter, DrafterPlan) else with_policy(drafter, policy)


Made = TypeVar("Made", bound=Drafter | DrafterPlan)


def drawing_for(drafter: Made, verifier: str | Verifier | None, temperature: float) -> Made:
    """The drafter; one whose options leave its temperature open draws for a verifier that weighs draws.

    `temperature` is the target's.
    """
    name = verifier.name if isinstance(verifier, Verifier) else verifier or ""
    drawn_at = draw_temperature(name, temperature)
    if drawn_at is None or not isinstance(drafter, DrafterPlan) or drafter.drafting.temperature is not None:
        return drafter
    return dataclasses.replace(drafter, drafting=dataclasses.replace(drafter.drafting, temperature=drawn_at))


def choose_verifier(
    drafter: Drafter | DrafterPlan,
    name: str | Verifier | None,
    options: Mapping[str, Any] | None = None,
    *,
    temperature: float,
    drafted_by: str | None = None,
) -> Verifier:
    """The verifier of that name, or by default the first lossless one that fits the drafter.

    `drafted_by` is the drafter's name for messages.

    `synthetic` makes the acceptance of any chain up, at the rates of its options or of a synthetic drafter.

    Raises:
        UserError: an unknown name or option, or a pair that would not keep its promise, with the valid names.
    """
    given = {key: value for key, value in (options or {}).items() if value is not None}
    source = drafter.drafter if isinstance(drafter, WithPolicy) else drafter
    made_up = isinstance(source, Synthetic)
    if isinstance(source, Drafter):
        check_facts(source)
    if name == SYNTHETIC or (made_up and name is None):
        return _synthetic(drafter, source.rates if made_up and not given.keys() - {"process"} else None, given)
    if made_up and not (isinstance(name, Verifier) and name.name == SYNTHETIC):
        raise UserError("drafter=synthetic drafts no text, its acceptance is made up: choose verifier=synthetic")
    if name is None:
        name = valid_verifiers(drafter.kind, tree=drafter.tree, temperature=temperature)[0]
    verifier = get_verifier(name, **given) if isinstance(name, str) else name
    if not isinstance(verifier, Verifier):
        raise UserError(f"verifier must be a registered name or a Verifier, not {type(verifier).__name__}")
    try:
        check_pair(drafter, verifier, temperature=temperature, drafted_by=drafted_by)  # type: ignore[arg-type]  # a plan knows as much
    except UserError as error:
        raise UserError(f"{error}{_if_drawn(drafter, verifier, temperature)}") from None
    return verifier


def _if_drawn(drafter: Drafter | DrafterPlan, verifier: Verifier, temperature: float) -> str:
    """The way out where a drafter with a model takes the likeliest tokens and the verifier wants drawn ones."""
    argmax = isinstance(drafter, DrafterPlan) and drafter.kind is DraftKind.ONE_HOT and not drafter.tree
    argmax = argmax and drafter.can_draw
    if argmax and verifier.accepts(DraftKind.SAMPLED, tree=False, temperature=temperature):
        return f"; or set drafter.temperature above 0, which draws the drafts that {verifier.name} verifies"
    return ""


def _synthetic(drafter: Drafter | DrafterPlan, rates: SyntheticRates | None, options: dict[str, object]) -> Verifier:
    if drafter.tree:
        raise UserError("verifier=synthetic makes up the acceptance of chains, not of trees")
    given = vars(RULES.read(SYNTHETIC, options))
    return synthetic_verifier(rates or SyntheticRates.of(drafter.max_nodes, **given))
