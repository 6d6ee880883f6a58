"""Advice: every method's predicted speed-up at every batch size and context, the best of them, and what it needs."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from specsparse.data.devices import THIS, Device
from specsparse.engine.model import Model
from specsparse.errors import UserError
from specsparse.measure.costs import accepted, clocks, devices, drafts, predicted
from specsparse.measure.costs.accepted import AcceptedRates
from specsparse.measure.costs.candidates import Candidate, candidates
from specsparse.measure.costs.clocks import Clocks
from specsparse.measure.costs.forecast import LENGTHS, Forecast, forecast
from specsparse.measure.costs.measured import load_or_measure
from specsparse.measure.costs.progress import Bar, silent
from specsparse.measure.costs.subjects import Subject, another_vocabulary, subject
from specsparse.models import catalogue
from specsparse.runtime.load import load
from specsparse.runtime.times import store
from specsparse.runtime.times.kept import CostTable
from specsparse.runtime.times.stamp import cost_key
from specsparse.support.files import Json
from specsparse.support.options import nearest

SWEPT = (0.5, 0.6, 0.7, 0.8)
"""Acceptances where none was measured."""
CONTEXT = 512
"""Tokens in the cache where nobody says how many."""


@dataclass(frozen=True)
class Question:
    """What is asked.

    Attributes:
        target, draft_models: names, paths or references to the Hub.
        device: a name of `data.devices`, or "this".
        batches, contexts: sizes that are looked at; no context: `CONTEXT`, or what the model has room for.
        lengths: of drafts.
        alphas: acceptances, instead of what is known.
        counted: acceptances by drafter, of a run's record.
        task: of the kinds of text that were counted, this one alone.
        kv_dtype: of the caches.
        paper: this machine too by its peaks alone, without decoding.
        refresh: this machine is measured again, whatever was kept.
    """

    target: str
    draft_models: tuple[str, ...] = ()
    device: str = THIS
    batches: tuple[int, ...] = (1,)
    contexts: tuple[int, ...] = ()
    lengths: tuple[int, ...] = LENGTHS
    alphas: tuple[float, ...] = ()
    counted: Mapping[str, AcceptedRates] | None = None
    task: str | None = None
    kv_dtype: str = "f16"
    paper: bool = False
    refresh: bool = False


@dataclass(frozen=True)
class Sizes:
    """One batch size and context: times, forecasts, and bytes that each model of it needs."""

    batch: int
    context: int
    clocks: Clocks
    forecasts: tuple[Forecast, ...]
    memory: Mapping[str, float]

    @property
    def best(self) -> Forecast | None:
        """The forecast that pays most, of those that rest on what was counted where there are any; None: none pays."""
        counted = [f for f in self.forecasts if f.acceptance.source != accepted.SWEPT]
        found = max(counted or self.forecasts, key=lambda f: f.best.speedup)
        return found if found.pays else None


@dataclass(frozen=True)
class Advice:
    """The answer.

    Attributes:
        question: what was asked.
        target: the model.
        draft_models: the drafts' models.
        device: what it is for.
        memory: bytes that the device has; None: unknown.
        cases: by batch size and context.
    """

    question: Question
    target: Subject
    draft_models: tuple[Subject, ...]
    device: Device
    memory: float | None
    cases: tuple[Sizes, ...]

    @cached_property
    def vocabularies(self) -> tuple[str, ...]:
        """A line for each draft model whose vocabulary is not the target's."""
        found = (another_vocabulary(self.target, draft) for draft in self.draft_models)
        return tuple(line for line in found if line is not None)

    def to_dict(self) -> Json:
        """As plain values."""
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
            "fits": self.fits(case), "methods": [f.to_dict() for f in case.forecasts],
            "best": None if best is None else best.to_dict(), "verdict": verdict(case),
        }  # fmt: skip

    def fits(self, case: Sizes) -> bool | None:
        """Whether the device holds all of it; None where that is not known."""
        return None if self.memory is None else sum(case.memory.values()) <= self.memory


def facts(model: Subject, question: Question) -> Json:
    """What a token of a model reads and computes."""
    load = model.traffic(kv_dtype=question.kv_dtype)
    return {
        "name": model.name, "source": model.source, "parameters": model.config.n_parameters,
        "context": model.config.context_length, "bytes": model.nbytes, "bytes_a_step": load.weight_bytes,
        "macs_a_row": sum(m.macs_per_row for m in load.matrices), "kv_bytes_per_token": load.kv_bytes_per_token,
        "kv_bytes": {context: model.kv_bytes(context, question.kv_dtype) for context in question.contexts},
    }  # fmt: skip


def verdict(case: Sizes) -> str:
    """What to do, in a sentence; where nobody counted an acceptance, from which one on a method pays."""
    best = case.best
    if len({f.acceptance.alpha for f in case.forecasts}) > 1 and all(
        f.acceptance.source == accepted.SWEPT for f in case.forecasts
    ):
        return _thresholds(case)
    if best is not None:
        at = best.best
        sure = "" if at.low > 1 else ", though it may be slower on some texts" if at.high > 1 else ""
        return (
            f"speculate with {best.candidate.name}, {at.size}: {at.speedup:.2f} times as fast "
            f"({at.low:.2f} to {at.high:.2f}){sure}"
        )
    least = max(case.forecasts, key=lambda f: f.best.speedup)
    return f"do not speculate: of {least.candidate.name}, {least.to_dict()['why_not']}"


