"""Evaluations as a table, as CSV and as a figure."""

import csv
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from specsparse.errors import UserError
from specsparse.predictors.fit.evaluate import Evaluation
from specsparse.predictors.fit.quality import LayerQuality

_RATES = tuple(f.name for f in fields(LayerQuality))


def comparison(found: Sequence[Evaluation]) -> Table:
    """A row a predictor, all layers together. Bytes and time are shares of the dense FFN's for one token.

    "own" is the prediction alone; "bytes" adds the kept neurons; "error" is that of the FFN's output.
    """
    columns = ("predictor", "kept", "recall", "precision", "energy", "error", "KL, nats", "ppl", "top-1", "own bytes",
               "bytes", "own time")  # fmt: skip
    out = _table(*columns)
    for e in found:
        time = f"{e.cost.predictor_s / e.cost.dense_s:.0%}" if e.cost.dense_s else "-"
        out.add_row(
            e.name, *_cells(e.mean)[1:], f"{e.model.kl:.4f}", f"{e.model.perplexity:.2f}", f"{e.model.same_top:.1%}",
            f"{e.cost.predictor_bytes / e.cost.dense_bytes:.1%}", f"{e.cost.bytes_share:.1%}", time,
        )  # fmt: skip
    return out


def by_layer(found: Evaluation) -> Table:
    """A row a layer of one predictor."""
    out = _table("layer", "active", "kept", "recall", "precision", "energy", "error")
    for i, quality in enumerate(found.layers):
        out.add_row(str(i), *_cells(quality))
    out.add_row("all", *_cells(found.mean))
    return out


def write_csv(path: Path, found: Sequence[Evaluation]) -> None:
    """A line a predictor and layer, "all" for the whole; columns as in `LayerQuality`, `ModelQuality` and `Cost`."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        first = found[0]
        extra = [*asdict(first.model), *asdict(first.cost)]
        writer.writerow(["predictor", "layer", *_RATES, *extra])
        for e in found:
            for i, quality in enumerate(e.layers):
                writer.writerow([e.name, i, *(getattr(quality, n) for n in _RATES), *[""] * len(extra)])
            whole = [*asdict(e.model).values(), *asdict(e.cost).values()]
            writer.writerow([e.name, "all", *(getattr(e.mean, n) for n in _RATES), *whole])


def write_figure(path: Path, found: Sequence[Evaluation], *, title: str) -> None:
    """Recall, precision, kept share and output error by layer, a line a predictor, as PNG.

    Raises:
        UserError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("a figure needs matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=(11, 7), layout="constrained")
    panels = {"recall": "recall", "precision": "precision", "kept": "kept share", "error": "FFN output error"}
    for axes, (name, label) in zip(figure.subplots(2, 2).flat, panels.items(), strict=True):
        for e in found:
            axes.plot([getattr(q, name) for q in e.layers], marker=".", label=e.name)
        axes.set(xlabel="layer", ylabel=label, ylim=(0, None if name == "error" else 1.02))
        axes.grid(alpha=0.3)
    figure.axes[0].legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def _table(*columns: str) -> Table:
    out = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for i, name in enumerate(columns):
        out.add_column(name, justify="right" if i else "left", no_wrap=True)
    return out


def _cells(q: LayerQuality) -> list[str]:
    """Active, kept, recall, precision, energy, error."""
    return [*(f"{x:.1%}" for x in (q.active, q.kept, q.recall, q.precision, q.energy)), f"{q.error:.3f}"]
