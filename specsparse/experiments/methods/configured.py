"""The method of a config, what its policy and tree read of this machine, and what drafting costs and brings here.

Policies weigh times, and trees acceptance. What the config leaves out of these is measured once and kept.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from rich.console import Console

from specsparse.engine.model import Model
from specsparse.experiments.compose.config import choice_options
from specsparse.experiments.methods.decoding import bar_on, calibration
from specsparse.experiments.settings import DecodingSettings, MethodSettings, PolicySpec
from specsparse.measure.costs import acceptance, measuring
from specsparse.measure.costs.measuring import Bar, silent
from specsparse.runtime.method import NO_DRAFTER, Method, MethodSpec, drafts_trees, resolve
from specsparse.runtime.timing_cache import FREE, cost_key, policy_times, rounded
from specsparse.speculative import expected
from specsparse.speculative.policies import over_tree
from specsparse.speculative.policies.base import Fixed
from specsparse.speculative.policies.cost import KEPT
from specsparse.speculative.trees import CHAIN, TREES, get_tree
from specsparse.speculative.trees.base import TreeShape
from specsparse.speculative.trees.static import DRAWS, Sequoia, StaticTree
from specsparse.support.files import conf_dir
from specsparse.support.registry import Choice

SEQUOIA = "sequoia"
TREE_DRAFTER = "layer_skip"
"""What drafts the trees where the configured drafter drafts none: it needs no second file."""
D = TypeVar("D", bound=DecodingSettings)
M = TypeVar("M", bound=MethodSettings)


def spec_of(cfg: MethodSettings) -> MethodSpec:
    """The method of a config, with placeholders for times that are not `filled`."""
    if cfg.drafter.name == NO_DRAFTER:
        return MethodSpec()
    options = {key: value for key, value in cfg.policy.options.items() if value not in (None, KEPT)}
    if _times_are_left_out(cfg):
        options["v"] = [1.0] * (gamma_of(cfg) + 1)
    policy = Choice(cfg.policy.name, {"gamma": cfg.policy.gamma, **options})
    return MethodSpec(cfg.drafter, cfg.verifier, policy, cfg.tree, cfg.params)


def shape_of(cfg: MethodSettings) -> TreeShape | None:
    """The shape of the drafts, as far as it is known; None for chains."""
    return get_tree(cfg.tree.name, **cfg.tree.options)


def gamma_of(cfg: MethodSettings) -> int:
    """Most nodes that the policy may allow; those of a tree are no draft lengths."""
    shape, options = shape_of(cfg), {"gamma": cfg.policy.gamma, **cfg.policy.options}
    return (options if shape is None else over_tree(cfg.policy.name, options, shape.max_nodes))["gamma"]


def filled(cfg: D, model: Model, out: Console) -> D:
    """The config with what it leaves to this machine: from the kept table, measured first if it is not there.

    Numbers are rounded, so that a program is compiled once and not for every digit.
    """
    if cfg.drafter.name == NO_DRAFTER:
        return cfg
    bar, policy, tree = bar_on(out), {}, {}
    if cfg.policy.options.get("v") == KEPT:
        policy |= _kept_times(cfg, model)
    elif _times_are_left_out(cfg):
        table, key = measuring.table_for(model, cfg.drafter.name, cfg.drafter.options, bar=bar)
        policy |= rounded(table.policy_options(gamma_of(cfg), key))
    if _left_out(cfg.policy.options, "prior"):
        policy["prior"] = round(_rates(cfg, model, None, calibration(cfg, model), bar)[0], 2)
    if cfg.tree.name == SEQUOIA:
        draw = cfg.tree.options.get("draw") or "top"
        if _left_out(cfg.tree.options, "acceptance"):
            rates = _rates(cfg, model, draw, calibration(cfg, model), bar)
            tree["acceptance"] = [round(rate, 3) for rate in rates]
        if missing := _left_out(cfg.tree.options, "cost", "level_cost"):
            table, key = measuring.table_for(model, cfg.drafter.name, cfg.drafter.options, draw=draw, bar=bar)
            times = rounded(table.tree_options(cfg.tree.options.get("nodes") or Sequoia.nodes, key))
            tree |= {key: times[key] for key in missing}
    if not (policy or tree):
        return cfg
    given = {key: value for key, value in cfg.policy.options.items() if value not in (None, KEPT)}
    return dataclasses.replace(
        cfg,
        policy=dataclasses.replace(cfg.policy, options={**policy, **given}),
        tree=Choice(cfg.tree.name, {**cfg.tree.options, **tree}),
    )


def _left_out(options: Mapping[str, object], *names: str) -> list[str]:
    """Those of the options that are there and null."""
    return [name for name in names if name in options and options[name] is None]


def _times_are_left_out(cfg: MethodSettings) -> bool:
    return "v" in cfg.policy.options and cfg.policy.options["v"] in (None, KEPT)


def _kept_times(cfg: MethodSettings, model: Model) -> dict[str, object]:
    """v, c and c0 without measuring: what was kept, or a guess."""
    gamma, shape = gamma_of(cfg), shape_of(cfg)
    share = resolve(MethodSpec(cfg.drafter, policy=Fixed(gamma)), model).share
    levels = None if shape is None else shape.max_depth
    return policy_times(model, gamma, cfg.drafter.name, cfg.drafter.options, share=share, levels=levels)


def _rates(
    cfg: MethodSettings, model: Model, draw: str | None, prompts: Sequence[Sequence[int]], bar: Bar
) -> tuple[float, ...]:
    """Acceptance of chains (one rate), or by rank of siblings drawn in that way."""

    def make() -> Method:
        gamma = min(cfg.policy.gamma, 4) if draw is None else acceptance.FAN.size
        tree = None if draw is None else StaticTree(acceptance.FAN, DRAWS[draw])
        return resolve(MethodSpec(cfg.drafter, cfg.verifier, Fixed(gamma), tree, cfg.params), model)

    name = cost_key(cfg.drafter.name, cfg.drafter.options)
    key = _acceptance_key(cfg, name, "chain" if draw is None else f"{draw} siblings")
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
    return cfg.drafter if cfg.drafter.name == name else _from_file("drafter", name)


def _from_file(group: str, name: str) -> Choice:
    return Choice(name, choice_options(conf_dir() / group / f"{name}.yaml"))


def drafting_settings(cfg: M, drafters: Sequence[str], trees: Sequence[str]) -> list[M]:
    """The settings for each drafter with chains, then for each tree: drafts of fixed length, the first verifier that
    fits.

    Raises:
        UserError: an unknown drafter, tree or option.
    """
    of_trees = drafter_choice(cfg, cfg.drafter.name if drafts_trees(cfg.drafter.name) else TREE_DRAFTER)
    pairs = [(drafter_choice(cfg, name), Choice(CHAIN)) for name in drafters]
    pairs += [(of_trees, cfg.tree if cfg.tree.name == name else _from_file("tree", name)) for name in trees]
    found, gamma = [], cfg.policy.gamma
    for drafter, tree in pairs:
        verifier = resolve(MethodSpec(drafter, None, Fixed(gamma), tree, cfg.params)).verifier
        assert verifier is not None
        own = {"drafter": drafter, "tree": tree, "verifier": Choice(verifier.name)}
        found.append(dataclasses.replace(cfg, policy=PolicySpec("fixed", gamma), **own))
    return found


def drafting_rows(
    chosen: Iterable[MethodSettings], model: Model, prompts: Sequence[Sequence[int]], *, bar: Bar = silent
) -> Iterator[dict[str, object]]:
    """For each method: cost of drafting, acceptance, and the speed-up that the table predicts from both.

    A chain has the draft length that suits its acceptance, 0 if none pays. What is not known yet is measured.

    Args:
        chosen: see `drafting_settings`.
        model: the target.
        prompts: token ids that acceptance is measured on.
        bar: shows progress.
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
            key, spec = draft_key(cfg), MethodSpec(cfg.drafter, cfg.verifier, Fixed(shape.max_nodes), shape, cfg.params)
            table = measuring.table_with_draft(model, key, lambda spec=spec: [resolve(spec, model)], bar=bar)
            known = _acceptance_key(cfg, key, "whole tree")
            table = acceptance.table_with_acceptance(
                model, known, lambda spec=spec: resolve(spec, model), prompts, cfg.params, whole=True, bar=bar
            )
            draft, (tokens, gamma) = table.drafts.get(key, FREE), table.acceptance[known]
            gain = table.predict_tree(tokens, gamma, room=shape.max_nodes, draft=draft)
        yield {
            "method": key, "token_s": draft.token_s, "round_s": draft.fixed_s, "step_s": table.step(), "alpha": alpha,
            "gamma": gamma, "tokens": tokens, "predicted_speedup": gain,
        }  # fmt: skip
