"""Evaluations of predictors as tables and as a figure."""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

from matplotlib.figure import Figure as Canvas
from rich.table import Table

from specsparse.predictors.evaluate import Evaluation, LayerQuality
from specsparse.report.plots import Figure, Row
from specsparse.support import tables


def comparison(found: Sequence[Evaluation]) -> Table:
    """A row a predictor, all layers together. Bytes and time are shares of the dense FFN's for one token.

    "own" is the prediction alone; "bytes" adds the kept neurons; "error" is that of the FFN's output.
    """
    columns = ("predictor", "kept", "recall", "precision", "energy", "error", "KL, nats", "ppl", "top-1", "own bytes",
               "bytes", "own time")  # fmt: skip
    out = tables.new(*columns, close=True)
    for e in found:
        time = f"{e.cost.predictor_s / e.cost.dense_s:.0%}" if e.cost.dense_s else "-"
        out.add_row(
            e.name, *_cells(e.mean)[1:], f"{e.model.kl:.4f}", f"{e.model.perplexity:.2f}", f"{e.model.same_top:.1%}",
            f"{e.cost.predictor_bytes / e.cost.dense_bytes:.1%}", f"{e.cost.bytes_share:.1%}", time,
        )  # fmt: skip
    return out


def by_layer(found: Evaluation) -> Table:
    """A row a layer of one predictor."""
    out = tables.new("layer", "active", "kept", "recall", "precision", "energy", "error", close=True)
    for i, quality in enumerate(found.layers):
        out.add_row(str(i), *_cells(quality))
    out.add_row("all", *_cells(found.mean))
    return out


def figure(found: Sequence[Evaluation], *, title: str) -> Figure:
    """Recall, precision, kept share and output error by layer, a line a predictor.

    A row a predictor and layer, "all" for the whole; columns as in `LayerQuality`, `ModelQuality` and `Cost`.
    """
    rows = []
    for e in found:
        rows += [{"predictor": e.name, "layer": i, **asdict(quality)} for i, quality in enumerate(e.layers)]
        rows.append({"predictor": e.name, "layer": "all", **asdict(e.mean), **asdict(e.model), **asdict(e.cost)})
    caption = "On the dense model's residuals, layer by layer."
    return Figure("predictors", title, caption, tuple(rows), partial(_draw, title=title), (11.0, 7.0))


def _draw(canvas: Canvas, rows: Sequence[Row], *, title: str) -> None:
    panels = {"recall": "recall", "precision": "precision", "kept": "kept share", "error": "FFN output error"}
    for axes, (key, label) in zip(canvas.subplots(2, 2).flat, panels.items(), strict=True):
        for name in dict.fromkeys(row["predictor"] for row in rows):
            own = [row for row in rows if row["predictor"] == name and row["layer"] != "all"]
            axes.plot([row["layer"] for row in own], [row[key] for row in own], marker=".", label=name)
        axes.set(xlabel="layer", ylabel=label, ylim=(0, None if key == "error" else 1.02))
    canvas.axes[0].legend()
    canvas.suptitle(title)


def _cells(q: LayerQuality) -> list[str]:
    """Active, kept, recall, precision, energy, error."""
    return [*(f"{x:.1%}" for x in (q.active, q.kept, q.recall, q.precision, q.energy)), f"{q.error:.3f}"]
