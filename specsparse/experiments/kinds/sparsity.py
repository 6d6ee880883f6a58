"""`kind: sparsity`: what leaving neurons out costs in quality, and what it gains in speed, at one or more points.

Every point is a predictor with one of its options changed, or a PowerInfer file with another threshold; quality is
judged against the dense model on the same text, speed against it in turn.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from matplotlib.figure import Figure as Canvas
from rich.table import Table
from rich.text import Text

from specsparse.engine.model import Model
from specsparse.errors import refuse
from specsparse.experiments import sparse_model
from specsparse.experiments.kind import Kind, RunContext, RunResult
from specsparse.experiments.settings import DataSpec, ModelSettings, choice_from_file
from specsparse.measure import conditions, intervals, machine, speedups
from specsparse.measure.conditions import Conditions
from specsparse.measure.speedups import Speedup, timing_ends
from specsparse.models import catalogue
from specsparse.powerinfer.fewer import bytes_read
from specsparse.powerinfer.modes import PREDICTED
from specsparse.predictors import Needs, get_predictor
from specsparse.predictors.collect import windows
from specsparse.predictors.evaluate import Evaluation, Evaluator, matrices
from specsparse.report import display
from specsparse.report.methods import Setting
from specsparse.report.plots import FAINT, Figure, Row
from specsparse.support import tables
from specsparse.support.interleaved import interleaved
from specsparse.support.options import Count, Range, Size

DEFINITIONS = {
    "kept": "neurons computed / all, over the dense model's residuals on the judged rows",
    "kl": "mean KL(dense, sparse) of the next token in nats; first half of each window read densely by both",
    "by_bytes": "bytes that a dense step reads / bytes of a sparse one, prediction included; a bound on the speed-up",
    "speedup": "dense seconds per token / sparse ones, decoded in turn after the same prompt",
}
_PROMPT = 64
"""Tokens of the prompt that is decoded after."""
_TITLES = ("kept", "energy", "error", "KL, nats", "ppl", "top-1", "bytes", "by bytes", "tok/s", "speed-up")


@dataclass(frozen=True)
class SparsitySpec:
    """The points, and how they are judged and timed.

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
    sparsity: SparsitySpec = SparsitySpec()


@dataclass(frozen=True)
class Point:
    """One setting: `value` of the option that is varied, or a predictor's name; no speeds if nothing was decoded."""

    value: float | str | None
    quality: Evaluation
    by_bytes: float
    tokens_per_second: float | None = None
    dense_tokens_per_second: float | None = None
    speedup: Speedup | None = None

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "speedup": self.speedup and self.speedup.to_dict()}


