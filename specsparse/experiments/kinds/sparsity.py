"""`kind: sparsity`: what leaving neurons out costs in quality, and what it gains in speed, at one or more points.

Every point is a predictor with one of its options changed, or a PowerInfer file with another threshold; quality is
judged against the dense model on the same text, speed against it in turn.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from rich.console import Console
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
from specsparse.measure.trials import need_room
from specsparse.models import catalogue
from specsparse.powerinfer.fewer import bytes_read, gated, of_one_set
from specsparse.powerinfer.modes import PREDICTED
from specsparse.predictors import rules
from specsparse.predictors.base import Predictor
from specsparse.predictors.collect import collect, windows
from specsparse.predictors.evaluate import Evaluation, Evaluator, matrices
from specsparse.report import display, figures
from specsparse.report.methods import Setting, word
from specsparse.report.runs import Run
from specsparse.support import tables
from specsparse.support.files import write_atomically
from specsparse.support.interleaved import interleaved
from specsparse.support.options import Count, Range, Size

DEFINITIONS = {
    "kept": "neurons computed / all, over the dense model's residuals on the judged rows",
    "recall": "neurons that are not zero and are kept / those that are not zero",
    "energy": "squares of the kept neurons' activations / squares of all",
    "kl": "mean KL(dense, sparse) of the next token in nats; first half of each window read densely by both",
    "by_bytes": "bytes that a dense step reads / bytes of a sparse one, prediction included; a bound on the speed-up",
    "speedup": "dense seconds per token / sparse ones, decoded in turn after the same prompt",
}
_PROMPT = 64  # tokens of the prompt that is decoded after
_TITLES = (
    "kept", "recall", "energy", "error", "KL, nats", "ppl", "top-1", "by bytes", "tok/s", "speed-up",
    "95 % over repeats",
)  # fmt: skip


@dataclass(frozen=True)
class SparsitySpec:
    """The points, and how they are judged and timed."""

    # option of the predictor, or "threshold" with ffn=powerinfer, that takes each of `values`; without values the
    # config itself is the only point
    vary: str = "share"
    values: tuple[float, ...] = ()
    # instead of values: these predictors beside each other, each with the options of its config file
    predictors: tuple[str, ...] = ()
    recall: float | None = None  # of those that can be set to one (svd, signbit), in place of their threshold
    window: Annotated[int, Range(4)] = 128  # tokens of a piece of text
    judged: Count = 6  # pieces that quality is judged on
    tokens: Size = 64  # to decode for the speed; 0: quality only
    repeats: Count = 3  # of that, with each point in turn


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
            sparse_model.check(point, judged=True)
        cfg.data.prompts()

    def run(self, cfg: SparsitySettings, ctx: RunContext) -> RunResult:
        dense, spec = ctx.load(cfg.model, ffn="dense"), cfg.sparsity
        text = judged_text(cfg.data, spec, dense)
        evaluator, prompt = Evaluator(dense, text), text[:1, :_PROMPT]
        sides, judged = list(sides_of(cfg, ctx, dense, prompt)), list[Evaluation]()
        with ctx.counting("judging", len(sides)) as step:
            for side in sides:
                judged.append(evaluator(side.predictor, side.weights))
                step()
        decoding = [side.model for side in sides if side.model is not None and spec.tokens]
        plain, seconds, taken = None, list[np.ndarray](), None
        if decoding:
            (plain, *seconds), taken = _timed(cfg, ctx, [dense, *decoding], prompt[0].tolist())
        whole, points = dense.footprint.packed, list[Point]()
        ffns = sum(m.nbytes for layer in dense.params.layers for m in matrices(layer))
        for side, quality in zip(sides, judged, strict=True):
            own, following = (0, ffns) if side.model is None else bytes_read(side.model, side.predictor)
            point = Point(side.value, quality, whole / (whole - ffns + own + quality.mean.kept * following))
            if side.model is not None and plain is not None:
                mine = seconds.pop(0)
                own_rate, dense_rate = (1 / float(s.mean()) for s in (mine, plain))
                faster = speedups.speedup(plain.tolist(), mine.tolist(), prompts=[0] * len(mine))
                point = replace(point, tokens_per_second=own_rate, dense_tokens_per_second=dense_rate, speedup=faster)
            points.append(point)
        vary = "predictor" if spec.predictors else spec.vary
        names = ", ".join(dict.fromkeys(p.quality.name for p in points))
        title = f"{cfg.name}: {Path(dense.path).name}, {names} (lossy)"
        summary = {
            "label": "lossy", "vary": vary, "has_zeros": evaluator.ffn.has_zeros,
            "points": [p.to_dict() for p in points], "conditions": taken and taken.to_dict(),
        }  # fmt: skip
        run = Run(ctx.directory, {"summary": summary, "config": {"model": {"path": cfg.model.path}}})
        return RunResult(
            summary,
            points,
            shown=[Text(title, style="bold"), table(summary), *display.condition_lines(taken)],
            figures=[figures.of_sparsity([run], title)],
            definitions={**DEFINITIONS, **conditions.DEFINITIONS},
            objective=-points[-1].quality.model.kl,
        )


class PointModel(NamedTuple):
    """A point before it is judged. `model` decodes with the predictor; None if no model can."""

    value: float | str | None
    predictor: Predictor
    weights: Sequence[Any] | None
    model: Model | None


def sides_of(cfg: SparsitySettings, ctx: RunContext, dense: Model, prompt: np.ndarray) -> Iterator[PointModel]:
    """All points. A predictor that is fitted to a prompt is fitted to `prompt`, int32[1, n]."""
    rows, before = None, None
    values = cfg.sparsity.predictors or cfg.sparsity.values or (None,)
    for value, point in zip(values, settings(cfg), strict=True):
        if point.ffn.name == "powerinfer":
            model, predictor, weights = sparse_model.sparse_of(point, ctx, dense)
            yield PointModel(value, predictor, weights, model)
            continue
        if rows is None and sparse_model.reads_text(sparse_model.predictor_of(point, dense)):
            rows = sparse_model.residuals(point, dense, ctx.console)  # once
        before = sparse_model.fitted(point, ctx, dense, rows=rows, before=before)
        predictor, weights = before
        if isinstance(predictor, rules.Sequence):
            model = of_one_set(dense, predictor, collect(dense, prompt))
        elif isinstance(predictor, rules.Hot):
            assert rows is not None
            model = of_one_set(dense, predictor, rows)
        elif sparse_model.not_decoding(predictor):
            model = None
        else:
            assert weights is not None
            model = gated(dense, predictor, weights, masked=cfg.ffn.masked)
        yield PointModel(value, predictor, weights, model)


def settings(cfg: SparsitySettings) -> list[SparsitySettings]:
    vary, values = cfg.sparsity.vary, cfg.sparsity.values
    if names := cfg.sparsity.predictors:
        chosen = {name: choice_from_file("predictor", name) for name in names}
        for predictor in chosen.values():
            if cfg.sparsity.recall is not None and "recall" in predictor.options:
                predictor.options["recall"] = cfg.sparsity.recall
        return [replace(cfg, predictor=chosen[name]) for name in names]
    if not values:
        return [cfg]
    if cfg.ffn.name == "powerinfer":
        return [replace(cfg, ffn=replace(cfg.ffn, threshold=v)) for v in values]
    each = [replace(cfg.predictor, options={**cfg.predictor.options, vary: v}) for v in values]
    return [replace(cfg, predictor=predictor) for predictor in each]


def judged_text(data: DataSpec, spec: SparsitySpec, model: Model) -> np.ndarray:
    """The windows of the prompts that models are judged on, int32[W, n]."""
    length = min(spec.window, model.config.context_length) // 2 * 2
    return windows([model.tokenizer.encode(p.text, add_special=True) for p in data.prompts()], length)[: spec.judged]


def _timed(cfg: SparsitySettings, ctx: RunContext, sides: list[Model], ids: list[int]) -> tuple[np.ndarray, Conditions]:
    """float64[sides, repeats], seconds per token of each model, interleaved, and their conditions.

    The first side is plain decoding, the first round is not timed.
    """
    repeats, meter = cfg.sparsity.repeats, machine.Meter()
    need_room(sides[0].config, len(ids) + 1, "sparsity.window, or give sparsity.tokens=0")

    def once(model: Model) -> float:
        stats = ctx.engine.generate(model, ids, max_tokens=cfg.sparsity.tokens, ignore_eos=True).stats
        return stats.decode_s / stats.decode_tokens

    works = {i: partial(once, model) for i, model in enumerate(sides)}
    with ctx.counting("timing", len(sides) * (repeats + 1)) as step:
        taken = interleaved(works, repeats=repeats, before=meter.sample, done=step)
    meter.sample()
    timed = np.array(list(taken.values()))
    return timed, meter.conditions(1 / float(timed[0].mean()), timed[0].tolist())


def table(summary: Mapping[str, Any]) -> Table:
    """A row a point under a row of the dense model."""
    points = summary["points"]
    rate = tables.cell(points[0]["dense_tokens_per_second"], ".1f")
    perplexity, whole = tables.cell(points[0]["quality"]["model"]["perplexity_dense"], ".4g"), "100.0%"
    dense = ["dense", whole, whole, whole, "0.000", "0.0000", perplexity, whole, "1.00", rate, "1.00", ""]
    return tables.new(summary["vary"], *_TITLES, rows=[dense, *_rows(summary)], left=(), close=True)


def show_sweep(directory: Path, found: Sequence[Mapping[str, Any]], swept: Sequence[Setting], out: Console) -> None:
    """Prints a row a point of every record and writes them into the directory of the sweep, as a table in Markdown, as
    CSV and as a figure; `swept` is what differs between their configs."""
    varied = any(len(record["summary"]["points"]) > 1 for record in found)
    names = [*(setting.name for setting in swept), *(["value"] if varied else [])]
    rows = (
        [*(Text(setting.values[number]) for setting in swept), *[Text(value)] * varied, *cells]
        for number, record in enumerate(found) for value, *cells in _rows(record["summary"])
    )  # fmt: skip
    made = tables.new(*names, *_TITLES, rows=rows, left=(), close=True)
    tables.show(out, made, names=len(names))
    drawn = figures.of_sparsity([Run(directory, dict(record)) for record in found], str(found[0].get("name", "")))
    drawn.write(directory)
    write_atomically(directory / f"{drawn.name}.md", tables.markdown(made))
    files = ", ".join([*drawn.files, f"{drawn.name}.md"])
    out.print(Text(f"records: {directory}; all of them: {files}", style="dim"), soft_wrap=True)


def _rows(summary: Mapping[str, Any]) -> Iterator[list[str]]:
    """Cells of each point of a record: its value, then the columns of `_TITLES`."""
    cell = tables.cell
    for point in summary["points"]:
        value, faster = point["value"], point["speedup"] or {}
        mean, model = point["quality"]["mean"], point["quality"]["model"]
        recall = mean["recall"] if summary.get("has_zeros") else None  # else that is the kept share
        yield [
            "" if value is None else word(value),
            cell(mean["kept"], ".1%"), cell(recall, ".1%"), cell(mean["energy"], ".1%"), cell(mean["error"], ".3f"),
            cell(model["kl"], ".4f"), cell(model["perplexity"], ".4g"), cell(model["same_top"], ".1%"),
            cell(point["by_bytes"], ".2f"), cell(point["tokens_per_second"], ".1f"),
            cell(faster.get("ratio_of_totals"), ".2f"), intervals.shown(*timing_ends(faster)) if faster else "-",
        ]  # fmt: skip
