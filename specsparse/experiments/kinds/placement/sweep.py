"""Placements of a sweep side by side: expected time by rule against the budget, as table, CSV and figure."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure as Canvas
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specsparse.report.plots import FAINT, Figure, Row
from specsparse.support import tables

_RULES = ("optimal", "powerinfer", "layers", "none")
_MIB = 1 << 20


def rows(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row a record, by budget: seconds by rule, bound, share of reads that are hot, measured seconds where run."""
    out = []
    for record in found:
        summary = record["summary"]
        placements, measured = summary["placements"], summary.get("measured") or {}
        row = {"budget_mib": summary["budget_bytes"] / _MIB}
        row |= {f"{rule}_s": placements[rule]["seconds"] for rule in _RULES}
        row |= {"bound_s": placements["optimal"]["bound_seconds"], "hot_share": placements["optimal"]["hot_share"]}
        row |= {"neurons_mib": summary["neuron_budget_bytes"] / _MIB}
        row |= {f"measured_{name}_s": measured.get(name) for name in ("one", "overlapped")}
        out.append(row)
    return sorted(out, key=lambda row: row["budget_mib"])


def table(found: Sequence[dict[str, Any]]) -> Table:
    """A row a budget."""
    times = (f"{rule}, ms" for rule in _RULES)
    out = tables.new("budget, MiB", "for neurons", *times, "bound, ms", "hot share", "over layers", left=())
    for row in rows(found):
        times = [f"{1e3 * row[f'{rule}_s']:.4g}" for rule in _RULES]
        faster = row["layers_s"] / row["optimal_s"]
        out.add_row(
            f"{row['budget_mib']:,.1f}", f"{row['neurons_mib']:,.1f}", *times, f"{1e3 * row['bound_s']:.4g}",
            f"{row['hot_share']:.1%}", f"{faster:.2f}x",
        )  # fmt: skip
    return out


def show(directory: Path, found: Sequence[dict[str, Any]], out: Console) -> None:
    """Print the table of a sweep and write CSV and figure into its directory."""
    tables.show(out, table(found))
    caption = "Expected tokens per second, a line a rule; below: share of the reads that are hot."
    figure = Figure("vram_budget", "expected time by budget", caption, tuple(rows(found)), _draw, (7.0, 6.0))
    figure.write(directory)
    out.print(Text(f"expected times; {directory}: {', '.join(figure.files)}", style="dim"), soft_wrap=True)


def _draw(canvas: Canvas, rows: Sequence[Row]) -> None:
    top, bottom = canvas.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    budget = [row["budget_mib"] for row in rows]
    for rule in _RULES:
        top.plot(budget, [1 / row[f"{rule}_s"] for row in rows], marker=".", label=rule)
    top.plot(budget, [1 / row["bound_s"] for row in rows], ":", color=FAINT, label="bound")
    top.set(ylabel="expected tokens per second", ylim=(0, None))
    top.legend()
    bottom.plot(budget, [row["hot_share"] for row in rows], marker=".")
    bottom.set(xlabel="vram_budget, MiB", ylabel="reads that are hot", ylim=(0, 1.02))
