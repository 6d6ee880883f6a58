"""`kind: placement`: which neurons belong on the accelerator, by every rule, and the time a token expected of each.

Activations are read or counted, every rule places, the chosen placement is carried out on one device and on two. Of a
model with experts those are placed, by how often rows of the text choose them; it is not carried out.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure as Canvas
from rich.console import Console, RenderableType
from rich.text import Text

from specsparse import api, kernels
from specsparse.data import devices
from specsparse.data.devices import GIGA
from specsparse.engine.config import ModelConfig
from specsparse.engine.gguf.reader import GGUFFile
from specsparse.engine.llama import Want
from specsparse.engine.model import Model
from specsparse.engine.text.tokenizer import Tokenizer
from specsparse.errors import UserError, refuse
from specsparse.experiments.kind import Kind, RunContext, RunResult, header_of
from specsparse.experiments.settings import ModelSettings
from specsparse.experiments.sparse_model import collected, shuffled_text
from specsparse.experiments.trackers.base import Series
from specsparse.measure import machine
from specsparse.measure.conditions import Conditions
from specsparse.measure.costs.roofline import get_device
from specsparse.measure.costs.unions import of_text
from specsparse.models import catalogue
from specsparse.powerinfer import placement, profiler
from specsparse.powerinfer.hot_cold import Span, TwoDevices, host_kernels, waiting
from specsparse.powerinfer.placement import GRANULARITY, RULES, Hardware, ModelParts, Placement, Problem
from specsparse.powerinfer.profiler import ActivationStats, probabilities, read_activations
from specsparse.predictors import FFN, Needs, get_predictor
from specsparse.predictors.collect import windows
from specsparse.predictors.evaluate import ModelQuality, fit_layers, model_sums, with_weights
from specsparse.report import display
from specsparse.report.plots import FAINT, Figure, Row, Rows
from specsparse.support import files, tables, terminal
from specsparse.support.interleaved import interleaved
from specsparse.support.options import Count, Positive, Range, Share, Size

STATS_FILE, STATS_FOLDER = "activations.safetensors", "activation"
WITH_FILE = ("optimal", "powerinfer")
"""Rules whose placement is kept in a gpuidx file."""
FILE = "file"
"""In place of a rule: a gpuidx file that holds another placement than the rule makes, such as PowerInfer's own."""
DEFINITIONS = {
    "seconds": "expected for a forward pass: sum over layers of max(hot, cold) or, without overlap, their sum",
    "bound": "no choice of neurons at this granularity and budget has a smaller expected time; whole layers may have",
    "waits": "seconds a token that a device waits for the other's part of an FFN, where a layer has both",
    "crossed": "bytes a token that go to the device of the hot and to that of the cold neurons; no weights",
    "hot_share": "neurons read from the accelerator / neurons read, by the counted activations",
    "hot_neurons": "on the accelerator, by layer; of a model with experts its experts",
    "row_seconds": "expected for a forward pass of so many rows, were rows independent; of the same placement",
}
COUNTED = Series("activations", "window")
TRACE_FILE = "trace.json"
_DRAWN = ("optimal", "powerinfer", "layers")
_SWEPT_RULES = (*_DRAWN, "none")
_STEPS = 100
_ROWS = (1, 2, 4, 8)
_MIB = 1 << 20


@dataclass(frozen=True)
class PlacementSpec:
    """The rule, and what is counted and assumed for it; see `conf/placement`."""

    rule: Literal["optimal", "powerinfer", "layers", "none"] = "optimal"
    hot: Literal["masked", "dense"] = "masked"
    granularity: Count | None = None
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
    """The group, and options by PowerInfer's names."""

    placement: PlacementSpec = PlacementSpec()
    vram_budget: Annotated[float, Range(0)] | None = None  # GiB of the accelerator; None is what there is
    n_gpu_layers: Size | None = None  # whole layers on it; None is what fits
    reset_gpu_index: bool = False
    disable_gpu_index: bool = False


