"""Predictors of a config on a model: which can gate its FFN, what they are fitted on, and the model that they gate."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from specsparse import kernels
from specsparse.data import prompts
from specsparse.engine.model import Model
from specsparse.errors import UserError
from specsparse.experiments.kind import RunContext
from specsparse.experiments.settings import ModelSettings
from specsparse.models import catalogue
from specsparse.powerinfer.fewer import gated
from specsparse.predictors import FFN, Needs, Predictor, get_predictor
from specsparse.predictors.collect import collect, windows
from specsparse.predictors.evaluate import fit_layers
from specsparse.predictors.fit_mlp import load_predictors
from specsparse.predictors.scored import Codes, Mlp, settled
from specsparse.support import terminal

WINDOW = 128
"""Tokens of a piece of text that is read at once."""
_NOT_MASKS = {
    "teal": "leaves out inputs and not neurons, which no kernel skips",
    "sequence": "chooses its neurons anew for each prompt",
}


def check(cfg: ModelSettings) -> None:
    """The predictor of `ffn=predicted`, before anything is loaded.

    Raises:
        UserError: it does not exist, cannot gate an FFN, or its file is missing or not wanted.
    """
    given = cfg.predictor.name
    predictor = get_predictor(given, FFN(kernels.get(), 1e-5), **cfg.predictor.options)
    if predictor.name in _NOT_MASKS:
        raise UserError(f"predictor={given} {_NOT_MASKS[predictor.name]}: judge it with +experiment=train_predictors")
    trained = predictor.needs is Needs.TRAINING
    if trained and weights_file(cfg) is None:
        raise UserError(f"predictor={given} is trained: give ffn.weights=predictors/<model>/predictors.safetensors")
    if cfg.ffn.weights is not None and not (trained and Path(cfg.ffn.weights).is_file()):
        problem = "there is no such file" if trained else f"predictor={given} reads no file"
        raise UserError(f"ffn.weights={cfg.ffn.weights}: {problem}")


class GatedModel(NamedTuple):
    """A sparse model with what gates it.

    Attributes:
        model: what runs.
        predictor: its rule.
        weights: of the rule, by layer.
    """

    model: Model
    predictor: Predictor
    weights: Sequence[Any]


def sparse_of(cfg: ModelSettings, ctx: RunContext, dense: Model, *, rows: np.ndarray | None = None) -> GatedModel:
    """The config's sparse model beside a dense one of the same file.

    Args:
        cfg: with an `ffn` that is not dense.
        ctx: loads a PowerInfer file once more, with its predictors.
        dense: the model with its dense matrices.
        rows: `residuals` where they have been read before.
    """
    ffn = FFN.from_config(dense.config, dense.kernels)
    if cfg.ffn.name == "powerinfer":
        own = ctx.load(cfg.model, **cfg.ffn.overrides())
        return GatedModel(own, Mlp(ffn), [layer.sparse.predictor for layer in own.params.layers])
    if cfg.ffn.name == "oracle":
        predictor = get_predictor("oracle", ffn)
    else:
        predictor = get_predictor(cfg.predictor.name, ffn, **cfg.predictor.options)
    if predictor.needs is Needs.TRAINING:
        predictor, codes = settled(predictor, dense.params.layers[0])
        weights = _trained(cfg, dense, codes)
    else:
        needed = predictor.needs is Needs.TEXT
        rows = residuals(cfg, dense, ctx.console) if needed and rows is None else rows
        weights = fit_layers(predictor, dense.params.layers, rows if needed else None)
    return GatedModel(gated(dense, predictor, weights), predictor, weights)


def residuals(cfg: ModelSettings, model: Model, out: Console) -> np.ndarray:
    """f32[L, N, D] residuals before `ffn_norm` on calibration text."""
    text = calibration_text(cfg, model)
    with terminal.counting(out, "reading calibration text", len(text)) as bar:
        return collect(model, text, progress=lambda done: bar.update(bar.task_ids[0], completed=done))


def calibration_text(cfg: ModelSettings, model: Model) -> np.ndarray:
    """int32[W, n]: about `ffn.tokens` tokens of built-in prompts that the run does not decode, a few of each task."""
    decoded = {p.text for p in cfg.data.prompts()}
    free = [p.text for p in prompts.load() if p.text not in decoded] or [p.text for p in prompts.load()]
    order = np.random.default_rng(cfg.seed).permutation(len(free))
    ids = (model.tokenizer.encode(free[i], add_special=True) for i in order)
    length = min(WINDOW, model.config.context_length, cfg.ffn.tokens)
    return windows(ids, length)[: max(1, cfg.ffn.tokens // length)]


def weights_file(cfg: ModelSettings) -> Path | None:
    """The trained predictors: `ffn.weights`, or those that travel with the model."""
    return catalogue.companion(cfg.model.path, "predictors") if cfg.ffn.weights is None else Path(cfg.ffn.weights)


def _trained(cfg: ModelSettings, model: Model, codes: Codes) -> Sequence[Any]:
    path = weights_file(cfg)
    assert path is not None  # check()
    found = load_predictors(path, codes=codes)
    want = (model.config.n_layers, model.config.d_model, model.config.d_ff)
    have = (len(found), found[0].fc1.shape[1], found[0].fc2.shape[0]) if found else (0, 0, 0)
    if have != want:
        shapes = "{} layers of {} x {}".format
        raise UserError(f"{path} is for {shapes(*have)}, and {cfg.model.path} has {shapes(*want)}")
    return found
