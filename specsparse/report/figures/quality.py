"""What a lossy choice costs in quality and gains in speed."""

from collections.abc import Sequence

from matplotlib.figure import Figure as Canvas

from specsparse.report import plots
from specsparse.report.figure import COLOURS, FAINT, Figure, Missing, Row
from specsparse.report.methods import Method
from specsparse.report.runs import Run


def quality_and_speed(runs: Sequence[Run], methods: Sequence[Method]) -> Figure | Missing:
    """Points: KL to the exact model over relative speed; those that no other beats in both lie on the front."""
    name, title = "quality_and_speed", "Quality against speed"
    rows = [row for run in runs for row in _rows(run)]
    if not rows:
        return Missing(name, title, "no record holds the KL of a lossy choice (train_predictors, quant_table)")
    best = front([(row["speed"], row["kl"]) for row in rows])
    rows = [{**row, "on the front": at in best} for at, row in enumerate(rows)]
    caption = (
        "Mean KL to the exact model's next-token law in nats (lower is closer) over speed (right is faster). A filled "
        "point is on the Pareto front: no other is at least as fast and as close, and better in one. KL has no "
        "interval: it is a mean over one text."
    )
    return Figure(name, title, caption, tuple(rows), _points, size=(7.4, 4.6))


def front(points: Sequence[tuple[float, float]]) -> set[int]:
    """Indices of the points (speed, loss) that none beats: faster is better, and less loss."""

    def beaten(speed: float, loss: float) -> bool:
        return any(s >= speed and x <= loss and (s > speed or x < loss) for s, x in points)

    return {i for i, point in enumerate(points) if not beaten(*point)}


def _rows(run: Run) -> list[dict]:
    """Of the kinds of record that hold a KL and a speed."""
    return [*_predictors(run)]


def _predictors(run: Run) -> list[dict]:
    """Predictors of active neurons: bytes of an FFN that are not read are the speed that could be."""
    out = []
    for found in run.summary.get("evaluations") or ():
        model, cost = found.get("model") or {}, found.get("cost") or {}
        read = cost.get("predictor_bytes", 0) + cost.get("sparse_bytes", 0)
        if model.get("kl") is not None and cost.get("dense_bytes") and read:
            out.append({
                "method": found["name"], "speed": cost["dense_bytes"] / read, "kl": model["kl"],
                "perplexity": model.get("perplexity"), "unit": "FFN bytes, dense over read",
            })  # fmt: skip
    return out


def _points(canvas: Canvas, rows: Sequence[Row]) -> None:
    units = plots.distinct(rows, "unit")
    panels = canvas.subplots(1, len(units), squeeze=False)[0]
    for axes, unit in zip(panels, units, strict=True):
        own = [r for r in rows if r["unit"] == unit]
        best = sorted((r for r in own if r["on the front"]), key=lambda r: r["speed"])
        axes.step([r["speed"] for r in best], [r["kl"] for r in best], where="post", color=FAINT, linewidth=1)
        for i, row in enumerate(own):
            colour = COLOURS[i % len(COLOURS)]
            fill = colour if row["on the front"] else "white"
            axes.plot(row["speed"], row["kl"], marker="o", markersize=7, color=colour, markerfacecolor=fill)
            axes.annotate(
                row["method"], (row["speed"], row["kl"]), xytext=(6, 4), textcoords="offset points", fontsize=8
            )
        axes.set(xlabel=unit, ylabel="KL to the exact model, nats")
        axes.set_ylim(bottom=0)
        axes.margins(x=0.15, y=0.1)
