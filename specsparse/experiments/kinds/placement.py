"""`kind: placement`: which neurons belong on the accelerator, by every rule, and the time a token expected of each.

Activations are read or counted, every rule places, the chosen placement is carried out on one device and on two.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure as Canvas
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from specsparse import api, kernels
from specsparse.data.devices import GIGA, Device
from specsparse.data.devices import known as known_device
from specsparse.engine.config import OVERRIDES, ModelConfig
from specsparse.engine.gguf.reader import POWERINFER_MAGIC, GGUFFile, open_gguf
from specsparse.engine.llama import Want
from specsparse.engine.model import Model
from specsparse.engine.text.tokenizer import Tokenizer
from specsparse.errors import UserError
from specsparse.experiments.kind import Engine, Kind, RunContext, RunResult
from specsparse.experiments.settings import ModelSettings
from specsparse.measure import machine
from specsparse.measure.conditions import Conditions
from specsparse.measure.costs.roofline import get_device
from specsparse.models import catalogue
from specsparse.powerinfer import profiler
from specsparse.powerinfer.gpuidx import RunPlacement, kept_or_solved, path_for
from specsparse.powerinfer.hot_cold import Span, TwoDevices, host_kernels, waiting
from specsparse.powerinfer.placement import RULES, Hardware, ModelParts, Placement, Problem, layers, neurons_placed
from specsparse.powerinfer.profiler import (
    ActivationStats,
    load_stats,
    probabilities,
    read_activations,
    save_stats,
    write_activations,
)
from specsparse.predictors import FFN, Needs, get_predictor
from specsparse.predictors.collect import collect, windows
from specsparse.predictors.evaluate import ModelQuality, fit_layers, model_sums, with_weights
from specsparse.report import display
from specsparse.report.plots import FAINT, Figure, Row
from specsparse.support import files, tables, terminal
from specsparse.support.interleaved import interleaved
from specsparse.support.options import Count, Positive, Range, Share, Size

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
TRACE_FILE = "trace.json"
_PARTS = ("attention", "cold", "hot")
_DRAWN = ("optimal", "powerinfer", "layers")
_STEPS = 100
_MIB = 1 << 20
_SWEPT_RULES = ("optimal", "powerinfer", "layers", "none")


@dataclass(frozen=True)
class PlacementSpec:
    """Which neurons lie on the accelerator, and what is counted and assumed for it; see `conf/placement`."""

    rule: Literal["optimal", "powerinfer", "layers", "none"] = "optimal"
    hot: Literal["masked", "dense"] = "masked"
    granularity: Count = 256
    hot_device: str = "4090"
    cold_device: str = "this"
    link_gbs: Positive = 25.0
    latency_us: Annotated[float, Range(0)] = 10.0
    call_us: Annotated[float, Range(0)] = 5.0
    overlap: bool = True
    rows: Count = 1
    context: Count = 512
    activations: str | None = None
    active_share: Share | None = None
    tokens: Count = 2048
    window: Count = 128
    gpu_index: str | None = None
    decode: Size = 0
    devices: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class PlacementSettings(ModelSettings):
    """What `kind: placement` reads of a config.

    Attributes:
        vram_budget, n_gpu_layers: GiB of the accelerator, and whole layers on it; None is what there is and what fits.
        reset_gpu_index, disable_gpu_index: as PowerInfer's options of these names.
    """

    placement: PlacementSpec = PlacementSpec()
    vram_budget: Annotated[float, Range(0)] | None = None
    n_gpu_layers: Size | None = None
    reset_gpu_index: bool = False
    disable_gpu_index: bool = False


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


@dataclass(frozen=True)
class Timing:
    """Seconds of a decoding step, the median.

    Attributes:
        one: on one device; on the host alone where the two are named.
        in_turn, overlapped: on two, one after the other and at the same time.
        busy: by part of the model, each waited for.
        layers: whole layers offloaded within the same budget, on the two devices.
        waits: of each device for the other's part of an FFN, over all layers.
        crossed: bytes that go to each device for a token.
    """

    one: float
    in_turn: float | None = None
    overlapped: float | None = None
    busy: dict[str, float] | None = None
    layers: float | None = None
    waits: dict[str, float] | None = None
    crossed: dict[str, float] | None = None

    @property
    def over_halves(self) -> float | None:
        """Overlapped time over the sum of both devices' own work."""
        return None if self.busy is None else self.overlapped / sum(self.busy.values())

    @property
    def over_layers(self) -> float | None:
        """How many times as fast as whole layers offloaded."""
        return None if self.layers is None or self.overlapped is None else self.layers / self.overlapped


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
        _check_activations(cfg)
        cfg.data.prompts()

    def run(self, cfg: PlacementSettings, ctx: RunContext) -> RunResult:
        """Counts activations, places by every rule, and reads or writes the gpuidx file of the chosen one.

        Raises:
            UserError: a mistake in the model file or the activations.
        """
        directory = ctx.directory
        f = open_gguf(catalogue.resolve(cfg.model.path))
        overrides = {k: v for k, v in cfg.model.overrides().items() if k in OVERRIDES}
        config = ModelConfig.from_gguf(f, overrides=overrides)
        stats = activations_of_run(cfg, f, config, ctx)
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
            ids, meter = text_ids(cfg, f, config), machine.Meter()
            meter.sample()
            measured = measure_decoding(cfg, found[chosen], ids, ctx, layers=found["layers"])
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
) -> RunResult:
    summary = _summary(result.chosen, result.found, problem, parts)
    summary["devices"] = {side: {"title": d.title, "on_paper": not d.measured} for side, d in pair.items()}
    shown = [*_tables(result.chosen, result.found, problem, parts, pair)]
    if result.gpu_index is not None:
        summary["gpu_index"] = result.gpu_index.note
        shown.append(Text(result.gpu_index.note))
    if result.measured is None:
        shown.append(Text("expected times only, placement.decode=32 measures"))
    elif result.conditions is not None:
        summary |= {"measured": result.measured, "conditions": result.conditions.to_dict()}
    return RunResult(
        summary,
        result,
        shown=[*shown, *display.condition_lines(result.conditions)],
        figures=[figure(problem, result.found, title=cfg.name)],
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


def problem_for(
    cfg: PlacementSettings, parts: ModelParts, config: ModelConfig, read: tuple[np.ndarray, ...],
    pair: Mapping[str, Device],
) -> Problem:  # fmt: skip
    """The placement problem of a config on a "hot" and a "cold" device."""
    spec, micro = cfg.placement, 1e-6
    hardware = Hardware(
        pair["hot"].bandwidth, pair["cold"].bandwidth, spec.link_gbs * GIGA,
        latency_s=spec.latency_us * micro, call_s=spec.call_us * micro, overlap=spec.overlap,
    )  # fmt: skip
    return parts.problem(
        config, read, budget=budget_bytes(cfg, parts), dense_hot=spec.hot == "dense", rows=spec.rows,
        hardware=hardware, granularity=spec.granularity,
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


def _check_activations(cfg: PlacementSettings) -> None:
    """What can be found wrong before anything is loaded.

    Raises:
        UserError: no such file of counts, a share out of range or where it does nothing, an unknown predictor or
            one that is not fitted here.
    """
    spec = cfg.placement
    if spec.activations is not None and not Path(spec.activations).exists():
        raise UserError(f"placement.activations={spec.activations}: no such file or directory of activation counts")
    if spec.active_share is not None:
        _check_active_share(cfg)
    counted = spec.activations is None and _companion(cfg) is None
    if counted and spec.active_share is None and cfg.predictor.name == "none":
        overrides = {k: v for k, v in cfg.model.overrides().items() if k in OVERRIDES}
        config = ModelConfig.from_gguf(open_gguf(catalogue.resolve(cfg.model.path)), overrides=overrides)
        if not config.predictor_ranks or cfg.ffn.name == "oracle":
            profiler.nonzero(FFN.from_config(config, kernels.get()))
    if cfg.predictor.name != "none":
        predictor = get_predictor(cfg.predictor.name, FFN(kernels.get(), 1e-5), **cfg.predictor.options)
        if predictor.needs in (Needs.TRAINING, Needs.PROMPT):
            raise UserError(
                f"predictor={predictor.name} needs {predictor.needs.value}, which a placement cannot give it; "
                "use a PowerInfer file, or predictor=gate_threshold, svd or signbit"
            )


def _check_active_share(cfg: PlacementSettings) -> None:
    """It counts where nothing else says what is read; beside something else it would be ignored."""
    spec = cfg.placement
    if spec.activations is not None:
        other = "placement.activations, which are counted already"
    elif cfg.predictor.name != "none":
        other = f"predictor={cfg.predictor.name}, which says what is read"
    elif cfg.ffn.name != "oracle" and open_gguf(catalogue.resolve(cfg.model.path)).magic == POWERINFER_MAGIC:
        other = "the predictors of a PowerInfer file, which say what is read"
    else:
        return
    raise UserError(f"placement.active_share={spec.active_share} does nothing beside {other}: leave one of them out")


def _companion(cfg: PlacementSettings) -> Path | None:
    """Counts that travel with the model, as its file has it."""
    return None if cfg.model.overrides() else catalogue.companion(cfg.model.path, "activations")


def activations_of_run(cfg: PlacementSettings, f: GGUFFile, config: ModelConfig, ctx: RunContext) -> ActivationStats:
    """Counts of `placement.activations`, those that travel with the model, or of the run's text.

    Raises:
        UserError: files of another model, or a text that is too short.
    """
    given: str | Path | None = cfg.placement.activations
    if given is None and cfg.predictor.name == "none" and cfg.placement.active_share is None:
        given = _companion(cfg)
        if given is not None:
            ctx.console.print(Text(f"activation counts: {given}", style="dim"))
    if given is None:
        return _counted(cfg, f, ctx)
    read = read_activations if Path(given).is_dir() else load_stats
    return read(given, layers=config.n_layers, d_ff=config.d_ff)


def _counted(cfg: PlacementSettings, f: GGUFFile, ctx: RunContext) -> ActivationStats:
    model = ctx.load(cfg.model, ffn="dense")
    text = text_windows(cfg, model)
    active, params = _rule(cfg, f, model, text)
    with terminal.counting(ctx.console, "counting activations", len(text)) as bar:
        done = lambda count: bar.update(bar.task_ids[0], completed=count)  # noqa: E731 (a name for the line below)
        return profiler.profile(model, text, active, params=params, progress=done)


def _rule(cfg: PlacementSettings, f: GGUFFile, model: Model, text: np.ndarray) -> tuple[profiler.Active, Any]:
    """What counts as read, and parameters to count with: a predictor's choice before what is not zero."""
    ffn = FFN.from_config(model.config, model.kernels)
    if cfg.predictor.name != "none":
        predictor = get_predictor(cfg.predictor.name, ffn, **cfg.predictor.options)
        rows = collect(model, text) if predictor.needs is Needs.TEXT else None
        weights = fit_layers(predictor, model.params.layers, rows)
        return profiler.predicted(predictor), with_weights(model.params, weights)
    if model.config.predictor_ranks and cfg.ffn.name != "oracle":
        return profiler.of_file(f, model, threshold=cfg.ffn.threshold)
    share = cfg.placement.active_share
    return (profiler.nonzero(ffn) if share is None else profiler.largest(ffn, share)), None


def text_windows(cfg: PlacementSettings, model: Model) -> np.ndarray:
    """int32[W, n]: the run's prompts in an order drawn once, cut into windows."""
    length = min(cfg.placement.window, model.config.context_length)
    return windows(_texts(cfg, model.tokenizer), length)[: max(cfg.placement.tokens // length, 1)]


def text_ids(cfg: PlacementSettings, f: GGUFFile, config: ModelConfig) -> np.ndarray:
    """int32[n]: the last window of the run's text, or all of a shorter one; what is decoded fits the context after it.

    Raises:
        UserError: no context is left for it.
    """
    room = config.context_length - cfg.placement.decode
    if room < 2:
        raise UserError(
            f"placement.decode={cfg.placement.decode} leaves no room for a text in a context of "
            f"{config.context_length} tokens; give fewer"
        )
    tokenizer = Tokenizer.from_metadata(f.metadata, where=str(f.path))
    stream = np.concatenate([np.asarray(ids, np.int32) for ids in _texts(cfg, tokenizer)])
    return stream[-min(cfg.placement.window, room) :]


def _texts(cfg: PlacementSettings, tokenizer: Tokenizer) -> list[list[int]]:
    source = cfg.data.prompts()
    order = np.random.default_rng(cfg.seed).permutation(len(source))
    return [tokenizer.encode(source[i].text, add_special=True) for i in order]


def measure_decoding(
    cfg: PlacementSettings, placement: Placement, ids: np.ndarray, ctx: RunContext, *, layers: Placement | None = None
) -> dict[str, Any]:
    """Times of `placement.decode` tokens after `ids`, a trace where there are two devices, and the KL of hot=dense.

    Args:
        cfg: the run.
        placement: the chosen one.
        ids: int32[n], a text.
        ctx: where it runs.
        layers: whole layers within the same budget, the baseline; None is not measured.
    """
    load, named = _loader(cfg, placement, ctx.engine), cfg.placement.devices
    with terminal.busy(ctx.console, f"decoding {cfg.placement.decode} tokens"):
        model = load(1 if named is None else (named[1], named[1]))
        one = _step_seconds(model, ids, cfg.placement.decode)
        tokens = _greedy(model, ids, cfg.placement.decode)
        found: dict[str, Any] = {"ffn": model.ffn, "tokens": tokens}
        if cfg.placement.hot == "dense":
            found["quality"] = asdict(_quality(load(1, hot="masked"), model, ids))
        timing = Timing(one)
        if named is not None or len(jax.devices("cpu")) > 1 or jax.devices()[0].platform != "cpu":
            both = 2 if named is None else tuple(named)
            whole = None
            if layers is not None:
                whole = _step_seconds(load(both, placement=layers), ids, cfg.placement.decode)
            model = load(both)
            timing = _two(model, model.devices, ids, cfg.placement.decode, one, ctx.directory)
            timing = replace(timing, layers=whole)
            found["same_tokens"] = _greedy(model, ids, cfg.placement.decode) == tokens
    ctx.console.print(_measured_table(timing, found))
    return {**found, **asdict(timing), "over_halves": timing.over_halves, "over_layers": timing.over_layers}


def _loader(cfg: PlacementSettings, placement: Placement, engine: Engine) -> Callable[..., Model]:
    def load(
        devices: int | tuple[str, str], *, hot: str = cfg.placement.hot, placement: Placement = placement
    ) -> Model:
        options = {"placement": placement, "hot": hot, "devices": devices, "threshold": cfg.ffn.threshold}
        given = cfg.model.overrides()
        if not isinstance(devices, int) and {name.partition(":")[0] for name in devices} == {"cpu"}:
            given = {"backend": host_kernels().name, **given}
        return engine.load(cfg.model.path, **options, **given)

    return load


def _two(model: Model, two: TwoDevices, ids: np.ndarray, count: int, one: float, directory: Path) -> Timing:
    two.overlap = False
    in_turn = _step_seconds(model, ids, count)
    spans = list[Span]()
    two.watch = lambda *span: spans.append(span)
    _step_seconds(model, ids, count, watched=spans.clear)
    busy = {part: sum(end - begin for name, _, begin, end in spans if name == part) / count for part in _PARTS}
    two.overlap = True
    _step_seconds(model, ids, count, watched=spans.clear)
    waits = {side: seconds / count for side, seconds in waiting(spans).items()}
    files.write_atomically(directory / TRACE_FILE, files.to_json(chrome_trace(spans)))
    two.watch, before = None, dict[str, int]()
    overlapped = _step_seconds(model, ids, count, watched=lambda: before.update(two.crossed.counts()))
    crossed = {side: (nbytes - before[side]) / count for side, nbytes in two.crossed.counts().items()}
    return Timing(one, in_turn, overlapped, busy, waits=waits, crossed=crossed)


def chrome_trace(spans: list[Span]) -> dict[str, object]:
    """Spans (part, layer, begin, end) in the format that chrome://tracing and Perfetto open; a row a device."""
    start = min((begin for _, _, begin, _ in spans), default=0.0)
    events = [
        {"name": f"{part} {layer}", "ph": "X", "pid": 0, "tid": int(part == "cold"),
         "ts": 1e6 * (begin - start), "dur": 1e6 * (end - begin)}
        for part, layer, begin, end in sorted(spans, key=lambda span: span[2])
    ]  # fmt: skip
    names = [{"name": "thread_name", "ph": "M", "pid": 0, "tid": i, "args": {"name": n}}
             for i, n in enumerate(("device 0: attention, hot neurons", "device 1: cold neurons"))]  # fmt: skip
    return {"traceEvents": names + events, "displayTimeUnit": "ms"}


def _step_seconds(model: Model, ids: np.ndarray, count: int, *, watched: Callable[[], None] = lambda: None) -> float:
    """Median seconds of a forward pass of one token with logits, `ids` in the cache; `watched` is called once warm."""
    capacity = model.capacity_for(len(ids) + 1)
    params, cache = model.params_for(capacity), model.new_cache(1, capacity)
    forward = model.devices.jit(
        lambda params, tokens_Bn, cache, *, want: model.forward(params, tokens_Bn, cache, want=want),
        donate_argnums=2, static_argnames="want",
    )  # fmt: skip
    _, cache = forward(params, jnp.asarray(ids[None, :-1]), cache, want=Want("none"))
    cache = cache._replace(length=cache.length + len(ids) - 1)

    def step() -> float:
        nonlocal cache
        begin = time.perf_counter()
        out, cache = forward(params, jnp.asarray(ids[None, -1:]), cache, want=Want())
        out.logits.block_until_ready()
        return time.perf_counter() - begin

    for _ in range(2):
        step()
    watched()
    return median(interleaved({"step": step}, repeats=count, warm_up=0)["step"])


def _greedy(model: Model, ids: np.ndarray, count: int) -> list[int]:
    made = api.generate(model, ids, max_tokens=count, ignore_eos=True)
    return list(made.token_ids)


def _quality(wanted: Model, found: Model, ids: np.ndarray) -> ModelQuality:
    """Laws of the next token, with the predicted hot neurons against all hot neurons."""
    sums = model_sums(jnp.asarray(wanted.logits(ids[:-1])), jnp.asarray(found.logits(ids[:-1])), jnp.asarray(ids[1:]))
    return ModelQuality.from_sums(sums)


def _measured_table(timing: Timing, found: dict[str, Any]) -> Table:
    out = tables.new("measured", "ms a token")
    rows = {"one device": timing.one, "two devices, one after the other": timing.in_turn}
    rows |= {"two devices, overlapped": timing.overlapped, "whole layers offloaded": timing.layers}
    rows |= {f"  {part}, waited for": seconds for part, seconds in (timing.busy or {}).items()}
    for name, seconds in rows.items():
        out.add_row(name, "-" if seconds is None else f"{1e3 * seconds:.3f}")
    if timing.busy is not None:
        out.add_row("overlapped / sum of the halves", f"{timing.over_halves:.2f}")
        for side, seconds in (timing.waits or {}).items():
            out.add_row(f"  {side} device waits for the other", f"{1e3 * seconds:.3f}")
        for side, nbytes in (timing.crossed or {}).items():
            out.add_row(f"  KB that go to the {side} device", f"{nbytes / 1e3:.1f}")
        out.add_row("same tokens on one device and two", "yes" if found["same_tokens"] else "NO")
    if "quality" in found:
        out.add_row("hot=dense (lossy): KL to hot=masked, nats", f"{found['quality']['kl']:.4g}")
    return out


def _summary(chosen: str, found: Mapping[str, Placement], problem: Problem, parts: ModelParts) -> dict[str, Any]:
    """Plain values for the record."""
    return {
        "chosen": chosen,
        "budget_bytes": problem.budget,
        "neuron_budget_bytes": problem.neuron_budget,
        "parts_bytes": parts.in_order(),
        "placements": {name: _values(p, problem) for name, p in found.items()},
    }


def _values(p: Placement, problem: Problem) -> dict[str, object]:
    return {
        "seconds": p.seconds,
        "bound_seconds": p.bound_s,
        "bytes_on_device": p.bytes_on_device,
        "hot_neurons": [int(h.sum()) for h in p.hot],
        "hot_share": p.hot_share(problem),
        "host_layers": sorted(p.host_layers),
    }


def _tables(
    chosen: str, found: Mapping[str, Placement], problem: Problem, parts: ModelParts, pair: Mapping[str, Device]
) -> Iterator[RenderableType]:
    """What a run prints; `pair` is the "hot" and the "cold" device."""
    yield Text("parts of the model, in the order in which they go to the accelerator", style="bold")
    yield _parts(problem, parts)
    yield Text("expected time of a token; the chosen rule is bold", style="bold")
    yield by_rule(chosen, found, problem)
    rates = {side: f"{d.title}, {d.bandwidth / GIGA:,.0f} GB/s" for side, d in pair.items()}
    on = "; ".join(f"{side}: {rates[side]} ({'measured' if d.measured else 'on paper'})" for side, d in pair.items())
    yield Text(f"devices: {on}")
    yield Text(
        "over bound: the time above the least that any choice of neurons has; layers moves whole layers, attention "
        "too, and is not bound by it"
    )
    if chosen == "layers":
        yield Text("chosen: whole layers; a gpuidx file, if one is written, holds the neurons of optimal")


def _parts(problem: Problem, parts: ModelParts) -> Table:
    out, left = tables.new("part", "MiB", "fits"), problem.budget
    for name, size in parts.in_order().items():
        fits = "yes" if size <= left else f"{max(left, 0) / size:.0%}" if name == "neurons" else "no"
        out.add_row(name, f"{size / _MIB:,.2f}", fits)
        left -= size
    out.add_row("budget", f"{problem.budget / _MIB:,.2f}", "")
    return out


def by_rule(chosen: str, found: Mapping[str, Placement], problem: Problem) -> Table:
    """A row a rule."""
    out = tables.new("rule", "ms", "tok/s", "over none", "over bound", "MiB on device", "hot neurons", "hot share")
    slowest, bound = found["none"].seconds, found["optimal"].bound_s
    for name, p in found.items():
        over = "-" if name == "layers" or bound is None else f"+{max(p.seconds / bound - 1, 0):.2%}"
        fits = "" if p.bytes_on_device <= problem.budget else " (over the budget)"
        out.add_row(
            name, f"{1e3 * p.seconds:.4g}", f"{1 / p.seconds:,.1f}", f"{slowest / p.seconds:.2f}x", over,
            f"{p.bytes_on_device / _MIB:,.2f}{fits}", f"{p.hot_neurons:,}", f"{p.hot_share(problem):.1%}",
            style="bold" if name == chosen else None,
        )  # fmt: skip
    return out


def figure(problem: Problem, found: Mapping[str, Placement], *, title: str) -> Figure:
    """How far few neurons go, and which each rule places.

    Rows: the share of a layer's reads that its hottest neurons get, in a hundred steps; its share of neurons, by rule.
    """
    rows: list[Row] = []
    for layer, read in enumerate(problem.read):
        ranked = np.concatenate([[0.0], np.cumsum(np.sort(read)[::-1])])
        held = np.linspace(0, 1, _STEPS + 1)
        reads = np.interp(held, np.linspace(0, 1, len(ranked)), ranked / max(ranked[-1], 1e-12))
        rows += [{"layer": layer, "held": float(x), "reads": float(y)} for x, y in zip(held, reads, strict=True)]
    for name in _DRAWN:
        label = f"{name}, {1e3 * found[name].seconds:.3g} ms"
        rows += [{"layer": i, "rule": label, "placed": float(hot.mean())} for i, hot in enumerate(found[name].hot)]
    caption = "Left: how far few neurons go (darker: later layers). Right: the neurons that each rule places."
    return Figure("placement", title, caption, tuple(rows), partial(_draw, title=title), (11.0, 4.5))


def _draw(canvas: Canvas, rows: Sequence[Row], *, title: str) -> None:
    left, right = canvas.subplots(1, 2)
    last = max(row["layer"] for row in rows)
    for layer in range(last + 1):
        own, shade = [r for r in rows if "held" in r and r["layer"] == layer], 0.25 + 0.6 * layer / max(last, 1)
        left.plot([row["held"] for row in own], [row["reads"] for row in own], color=str(1 - shade), lw=1)
    left.set(xlabel="neurons of a layer, the hottest first", ylabel="share of reads", xlim=(0, 1), ylim=(0, 1.02))
    left.set_title("how far few neurons go (darker: later layers)", fontsize=10)
    for name in dict.fromkeys(row["rule"] for row in rows if "rule" in row):
        right.plot([row["placed"] for row in rows if row.get("rule") == name], marker=".", label=name)
    right.set(xlabel="layer", ylabel="share of neurons on the accelerator", ylim=(-0.02, 1.02))
    right.xaxis.get_major_locator().set_params(integer=True)
    right.legend()
    canvas.suptitle(title)


def sweep_rows(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row a record, by budget: seconds by rule, bound, share of reads that are hot, measured seconds where run."""
    out = []
    for record in found:
        summary = record["summary"]
        placements, measured = summary["placements"], summary.get("measured") or {}
        row = {"budget_mib": summary["budget_bytes"] / _MIB}
        row |= {f"{rule}_s": placements[rule]["seconds"] for rule in _SWEPT_RULES}
        row |= {"bound_s": placements["optimal"]["bound_seconds"], "hot_share": placements["optimal"]["hot_share"]}
        row |= {"neurons_mib": summary["neuron_budget_bytes"] / _MIB}
        row |= {f"measured_{name}_s": measured.get(name) for name in ("one", "overlapped")}
        out.append(row)
    return sorted(out, key=lambda row: row["budget_mib"])


def sweep_table(found: Sequence[dict[str, Any]]) -> Table:
    """A row a budget."""
    times = (f"{rule}, ms" for rule in _SWEPT_RULES)
    out = tables.new("budget, MiB", "for neurons", *times, "bound, ms", "hot share", "over layers", left=())
    for row in sweep_rows(found):
        times = [f"{1e3 * row[f'{rule}_s']:.4g}" for rule in _SWEPT_RULES]
        faster = row["layers_s"] / row["optimal_s"]
        out.add_row(
            f"{row['budget_mib']:,.1f}", f"{row['neurons_mib']:,.1f}", *times, f"{1e3 * row['bound_s']:.4g}",
            f"{row['hot_share']:.1%}", f"{faster:.2f}x",
        )  # fmt: skip
    return out


def show_sweep(directory: Path, found: Sequence[dict[str, Any]], out: Console) -> None:
    """Print the table of a sweep and write CSV and figure into its directory."""
    tables.show(out, sweep_table(found))
    caption = "Expected tokens per second, a line a rule; below: share of the reads that are hot."
    figure = Figure(
        "vram_budget", "expected time by budget", caption, tuple(sweep_rows(found)), _draw_sweep, (7.0, 6.0)
    )
    figure.write(directory)
    out.print(Text(f"expected times; {directory}: {', '.join(figure.files)}", style="dim"), soft_wrap=True)


def _draw_sweep(canvas: Canvas, rows: Sequence[Row]) -> None:
    top, bottom = canvas.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    budget = [row["budget_mib"] for row in rows]
    for rule in _SWEPT_RULES:
        top.plot(budget, [1 / row[f"{rule}_s"] for row in rows], marker=".", label=rule)
    top.plot(budget, [1 / row["bound_s"] for row in rows], ":", color=FAINT, label="bound")
    top.set(ylabel="expected tokens per second", ylim=(0, None))
    top.legend()
    bottom.plot(budget, [row["hot_share"] for row in rows], marker=".")
    bottom.set(xlabel="vram_budget, MiB", ylabel="reads that are hot", ylim=(0, 1.02))
