"""`kind: relufy`: a model's FFNs turned from SiLU to ReLU and recovered by distillation, and what that cost."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from specsparse.engine.gguf.reader import open_gguf
from specsparse.experiments.kind import Found, Lab
from specsparse.experiments.kinds.training import relufy_fit as training
from specsparse.experiments.kinds.training.options import Training, TrainSettings
from specsparse.models import catalogue
from specsparse.models.convert.edit import make_delta
from specsparse.models.convert.write import out_type
from specsparse.report.plots import Rows
from specsparse.support.tables import new
from specsparse.training import ffn_model
from specsparse.training.ffn_model import write_relu
from specsparse.training.relu import Judged

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


class Relufy(Training):
    """A model's FFNs turned to ReLU, layer by layer and then together, and what that cost."""

    def check(self, cfg: TrainSettings) -> None:
        """Names and options."""
        catalogue.resolve(cfg.model.path)
        out_type(training.Options.of(cfg).own.quantise)

    def run(self, cfg: TrainSettings, lab: Lab) -> Found:
        """Writes text, rebuilds, distils, exports; each goes on where an earlier run of the same output stopped.

        Raises:
            UserError: a model without a gate or with ReLU already, or another training's output directory.
        """
        console, model = lab.console, lab.load(cfg.model)
        ffn_model.check(model.config)
        folder = training.folder_of(cfg, model)
        training.claim(folder, cfg, model)
        train, held = training.texts(cfg, model, folder, console)
        begin, layers = training.rebuilt(cfg, model, folder, train, held, console)
        ffn, curve = training.distilled(cfg, model, folder, begin, train, held, console)
        path, delta = folder / f"{folder.name}-relu.gguf", folder / f"{folder.name}-relu.delta.gguf"
        write_relu(open_gguf(model.path), ffn, path, out_type(training.Options.of(cfg).own.quantise))
        make_delta(model.path, path, delta)
        rows = _layers(layers, curve[-1]["share"])
        return Found(
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
