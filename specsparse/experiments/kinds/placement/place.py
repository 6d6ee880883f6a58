"""`kind: placement`: which neurons belong on the accelerator, by every rule, and the time a token expected of each."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.text import Text

from specsparse.data.devices import GIGA, Device
from specsparse.data.devices import known as known_device
from specsparse.engine.config import OVERRIDES, ModelConfig
from specsparse.engine.gguf.reader import GGUFFile, open_gguf
from specsparse.errors import UserError
from specsparse.experiments.kind import Found, Kind, Lab
from specsparse.experiments.kinds.placement import activations, decoded, report
from specsparse.experiments.kinds.placement.settings import PlacementSettings, PlacementSpec
from specsparse.measure import machine
from specsparse.measure.conditions import Conditions
from specsparse.measure.costs.roofline import get_device
from specsparse.models import catalogue
from specsparse.powerinfer.gpuidx import RunPlacement, kept_or_solved, path_for
from specsparse.powerinfer.placement import RULES, Hardware, ModelParts, Placement, Problem, layers, neurons_placed
from specsparse.powerinfer.profiler import probabilities, save_stats, write_activations
from specsparse.report import display

STATS_FILE, STATS_FOLDER = "activations.safetensors", "activation"
WITH_FILE = ("optimal", "powerinfer")
"""Rules whose placement is kept in a gpuidx file."""
FILE = "file"
"""In place of a rule: a gpuidx file that holds another placement than the rule makes, such as PowerInfer's own."""
GIB = 1 << 30
DEFINITIONS = {
    "seconds": "expected for a forward pass: sum over layers of max(hot, cold) or, without overlap, their sum",
    "bound": "no choice of neurons at this granularity and budget has a smaller expected time; whole layers may have",
    "waits": "seconds a token that a device waits for the other's part of an FFN, where a layer has both",
    "crossed": "bytes a token that go to the device of the hot and to that of the cold neurons; no weights",
    "hot_share": "neurons read from the accelerator / neurons read, by the counted activations",
}


@dataclass(frozen=True)
class Placed:
    """What came out: a placement by every rule, the chosen one by name, what a run would go by, and what was timed
    under which conditions."""

    chosen: str
    found: dict[str, Placement]
    gpu_index: RunPlacement | None
    measured: dict[str, Any] | None = None
    conditions: Conditions | None = None

    @property
    def as_promised(self) -> bool:
        """False if two devices wrote other tokens than one."""
        return self.measured is None or self.measured.get("same_tokens", True)


class Place(Kind[PlacementSettings]):
    """Which neurons belong on the accelerator, and the time a token that is expected of it."""

    def check(self, cfg: PlacementSettings) -> None:
        """Names, numbers, files and prompts."""
        catalogue.resolve(cfg.model.path)
        spec = cfg.placement
        for name in (spec.hot_device, spec.cold_device):
            known_device(name)
        if spec.devices is not None and (len(spec.devices) != 2 or not spec.decode):
            needs = "and needs placement.decode=32, which runs on them"
            raise UserError(f"placement.devices names two, as [cuda:0, cpu], {needs}")
        if cfg.n_gpu_layers is not None and spec.rule != "layers":
            raise UserError(
                f"n_gpu_layers={cfg.n_gpu_layers} belongs to placement=layers, not to placement={spec.rule}"
            )
        _check_gpu_index(cfg)
        if cfg.model.placement or cfg.model.hot or cfg.model.devices:
            raise UserError(
                "model.placement, model.hot and model.devices are for other kinds: here placement.* says it"
            )
        activations.check(cfg)
        cfg.data.prompts()

    def run(self, cfg: PlacementSettings, lab: Lab) -> Found:
        """Counts activations, places by every rule, and reads or writes the gpuidx file of the chosen one.

        Raises:
            UserError: a mistake in the model file or the activations.
        """
        directory = lab.directory
        f = open_gguf(catalogue.resolve(cfg.model.path))
        overrides = {k: v for k, v in cfg.model.overrides().items() if k in OVERRIDES}
        config = ModelConfig.from_gguf(f, overrides=overrides)
        stats = activations.of_run(cfg, f, config, lab)
        parts = ModelParts.from_gguf(f, config, context=cfg.placement.context, kv_dtype=cfg.model.kv_dtype or "f16")
        pair = {side: get_device(getattr(cfg.placement, f"{side}_device")) for side in ("hot", "cold")}
        problem = problem_for(cfg, parts, config, probabilities(stats, rows=cfg.placement.rows), pair)
        chosen = by_neuron = "none" if cfg.disable_gpu_index else cfg.placement.rule
        solve = {**RULES, "layers": partial(layers, n_gpu_layers=cfg.n_gpu_layers)}
        found = {name: rule(problem) for name, rule in solve.items()}
        if chosen == "optimal" and layers_instead(found, problem):
            chosen = "layers"
        beside = path_for(f.path) if config.predictor_ranks else path_for(directory / f.path.name)
        index = run_placement(cfg, f, problem, beside)
        if index is not None and not all(map(np.array_equal, index.index.hot, found[by_neuron].hot)):
            chosen = FILE
            found[FILE] = neurons_placed(FILE, problem, index.index.hot)
        measured = taken = None
        if cfg.placement.decode:
            ids, meter = activations.text_ids(cfg, f, config), machine.Meter()
            meter.sample()
            measured = decoded.measured(cfg, found[chosen], ids, lab, layers=found["layers"])
            meter.sample()
            taken = meter.conditions(1 / measured["one"])
        save_stats(directory / STATS_FILE, stats)
        write_activations(directory / STATS_FOLDER, stats)
        return _found(cfg, Placed(chosen, found, index, measured, taken), problem, parts, pair)


