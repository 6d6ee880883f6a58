"""`kind: relufy`: a model's FFNs turned from SiLU to ReLU and recovered by distillation, and what that cost.

Texts, rebuilt layers and checkpoints lie in a directory that a later run goes on from.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specsparse.api import load
from specsparse.engine.gguf.reader import open_gguf
from specsparse.engine.model import Model
from specsparse.errors import UserError
from specsparse.experiments.kind import RunContext, RunResult
from specsparse.experiments.kinds import train_settings
from specsparse.experiments.kinds.train_settings import Training, TrainKeys, TrainSettings
from specsparse.models import catalogue
from specsparse.models.convert.edit import make_delta
from specsparse.models.convert.write import out_type
from specsparse.report.plots import Rows
from specsparse.support import terminal
from specsparse.support.files import read_tensors, write_tensors
from specsparse.support.options import Count
from specsparse.support.tables import new
from specsparse.training import corpus, relu
from specsparse.training.corpus import DataOptions, generate, pack, read_shard
from specsparse.training.relu import (
    Distiller,
    DistillLosses,
    DistillOptions,
    FfnMatrices,
    Fidelity,
    Judged,
    LayerOptions,
    Rebuilder,
    collect_inputs,
    judge,
    layer_inputs,
    write_relu,
)
from specsparse.training.training_loop import Log

_COLUMNS = ("step", "tokens", "divergence", "perplexity", "original", "agreement")
DEFINITIONS = {
    "divergence": "mean KL(original, ReLU model) of the next token in nats, over the rows of held-out answers",
    "perplexity": "of those answers under the ReLU model; `original`: under the original",
    "agreement": "share of those rows whose most likely token is the original's",
    "share": "neurons whose activation is not zero / all, by layer",
    "error": "a rebuilt layer on inputs it has not seen: weighted relative squared error of its output",
}
_TEXTS, _STATE = "texts", "state.safetensors"


@dataclass(frozen=True)
class OwnOptions:
    """What is neither text nor training; see conf/experiment/relufy.yaml."""

    layer_tokens: Count = 40_000
    held_out: Count = 16
    judge_every: Count = 60
    quantise: str = "Q4_0"
    begin: str | None = None
    texts: str | None = None


@dataclass(frozen=True)
class Options(TrainKeys):
    """The keys of `train`, by what they belong to; a key that two have goes to both."""

    own: OwnOptions
    data: DataOptions
    layers: LayerOptions
    distill: DistillOptions


@dataclass(frozen=True)
class Relufied:
    """What came out.

    Attributes:
        path, delta: the model, and its difference to the original.
        layers: as rebuilt one by one; none where `train.begin` had them.
        curve: of the distillation.
    """

    path: Path
    delta: Path
    layers: tuple[Judged, ...]
    curve: tuple[dict[str, Any], ...]


class Relufy(Training):
    """A model's FFNs turned to ReLU, layer by layer and then together, and what that cost."""

    def check(self, cfg: TrainSettings) -> None:
        """Names and options."""
        catalogue.resolve(cfg.model.path)
        out_type(Options.of(cfg).own.quantise)

    def run(self, cfg: TrainSettings, ctx: RunContext) -> RunResult:
        """Writes text, rebuilds, distils, exports; each goes on where an earlier run of the same output stopped.

        Raises:
            UserError: a model without a gate or with ReLU already, or another training's output directory.
        """
        console, model = ctx.console, ctx.load(cfg.model)
        relu.check(model.config)
        folder = folder_of(cfg, model)
        claim(folder, cfg, model)
        train, held = texts(cfg, model, folder, console)
        begin, layers = rebuilt(cfg, model, folder, train, held, console)
        ffn, curve = distilled(cfg, model, folder, begin, train, held, console)
        path, delta = folder / f"{folder.name}-relu.gguf", folder / f"{folder.name}-relu.delta.gguf"
        write_relu(open_gguf(model.path), ffn, path, out_type(Options.of(cfg).own.quantise))
        make_delta(model.path, path, delta)
        rows = _layers(layers, curve[-1]["share"])
        return RunResult(
            {"model": str(path), "delta": str(delta), "layers": rows, "curve": list(curve)},
            Relufied(path, delta, tuple(layers), tuple(curve)),
            shown=[
                Text("held-out answers: ReLU model against the original", style="bold"),
                _table(curve),
                Text(f"model: {path}; difference to the original: {delta}"),
            ],
            figures=[Rows("curve", [{key: point[key] for key in _COLUMNS} for point in curve]), Rows("layers", rows)],
            definitions=DEFINITIONS,
            objective=curve[-1]["original"] / curve[-1]["perplexity"],
        )


