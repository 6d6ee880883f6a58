"""Options that a config leaves to this machine: times for policies, acceptance for trees.

They are measured once and kept.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import TypeVar

from specsparse.engine.model import Model
from specsparse.experiments.decoding import calibration
from specsparse.experiments.settings import KEPT, DecodingSettings, MethodSettings, choice_from_file
from specsparse.measure.costs import acceptance, measuring
from specsparse.measure.costs.measuring import Bar
from specsparse.runtime.method import NO_DRAFTER, MethodSpec, resolve
from specsparse.runtime.timing_cache import by_levels, cost_key, policy_times, rounded
from specsparse.speculative.policies import over_tree
from specsparse.speculative.policies.base import Fixed
from specsparse.speculative.trees import CHAIN, TREES, get_tree
from specsparse.speculative.trees.base import TreeShape
from specsparse.speculative.trees.static import DRAWS, Sequoia, StaticTree
from specsparse.support.registry import Choice

SEQUOIA = "sequoia"
D = TypeVar("D", bound=DecodingSettings)


def shape_of(cfg: MethodSettings) -> TreeShape | None:
    return get_tree(cfg.tree.name, **cfg.tree.options)


def filled(cfg: D, model: Model, bar: Bar) -> D:
    """The config with what it leaves to this machine: from the kept table, measured first if it is not there.

    Numbers are rounded, so that a program is compiled once and not for every digit.
    """
    if cfg.drafter.name == NO_DRAFTER:
        return cfg
    policy, tree = {}, {}
    drafter, shape, options = cfg.drafter, shape_of(cfg), cfg.policy.options
    if cfg.times_are_left_out:
        gamma = cfg.gamma  # the nodes of a tree are no draft length
        if shape is not None:
            gamma = over_tree(cfg.policy.name, {"gamma": gamma, **options}, shape.max_nodes)["gamma"]
        method = resolve(MethodSpec(drafter, policy=Fixed(gamma)), model)
        levels = None if shape is None else shape.max_depth
        if options["v"] == KEPT:
            how = {"share": method.share, "kv_share": method.kv_share}
            policy |= policy_times(model, gamma, drafter.name, drafter.options, levels=levels, **how)
        else:
            table, key = measuring.table_for(model, drafter.name, drafter.options, bar=bar)
            times = table.policy_options(gamma, key, kv_share=method.kv_share)
            policy |= rounded(times if levels is None else by_levels(times, levels, gamma))
    if options.get("prior", 0) is None:
        policy["prior"] = round(rates(cfg, model, None, calibration(cfg, model), bar)[0], 2)
    if cfg.tree.name == SEQUOIA:
        draw = cfg.tree.options.get("draw") or "top"
        if cfg.tree.options.get("acceptance", 0) is None:
            found = rates(cfg, model, draw, calibration(cfg, model), bar)
            tree["acceptance"] = [round(rate, 3) for rate in found]
        if missing := [key for key in ("cost", "level_cost") if cfg.tree.options.get(key, 0) is None]:
            table, key = measuring.table_for(model, drafter.name, drafter.options, draw=draw, bar=bar)
            times = rounded(table.tree_options(cfg.tree.options.get("nodes") or Sequoia.nodes, key))
            tree |= {key: times[key] for key in missing}
    if not (policy or tree):
        return cfg
    given = {key: value for key, value in options.items() if value not in (None, KEPT)}
    return dataclasses.replace(
        cfg,
        policy=Choice(cfg.policy.name, {**policy, **given}),
        tree=Choice(cfg.tree.name, {**cfg.tree.options, **tree}),
    )


def rates(
    cfg: DecodingSettings, model: Model, draw: str | None, prompts: Sequence[Sequence[int]], bar: Bar
) -> tuple[float, ...]:
    """Acceptance of chains (one rate), or by rank of siblings drawn in that way; that of a stand-in is not kept."""
    gamma = min(cfg.gamma, 4) if draw is None else acceptance.FAN.size
    tree = None if draw is None else StaticTree(acceptance.FAN, DRAWS[draw])
    spec = MethodSpec(cfg.drafter, cfg.verifier, Fixed(gamma), tree, cfg.params)
    name = cost_key(cfg.drafter.name, cfg.drafter.options)
    key = acceptance_key(cfg, name, "chain" if draw is None else f"{draw} siblings")
    make = partial(resolve, spec, model)
    keep = cfg.stood_in is None
    return acceptance.table_with_acceptance(model, key, make, prompts, cfg.params, keep=keep, bar=bar).acceptance[key]


def acceptance_key(cfg: MethodSettings, drafter: str, shape: str) -> str:
    return acceptance.acceptance_key(drafter, cfg.verifier.name, cfg.params, shape, options=cfg.verifier.options)


def draft_key(cfg: MethodSettings) -> str:
    """The name under which the cost of the config's drafts is kept: chains have the drafter's, `sequoia` one for every
    tree whose children are so drawn, any other tree its own."""
    key = cost_key(cfg.drafter.name, cfg.drafter.options)
    if cfg.tree.name == SEQUOIA:
        return measuring.draft_key(cfg.drafter.name, cfg.drafter.options, cfg.tree.options.get("draw") or "top")
    return key if cfg.tree.name == CHAIN else f"{key}, tree {cost_key(cfg.tree.name, cfg.tree.options, among=TREES)}"


def drafter_choice(cfg: MethodSettings, name: str) -> Choice:
    """A drafter with the options of a run, so that the run finds the costs that are measured here."""
    return cfg.drafter if cfg.drafter.name == name else choice_from_file("drafter", name)
