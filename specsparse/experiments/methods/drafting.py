"""What drafting costs on this machine and brings on the built-in prompts, method by method: a part of the roofline."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from specsparse.engine.model import Model
from specsparse.experiments.compose.config import choice_options
from specsparse.experiments.methods import measured
from specsparse.experiments.settings import DrafterSpec, MethodSettings, PolicySpec, TreeSpec, VerifierSpec
from specsparse.measure.costs.measuring import Bar, silent
from specsparse.runtime.timing_cache import CostTable, DraftCost
from specsparse.speculative import expected
from specsparse.speculative.method import choose_verifier, drafts_trees, make_drafter
from specsparse.speculative.policies.base import Fixed
from specsparse.speculative.trees import get_tree
from specsparse.speculative.trees.registry import CHAIN
from specsparse.support.files import conf_dir

M = TypeVar("M", bound=MethodSettings)

TREE_DRAFTER = "layer_skip"
"""What drafts the trees where the configured drafter drafts none: it needs no second file."""


def methods(cfg: M, drafters: Sequence[str], trees: Sequence[str]) -> list[M]:
    """The settings for each drafter with chains, then for each tree.

    Raises:
        UserError: an unknown drafter, tree or option.
    """
    chains = [drafter_spec(cfg, name) for name in drafters]
    of_trees = drafter_spec(cfg, cfg.drafter.name if drafts_trees(cfg.drafter.name) else TREE_DRAFTER)
    shapes = [
        cfg.tree if cfg.tree.name == name else TreeSpec(name, choice_options(conf_dir() / "tree" / f"{name}.yaml"))
        for name in trees
    ]
    found = [dataclasses.replace(cfg, drafter=drafter, tree=TreeSpec()) for drafter in chains]
    found += [dataclasses.replace(cfg, drafter=of_trees, tree=tree) for tree in shapes]
    return [_verified(one) for one in found]


def drafter_spec(cfg: MethodSettings, name: str) -> DrafterSpec:
    """With the options that a run of it would have, so that the run finds what is measured here."""
    if cfg.drafter.name == name:
        return cfg.drafter
    return DrafterSpec(name, choice_options(conf_dir() / "drafter" / f"{name}.yaml"))


def _verified(cfg: M) -> M:
    """The settings under drafts of fixed length and the first lossless verifier that fits."""
    cfg = dataclasses.replace(cfg, policy=PolicySpec("fixed", cfg.policy.gamma))
    tree = get_tree(cfg.tree.name, **cfg.tree.options)
    drafter = make_drafter(cfg.drafter.name, cfg.drafter.options, Fixed(cfg.policy.gamma), tree=tree)
    verifier = choose_verifier(drafter, None, temperature=cfg.params.temperature)
    return dataclasses.replace(cfg, verifier=VerifierSpec(verifier.name))


def rows(
    chosen: Iterable[MethodSettings], model: Model, prompts: Sequence[Sequence[int]], *, bar: Bar = silent
) -> Iterator[dict[str, object]]:
    """For each method: cost of drafting, acceptance, and the speed-up that the table predicts from both.

    Args:
        chosen: see `methods`.
        model: the target.
        prompts: token ids that acceptance is measured on.
        bar: shows progress.
    """
    for one in chosen:
        if one.tree.name == CHAIN:
            yield _chain(measured.chain(one, model, prompts, bar))
        else:
            yield _tree(measured.tree(one, model, prompts, bar))


def _chain(found: measured.Chain) -> dict[str, object]:
    """At the draft length that suits this acceptance; 0 where none pays."""
    gamma, gain = found.table.best_gamma(found.alpha, draft=found.draft)
    tokens = expected.expected_tokens(found.alpha, gamma)
    return {**_common(found.key, found.table, found.draft), "alpha": found.alpha, "gamma": gamma, "tokens": tokens,
            "predicted_speedup": gain}  # fmt: skip


def _tree(found: measured.Tree) -> dict[str, object]:
    gain = found.table.predict_tree(found.tokens, found.nodes, room=found.room, draft=found.draft)
    return {**_common(found.key, found.table, found.draft), "alpha": None, "gamma": found.nodes, "tokens": found.tokens,
            "predicted_speedup": gain}  # fmt: skip


def _common(key: str, table: CostTable, draft: DraftCost) -> dict[str, object]:
    return {"method": key, "token_s": draft.token_s, "round_s": draft.fixed_s, "step_s": table.step()}
