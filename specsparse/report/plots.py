"""Bars, lines and points with their intervals, drawn from rows."""

import itertools
import textwrap
from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from specsparse.report.figure import COLOURS, INK, Row

Draw = Callable[[Canvas, Sequence[Row]], None]
_CAP = 2.5
_LETTERS_AN_INCH = 10
"""Of a legend's text, so that a line of the widest letters and its key fit."""


def distinct(rows: Sequence[Row], key: str) -> list[object]:
    """The values of a column in order of appearance."""
    return list(dict.fromkeys(row[key] for row in rows))


def whiskers(row: Row) -> tuple[float, float]:
    """Lengths below and above the value; zero where there is no interval."""
    value, low, high = row["value"], row.get("low"), row.get("high")
    return (max(value - low, 0), max(high - value, 0)) if low is not None and high is not None else (0, 0)


def grouped_bars(axes: Axes, rows: Sequence[Row], *, group: str, series: str) -> None:
    """A group of bars for each value of `group`, a colour for each of `series`."""
    groups, names = distinct(rows, group), distinct(rows, series)
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        own = [row for row in rows if row[series] == name and row["value"] is not None]
        at = [groups.index(row[group]) + (i - (len(names) - 1) / 2) * width for row in own]
        low, high = zip(*map(whiskers, own)) if own else ((), ())
        heights = [row["value"] for row in own]
        axes.bar(at, heights, width * 0.92, color=COLOURS[i], label=str(name))
        drawn = [j for j in range(len(own)) if low[j] or high[j]]
        if drawn:
            spread = [[low[j] for j in drawn], [high[j] for j in drawn]]
            where, tops = [at[j] for j in drawn], [heights[j] for j in drawn]
            axes.errorbar(where, tops, spread, fmt="none", ecolor=INK, elinewidth=1, capsize=_CAP)
    axes.set_xticks(range(len(groups)), [str(g) for g in groups])
    axes.grid(axis="x", visible=False)


def lines(axes: Axes, rows: Sequence[Row], *, x: str, series: str, names: Sequence[object] | None = None) -> None:
    """A line for each of `series` over `x`, nudged apart so that whiskers do not hide each other.

    `names` are what `series` may be, a colour each, where other axes have more of them than these rows.
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


def bars_of_methods(group: str, ylabel: str, finish: Callable[[Axes], None], *, xlabel: str = "") -> Draw:
    """Draws `grouped_bars`, a colour a method; `finish` is for the axis of values, such as `share`."""

    def draw(canvas: Canvas, rows: Sequence[Row]) -> None:
        axes = canvas.subplots()
        grouped_bars(axes, rows, group=group, series="method")
        axes.set(xlabel=xlabel, ylabel=ylabel)
        finish(axes)
        legend_below(axes)

    return draw


def lines_of_methods(x: str, ylabel: str, finish: Callable[[Axes], None], *, xlabel: str) -> Draw:
    """Draws `lines` from 0 on, a colour a method."""

    def draw(canvas: Canvas, rows: Sequence[Row]) -> None:
        axes = canvas.subplots()
        lines(axes, rows, x=x, series="method")
        axes.set(xlabel=xlabel, ylabel=ylabel)
        axes.set_ylim(bottom=0)
        finish(axes)
        legend_below(axes)

    return draw


def legend_below(axes: Axes, *, columns: int = 4) -> None:
    """A legend under the axes that hides nothing and is not cut, in a figure that grows by it; none for one series."""
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) < 2:
        return
    canvas = axes.get_figure(root=True)
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
    """Ticks in percent, from nothing to all."""
    axis = axes.yaxis if which == "y" else axes.xaxis
    axis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")


def par(axes: Axes, text: str = "plain") -> None:
    """The line at 1 that a speed-up is read against."""
    axes.axhline(1.0, color=INK, linewidth=1, linestyle=(0, (4, 3)))
    axes.annotate(text, (1, 1), xycoords=("axes fraction", "data"), ha="left", va="center", fontsize=8, color=INK,
                  xytext=(4, 0), textcoords="offset points")  # fmt: skip
