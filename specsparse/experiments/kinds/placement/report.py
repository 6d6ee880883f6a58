"""Placements as tables, a figure and plain values."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.figure import Figure as Canvas
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from specsparse.data.devices import GIGA, Device
from specsparse.powerinfer.placement import ModelParts, Placement, Problem
from specsparse.report.plots import Figure, Row
from specsparse.support.tables import new

_DRAWN = ("optimal", "powerinfer", "layers")
_STEPS = 100
_MIB = 1 << 20


def summary(chosen: str, found: Mapping[str, Placement], problem: Problem, parts: ModelParts) -> dict[str, Any]:
    """Plain values for the record."""
    return {
        "chosen": chosen,
        "budget_bytes": problem.budget,
        "neuron_budget_bytes": problem.neuron_budget,
        "parts_bytes": parts.in_order(),
        "placements": {name: _values(p, problem) for name, p in found.items()},
    }


def _values(p: Placement, problem: Problem) -> dict[str, object]:
    return {
        "seconds": p.seconds,
        "bound_seconds": p.bound_s,
        "bytes_on_device": p.bytes_on_device,
        "hot_neurons": [int(h.sum()) for h in p.hot],
        "hot_share": p.hot_share(problem),
        "host_layers": sorted(p.host_layers),
    }


def tables(
    chosen: str, found: Mapping[str, Placement], problem: Problem, parts: ModelParts, pair: Mapping[str, Device]
) -> Iterator[RenderableType]:
    """What a run prints; `pair` is the "hot" and the "cold" device."""
    yield Text("parts of the model, in the order in which they go to the accelerator", style="bold")
    yield _parts(problem, parts)
    yield Text("expected time of a token; the chosen rule is bold", style="bold")
    yield by_rule(chosen, found, problem)
    rates = {side: f"{d.title}, {d.bandwidth / GIGA:,.0f} GB/s" for side, d in pair.items()}
    on = "; ".join(f"{side}: {rates[side]} ({'measured' if d.measured else 'on paper'})" for side, d in pair.items())
    yield Text(f"devices: {on}")
    yield Text(
        "over bound: the time above the least that any choice of neurons has; layers moves whole layers, attention "
        "too, and is not bound by it"
    )
    if chosen == "layers":
        yield Text("chosen: whole layers; a gpuidx file, if one is written, holds the neurons of optimal")


def _parts(problem: Problem, parts: ModelParts) -> Table:
    out, left = new("part", "MiB", "fits"), problem.budget
    for name, size in parts.in_order().items():
        fits = "yes" if size <= left else f"{max(left, 0) / size:.0%}" if name == "neurons" else "no"
        out.add_row(name, f"{size / _MIB:,.2f}", fits)
        left -= size
    out.add_row("budget", f"{problem.budget / _MIB:,.2f}", "")
    return out


def by_rule(chosen: str, found: Mapping[str, Placement], problem: Problem) -> Table:
    """A row a rule."""
    out = new("rule", "ms", "tok/s", "over none", "over bound", "MiB on device", "hot neurons", "hot share")
    slowest, bound = found["none"].seconds, found["optimal"].bound_s
    for name, p in found.items():
        over = "-" if name == "layers" or bound is None else f"+{max(p.seconds / bound - 1, 0):.2%}"
        fits = "" if p.bytes_on_device <= problem.budget else " (over the budget)"
        out.add_row(
            name, f"{1e3 * p.seconds:.4g}", f"{1 / p.seconds:,.1f}", f"{slowest / p.seconds:.2f}x", over,
            f"{p.bytes_on_device / _MIB:,.2f}{fits}", f"{p.hot_neurons:,}", f"{p.hot_share(problem):.1%}",
            style="bold" if name == chosen else None,
        )  # fmt: skip
    return out


def figure(problem: Problem, found: Mapping[str, Placement], *, title: str) -> Figure:
    """How far few neurons go, and which each rule places.

    Rows: the share of a layer's reads that its hottest neurons get, in a hundred steps; its share of neurons, by rule.
    """
    rows: list[Row] = []
    for layer, read in enumerate(problem.read):
        ranked = np.concatenate([[0.0], np.cumsum(np.sort(read)[::-1])])
        held = np.linspace(0, 1, _STEPS + 1)
        reads = np.interp(held, np.linspace(0, 1, len(ranked)), ranked / max(ranked[-1], 1e-12))
        rows += [{"layer": layer, "held": float(x), "reads": float(y)} for x, y in zip(held, reads, strict=True)]
    for name in _DRAWN:
        label = f"{name}, {1e3 * found[name].seconds:.3g} ms"
        rows += [{"layer": i, "rule": label, "placed": float(hot.mean())} for i, hot in enumerate(found[name].hot)]
    caption = "Left: how far few neurons go (darker: later layers). Right: the neurons that each rule places."
    return Figure("placement", title, caption, tuple(rows), partial(_draw, title=title), (11.0, 4.5))


def _draw(canvas: Canvas, rows: Sequence[Row], *, title: str) -> None:
    left, right = canvas.subplots(1, 2)
    last = max(row["layer"] for row in rows)
    for layer in range(last + 1):
        own, shade = [r for r in rows if "held" in r and r["layer"] == layer], 0.25 + 0.6 * layer / max(last, 1)
        left.plot([row["held"] for row in own], [row["reads"] for row in own], color=str(1 - shade), lw=1)
    left.set(xlabel="neurons of a layer, the hottest first", ylabel="share of reads", xlim=(0, 1), ylim=(0, 1.02))
    left.set_title("how far few neurons go (darker: later layers)", fontsize=10)
    for name in dict.fromkeys(row["rule"] for row in rows if "rule" in row):
        right.plot([row["placed"] for row in rows if row.get("rule") == name], marker=".", label=name)
    right.set(xlabel="layer", ylabel="share of neurons on the accelerator", ylim=(-0.02, 1.02))
    right.xaxis.get_major_locator().set_params(integer=True)
    right.legend()
    canvas.suptitle(title)
