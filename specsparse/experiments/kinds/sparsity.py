"""`kind: sparsity`: what leaving neurons out costs in quality, and what it gains in speed, at one or more points.

Every point is a predictor with one of its options changed, or a PowerInfer file with another threshold; quality is
judged against the dense model on the same text, speed against it in turn.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from matplotlib.figure import Figure as Canvas
from rich.table import Table
from rich.text import Text

from specsparse.engine.model import Model
from specsparse.errors import UserError
from specsparse.experiments import sparse_model
from specsparse.experiments.compose.config import choice_options
from specsparse.experiments.kind import Kind, RunContext, RunResult
from specsparse.experiments.methods import gating
from specsparse.experiments.settings import DataSpec, ModelSettings
from specsparse.measure import conditions, intervals, machine, speedups
from specsparse.measure.conditions import Conditions
from specsparse.measure.speedups import Speedup, timing_ends
from specsparse.models import catalogue
from specsparse.powerinfer.fewer import bytes_read
from specsparse.powerinfer.modes import PREDICTED
from specsparse.predictors import FFN, Needs, get_predictor
from specsparse.predictors.collect import windows
from specsparse.predictors.evaluate import Evaluation, Evaluator, matrices
from specsparse.report import display
from specsparse.report.methods import Setting
from specsparse.report.plots import FAINT, Figure, Row
from specsparse.support import tables, terminal
from specsparse.support.files import conf_dir
from specsparse.support.interleaved import interleaved
from specsparse.support.options import Count, Range, Size
from specsparse.support.registry import Choice

DENSE = "dense"
_PROMPT = 64
"""Tokens of the prompt that is decoded after."""
DEFINITIONS = {
    "kept": "neurons computed / all, over the dense model's residuals on the judged rows",
    "kl": "mean KL(dense, sparse) of the next token in nats; first half of each window read densely by both",
    "by_bytes": "bytes that a dense step reads / bytes of a sparse one, prediction included; a bound on the speed-up",
    "speedup": "dense seconds per token / sparse ones, decoded in turn after the same prompt",
}
_TITLES = (
    "kept", "energy", "error", "KL, nats", "ppl", "top-1", "bytes", "by bytes", "tok/s", "speed-up",
    "95 % over repeats",
)  # fmt: skip


@dataclass(frozen=True)
class SparsitySpec:
    """What `kind: sparsity` judges and times.

    Attributes:
        vary: option of the predictor, or "threshold" with ffn=powerinfer, that takes each of `values`; without values
            the config itself is the only point.
        predictors: instead of values: these predictors beside each other, each with the options of its config file.
        recall: of those that can be set to one (svd, signbit), in place of their threshold.
        window, judged: tokens of a piece of text, and pieces that quality is judged on.
        tokens, repeats: to decode for the speed, with each point in turn; 0: quality only.
    """

    vary: str = "share"
    values: tuple[float, ...] = ()
    predictors: tuple[str, ...] = ()
    recall: float | None = None
    window: Annotated[int, Range(4)] = 128
    judged: Count = 6
    tokens: Size = 64
    repeats: Count = 3


@dataclass(frozen=True, kw_only=True)
class SparsitySettings(ModelSettings):
    """What `kind: sparsity` reads of a config."""

    sparsity: SparsitySpec = SparsitySpec()


@dataclass(frozen=True)
class Point:
    """One setting.

    Attributes:
        value: what was varied: an option's value or a predictor's name; None where nothing was.
        quality: against the dense model.
        by_bytes: the speed-up that bytes would give.
        tokens_per_second, dense_tokens_per_second, speedup: None where nothing was decoded.
    """

    value: float | str | None
    quality: Evaluation
    by_bytes: float
    tokens_per_second: float | None = None
    dense_tokens_per_second: float | None = None
    speedup: Speedup | None = None

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return {**asdict(self), "speedup": None if self.speedup is None else self.speedup.to_dict()}


@dataclass(frozen=True)
class Sparsity:
    """All points, in the order of the config, and what they were taken at, in turn; None where nothing was timed."""

    points: tuple[Point, ...]
    conditions: Conditions | None = None


class SparsityKind(Kind[SparsitySettings]):
    """What leaving neurons out costs in quality and gains in speed, point by point."""

    def check(self, cfg: SparsitySettings) -> None:
        """Names, options, files and prompts."""
        catalogue.resolve(cfg.model.path)
        if cfg.ffn.name not in (PREDICTED, "powerinfer"):
            raise UserError(
                "kind=sparsity judges ffn=predicted with a predictor, or ffn=powerinfer with a PowerInfer file"
            )
        if cfg.ffn.name == "powerinfer" and cfg.sparsity.values and cfg.sparsity.vary != "threshold":
            raise UserError("ffn=powerinfer has a threshold and nothing else to vary: give sparsity.vary=threshold")
        if cfg.sparsity.predictors and (cfg.sparsity.values or cfg.ffn.name != PREDICTED):
            raise UserError("sparsity.predictors needs ffn=predicted and no sparsity.values")
        for point in settings(cfg):
            sparse_model.check(point)
        cfg.data.prompts()

    def run(self, cfg: SparsitySettings, ctx: RunContext) -> RunResult:
        """Judges and times every point.

        Raises:
            UserError: a text that is too short, or a mistake in the model file.
        """
        dense = ctx.load(cfg.model, ffn=DENSE)
        text = judged_text(cfg.data, cfg.sparsity, dense)
        evaluator, judged = Evaluator(dense, text), []
        sparse = _sparse(cfg, ctx, dense)
        with terminal.counting(ctx.console, "judging", len(sparse)) as bar:
            for one in sparse:
                judged.append(evaluator(one.predictor, one.weights))
                bar.advance(bar.task_ids[0])
        sides, ids = [dense, *(one.model for one in sparse)], text[0, :_PROMPT].tolist()
        seconds, taken = _timed(cfg, ctx, sides, ids) if cfg.sparsity.tokens else (None, None)
        return _found(cfg, dense, Sparsity(tuple(_points(cfg, dense, sparse, judged, seconds)), taken))


def _found(cfg: SparsitySettings, dense: Model, result: Sparsity) -> RunResult:
    points, vary = result.points, "predictor" if cfg.sparsity.predictors else cfg.sparsity.vary
    title = f"{cfg.name}: {Path(dense.path).name}, {', '.join(dict.fromkeys(p.quality.name for p in points))} (lossy)"
    summary = {
        "label": "lossy",
        "vary": vary,
        "points": [p.to_dict() for p in points],
        "conditions": result.conditions and result.conditions.to_dict(),
    }
    shown_points = table(points, vary=vary)
    return RunResult(
        summary,
        result,
        shown=[Text(title, style="bold"), shown_points, *display.condition_lines(result.conditions)],
        figures=[figure(points, vary=vary, title=title)],
        definitions={**DEFINITIONS, **conditions.DEFINITIONS},
        objective=-points[-1].quality.model.kl,
    )


def settings(cfg: SparsitySettings) -> list[SparsitySettings]:
    """The config of each point."""
    vary, values = cfg.sparsity.vary, cfg.sparsity.values
    if cfg.sparsity.predictors:
        return [_with_predictor(cfg, name) for name in cfg.sparsity.predictors]
    if not values:
        return [cfg]
    if cfg.ffn.name == "powerinfer":
        return [dataclasses.replace(cfg, ffn=dataclasses.replace(cfg.ffn, threshold=v)) for v in values]
    options = cfg.predictor.options
    each = [dataclasses.replace(cfg.predictor, options={**options, vary: v}) for v in values]
    return [dataclasses.replace(cfg, predictor=predictor) for predictor in each]


def _with_predictor(cfg: SparsitySettings, name: str) -> SparsitySettings:
    """The config with that predictor, its options those of its choice in the config group."""
    given = choice_options(conf_dir() / "predictor" / f"{name}.yaml")
    if cfg.sparsity.recall is not None and "recall" in given:
        given["recall"] = cfg.sparsity.recall
    weights = cfg.ffn.weights if name == "mlp" else None
    return dataclasses.replace(cfg, predictor=Choice(name, given), ffn=dataclasses.replace(cfg.ffn, weights=weights))


def judged_text(data: DataSpec, spec: SparsitySpec, model: Model) -> np.ndarray:
    """int32[W, n] of the run's prompts."""
    found = data.prompts()
    length = min(spec.window, model.config.context_length) // 2 * 2
    return windows([model.tokenizer.encode(p.text, add_special=True) for p in found], length)[: spec.judged]


