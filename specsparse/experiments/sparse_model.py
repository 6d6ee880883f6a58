"""The model that a config asks for, with the FFN that it asks for: which predictors can gate it, and what fits them.

Predictors are imported by the runs that have one.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.text import Text

from specsparse import kernels
from specsparse.data import prompts
from specsparse.engine.model import Model
from specsparse.errors import refuse
from specsparse.experiments.kind import RunContext, header_of
from specsparse.experiments.settings import ModelSettings
from specsparse.models import catalogue
from specsparse.powerinfer import zero_skip
from specsparse.powerinfer.modes import PREDICTED
from specsparse.support import terminal

if TYPE_CHECKING:
    from specsparse.predictors import Predictor

_MIB = 1 << 20
WINDOW = 128
"""Tokens of a piece of text that is read at once."""


def check(cfg: ModelSettings, *, union_cap: bool = False, judged: bool = False) -> None:
    """The `ffn` and `predictor` groups, before anything is loaded; `union_cap`: whether the kind can use one, `judged`:
    whether it judges predictors that nothing decodes by, too."""
    ffn, given = cfg.ffn, cfg.predictor.name
    predicted, named = ffn.name == PREDICTED, given != "none"
    refuse({
        "ffn.union_cap is judged beside the uncapped run: give +experiment=spec_sparse":
            ffn.union_cap is not None and not union_cap,
        f"predictor={given} does nothing with ffn={ffn.name or 'null'}: give ffn=predicted": named and not predicted,
        "ffn=predicted needs a predictor: give predictor=gate_threshold (SiLU) or predictor=signbit (ReLU)":
            predicted and not named,
        "ffn.masked belongs to ffn=predicted": ffn.masked is not None and not predicted,
        "ffn.union_cap caps a sparse FFN, and ffn.masked makes a dense one: leave one of them out":
            bool(ffn.masked) and ffn.union_cap is not None,
        "ffn.faithful_f16 and ffn.threshold belong to ffn=powerinfer":
            predicted and (ffn.faithful_f16 or ffn.threshold is not None),
    })  # fmt: skip
    if not predicted:
        return
    from specsparse.powerinfer.sparse_ffn import masks
    from specsparse.predictors import FFN, Needs, get_predictor

    predictor = get_predictor(given, FFN(kernels.get(), 1e-5), **cfg.predictor.options)
    trained, why = predictor.needs is Needs.TRAINING, not_decoding(predictor)
    refuse({
        f"predictor={given} {why}: judge it with +experiment=sweep_sparsity": why and not judged,
        f"ffn.masked=true with predictor={given}: masks are those of mlp, svd and signbit; leave it out":
            bool(ffn.masked) and not masks(predictor),
        f"predictor={given} is trained: run +experiment=train_predictors model={cfg.model.path}, then give "
        "ffn.weights=predictors/<model>/predictors.safetensors":
            trained and weights_file(cfg) is None and not header_of(cfg.model)[1].predictor_ranks,
        f"ffn.weights={ffn.weights}: predictor={given} reads no file":
            ffn.weights is not None and not (trained or judged),
        f"ffn.weights={ffn.weights}: there is no such file":
            ffn.weights is not None and not Path(ffn.weights).is_file(),
    })  # fmt: skip


def load(cfg: ModelSettings, ctx: RunContext) -> Model:
    """The model, its predictor fitted if the config asks for one."""
    model = ctx.load(cfg.model, **cfg.ffn.overrides())
    return model if cfg.ffn.name != PREDICTED else sparse_of(cfg, ctx, model).model


def not_decoding(predictor: "Predictor") -> str | None:
    """The reason why no model can decode with this predictor, or None if one can."""
    from specsparse.predictors import Needs

    if predictor.name == "oracle" and reads_text(predictor):
        return "with a share knows every activation before it chooses"
    if predictor.needs is Needs.PROMPT:
        return "chooses its neurons anew for each prompt"
    return "leaves out inputs and not neurons, which no kernel skips" if predictor.name == "teal" else None


def label(model: Model) -> dict[str, str]:
    """The FFN and its promise against the dense model, as a record has them; nothing for a dense one."""
    if model.ffn == "dense":
        return {}
    promise = "as the dense model" if model.ffn == "oracle" else "lossy against the dense model"
    if zero_skip.skips(model.params):
        promise = "bit for bit the dense model"
    return {"ffn": f"{model.ffn}: {model.rule}" if model.rule else model.ffn, "ffn_label": promise}


class Fitted(NamedTuple):
    """A predictor and its weights by layer; None of one that is fitted to each prompt."""

    predictor: "Predictor"
    weights: Sequence[Any] | None


class GatedModel(NamedTuple):
    """A sparse model, the predictor that gates it, and the predictor's weights by layer."""

    model: Model
    predictor: "Predictor"
    weights: Sequence[Any]