def _thresholds(case: Sizes) -> str:
    least = {f.candidate.name: f.break_even for f in case.forecasts if f.candidate.token is not None}
    paying = sorted((alpha, name) for name, alpha in least.items() if alpha is not None)
    never = [name for name, alpha in least.items() if alpha is None]
    said = [f"{name} from {alpha:.2f} on" for alpha, name in paying] + [f"{name} never" for name in never]
    copied = next(f for f in case.forecasts if f.candidate.token is None)
    rate = "never" if copied.break_even is None else f"from {copied.break_even:.2f} on, where there is what to copy"
    return f"nobody counted an acceptance here; speculation pays: copied drafts {rate}, {', '.join(said)}"


def advise(question: Question, *, bar: Bar = silent) -> Advice:
    """The answer; this machine is measured where it is asked for, the file is here and no table is kept.

    Raises:
        UserError: an unknown model or device, a context that the model has no room for, or a task nobody counted.
    """
    _check_task(question)
    target, draft_models = subject(question.target), tuple(map(subject, question.draft_models))
    room = target.config.context_length
    for context in question.contexts:
        if context > room:
            raise UserError(f"--context {context}: {target.name} has room for {room} tokens")
    question = replace(question, contexts=question.contexts or (min(CONTEXT, room),))
    chosen = tuple(candidates(target, draft_models, kv_dtype=question.kv_dtype))
    table, keys = None, {}
    if question.device == THIS and target.path is not None and not question.paper:
        table, keys = measured(target, chosen, kv_dtype=question.kv_dtype, refresh=question.refresh, bar=bar)
    device = devices.get(question.device) if table is None else predicted.this_machine(table)
    cases = tuple(
        _case(question, target, chosen, draft_models, device, table, keys, batch, context)
        for batch in question.batches
        for context in question.contexts
    )
    return Advice(question, target, draft_models, device, _memory(device), cases)


def _memory(device: Device) -> float | None:
    if device.name != THIS:
        return device.memory
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (ValueError, OSError):
        return None


def measured(
    target: Subject, chosen: Sequence[Candidate], *, kv_dtype: str = "f16", refresh: bool = False, bar: Bar = silent
) -> tuple[CostTable, dict[str, str]]:
    """The target's table with the cost of every drafter that is here, measured where it is not kept (with `refresh`
    whatever is kept), and their keys.

    Weights are loaded only for what is missing.
    """
    assert target.path is not None
    here = [c for c in chosen if not c.assumed and _is_here(c)]
    keys = {c.name: (drafts.trees_key if c.tree else cost_key)(c.drafter, c.options) for c in here}
    table = store.find(target.path, target.config, kv_dtype=kv_dtype)
    if refresh or table is None or any(key not in table.drafts for key in keys.values()):
        model = load(target.path, kv_dtype=kv_dtype)
        table = _with_drafts(model, here, bar, refresh=refresh)
    return table, keys


def _with_drafts(model: Model, here: Sequence[Candidate], bar: Bar, *, refresh: bool) -> CostTable:
    table = load_or_measure(model, refresh=refresh, bar=bar)
    for c in here:
        measure = drafts.table_for_trees if c.tree else drafts.table_for
        table, _ = measure(model, c.drafter, c.options, bar=bar)
    return table


def _is_here(candidate: Candidate) -> bool:
    name = candidate.options.get("model")
    return name is None or subject(str(name)).path is not None


def _case(
    question: Question, target: Subject, chosen: Sequence[Candidate], draft_models: Sequence[Subject],
    device: Device, table: CostTable | None, keys: Mapping[str, str], batch: int, context: int,
) -> Sizes:  # fmt: skip
    if table is None:
        times = clocks.on_paper(device, target, context, batch, kv_dtype=question.kv_dtype)
    else:
        times = clocks.timed(table, keys, target, context, batch)
    found = tuple(
        forecast(times, candidate, how, lengths=question.lengths)
        for candidate in chosen
        for how in _acceptances(question, candidate)
    )
    models = (target, *draft_models)
    caches = sum(model.kv_bytes(context, question.kv_dtype) for model in models) * batch
    memory = {**{model.name: model.nbytes for model in models}, "caches": caches}
    return Sizes(batch, context, times, found, memory)


def _acceptances(question: Question, candidate: Candidate) -> list[AcceptedRates]:
    """What was asked for, else what a run counted, else what the table has, else a sweep."""
    if question.alphas:
        return [accepted.swept(alpha) for alpha in question.alphas]
    counted = question.counted
    known = accepted.kept(_usual(question.target), _usual(candidate.chain)) if counted is None else None
    if counted is not None:
        known = counted.get(candidate.chain) or counted.get(candidate.drafter)
    if known is not None and question.task is not None:
        known = known.of_task(question.task)
    if known is None:
        return [accepted.swept(alpha) for alpha in SWEPT]
    supposed = candidate.tree and not all(a.ranks for a in known.tasks.values())
    return [AcceptedRates(f"{known.source}; siblings of trees supposed", known.tasks) if supposed else known]


def _usual(name: str) -> str:
    """The catalogue's name of a model, where it has one."""
    entry = catalogue.find(name)
    return name if entry is None else entry.name


def _check_task(question: Question) -> None:
    known = set() if question.counted is None else {t for a in question.counted.values() for t in a.tasks}
    if question.counted is None:
        known = accepted.kept_tasks(_usual(question.target))
    if question.task is not None and question.task not in known:
        raise UserError(f"--task {question.task}: nothing was counted on such texts{nearest(question.task, known)}")
