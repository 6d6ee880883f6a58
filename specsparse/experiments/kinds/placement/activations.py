"""The activation counts that a run goes by: read from files, or counted over its text."""

from pathlib import Path
from typing import Any

import numpy as np
from rich.text import Text

from specsparse import kernels
from specsparse.engine.config import OVERRIDES, ModelConfig
from specsparse.engine.gguf.reader import POWERINFER_MAGIC, GGUFFile, open_gguf
from specsparse.engine.model import Model
from specsparse.engine.text.tokenizer import Tokenizer
from specsparse.errors import UserError
from specsparse.experiments.kind import Lab
from specsparse.experiments.kinds.placement.settings import PlacementSettings
from specsparse.models import catalogue
from specsparse.powerinfer import profiler
from specsparse.powerinfer.profiler import ActivationStats, load_stats, read_activations
from specsparse.predictors import FFN, Needs, get_predictor
from specsparse.predictors.collect import collect, windows
from specsparse.predictors.evaluate import fit_layers, with_weights
from specsparse.support import terminal


def check(cfg: PlacementSettings) -> None:
    """What can be found wrong before anything is loaded.

    Raises:
        UserError: no such file of counts, a share out of range or where it does nothing, an unknown predictor or
            one that is not fitted here.
    """
    spec = cfg.placement
    if spec.activations is not None and not Path(spec.activations).exists():
        raise UserError(f"placement.activations={spec.activations}: no such file or directory of activation counts")
    if spec.active_share is not None:
        _check_active_share(cfg)
    counted = spec.activations is None and _companion(cfg) is None
    if counted and spec.active_share is None and cfg.predictor.name == "none":
        overrides = {k: v for k, v in cfg.model.overrides().items() if k in OVERRIDES}
        config = ModelConfig.from_gguf(open_gguf(catalogue.resolve(cfg.model.path)), overrides=overrides)
        if not config.predictor_ranks or cfg.ffn.name == "oracle":
            profiler.nonzero(FFN.from_config(config, kernels.get()))
    if cfg.predictor.name != "none":
        predictor = get_predictor(cfg.predictor.name, FFN(kernels.get(), 1e-5), **cfg.predictor.options)
        if predictor.needs in (Needs.TRAINING, Needs.PROMPT):
            raise UserError(
                f"predictor={predictor.name} needs {predictor.needs.value}, which a placement cannot give it; "
                "use a PowerInfer file, or predictor=gate_threshold, svd or signbit"
            )


def _check_active_share(cfg: PlacementSettings) -> None:
    """It counts where nothing else says what is read; beside something else it would be ignored."""
    spec = cfg.placement
    if spec.activations is not None:
        other = "placement.activations, which are counted already"
    elif cfg.predictor.name != "none":
        other = f"predictor={cfg.predictor.name}, which says what is read"
    elif cfg.ffn.name != "oracle" and open_gguf(catalogue.resolve(cfg.model.path)).magic == POWERINFER_MAGIC:
        other = "the predictors of a PowerInfer file, which say what is read"
    else:
        return
    raise UserError(f"placement.active_share={spec.active_share} does nothing beside {other}: leave one of them out")


def _companion(cfg: PlacementSettings) -> Path | None:
    """Counts that travel with the model, as its file has it."""
    return None if cfg.model.overrides() else catalogue.companion(cfg.model.path, "activations")


def of_run(cfg: PlacementSettings, f: GGUFFile, config: ModelConfig, lab: Lab) -> ActivationStats:
    """Counts of `placement.activations`, those that travel with the model, or of the run's text.

    Raises:
        UserError: files of another model, or a text that is too short.
    """
    given: str | Path | None = cfg.placement.activations
    if given is None and cfg.predictor.name == "none" and cfg.placement.active_share is None:
        given = _companion(cfg)
        if given is not None:
            lab.console.print(Text(f"activation counts: {given}", style="dim"))
    if given is None:
        return _counted(cfg, f, lab)
    read = read_activations if Path(given).is_dir() else load_stats
    return read(given, layers=config.n_layers, d_ff=config.d_ff)


def _counted(cfg: PlacementSettings, f: GGUFFile, lab: Lab) -> ActivationStats:
    model = lab.load(cfg.model, ffn="dense")
    text = text_windows(cfg, model)
    active, params = _rule(cfg, f, model, text)
    with terminal.counting(lab.console, "counting activations", len(text)) as bar:
        done = lambda count: bar.update(bar.task_ids[0], completed=count)  # noqa: E731 (a name for the line below)
        return profiler.profile(model, text, active, params=params, progress=done)


def _rule(cfg: PlacementSettings, f: GGUFFile, model: Model, text: np.ndarray) -> tuple[profiler.Active, Any]:
    """What counts as read, and parameters to count with: a predictor's choice before what is not zero."""
    ffn = FFN.from_config(model.config, model.kernels)
    if cfg.predictor.name != "none":
        predictor = get_predictor(cfg.predictor.name, ffn, **cfg.predictor.options)
        rows = collect(model, text) if predictor.needs is Needs.TEXT else None
        weights = fit_layers(predictor, model.params.layers, rows)
        return profiler.predicted(predictor), with_weights(model.params, weights)
    if model.config.predictor_ranks and cfg.ffn.name != "oracle":
        return profiler.of_file(f, model, threshold=cfg.ffn.threshold)
    share = cfg.placement.active_share
    return (profiler.nonzero(ffn) if share is None else profiler.largest(ffn, share)), None


def text_windows(cfg: PlacementSettings, model: Model) -> np.ndarray:
    """int32[W, n]: the run's prompts in an order drawn once, cut into windows."""
    length = min(cfg.placement.window, model.config.context_length)
    return windows(_texts(cfg, model.tokenizer), length)[: max(cfg.placement.tokens // length, 1)]


def text_ids(cfg: PlacementSettings, f: GGUFFile, config: ModelConfig) -> np.ndarray:
    """int32[n]: the last window of the run's text, or all of a shorter one; what is decoded fits the context after it.

    Raises:
        UserError: no context is left for it.
    """
    room = config.context_length - cfg.placement.decode
    if room < 2:
        raise UserError(
            f"placement.decode={cfg.placement.decode} leaves no room for a text in a context of "
            f"{config.context_length} tokens; give fewer"
        )
    tokenizer = Tokenizer.from_metadata(f.metadata, where=str(f.path))
    stream = np.concatenate([np.asarray(ids, np.int32) for ids in _texts(cfg, tokenizer)])
    return stream[-min(cfg.placement.window, room) :]


def _texts(cfg: PlacementSettings, tokenizer: Tokenizer) -> list[list[int]]:
    source = cfg.data.prompts()
    order = np.random.default_rng(cfg.seed).permutation(len(source))
    return [tokenizer.encode(source[i].text, add_special=True) for i in order]