def sparse_of(cfg: ModelSettings, ctx: RunContext, dense: Model) -> GatedModel:
    """The config's sparse model beside the dense one of the same file."""
    from specsparse.powerinfer.fewer import gated
    from specsparse.predictors import FFN
    from specsparse.predictors.scored import Mlp

    if cfg.ffn.name == "powerinfer":
        own = ctx.load(cfg.model, **cfg.ffn.overrides())
        weights = [layer.sparse.predictor for layer in own.params.layers]
        return GatedModel(own, Mlp(FFN.from_config(dense.config, dense.kernels)), weights)
    predictor, weights = fitted(cfg, ctx, dense)
    assert weights is not None  # check()
    masked = False if cfg.ffn.union_cap is not None else cfg.ffn.masked  # the capped run has rows of neurons
    model = gated(dense, predictor, weights, masked=masked)
    more, whole = (sum(leaf.nbytes for leaf in jax.tree.leaves(each)) for each in (
        [layer.sparse for layer in model.params.layers], [layer.dense for layer in dense.params.layers]))  # fmt: skip
    line = f"ffn {model.rule}: {more / _MIB:,.1f} MiB beside the dense FFNs' {whole / _MIB:,.1f} MiB"
    ctx.console.print(Text(line, style="dim"), soft_wrap=True)
    return GatedModel(model, predictor, weights)


def fitted(
    cfg: ModelSettings, ctx: RunContext, dense: Model, *, rows: np.ndarray | None = None, before: Fitted | None = None
) -> Fitted:
    """The config's predictor of a dense model, fitted or read from its file.

    `rows` are `residuals`, if they are known. From `before`, of this model, a predictor whose thresholds alone differ
    takes its matrices.
    """
    from specsparse.predictors import Needs
    from specsparse.predictors.evaluate import fit_layers
    from specsparse.predictors.scored import Scored, settled

    predictor, layers = predictor_of(cfg, dense), dense.params.layers
    reads = reads_text(predictor)
    if predictor.needs is Needs.PROMPT:
        return Fitted(predictor, None)
    if rows is None and reads:
        rows = residuals(cfg, dense, ctx.console)
    predictor, codes, threshold = settled(predictor, layers[0])
    if before is not None and isinstance(predictor, Scored) and predictor.differs_by_text(before.predictor):
        weights = before.weights
    elif predictor.needs is not Needs.TRAINING:
        return Fitted(predictor, fit_layers(predictor, layers, rows if reads else None))
    else:
        weights = trained_weights(cfg, dense, codes, threshold)
    if isinstance(predictor, Scored) and reads:
        assert weights is not None and rows is not None
        weights = tuple(predictor.on_text(*each) for each in zip(weights, layers, map(jnp.asarray, rows), strict=True))
    return Fitted(predictor, weights)