def layers_instead(found: Mapping[str, Placement], problem: Problem) -> bool:
    """Whether whole layers are faster than the best choice of neurons, or its dense parts alone exceed the budget."""
    neurons, layers = found["optimal"], found["layers"]
    return neurons.bytes_on_device > problem.budget or layers.seconds < (1 - 1e-9) * neurons.seconds


def _found(
    cfg: PlacementSettings, result: Placed, problem: Problem, parts: ModelParts, pair: Mapping[str, Device]
) -> Found:
    summary = report.summary(result.chosen, result.found, problem, parts)
    summary["devices"] = {side: {"title": d.title, "on_paper": not d.measured} for side, d in pair.items()}
    shown = [*report.tables(result.chosen, result.found, problem, parts, pair)]
    if result.gpu_index is not None:
        summary["gpu_index"] = result.gpu_index.note
        shown.append(Text(result.gpu_index.note))
    if result.measured is None:
        shown.append(Text("expected times only, placement.decode=32 measures"))
    elif result.conditions is not None:
        summary |= {"measured": result.measured, "conditions": result.conditions.to_dict()}
    return Found(
        summary,
        result,
        shown=[*shown, *display.condition_lines(result.conditions)],
        figures=[report.figure(problem, result.found, title=cfg.name)],
        files=(STATS_FILE, f"{STATS_FOLDER}/"),
        definitions=DEFINITIONS,
        as_promised=result.as_promised,
        objective=1 / result.found[result.chosen].seconds,
    )


def _check_gpu_index(cfg: PlacementSettings) -> None:
    given = [name for name in ("disable_gpu_index", "reset_gpu_index") if getattr(cfg, name)]
    if given and cfg.placement.rule not in WITH_FILE:
        raise UserError(
            f"{given[0]}=true does nothing with placement={cfg.placement.rule}: it belongs to {' and '.join(WITH_FILE)}"
        )
    if len(given) > 1:
        raise UserError("disable_gpu_index=true reads no file, and reset_gpu_index=true writes one: give one of them")


def hardware(spec: PlacementSpec, hot_bandwidth: float, cold_bandwidth: float) -> Hardware:
    """The two devices of a config, by the bandwidth of each in bytes per second."""
    micro = 1e-6
    return Hardware(
        hot_bandwidth, cold_bandwidth, spec.link_gbs * GIGA,
        latency_s=spec.latency_us * micro, call_s=spec.call_us * micro, overlap=spec.overlap,
    )  # fmt: skip


def problem_for(
    cfg: PlacementSettings, parts: ModelParts, config: ModelConfig, read: tuple[np.ndarray, ...],
    pair: Mapping[str, Device],
) -> Problem:  # fmt: skip
    """The placement problem of a config on a "hot" and a "cold" device."""
    spec = cfg.placement
    return parts.problem(
        config, read, budget=budget_bytes(cfg, parts), dense_hot=spec.hot == "dense", rows=spec.rows,
        hardware=hardware(spec, pair["hot"].bandwidth, pair["cold"].bandwidth), granularity=spec.granularity,
    )  # fmt: skip


def budget_bytes(cfg: PlacementSettings, parts: ModelParts) -> int:
    """`vram_budget`, or what an accelerator has free less 256 MiB (PowerInfer's default), or the whole model."""
    if cfg.vram_budget is not None:
        return int(cfg.vram_budget * GIB)
    import jax

    memory = jax.devices()[0].memory_stats() if jax.default_backend() != "cpu" else None
    if memory and "bytes_limit" in memory:
        return max(memory["bytes_limit"] - memory.get("bytes_in_use", 0) - (256 << 20), 0)
    return sum(parts.in_order().values())


def run_placement(cfg: PlacementSettings, f: GGUFFile, problem: Problem, default: Path) -> RunPlacement | None:
    """The gpuidx file of a run, read or solved and written; None for rules that have none."""
    rule = cfg.placement.rule
    if rule not in WITH_FILE:
        return None
    return kept_or_solved(
        f, problem, RULES[rule], rule=rule, path=cfg.placement.gpu_index or default,
        reset=cfg.reset_gpu_index, disable=cfg.disable_gpu_index,
    )  # fmt: skip