@dataclass(frozen=True)
class Placed:
    """The placement by each rule, the chosen rule, the gpuidx file that a run would use, and the chosen placement's
    timings with their conditions."""

    chosen: str
    found: dict[str, Placement]
    gpu_index: placement.RunPlacement | None
    measured: dict[str, Any] | None = None
    conditions: Conditions | None = None

    @property
    def as_promised(self) -> bool:
        """False if two devices wrote other tokens than one."""
        return self.measured is None or self.measured.get("same_tokens", True)


class Place(Kind[PlacementSettings]):
    """Chooses the neurons for the accelerator and predicts the time of a token."""

    def check(self, cfg: PlacementSettings) -> None:
        spec, (_, config) = cfg.placement, header_of(cfg.model)
        for name in (spec.hot_device, spec.cold_device):
            devices.known(name)
        of_neurons = {
            "placement.decode": spec.decode,
            "placement.devices": spec.devices,
            "placement.gpu_index": spec.gpu_index,
            "placement.hot=dense": spec.hot == "dense",
            "placement.active_share": spec.active_share,
            "reset_gpu_index": cfg.reset_gpu_index,
            "disable_gpu_index": cfg.disable_gpu_index,
            f"predictor={cfg.predictor.name}": cfg.predictor.name != "none",
            f"ffn={cfg.ffn.name}": cfg.ffn.name not in (None, "dense"),
        }
        if config.n_experts:
            beyond = "is for neurons, and a placement of experts is not run: leave it out"
            refuse({f"{option} {beyond}": given for option, given in of_neurons.items()})
        given, owners = cfg.disable_gpu_index or cfg.reset_gpu_index, " and ".join(WITH_FILE)
        flag = "disable_gpu_index" if cfg.disable_gpu_index else "reset_gpu_index"
        path, share, named = spec.activations, spec.active_share, cfg.predictor.name != "none"
        own_predictors = config.predictor_ranks and cfg.ffn.name != "oracle"
        read_by = {
            "placement.activations, which are counted already": path is not None,
            f"predictor={cfg.predictor.name}, which says what is read": named,
            "the predictors of a PowerInfer file, which say what is read": own_predictors,
        }
        other = next((what for what, holds in read_by.items() if holds and share is not None), None)
        refuse({
            "placement.devices names two, as [cuda:0, cpu], and needs placement.decode=32, which runs on them":
                spec.devices is not None and (len(spec.devices) != 2 or not spec.decode),
            f"n_gpu_layers={cfg.n_gpu_layers} belongs to placement=layers, not to placement={spec.rule}":
                cfg.n_gpu_layers is not None and spec.rule != "layers",
            f"{flag}=true does nothing with placement={spec.rule}: it belongs to {owners}":
                given and spec.rule not in WITH_FILE,
            "disable_gpu_index=true reads no file, and reset_gpu_index=true writes one: give one of them":
                cfg.disable_gpu_index and cfg.reset_gpu_index,
            "model.placement, model.hot and model.devices are for other kinds: here placement.* says it":
                cfg.model.placement or cfg.model.hot or cfg.model.devices,
            f"placement.activations={path}: no such file or directory of activation counts":
                path is not None and not Path(path).exists(),
            f"placement.active_share={share} does nothing beside {other}: leave one of them out": other,
        })  # fmt: skip
        counted = path is not None or _companion(cfg) is not None or config.n_experts
        if share is None and not named and not counted and not own_predictors:
            profiler.nonzero(FFN.from_config(config, kernels.get()))
        if named:
            needs = get_predictor(cfg.predictor.name, FFN(kernels.get(), 1e-5), **cfg.predictor.options).needs
            instead = "use a PowerInfer file, or predictor=gate_threshold, svd or signbit"
            refuse({
                f"predictor={cfg.predictor.name} needs {needs.value}, which a placement cannot give it; {instead}":
                    needs in (Needs.TRAINING, Needs.PROMPT)
            })  # fmt: skip
        cfg.data.prompts()

    def run(self, cfg: PlacementSettings, ctx: RunContext) -> RunResult:
        """Counts activations, places by every rule, and reads or writes the gpuidx file of the chosen one."""
        directory, spec, micro = ctx.directory, cfg.placement, 1e-6
        f, config = header_of(cfg.model)
        what = "experts" if config.n_experts else "neurons"
        pair = {"hot": get_device(spec.hot_device), "cold": get_device(spec.cold_device)}
        if not spec.decode:  # the devices are measured, and nothing else is timed
            ctx.tracker.follow()
        stats = activations_of_run(cfg, f, config, ctx)
        parts = ModelParts.from_gguf(f, config, context=spec.context, kv_dtype=cfg.model.kv_dtype or "f16")
        hardware = Hardware(
            pair["hot"].bandwidth, pair["cold"].bandwidth, spec.link_gbs * GIGA,
            latency_s=spec.latency_us * micro, call_s=spec.call_us * micro, overlap=spec.overlap,
        )  # fmt: skip
        budget = budget_bytes(cfg, parts)

        def passes(rows: int) -> Problem:
            return parts.problem(
                config, probabilities(stats, rows=rows), budget=budget, hardware=hardware, rows=rows,
                dense_hot=spec.hot == "dense", granularity=spec.granularity or (1 if config.n_experts else GRANULARITY),
            )  # fmt: skip

        problem = passes(spec.rows)
        chosen = by_neuron = "none" if cfg.disable_gpu_index else spec.rule
        solve = {**RULES, "layers": partial(placement.layers, n_gpu_layers=cfg.n_gpu_layers)}
        found = {name: rule(problem) for name, rule in solve.items()}
        neurons, whole = found["optimal"], found["layers"]
        if neurons.bytes_on_device > problem.budget or whole.seconds < (1 - 1e-9) * neurons.seconds:
            chosen = "layers" if chosen == "optimal" else chosen  # faster, or the dense parts alone exceed the budget
        index = measured = taken = None
        if spec.rule in WITH_FILE and not config.n_experts:
            beside = placement.path_for(f.path if config.predictor_ranks else directory / f.path.name)
            index = placement.kept_or_solved(
                f, problem, RULES[spec.rule], rule=spec.rule, path=spec.gpu_index or beside,
                reset=cfg.reset_gpu_index, disable=cfg.disable_gpu_index,
            )  # fmt: skip
            if not all(map(np.array_equal, index.index.hot, found[by_neuron].hot)):
                chosen = FILE
                found[FILE] = placement.neurons_placed(FILE, problem, index.index.hot)
        if spec.decode:
            ids, meter = text_ids(cfg, f, config), machine.Meter()
            meter.sample()
            measured = measure_decoding(cfg, found[chosen], ids, ctx, whole_layers=found["layers"])
            meter.sample()
            taken = meter.conditions(1 / measured["one"])
        profiler.save_stats(directory / STATS_FILE, stats)
        profiler.write_activations(directory / STATS_FOLDER, stats)
        problems = {str(rows): passes(rows) for rows in sorted({*_ROWS, spec.rows})}
        row_seconds = {name: {n: p.seconds_of(each) for n, each in problems.items()} for name, p in found.items()}
        result = Placed(chosen, found, index, measured, taken)
        summary = {
            "chosen": chosen,
            "budget_bytes": problem.budget,
            "neuron_budget_bytes": problem.neuron_budget,
            "parts_bytes": parts.in_order(),
            "placements": {
                name: {
                    "seconds": p.seconds,
                    "bound_seconds": p.bound_s,
                    "bytes_on_device": p.bytes_on_device,
                    "hot_neurons": [int(h.sum()) for h in p.hot],
                    "hot_share": p.hot_share(problem),
                    "row_seconds": row_seconds[name],
                    "host_layers": sorted(p.host_layers),
                }
                for name, p in found.items()
            },
            "devices": {side: {"title": d.title, "on_paper": not d.measured} for side, d in pair.items()},
            **({} if index is None else {"gpu_index": index.note}),
            **({} if taken is None else {"measured": measured, "conditions": taken.to_dict()}),
        }
        return RunResult(
            summary,
            result,
            shown=[
                *_tables(result, problem, parts, row_seconds, what=what),
                "devices: " + "; ".join(
                    f"{side}: {d.title}, {d.bandwidth / GIGA:,.0f} GB/s ({'measured' if d.measured else 'on paper'})"
                    for side, d in pair.items()
                ),
                "over bound: the time above the least that any choice of neurons has; layers moves whole layers, "
                "attention too, and is not bound by it",
                *(["chosen: whole layers; a gpuidx file, if one is written, holds the neurons of optimal"]
                  if chosen == "layers" else []),
                *([] if index is None else [index.note]),
                *(["expected times only" + ("" if config.n_experts else ", placement.decode=32 measures")]
                  if measured is None else []),
                *display.condition_lines(taken),
            ],
            figures=[
                figure(problem, found, title=cfg.name, what=what),
                *([Rows("experts", [*expert_rows(stats, found[chosen])])] if config.n_experts else []),
            ],
            files=(STATS_FILE, f"{STATS_FOLDER}/"),
            definitions=DEFINITIONS,
            as_promised=result.as_promised,
            objective=1 / found[chosen].seconds,
        )  # fmt: skip


