"""`kind: train_predictors`: predictors of active neurons from a model and a text, and how good they are.

All layers are trained in a directory that a later run goes on from.
"""

import math
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure as Canvas
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specsparse import kernels
from specsparse.engine.config import OVERRIDES, ModelConfig
from specsparse.engine.gguf.reader import open_gguf
from specsparse.engine.model import Model
from specsparse.errors import UserError
from specsparse.experiments.kind import RunContext, RunResult
from specsparse.experiments.kinds import train_settings
from specsparse.experiments.kinds.train_settings import Training, TrainSettings
from specsparse.models import catalogue
from specsparse.powerinfer.model_files import PredictorFile, write_predictors
from specsparse.predictors import FFN, Needs, get_predictor
from specsparse.predictors.base import Predictor
from specsparse.predictors.collect import collect, windows
from specsparse.predictors.evaluate import Evaluation, Evaluator, LayerQuality, fit_layers
from specsparse.predictors.fit_mlp import FitOptions, LayerTrainer, label, need_zeros, save_predictors
from specsparse.predictors.scored import Codes, MlpWeights, mlp_weights, settled
from specsparse.report.plots import Figure, Row
from specsparse.support import tables, terminal
from specsparse.support.files import load_state, read_tensors, replacing, save_state, write_tensors

DEFINITIONS = {
    "recall": "active neurons that are kept / active neurons, on the dense model's residuals, over all rows",
    "error": "|sparse - dense| / |dense| of the FFN's output without the residual, over all rows",
    "kl": "mean KL(dense, sparse) of the next token in nats; first half of each window read densely by both",
}
PREDICTORS_FILE = "predictors.safetensors"
EXPORT_FOLDER = "powerinfer"
_RESIDUALS, _RUNNING = "residuals.npy", "running.safetensors"


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
        options(cfg)
        overrides = {k: v for k, v in cfg.model.overrides().items() if k in OVERRIDES}
        config = ModelConfig.from_gguf(file, overrides=overrides)
        if predictor.needs is Needs.TRAINING and not config.predictor_ranks:
            need_zeros(FFN.from_config(config, any_ffn.kernels), cfg.train.active_share)
        cfg.data.prompts()

    def run(self, cfg: TrainSettings, ctx: RunContext) -> RunResult:
        """Collects, trains or fits, judges. Training goes on where it was stopped.

        The predictors of a PowerInfer file are judged as they are.

        Raises:
            UserError: a text that is too short, a model without dense matrices, another run's output directory.
        """
        console = ctx.console
        model = ctx.load(cfg.model, ffn="dense")
        text, judged = split(cfg, model)
        evaluator = Evaluator(model, judged)
        predictor = get_predictor(cfg.predictor.name, evaluator.ffn, **cfg.predictor.options)
        notes: dict[str, object] = {}
        if predictor.needs is Needs.TRAINING and model.config.predictor_ranks:
            weights, rows = tuple(layer.sparse for layer in model.params.layers), None
            console.print(Text("the file has predictors of its own: they are judged, nothing is trained", style="dim"))
        elif predictor.needs is Needs.TRAINING:
            predictor, codes = settled(predictor, model.params.layers[0])
            weights, rows, notes = trained(cfg, model, evaluator.ffn, text, console, codes=codes)
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


