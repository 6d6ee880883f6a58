"""`kind: train_predictors`: predictors of active neurons from a model and a text, and how good they are.

All layers are trained in a directory that a later run goes on from.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure as Canvas
from rich.table import Table
from rich.text import Text

from specsparse import kernels
from specsparse.engine.model import Model
from specsparse.errors import UserError
from specsparse.experiments.kind import RunContext, RunResult, header_of
from specsparse.experiments.kinds.train_settings import Training, TrainSettings, claim, options
from specsparse.experiments.sparse_model import collected, reads_text, shuffled_text, trained_weights
from specsparse.experiments.trackers.base import Series
from specsparse.powerinfer.model_files import PredictorFile, write_predictors
from specsparse.predictors import FFN, Needs, get_predictor
from specsparse.predictors.base import Predictor
from specsparse.predictors.collect import windows
from specsparse.predictors.evaluate import Evaluation, Evaluator, LayerQuality, fit_layers
from specsparse.predictors.fit_mlp import FitOptions, LayerTrainer, label, need_zeros, save_predictors
from specsparse.predictors.scored import mlp_weights, settled
from specsparse.report import plots
from specsparse.report.plots import Figure, Row
from specsparse.support import tables
from specsparse.support.files import load_state, need_disk, read_tensors, replacing, save_state, write_tensors

DEFINITIONS = {
    "recall": "active neurons that are kept / active neurons, on the dense model's residuals, over all rows",
    "error": "|sparse - dense| / |dense| of the FFN's output without the residual, over all rows",
    "kl": "mean KL(dense, sparse) of the next token in nats; first half of each window read densely by both",
}
EPOCHS = Series("training", "epoch")
"""Of the layers, one after the other, and counted over all of them."""
PREDICTORS_FILE = "predictors.safetensors"
EXPORT_FOLDER = "powerinfer"


class TrainPredictors(Training):
    """A predictor of active neurons trained or fitted on text, and judged."""

    def check(self, cfg: TrainSettings) -> None:
        (_, config), any_ffn = header_of(cfg.model), FFN(kernels.get(), 1e-5)
        if cfg.predictor.name == "none":
            raise UserError("kind=train_predictors needs a predictor: give predictor=mlp")
        predictor = get_predictor(cfg.predictor.name, any_ffn, **cfg.predictor.options)
        if predictor.needs is Needs.TRAINING and reads_text(predictor):
            raise UserError(
                f"kind=train_predictors judges predictor={cfg.predictor.name} by its own threshold: give "
                "predictor.share and predictor.recall to +experiment=sweep_sparsity"
            )
        for name in cfg.train.compare:
            get_predictor(name, any_ffn)
        options(cfg, FitOptions)
        if predictor.needs is Needs.TRAINING and not config.predictor_ranks:
            need_zeros(FFN.from_config(config, any_ffn.kernels), cfg.train.active_share)
        cfg.data.prompts()

    def run(self, cfg: TrainSettings, ctx: RunContext) -> RunResult:
        """Collects, trains or fits, judges. A stopped training goes on; predictors of a PowerInfer file are judged."""
        model, notes, rows = ctx.load(cfg.model, ffn="dense"), dict[str, object](), None
        text, judged = split(cfg, model)
        evaluator = Evaluator(model, judged)
        predictor = get_predictor(cfg.predictor.name, evaluator.ffn, **cfg.predictor.options)

        def fitted(predictor: Predictor) -> Any:
            nonlocal rows
            if predictor.needs is Needs.TEXT and rows is None:
                rows = collected(model, text, ctx.console)
            return None if predictor.needs is Needs.PROMPT else fit_layers(predictor, model.params.layers, rows)

        def score(predictor: Predictor, weights: Any) -> Evaluation:
            with ctx.counting(f"judging {predictor.name}", len(evaluator.windows_Wn)) as step:
                return evaluator(predictor, weights, progress=step)

        if predictor.needs is not Needs.TRAINING:
            ctx.tracker.follow()
            weights = fitted(predictor)
        else:
            predictor, codes, threshold = settled(predictor, model.params.layers[0])
            if model.config.predictor_ranks:
                ctx.tracker.follow()
                weights, said = trained_weights(cfg, model, codes, threshold), "they are judged, nothing is trained"
                ctx.console.print(Text(f"the file has predictors of its own: {said}", style="dim"))
            else:
                pairs, rows, notes = trained(cfg, model, evaluator.ffn, text, ctx)
                weights = tuple(mlp_weights(fc1, fc2, threshold or 0.0, codes=codes) for fc1, fc2 in pairs)
        found = [score(predictor, weights)]
        found += [score(other, fitted(other)) for other in rivals(cfg, evaluator.ffn, found[0])]
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
                f"dense perplexity {first.model.perplexity_dense:.2f} on {first.model.tokens} tokens; lossy",
            ],
            figures=[figure(found, title=f"{cfg.name}: {Path(cfg.model.path).name}")],
            trained=[Path(str(notes["output"])) / PREDICTORS_FILE] if notes else (),
            definitions=DEFINITIONS,
            objective=-first.model.kl,
        )


def split(cfg: TrainSettings, model: Model) -> tuple[np.ndarray, np.ndarray]:
    """Windows int32[W, n] to fit on and windows to judge on. UserError: too little text for both."""
    window = min(cfg.train.window, model.config.context_length) // 2 * 2
    cut = windows(shuffled_text(cfg, model.tokenizer), window)
    fit = min(len(cut) - cfg.train.judged, -(-cfg.train.tokens // window))
    if fit < 1:
        raise UserError(
            f"the text fills {len(cut)} windows of {window} tokens and {cfg.train.judged} are to be judged: give more "
            "text (data.source), a smaller train.window or fewer train.judged"
        )
    return cut[:fit], cut[len(cut) - cfg.train.judged :]


def rivals(cfg: TrainSettings, ffn: FFN, first: Evaluation) -> list[Predictor]:
    """`train.compare` without the predictor itself: at its recall if zeros define one, else at its kept share."""
    out = []
    for name in cfg.train.compare:
        given: dict[str, object] = {}
        if name in ("svd", "signbit"):
            if not ffn.has_zeros:
                continue  # they guess the sign of the gate, which says little if no neuron is zero
            given = {"recall": min(max(first.mean.recall, 1e-3), 1.0)}
        if name == "svd":
            given["rank"] = max(options(cfg, FitOptions)[0].rank // 2, 1)
        if name in ("gate_threshold", "hot", "random", "sequence", "teal"):
            given = {"share": min(max(first.mean.kept, 1e-3), 1.0)}
        rival = get_predictor(name, ffn, **given)
        if rival.name != first.name and rival.needs is not Needs.TRAINING:
            out.append(rival)
    return out


def trained(
    cfg: TrainSettings, model: Model, ffn: FFN, text: np.ndarray, ctx: RunContext
) -> tuple[list[tuple[np.ndarray, np.ndarray]], np.ndarray, dict[str, object]]:
    """(fc1, fc2) of every layer, the residuals f32[L, N, D] they were trained on, and notes for the record.

    A stopped training goes on from its files: residuals, finished layers, the last epoch of the layer in training.
    """
    folder = Path(cfg.train.output or Path("predictors") / Path(model.path).stem)
    _claim(folder, cfg, model, text)
    ctx.tracker.follow(folder)
    residuals = folder / "residuals.npy"
    if not residuals.exists():
        shape = (model.config.n_layers, text.size, model.config.d_model)
        # A write into a memory map that the disk cannot hold would end the process.
        need_disk(folder, 4 * math.prod(shape), "give fewer train.tokens, or train.output on another disk")
        with replacing(residuals) as temporary:
            out = np.lib.format.open_memmap(temporary, mode="w+", dtype=np.float32, shape=shape)
            collected(model, text, ctx.console, out=out)
            out.flush()
    rows, pairs, history, count = np.load(residuals, mmap_mode="r"), [], [], itertools.count(1)

    def publish(layer: int, epoch: Mapping[str, Any]) -> None:
        ctx.tracker.point(EPOCHS, {**epoch, "epoch": next(count), "layer": layer})

    with ctx.counting("training layers", model.config.n_layers) as step:
        for i, layer in enumerate(model.params.layers):
            fc1, fc2, epochs = _layer(folder, cfg, ffn, layer, rows[i], i, partial(publish, i))
            pairs.append((fc1, fc2))
            history.append(epochs)
            step()
    save_predictors(folder / PREDICTORS_FILE, pairs, dtype=np.float16)
    write_predictors(folder / EXPORT_FOLDER, [PredictorFile(fc1, fc2) for fc1, fc2 in pairs], threshold=0.0)
    line = f"predictors: {folder / PREDICTORS_FILE}; for PowerInfer's converter: {folder / EXPORT_FOLDER}"
    ctx.console.print(Text(line, style="dim"))
    return pairs, rows, {"output": str(folder), "epochs": history}


def _claim(folder: Path, cfg: TrainSettings, model: Model, text: np.ndarray) -> None:
    digest = int(np.sum(text * (1 + np.arange(text.size).reshape(text.shape))))
    claim(folder, cfg, model, {
        "activation": model.config.activation,
        "options": asdict(options(cfg, FitOptions)[0]),
        "active_share": cfg.train.active_share,
        "text": {"windows": list(text.shape), "sum": digest},
    })  # fmt: skip


def _layer(
    folder: Path, cfg: TrainSettings, ffn: FFN, layer: Any, rows_ND: np.ndarray, index: int,
    publish: Callable[[Mapping[str, Any]], None],
) -> tuple[np.ndarray, np.ndarray, list[dict[str, Any]]]:  # fmt: skip
    """fc1, fc2 and the epochs of one layer, from its file if it is finished; `publish` is called with each epoch."""
    path, running = folder / f"layer_{index}.safetensors", folder / "running.safetensors"
    if path.exists():
        tensors, meta = read_tensors(path)
        for epoch in meta["epochs"]:
            publish(epoch)
        return tensors["fc1"], tensors["fc2"], meta["epochs"]
    labels = label(ffn, layer, rows_ND, active_share=cfg.train.active_share)
    trainer = LayerTrainer(options(cfg, FitOptions)[0], layer, rows_ND, labels, index)
    state, epochs = trainer.start(), []
    if running.exists():
        found, meta = load_state(running, state)
        if meta["layer"] == index:
            state, epochs = found, meta["epochs"]
    for epoch in epochs:
        publish(epoch)
    while not trainer.done(state):
        state, epoch = trainer.step(state)
        epochs.append(asdict(epoch))
        publish(epochs[-1])
        save_state(running, state, {"layer": index, "epochs": epochs})
    fc1, fc2 = trainer.result(state)
    write_tensors(path, {"fc1": fc1, "fc2": fc2}, {"epochs": epochs})
    running.unlink(missing_ok=True)
    return fc1, fc2, epochs


def comparison(found: Sequence[Evaluation]) -> Table:
    """A row a predictor, all layers together; "own" is the prediction alone, "bytes" adds the kept neurons."""
    titles = ("predictor", "kept", "recall", "precision", "energy", "error", "KL, nats", "ppl", "top-1")
    out = tables.new(*titles, "own bytes", "bytes", "own time", close=True)
    for e in found:
        time = f"{e.cost.predictor_s / e.cost.dense_s:.0%}" if e.cost.dense_s else "-"
        out.add_row(
            e.name, *_cells(e.mean)[1:], f"{e.model.kl:.4f}", f"{e.model.perplexity:.2f}", f"{e.model.same_top:.1%}",
            f"{e.cost.predictor_bytes / e.cost.dense_bytes:.1%}", f"{e.cost.bytes_share:.1%}", time,
        )  # fmt: skip
    return out


def by_layer(found: Evaluation) -> Table:
    rows = ([str(layer), *_cells(quality)] for layer, quality in [*enumerate(found.layers), ("all", found.mean)])
    return tables.new("layer", "active", "kept", "recall", "precision", "energy", "error", rows=rows, close=True)


def figure(found: Sequence[Evaluation], *, title: str) -> Figure:
    """A figure by layer with a line for each predictor; columns as in `LayerQuality`, and for layer "all"
    `ModelQuality` and `Cost`."""
    rows = []
    for e in found:
        rows += [{"predictor": e.name, "layer": i, **asdict(quality)} for i, quality in enumerate(e.layers)]
        rows.append({"predictor": e.name, "layer": "all", **asdict(e.mean), **asdict(e.model), **asdict(e.cost)})

    def draw(canvas: Canvas, rows: Sequence[Row]) -> None:
        panels = {"recall": "recall", "precision": "precision", "kept": "kept share", "error": "FFN output error"}
        for axes, (key, ylabel) in zip(canvas.subplots(2, 2).flat, panels.items(), strict=True):
            for name, _, own in plots.series([row for row in rows if row["layer"] != "all"], "predictor"):
                axes.plot([row["layer"] for row in own], [row[key] for row in own], marker=".", label=name)
            axes.set(xlabel="layer", ylabel=ylabel, ylim=(0, None if key == "error" else 1.02))
        canvas.axes[0].legend()
        canvas.suptitle(title)

    caption = "On the dense model's residuals, layer by layer."
    return Figure("predictors", title, caption, tuple(rows), draw, (11.0, 7.0))


def _cells(q: LayerQuality) -> list[str]:
    return [*(f"{x:.1%}" for x in (q.active, q.kept, q.recall, q.precision, q.energy)), f"{q.error:.3f}"]
