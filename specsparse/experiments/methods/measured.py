"""What policies and trees read of this machine and this model where the config leaves it out: times, and acceptance."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specsparse.engine.model import Model
from specsparse.experiments.settings import MethodSettings
from specsparse.measure.costs import acceptance, measuring
from specsparse.measure.costs.measuring import Bar, silent
from specsparse.runtime.binding import bind, make_method
from specsparse.runtime.device_batch import Method
from specsparse.runtime.timing_cache import FREE, CostTable, DraftCost, cost_key, draft_share, policy_times, rounded
from specsparse.speculative.base import Verifier
from specsparse.speculative.drafters.plan import DrafterPlan
from specsparse.speculative.method import choose_verifier, make_drafter
from specsparse.speculative.policies import over_tree
from specsparse.speculative.policies.base import Fixed
from specsparse.speculative.policies.cost import KEPT
from specsparse.speculative.tree import TreeTemplate
from specsparse.speculative.trees import get_tree
from specsparse.speculative.trees.base import TreeShape
from specsparse.speculative.trees.options import SequoiaOptions
from specsparse.speculative.trees.registry import CHAIN, TREES
from specsparse.speculative.trees.static import static_tree

SEQUOIA = "sequoia"
NO_DRAFTER = "none"


@dataclass(frozen=True)
class Measured:
    """Options that were measured, rounded so that a program is compiled once and not for every digit.

    Attributes:
        policy: v, c, c0 and prior of a policy that weighs time.
        tree: acceptance, cost and level_cost of a tree that does.
    """

    policy: Mapping[str, object] = field(default_factory=dict)
    tree: Mapping[str, object] = field(default_factory=dict)


def left_out(options: Mapping[str, object], *names: str) -> list[str]:
    """Those of the options that are there and null."""
    return [name for name in names if name in options and options[name] is None]


def needed(cfg: MethodSettings) -> bool:
    """Whether the policy or the tree reads what the config leaves out."""
    tree = left_out(cfg.tree.options, "acceptance", "cost", "level_cost") if cfg.tree.name == SEQUOIA else []
    policy = left_out(cfg.policy.options, "v", "prior") or cfg.policy.options.get("v") == KEPT
    return cfg.drafter.name != NO_DRAFTER and bool(policy or tree)


def measure(
    cfg: MethodSettings, model: Model, prompts: Callable[[], Sequence[Sequence[int]]], bar: Bar = silent
) -> Measured:
    """What the config leaves out, from the kept table; measured first where it is not known.

    Args:
        cfg: the run.
        model: the target.
        prompts: token ids that acceptance is measured on.
        bar: shows progress.
    """
    policy, tree = {}, {}
    if left_out(cfg.policy.options, "v"):
        policy |= _times(cfg, model, bar)
    elif cfg.policy.options.get("v") == KEPT:
        policy |= _kept_times(cfg, model)
    if left_out(cfg.policy.options, "prior"):
        policy["prior"] = round(_rates(cfg, model, None, prompts(), bar)[0], 2)
    if cfg.tree.name == SEQUOIA:
        draw = cfg.tree.options.get("draw") or "top"
        if left_out(cfg.tree.options, "acceptance"):
            tree["acceptance"] = [round(rate, 3) for rate in _rates(cfg, model, draw, prompts(), bar)]
        if left_out(cfg.tree.options, "cost", "level_cost"):
            times = _tree_times(cfg, model, draw, bar)
            tree |= {key: times[key] for key in left_out(cfg.tree.options, "cost", "level_cost")}
    return Measured(policy, tree)


def _times(cfg: MethodSettings, model: Model, bar: Bar) -> dict[str, object]:
    """v, c and c0 of chains."""
    table, key = measuring.table_for(model, cfg.drafter.name, cfg.drafter.options, bar=bar)
    return rounded(table.policy_options(gamma_of(cfg), key))


def _kept_times(cfg: MethodSettings, model: Model) -> dict[str, object]:
    """The same without measuring: what was kept, or a guess."""
    drafter = make_drafter(cfg.drafter.name, cfg.drafter.options, Fixed(gamma_of(cfg)))
    share = draft_share(model, bind(model, drafter)) if isinstance(drafter, DrafterPlan) else 0.0
    shape = shape_of(cfg)
    levels = None if shape is None else shape.max_depth
    return policy_times(model, gamma_of(cfg), cfg.drafter.name, cfg.drafter.options, share=share, levels=levels)


def shape_of(cfg: MethodSettings) -> TreeShape | None:
    """The shape of the drafts as far as it is known before anything is measured, None for chains."""
    return get_tree(cfg.tree.name, **cfg.tree.options)


def policy_options(cfg: MethodSettings) -> dict[str, Any]:
    """The policy's options for the drafts of this config; of a tree, nodes are no draft lengths."""
    shape, options = shape_of(cfg), {"gamma": cfg.policy.gamma, **cfg.policy.options}
    return options if shape is None else over_tree(cfg.policy.name, options, shape.max_nodes)


