"""`kind: roofline`: what a model file could do at best on a device, and what it was measured to do on this one."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from rich.text import Text

from specsparse.data import devices
from specsparse.engine.model import Model
from specsparse.experiments import configured, decoding
from specsparse.experiments.kind import Kind, RunContext, RunResult, header_of
from specsparse.experiments.settings import DecodingSettings, choice_from_file
from specsparse.measure.conditions import Conditions
from specsparse.measure.costs import acceptance, measuring
from specsparse.measure.costs.forecast import device_of
from specsparse.measure.costs.measuring import Bar, silent
from specsparse.measure.costs.roofline import Traffic, get_device
from specsparse.measure.costs.roofline_report import roofline_report, tables
from specsparse.models import catalogue
from specsparse.report import display
from specsparse.runtime import timing_cache
from specsparse.runtime.method import MethodSpec, drafts_trees, resolve
from specsparse.runtime.timing_cache import FREE
from specsparse.speculative import expected
from specsparse.speculative.policies.base import Fixed
from specsparse.speculative.trees import CHAIN
from specsparse.support.options import Size
from specsparse.support.registry import Choice

TREE_DRAFTER = "layer_skip"
"""Drafts the trees if the configured drafter drafts none: it needs no second file."""


@dataclass(frozen=True)
class RooflineSpec:
    """A device by name and tokens in the cache to predict for; `refresh` measures this device again.

    On this machine drafting is measured too: chains of `drafters`, and `trees`.
    """

    device: str = "this"
    kv_length: Size | None = None
    refresh: bool = False
    drafters: tuple[str, ...] = ()
    trees: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RooflineSettings(DecodingSettings):
    roofline: RooflineSpec = RooflineSpec()


class RooflineKind(Kind[RooflineSettings]):
    """A model file's best possible speed on a device, and its measured speed on this one."""

    takes_ffn = False

    def check(self, cfg: RooflineSettings) -> None:
        catalogue.resolve(cfg.model.path)
        devices.known(cfg.roofline.device)
        drafting_settings(cfg)

    def run(self, cfg: RooflineSettings, ctx: RunContext) -> RunResult:
        """`roofline.device=this` alone loads the weights, and measures once per file."""
        out, table = ctx.console, None
        f, config = header_of(cfg.model)
        methods: list[dict[str, object]] = []
        if cfg.roofline.device == devices.THIS:
            model = ctx.load(cfg.model)
            table = measuring.load_or_measure(model, refresh=cfg.roofline.refresh, bar=ctx.counting)
            kept = f"measured {table.identity.get('date')}, kept in {timing_cache.path_of(model)}"
            out.print(Text(f"{kept}; roofline.refresh=true measures again", style="dim"))
            device = device_of(table)
            if cfg.roofline.drafters or cfg.roofline.trees:
                prompts = decoding.calibration(cfg, model)
                methods = list(drafting_rows(drafting_settings(cfg), model, prompts, bar=ctx.counting))
                table = timing_cache.load(model) or table
        else:
            device = get_device(cfg.roofline.device)
        load = Traffic.from_gguf(f, config, kv_dtype=cfg.model.kv_dtype or "f16")
        found = roofline_report(load, config, device, table=table, kv_length=cfg.roofline.kv_length)
        found["drafting"] = methods
        taken = None if table is None else Conditions(table.bandwidth, plain_tokens_per_second=1 / table.plain_s)
        found["conditions"] = taken and taken.to_dict()
        shown = [*tables(found), *display.condition_lines(taken)]
        return RunResult(found, shown=shown, objective=found["devices"][0]["tokens_per_second"])


def drafting_settings(cfg: RooflineSettings) -> list[RooflineSettings]:
    """The settings for each drafter with chains, then for each tree: drafts of fixed length, the first verifier that
    fits."""
    of_trees = configured.drafter_choice(cfg, cfg.drafter.name if drafts_trees(cfg.drafter.name) else TREE_DRAFTER)
    pairs = [(configured.drafter_choice(cfg, name), Choice(CHAIN)) for name in cfg.roofline.drafters]
    for name in cfg.roofline.trees:
        pairs.append((of_trees, cfg.tree if cfg.tree.name == name else choice_from_file("tree", name)))
    out, fixed = [], Choice("fixed", {"gamma": cfg.gamma})
    for drafter, tree in pairs:
        verifier = resolve(MethodSpec(drafter, None, fixed, tree, cfg.params)).verifier
        assert verifier is not None
        own = {"drafter": drafter, "tree": tree, "verifier": Choice(verifier.name)}
        out.append(dataclasses.replace(cfg, policy=fixed, **own))
    return out


def drafting_rows(
    chosen: Iterable[RooflineSettings], model: Model, prompts: Sequence[Sequence[int]], *, bar: Bar = silent
) -> Iterator[dict[str, object]]:
    """A row for each method of `drafting_settings`: cost of drafting, acceptance on the prompts (token ids), and the
    speed-up that the table predicts from both.

    A chain has the draft length that suits its acceptance, 0 if none pays. Unknown costs are measured.
    """
    for cfg in chosen:
        shape, alpha = configured.shape_of(cfg), None
        if shape is None:
            alpha = configured.rates(cfg, model, None, prompts, bar)[0]
            table, key = measuring.table_for(model, cfg.drafter.name, cfg.drafter.options, bar=bar)
            draft = table.drafts.get(key, FREE)
            gamma, gain = table.best_gamma(alpha, draft=draft)
            tokens = expected.expected_tokens(alpha, gamma)
        else:
            spec = MethodSpec(cfg.drafter, cfg.verifier, Fixed(shape.max_nodes), shape, cfg.params)
            make, key = partial(resolve, spec, model), configured.draft_key(cfg)
            table = measuring.table_with_draft(model, key, make, bar=bar)
            known = configured.acceptance_key(cfg, key, "whole tree")
            table = acceptance.table_with_acceptance(model, known, make, prompts, cfg.params, whole=True, bar=bar)
            draft, (tokens, gamma) = table.drafts.get(key, FREE), table.acceptance[known]
            gain = table.predict_tree(tokens, gamma, room=shape.max_nodes, draft=draft)
        yield {
            "method": key, "token_s": draft.token_s, "round_s": draft.fixed_s, "step_s": table.step(), "alpha": alpha,
            "gamma": gamma, "tokens": tokens, "predicted_speedup": gain,
        }  # fmt: skip
