"""Advice: every method's predicted speed-up at every batch size and context, the best of them, and what it needs."""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from matplotlib.figure import Figure as Canvas
from rich.table import Table
from rich.text import Text

from specsparse.data.devices import THIS, Device
from specsparse.engine.config import woken
from specsparse.errors import UserError
from specsparse.measure import intervals
from specsparse.measure.costs import acceptance, measuring
from specsparse.measure.costs.acceptance import AcceptedRates
from specsparse.measure.costs.forecast import (
    LENGTHS,
    Candidate,
    Clock,
    Clocks,
    Forecast,
    candidates,
    device_of,
    forecast,
)
from specsparse.measure.costs.measuring import Bar, silent
from specsparse.measure.costs.roofline import ModelOutline, another_vocabulary, get_device, outline
from specsparse.models import catalogue
from specsparse.report import plots
from specsparse.report.plots import FAINT, MOST, Figure, Row
from specsparse.runtime import timing_cache
from specsparse.runtime.load import load
from specsparse.runtime.timing_cache import CostTable
from specsparse.speculative import expected
from specsparse.support import tables
from specsparse.support.files import Json, size_text
from specsparse.support.options import nearest

SWEEP = (0.5, 0.6, 0.7, 0.8)
"""Acceptances that are supposed if none was measured."""
CONTEXT = 512
"""Tokens in the cache by default."""
OVERLAPS = (None, 0.26, 0.38)
"""Parts of its experts that a row has from the row before: by chance, and as published of real texts (26 % in mlx-lm's
issue 1485 with 4 experts of 64, 38 % by Cohere, 2026-04-21)."""


@dataclass(frozen=True)
class Question:
    """A target, its draft models and the sizes to look at. Models are names, paths or references to the Hub."""

    target: str
    draft_models: tuple[str, ...] = ()
    device: str = THIS  # a name of `data.devices`
    batches: tuple[int, ...] = (1,)
    contexts: tuple[int, ...] = ()  # () for `CONTEXT`, or as much as the model has room for
    lengths: tuple[int, ...] = LENGTHS  # of drafts
    alphas: tuple[float, ...] = ()  # acceptances to suppose
    counted: Mapping[str, AcceptedRates] | None = None  # acceptances by drafter, of a run's record
    task: str | None = None  # the only kind of text that counts
    kv_dtype: str = "f16"
    paper: bool = False  # this machine too by its peaks alone, without decoding
    refresh: bool = False  # this machine is measured again, whatever was kept


@dataclass(frozen=True)
class WokenExperts:
    """A forward of `rows` rows a sequence of a model with experts, on paper."""

    overlap: float | None  # of `OVERLAPS`
    rows: int
    experts: float  # of a layer, that some row chose
    nbytes: float  # of all weights that are read
    v: float  # in plain steps
    break_even: float | None  # least acceptance at which chains of rows - 1 tokens pay that cost nothing to draft

    @classmethod
    def all_from(cls, target: ModelOutline, device: Device, context: int, batch: int) -> "tuple[WokenExperts, ...]":
        """2, 4 and 8 rows at each of `OVERLAPS` that chance does not reach alone; () for a dense model."""
        c, whole = target.config, target.traffic()
        if not c.n_experts:
            return ()
        share = c.n_chosen / c.n_experts

        def at(overlap: float | None, n: int) -> WokenExperts:
            load = replace(whole, overlap=overlap)
            v = Clock.on_paper(device, load, target.kernels(), context, batch).v(n)
            least = expected.least(lambda alpha: expected.expected_tokens(alpha, n - 1) >= v)
            awake = c.n_experts * woken(share, n, overlap, batch)
            return cls(overlap, n, awake, load.read_weights(n, batch), v, least)

        overlaps = [overlap for overlap in OVERLAPS if overlap is None or overlap > share]
        return tuple(at(overlap, n) for overlap in overlaps for n in (2, 4, 8))


@dataclass(frozen=True)
class Sizes:
    """One batch size and context: times, forecasts, and bytes that each model of it needs."""

    batch: int
    context: int
    clocks: Clocks
    forecasts: tuple[Forecast, ...]
    memory: Mapping[str, float]
    experts: tuple[WokenExperts, ...]

    @property
    def best(self) -> Forecast | None:
        """The forecast that pays most, of those with a counted acceptance if there are any; None if none pays."""
        counted = [f for f in self.forecasts if f.acceptance.source != acceptance.SWEPT]
        found = max(counted or self.forecasts, key=lambda f: f.best.speedup)
        return found if found.pays else None


