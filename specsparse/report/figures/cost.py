"""v(n): what it costs to verify n positions at once."""

from collections.abc import Sequence

from matplotlib.figure import Figure as Canvas

from specsparse.report import plots
from specsparse.report.figure import COLOURS, INK, MOST, Figure, Missing, Row
from specsparse.report.methods import ReportedMethod
from specsparse.report.runs import Run


def verify_cost(runs: Sequence[Run], methods: Sequence[ReportedMethod]) -> Figure | Missing:
    """Measured v(n) with its roofline, a colour a model file."""
    name, title = "verify_cost", "v(n): the cost of a forward pass of n positions"
    found = [run for run in runs if run.summary.get("forwards")]
    if not found:
        return Missing(name, title, "no roofline among the runs: +experiment=roofline measures v(n)")
    rows = []
    for run in found:
        model = str((run.manifest.get("model") or {}).get("file") or run.name)
        device = (run.summary.get("device") or {}).get("title", "")
        for f in run.summary["forwards"]:
            measured, spread = f.get("measured_v"), f.get("spread")
            given = measured is not None and spread is not None
            rows.append({
                "model": model, "device": device, "n": f["n"], "roofline": f["predicted_v"], "bound": f["bound"],
                "value": measured, "low": measured * (1 - spread) if given else None,
                "high": measured * (1 + spread) if given else None,
            })  # fmt: skip
    models = plots.distinct(rows, "model")
    rows = [row for row in rows if row["model"] in models[:MOST]]
    cut = f" The first {MOST} of {len(models)} models." if len(models) > MOST else ""
    caption = (
        "Time of a forward pass of n positions in passes of one. Below the dotted line verifying together is cheaper "
        "than one by one. Dashed: what bytes and multiply-adds ask for at this machine's measured peaks (roofline). "
        "Whiskers: relative spread between repeats, where it was measured." + cut
    )
    return Figure(name, title, caption, tuple(rows), _curves, size=(7.2, 4.4))


def _curves(canvas: Canvas, rows: Sequence[Row]) -> None:
    axes = canvas.subplots()
    most = 0.0
    for i, model in enumerate(plots.distinct(rows, "model")):
        own = sorted((r for r in rows if r["model"] == model), key=lambda r: r["n"])
        colour, ns = COLOURS[i], [r["n"] for r in own]
        measured = [r for r in own if r["value"] is not None]
        dashed = None if measured else model
        axes.plot(ns, [r["roofline"] for r in own], linestyle="--", color=colour, label=dashed)
        if measured:
            spread = list(zip(*map(plots.whiskers, measured)))
            axes.errorbar([r["n"] for r in measured], [r["value"] for r in measured], spread, marker="o", color=colour,
                          elinewidth=1, capsize=2.5, label=model)  # fmt: skip
        most = max(most, *(r["roofline"] for r in own), *(r["value"] for r in measured))
    top = max(r["n"] for r in rows)
    axes.plot([1, top], [1, top], linestyle=":", color=INK, linewidth=1, label="one by one")
    axes.set(xlabel="positions in one pass, n", ylabel="v(n), passes of one position", ylim=(0, most * 1.15))
    axes.set_xticks(sorted({r["n"] for r in rows}))
    plots.legend_below(axes)
