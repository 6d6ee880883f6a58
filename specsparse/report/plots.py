"""The kit of figures: rows of numbers and their CSV, a figure made of them, bars and lines to draw it with."""

import base64
import csv
import io
import itertools
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.rcsetup import cycler

from specsparse.support.files import Json, atomically, write_atomically

Row = Json
"""Values by the names of their columns."""
Draw = Callable[[Canvas, Sequence[Row]], None]

# Okabe and Ito's colours, told apart by colour-blind readers too; yellow is left out, it vanishes on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#4D4D4D", "#8C510A")
INK, FAINT = "#222222", "#8a8a8a"
MOST = len(COLOURS)
"""Series in one figure; more cannot be told apart."""

_STYLE = {
    "figure.facecolor": "white",
    "axes.prop_cycle": cycler(color=COLOURS),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.8,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "font.size": 10,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
}
_CAP = 2.5
_LETTERS_AN_INCH = 10  # of a legend's text, so that a line of the widest letters and its key fit


def columns(rows: Sequence[Row]) -> list[str]:
    """Every key of the rows, in order of appearance."""
    return list(dict.fromkeys(key for row in rows for key in row))


def csv_text(rows: Sequence[Row]) -> str:
    """The rows under a heading; missing values are empty."""
    out = io.StringIO()
    writer = csv.DictWriter(out, columns(rows), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


@dataclass(frozen=True)
class Rows:
    """A CSV file without a drawing; `name` is its stem."""

    name: str
    rows: Sequence[Row]

    @property
    def files(self) -> tuple[str, ...]:
        return (f"{self.name}.csv",)

    def write(self, directory: Path) -> None:
        """NAME.csv; UserError if it cannot be written."""
        write_atomically(directory / f"{self.name}.csv", csv_text(self.rows))


@dataclass(frozen=True)
class Figure:
    """A figure that the records have numbers for."""

    name: str  # stem of its files
    title: str
    caption: str  # how to read it, with the definition of what is plotted
    rows: tuple[Row, ...]  # its numbers, all with the same columns
    draw: Draw
    size: tuple[float, float] = (8.0, 4.0)  # inches

    def columns(self) -> list[str]:
        return columns(self.rows)

    @property
    def files(self) -> tuple[str, ...]:
        return f"{self.name}.csv", f"{self.name}.png"

    def canvas(self) -> Canvas:
        with matplotlib.rc_context(_STYLE):
            canvas = Canvas(figsize=self.size, layout="constrained")
            self.draw(canvas, self.rows)
        return canvas

    def _image(self, kind: str) -> bytes:
        out = io.BytesIO()
        # The salt makes the file the same for the same numbers; text as outlines looks the same in every browser.
        with matplotlib.rc_context({**_STYLE, "svg.hashsalt": self.name, "svg.fonttype": "path"}):
            metadata = {"Date": None} if kind == "svg" else None
            self.canvas().savefig(out, format=kind, dpi=150, metadata=metadata)
        return out.getvalue()

    def png(self) -> bytes:
        return self._image("png")

    def data_uri(self) -> str:
        """The drawing as SVG, for a page of one file."""
        return "data:image/svg+xml;base64," + base64.b64encode(self._image("svg")).decode()

    def csv_uri(self) -> str:
        return "data:text/csv;base64," + base64.b64encode(csv_text(self.rows).encode()).decode()

    def write(self, directory: Path) -> None:
        """NAME.png and NAME.csv; UserError if they cannot be written."""
        with atomically(directory / f"{self.name}.png") as file:
            file.write(self.png())
        write_atomically(directory / f"{self.name}.csv", csv_text(self.rows))


@dataclass(frozen=True)
class Missing:
    """A figure that the page leaves out, and the reason."""

    name: str
    title: str
    why: str


def distinct(rows: Sequence[Row], key: str) -> list[Any]:
    return list(dict.fromkeys(row[key] for row in rows))


def series(rows: Sequence[Row], key: str, *, x: str | None = None) -> Iterator[tuple[Any, str, list[Row]]]:
    """(value, its colour, its rows) for each value of a column, in order of appearance; the rows ascend by `x`."""
    for i, value in enumerate(distinct(rows, key)):
        own = [row for row in rows if row[key] == value]
        yield value, COLOURS[i % MOST], own if x is None else sorted(own, key=lambda row: row[x])


def panels(canvas: Canvas, rows: Sequence[Row], key: str, **options: Any) -> Iterator[tuple[Axes, Any, list[Row]]]:
    """(axes, value, its rows) side by side, for each value of a column."""
    values = distinct(rows, key)
    for axes, value in zip(canvas.subplots(1, len(values), squeeze=False, **options)[0], values, strict=True):
        yield axes, value, [row for row in rows if row[key] == value]


def whiskers(row: Row) -> tuple[float, float]:
    """Lengths below and above the value; zeros without an interval."""
    value, low, high = row["value"], row.get("low"), row.get("high")
    return (max(value - low, 0), max(high - value, 0)) if low is not None and high is not None else (0, 0)


def bars(group: str, *, ylabel: str, finish: Callable[[Axes], None], xlabel: str = "") -> Draw:
    """Draws a group of bars for each value of `group`, a colour for each method.

    `finish` is for the axis of values, such as `share`.
    """

    def draw(canvas: Canvas, rows: Sequence[Row]) -> None:
        axes, groups, methods = canvas.subplots(), distinct(rows, group), list(series(rows, "method"))
        width = 0.8 / len(methods)
        for i, (name, colour, all_own) in enumerate(methods):
            own = [row for row in all_own if row["value"] is not None]
            at = [groups.index(row[group]) + (i - (len(methods) - 1) / 2) * width for row in own]
            heights = [row["value"] for row in own]
            axes.bar(at, heights, width * 0.92, color=colour, label=str(name))
            spread = [(x, y, whiskers(row)) for x, y, row in zip(at, heights, own, strict=True) if any(whiskers(row))]
            if spread:
                x, y, ends = zip(*spread, strict=True)
                axes.errorbar(x, y, list(zip(*ends)), fmt="none", ecolor=INK, elinewidth=1, capsize=_CAP)
        axes.set_xticks(range(len(groups)), [str(g) for g in groups])
        axes.grid(axis="x", visible=False)
        axes.set(xlabel=xlabel, ylabel=ylabel)
        finish(axes)
        legend_below(axes)

    return draw


def lines(axes: Axes, rows: Sequence[Row], *, x: str, series: str, names: Sequence[object] | None = None) -> None:
    """A line for each of `series` over `x`, nudged apart so that whiskers do not hide each other.

    `names` are the values of `series`, a colour each, if other axes have more of them than these rows.
    """
    names, places = distinct(rows, series) if names is None else names, sorted(distinct(rows, x))
    gap = min((b - a for a, b in itertools.pairwise(places)), default=1.0)
    step = min(0.05 * gap, 0.012 * (places[-1] - places[0] or gap))
    for i, name in enumerate(names):
        own = sorted((r for r in rows if r[series] == name and r["value"] is not None), key=lambda r: r[x])
        nudge, colour = (i - (len(names) - 1) / 2) * step, COLOURS[i % len(COLOURS)]
        at, heights = [r[x] + nudge for r in own], [r["value"] for r in own]
        axes.plot(at, heights, marker="o", color=colour, label=str(name))
        if own:
            spread = list(zip(*map(whiskers, own)))
            axes.errorbar(at, heights, spread, fmt="none", ecolor=colour, elinewidth=1, capsize=_CAP, alpha=0.7)
    axes.set_xticks(places, [f"{p:g}" for p in places])


def legend_below(axes: Axes, *, columns: int = 4) -> None:
    """A legend under the axes that hides nothing and is not cut, in a figure that grows by it; none for one series."""
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) < 2:
        return
    canvas = axes.get_figure(root=True)
    assert canvas is not None
    labels = without_shared(labels)
    labels = [textwrap.fill(label, int(canvas.get_figwidth() * _LETTERS_AN_INCH)) for label in labels]
    for per_row in range(min(columns, len(labels)), 0, -1):
        legend = canvas.legend(handles, labels, loc="outside lower left", ncols=per_row)
        extent = legend.get_window_extent()
        if extent.width <= canvas.bbox.width or per_row == 1:
            canvas.set_figheight(canvas.get_figheight() + extent.height / canvas.dpi)
            return
        legend.remove()


def without_shared(labels: Sequence[str]) -> list[str]:
    """Labels, words with commas between, without the words that all of them have; as they are if one were empty."""
    words = [label.split(", ") for label in labels]
    own = [[word for word in one if not all(word in other for other in words)] for one in words]
    return [", ".join(one) for one in own] if all(own) else list(labels)


def share(axes: Axes, which: str = "y") -> None:
    axis = axes.yaxis if which == "y" else axes.xaxis
    axis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")


def par(axes: Axes, text: str = "plain") -> None:
    """The line at 1 that a speed-up is read against."""
    axes.axhline(1.0, color=INK, linewidth=1, linestyle=(0, (4, 3)))
    axes.annotate(text, (1, 1), xycoords=("axes fraction", "data"), ha="left", va="center", fontsize=8, color=INK,
                  xytext=(4, 0), textcoords="offset points")  # fmt: skip