@dataclass(frozen=True)
class Advice:
    """The answer to a question: a case for each batch size and context, and the facts that they share."""

    question: Question
    target: ModelOutline
    draft_models: tuple[ModelOutline, ...]
    vocabularies: tuple[str, ...]  # a line for each draft model whose vocabulary is not the target's
    device: Device
    memory: float | None  # bytes of the device, or None if that is not known
    cases: tuple[Sizes, ...]  # by batch size and context

    def fits(self, case: Sizes) -> bool | None:
        """Whether the device holds all of it; None if that is not known."""
        return None if self.memory is None else sum(case.memory.values()) <= self.memory

    def to_dict(self) -> Json:
        return {
            "target": facts(self.target, self.question),
            "drafts": [facts(draft, self.question) for draft in self.draft_models],
            "vocabularies": list(self.vocabularies),
            "device": {"name": self.device.name, "title": self.device.title, "source": self.device.source,
                       "memory": self.memory},
            "cases": [self._case(case) for case in self.cases],
        }  # fmt: skip

    def _case(self, case: Sizes) -> Json:
        clock, best = case.clocks.expected, case.best
        return {
            "batch": case.batch, "context": case.context, "times": case.clocks.source, "note": case.clocks.note,
            "step_s": clock.step_s, "v": {n: clock.v(n) for n in (1, 2, 4, 8, 16)},
            "tokens_per_second": case.batch / clock.step_s, "memory": dict(case.memory),
            "experts": [asdict(each) for each in case.experts],
            "fits": self.fits(case), "methods": [f.to_dict() for f in case.forecasts],
            "best": None if best is None else best.to_dict(), "verdict": verdict(case),
        }  # fmt: skip


def facts(model: ModelOutline, question: Question) -> Json:
    load = model.traffic(kv_dtype=question.kv_dtype)
    return {
        "name": model.name, "source": model.source, "parameters": model.config.n_parameters,
        "context": model.config.context_length, "bytes": model.nbytes, "bytes_a_step": load.weight_bytes,
        "macs_a_row": sum(m.macs_per_row for m in load.matrices), "kv_bytes_per_token": load.kv_bytes_per_token,
        "kv_bytes": {context: model.kv_bytes(context, question.kv_dtype) for context in question.contexts},
    }  # fmt: skip


def verdict(case: Sizes) -> str:
    """The advice in a sentence; if no acceptance was counted, from which one on each method pays."""
    supposed = all(f.acceptance.source == acceptance.SWEPT for f in case.forecasts)
    if supposed and len({f.acceptance.alpha for f in case.forecasts}) > 1:
        least = {f.candidate.name: f.break_even for f in case.forecasts if f.candidate.token is not None}
        paying = sorted((alpha, name) for name, alpha in least.items() if alpha is not None)
        said = [f"{name} from {alpha:.2f} on" for alpha, name in paying]
        said += [f"{name} never" for name, alpha in least.items() if alpha is None]
        copied = next(f for f in case.forecasts if f.candidate.token is None)
        rate = "never" if copied.break_even is None else f"from {copied.break_even:.2f} on, where there is what to copy"
        return f"nobody counted an acceptance here; speculation pays: copied drafts {rate}, {', '.join(said)}"
    if case.best is None:
        slowest = max(case.forecasts, key=lambda f: f.best.speedup)
        return f"do not speculate: of {slowest.candidate.name}, {slowest.why_not()}"
    at = case.best.best
    sure = "" if at.low > 1 else ", though it may be slower on some texts" if at.high > 1 else ""
    return (
        f"speculate with {case.best.candidate.name}, {at.size}: {at.speedup:.2f} times as fast "
        f"({at.low:.2f} to {at.high:.2f}){sure}"
    )


def advise(question: Question, *, bar: Bar = silent) -> Advice:
    """The answer. This machine is measured if it is the device, the file is here and no table is kept. UserError: an
    unknown model or device, a context that the model has no room for, or a task that was not counted."""
    if question.task is not None:
        kept = (rates for (model, _), rates in acceptance.kept_rates().items() if model == _usual(question.target))
        known = {
            task for rates in (kept if question.counted is None else question.counted.values()) for task in rates.tasks
        }
        if question.task not in known:
            raise UserError(f"--task {question.task}: nothing was counted on such texts{nearest(question.task, known)}")
    target, draft_models = outline(question.target), tuple(map(outline, question.draft_models))
    room = target.config.context_length
    for context in question.contexts:
        if context > room:
            raise UserError(f"--context {context}: {target.name} has room for {room} tokens")
    question = replace(question, contexts=question.contexts or (min(CONTEXT, room),))
    chosen = tuple(candidates(target, draft_models, kv_dtype=question.kv_dtype))
    if question.device == THIS and target.path is not None and not question.paper:
        table, keys = _measured(target, chosen, question, bar)
        device = device_of(table)
    else:
        table, keys, device = None, {}, get_device(question.device)
    methods = [(candidate, rates) for candidate in chosen for rates in _acceptances(question, candidate)]
    models, cases = (target, *draft_models), []
    for batch in question.batches:
        for context in question.contexts:
            if table is None:
                clocks = Clocks.on_paper(device, target, context, batch, kv_dtype=question.kv_dtype)
            else:
                clocks = Clocks.from_table(table, keys, target.nbytes, context, batch)
            found = tuple(forecast(clocks, method, rates, lengths=question.lengths) for method, rates in methods)
            caches = sum(model.kv_bytes(context, question.kv_dtype) for model in models) * batch
            memory = {**{model.name: model.nbytes for model in models}, "caches": caches}
            experts = WokenExperts.all_from(target, device, context, batch)
            cases.append(Sizes(batch, context, clocks, found, memory, experts))
    vocabularies = tuple(filter(None, (another_vocabulary(target, draft) for draft in draft_models)))
    memory = device.memory
    if device.name == THIS:
        with contextlib.suppress(ValueError, OSError):  # a system that does not tell
            memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return Advice(question, target, draft_models, vocabularies, device, memory, tuple(cases))


