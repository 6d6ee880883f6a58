"""Points of `kind: sparsity`: what they are, as a table, as a figure, and over a sweep."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from matplotlib.figure import Figure as Canvas
from rich.table import Table
from rich.text import Text

from specsparse.measure import intervals
from specsparse.measure.conditions import Conditions
from specsparse.measure.speedups import Speedup, timing_ends
from specsparse.predictors.evaluate import Evaluation
from specsparse.report.methods import Setting
from specsparse.report.plots import FAINT, Figure, Row
from specsparse.support import tables

_TITLES = (
    "kept", "energy", "error", "KL, nats", "ppl", "top-1", "bytes", "by bytes", "tok/s", "speed-up",
    "95 % over repeats",
)  # fmt: skip


@dataclass(frozen=True)
class Point:
    """One setting.

    Attributes:
        value: what was varied: an option's value or a predictor's name; None where nothing was.
        quality: against the dense model.
        by_bytes: the speed-up that bytes would give.
        tokens_per_second, dense_tokens_per_second, speedup: None where nothing was decoded.
    """

    value: float | str | None
    quality: Evaluation
    by_bytes: float
    tokens_per_second: float | None = None
    dense_tokens_per_second: float | None = None
    speedup: Speedup | None = None

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return {**asdict(self), "speedup": None if self.speedup is None else self.speedup.to_dict()}


@dataclass(frozen=True)
class Sparsity:
    """All points, in the order of the config, and what they were taken at, in turn; None where nothing was timed."""

    points: tuple[Point, ...]
    conditions: Conditions | None = None


def table(points: Sequence[Point], *, vary: str) -> Table:
    """A row a point under a row of the dense model. Bytes are shares of the dense FFN's, prediction included."""
    out = tables.new(vary, *_TITLES, left=(), close=True)
    first = points[0]
    dense = ["dense", "100.0%", "100.0%", "0.000", "0.0000", f"{first.quality.model.perplexity_dense:.2f}", "100.0%"]
    out.add_row(*dense, "100.0%", "1.00", _number(first.dense_tokens_per_second, ".1f"), "1.00", "")
    for p in points:
        shown = "" if p.value is None else p.value if isinstance(p.value, str) else f"{p.value:g}"
        out.add_row(shown, *_cells(p.to_dict()))
    return out


def sweep_table(records: Sequence[Mapping[str, Any]], swept: Sequence[Setting]) -> Table:
    """A row a point of every record; `swept` is what differs between their configs."""
    out = tables.new(*(setting.name for setting in swept), *_TITLES, left=(), close=True)
    for number, record in enumerate(records):
        for point in record["summary"]["points"]:
            out.add_row(*(Text(setting.values[number]) for setting in swept), *_cells(point))
    return out


def _cells(point: Mapping[str, Any]) -> list[str]:
    """Of a point as plain values."""
    quality, faster = point["quality"], point["speedup"]
    mean, model, cost = quality["mean"], quality["model"], quality["cost"]
    share = (cost["predictor_bytes"] + cost["sparse_bytes"]) / cost["dense_bytes"]
    return [
        f"{mean['kept']:.1%}", f"{mean['energy']:.1%}", f"{mean['error']:.3f}", f"{model['kl']:.4f}",
        f"{model['perplexity']:.2f}", f"{model['same_top']:.1%}", f"{share:.1%}", f"{point['by_bytes']:.2f}",
        _number(point["tokens_per_second"], ".1f"), f"{faster['ratio_of_totals']:.2f}" if faster else "-",
        intervals.shown(*timing_ends(faster)) if faster else "-",
    ]  # fmt: skip


def _number(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def figure(points: Sequence[Point], *, vary: str, title: str) -> Figure:
    """KL, perplexity and speed-up against the share of neurons kept; a row a point, with every number of it."""
    rows = tuple(
        {vary: p.value, **asdict(p.quality.mean), **asdict(p.quality.model), **asdict(p.quality.cost),
         "by_bytes": p.by_bytes, "tokens_per_second": p.tokens_per_second,
         "dense_tokens_per_second": p.dense_tokens_per_second, "speedup": p.speedup and p.speedup.ratio_of_totals}
        for p in points
    )  # fmt: skip
    caption = "Against the dense model; by bytes: the speed-up that the bytes read would give."
    return Figure("sparsity", title, caption, rows, partial(_draw, vary=vary, title=title), (12.0, 4.0))


def _draw(canvas: Canvas, rows: Sequence[Row], *, vary: str, title: str) -> None:
    rows = sorted(rows, key=lambda row: row["kept"])
    kept, by_name = [row["kept"] for row in rows], isinstance(rows[0][vary], str)
    line = "" if by_name else "-"  # predictors are no steps of one thing
    kl, perplexity, speed = canvas.subplots(1, 3)
    kl.plot(kept, [row["kl"] for row in rows], marker="o", linestyle=line)
    kl.set(ylabel="KL(dense, sparse), nats", ylim=(0, None))
    perplexity.plot(kept, [row["perplexity"] for row in rows], marker="o", linestyle=line, label="sparse")
    perplexity.axhline(rows[0]["perplexity_dense"], color=FAINT, linestyle="--", label="dense")
    perplexity.set(ylabel="perplexity")
    speed.plot(kept, [row["by_bytes"] for row in rows], marker=".", linestyle="" if by_name else "--", label="by bytes")
    if all(row["speedup"] is not None for row in rows):
        speed.plot(kept, [row["speedup"] for row in rows], marker="o", linestyle=line, label="measured")
    speed.axhline(1.0, color=FAINT, linewidth=0.8)
    speed.set(ylabel="speed-up over dense decoding", ylim=(0, None))
    for axes in (kl, perplexity, speed):
        axes.set(xlabel="neurons kept", xlim=(0, 1.02))
    if by_name:
        for row in rows:
            kl.annotate(row[vary], (row["kept"], row["kl"]), (4, 4), textcoords="offset points")
    perplexity.legend()
    speed.legend()
    canvas.suptitle(title)