def _sparse(cfg: SparsitySettings, ctx: RunContext, dense: Model) -> list[gating.GatedModel]:
    """The sparse model of every point; calibration text is read once."""
    rows, found = None, []
    for point in settings(cfg):
        if point.ffn.name == PREDICTED and rows is None:
            ffn = FFN.from_config(dense.config, dense.kernels)
            kind = get_predictor(point.predictor.name, ffn, **point.predictor.options)
            rows = gating.residuals(point, dense, ctx.console) if kind.needs is Needs.TEXT else None
        found.append(gating.sparse_of(point, ctx, dense, rows=rows))
    return found


def _timed(cfg: SparsitySettings, ctx: RunContext, sides: list[Model], ids: list[int]) -> tuple[np.ndarray, Conditions]:
    """float64[sides, repeats], seconds per token of each model in turn, and what they were taken at.

    The first side is plain decoding, the first round is not timed.
    """
    repeats, meter = cfg.sparsity.repeats, machine.Meter()

    def once(model: Model) -> float:
        stats = ctx.engine.generate(model, ids, max_tokens=cfg.sparsity.tokens, ignore_eos=True).stats
        return stats.decode_s / stats.decode_tokens

    with terminal.counting(ctx.console, "timing", len(sides) * (repeats + 1)) as bar:
        taken = interleaved(
            {i: partial(once, model) for i, model in enumerate(sides)},
            repeats=repeats, before=meter.sample, done=lambda: bar.advance(bar.task_ids[0]),
        )  # fmt: skip
    meter.sample()
    timed = np.array(list(taken.values()))
    return timed, meter.conditions(1 / float(timed[0].mean()), timed[0].tolist())