def _measured(
    target: ModelOutline, chosen: Sequence[Candidate], question: Question, bar: Bar
) -> tuple[CostTable, dict[str, str]]:
    """The target's table with the cost of every drafter that is here, and the drafters' keys in it.

    Costs that are not kept (with `refresh` all of them) are measured; only then weights are loaded.
    """
    assert target.path is not None

    def is_here(candidate: Candidate) -> bool:
        name = candidate.options.get("model")
        return not candidate.assumed and (name is None or outline(str(name)).path is not None)

    here = [c for c in chosen if is_here(c)]
    draws = {c.name: "top" if c.tree else None for c in here}
    keys = {c.name: measuring.draft_key(c.drafter, c.options, draws[c.name]) for c in here}
    table = timing_cache.find(target.path, target.config, kv_dtype=question.kv_dtype)
    if question.refresh or table is None or any(key not in table.drafts for key in keys.values()):
        with bar("loading, to measure it here once: a minute or less, --paper answers without", 1):
            model = load(target.path, kv_dtype=question.kv_dtype)
        table = measuring.load_or_measure(model, refresh=question.refresh, bar=bar)
        for c in here:
            table, _ = measuring.table_for(model, c.drafter, c.options, draw=draws[c.name], bar=bar)
    return table, keys


def _acceptances(question: Question, candidate: Candidate) -> list[AcceptedRates]:
    """Acceptances to look at: supposed in the question, else counted in a run, else kept, else a sweep."""
    if question.alphas:
        return [acceptance.swept(alpha) for alpha in question.alphas]
    if question.counted is None:
        known = acceptance.kept_rates().get((_usual(question.target), _usual(candidate.chain)))
    else:
        known = question.counted.get(candidate.chain) or question.counted.get(candidate.drafter)
    if known is not None and (task := question.task) is not None:
        known = AcceptedRates(f"{known.source}, {task}", {task: known.tasks[task]}) if task in known.tasks else None
    if known is None:
        return [acceptance.swept(alpha) for alpha in SWEEP]
    supposed = candidate.tree and not all(a.ranks for a in known.tasks.values())
    return [AcceptedRates(f"{known.source}; siblings of trees supposed", known.tasks) if supposed else known]


def _usual(name: str) -> str:
    """The catalogue's name of a model, if it has one."""
    entry = catalogue.find(name)
    return name if entry is None else entry.name


def parts(advice: Advice) -> Iterator[Table | Text]:
    """The answer as lines and tables: the models, then each batch size and context."""
    for model in (advice.target, *advice.draft_models):
        known = facts(model, advice.question)
        weights = f"{known['parameters'] / 1e6:,.0f} M weights, {size_text(known['bytes'])} ({known['source']})"
        step = f"a step reads {size_text(known['bytes_a_step'])}, a row takes {known['macs_a_row'] / 1e9:.3g} GMAC"
        cache = f"a token of cache {size_text(known['kv_bytes_per_token'])}"
        yield Text(f"{known['name']}: {weights}; {step}, {cache}")
    yield from (Text(line, style="yellow") for line in advice.vocabularies)
    for case in advice.cases:
        yield Text(f"\nbatch {case.batch}, {case.context} tokens in the cache", style="bold")
        clock = case.clocks.expected
        v = ", ".join(f"v({n}) {clock.v(n):.2f}" for n in (2, 4, 8, 16))
        yield Text(f"{case.clocks.source}: {case.batch / clock.step_s:.4g} tok/s plainly, {v}")
        if case.clocks.note is not None:
            yield Text(case.clocks.note, style="yellow")
        each = " + ".join(f"{name} {size_text(nbytes)}" for name, nbytes in case.memory.items())
        limit = "" if advice.memory is None else " of {}" if advice.fits(case) else ", MORE THAN THE {} THERE ARE"
        total = size_text(sum(case.memory.values())) + limit.format(size_text(advice.memory or 0))
        yield Text(f"memory: {each} = {total}")
        if case.experts:
            yield _experts_table(case.experts, advice.target.config.n_experts)
        if counted := [f for f in case.forecasts if f.acceptance.source != acceptance.SWEPT]:
            yield _counted_table(counted)
            yield from (Text(line, style="dim") for line in dict.fromkeys(f.acceptance.source for f in counted))
        if guessed := [f for f in case.forecasts if f.acceptance.source == acceptance.SWEPT]:
            yield _swept_table(guessed)
        yield Text(verdict(case), style="bold")