class SparsityKind(Kind[SparsitySettings]):
    """What leaving neurons out costs in quality and gains in speed, point by point."""

    def check(self, cfg: SparsitySettings) -> None:
        catalogue.resolve(cfg.model.path)
        ffn, spec = cfg.ffn.name, cfg.sparsity
        refuse({
            "kind=sparsity judges ffn=predicted with a predictor, or ffn=powerinfer with a PowerInfer file":
                ffn not in (PREDICTED, "powerinfer"),
            "ffn=powerinfer has a threshold and nothing else to vary: give sparsity.vary=threshold":
                ffn == "powerinfer" and spec.values and spec.vary != "threshold",
            "sparsity.predictors needs ffn=predicted and no sparsity.values":
                spec.predictors and (spec.values or ffn != PREDICTED),
        })  # fmt: skip
        for point in settings(cfg):
            sparse_model.check(point)
        cfg.data.prompts()

    def run(self, cfg: SparsitySettings, ctx: RunContext) -> RunResult:
        dense, spec = ctx.load(cfg.model, ffn="dense"), cfg.sparsity
        text = judged_text(cfg.data, spec, dense)
        evaluator, judged, sparse, rows = Evaluator(dense, text), [], [], None
        for point in settings(cfg):
            if point.ffn.name == PREDICTED and rows is None:  # calibration text is read once
                predictor = get_predictor(point.predictor.name, evaluator.ffn, **point.predictor.options)
                rows = sparse_model.residuals(point, dense, ctx.console) if predictor.needs is Needs.TEXT else None
            sparse.append(sparse_model.sparse_of(point, ctx, dense, rows=rows))
        with ctx.counting("judging", len(sparse)) as step:
            for one in sparse:
                judged.append(evaluator(one.predictor, one.weights))
                step()
        sides, ids = [dense, *(one.model for one in sparse)], text[0, :_PROMPT].tolist()
        seconds, taken = _timed(cfg, ctx, sides, ids) if spec.tokens else (None, None)
        vary, points = "predictor" if spec.predictors else spec.vary, list[Point]()
        whole, values = dense.footprint.packed, spec.predictors or spec.values or (None,)
        rest = whole - sum(m.nbytes for layer in dense.params.layers for m in matrices(layer))
        for i, (value, one, quality) in enumerate(zip(values, sparse, judged, strict=True)):
            own, following = bytes_read(one.model, one.predictor)
            timing: list[Any] = []
            if seconds is not None:
                mine, plain = seconds[i + 1], seconds[0]
                timing = [1 / float(s.mean()) for s in (mine, plain)]
                timing.append(speedups.speedup(plain, mine, prompts=[0] * len(mine)))
            points.append(Point(value, quality, whole / (rest + own + quality.mean.kept * following), *timing))
        names = ", ".join(dict.fromkeys(p.quality.name for p in points))
        title = f"{cfg.name}: {Path(dense.path).name}, {names} (lossy)"
        return RunResult(
            {"label": "lossy", "vary": vary, "points": [p.to_dict() for p in points],
             "conditions": taken and taken.to_dict()},
            points,
            shown=[Text(title, style="bold"), table(points, vary=vary), *display.condition_lines(taken)],
            figures=[figure(points, vary=vary, title=title)],
            definitions={**DEFINITIONS, **conditions.DEFINITIONS},
            objective=-points[-1].quality.model.kl,
        )  # fmt: skip


def settings(cfg: SparsitySettings) -> list[SparsitySettings]:
    vary, values = cfg.sparsity.vary, cfg.sparsity.values
    if names := cfg.sparsity.predictors:
        chosen = {name: choice_from_file("predictor", name) for name in names}
        for predictor in chosen.values():
            if cfg.sparsity.recall is not None and "recall" in predictor.options:
                predictor.options["recall"] = cfg.sparsity.recall
        ffns = {name: replace(cfg.ffn, weights=cfg.ffn.weights if name == "mlp" else None) for name in names}
        return [replace(cfg, predictor=chosen[name], ffn=ffns[name]) for name in names]
    if not values:
        return [cfg]
    if cfg.ffn.name == "powerinfer":
        return [replace(cfg, ffn=replace(cfg.ffn, threshold=v)) for v in values]
    each = [replace(cfg.predictor, options={**cfg.predictor.options, vary: v}) for v in values]
    return [replace(cfg, predictor=predictor) for predictor in each]


def judged_text(data: DataSpec, spec: SparsitySpec, model: Model) -> np.ndarray:
    """int32[W, n]"""
    length = min(spec.window, model.config.context_length) // 2 * 2
    return windows([model.tokenizer.encode(p.text, add_special=True) for p in data.prompts()], length)[: spec.judged]


def _timed(cfg: SparsitySettings, ctx: RunContext, sides: list[Model], ids: list[int]) -> tuple[np.ndarray, Conditions]:
    """float64[sides, repeats], seconds per token of each model, interleaved, and their conditions.

    The first side is plain decoding, the first round is not timed.
    """
    repeats, meter = cfg.sparsity.repeats, machine.Meter()

    def once(model: Model) -> float:
        stats = ctx.engine.generate(model, ids, max_tokens=cfg.sparsity.tokens, ignore_eos=True).stats
        return stats.decode_s / stats.decode_tokens

    works = {i: partial(once, model) for i, model in enumerate(sides)}
    with ctx.counting("timing", len(sides) * (repeats + 1)) as step:
        taken = interleaved(works, repeats=repeats, before=meter.sample, done=step)
    meter.sample()
    timed = np.array(list(taken.values()))
    return timed, meter.conditions(1 / float(timed[0].mean()), timed[0].tolist())


