"""`kind: relufy`: a model's FFNs turned from SiLU to ReLU and recovered by distillation, and what that cost.

Texts, rebuilt layers and checkpoints lie in a directory that a later run goes on from.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.text import Text

from specsparse.api import load
from specsparse.engine.gguf.reader import open_gguf
from specsparse.engine.model import Model
from specsparse.errors import UserError
from specsparse.experiments.kind import RunContext, RunResult
from specsparse.experiments.kinds import train_settings
from specsparse.experiments.kinds.train_settings import STATE, TRAINING, Training, TrainSettings
from specsparse.experiments.trackers.base import Series
from specsparse.models import catalogue
from specsparse.models.convert.edit import make_delta
from specsparse.models.convert.write import out_type
from specsparse.report.plots import Rows
from specsparse.support import tables
from specsparse.support.files import read_tensors, write_tensors
from specsparse.support.options import Count
from specsparse.training import corpus, relu
from specsparse.training.corpus import DataOptions, pack
from specsparse.training.relu import DistillLosses, DistillOptions, FfnMatrices, Judged, LayerOptions, layer_inputs
from specsparse.training.training_loop import Log

LAYERS = Series("layers", "layer")
_COLUMNS = ("step", "tokens", "divergence", "perplexity", "original", "agreement")
DEFINITIONS = {
    "divergence": "mean KL(original, ReLU model) of the next token in nats, over the rows of held-out answers",
    "perplexity": "of those answers under the ReLU model; `original`: under the original",
    "agreement": "share of those rows whose most likely token is the original's",
    "share": "neurons whose activation is not zero / all, by layer",
    "error": "a rebuilt layer on inputs it has not seen: weighted relative squared error of its output",
}


@dataclass(frozen=True)
class OwnOptions:
    """Options beside those of text and training; see conf/experiment/relufy.yaml."""

    layer_tokens: Count = 40_000
    held_out: Count = 16
    judge_every: Count = 60
    quantise: str = "Q4_0"
    begin: str | None = None
    texts: str | None = None


class Options(NamedTuple):
    """The keys of `train`, by what they belong to."""

    own: OwnOptions
    data: DataOptions
    layers: LayerOptions
    distill: DistillOptions

    @classmethod
    def from_settings(cls, cfg: TrainSettings) -> "Options":
        return cls(*train_settings.options(cfg, OwnOptions, DataOptions, LayerOptions, DistillOptions))


class Relufy(Training):
    """A model's FFNs turned to ReLU, layer by layer and then together, and what that cost."""

    def check(self, cfg: TrainSettings) -> None:
        catalogue.resolve(cfg.model.path)
        out_type(Options.from_settings(cfg).own.quantise)

    def run(self, cfg: TrainSettings, ctx: RunContext) -> RunResult:
        """Writes text, rebuilds, distils, exports; each goes on if an earlier run of the same output was stopped.

        Steps, their rates, their precision and the amount of text may change between two runs; nothing else may.
        """
        model, chosen = ctx.load(cfg.model), Options.from_settings(cfg)
        relu.check(model.config)
        folder = Path(cfg.train.output or Path("relu") / Path(model.path).stem)
        rates = {"steps", "rate", "warmup", "decay", "precision"}
        distillation = {key: value for key, value in vars(chosen.distill).items() if key not in rates}
        identity = {"text": vars(chosen.data), "layers": vars(chosen.layers), "distillation": distillation}
        train_settings.claim(folder, cfg, model, identity)
        ctx.tracker.follow(folder)
        own = chosen.own
        found, _ = train_settings.own_texts(cfg, chosen.data, model, Path(own.texts or folder / "texts"), ctx)
        if len(found) <= own.held_out:
            raise UserError(f"train.held_out={own.held_out}: there are {len(found)} texts; raise train.tokens")
        train, held = found[own.held_out :], found[: own.held_out]
        if own.begin is None:
            begin, layers = rebuilt(chosen, model, folder, train, held, ctx)
        else:
            begin, layers = _begin(model, own.begin), []
        ffn, curve = distilled(chosen, model, folder, begin, train, held, ctx)
        path, delta = folder / f"{folder.name}-relu.gguf", folder / f"{folder.name}-relu.delta.gguf"
        relu.write_relu(open_gguf(model.path), ffn, path, out_type(own.quantise))
        make_delta(model.path, path, delta)
        shares = curve[-1]["share"]
        rows = [
            {"layer": i, **(judged._asdict() if judged else {}), "distilled_share": share}
            for i, (judged, share) in enumerate(zip(layers or [None] * len(shares), shares, strict=True))
        ]
        titles = ("step", "tokens", "KL, nats", "ppl", "original's", "ratio", "same token", "active")
        table = tables.new(*titles, left=())
        for p in curve:
            table.add_row(
                str(p["step"]), str(p["tokens"]), f"{p['divergence']:.4f}", f"{p['perplexity']:.3f}",
                f"{p['original']:.3f}", f"{p['perplexity'] / p['original']:.3f}", f"{p['agreement']:.1%}",
                f"{np.mean(p['share']):.1%}",
            )  # fmt: skip
        return RunResult(
            {"model": str(path), "delta": str(delta), "layers": rows, "curve": list(curve)},
            path,
            shown=[
                Text("held-out answers: ReLU model against the original", style="bold"),
                table,
                f"model: {path}; difference to the original: {delta}",
            ],
            figures=[Rows("curve", [{key: point[key] for key in _COLUMNS} for point in curve]), Rows("layers", rows)],
            trained=[path, delta],
            definitions=DEFINITIONS,
            objective=curve[-1]["original"] / curve[-1]["perplexity"],
        )