def _points(
    cfg: SparsitySettings,
    dense: Model,
    sparse: list[gating.GatedModel],
    found: list[Evaluation],
    seconds: np.ndarray | None,
) -> list[Point]:
    values = cfg.sparsity.predictors or cfg.sparsity.values or (None,)
    whole, out = dense.footprint.packed, []
    rest = whole - sum(m.nbytes for layer in dense.params.layers for m in matrices(layer))
    for i, (value, one, quality) in enumerate(zip(values, sparse, found, strict=True)):
        own, following = bytes_read(one.model, one.predictor)
        point = Point(value, quality, whole / (rest + own + quality.mean.kept * following))
        if seconds is not None:
            plain, own = seconds[0], seconds[i + 1]
            faster = speedups.speedup(plain, own, prompts=[0] * len(own))
            rates = 1 / float(own.mean()), 1 / float(plain.mean())
            point = dataclasses.replace(
                point, tokens_per_second=rates[0], dense_tokens_per_second=rates[1], speedup=faster
            )
        out.append(point)
    return out


def table(points: Sequence[Point], *, vary: str) -> Table:
    """A row a point under a row of the dense model. Bytes are shares of the dense FFN's, prediction included."""
    out = tables.new(vary, *_TITLES, left=(), close=True)
    first = points[0]
    dense = ["dense", "100.0%", "100.0%", "0.000", "0.0000", f"{first.quality.model.perplexity_dense:.2f}", "100.0%"]
    out.add_row(*dense, "100.0%", "1.00", _number(first.dense_tokens_per_second, ".1f"), "1.00", "")
    for p in points:
        shown = "" if p.value is None else p.value if isinstance(p.value, str) else f"{p.value:g}"
        out.add_row(shown, *_cells(p.to_dict()))
    return out


