"""The figures of a report, each made of the runs, or with the reason why it is not.

Of methods: speed-up, acceptance, prediction, stages. Of costs and quality: v(n), unions of neurons, KL over speed.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from specsparse.measure import intervals, speedups
from specsparse.measure.intervals import Interval
from specsparse.report import plots
from specsparse.report.methods import (
    GAMMA,
    NOT_A_METHOD,
    NOTHING,
    TEMPERATURE,
    ReportedMethod,
    Sample,
    differing_settings,
    fastest,
    grouped,
    ranked,
    word,
)
from specsparse.report.plots import COLOURS, FAINT, INK, MOST, Draw, Figure, Missing, Row
from specsparse.report.record import SPECULATIVE
from specsparse.report.runs import Run
from specsparse.runtime import metrics
from specsparse.support.files import Json

_NO_METHOD = "no run decoded plainly and with a method, prompt by prompt"
_NO_DRAFT = "no run drafted a token"
_STAGES = ("draft", "verify", "sample", "commit")
_MOST_BARS = 16
_UNIONS = {"text": "consecutive tokens of a text", "seen": "passes that verified drafts"}
_MOST_UNIONS = MOST // len(_UNIONS)
_NORMAL_95 = 1.96
_MOST_NAMES = 12  # names beside the points of a panel; more would lie on each other


class Drawing(NamedTuple):
    """A `plots.Figure` without name and title."""

    caption: str
    rows: Sequence[Row]
    draw: Draw
    size: tuple[float, float] = (8.0, 4.0)


class _Measure(NamedTuple):
    """A measure that is drawn by task and against a setting.

    `finish` formats the axis of values; if `whole`, the bars by task begin with those of all prompts.
    """

    value: Callable[[ReportedMethod], Interval | None]
    label: str
    definition: str
    finish: Callable[[Axes], None]
    whole: bool


_SPEEDUP = _Measure(
    ReportedMethod.speedup, "speed-up",
    "Speed-up: sum of plain decode times over sum of the method's, same prompts and token counts, interleaved, prompt "
    f"processing excluded. {intervals.WHISKERS}",
    plots.par, whole=True,
)  # fmt: skip
_ACCEPTANCE = _Measure(
    lambda method: method.measured("draft acceptance rate"), "accepted / drafted",
    f"Draft acceptance rate: {metrics.DEFINITIONS['draft_acceptance_rate']}. {intervals.WHISKERS}",
    plots.share, whole=False,
)  # fmt: skip


def by_task(runs: Sequence[Run], methods: Sequence[ReportedMethod], *, measure: _Measure) -> Drawing | str:
    """Draws bars for each task, in one colour for each method."""
    rows = []
    for method in fastest(methods, MOST):
        parts = {task: method.of_task(task) for task in method.tasks}
        if measure.whole:
            parts = {"all": method, **(parts if len(parts) > 1 else {})}
        for task, part in parts.items():
            if (found := measure.value(part)) is not None:
                rows.append({"method": method.label, "task": task, **found._asdict()})
    if not rows:
        return _NO_DRAFT if methods else _NO_METHOD
    draw = plots.bars("task", ylabel=measure.label, finish=measure.finish)
    return Drawing(measure.definition + _cut(methods), rows, draw, (8.6, 4.4))


def against(
    runs: Sequence[Run], methods: Sequence[ReportedMethod], *, key: str, measure: _Measure, xlabel: str
) -> Drawing | str:
    """Draws a line for each method over one key of the config. A method with one value of the key is left out."""
    if not methods:
        return _NO_METHOD
    values: dict[str, set[float]] = {}
    methods = [method for method in methods if isinstance(method.run.setting(key), int | float)]  # null: not said
    for method in methods:
        values.setdefault(method.without(key), set()).add(method.run.setting(key))
    on_a_line = [m for m in methods if len(values[m.without(key)]) > 1]
    if not on_a_line:
        return f"no two runs differ in {key} alone; sweep it: -m {key}=A,B,C"
    lines = list(dict.fromkeys(m.without(key) for m in ranked(on_a_line)))
    kept, rows = lines[:MOST], []
    for method in on_a_line:
        found = measure.value(method)
        if found is not None and method.without(key) in kept:
            rows.append({"method": method.without(key), xlabel: method.run.setting(key), **found._asdict()})
    if not rows:
        return _NO_DRAFT
    cut = f" {len(lines) - len(kept)} slower lines are left out." if len(kept) < len(lines) else ""
    return Drawing(measure.definition + cut, rows, _lines_of_methods(xlabel, measure.label, measure.finish))


def acceptance_by_position(runs: Sequence[Run], methods: Sequence[ReportedMethod]) -> Drawing | str:
    rows = [
        {"method": method.label, "position": position + 1, **found._asdict()}
        for method in fastest(methods, MOST)
        for position in range(method.positions())
        if (found := method.accepted_at(position)) is not None
    ]
    if not rows:
        return _NO_DRAFT if methods else _NO_METHOD
    definition = metrics.DEFINITIONS["acceptance_per_position"].capitalize()
    caption = f"{definition}: unconditional, so that a line falls. {intervals.WHISKERS}{_cut(methods)}"
    x = "position in the draft"
    return Drawing(caption, rows, _lines_of_methods("position", "accepted", plots.share, xlabel=x))


def _lines_of_methods(x: str, ylabel: str, finish: Callable[[Axes], None], *, xlabel: str = "") -> Draw:
    def draw(canvas: Canvas, rows: Sequence[Row]) -> None:
        axes = canvas.subplots()
        plots.lines(axes, rows, x=x, series="method")
        axes.set(xlabel=xlabel or x, ylabel=ylabel)
        axes.set_ylim(bottom=0)
        finish(axes)
        plots.legend_below(axes)

    return draw


def accepted_in_a_round(runs: Sequence[Run], methods: Sequence[ReportedMethod]) -> Drawing | str:
    """Bars: the share of rounds in which 0, 1, 2 .. drafted tokens stayed."""
    rows = []
    for method in fastest(methods, MOST):
        for k in range(method.positions() + 1):

            def exactly(sample: Sample, k: int = k) -> int:
                at_least = (sample.method.num_drafts, *sample.method.num_accepted_tokens_per_pos)
                return sum(at_least[k : k + 1]) - sum(at_least[k + 1 : k + 2])

            if (found := method.share(exactly, lambda s: s.method.num_drafts)) is not None:
                rows.append({"method": method.label, "tokens": k, **found._asdict()})
    if not rows:
        return _NO_DRAFT if methods else _NO_METHOD
    caption = (
        "Share of the rounds with a draft in which exactly so many drafted tokens stayed; the token that the target "
        f"adds to each is not counted. {intervals.WHISKERS}{_cut(methods)}"
    )
    xlabel, ylabel = "drafted tokens that stayed", "rounds with a draft"
    draw = plots.bars("tokens", ylabel=ylabel, finish=plots.share, xlabel=xlabel)
    return Drawing(caption, rows, draw, (8.6, 4.0))


def _cut(methods: Sequence[ReportedMethod]) -> str:
    return f" The {MOST} fastest of {len(methods)} methods." if len(methods) > MOST else ""


def predicted_and_measured(runs: Sequence[Run], methods: Sequence[ReportedMethod]) -> Drawing | str:
    points = [(m, found, measured) for m in methods
              if (found := m.run.summary.get("explanation")) and (measured := m.speedup()) is not None]  # fmt: skip
    groups, rows = grouped([m for m, _, _ in points], MOST), []
    for (method, found, measured), group in zip(points, groups, strict=True):
        terms = {f"x {f['name']}": f["value"] for f in found["factors"]}
        names = {"method": method.label, "group": group}
        rows.append({**names, "predicted": found["predicted"], **measured._asdict(), **terms})
    if not rows:
        return "no record holds a prediction: +experiment=roofline measures this model's costs, later runs then predict"
    caption = (
        "Predicted: expected tokens of a round at the run's acceptance and full draft length, over the cost of "
        "verifying, drafting and the round itself as measured on this machine; rounds that found nothing to draft are "
        "plain steps. On the line the two agree; the factors in the table lead from one to the other. Whiskers: 95 % "
        "interval of the measured speed-up over prompts."
    )
    if len(rows) > len(set(groups)):
        caption += " A colour is a group of runs; the table names each point."

    def draw(canvas: Canvas, rows: Sequence[Row]) -> None:
        axes = canvas.subplots()
        for group, colour, own in plots.series(rows, "group"):
            x, y = ([row[key] for row in own] for key in ("predicted", "value"))
            spread = list(zip(*map(plots.whiskers, own)))
            axes.errorbar(x, y, spread, fmt="o", capsize=2.5, elinewidth=1, color=colour, label=group)
        most = 1.08 * max(max(r["predicted"], r.get("high") or r["value"]) for r in rows)
        axes.plot([0, most], [0, most], color=INK, linewidth=1, linestyle=(0, (4, 3)))
        limits = {"xlim": (0, most), "ylim": (0, most), "aspect": "equal"}
        axes.set(xlabel="predicted speed-up", ylabel="measured speed-up", **limits)
        plots.legend_below(axes)

    return Drawing(caption, rows, draw, (6.4, 5.2))


def time_split(runs: Sequence[Run], methods: Sequence[ReportedMethod]) -> Drawing | str:
    timed = {m.label: (m, found) for m in methods if (found := _stage_times(m))}
    if not timed:
        return "no record holds stage times; run with time_split=32 or more"
    shown, rows = fastest([m for m, _ in timed.values()], _MOST_BARS), []
    for method in shown:
        tasks = timed[method.label][1]
        totals = [sum(t.values()) for t in tasks]
        for stage in _STAGES:
            if (found := intervals.share([t[stage] for t in tasks], totals)) is not None:
                cells = found._asdict()
                cells["tasks"] = cells.pop("prompts")
                rows.append({"method": method.label, "stage": stage, **cells})
    cut = f" The {len(shown)} fastest of {len(timed)} methods, by speed-up." if len(shown) < len(timed) else ""
    caption = (
        "Shares of the decode time, run stage by stage from the host on the first prompt of each task, weighted by "
        "the tasks' timed passes. Whiskers: 95 % interval of each share over the tasks; none for one task." + cut
    )
    return Drawing(caption, rows, _draw_stages, (8.6, 1.5 + 0.42 * len(shown)))


def _stage_times(method: ReportedMethod) -> list[dict[str, float]]:
    """Seconds of the stages by task, as the record has them."""
    tasks = method.run.record.get("tasks") or {}
    if method.side != SPECULATIVE or not isinstance(tasks, dict):
        return []
    counters = [(task.get("speculative") or {}).get("counters") or {} for task in tasks.values()]
    times = [{stage: (c.get("times") or {}).get(stage) or 0.0 for stage in _STAGES} for c in counters]
    return [t for t in times if t["draft"] or t["verify"]]


def _draw_stages(canvas: Canvas, rows: Sequence[Row]) -> None:
    axes, labels = canvas.subplots(), plots.distinct(rows, "method")
    for at, label in enumerate(labels):
        begin = 0.0
        for row in (r for r in rows if r["method"] == label):
            index = _STAGES.index(row["stage"])
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


def verify_cost(runs: Sequence[Run], methods: Sequence[ReportedMethod]) -> Drawing | str:
    rows = []
    for run in runs:
        model = str((run.manifest.get("model") or {}).get("file") or run.name)
        device = (run.summary.get("device") or {}).get("title", "")
        for f in run.summary.get("forwards") or ():
            measured, spread = f.get("measured_v"), f.get("spread")
            given = measured is not None and spread is not None
            rows.append({
                "model": model, "device": device, "n": f["n"], "roofline": f["predicted_v"], "bound": f["bound"],
                "value": measured, "low": measured * (1 - spread) if given else None,
                "high": measured * (1 + spread) if given else None,
            })  # fmt: skip
    if not rows:
        return "no roofline among the runs: +experiment=roofline measures v(n)"
    models = plots.distinct(rows, "model")
    rows = [row for row in rows if row["model"] in models[:MOST]]
    cut = f" The first {MOST} of {len(models)} models." if len(models) > MOST else ""
    caption = (
        "Time of a forward pass of n positions in passes of one. Below the dotted line verifying together is cheaper "
        "than one by one. Dashed: what bytes and multiply-adds ask for at this machine's measured peaks (roofline). "
        "Whiskers: relative spread between repeats, if it was measured." + cut
    )
    return Drawing(caption, rows, _draw_costs, (7.2, 4.4))


def _draw_costs(canvas: Canvas, rows: Sequence[Row]) -> None:
    axes, most = canvas.subplots(), 0.0
    for model, colour, own in plots.series(rows, "model", x="n"):
        measured = [r for r in own if r["value"] is not None]
        dashed, roofline = None if measured else model, [r["roofline"] for r in own]
        axes.plot([r["n"] for r in own], roofline, linestyle="--", color=colour, label=dashed)
        if measured:
            ns, values = ([r[key] for r in measured] for key in ("n", "value"))
            style = {"marker": "o", "elinewidth": 1, "capsize": 2.5}
            axes.errorbar(ns, values, list(zip(*map(plots.whiskers, measured))), color=colour, label=model, **style)
            most = max(most, *values)
        most = max(most, *roofline)
    top = max(r["n"] for r in rows)
    axes.plot([1, top], [1, top], linestyle=":", color=INK, linewidth=1, label="one by one")
    axes.set(xlabel="positions in one pass, n", ylabel="v(n), passes of one position", ylim=(0, most * 1.15))
    axes.set_xticks(sorted({r["n"] for r in rows}))
    plots.legend_below(axes)


def by_context(runs: Sequence[Run], methods: Sequence[ReportedMethod]) -> Drawing | str:
    """Draws lines over the tokens of the prompt: speed-up and tokens a pass of methods, and v(n), where they are known.

    Of runs with `data.lengths`, whose tasks are these lengths.
    """
    over = [m for m in methods if m.run.setting("data.lengths") not in (None, NOTHING)]
    kept, rows = fastest(over, MOST // 2), list[Row]()
    for measure in ("speed-up", "tokens per target pass"):
        for method in kept:
            for task in method.tasks:
                if (found := method.of_task(task).measured(measure)) is not None:
                    rows.append({"measure": measure, "line": method.label, "tokens": int(task), **found._asdict()})
    if not rows:
        return "no run asked the same questions behind more and more text: +experiment=context does"
    several = len({m.run.directory for m in over}) > 1
    forwards = {
        (f"v({row['rows']})" + (f" of {m.run.directory.name}" if several else ""), int(row["task"])): row["v"]
        for m in over for row in m.run.summary.get("depths") or () if row["rows"] > 1
    }  # fmt: skip
    lines = list(dict.fromkeys(line for line, _ in forwards))[: MOST // 2]
    rows += [
        {"measure": "v(n)", "line": line, "tokens": tokens, "value": v}
        for (line, tokens), v in forwards.items() if line in lines
    ]  # fmt: skip
    cut = f" The {MOST // 2} fastest of {len(over)} methods." if len(over) > len(kept) else ""
    caption = (
        "Over the tokens of the prompt, whose question is the same at every length. Speed-up over plain decoding, "
        "prompt processing excluded; tokens that a forward of the target gives; v(n), the time of a forward of n rows "
        f"in forwards of one. {intervals.WHISKERS}{cut}"
    )

    def draw(canvas: Canvas, rows: Sequence[Row]) -> None:
        names = plots.distinct(rows, "line")
        for axes, measure, own in plots.panels(canvas, rows, "measure"):
            plots.lines(axes, own, x="tokens", series="line", names=names)
            axes.set(xlabel="tokens of the prompt", ylabel=measure)
            axes.set_ylim(bottom=0)
        plots.legend_below(canvas.axes[0])

    return Drawing(caption, rows, draw, (12.0, 4.2))


def acceptance_by_text(runs: Sequence[Run], methods: Sequence[ReportedMethod]) -> Drawing | str:
    """Draws a line for each drafter in training over the tokens it has seen, in a panel for each place where drafts
    begin."""
    found = [run for run in runs if any("live" in point for point in run.summary.get("curve") or ())]
    if not found:
        return "no record holds the curve of a drafter in training: +experiment=train_drafter draws it"
    rows = [
        {"drafter": word(run.record["trained"][0]), "drafts": drafts, "tokens": point["rows"], "value": point[key]}
        for drafts, key in (("at every position", "acceptance"), ("where decoding begins drafts", "live"))
        for run in found[:MOST] for point in run.summary["curve"]
    ]  # fmt: skip
    cut = f" The first {MOST} of {len(found)} trainings." if len(found) > MOST else ""
    caption = (
        "Mean acceptance length on held-out greedy answers, the bonus token included, over the tokens of answers that "
        f"a training has seen; a token counts as often as it comes.{cut}"
    )

    def draw(canvas: Canvas, rows: Sequence[Row]) -> None:
        for axes, drafts, own in plots.panels(canvas, rows, "drafts", sharey=True):
            for drafter, colour, line in plots.series(own, "drafter", x="tokens"):
                at, heights = ([row[key] for row in line] for key in ("tokens", "value"))
                axes.plot(at, heights, marker="o", color=colour, label=drafter)
            axes.set(xlabel="tokens trained on", ylabel="acceptance length", title=drafts)
        plots.legend_below(canvas.axes[0])

    return Drawing(caption, rows, draw, (9.2, 3.8))


def union_size(runs: Sequence[Run], methods: Sequence[ReportedMethod]) -> Drawing | str:
    found = [run for run in runs if any(run.summary.get(source) for source in _UNIONS)]
    labels = {id(m.run): m.label for m in reversed(methods)}
    rows = []
    for run in found[:_MOST_UNIONS]:
        label = f"{labels.get(id(run), run.directory.name)}: " if len(found) > 1 else ""
        for source, words in _UNIONS.items():
            for point in run.summary.get(source) or ():
                if point.get("batch") == 1:
                    numbers = {key: point[key] for key in ("rows", "passes", "kept", "union", "guess")}
                    rows.append({"source": f"{label}{words}", **numbers})
    if not rows:
        return "no record holds unions of kept neurons: +experiment=spec_sparse measures them"
    caption = (
        "Share of the FFNs' neurons that some row of a pass keeps (solid), mean over passes and layers; dashed: what "
        "it would be if rows were independent, 1 - (1 - kept)^rows layer by layer. If the solid line lies lower, "
        "neighbouring tokens share neurons, and a verifying pass reads less than chance would have it."
    )
    if len(found) > _MOST_UNIONS:
        caption += f" The first {_MOST_UNIONS} of {len(found)} runs."

    def draw(canvas: Canvas, rows: Sequence[Row]) -> None:
        axes = canvas.subplots()
        for source, colour, own in plots.series(rows, "source", x="rows"):
            for key, dashes, label in (("union", "-", source), ("guess", "--", None)):
                style = {"linestyle": dashes, "marker": "o", "markersize": 4, "color": colour}
                axes.plot([r["rows"] for r in own], [r[key] for r in own], label=label, **style)
        axes.set(xlabel="rows of a pass", ylabel="neurons read")
        axes.set_ylim(0, 1.02)
        axes.set_xticks(sorted(plots.distinct(rows, "rows")))
        plots.share(axes)
        plots.legend_below(axes)

    return Drawing(caption, rows, draw, (7.2, 4.2))


def quality_and_speed(runs: Sequence[Run], methods: Sequence[ReportedMethod]) -> Drawing | str:
    """Points: KL to the exact model over speed, a panel for each way to measure speed."""
    rows = [row for run in runs for row in _qualities(run)]
    if not rows:
        return "no record holds the KL of a lossy choice (train_predictors, sparsity, quant_table)"
    units = plots.distinct(rows, "unit")
    for unit in units:
        own = [row for row in rows if row["unit"] == unit]
        best = front([(row["speed"], row["kl"]) for row in own])
        for at, row in enumerate(own):
            row["on the front"] = at in best
    caption = (
        "Mean KL to the exact model's next-token distribution in nats (lower is closer) over speed (right is faster). "
        "A filled point is on the Pareto front: no other is at least as fast and as close, and better in one. "
        "Whiskers: 95 % intervals, if the record has them: of a speed-up over repeats on one prompt, of a KL over "
        "tokens."
    )
    if any(len([r for r in rows if r["unit"] == u]) > _MOST_NAMES for u in units):
        caption += f" Names stand beside points of the front only, {_MOST_NAMES} at most; the table has all."
    width = 7.4 if len(units) == 1 else 4.6 * len(units)
    return Drawing(caption, rows, _draw_quality, (width, 4.6))


def front(points: Sequence[tuple[float, float]]) -> set[int]:
    """Indices of the points (speed, loss) that none beats: faster is better, and less loss."""

    def beaten(speed: float, loss: float) -> bool:
        return any(s >= speed and x <= loss and (s > speed or x < loss) for s, x in points)

    return {i for i, point in enumerate(points) if not beaten(*point)}


def sparsity(runs: Sequence[Run], methods: Sequence[ReportedMethod]) -> Drawing | str:
    """Lines: quality and speed over the share of neurons kept, a row of panels a model, a line a predictor with the
    settings that differ."""
    found = [(run, point) for run in runs for point in run.summary.get("points") or ()]
    found = [(run, point) for run, point in found if "mean" in (point.get("quality") or {})]
    settings = differing_settings([run.config for run, _ in found])
    rows = []
    for i, (run, point) in enumerate(found):
        vary, quality, faster = run.summary.get("vary"), point["quality"], point.get("speedup")
        drawn = ("model.path", "predictor.name", "sparsity.values", f"predictor.{vary}", f"ffn.{vary}")
        own = {s.name: s.values[i] for s in settings if s.key not in drawn and not s.key.startswith(NOT_A_METHOD)}
        column = f"set_{vary}" if vary in quality["mean"] else str(vary)  # recall is set and measured
        value = {} if vary in (None, "predictor") else {column: point["value"]}
        rows.append({
            "model": word(run.setting("model.path")), "predictor": quality["name"],
            "line": ", ".join([quality["name"], *(f"{name} {said}" for name, said in own.items() if said != NOTHING)]),
            **own, **value, **quality["mean"], **quality["model"], **quality["cost"],
            **{key: point[key] for key in ("by_bytes", "tokens_per_second", "dense_tokens_per_second")},
            "speedup": faster and faster["ratio_of_totals"],
        })  # fmt: skip
    if not rows:
        return "no record holds shares of kept neurons: +experiment=sweep_sparsity measures them"
    caption = (
        "Against the dense model, over the share of neurons that are computed. Energy: squares of the activations that "
        "are kept, of all. Speed-up: measured where something decodes by the predictor; dotted: by the bytes read."
    )
    return Drawing(caption, rows, _draw_sparsity, (12.0, 1.0 + 3.0 * len(plots.distinct(rows, "model"))))


def of_sparsity(runs: Sequence[Run], title: str) -> Figure:
    """The figure of runs that hold points of sparsity."""
    found = sparsity(runs, ())
    assert not isinstance(found, str)
    return Figure("sparsity", title, found.caption, tuple(found.rows), found.draw, found.size)


def _draw_sparsity(canvas: Canvas, rows: Sequence[Row]) -> None:
    models, names = (plots.distinct(rows, key) for key in ("model", "line"))
    every = canvas.subplots(len(models), 3, squeeze=False)
    for model, (kl, energy, speed) in zip(models, every, strict=True):
        for i, name in enumerate(names):
            own = sorted((r for r in rows if (r["model"], r["line"]) == (model, name)), key=lambda r: r["kept"])
            style = {"color": COLOURS[i % len(COLOURS)], "marker": "o" if i < len(COLOURS) else "s", "label": name}
            for axes, key in ((kl, "kl"), (energy, "energy"), (speed, "speedup")):
                drawn = [r for r in own if r[key] is not None]
                axes.plot([r["kept"] for r in drawn], [r[key] for r in drawn], **style)
            style |= {"marker": None, "linestyle": ":", "linewidth": 1, "label": None}
            speed.plot([r["kept"] for r in own], [r["by_bytes"] for r in own], **style)
        kl.set(ylabel="KL(dense, sparse), nats", title=str(model))
        kl.set_yscale("symlog", linthresh=0.01)
        kl.set_ylim(bottom=0)
        energy.set(ylabel="energy kept", ylim=(0, 1.02))
        speed.set(ylabel="speed-up over dense decoding", ylim=(0, None))
        plots.par(speed, "dense")
        for axes in (kl, energy, speed):
            axes.set(xlabel="neurons kept", xlim=(0, 1.02))
    plots.legend_below(every[0][0], columns=8)


def _qualities(run: Run) -> Iterator[Json]:
    """A row for each lossy choice of a run: predictors by the bytes of an FFN that are not read, sparse models beside
    the dense one, types of weights by their rates."""

    def row(method: str, unit: str, speed: float, quality: Json, **bounds: float | None) -> Json:
        spread = {key: bounds.get(key) for key in ("speed_low", "speed_high", "kl_low", "kl_high")}
        return {
            "method": method, "unit": unit, "speed": speed, "kl": quality["kl"],
            "perplexity": quality.get("perplexity"), **spread,
        }  # fmt: skip

    for found in run.summary.get("evaluations") or ():
        model, cost = found.get("model") or {}, found.get("cost") or {}
        read = cost.get("predictor_bytes", 0) + cost.get("sparse_bytes", 0)
        if model.get("kl") is not None and cost.get("dense_bytes") and read:
            yield row(found["name"], "FFN bytes, dense over read", cost["dense_bytes"] / read, model)
    for point in run.summary.get("points") or ():
        quality, faster = point.get("quality") or {}, point.get("speedup")
        model = quality.get("model") or {}
        if model.get("kl") is not None and faster:
            label = ", ".join(str(part) for part in (quality.get("name"), point.get("value")) if part is not None)
            bounds = dict(zip(("speed_low", "speed_high"), speedups.timing_ends(faster), strict=True))
            yield row(label, "speed-up, sparse over dense", faster["ratio_of_totals"], model, **bounds)
    for found in run.summary.get("rows") or ():
        kl, speed = found.get("kl_mean"), (found.get("decode") or {}).get("median")
        if kl is not None and speed:
            spread = _NORMAL_95 * found["kl_error"] if found.get("kl_error") else None
            bounds = {"kl_low": max(kl - spread, 0.0), "kl_high": kl + spread} if spread else {}
            yield row(str(found.get("type")), "decode, tokens per second", speed, {**found, "kl": kl}, **bounds)


def _draw_quality(canvas: Canvas, rows: Sequence[Row]) -> None:
    for axes, unit, own in plots.panels(canvas, rows, "unit"):
        best = sorted((r for r in own if r["on the front"]), key=lambda r: r["speed"])
        axes.step([r["speed"] for r in best], [r["kl"] for r in best], where="post", color=FAINT, linewidth=1)
        for i, row in enumerate(own):
            colour = COLOURS[i % len(COLOURS)]
            style: dict[str, Any] = {"color": colour, "markerfacecolor": colour if row["on the front"] else "white"}
            for axis, key in (("xerr", "speed"), ("yerr", "kl")):
                ends = {"value": row[key], "low": row[f"{key}_low"], "high": row[f"{key}_high"]}
                style[axis] = None if ends["low"] is None else [[length] for length in plots.whiskers(ends)]
            axes.errorbar(row["speed"], row["kl"], fmt="o", markersize=7, elinewidth=1, capsize=2.5, **style)
        # All points are named if there is room for their names, else some of the front, from end to end.
        for row in own if len(own) <= _MOST_NAMES else best[:: -(-len(best) // _MOST_NAMES)]:
            place = {"xytext": (6, 4), "textcoords": "offset points", "fontsize": 8}
            axes.annotate(row["method"], (row["speed"], row["kl"]), **place)
        axes.set(xlabel=unit, ylabel="KL to the exact model, nats")
        axes.margins(x=0.2, y=0.12)
        axes.set_ylim(bottom=0)


_OVER_GAMMA = {"key": GAMMA, "xlabel": "tokens drafted in a round"}
_OVER_TEMPERATURE = {"key": TEMPERATURE, "xlabel": "temperature of the target"}
Maker = Callable[[Sequence[Run], Sequence[ReportedMethod]], Drawing | str]
"""The drawing of the runs and their methods, or why there is none."""
MAKERS: dict[str, tuple[str, Maker]] = {
    "speedup_by_task": ("Speed-up by task", partial(by_task, measure=_SPEEDUP)),
    "speedup_by_gamma": ("Speed-up against draft length", partial(against, measure=_SPEEDUP, **_OVER_GAMMA)),
    "speedup_by_temperature": (
        "Speed-up against temperature", partial(against, measure=_SPEEDUP, **_OVER_TEMPERATURE)),
    "acceptance_by_gamma": ("Acceptance against draft length", partial(against, measure=_ACCEPTANCE, **_OVER_GAMMA)),
    "acceptance_by_temperature": (
        "Acceptance against temperature", partial(against, measure=_ACCEPTANCE, **_OVER_TEMPERATURE)),
    "acceptance_by_position": ("Acceptance by position in the draft", acceptance_by_position),
    "acceptance_by_task": ("Acceptance by task", partial(by_task, measure=_ACCEPTANCE)),
    "accepted_in_a_round": ("Drafted tokens that stay in a round", accepted_in_a_round),
    "predicted_and_measured": ("Predicted against measured speed-up", predicted_and_measured),
    "time_split": ("Where the time of a round goes", time_split),
    "verify_cost": ("v(n): the cost of a forward pass of n positions", verify_cost),
    "by_context": ("Speed-up, tokens a pass and v(n) over the length of the prompt", by_context),
    "acceptance_by_text": ("Acceptance of a drafter over the text it is trained on", acceptance_by_text),
    "union_size": ("Kept neurons and their union over the rows of a pass", union_size),
    "sparsity": ("Quality and speed over the share of neurons kept", sparsity),
    "quality_and_speed": ("Quality against speed", quality_and_speed),
}  # fmt: skip
"""Title and maker by name, in the order of the page."""


def make(runs: Sequence[Run], methods: Sequence[ReportedMethod]) -> tuple[list[Figure], list[Missing]]:
    """Every figure that the runs have numbers for, and why the others are left out."""
    made, missing = [], []
    for name, (title, maker) in MAKERS.items():
        found = maker(runs, methods)
        if isinstance(found, str):
            missing.append(Missing(name, title, found))
        else:
            made.append(Figure(name, title, found.caption, tuple(found.rows), found.draw, found.size))
    return made, missing