def rebuilt(
    chosen: Options, model: Model, folder: Path, train: list[corpus.Text], held: list[corpus.Text], ctx: RunContext
) -> tuple[FfnMatrices, list[Judged]]:
    """All layers rebuilt one by one, stacked, and how well; those that are there are not rebuilt again."""
    paths = [folder / "layers" / f"layer_{i:03d}.safetensors" for i in range(model.config.n_layers)]
    if not all(path.exists() for path in paths):
        inputs = _inputs(chosen, model, folder / "inputs", train, ctx)
        judged = _inputs(chosen, model, folder / "judged", held, ctx)
        rebuilder = relu.Rebuilder(chosen.layers, len(layer_inputs(inputs, 0)))
        with ctx.counting("rebuilding layers", len(paths)) as step:
            for i, path in enumerate(paths):
                if not path.exists():
                    original = relu.ffn_of(model, i)
                    ffn = rebuilder.rebuild(original, layer_inputs(inputs, i))
                    quality = relu.judge(ffn, original, layer_inputs(judged, i))
                    write_tensors(path, {n: np.asarray(x) for n, x in ffn._asdict().items()}, quality._asdict())
                    ctx.tracker.point(LAYERS, {"layer": i, **quality._asdict()})
                step()
    found = [read_tensors(path) for path in paths]
    stacked = FfnMatrices(*(jnp.stack([jnp.asarray(tensors[n]) for tensors, _ in found]) for n in FfnMatrices._fields))
    return stacked, [Judged(float(meta["error"]), float(meta["share"])) for _, meta in found]


def _begin(model: Model, name: str) -> FfnMatrices:
    """The FFNs of a ReLU model, or those of another training's checkpoint, before they were rounded."""
    c = model.config
    if name.endswith(Path(STATE).suffix):
        up, down, tensors = (
            (c.n_layers, c.d_ff, c.d_model),
            (c.n_layers, c.d_model, c.d_ff),
            read_tensors(Path(name))[0],
        )
        shapes = (up, up, down)
        found = [tensors.get(str(i)) for i in range(len(shapes))]
        if all(w is not None and w.shape == shape for w, shape in zip(found, shapes, strict=True)):
            return FfnMatrices(*map(jnp.asarray, found))
    else:
        other, shape = load(name, ffn="dense"), ("n_layers", "d_model", "d_ff", "gated", "vocab_size")
        if other.config.activation == "relu" and all(getattr(other.config, n) == getattr(c, n) for n in shape):
            return relu.ffns_of(other)
    raise UserError(f"train.begin={name}: neither a ReLU model of the shape of {model.path} nor a checkpoint of one")


def _inputs(chosen: Options, model: Model, folder: Path, found: list[corpus.Text], ctx: RunContext) -> list[Path]:
    """Files of what the FFNs read over `train.layer_tokens` tokens of these texts."""
    rows, groups, tokens = chosen.distill.rows, [], 0
    for group in pack(found, range(len(found)), rows=rows, drafting=rows):
        if tokens >= chosen.own.layer_tokens:
            break
        groups.append([found[i] for i in group])
        tokens += sum(len(text.tokens) for text in groups[-1])
    with ctx.counting("reading text", len(groups)) as step:
        return relu.collect_inputs(model, groups, folder, rows=rows, progress=step)


def distilled(
    chosen: Options, model: Model, folder: Path, begin: FfnMatrices, train: list[corpus.Text],
    held: list[corpus.Text], ctx: RunContext,
) -> tuple[FfnMatrices, list[dict[str, Any]]]:  # fmt: skip
    """The FFNs after the last step, and the curve: losses, tokens seen and fidelity at each checkpoint."""
    distiller = relu.Distiller(model, chosen.distill)

    def point(state: Any, recent: Sequence[DistillLosses]) -> dict[str, object]:
        """Fidelity, and mean losses since the point before."""
        host = jax.tree.map(np.asarray, recent)
        means = {f"train_{n}": float(np.mean([getattr(x, n) for x in host])) for n in DistillLosses._fields if host}
        return {**distiller.judge(state.ffn, held)._asdict(), **means, **distiller.rate(state)}

    log = Log(
        folder / STATE, chosen.distill.steps, chosen.own.judge_every, "tokens",
        count=lambda batch: int((batch.texts.text >= 0).sum()),
        point=point,
        publish=lambda point: ctx.tracker.point(TRAINING, {**point, "share": float(np.mean(point["share"]))}),
    )  # fmt: skip
    state = log.resume(distiller.like())
    if state is None:
        state = distiller.start(begin)
        log.add(0, state)
    with log.shown(ctx.console, "distilling", state) as on_step:
        state = distiller.run(state, train, on_step=on_step)
    return state.ffn, log.curve
