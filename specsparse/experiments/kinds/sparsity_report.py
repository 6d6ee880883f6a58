"""Points of `kind: sparsity` as a table, as CSV, as a figure, and over a sweep."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from specsparse.errors import UserError
from specsparse.measure import intervals
from specsparse.measure.speedup import timing_ends
from specsparse.report.varied import Setting

if TYPE_CHECKING:
    from specsparse.experiments.kinds.sparsity import Point

CSV_FILE, FIGURE_FILE = "sparsity.csv", "sparsity.png"
_TITLES = (
    "kept", "energy", "error", "KL, nats", "ppl", "top-1", "bytes", "by bytes", "tok/s", "speed-up",
    "95 % over repeats",
)  # fmt: skip


def table(points: Sequence["Point"], *, vary: str) -> Table:
    """A row a point under a row of the dense model. Bytes are shares of the dense FFN's, prediction included."""
    out = _table(vary)
    first = points[0]
    dense = ["dense", "100.0%", "100.0%", "0.000", "0.0000", f"{first.quality.model.perplexity_dense:.2f}", "100.0%"]
    out.add_row(*dense, "100.0%", "1.00", _number(first.dense_tokens_per_second, ".1f"), "1.00", "")
    for p in points:
        shown = "" if p.value is None else p.value if isinstance(p.value, str) else f"{p.value:g}"
        out.add_row(shown, *_cells(p.to_dict()))
    return out


def sweep_table(records: Sequence[Mapping[str, Any]], swept: Sequence[Setting]) -> Table:
    """A row a point of every record; `swept` is what differs between their configs."""
    out = _table(*(setting.name for setting in swept))
    for number, record in enumerate(records):
        for point in record["summary"]["points"]:
            out.add_row(*(Text(setting.values[number]) for setting in swept), *_cells(point))
    return out


def _table(*keys: str) -> Table:
    out = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for title in (*keys, *_TITLES):
        out.add_column(title, justify="right", no_wrap=True)
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


def write_csv(path: Path, points: Sequence["Point"], *, vary: str) -> None:
    """A line a point, with every number of its quality, cost and speed."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        parts = [{vary: p.value, **asdict(p.quality.mean), **asdict(p.quality.model), **asdict(p.quality.cost),
                  "by_bytes": p.by_bytes, "tokens_per_second": p.tokens_per_second,
                  "dense_tokens_per_second": p.dense_tokens_per_second,
                  "speedup": p.speedup and p.speedup.ratio_of_totals} for p in points]  # fmt: skip
        writer.writerow(parts[0])
        writer.writerows(part.values() for part in parts)


def write_figure(path: Path, points: Sequence["Point"], *, title: str) -> None:
    """KL, perplexity and speed-up against the share of neurons kept, as PNG.

    Raises:
        UserError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("a figure needs matplotlib: pip install matplotlib") from None
    ordered = sorted(points, key=lambda p: p.quality.mean.kept)
    kept = [p.quality.mean.kept for p in ordered]
    by_name = isinstance(ordered[0].value, str)
    line = "" if by_name else "-"  # predictors are no steps of one thing
    figure = Figure(figsize=(12, 4), layout="constrained")
    kl, perplexity, speed = figure.subplots(1, 3)
    kl.plot(kept, [p.quality.model.kl for p in ordered], marker="o", linestyle=line)
    kl.set(ylabel="KL(dense, sparse), nats", ylim=(0, None))
    perplexity.plot(kept, [p.quality.model.perplexity for p in ordered], marker="o", linestyle=line, label="sparse")
    perplexity.axhline(ordered[0].quality.model.perplexity_dense, color="grey", linestyle="--", label="dense")
    perplexity.set(ylabel="perplexity")
    speed.plot(kept, [p.by_bytes for p in ordered], marker=".", linestyle="" if by_name else "--", label="by bytes")
    if all(p.speedup for p in ordered):
        speed.plot(kept, [p.speedup.ratio_of_totals for p in ordered], marker="o", linestyle=line, label="measured")
    speed.axhline(1.0, color="grey", linewidth=0.8)
    speed.set(ylabel="speed-up over dense decoding", ylim=(0, None))
    for axes in (kl, perplexity, speed):
        axes.set(xlabel="neurons kept", xlim=(0, 1.02))
        axes.grid(alpha=0.3)
    if by_name:
        for p in ordered:
            kl.annotate(str(p.value), (p.quality.mean.kept, p.quality.model.kl), (4, 4), textcoords="offset points")
    perplexity.legend()
    speed.legend()
    figure.suptitle(f"{title} (lossy)")
    figure.savefig(path, dpi=120)