def _layers(layers: Sequence[Judged], shares: Sequence[float]) -> list[dict[str, object]]:
    """A row a layer: as it was rebuilt, where it was, and its share of active neurons after the distillation."""
    found = layers or [None] * len(shares)
    return [{"layer": i, **(judged._asdict() if judged else {}), "distilled_share": share}
            for i, (judged, share) in enumerate(zip(found, shares, strict=True))]  # fmt: skip


def _table(curve: Sequence[dict[str, Any]]) -> Table:
    table = new("step", "tokens", "KL, nats", "ppl", "original's", "ratio", "same token", "active", left=())
    for p in curve:
        table.add_row(
            str(p["step"]), str(p["tokens"]), f"{p['divergence']:.4f}", f"{p['perplexity']:.3f}",
            f"{p['original']:.3f}", f"{p['perplexity'] / p['original']:.3f}", f"{p['agreement']:.1%}",
            f"{np.mean(p['share']):.1%}",
        )  # fmt: skip
    return table


def folder_of(cfg: TrainSettings, model: Model) -> Path:
    """Where a training keeps its files."""
    return Path(cfg.train.output or Path("relu") / Path(model.path).stem)


def claim(folder: Path, cfg: TrainSettings, model: Model) -> None:
    """Makes the directory this training's, or finds that it is already.

    Steps, their rates, their precision and the amount of text may change between two runs; nothing else may.

    Raises:
        UserError: it holds another training.
    """
    found = Options.of(cfg)
    rates = {"steps", "rate", "warmup", "decay", "precision"}
    shape = {f.name: getattr(found.distill, f.name) for f in fields(found.distill) if f.name not in rates}
    train_settings.claim(folder, {
        "model": train_settings.identity(model, cfg.model.overrides()),
        "text": {f.name: getattr(found.data, f.name) for f in fields(found.data)},
        "layers": {f.name: getattr(found.layers, f.name) for f in fields(found.layers)}, "distillation": shape,
    })  # fmt: skip


def texts(
    cfg: TrainSettings, model: Model, folder: Path, console: Console
) -> tuple[list[corpus.Text], list[corpus.Text]]:
    """Answers of `train.tokens` tokens, made where they are not there yet: to train on, and the first ones to judge on.

    Raises:
        UserError: no more texts than are held out.
    """
    chosen, wanted = Options.of(cfg), cfg.train.tokens
    with terminal.counting(console, "writing text", wanted) as bar:
        paths = generate(
            model, chosen.data, Path(chosen.own.texts or folder / _TEXTS), tokens=wanted,
            progress=lambda found: bar.update(bar.task_ids[0], completed=min(found.tokens, wanted)),
        )  # fmt: skip
    found = [text for path in paths for text in read_shard(path)]
    if len(found) <= chosen.own.held_out:
        raise UserError(f"train.held_out={chosen.own.held_out}: there are {len(found)} texts; raise train.tokens")
    return found[chosen.own.held_out :], found[: chosen.own.held_out]


def rebuilt(
    cfg: TrainSettings, model: Model, folder: Path, train: list[corpus.Text], held: list[corpus.Text], console: Console
) -> tuple[FfnMatrices, list[Judged]]:
    """All layers rebuilt one by one, stacked, and how well; those that are there are not rebuilt again. `train.begin`
    has them already."""
    begin = Options.of(cfg).own.begin
    if begin is not None:
        return _begin(model, begin), []
    paths = [folder / "layers" / f"layer_{i:03d}.safetensors" for i in range(model.config.n_layers)]
    if not all(path.exists() for path in paths):
        inputs, judged = (_inputs(cfg, model, folder / name, found, console) for name, found in
                          (("inputs", train), ("judged", held)))  # fmt: skip
        rebuilder = Rebuilder(Options.of(cfg).layers, len(layer_inputs(inputs, 0)))
        with terminal.counting(console, "rebuilding layers", len(paths)) as bar:
            for i, path in enumerate(paths):
                if not path.exists():
                    original = relu.ffn_of(model, i)
                    ffn = rebuilder.rebuild(original, layer_inputs(inputs, i))
                    quality = judge(ffn, original, layer_inputs(judged, i))
                    write_tensors(path, {n: np.asarray(x) for n, x in ffn._asdict().items()}, quality._asdict())
                bar.update(bar.task_ids[0], completed=i + 1)
    found = [read_tensors(path) for path in paths]
    stacked = FfnMatrices(*(jnp.stack([jnp.asarray(tensors[n]) for tensors, _ in found]) for n in FfnMatrices._fields))
    return stacked, [Judged(float(meta["error"]), float(meta["share"])) for _, meta in found]


