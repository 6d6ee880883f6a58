"""Where a round's time goes."""

from collections.abc import Sequence

from matplotlib.figure import Figure as Canvas

from specsparse.measure import intervals
from specsparse.report import plots
from specsparse.report.figure import COLOURS, INK, Figure, Missing, Row
from specsparse.report.methods import ReportedMethod, fastest
from specsparse.report.runs import Run

STAGES = ("draft", "verify", "sample", "commit")
_MOST_BARS = 16


def time_split(runs: Sequence[Run], methods: Sequence[ReportedMethod]) -> Figure | Missing:
    """A bar a method, its stages one after the other."""
    name, title = "time_split", "Where the time of a round goes"
    timed = [m for m in methods if _tasks(m)]
    if not timed:
        return Missing(name, title, "no record holds stage times; run with time_split=32 or more")
    shown = fastest(timed, _MOST_BARS)
    rows = [row for method in shown for row in _rows(method)]
    cut = f" The {len(shown)} fastest of {len(timed)} methods, by speed-up." if len(shown) < len(timed) else ""
    caption = (
        "Shares of the decode time, stepped stage by stage from the host on the first prompt of each task, weighted by "
        "the tasks' timed passes. Whiskers: 95 % interval of each share over the tasks; none for one task." + cut
    )
    return Figure(name, title, caption, tuple(rows), _bars, size=(8.6, 1.5 + 0.42 * len(shown)))


def _tasks(method: ReportedMethod) -> list[dict[str, float]]:
    """Seconds of the stages by task, as the record has them."""
    tasks = method.run.record.get("tasks") or {}
    if method.side != "speculative" or not isinstance(tasks, dict):
        return []
    counters = [(task.get("speculative") or {}).get("counters") or {} for task in tasks.values()]
    times = [{stage: (c.get("times") or {}).get(stage) or 0.0 for stage in STAGES} for c in counters]
    return [t for t in times if t["draft"] or t["verify"]]


def _rows(method: ReportedMethod) -> list[Row]:
    tasks, out = _tasks(method), []
    totals = [sum(t[s] for s in STAGES) for t in tasks]
    for stage in STAGES:
        found = intervals.share([t[stage] for t in tasks], totals)
        if found is not None:
            cells = found.cells()
            cells["tasks"] = cells.pop("prompts")
            out.append({"method": method.label, "stage": stage, **cells})
    return out


def _bars(canvas: Canvas, rows: Sequence[Row]) -> None:
    axes = canvas.subplots()
    labels = plots.distinct(rows, "method")
    for at, label in enumerate(labels):
        begin = 0.0
        for row in (r for r in rows if r["method"] == label):
            index = STAGES.index(row["stage"])
            name = row["stage"] if at == 0 else None
            axes.barh(at, row["value"], left=begin, height=0.62, color=COLOURS[index], label=name)
            begin += row["value"]
            low, high = plots.whiskers(row)
            if low or high:
                height = at + (0.24 if index % 2 else -0.24)  # the ends of neighbours lie close together
                axes.errorbar(begin, height, xerr=[[low], [high]], fmt="none", ecolor=INK, elinewidth=1, capsize=2)
            if row["value"] > 0.06:
                middle = begin - row["value"] / 2
                axes.text(middle, at, f"{row['value']:.0%}", color="white", ha="center", va="center", fontsize=8)
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set(xlabel="share of decode time")
    axes.set_xlim(0, None)
    plots.share(axes, "x")
    plots.legend_below(axes)