def trained_weights(cfg: ModelSettings, dense: Model, codes: Any, threshold: float | None) -> Sequence[Any]:
    """The weights by layer of a PowerInfer file, or of a file of predictors; `threshold` is instead of the file's.
    UserError: they are of another model's shape."""
    if cfg.ffn.weights is None and dense.config.predictor_ranks:
        own = [layer.sparse for layer in dense.params.layers]
        return own if threshold is None else [w._replace(threshold=jnp.float32(threshold)) for w in own]
    from specsparse.predictors.fit_mlp import load_predictors  # optax takes a second

    path = weights_file(cfg)
    assert path is not None  # check()
    weights = load_predictors(path, codes=codes, threshold=threshold)
    want = (dense.config.n_layers, dense.config.d_model, dense.config.d_ff)
    have = (len(weights), weights[0].fc1.shape[1], weights[0].fc2.shape[0]) if weights else (0, 0, 0)
    shapes = "{} layers of {} x {}".format
    refuse({f"{path} is for {shapes(*have)}, and {cfg.model.path} has {shapes(*want)}": have != want})
    return weights


def predictor_of(cfg: ModelSettings, dense: Model) -> "Predictor":
    """The config's predictor for a model's FFNs, without weights."""
    from specsparse.powerinfer.fewer import in_steps
    from specsparse.predictors import FFN, get_predictor
    from specsparse.predictors.rules import Hot
    from specsparse.predictors.rules import Sequence as PromptSet

    ffn = FFN.from_config(dense.config, dense.kernels)
    name, options = ("oracle", {}) if cfg.ffn.name == "oracle" else (cfg.predictor.name, cfg.predictor.options)
    predictor = get_predictor(name, ffn, **options)
    # One set for all tokens decodes in whole blocks, so it is judged in them too.
    return in_steps(predictor, dense.config.d_ff) if isinstance(predictor, Hot | PromptSet) else predictor


def reads_text(predictor: "Predictor") -> bool:
    """Whether the predictor needs a text, for its weights or for the thresholds of trained weights."""
    from specsparse.predictors import Needs
    from specsparse.predictors.scored import Scored

    return predictor.needs is Needs.TEXT or (isinstance(predictor, Scored) and predictor.by_text)


def residuals(cfg: ModelSettings, model: Model, console: Console) -> np.ndarray:
    """f32[L, N, D] residuals before `ffn_norm` on calibration text."""
    return collected(model, calibration_text(cfg, model), console, what="reading calibration text")


def collected(model: Model, text_Wn: np.ndarray, console: Console, *, what: str = "reading text", **more: Any) -> Any:
    from specsparse.predictors.collect import collect

    with terminal.counting(console, what, len(text_Wn)) as step:
        return collect(model, text_Wn, progress=step, **more)


def calibration_text(cfg: ModelSettings, model: Model) -> np.ndarray:
    """int32[W, n]: about `ffn.tokens` tokens of built-in prompts that the run does not decode, a few of each task."""
    from specsparse.predictors.collect import windows

    decoded = {p.text for p in cfg.data.prompts()}
    free = [p.text for p in prompts.load() if p.text not in decoded] or [p.text for p in prompts.load()]
    order = np.random.default_rng(cfg.seed).permutation(len(free))
    ids = (model.tokenizer.encode(free[i], add_special=True) for i in order)
    length = min(WINDOW, model.config.context_length, cfg.ffn.tokens)
    return windows(ids, length)[: max(1, cfg.ffn.tokens // length)]


def shuffled_text(cfg: ModelSettings, tokenizer: Any) -> list[list[int]]:
    """Token ids of each prompt of the run, in an order drawn once."""
    source = cfg.data.prompts()
    order = np.random.default_rng(cfg.seed).permutation(len(source))
    return [tokenizer.encode(source[i].text, add_special=True) for i in order]


def weights_file(cfg: ModelSettings) -> Path | None:
    """The trained predictors: `ffn.weights`, or those that travel with the model."""
    return catalogue.companion(cfg.model.path, "predictors") if cfg.ffn.weights is None else Path(cfg.ffn.weights)
