"""What a config leaves to this machine, and what drafting costs and brings here.

Policies weigh times, and trees acceptance. What the config leaves out of these is measured once and kept.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

from rich.console import Console

from specsparse.engine.model import Model
from specsparse.experiments.decoding import bar_on, calibration
from specsparse.experiments.settings import KEPT, DecodingSettings, MethodSettings, choice_from_file
from specsparse.measure.costs import acceptance, measuring
from specsparse.measure.costs.measuring import Bar, silent
from specsparse.runtime.method import NO_DRAFTER, MethodSpec, drafts_trees, resolve
from specsparse.runtime.timing_cache import FREE, cost_key, policy_times, rounded
from specsparse.speculative import expected
from specsparse.speculative.policies import over_tree
from specsparse.speculative.policies.base import Fixed
from specsparse.speculative.trees import CHAIN, TREES, get_tree
from specsparse.speculative.trees.base import TreeShape
from specsparse.speculative.trees.static import DRAWS, Sequoia, StaticTree
from specsparse.support.registry import Choice

SEQUOIA = "sequoia"
TREE_DRAFTER = "layer_skip"
"""Drafts the trees if the configured drafter drafts none: it needs no second file."""
D = TypeVar("D", bound=DecodingSettings)
M = TypeVar("M", bound=MethodSettings)


def shape_of(cfg: MethodSettings) -> TreeShape | None:
    """The shape of the drafts, as far as it is known; None for chains."""
    return get_tree(cfg.tree.name, **cfg.tree.options)


def filled(cfg: D, model: Model, out: Console) -> D:
    """The config with what it leaves to this machine: from the kept table, measured first if it is not there.

    Numbers are rounded, so that a program is compiled once and not for every digit.
    """
    if cfg.drafter.name == NO_DRAFTER:
        return cfg
    bar, policy, tree = bar_on(out), {}, {}
    drafter, shape, options = cfg.drafter, shape_of(cfg), cfg.policy.options
    if cfg.times_are_left_out:
        gamma = cfg.gamma  # the nodes of a tree are no draft length
        if shape is not None:
            gamma = over_tree(cfg.policy.name, {"gamma": gamma, **options}, shape.max_nodes)["gamma"]
        if options["v"] == KEPT:
            share = resolve(MethodSpec(drafter, policy=Fixed(gamma)), model).share
            levels = None if shape is None else shape.max_depth
            policy |= policy_times(model, gamma, drafter.name, drafter.options, share=share, levels=levels)
        else:
            table, key = measuring.table_for(model, drafter.name, drafter.options, bar=bar)
            policy |= rounded(table.policy_options(gamma, key))
    if _left_out(options, "prior"):
        policy["prior"] = round(_rates(cfg, model, None, calibration(cfg, model), bar)[0], 2)
    if cfg.tree.name == SEQUOIA:
        draw = cfg.tree.options.get("draw") or "top"
        if _left_out(cfg.tree.options, "acceptance"):
            rates = _rates(cfg, model, draw, calibration(cfg, model), bar)
            tree["acceptance"] = [round(rate, 3) for rate in rates]
        if missing := _left_out(cfg.tree.options, "cost", "level_cost"):
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


def _left_out(options: Mapping[str, object], *names: str) -> list[str]:
    """Those of the options that are there and null."""
    return [name for name in names if name in options and options[name] is None]


def _rates(
    cfg: MethodSettings, model: Model, draw: str | None, prompts: Sequence[Sequence[int]], bar: Bar
) -> tuple[float, ...]:
    """Acceptance of chains (one rate), or by rank of siblings drawn in that way."""
    gamma = min(cfg.gamma, 4) if draw is None else acceptance.FAN.size
    tree = None if draw is None else StaticTree(acceptance.FAN, DRAWS[draw])
    spec = MethodSpec(cfg.drafter, cfg.verifier, Fixed(gamma), tree, cfg.params)
    name = cost_key(cfg.drafter.name, cfg.drafter.options)
    key = _acceptance_key(cfg, name, "chain" if draw is None else f"{draw} siblings")
    make = partial(resolve, spec, model)
    return acceptance.table_with_acceptance(model, key, make, prompts, cfg.params, bar=bar).acceptance[key]


def _acceptance_key(cfg: MethodSettings, drafter: str, shape: str) -> str:
    return acceptance.acceptance_key(drafter, cfg.verifier.name, cfg.params, shape, options=cfg.verifier.options)


def draft_key(cfg: MethodSettings) -> str:
    """The name under which the cost of the config's drafts is kept.

    Chains have the drafter's, the tree that is made to measure one for every tree whose children are so drawn, and
    any other tree one of its own.
    """
    key = cost_key(cfg.drafter.name, cfg.drafter.options)
    if cfg.tree.name == SEQUOIA:
        return measuring.draft_key(cfg.drafter.name, cfg.drafter.options, cfg.tree.options.get("draw") or "top")
    return key if cfg.tree.name == CHAIN else f"{key}, tree {cost_key(cfg.tree.name, cfg.tree.options, among=TREES)}"


def drafter_choice(cfg: MethodSettings, name: str) -> Choice:
    """A drafter with the options that a run of it would have, so that the run finds what is measured here."""
    return cfg.drafter if cfg.drafter.name == name else choice_from_file("drafter", name)


def drafting_settings(cfg: M, drafters: Sequence[str], trees: Sequence[str]) -> list[M]:
    """The settings for each drafter with chains, then for each tree: drafts of fixed length, the first verifier that
    fits.

    Raises:
        UserError: an unknown drafter, tree or option.
    """
    of_trees = drafter_choice(cfg, cfg.drafter.name if drafts_trees(cfg.drafter.name) else TREE_DRAFTER)
    pairs = [(drafter_choice(cfg, name), Choice(CHAIN)) for name in drafters]
    pairs += [(of_trees, cfg.tree if cfg.tree.name == name else choice_from_file("tree", name)) for name in trees]
    out, fixed = [], Choice("fixed", {"gamma": cfg.gamma})
    for drafter, tree in pairs:
        verifier = resolve(MethodSpec(drafter, None, fixed, tree, cfg.params)).verifier
        assert verifier is not None
        own = {"drafter": drafter, "tree": tree, "verifier": Choice(verifier.name)}
        out.append(dataclasses.replace(cfg, policy=fixed, **own))
    return out


def drafting_rows(
    chosen: Iterable[MethodSettings], model: Model, prompts: Sequence[Sequence[int]], *, bar: Bar = silent
) -> Iterator[dict[str, object]]:
    """For each method of `drafting_settings`: cost of drafting, acceptance on the prompts (token ids), and the speed-up
    that the table predicts from both.

    A chain has the draft length that suits its acceptance, 0 if none pays. What is not known yet is measured.
    """
    for cfg in chosen:
        shape, alpha = shape_of(cfg), None
        if shape is None:
            alpha = _rates(cfg, model, None, prompts, bar)[0]
            table, key = measuring.table_for(model, cfg.drafter.name, cfg.drafter.options, bar=bar)
            draft = table.drafts.get(key, FREE)
            gamma, gain = table.best_gamma(alpha, draft=draft)
            tokens = expected.expected_tokens(alpha, gamma)
        else:
            spec = MethodSpec(cfg.drafter, cfg.verifier, Fixed(shape.max_nodes), shape, cfg.params)
            make, key = partial(resolve, spec, model), draft_key(cfg)
            table = measuring.table_with_draft(model, key, lambda make=make: [make()], bar=bar)
            known = _acceptance_key(cfg, key, "whole tree")
            table = acceptance.table_with_acceptance(model, known, make, prompts, cfg.params, whole=True, bar=bar)
            draft, (tokens, gamma) = table.drafts.get(key, FREE), table.acceptance[known]
            gain = table.predict_tree(tokens, gamma, room=shape.max_nodes, draft=draft)
        yield {
            "method": key, "token_s": draft.token_s, "round_s": draft.fixed_s, "step_s": table.step(), "alpha": alpha,
            "gamma": gamma, "tokens": tokens, "predicted_speedup": gain,
        }  # fmt: skip