def sweep_table(records: Sequence[Mapping[str, Any]], swept: Sequence[Setting]) -> Table:
    """A row a point of every record; `swept` is what differs between their configs."""
    out = tables.new(*(setting.name for setting in swept), *_TITLES, left=(), close=True)
    for number, record in enumerate(records):
        for point in record["summary"]["points"]:
            out.add_row(*(Text(setting.values[number]) for setting in swept), *_cells(point))
    return out


def _cells(point: Mapping[str, Any]) -> list[str]:
    """Of a point as plain values."""
    quality, faster = point["quality"], point["speedup"]
    mean, model, cost = quality["mean"], quality["model"], quality["cost"]
    share = (cost["predictor_bytes"] + cost["sparse_bytes"]) / cost["dense_bytes"]
    return [
        f"{mean['kept']:.1%}", f"{mean['energy']:.1%}", f"{mean['error']:.3f}", f"{model['kl']:.4f}",
        f"{model['perplexity']:.2f}", f"{model['same_top']:.1%}", f"{share:.1%}", f"{point['by_bytes']:.2f}",
        _number(point["tokens_per_second"], ".1f"), f"{faster['ratio_of_totals']:.2f}" if faster else "-",
        intervals.shown(*timing_ends(faster)) if faster else "-",
    ]  # fmt: skip


def _number(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def figure(points: Sequence[Point], *, vary: str, title: str) -> Figure:
    """KL, perplexity and speed-up against the share of neurons kept; a row a point, with every number of it."""
    rows = tuple(
        {vary: p.value, **asdict(p.quality.mean), **asdict(p.quality.model), **asdict(p.quality.cost),
         "by_bytes": p.by_bytes, "tokens_per_second": p.tokens_per_second,
         "dense_tokens_per_second": p.dense_tokens_per_second, "speedup": p.speedup and p.speedup.ratio_of_totals}
        for p in points
    )  # fmt: skip
    caption = "Against the dense model; by bytes: the speed-up that the bytes read would give."
    return Figure("sparsity", title, caption, rows, partial(_draw, vary=vary, title=title), (12.0, 4.0))


def _draw(canvas: Canvas, rows: Sequence[Row], *, vary: str, title: str) -> None:
    rows = sorted(rows, key=lambda row: row["kept"])
    kept, by_name = [row["kept"] for row in rows], isinstance(rows[0][vary], str)
    line = "" if by_name else "-"  # predictors are no steps of one thing
    kl, perplexity, speed = canvas.subplots(1, 3)
    kl.plot(kept, [row["kl"] for row in rows], marker="o", linestyle=line)
    kl.set(ylabel="KL(dense, sparse), nats", ylim=(0, None))
    perplexity.plot(kept, [row["perplexity"] for row in rows], marker="o", linestyle=line, label="sparse")
    perplexity.axhline(rows[0]["perplexity_dense"], color=FAINT, linestyle="--", label="dense")
    perplexity.set(ylabel="perplexity")
    speed.plot(kept, [row["by_bytes"] for row in rows], marker=".", linestyle="" if by_name else "--", label="by bytes")
    if all(row["speedup"] is not None for row in rows):
        speed.plot(kept, [row["speedup"] for row in rows], marker="o", linestyle=line, label="measured")
    speed.axhline(1.0, color=FAINT, linewidth=0.8)
    speed.set(ylabel="speed-up over dense decoding", ylim=(0, None))
    for axes in (kl, perplexity, speed):
        axes.set(xlabel="neurons kept", xlim=(0, 1.02))
    if by_name:
        for row in rows:
            kl.annotate(row[vary], (row["kept"], row["kl"]), (4, 4), textcoords="offset points")
    perplexity.legend()
    speed.legend()
    canvas.suptitle(title)