def budget_bytes(cfg: PlacementSettings, parts: ModelParts) -> int:
    """`vram_budget`, or what an accelerator has free less 256 MiB (PowerInfer's default), or the whole model."""
    if cfg.vram_budget is not None:
        return int(cfg.vram_budget * (1 << 30))
    memory = jax.devices()[0].memory_stats() if jax.default_backend() != "cpu" else None
    if memory and "bytes_limit" in memory:
        return max(memory["bytes_limit"] - memory.get("bytes_in_use", 0) - (256 << 20), 0)
    return sum(parts.in_order().values())


def _companion(cfg: PlacementSettings) -> Path | None:
    """The file of activation counts that comes with the model; None if options change the model."""
    return None if cfg.model.overrides() else catalogue.companion(cfg.model.path, "activations")


def activations_of_run(cfg: PlacementSettings, f: GGUFFile, config: ModelConfig, ctx: RunContext) -> ActivationStats:
    """Counts of `placement.activations`, those that travel with the model, or of the run's text."""
    given: str | Path | None = cfg.placement.activations
    if given is None and cfg.predictor.name == "none" and cfg.placement.active_share is None:
        given = _companion(cfg)
        if given is not None:
            ctx.console.print(Text(f"activation counts: {given}", style="dim"))
    if given is not None:
        return read_activations(given, layers=config.n_layers, d_ff=config.n_experts or config.d_ff)
    model = ctx.load(cfg.model, ffn="dense")
    length = min(cfg.placement.window, model.config.context_length)
    text = windows(shuffled_text(cfg, model.tokenizer), length)[: max(cfg.placement.tokens // length, 1)]
    if config.n_experts:
        counts_LE = np.zeros((config.n_layers, config.n_experts), np.int64)
        with ctx.counting("counting experts", len(text)) as step:
            for ids in text.tolist():
                for counts_E, chosen in zip(counts_LE, np.asarray(of_text(model, ids).experts), strict=True):
                    counts_E += np.bincount(chosen.ravel(), minlength=config.n_experts)
                step()
        return ActivationStats(tuple(counts_LE), text.size)
    ffn, share, params = FFN.from_config(model.config, model.kernels), cfg.placement.active_share, None
    if cfg.predictor.name != "none":
        predictor = get_predictor(cfg.predictor.name, ffn, **cfg.predictor.options)
        rows = collected(model, text, ctx.console) if predictor.needs is Needs.TEXT else None
        params = with_weights(model.params, fit_layers(predictor, model.params.layers, rows))
        active = profiler.predicted(predictor)
    elif model.config.predictor_ranks and cfg.ffn.name != "oracle":
        active, params = profiler.of_file(f, model, threshold=cfg.ffn.threshold)
    else:
        active = profiler.nonzero(ffn) if share is None else profiler.largest(ffn, share)
    with ctx.counting("counting activations", len(text)) as step:

        def progress(done: int, share: float) -> None:
            step(done)
            ctx.tracker.point(COUNTED, {"window": done, "active_share": share})

        return profiler.profile(model, text, active, params=params, progress=progress)


def text_ids(cfg: PlacementSettings, f: GGUFFile, config: ModelConfig) -> np.ndarray:
    """int32[n]: the last window of the run's text, or all of a shorter one. UserError: no context is left for it."""
    room = config.context_length - cfg.placement.decode
    if room < 2:
        raise UserError(
            f"placement.decode={cfg.placement.decode} leaves no room for a text in a context of "
            f"{config.context_length} tokens; give fewer"
        )
    tokenizer = Tokenizer.from_metadata(f.metadata, where=str(f.path))
    stream = np.concatenate([np.asarray(ids, np.int32) for ids in shuffled_text(cfg, tokenizer)])
    return stream[-min(cfg.placement.window, room) :]


def measure_decoding(
    cfg: PlacementSettings, placed: Placement, ids: np.ndarray, ctx: RunContext, *, whole_layers: Placement
) -> dict[str, Any]:
    """Median seconds of a step of decoding after the text `ids` (int32[n]) with the chosen placement, for the record.

    "one" is on one device (the host alone if two are named). If there are two: "in_turn" and "overlapped", "busy" by
    part of the model with each waited for, "layers" with `whole_layers` in the same budget, "waits" and "crossed" as in
    `DEFINITIONS`, and a trace. With hot=dense, the KL to hot=masked.
    """
    named, count = cfg.placement.devices, cfg.placement.decode

    def load(on: int | tuple[str, ...], *, hot: str = cfg.placement.hot, placement: Placement = placed) -> Model:
        options = {"placement": placement, "hot": hot, "devices": on, "threshold": cfg.ffn.threshold}
        given = cfg.model.overrides()
        if not isinstance(on, int) and {name.partition(":")[0] for name in on} == {"cpu"}:
            given = {"backend": host_kernels().name, **given}
        return ctx.engine.load(cfg.model.path, **options, **given)

    def tokens_of(model: Model) -> list[int]:
        return list(api.generate(model, ids, max_tokens=count, ignore_eos=True).token_ids)

    names = ("one", "in_turn", "overlapped", "busy", "layers", "waits", "crossed", "over_halves", "over_layers")
    times: dict[str, Any] = dict.fromkeys(names)
    with terminal.busy(ctx.console, f"decoding {count} tokens"):
        model = load(1 if named is None else (named[1], named[1]))
        times["one"] = _step_seconds(model, ids, count)
        found: dict[str, Any] = {"ffn": model.ffn, "tokens": tokens_of(model)}
        if cfg.placement.hot == "dense":
            exact, next_ids = load(1, hot="masked"), jnp.asarray(ids[1:])
            sums = model_sums(jnp.asarray(exact.logits(ids[:-1])), jnp.asarray(model.logits(ids[:-1])), next_ids)
            found["quality"] = asdict(ModelQuality.from_sums(sums))
        if named is not None or len(jax.devices("cpu")) > 1 or jax.devices()[0].platform != "cpu":
            both = 2 if named is None else tuple(named)
            times["layers"] = _step_seconds(load(both, placement=whole_layers), ids, count)
            model = load(both)
            times |= _two_device_seconds(model, ids, count, ctx.directory)
            times["over_halves"] = times["overlapped"] / sum(times["busy"].values())
            times["over_layers"] = times["layers"] / times["overlapped"]
            found["same_tokens"] = tokens_of(model) == found["tokens"]
    rows = {"one device": times["one"], "two devices, one after the other": times["in_turn"]}
    rows |= {"two devices, overlapped": times["overlapped"], "whole layers offloaded": times["layers"]}
    rows |= {f"  {part}, waited for": seconds for part, seconds in (times["busy"] or {}).items()}
    cells = {name: tables.cell(seconds, ".3f", 1e3) for name, seconds in rows.items()}
    if times["busy"] is not None:
        cells["overlapped / sum of the halves"] = f"{times['over_halves']:.2f}"
        cells |= {f"  {side} device waits for the other": f"{1e3 * s:.3f}" for side, s in times["waits"].items()}
        cells |= {f"  KB that go to the {side} device": f"{n / 1e3:.1f}" for side, n in times["crossed"].items()}
        cells["same tokens on one device and two"] = "yes" if found["same_tokens"] else "NO"
    if "quality" in found:
        cells["hot=dense (lossy): KL to hot=masked, nats"] = f"{found['quality']['kl']:.4g}"
    ctx.console.print(tables.new("measured", "ms a token", rows=cells.items()))
    return {**found, **times}


def _two_device_seconds(model: Model, ids: np.ndarray, count: int, directory: Path) -> dict[str, Any]:
    """The times on the model's two devices, watched and unwatched; writes a trace of the overlapped steps."""
    two, out, spans, before = model.devices, dict[str, Any](), list[Span](), dict[str, int]()
    assert isinstance(two, TwoDevices)
    two.overlap = False
    out["in_turn"] = _step_seconds(model, ids, count)
    two.watch = lambda *span: spans.append(span)
    _step_seconds(model, ids, count, watched=spans.clear)
    parts = ("attention", "cold", "hot")
    out["busy"] = {part: sum(end - begin for name, _, begin, end in spans if name == part) / count for part in parts}
    two.overlap = True
    _step_seconds(model, ids, count, watched=spans.clear)
    out["waits"] = {side: seconds / count for side, seconds in waiting(spans).items()}
    files.write_atomically(directory / TRACE_FILE, files.to_json(chrome_trace(spans)))
    two.watch = None
    out["overlapped"] = _step_seconds(model, ids, count, watched=lambda: before.update(two.crossed))
    out["crossed"] = {side: (nbytes - before[side]) / count for side, nbytes in two.crossed.items()}
    return out


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


def _tables(
    result: Placed, problem: Problem, parts: ModelParts, row_seconds: dict[str, dict[str, float]], *, what: str
) -> Iterator[RenderableType]:
    yield Text("parts of the model, in the order in which they go to the accelerator", style="bold")
    out, left = tables.new("part", "MiB", "fits"), problem.budget
    for name, size in parts.in_order().items():
        fits = "yes" if size <= left else f"{max(left, 0) / size:.0%}" if name == "neurons" else "no"
        out.add_row(name, f"{size / _MIB:,.2f}", fits)
        left -= size
    out.add_row("budget", f"{problem.budget / _MIB:,.2f}", "")
    yield out
    yield Text("expected time of a token; the chosen rule is bold", style="bold")
    out = tables.new("rule", "ms", "tok/s", "over none", "over bound", "MiB on device", f"hot {what}", "hot share")
    slowest, bound = result.found["none"].seconds, result.found["optimal"].bound_s
    for name, p in result.found.items():
        over = "-" if name == "layers" or bound is None else f"+{max(p.seconds / bound - 1, 0):.2%}"
        fits = "" if p.bytes_on_device <= problem.budget else " (over the budget)"
        out.add_row(
            name, f"{1e3 * p.seconds:.4g}", f"{1 / p.seconds:,.1f}", f"{slowest / p.seconds:.2f}x", over,
            f"{p.bytes_on_device / _MIB:,.2f}{fits}", f"{p.hot_neurons:,}", f"{p.hot_share(problem):.1%}",
            style="bold" if name == result.chosen else None,
        )  # fmt: skip
    yield out
    yield Text("expected ms of a pass of n rows", style="bold")
    out = tables.new("rule", *row_seconds[result.chosen])
    for name, by_rows in row_seconds.items():
        cells = (f"{1e3 * seconds:.4g}" for seconds in by_rows.values())
        out.add_row(name, *cells, style="bold" if name == result.chosen else None)
    yield out


def expert_rows(stats: ActivationStats, placed: Placement) -> Iterator[Row]:
    """A row an expert: the share of the tokens that chose it, and whether it lies on the accelerator."""
    for layer, (read, hot) in enumerate(zip(probabilities(stats), placed.hot, strict=True)):
        for expert in range(len(read)):
            yield {"layer": layer, "expert": expert, "chosen": float(read[expert]), "hot": bool(hot[expert])}


def figure(problem: Problem, found: dict[str, Placement], *, title: str, what: str) -> Figure:
    """The share of reads that few neurons or experts get, and those that each rule places.

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

    def draw(canvas: Canvas, rows: Sequence[Row]) -> None:
        left, right = canvas.subplots(1, 2)
        last = max(row["layer"] for row in rows)
        for layer in range(last + 1):
            own, shade = [r for r in rows if "held" in r and r["layer"] == layer], 0.25 + 0.6 * layer / max(last, 1)
            left.plot([row["held"] for row in own], [row["reads"] for row in own], color=str(1 - shade), lw=1)
        left.set(xlabel=f"{what} of a layer, the hottest first", ylabel="share of reads", xlim=(0, 1), ylim=(0, 1.02))
        left.set_title(f"how far few {what} go (darker: later layers)", fontsize=10)
        for name in dict.fromkeys(row["rule"] for row in rows if "rule" in row):
            right.plot([row["placed"] for row in rows if row.get("rule") == name], marker=".", label=name)
        right.set(xlabel="layer", ylabel=f"share of {what} on the accelerator", ylim=(-0.02, 1.02))
        right.xaxis.get_major_locator().set_params(integer=True)
        right.legend()
        canvas.suptitle(title)

    caption = f"Left: how far few {what} go (darker: later layers). Right: the {what} that each rule places."
    return Figure("placement", title, caption, tuple(rows), draw, (11.0, 4.5))


def show_sweep(directory: Path, found: Sequence[dict[str, Any]], out: Console) -> None:
    """Print a row a record, by budget, and write the rows as CSV and figure into the directory of the sweep."""
    rows: list[Row] = []
    for summary in (record["summary"] for record in found):
        placements, measured = summary["placements"], summary.get("measured") or {}
        row = {"budget_mib": summary["budget_bytes"] / _MIB}
        row |= {f"{rule}_s": placements[rule]["seconds"] for rule in _SWEPT_RULES}
        row |= {"bound_s": placements["optimal"]["bound_seconds"], "hot_share": placements["optimal"]["hot_share"]}
        row |= {"neurons_mib": summary["neuron_budget_bytes"] / _MIB}
        rows.append(row | {f"measured_{name}_s": measured.get(name) for name in ("one", "overlapped")})
    rows.sort(key=lambda row: row["budget_mib"])
    titles = ("budget, MiB", "for neurons", *(f"{rule}, ms" for rule in _SWEPT_RULES), "bound, ms")
    table = tables.new(*titles, "hot share", "over layers", left=())
    for row in rows:
        times = [f"{1e3 * row[f'{name}_s']:.4g}" for name in (*_SWEPT_RULES, "bound")]
        faster = f"{row['layers_s'] / row['optimal_s']:.2f}x"
        mib = (f"{row[key]:,.1f}" for key in ("budget_mib", "neurons_mib"))
        table.add_row(*mib, *times, f"{row['hot_share']:.1%}", faster)
    tables.show(out, table)

    def draw(canvas: Canvas, rows: Sequence[Row]) -> None:
        top, bottom = canvas.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        budget = [row["budget_mib"] for row in rows]
        for rule in _SWEPT_RULES:
            top.plot(budget, [1 / row[f"{rule}_s"] for row in rows], marker=".", label=rule)
        top.plot(budget, [1 / row["bound_s"] for row in rows], ":", color=FAINT, label="bound")
        top.set(ylabel="expected tokens per second", ylim=(0, None))
        top.legend()
        bottom.plot(budget, [row["hot_share"] for row in rows], marker=".")
        bottom.set(xlabel="vram_budget, MiB", ylabel="reads that are hot", ylim=(0, 1.02))

    caption = "Expected tokens per second, a line a rule; below: share of the reads that are hot."
    figure = Figure("vram_budget", "expected time by budget", caption, tuple(rows), draw, (7.0, 6.0))
    figure.write(directory)
    out.print(Text(f"expected times; {directory}: {', '.join(figure.files)}", style="dim"), soft_wrap=True)
