"""Advice in the terminal."""

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from specsparse.measure import intervals
from specsparse.measure.costs.accepted import SWEPT
from specsparse.measure.costs.forecast import Forecast
from specsparse.support import tables
from specsparse.support.files import Json, size_text
from specsparse.tools.advise.advise import Advice, Sizes, facts, verdict

_GIGA = 1e9


def parts(advice: Advice) -> Iterator[Table | Text]:
    """Lines and tables: the models, then each batch size and context."""
    for model in (advice.target, *advice.draft_models):
        yield Text(_model(facts(model, advice.question)))
    yield from (Text(line, style="yellow") for line in advice.vocabularies)
    for case in advice.cases:
        yield Text(f"\nbatch {case.batch}, {case.context} tokens in the cache", style="bold")
        yield Text(_times(case))
        if case.clocks.note is not None:
            yield Text(case.clocks.note, style="yellow")
        yield Text(_needs(advice, case))
        counted = [f for f in case.forecasts if f.acceptance.source != SWEPT]
        guessed = [f for f in case.forecasts if f.acceptance.source == SWEPT]
        if counted:
            yield _counted(counted)
            yield from (Text(line, style="dim") for line in dict.fromkeys(f.acceptance.source for f in counted))
        if guessed:
            yield _swept(guessed)
        yield Text(verdict(case), style="bold")


def _model(found: Json) -> str:
    weights = f"{found['parameters'] / 1e6:,.0f} M weights, {size_text(found['bytes'])} ({found['source']})"
    step = f"a step reads {size_text(found['bytes_a_step'])}, a row takes {found['macs_a_row'] / _GIGA:.3g} GMAC"
    return f"{found['name']}: {weights}; {step}, a token of cache {size_text(found['kv_bytes_per_token'])}"


def _times(case: Sizes) -> str:
    clock = case.clocks.expected
    v = ", ".join(f"v({n}) {clock.v(n):.2f}" for n in (2, 4, 8, 16))
    return f"{case.clocks.source}: {case.batch / clock.step_s:.4g} tok/s plainly, {v}"


def _needs(advice: Advice, case: Sizes) -> str:
    each = " + ".join(f"{name} {size_text(nbytes)}" for name, nbytes in case.memory.items())
    fits = {None: "", True: " of {}", False: ", MORE THAN THE {} THERE ARE"}[advice.fits(case)]
    there = "" if advice.memory is None else fits.format(size_text(advice.memory))
    return f"memory: {each} = {size_text(sum(case.memory.values()))}{there}"


def _counted(found: list[Forecast]) -> Table:
    """A row a method."""
    columns = ("c", "acceptance", "drafts", "break-even", "gamma", "tok/round", "speed-up", "interval")
    note = (
        "c: a drafted token in plain steps; drafts: share of the rounds that draft; gamma: of a tree nodes x levels; "
        "interval: over texts and times"
    )
    table = tables.new("method", *columns, note=note)
    for f in sorted(found, key=lambda f: -f.best.speedup):
        best = f.best
        weight = sum(a.weight for a in f.acceptance.tasks.values())
        share = sum(a.share * a.weight for a in f.acceptance.tasks.values()) / weight
        cells = (f"{f.c:.2f}", f"{f.acceptance.alpha:.2f}", f"{share:.0%}", _rate(f.break_even))
        table.add_row(f.candidate.name, *cells, *_best(f), intervals.shown(best.low, best.high))
    return table


def _best(f: Forecast) -> tuple[str, str, str]:
    if not f.pays:
        return "0", "1.00", f"{f.best.speedup:.2f}"
    return _size(f), f"{f.best.tokens:.2f}", f"{f.best.speedup:.2f}"


def _size(f: Forecast) -> str:
    """Tokens of a chain; nodes x levels of a tree."""
    return str(f.best.gamma) if f.best.levels is None else f"{f.best.gamma} x {f.best.levels}"


def _swept(found: list[Forecast]) -> Table:
    """A row a method, a column an acceptance: speed-up and the length that gives it."""
    alphas = list(dict.fromkeys(f.acceptance.alpha for f in found))
    heads = [f"{alpha:g}" for alpha in alphas]
    note = (
        "speed-up at an acceptance that nobody counted, and gamma (of a tree nodes x levels); a dash: no length pays; "
        "*: a head nobody named"
    )
    table = tables.new("method", "c", "break-even", *heads, note=note)
    rows: dict[tuple[str, ...], list[str]] = {}  # methods that are alike on paper stand in one row
    for name in dict.fromkeys(f.candidate.name for f in found):
        own = {f.acceptance.alpha: f for f in found if f.candidate.name == name}
        first = next(iter(own.values()))
        cells = [f"{f.best.speedup:.2f} ({_size(f)})" if (f := own[a]).pays else "-" for a in alphas]
        key = (f"{first.c:.2f}", _rate(first.break_even), *cells)
        rows.setdefault(key, []).append(name + "*" * first.candidate.assumed)
    for key, names in rows.items():
        table.add_row(", ".join(names), *key)
    return table


def _rate(value: float | None) -> str:
    return "never" if value is None else f"{value:.2f}"