def table(points: Sequence[Point], *, vary: str) -> Table:
    """A row a point under a row of the dense model. Bytes are shares of the dense FFN's, prediction included."""
    out = tables.new(vary, *_TITLES, "95 % over repeats", left=(), close=True)
    quality, rate = points[0].quality.model, tables.cell(points[0].dense_tokens_per_second, ".1f")
    perplexity, whole = f"{quality.perplexity_dense:.2f}", "100.0%"
    out.add_row("dense", whole, whole, "0.000", "0.0000", perplexity, whole, whole, "1.00", rate, "1.00", "")
    for p in points:
        shown = "" if p.value is None else p.value if isinstance(p.value, str) else f"{p.value:g}"
        out.add_row(shown, *_cells(p.to_dict()))
    return out


def sweep_table(records: Sequence[Mapping[str, Any]], swept: Sequence[Setting]) -> Table:
    """A row a point of every record; `swept` is what differs between their configs."""
    out = tables.new(*(setting.name for setting in swept), *_TITLES, "95 % over repeats", left=(), close=True)
    for number, record in enumerate(records):
        for point in record["summary"]["points"]:
            out.add_row(*(Text(setting.values[number]) for setting in swept), *_cells(point))
    return out


def _cells(point: Mapping[str, Any]) -> list[str]:
    quality, faster = point["quality"], point["speedup"]
    mean, model, cost = quality["mean"], quality["model"], quality["cost"]
    share = (cost["predictor_bytes"] + cost["sparse_bytes"]) / cost["dense_bytes"]
    return [
        f"{mean['kept']:.1%}", f"{mean['energy']:.1%}", f"{mean['error']:.3f}", f"{model['kl']:.4f}",
        f"{model['perplexity']:.2f}", f"{model['same_top']:.1%}", f"{share:.1%}", f"{point['by_bytes']:.2f}",
        tables.cell(point["tokens_per_second"], ".1f"), f"{faster['ratio_of_totals']:.2f}" if faster else "-",
        intervals.shown(*timing_ends(faster)) if faster else "-",
    ]  # fmt: skip


def figure(points: Sequence[Point], *, vary: str, title: str) -> Figure:
    """KL, perplexity and speed-up against the share of neurons kept."""
    rows = tuple(
        {vary: p.value, **asdict(p.quality.mean), **asdict(p.quality.model), **asdict(p.quality.cost),
         "by_bytes": p.by_bytes, "tokens_per_second": p.tokens_per_second,
         "dense_tokens_per_second": p.dense_tokens_per_second, "speedup": p.speedup and p.speedup.ratio_of_totals}
        for p in points
    )  # fmt: skip

    def draw(canvas: Canvas, rows: Sequence[Row]) -> None:
        rows = sorted(rows, key=lambda row: row["kept"])
        kept, by_name = [row["kept"] for row in rows], isinstance(rows[0][vary], str)
        line = "" if by_name else "-"  # predictors are no steps of one thing
        kl, perplexity, speed = canvas.subplots(1, 3)
        kl.plot(kept, [row["kl"] for row in rows], marker="o", linestyle=line)
        kl.set(ylabel="KL(dense, sparse), nats", ylim=(0, None))
        perplexity.plot(kept, [row["perplexity"] for row in rows], marker="o", linestyle=line, label="sparse")
        perplexity.axhline(rows[0]["perplexity_dense"], color=FAINT, linestyle="--", label="dense")
        perplexity.set(ylabel="perplexity")
        by_bytes = [row["by_bytes"] for row in rows]
        speed.plot(kept, by_bytes, marker=".", linestyle="" if by_name else "--", label="by bytes")
        if all(row["speedup"] is not None for row in rows):
            speed.plot(kept, [row["speedup"] for row in rows], marker="o", linestyle=line, label="measured")
        speed.axhline(1.0, color=FAINT, linewidth=0.8)
        speed.set(ylabel="speed-up over dense decoding", ylim=(0, None))
        for axes in (kl, perplexity, speed):
            axes.set(xlabel="neurons kept", xlim=(0, 1.02))
        for row in rows if by_name else ():
            kl.annotate(row[vary], (row["kept"], row["kl"]), (4, 4), textcoords="offset points")
        perplexity.legend()
        speed.legend()
        canvas.suptitle(title)

    caption = "Against the dense model; by bytes: the speed-up that the bytes read would give."
    return Figure("sparsity", title, caption, rows, draw, (12.0, 4.0))
