"""`kind: sparsity`: what leaving neurons out costs in quality, and what it gains in speed, at one or more points.

Every point is a predictor with one of its options changed, or a PowerInfer file with another threshold; quality is
judged against the dense model on the same text, speed against it in turn.
"""

import dataclasses
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
from rich.text import Text

from specsparse.engine.model import Model
from specsparse.errors import UserError
from specsparse.experiments import sparse_model
from specsparse.experiments.compose.config import choice_options
from specsparse.experiments.kind import Found, Kind, Lab
from specsparse.experiments.kinds.sparse import sparsity_report
from specsparse.experiments.kinds.sparse.sparsity_report import Point, Sparsity
from specsparse.experiments.methods import gating
from specsparse.experiments.settings import DataSpec, ModelSettings
from specsparse.measure import conditions, machine, speedups
from specsparse.measure.conditions import Conditions
from specsparse.models import catalogue
from specsparse.powerinfer.fewer import bytes_read
from specsparse.powerinfer.modes import PREDICTED
from specsparse.predictors import FFN, Needs, get_predictor
from specsparse.predictors.collect import windows
from specsparse.predictors.evaluate import Evaluation, Evaluator, matrices
from specsparse.report import display
from specsparse.support import terminal
from specsparse.support.files import conf_dir
from specsparse.support.interleaved import interleaved
from specsparse.support.options import Count, Range, Size
from specsparse.support.registry import Choice

DENSE = "dense"
_PROMPT = 64
"""Tokens of the prompt that is decoded after."""
DEFINITIONS = {
    "kept": "neurons computed / all, over the dense model's residuals on the judged rows",
    "kl": "mean KL(dense, sparse) of the next token's law in nats; first half of each window read densely by both",
    "by_bytes": "bytes that a dense step reads / bytes of a sparse one, prediction included; a bound on the speed-up",
    "speedup": "dense seconds per token / sparse ones, decoded in turn after the same prompt",
}


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

    def run(self, cfg: SparsitySettings, lab: Lab) -> Found:
        """Judges and times every point.

        Raises:
            UserError: a text that is too short, or a mistake in the model file.
        """
        dense = lab.load(cfg.model, ffn=DENSE)
        text = judged_text(cfg.data, cfg.sparsity, dense)
        evaluator, judged = Evaluator(dense, text), []
        sparse = _sparse(cfg, lab, dense)
        with terminal.counting(lab.console, "judging", len(sparse)) as bar:
            for one in sparse:
                judged.append(evaluator(one.predictor, one.weights))
                bar.advance(bar.task_ids[0])
        sides, ids = [dense, *(one.model for one in sparse)], text[0, :_PROMPT].tolist()
        seconds, taken = _timed(cfg, lab, sides, ids) if cfg.sparsity.tokens else (None, None)
        return _found(cfg, dense, Sparsity(tuple(_points(cfg, dense, sparse, judged, seconds)), taken))


def _found(cfg: SparsitySettings, dense: Model, result: Sparsity) -> Found:
    points, vary = result.points, "predictor" if cfg.sparsity.predictors else cfg.sparsity.vary
    title = f"{cfg.name}: {Path(dense.path).name}, {', '.join(dict.fromkeys(p.quality.name for p in points))} (lossy)"
    summary = {
        "label": "lossy",
        "vary": vary,
        "points": [p.to_dict() for p in points],
        "conditions": result.conditions and result.conditions.to_dict(),
    }
    table = sparsity_report.table(points, vary=vary)
    return Found(
        summary,
        result,
        shown=[Text(title, style="bold"), table, *display.condition_lines(result.conditions)],
        figures=[sparsity_report.figure(points, vary=vary, title=title)],
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


def _sparse(cfg: SparsitySettings, lab: Lab, dense: Model) -> list[gating.GatedModel]:
    """The sparse model of every point; calibration text is read once."""
    rows, found = None, []
    for point in settings(cfg):
        if point.ffn.name == PREDICTED and rows is None:
            ffn = FFN.from_config(dense.config, dense.kernels)
            kind = get_predictor(point.predictor.name, ffn, **point.predictor.options)
            rows = gating.residuals(point, dense, lab.console) if kind.needs is Needs.TEXT else None
        found.append(gating.sparse_of(point, lab, dense, rows=rows))
    return found


def _timed(cfg: SparsitySettings, lab: Lab, sides: list[Model], ids: list[int]) -> tuple[np.ndarray, Conditions]:
    """float64[sides, repeats], seconds per token of each model in turn, and what they were taken at.

    The first side is plain decoding, the first round is not timed.
    """
    repeats, meter = cfg.sparsity.repeats, machine.Meter()

    def once(model: Model) -> float:
        stats = lab.engine.generate(model, ids, max_tokens=cfg.sparsity.tokens, ignore_eos=True).stats
        return stats.decode_s / stats.decode_tokens

    with terminal.counting(lab.console, "timing", len(sides) * (repeats + 1)) as bar:
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