def _begin(model: Model, name: str) -> FfnMatrices:
    """The FFNs of a ReLU model, or those of another training's checkpoint, before they were rounded.

    Raises:
        UserError: it is none, or of another shape.
    """
    if name.endswith(Path(_STATE).suffix):
        return _checkpoint(model, Path(name))
    other = load(name, ffn="dense")
    shape = ("n_layers", "d_model", "d_ff", "gated", "vocab_size")
    if other.config.activation != "relu" or any(getattr(other.config, n) != getattr(model.config, n) for n in shape):
        raise UserError(f"train.begin={name}: not a ReLU model of the shape of {model.path}")
    return relu.ffns_of(other)


def _checkpoint(model: Model, path: Path) -> FfnMatrices:
    tensors, c = read_tensors(path)[0], model.config
    shapes = FfnMatrices(*((c.n_layers, c.d_ff, c.d_model),) * 2, (c.n_layers, c.d_model, c.d_ff))
    found = [tensors.get(str(i)) for i in range(len(shapes))]
    if any(w is None or w.shape != shape for w, shape in zip(found, shapes, strict=True)):
        raise UserError(f"train.begin={path}: not a checkpoint of a training of {model.path}")
    return FfnMatrices(*map(jnp.asarray, found))


def _inputs(cfg: TrainSettings, model: Model, folder: Path, found: list[corpus.Text], console: Console) -> list[Path]:
    """Files of what the FFNs read over `train.layer_tokens` tokens of these texts."""
    chosen = Options.of(cfg)
    rows, groups, tokens = chosen.distill.rows, [], 0
    for group in pack(found, range(len(found)), rows=rows, drafting=rows):
        if tokens >= chosen.own.layer_tokens:
            break
        groups.append([found[i] for i in group])
        tokens += sum(len(text.tokens) for text in groups[-1])
    with terminal.counting(console, "reading text", len(groups)) as bar:
        return collect_inputs(
            model, groups, folder, rows=rows, progress=lambda done: bar.update(bar.task_ids[0], completed=done)
        )


def distilled(
    cfg: TrainSettings, model: Model, folder: Path, begin: FfnMatrices, train: list[corpus.Text],
    held: list[corpus.Text], console: Console,
) -> tuple[FfnMatrices, list[dict[str, Any]]]:  # fmt: skip
    """The FFNs after the last step, and the curve: losses, tokens seen and fidelity at each checkpoint."""
    chosen = Options.of(cfg)
    distiller = Distiller(model, chosen.distill)
    log = Log(
        folder / _STATE, chosen.distill.steps, chosen.own.judge_every, "tokens",
        count=lambda batch: int((batch.texts.text >= 0).sum()),
        point=lambda state, recent: _point(distiller.judge(state.ffn, held), recent),
    )  # fmt: skip
    state = log.resume(distiller.like())
    if state is None:
        state = distiller.start(begin)
        log.add(0, state)
    with log.shown(console, "distilling", state) as on_step:
        state = distiller.run(state, train, on_step=on_step)
    return state.ffn, log.curve


def _point(fidelity: Fidelity, recent: Sequence[DistillLosses]) -> dict[str, object]:
    """Fidelity, and mean losses since the point before."""
    host = jax.tree.map(np.asarray, recent)
    means = {f"train_{n}": float(np.mean([getattr(x, n) for x in host])) for n in DistillLosses._fields if host}
    return {**fidelity._asdict(), **means}
