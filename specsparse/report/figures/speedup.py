"""Speed-up over plain decoding: by task, and against what a sweep varied."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes

from specsparse.measure import intervals
from specsparse.measure.intervals import Interval
from specsparse.report import plots
from specsparse.report.figure import MOST, Figure, Missing
from specsparse.report.methods import GAMMA, TEMPERATURE, ReportedMethod, fastest, ranked
from specsparse.report.runs import Run

DEFINITION = (
    "Speed-up: sum of plain decode times over sum of the method's, same prompts and token counts, interleaved, prompt "
    f"processing excluded. {intervals.WHISKERS}"
)
_WORDS = {GAMMA: "tokens drafted in a round", TEMPERATURE: "temperature of the target"}
NO_METHOD = "no run decoded plainly and with a method, prompt by prompt"


def by_task(runs: Sequence[Run], methods: Sequence[ReportedMethod]) -> Figure | Missing:
    """Bars: a group a task, a colour a method, all prompts together first."""
    title = "Speed-up by task"
    if not methods:
        return Missing("speedup_by_task", title, NO_METHOD)
    shown, rows = fastest(methods, MOST), []
    for method in shown:
        tasks = method.tasks
        parts = {"all": method} if len(tasks) == 1 else {"all": method, **{t: method.of(t) for t in tasks}}
        for task, part in parts.items():
            found = part.speedup()
            if found is not None:
                rows.append({"method": method.label, "task": task, **found.cells()})
    cut = f" The {len(shown)} fastest of {len(methods)} methods." if len(shown) < len(methods) else ""
    draw = plots.bars_of_methods("task", "speed-up", plots.par)
    return Figure("speedup_by_task", title, DEFINITION + cut, tuple(rows), draw, size=(8.6, 4.4))


def against_gamma(runs: Sequence[Run], methods: Sequence[ReportedMethod]) -> Figure | Missing:
    """Lines over the draft length."""
    return against("speedup_by_gamma", "Speed-up against draft length", GAMMA, methods, SPEEDUP)


def against_temperature(runs: Sequence[Run], methods: Sequence[ReportedMethod]) -> Figure | Missing:
    """Lines over the target's temperature."""
    title = "Speed-up against temperature"
    return against("speedup_by_temperature", title, TEMPERATURE, methods, SPEEDUP)


class Shown(NamedTuple):
    """What a line shows.

    Attributes:
        of: its value for a method; None where there is none.
        label: of the axis.
        definition: for the caption.
        axes: what the plot's axes get beside the lines.
    """

    of: Callable[[ReportedMethod], Interval | None]
    label: str
    definition: str
    axes: Callable[[Axes], None]


SPEEDUP = Shown(ReportedMethod.speedup, "speed-up", DEFINITION, plots.par)


def against(name: str, title: str, key: str, methods: Sequence[ReportedMethod], measure: Shown) -> Figure | Missing:
    """A line a method over one key of the config; methods with one value of it are no line."""
    if not methods:
        return Missing(name, title, NO_METHOD)
    values: dict[str, set[float]] = {}
    for method in methods:
        values.setdefault(method.without(key), set()).add(method.run.setting(key))
    several = {line for line, found in values.items() if len(found) > 1}
    on_a_line = [m for m in methods if m.without(key) in several]
    if not on_a_line:
        return Missing(name, title, f"no two runs differ in {key} alone; sweep it: -m {key}=A,B,C")
    lines, words = list(dict.fromkeys(m.without(key) for m in ranked(on_a_line))), _WORDS[key]
    kept = lines[:MOST]
    rows = []
    for method in on_a_line:
        found = measure.of(method)
        if found is not None and method.without(key) in kept:
            rows.append({"method": method.without(key), words: method.run.setting(key), **found.cells()})
    if not rows:
        return Missing(name, title, "no run drafted a token")
    cut = f" {len(lines) - len(kept)} slower lines are left out." if len(kept) < len(lines) else ""

    draw = plots.lines_of_methods(words, measure.label, measure.axes, xlabel=words)
    return Figure(name, title, measure.definition + cut, tuple(rows), draw)