def gamma_of(cfg: MethodSettings) -> int:
    """Most nodes that the policy may allow."""
    return policy_options(cfg)["gamma"]


def draft_key(cfg: MethodSettings) -> str:
    """The name under which the cost of the config's drafts is kept.

    Chains have the drafter's, the tree that is made to measure one for every tree whose children are so drawn, and
    any other tree one of its own.
    """
    key = cost_key(cfg.drafter.name, cfg.drafter.options)
    if cfg.tree.name == SEQUOIA:
        return measuring.trees_key(cfg.drafter.name, cfg.drafter.options, cfg.tree.options.get("draw") or "top")
    return key if cfg.tree.name == CHAIN else f"{key}, tree {cost_key(cfg.tree.name, cfg.tree.options, among=TREES)}"


@dataclass(frozen=True)
class Chain:
    """What chains of a drafter cost and how often a token is accepted; `key` names the drafter in the table."""

    key: str
    table: CostTable
    draft: DraftCost
    alpha: float


@dataclass(frozen=True)
class Tree:
    """What a tree costs to draft, the tokens it gives and the nodes it has in a round, and how many it has room for."""

    key: str
    table: CostTable
    draft: DraftCost
    tokens: float
    nodes: float
    room: int


def chain(cfg: MethodSettings, model: Model, prompts: Sequence[Sequence[int]], bar: Bar = silent) -> Chain:
    """Of the config's drafter, measured where it is not known yet."""
    alpha = _rates(cfg, model, None, prompts, bar)[0]
    table, key = measuring.table_for(model, cfg.drafter.name, cfg.drafter.options, bar=bar)
    return Chain(key, table, table.drafts.get(key, FREE), alpha)


def tree(cfg: MethodSettings, model: Model, prompts: Sequence[Sequence[int]], bar: Bar = silent) -> Tree:
    """Of the config's drafter and tree, measured where they are not known yet."""
    params, key, shape = cfg.params, draft_key(cfg), get_tree(cfg.tree.name, **cfg.tree.options)
    assert shape is not None
    drafter = make_drafter(cfg.drafter.name, cfg.drafter.options, Fixed(shape.max_nodes), tree=shape)

    def make() -> Method:
        return make_method(model, drafter, verifier(cfg, drafter), params)

    table = measuring.table_with_draft(model, key, lambda: [make()], bar=bar)
    known = _acceptance_key(cfg, key, "whole tree")
    table = acceptance.table_with_acceptance(model, known, make, prompts, params, whole=True, bar=bar)
    tokens, nodes = table.acceptance[known]
    return Tree(key, table, table.drafts.get(key, FREE), tokens, nodes, shape.max_nodes)


def _tree_times(cfg: MethodSettings, model: Model, draw: str, bar: Bar) -> dict[str, object]:
    """cost and level_cost of trees."""
    table, key = measuring.table_for_trees(model, cfg.drafter.name, cfg.drafter.options, draw=draw, bar=bar)
    return rounded(table.tree_options(cfg.tree.options.get("nodes") or SequoiaOptions.nodes, key))


def _rates(
    cfg: MethodSettings, model: Model, draw: str | None, prompts: Sequence[Sequence[int]], bar: Bar
) -> tuple[float, ...]:
    """Acceptance of chains (one rate), or by rank of siblings drawn in that way."""
    params = cfg.params

    def make() -> Method:
        if draw is None:
            drafter = make_drafter(cfg.drafter.name, cfg.drafter.options, Fixed(min(cfg.policy.gamma, 4)))
        else:
            drafter = _tree_drafter(cfg, acceptance.FAN, draw)
        return make_method(model, drafter, verifier(cfg, drafter), params)

    name = cost_key(cfg.drafter.name, cfg.drafter.options)
    shape = "chain" if draw is None else f"{draw} siblings"
    key = _acceptance_key(cfg, name, shape)
    return acceptance.table_with_acceptance(model, key, make, prompts, params, bar=bar).acceptance[key]


def verifier(cfg: MethodSettings, drafter: Any) -> Verifier:
    """The config's, which must fit the drafter.

    Raises:
        UserError: it does not.
    """
    given, whose = cfg.verifier, cfg.drafter.name
    return choose_verifier(drafter, given.name, given.options, temperature=cfg.params.temperature, drafted_by=whose)


def _acceptance_key(cfg: MethodSettings, drafter: str, shape: str) -> str:
    return acceptance.acceptance_key(drafter, cfg.verifier.name, cfg.params, shape, options=cfg.verifier.options)


def _tree_drafter(cfg: MethodSettings, template: TreeTemplate, draw: str) -> Any:
    return make_drafter(cfg.drafter.name, cfg.drafter.options, Fixed(template.size), tree=static_tree(template, draw))


def for_checking(cfg: MethodSettings) -> Measured:
    """Placeholders with which a config is checked before anything is measured."""
    unknown = left_out(cfg.policy.options, "v") or cfg.policy.options.get("v") == KEPT
    return Measured(policy={"v": [1.0] * (gamma_of(cfg) + 1)} if unknown else {})
