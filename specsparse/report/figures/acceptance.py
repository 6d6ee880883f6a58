"""How many drafted tokens stay: by position, by task, and in a round."""

from collections.abc import Sequence

from specsparse.measure import intervals
from specsparse.report import plots
from specsparse.report.figure import MOST, Figure, Missing, Row
from specsparse.report.figures.speedup import NO_METHOD, Shown, against
from specsparse.report.methods import GAMMA, TEMPERATURE, ReportedMethod, fastest
from specsparse.report.runs import Run
from specsparse.runtime import metrics


def by_position(runs: Sequence[Run], methods: Sequence[ReportedMethod]) -> Figure | Missing:
    """Lines over the position in the draft."""
    name, title = "acceptance_by_position", "Acceptance by position in the draft"
    rows = [
        {"method": method.label, "position": position + 1, **found.cells()}
        for method in fastest(methods, MOST)
        for position in range(method.positions())
        if (found := method.accepted_at(position)) is not None
    ]
    if not rows:
        return Missing(name, title, "no run drafted a token" if methods else NO_METHOD)
    definition = metrics.DEFINITIONS["acceptance_per_position"].capitalize()
    draw = plots.lines_of_methods("position", "accepted", plots.share, xlabel="position in the draft")
    caption = f"{definition}: unconditional, so that a line falls. {intervals.WHISKERS}{_cut(methods)}"
    return Figure(name, title, caption, tuple(rows), draw)


def by_task(runs: Sequence[Run], methods: Sequence[ReportedMethod]) -> Figure | Missing:
    """Bars: a group a task, a colour a method."""
    name, title = "acceptance_by_task", "Acceptance by task"
    rows = [
        {"method": method.label, "task": task, **found.cells()}
        for method in fastest(methods, MOST)
        for task in method.tasks
        if (found := method.of(task).acceptance()) is not None
    ]
    if not rows:
        return Missing(name, title, "no run drafted a token" if methods else NO_METHOD)
    draw = plots.bars_of_methods("task", "accepted / drafted", plots.share)
    return Figure(name, title, _RATE + _cut(methods), tuple(rows), draw, size=(8.6, 4.4))


_RATE = f"Draft acceptance rate: {metrics.DEFINITIONS['draft_acceptance_rate']}. {intervals.WHISKERS}"
_ACCEPTANCE = Shown(ReportedMethod.acceptance, "accepted / drafted", _RATE, plots.share)


def against_gamma(runs: Sequence[Run], methods: Sequence[ReportedMethod]) -> Figure | Missing:
    """Lines over the draft length."""
    return against("acceptance_by_gamma", "Acceptance against draft length", GAMMA, methods, _ACCEPTANCE)


def against_temperature(runs: Sequence[Run], methods: Sequence[ReportedMethod]) -> Figure | Missing:
    """Lines over the target's temperature."""
    return against("acceptance_by_temperature", "Acceptance against temperature", TEMPERATURE, methods, _ACCEPTANCE)


def accepted_in_a_round(runs: Sequence[Run], methods: Sequence[ReportedMethod]) -> Figure | Missing:
    """Bars: the share of rounds in which 0, 1, 2 .. drafted tokens stayed."""
    name, title = "accepted_in_a_round", "Drafted tokens that stay in a round"
    rows = [row for method in fastest(methods, MOST) for row in _histogram(method)]
    if not rows:
        return Missing(name, title, "no run drafted a token" if methods else NO_METHOD)
    caption = (
        "Share of the rounds with a draft in which exactly so many drafted tokens stayed; the token that the target "
        f"adds to each is not counted. {intervals.WHISKERS}{_cut(methods)}"
    )
    draw = plots.bars_of_methods("tokens", "rounds with a draft", plots.share, xlabel="drafted tokens that stayed")
    return Figure(name, title, caption, tuple(rows), draw, size=(8.6, 4.0))


def _histogram(method: ReportedMethod) -> list[Row]:
    """Exactly k stayed: those accepted at position k less those accepted at the next one."""
    rows = []
    for k in range(method.positions() + 1):
        found = method.share(
            lambda s, k=k: _reached(s.method, k) - _reached(s.method, k + 1), lambda s: s.method.num_drafts
        )
        if found is not None:
            rows.append({"method": method.label, "tokens": k, **found.cells()})
    return rows


def _reached(counters: metrics.Counters, k: int) -> int:
    """Rounds in which at least k drafted tokens stayed."""
    found = (counters.num_drafts, *counters.num_accepted_tokens_per_pos)
    return found[k] if k < len(found) else 0


def _cut(methods: Sequence[ReportedMethod]) -> str:
    return f" The {MOST} fastest of {len(methods)} methods." if len(methods) > MOST else ""