def _experts_table(found: Sequence[WokenExperts], all_of_layer: int) -> Table:
    columns = ("rows", f"experts of {all_of_layer}", "read", "v(n)", "break-even")
    note = (
        "on paper; shared: experts that a row has from the row before; break-even: least acceptance at which drafts of "
        "n - 1 tokens pay that cost nothing"
    )
    table = tables.new("shared", *columns, note=note)
    for e in found:
        cells = (str(e.rows), f"{e.experts:.1f}", f"{e.nbytes / 1e6:,.0f} MB", f"{e.v:.2f}", _rate(e.break_even))
        table.add_row("by chance" if e.overlap is None else f"{e.overlap:.0%}", *cells)
    return table


def _counted_table(found: list[Forecast]) -> Table:
    columns = ("c", "acceptance", "drafts", "break-even", "gamma", "tok/round", "speed-up", "interval")
    note = (
        "c: a drafted token in plain steps; drafts: share of the rounds that draft; gamma: of a tree nodes x levels; "
        "interval: over texts and times"
    )
    table = tables.new("method", *columns, note=note)
    for f in sorted(found, key=lambda f: -f.best.speedup):
        best, how = f.best, f.acceptance
        drafts = (_size(f), f"{best.tokens:.2f}") if f.pays else ("0", "1.00")
        cells = (f"{f.c:.2f}", f"{how.alpha:.2f}", f"{how.share:.0%}", _rate(f.break_even), *drafts)
        table.add_row(f.candidate.name, *cells, f"{best.speedup:.2f}", intervals.shown(best.low, best.high))
    return table


def _size(f: Forecast) -> str:
    """Tokens of a chain; nodes x levels of a tree."""
    return str(f.best.gamma) if f.best.levels is None else f"{f.best.gamma} x {f.best.levels}"


def _swept_table(found: list[Forecast]) -> Table:
    """A row a method, a column an acceptance: speed-up and the length that gives it."""
    alphas = list(dict.fromkeys(f.acceptance.alpha for f in found))
    heads = [f"{alpha:g}" for alpha in alphas]
    note = (
        "speed-up at a supposed acceptance, and gamma (of a tree nodes x levels); a dash: no length pays; *: a head "
        "that no argument names"
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


def figure(report: Json) -> Figure:
    """A panel for each batch size and context of `Advice.to_dict`, a line a method and acceptance; the shade is the
    interval."""
    rows = []
    for case in report["cases"]:
        where = f"batch {case['batch']}, {case['context']} tokens"
        for method in sorted(case["methods"], key=lambda m: -max(p["speedup"] for p in m["lengths"]))[:MOST]:
            label = f"{method['method']}, acceptance {method['alpha']:.2f}"
            rows += [
                {"where": where, "method": label, "gamma": p["gamma"], "value": p["speedup"],
                 "low": p["low"], "high": p["high"], "tokens_a_round": p["tokens"]}
                for p in method["lengths"]
            ]  # fmt: skip
    caption = (
        "Predicted speed-up over plain decoding by the length of the drafts: expected tokens of a round over its time "
        f"in plain steps. Shaded: over texts and over what the times may be. The {MOST} methods that pay most."
    )
    width = 4.6 * max(1, len(report["cases"]))
    title = f"{report['target']['name']} on {report['device']['title']}: what drafting would bring"
    return Figure("advised", title, caption, tuple(rows), _panels, size=(width, 4.4))


def _panels(canvas: Canvas, rows: Sequence[Row]) -> None:
    for axes, where, here in plots.panels(canvas, rows, "where", sharey=True):
        for method, colour, own in plots.series(here, "method", x="gamma"):
            at = [r["gamma"] for r in own]
            axes.plot(at, [r["value"] for r in own], color=colour, marker="o", markersize=3, label=method)
            axes.fill_between(at, [r["low"] for r in own], [r["high"] for r in own], color=colour, alpha=0.1, lw=0)
        axes.axhline(1, color=FAINT, linewidth=0.8)
        axes.set(title=where, xlabel="tokens drafted in a round", ylabel="speed-up")
        axes.set_ylim(0, 1.15 * max(r["value"] for r in here) + 0.2)
        plots.legend_below(axes)
