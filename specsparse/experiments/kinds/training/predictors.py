"""`kind: train_predictors`: predictors of active neurons from a model and a text, and how good they are."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from specsparse import kernels
from specsparse.engine.config import OVERRIDES, ModelConfig
from specsparse.engine.gguf.reader import open_gguf
from specsparse.engine.model import Model
from specsparse.errors import UserError
from specsparse.experiments.kind import Found, Lab
from specsparse.experiments.kinds.training import predictors_fit as training
from specsparse.experiments.kinds.training.options import Training, TrainSettings
from specsparse.experiments.kinds.training.predictors_report import by_layer, comparison, figure
from specsparse.models import catalogue
from specsparse.predictors import FFN, Needs, get_predictor
from specsparse.predictors.base import Predictor
from specsparse.predictors.collect import collect, windows
from specsparse.predictors.evaluate import Evaluation, Evaluator, fit_layers
from specsparse.predictors.fit_mlp import need_zeros
from specsparse.predictors.scored import settled
from specsparse.support import terminal

DEFINITIONS = {
    "recall": "active neurons that are kept / active neurons, on the dense model's residuals, over all rows",
    "error": "|sparse - dense| / |dense| of the FFN's output without the residual, over all rows",
    "kl": "mean KL(dense, sparse) of the next token's law in nats; first half of each window read densely by both",
}


class TrainPredictors(Training):
    """A predictor of active neurons trained or fitted on text, and judged."""

    def check(self, cfg: TrainSettings) -> None:
        """Names, options, files and prompts."""
        file, any_ffn = open_gguf(catalogue.resolve(cfg.model.path)), FFN(kernels.get(), 1e-5)
        if cfg.predictor.name == "none":
            raise UserError("kind=train_predictors needs a predictor: give predictor=mlp")
        predictor = get_predictor(cfg.predictor.name, any_ffn, **cfg.predictor.options)
        for name in cfg.train.compare:
            get_predictor(name, any_ffn)
        training.options(cfg)
        overrides = {k: v for k, v in cfg.model.overrides().items() if k in OVERRIDES}
        config = ModelConfig.from_gguf(file, overrides=overrides)
        if predictor.needs is Needs.TRAINING and not config.predictor_ranks:
            need_zeros(FFN.from_config(config, any_ffn.kernels), cfg.train.active_share)
        cfg.data.prompts()

    def run(self, cfg: TrainSettings, lab: Lab) -> Found:
        """Collects, trains or fits, judges. Training goes on where it was stopped.

        The predictors of a PowerInfer file are judged as they are.

        Raises:
            UserError: a text that is too short, a model without dense matrices, another run's output directory.
        """
        console = lab.console
        model = lab.load(cfg.model, ffn="dense")
        text, judged = split(cfg, model)
        evaluator = Evaluator(model, judged)
        predictor = get_predictor(cfg.predictor.name, evaluator.ffn, **cfg.predictor.options)
        notes: dict[str, object] = {}
        if predictor.needs is Needs.TRAINING and model.config.predictor_ranks:
            weights, rows = tuple(layer.sparse for layer in model.params.layers), None
            console.print(Text("the file has predictors of its own: they are judged, nothing is trained", style="dim"))
        elif predictor.needs is Needs.TRAINING:
            predictor, codes = settled(predictor, model.params.layers[0])
            weights, rows, notes = training.trained(cfg, model, evaluator.ffn, text, console, codes=codes)
        else:
            rows = None if predictor.needs is not Needs.TEXT else _collected(model, text, console)
            weights = None if predictor.needs is Needs.PROMPT else fit_layers(predictor, model.params.layers, rows)
        found = [_judged(evaluator, predictor, weights, console)]
        for other in rivals(cfg, evaluator.ffn, found[0]):
            if other.needs is Needs.TEXT and rows is None:
                rows = _collected(model, text, console)
            own = None if other.needs is Needs.PROMPT else fit_layers(other, model.params.layers, rows)
            found.append(_judged(evaluator, other, own, console))
        return _found(cfg, found, notes)


def _found(cfg: TrainSettings, found: list[Evaluation], notes: dict[str, object]) -> Found:
    first = found[0]
    shares = "bytes and time of one token as shares of the dense FFN's (own: the prediction alone)"
    return Found(
        {"evaluations": [asdict(e) for e in found], "label": "lossy", **notes},
        tuple(found),
        shown=[
            Text(f"{first.name}, layer by layer", style="bold"),
            by_layer(first),
            Text(f"all layers; {shares}", style="bold"),
            comparison(found),
            Text(f"dense perplexity {first.model.perplexity_dense:.2f} on {first.model.tokens} tokens; lossy"),
        ],
        figures=[figure(found, title=f"{cfg.name}: {Path(cfg.model.path).name}")],
        definitions=DEFINITIONS,
        objective=-first.model.kl,
    )


def split(cfg: TrainSettings, model: Model) -> tuple[np.ndarray, np.ndarray]:
    """Windows int32[W, n] to fit on and windows to judge on, from prompts in an order drawn once.

    Raises:
        UserError: too little text for both.
    """
    source = cfg.data.prompts()
    order = np.random.default_rng(cfg.seed).permutation(len(source))
    texts = [model.tokenizer.encode(source[i].text, add_special=True) for i in order]
    window = min(cfg.train.window, model.config.context_length) // 2 * 2
    cut = windows(texts, window)
    fit = min(len(cut) - cfg.train.judged, -(-cfg.train.tokens // window))
    if fit < 1:
        raise UserError(
            f"the text fills {len(cut)} windows of {window} tokens and {cfg.train.judged} are to be judged: give more "
            "text (data.source), a smaller train.window or fewer train.judged"
        )
    return cut[:fit], cut[len(cut) - cfg.train.judged :]


def rivals(cfg: TrainSettings, ffn: FFN, first: Evaluation) -> list[Predictor]:
    """`train.compare` without the predictor itself: at its recall where zeros define one, else at its kept share."""
    out = []
    for name in cfg.train.compare:
        given: dict[str, object] = {}
        if name in ("svd", "signbit"):
            if not ffn.has_zeros:
                continue  # they guess the sign of the gate, which says little where no neuron is zero
            given = {"recall": min(max(first.mean.recall, 1e-3), 1.0)}
        if name == "svd":
            given["rank"] = max(training.options(cfg).rank // 2, 1)
        if name in ("gate_threshold", "random", "sequence", "teal"):
            given = {"share": min(max(first.mean.kept, 1e-3), 1.0)}
        rival = get_predictor(name, ffn, **given)
        if rival.name != first.name and rival.needs is not Needs.TRAINING:
            out.append(rival)
    return out


def _collected(model: Model, text: np.ndarray, console: Console) -> np.ndarray:
    with terminal.counting(console, "reading text", len(text)) as bar:
        return collect(model, text, progress=lambda done: bar.update(bar.task_ids[0], completed=done))


def _judged(evaluator: Evaluator, predictor: Predictor, weights: Sequence[Any] | None, console: Console) -> Evaluation:
    with terminal.counting(console, f"judging {predictor.name}", len(evaluator.windows_Wn)) as bar:
        return evaluator(predictor, weights, progress=lambda done: bar.update(bar.task_ids[0], completed=done))
