"""Predicted speed-up beside the measured one."""

from collections.abc import Sequence

from matplotlib.figure import Figure as Canvas

from specsparse.report import plots
from specsparse.report.figure import COLOURS, INK, MOST, Figure, Missing, Row
from specsparse.report.methods import ReportedMethod, grouped
from specsparse.report.runs import Run


def predicted_and_measured(runs: Sequence[Run], methods: Sequence[ReportedMethod]) -> Figure | Missing:
    """A point a run: what acceptance, draft length and costs foretell, and what came."""
    name, title = "predicted_and_measured", "Predicted against measured speed-up"
    points = [(m, found, measured) for m in methods
              if (found := m.run.summary.get("explanation")) and (measured := m.speedup()) is not None]  # fmt: skip
    groups, rows = grouped([m for m, _, _ in points], MOST), []
    for (method, found, measured), group in zip(points, groups, strict=True):
        terms = {f"x {f['name']}": f["value"] for f in found["factors"]}
        names = {"method": method.label, "group": group}
        rows.append({**names, "predicted": found["predicted"], **measured.cells(), **terms})
    if not rows:
        why = "no record holds a prediction: +experiment=roofline measures this model's costs, later runs then predict"
        return Missing(name, title, why)
    caption = (
        "Predicted: expected tokens of a round at the run's acceptance and full draft length, over the cost of "
        "verifying, drafting and the round itself as measured on this machine; rounds that found nothing to draft are "
        "plain steps. On the line the two agree; the factors "
        "in the table lead from one to the other. Whiskers: 95 % interval of the measured speed-up over "
        "prompts."
    )
    if len(rows) > len(set(groups)):
        caption += " A colour is a group of runs; the table names each point."
    return Figure(name, title, caption, tuple(rows), _points, size=(6.4, 5.2))


def _points(canvas: Canvas, rows: Sequence[Row]) -> None:
    axes = canvas.subplots()
    for i, group in enumerate(plots.distinct(rows, "group")):
        own = [row for row in rows if row["group"] == group]
        spread = list(zip(*map(plots.whiskers, own)))
        axes.errorbar([r["predicted"] for r in own], [r["value"] for r in own], spread, fmt="o", capsize=2.5,
                      elinewidth=1, color=COLOURS[i], label=group)  # fmt: skip
    most = 1.08 * max(max(r["predicted"], r.get("high") or r["value"]) for r in rows)
    axes.plot([0, most], [0, most], color=INK, linewidth=1, linestyle=(0, (4, 3)))
    axes.set(xlabel="predicted speed-up", ylabel="measured speed-up", xlim=(0, most), ylim=(0, most), aspect="equal")
    plots.legend_below(axes)
