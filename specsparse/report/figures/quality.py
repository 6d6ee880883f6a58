"""What a lossy choice costs in quality and gains in speed."""

from collections.abc import Iterator, Sequence

from matplotlib.figure import Figure as Canvas

from specsparse.measure import speedups
from specsparse.report import plots
from specsparse.report.figure import COLOURS, FAINT, Figure, Missing, Row
from specsparse.report.methods import ReportedMethod
from specsparse.report.runs import Run
from specsparse.support.files import Json

_NORMAL_95 = 1.96
_MOST_NAMES = 12
"""Names beside the points of a panel; more would lie on each other."""


def quality_and_speed(runs: Sequence[Run], methods: Sequence[ReportedMethod]) -> Figure | Missing:
    """Points: KL to the exact model over speed, a panel for each way to measure speed."""
    name, title = "quality_and_speed", "Quality against speed"
    rows = [row for run in runs for row in (*_predictors(run), *_settings(run), *_types(run))]
    if not rows:
        return Missing(
            name, title, "no record holds the KL of a lossy choice (train_predictors, sparsity, quant_table)"
        )
    for unit in plots.distinct(rows, "unit"):
        own = [row for row in rows if row["unit"] == unit]
        best = front([(row["speed"], row["kl"]) for row in own])
        for at, row in enumerate(own):
            row["on the front"] = at in best
    caption = (
        "Mean KL to the exact model's next-token law in nats (lower is closer) over speed (right is faster). A filled "
        "point is on the Pareto front: no other is at least as fast and as close, and better in one. Whiskers: 95 % "
        "intervals, where the record has them: of a speed-up over repeats on one prompt, of a KL over tokens."
    )
    if any(len([r for r in rows if r["unit"] == u]) > _MOST_NAMES for u in plots.distinct(rows, "unit")):
        caption += f" Names stand beside points of the front only, {_MOST_NAMES} at most; the table has all."
    panels = len(plots.distinct(rows, "unit"))
    return Figure(name, title, caption, tuple(rows), _points, size=(7.4 if panels == 1 else 4.6 * panels, 4.6))


def front(points: Sequence[tuple[float, float]]) -> set[int]:
    """Indices of the points (speed, loss) that none beats: faster is better, and less loss."""

    def beaten(speed: float, loss: float) -> bool:
        return any(s >= speed and x <= loss and (s > speed or x < loss) for s, x in points)

    return {i for i, point in enumerate(points) if not beaten(*point)}


def _row(method: str, unit: str, speed: float, kl: float, perplexity: float | None, **bounds: float | None) -> Json:
    """All rows have the same columns."""
    spread = {key: bounds.get(key) for key in ("speed_low", "speed_high", "kl_low", "kl_high")}
    return {"method": method, "unit": unit, "speed": speed, "kl": kl, "perplexity": perplexity, **spread}


def _predictors(run: Run) -> Iterator[Json]:
    """Predictors of active neurons: bytes of an FFN that are not read are the speed that could be."""
    for found in run.summary.get("evaluations") or ():
        model, cost = found.get("model") or {}, found.get("cost") or {}
        read = cost.get("predictor_bytes", 0) + cost.get("sparse_bytes", 0)
        if model.get("kl") is not None and cost.get("dense_bytes") and read:
            speed = cost["dense_bytes"] / read
            yield _row(found["name"], "FFN bytes, dense over read", speed, model["kl"], model.get("perplexity"))


def _settings(run: Run) -> Iterator[Json]:
    """Sparse models decoded beside the dense one, a point for each setting."""
    for point in run.summary.get("points") or ():
        quality, faster = point.get("quality") or {}, point.get("speedup")
        model = quality.get("model") or {}
        if model.get("kl") is None or not faster:
            continue
        label = ", ".join(str(part) for part in (quality.get("name"), point.get("value")) if part is not None)
        bounds = dict(zip(("speed_low", "speed_high"), speedups.timing_ends(faster), strict=True))
        speed, perplexity = faster["ratio_of_totals"], model.get("perplexity")
        yield _row(label, "speed-up, sparse over dense", speed, model["kl"], perplexity, **bounds)


def _types(run: Run) -> Iterator[Json]:
    """Types of weights, as `quant_table` compares them."""
    for row in run.summary.get("rows") or ():
        kl, speed = row.get("kl_mean"), (row.get("decode") or {}).get("median")
        if kl is None or not speed:
            continue
        spread = _NORMAL_95 * row["kl_error"] if row.get("kl_error") else None
        bounds = {"kl_low": max(kl - spread, 0.0), "kl_high": kl + spread} if spread else {}
        yield _row(str(row.get("type")), "decode, tokens per second", speed, kl, row.get("perplexity"), **bounds)


def _points(canvas: Canvas, rows: Sequence[Row]) -> None:
    units = plots.distinct(rows, "unit")
    for axes, unit in zip(canvas.subplots(1, len(units), squeeze=False)[0], units, strict=True):
        own = [r for r in rows if r["unit"] == unit]
        best = sorted((r for r in own if r["on the front"]), key=lambda r: r["speed"])
        axes.step([r["speed"] for r in best], [r["kl"] for r in best], where="post", color=FAINT, linewidth=1)
        for i, row in enumerate(own):
            colour = COLOURS[i % len(COLOURS)]
            fill = colour if row["on the front"] else "white"
            spread = {"xerr": _spread(row, "speed"), "yerr": _spread(row, "kl")}
            axes.errorbar(row["speed"], row["kl"], **spread, fmt="o", markersize=7, color=colour, markerfacecolor=fill,
                          elinewidth=1, capsize=2.5)  # fmt: skip
        for row in _labelled(own, best):
            axes.annotate(
                row["method"], (row["speed"], row["kl"]), xytext=(6, 4), textcoords="offset points", fontsize=8
            )
        axes.set(xlabel=unit, ylabel="KL to the exact model, nats")
        axes.margins(x=0.2, y=0.12)
        axes.set_ylim(bottom=0)


def _labelled(rows: Sequence[Row], best: Sequence[Row]) -> Sequence[Row]:
    """All points where there is room for their names; else some of the front, from end to end."""
    if len(rows) <= _MOST_NAMES:
        return rows
    step = -(-len(best) // _MOST_NAMES)
    return best[::step]


def _spread(row: Row, what: str) -> list[list[float]] | None:
    """Lengths of the whiskers below and above."""
    value, low, high = row[what], row[f"{what}_low"], row[f"{what}_high"]
    return None if low is None or high is None else [[max(value - low, 0)], [max(high - value, 0)]]
