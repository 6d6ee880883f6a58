"""`kind: relufy`: a model's FFNs turned from SiLU to ReLU and recovered by distillation, and what that cost."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specsparse.engine.gguf.reader import open_gguf
from specsparse.experiments import trackers
from specsparse.experiments.config import RunConfig
from specsparse.experiments.decoding import Engine
from specsparse.experiments.kind import check_name
from specsparse.experiments.kinds import relu_training as training
from specsparse.models import catalogue
from specsparse.models.convert.delta import make_delta
from specsparse.models.convert.write import out_type
from specsparse.report.record import RECORD_FILE
from specsparse.runtime import manifest
from specsparse.support import terminal
from specsparse.training import trunk
from specsparse.training.reconstruct import Judged
from specsparse.training.relu_export import write_relu

CSV_FILE, LAYERS_FILE = "curve.csv", "layers.csv"
_COLUMNS = ("step", "tokens", "divergence", "perplexity", "original", "agreement")
DEFINITIONS = {
    "divergence": "mean KL(original, ReLU model) of the next token's law in nats, over the rows of held-out answers",
    "perplexity": "of those answers under the ReLU model; `original`: under the original",
    "agreement": "share of those rows whose most likely token is the original's",
    "share": "neurons whose activation is not zero / all, by layer",
    "error": "a rebuilt layer on inputs it has not seen: weighted relative squared error of its output",
}


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

    @property
    def as_promised(self) -> bool:
        """Another model promises nothing."""
        return True

    @property
    def objective(self) -> float:
        """Perplexity of the original over the ReLU model's."""
        return self.curve[-1]["original"] / self.curve[-1]["perplexity"]


def check(cfg: RunConfig) -> None:
    """Names and options, before anything is loaded.

    Raises:
        UserError: whatever is wrong.
    """
    catalogue.resolve(cfg.model.path)
    out_type(training.options(cfg).own.quantise)
    trackers.check(cfg.tracker.name, cfg.tracker.options)
    check_name(cfg)


def run(cfg: RunConfig, directory: Path, *, engine: Engine, console: Console) -> Relufied:
    """Writes text, rebuilds, distils, exports; each of these goes on where an earlier run of the same output stopped.

    Raises:
        UserError: a model without a gate or with ReLU already, or another training's output directory.
    """
    check(cfg)
    with terminal.loading(console, f"loading {cfg.model.path}") as progress:
        model = engine.load(cfg.model.path, progress=progress, **cfg.model.overrides())
    trunk.check(model.config)
    folder = training.folder_of(cfg, model)
    training.claim(folder, cfg, model)
    train, held = training.texts(cfg, model, folder, console)
    begin, layers = training.rebuilt(cfg, model, folder, train, held, console)
    ffn, curve = training.distilled(cfg, model, folder, begin, train, held, console)
    path, delta = folder / f"{folder.name}-relu.gguf", folder / f"{folder.name}-relu.delta.gguf"
    write_relu(open_gguf(model.path), ffn, path, out_type(training.options(cfg).own.quantise))
    make_delta(model.path, path, delta)
    result = Relufied(path, delta, tuple(layers), tuple(curve))
    _write(cfg, directory, result, console)
    return result


def _write(cfg: RunConfig, directory: Path, result: Relufied, console: Console) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    made = manifest.build(cfg.composed, Path(catalogue.resolve(cfg.model.path)))
    (directory / CSV_FILE).write_text(_csv(_COLUMNS, result.curve), encoding="utf-8")
    last = result.curve[-1]
    layers = result.layers or [None] * len(last["share"])
    rows = [{"layer": i, **(judged._asdict() if judged else {}), "distilled_share": share}
            for i, (judged, share) in enumerate(zip(layers, last["share"], strict=True))]  # fmt: skip
    (directory / LAYERS_FILE).write_text(_csv(tuple(rows[0]), rows), encoding="utf-8")
    summary = {"model": str(result.path), "delta": str(result.delta), "layers": rows, "curve": list(result.curve)}
    trackers.make(cfg.tracker.name, cfg.tracker.options, directory).finish({
        "name": cfg.name, "kind": cfg.kind, "summary": summary, "definitions": DEFINITIONS,
        "manifest": made, "config": made["config"],
    })  # fmt: skip
    console.print(Text("held-out answers: ReLU model against the original", style="bold"))
    console.print(_table(result.curve))
    console.print(Text(f"model: {result.path}; difference to the original: {result.delta}"))
    console.print(Text(f"record: {directory / RECORD_FILE}, {CSV_FILE}, {LAYERS_FILE}", style="dim"))


def _csv(columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> str:
    """A line a row; a number to six digits."""
    lines = [",".join(columns)]
    lines += [",".join(f"{row[name]:.6g}" for name in columns) for row in rows]
    return "\n".join(lines) + "\n"


def _table(curve: Sequence[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("step", "tokens", "KL, nats", "ppl", "original's", "ratio", "same token", "active"):
        table.add_column(name, justify="right")
    for p in curve:
        table.add_row(
            str(p["step"]), str(p["tokens"]), f"{p['divergence']:.4f}", f"{p['perplexity']:.3f}",
            f"{p['original']:.3f}", f"{p['perplexity'] / p['original']:.3f}", f"{p['agreement']:.1%}",
            f"{np.mean(p['share']):.1%}",
        )  # fmt: skip
    return table
