"""Neurons that a pass of several rows reads: the union of what its rows keep."""

from collections.abc import Sequence

from matplotlib.figure import Figure as Canvas

from specsparse.report import plots
from specsparse.report.figure import COLOURS, MOST, Figure, Missing, Row
from specsparse.report.methods import ReportedMethod
from specsparse.report.runs import Run

_SOURCES = {"text": "consecutive tokens of a text", "seen": "passes that verified drafts"}
_MOST_RUNS = MOST // len(_SOURCES)
_LINES = {"union": "-", "guess": "--"}


def union_size(runs: Sequence[Run], methods: Sequence[ReportedMethod]) -> Figure | Missing:
    """Lines over the rows of a pass: in a text, in the passes of the run, and what independent rows would need."""
    name, title = "union_size", "Kept neurons and their union over the rows of a pass"
    found = [run for run in runs if any(run.summary.get(source) for source in _SOURCES)]
    labels = {id(m.run): m.label for m in reversed(methods)}
    rows = []
    for run in found[:_MOST_RUNS]:
        label = f"{labels.get(id(run), run.directory.name)}: " if len(found) > 1 else ""
        for source, words in _SOURCES.items():
            for point in run.summary.get(source) or ():
                if point.get("batch") == 1:
                    shares = {key: point[key] for key in ("kept", "union", "guess")}
                    names = {"source": f"{label}{words}", "rows": point["rows"], "passes": point["passes"]}
                    rows.append({**names, **shares})
    if not rows:
        return Missing(name, title, "no record holds unions of kept neurons: +experiment=spec_sparse measures them")
    caption = (
        "Share of the FFNs' neurons that some row of a pass keeps (solid), mean over passes and layers; dashed: what "
        "it would be if rows were independent, 1 - (1 - kept)^rows layer by layer. Where the solid line lies lower, "
        "neighbouring tokens share neurons, and a verifying pass reads less than chance would have it."
    )
    if len(found) > _MOST_RUNS:
        caption += f" The first {_MOST_RUNS} of {len(found)} runs."
    return Figure(name, title, caption, tuple(rows), _curves, size=(7.2, 4.2))


def _curves(canvas: Canvas, rows: Sequence[Row]) -> None:
    axes = canvas.subplots()
    for i, source in enumerate(plots.distinct(rows, "source")):
        own = sorted((r for r in rows if r["source"] == source), key=lambda r: r["rows"])
        for key, dashes in _LINES.items():
            label = source if key == "union" else None
            axes.plot([r["rows"] for r in own], [r[key] for r in own], linestyle=dashes, marker="o", markersize=4,
                      color=COLOURS[i], label=label)  # fmt: skip
    axes.set(xlabel="rows of a pass", ylabel="neurons read")
    axes.set_ylim(0, 1.02)
    axes.set_xticks(sorted(plots.distinct(rows, "rows")))
    plots.share(axes)
    plots.legend_below(axes)