def _found(cfg: TrainSettings, found: list[Evaluation], notes: dict[str, object]) -> RunResult:
    first = found[0]
    shares = "bytes and time of one token as shares of the dense FFN's (own: the prediction alone)"
    return RunResult(
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
            given["rank"] = max(options(cfg).rank // 2, 1)
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


def options(cfg: TrainSettings) -> FitOptions:
    """The training's own options.

    Raises:
        UserError: an unknown one, or a value of the wrong type or out of range.
    """
    return train_settings.split(cfg, {"own": FitOptions})["own"]


def trained(
    cfg: TrainSettings, model: Model, ffn: FFN, text: np.ndarray, console: Console, *, codes: Codes = "f16"
) -> tuple[tuple[MlpWeights, ...], np.ndarray, dict[str, object]]:
    """Weights of every layer in that type, the residuals f32[L, N, D] they were trained on, and notes for the record.

    Every file appears whole: collected residuals, each finished layer, and the state after each epoch of the layer
    that is being trained.
    """
    folder = Path(cfg.train.output or Path("predictors") / Path(model.path).stem)
    _claim(folder, cfg, model, text)
    rows = _residuals(folder, model, text, console)
    pairs, history = [], []
    with terminal.counting(console, "training layers", model.config.n_layers) as bar:
        for i, layer in enumerate(model.params.layers):
            fc1, fc2, epochs = _layer(folder, cfg, ffn, layer, rows[i], i)
            pairs.append((fc1, fc2))
            history.append(epochs)
            bar.advance(bar.task_ids[0])
    save_predictors(folder / PREDICTORS_FILE, pairs, dtype=np.float16)
    write_predictors(folder / EXPORT_FOLDER, [PredictorFile(fc1, fc2) for fc1, fc2 in pairs], threshold=0.0)
    line = f"predictors: {folder / PREDICTORS_FILE}; for PowerInfer's converter: {folder / EXPORT_FOLDER}"
    console.print(Text(line, style="dim"))
    weights = tuple(mlp_weights(fc1, fc2, codes=codes) for fc1, fc2 in pairs)
    return weights, rows, {"output": str(folder), "epochs": history}


def _claim(folder: Path, cfg: TrainSettings, model: Model, text: np.ndarray) -> None:
    """Makes the directory this run's, or finds that it is already."""
    windows = {"windows": list(text.shape), "sum": int(np.sum(text * (1 + np.arange(text.size).reshape(text.shape))))}
    train_settings.claim(folder, {
        "model": train_settings.identity(model, cfg.model.overrides()),
        "activation": model.config.activation,
        "options": asdict(options(cfg)),
        "active_share": cfg.train.active_share,
        "text": windows,
    })  # fmt: skip


def _residuals(folder: Path, model: Model, text: np.ndarray, console: Console) -> np.ndarray:
    path = folder / _RESIDUALS
    if not path.exists():
        shape = (model.config.n_layers, text.size, model.config.d_model)
        _check_room(folder, 4 * math.prod(shape))
        with replacing(path) as temporary:
            out = np.lib.format.open_memmap(temporary, mode="w+", dtype=np.float32, shape=shape)
            with terminal.counting(console, "reading text", len(text)) as bar:
                collect(model, text, out=out, progress=lambda done: bar.update(bar.task_ids[0], completed=done))
            out.flush()
    return np.load(path, mmap_mode="r")


def _check_room(folder: Path, size: int) -> None:
    """Beforehand: a write into a memory map that the disk cannot hold ends the process."""
    free = shutil.disk_usage(folder).free
    if size > free:
        raise UserError(
            f"{folder}: the residuals take {size >> 20} MiB, {free >> 20} are free; "
            "give fewer train.tokens, or train.output on another disk"
        )


def _layer(
    folder: Path, cfg: TrainSettings, ffn: FFN, layer: Any, rows_ND: np.ndarray, index: int
) -> tuple[np.ndarray, np.ndarray, list[dict[str, Any]]]:
    """fc1, fc2 and the epochs of one layer, from its file where it is finished."""
    path, running = folder / f"layer_{index}.safetensors", folder / _RUNNING
    if path.exists():
        tensors, meta = read_tensors(path)
        return tensors["fc1"], tensors["fc2"], meta["epochs"]
    labels = label(ffn, layer, rows_ND, active_share=cfg.train.active_share)
    trainer = LayerTrainer(options(cfg), layer, rows_ND, labels, index)
    state, epochs = trainer.start(), []
    if running.exists():
        found, meta = load_state(running, state)
        if meta["layer"] == index:
            state, epochs = found, meta["epochs"]
    while not trainer.done(state):
        state, epoch = trainer.step(state)
        epochs.append(asdict(epoch))
        save_state(running, state, {"layer": index, "epochs": epochs})
    fc1, fc2 = trainer.result(state)
    write_tensors(path, {"fc1": fc1, "fc2": fc2}, {"epochs": epochs})
    running.unlink(missing_ok=True)
    return fc1, fc2, epochs


def comparison(found: Sequence[Evaluation]) -> Table:
    """A row a predictor, all layers together. Bytes and time are shares of the dense FFN's for one token.

    "own" is the prediction alone; "bytes" adds the kept neurons; "error" is that of the FFN's output.
    """
    columns = ("predictor", "kept", "recall", "precision", "energy", "error", "KL, nats", "ppl", "top-1", "own bytes",
               "bytes", "own time")  # fmt: skip
    out = tables.new(*columns, close=True)
    for e in found:
        time = f"{e.cost.predictor_s / e.cost.dense_s:.0%}" if e.cost.dense_s else "-"
        out.add_row(
            e.name, *_cells(e.mean)[1:], f"{e.model.kl:.4f}", f"{e.model.perplexity:.2f}", f"{e.model.same_top:.1%}",
            f"{e.cost.predictor_bytes / e.cost.dense_bytes:.1%}", f"{e.cost.bytes_share:.1%}", time,
        )  # fmt: skip
    return out


def by_layer(found: Evaluation) -> Table:
    """A row a layer of one predictor."""
    out = tables.new("layer", "active", "kept", "recall", "precision", "energy", "error", close=True)
    for i, quality in enumerate(found.layers):
        out.add_row(str(i), *_cells(quality))
    out.add_row("all", *_cells(found.mean))
    return out


def figure(found: Sequence[Evaluation], *, title: str) -> Figure:
    """Recall, precision, kept share and output error by layer, a line a predictor.

    A row a predictor and layer, "all" for the whole; columns as in `LayerQuality`, `ModelQuality` and `Cost`.
    """
    rows = []
    for e in found:
        rows += [{"predictor": e.name, "layer": i, **asdict(quality)} for i, quality in enumerate(e.layers)]
        rows.append({"predictor": e.name, "layer": "all", **asdict(e.mean), **asdict(e.model), **asdict(e.cost)})
    caption = "On the dense model's residuals, layer by layer."
    return Figure("predictors", title, caption, tuple(rows), partial(_draw, title=title), (11.0, 7.0))


def _draw(canvas: Canvas, rows: Sequence[Row], *, title: str) -> None:
    panels = {"recall": "recall", "precision": "precision", "kept": "kept share", "error": "FFN output error"}
    for axes, (key, ylabel) in zip(canvas.subplots(2, 2).flat, panels.items(), strict=True):
        for name in dict.fromkeys(row["predictor"] for row in rows):
            own = [row for row in rows if row["predictor"] == name and row["layer"] != "all"]
            axes.plot([row["layer"] for row in own], [row[key] for row in own], marker=".", label=name)
        axes.set(xlabel="layer", ylabel=ylabel, ylim=(0, None if key == "error" else 1.02))
    canvas.axes[0].legend()
    canvas.suptitle(title)


def _cells(q: LayerQuality) -> list[str]:
    """Active, kept, recall, precision, energy, error."""
    return [*(f"{x:.1%}" for x in (q.active, q.kept, q.recall, q.precision, q.energy)), f"{q.error:.3f}"]
