"""Training all layers of a model in a directory that a later run goes on from."""

import math
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from specsparse.engine.model import Model
from specsparse.errors import UserError
from specsparse.experiments.kinds.training import folder as folders
from specsparse.experiments.kinds.training import options as train_options
from specsparse.experiments.kinds.training.options import TrainSettings
from specsparse.powerinfer.model_files import PredictorFile, write_predictors
from specsparse.predictors import FFN
from specsparse.predictors.collect import collect
from specsparse.predictors.fit_mlp import FitOptions, LayerTrainer, label, save_predictors
from specsparse.predictors.scored import Codes, MlpWeights, mlp_weights
from specsparse.support import terminal
from specsparse.support.files import load_state, read_tensors, replacing, save_state, write_tensors

PREDICTORS_FILE = "predictors.safetensors"
EXPORT_FOLDER = "powerinfer"
_RESIDUALS, _RUNNING = "residuals.npy", "running.safetensors"


def options(cfg: TrainSettings) -> FitOptions:
    """The training's own options.

    Raises:
        UserError: an unknown one, or a value of the wrong type or out of range.
    """
    return train_options.split(cfg, {"own": FitOptions})["own"]


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
    folders.claim(folder, {
        "model": folders.identity(model, cfg.model.overrides()),
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
