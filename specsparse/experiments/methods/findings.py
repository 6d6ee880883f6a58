"""What a run's numbers mean: where the time went, what the policy decided, what other choices would have given, and how
near the cost model's predictions come to the clock."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from rich.table import Table

from specsparse.engine.model import Model
from specsparse.experiments.methods.configured import shape_of
from specsparse.experiments.methods.decoding import Passes
from specsparse.experiments.settings import MethodSettings
from specsparse.measure import intervals, speedups
from specsparse.measure.costs import measuring
from specsparse.measure.costs.acceptance import AcceptedRates
from specsparse.measure.costs.explain import explain_record, oracles
from specsparse.measure.costs.forecast import Candidate, Clocks, DraftShape, at_shape
from specsparse.measure.costs.measuring import Bar, silent
from specsparse.report.record import PLAIN, SPECULATIVE, Group, Pass, RunRecord
from specsparse.runtime import metrics
from specsparse.runtime.method import Method
from specsparse.runtime.metrics import Times
from specsparse.runtime.timing_cache import FREE, CostTable
from specsparse.support import tables
from specsparse.support.files import Json

GOAL = 0.1
"""How far a prediction may be off, as a share of what was measured."""
PREDICTION_DEFINITIONS = {
    "advice": "speed-up by the cost model: times measured here before the run, acceptance and share of rounds with a "
    "draft as this run counted them; over_measured: predicted / measured",
}


def explain(
    found: RunRecord,
    passes: Sequence[Pass],
    loop: Passes,
    *,
    split: Mapping[str, Times],
    table: CostTable | None,
    drafter: str,
) -> RunRecord:
    """The record with its findings and notes; `table` is what is known of the model's costs on this machine."""
    if SPECULATIVE not in found.groups["all"].sides:
        return found
    counters, tree = found.groups["all"].sides[SPECULATIVE].counters, found.method.get("levels") is not None
    exports = {style: metrics.export(counters, style, tree=tree) for style in metrics.STYLES}
    parts = [
        _split(split),
        _host(passes),
        _policy(loop.policies),
        _predicted(found, table, drafter),
        _oracles(found, table, drafter),
        ({"exports": exports}, []),
    ]
    findings = {key: value for part, _ in parts for key, value in part.items()}
    return dataclasses.replace(found, findings=findings, notes=tuple(note for _, notes in parts for note in notes))


Part = tuple[dict[str, object], list[str]]
"""Findings, and notes on them."""


def _split(split: Mapping[str, Times]) -> Part:
    total = sum(split.values(), Times())
    if not (total.draft or total.verify):
        return {}, []
    note = "time split: measured stage by stage on the first prompt of each task, applied to the timed passes"
    return {"time_split": dataclasses.asdict(total)}, [note]


def _host(passes: Sequence[Pass]) -> Part:
    """The ablation: one program against a program a stage."""
    one = {(p.prompt_id, p.repeat): p for p in passes if p.side == SPECULATIVE}
    pairs = [(p, one[p.prompt_id, p.repeat]) for p in passes if p.side not in (PLAIN, SPECULATIVE)]
    timed = [(a.decode_s, b.decode_s, a.prompt_id) for a, b in pairs if a.decode_s > 0 and b.decode_s > 0]
    if not timed:
        return {}, []
    host_s, jit_s, ids = zip(*timed, strict=True)
    ratio = speedups.speedup(host_s, jit_s, prompts=ids)
    note = (
        f"one program for the whole decode is {ratio.ratio_of_totals:.2f} times as fast as the host loop "
        f"({ratio.interval.sentence()}), same tokens"
    )
    return {"jit_over_host_loop": ratio.to_dict()}, [note]


def _policy(reports: Sequence[Any]) -> Part:
    if not reports:
        return {}, []
    rounds, off = sum(r.rounds_off for r in reports), sum(r.off for r in reports)
    predicted = [r.predicted for r in reports if r.predicted is not None]
    out: dict[str, object] = {"rounds_off": rounds, "passes": len(reports)}
    if not predicted:
        return {"policy": out}, []
    mean = sum(predicted) / len(predicted)
    out |= {"off_at_end": off, "predicted_speedup": mean}
    state = "never turned drafting off" if not rounds else f"left {rounds} rounds without a draft"
    note = f"auto_off {state}; at the end it was off in {off} of {len(reports)} passes (predicted speed-up {mean:.2f})"
    return {"policy": out}, [note]


def _oracles(found: RunRecord, table: CostTable | None, drafter: str) -> Part:
    everything = found.groups["all"]
    if everything.speedup is None:
        return {}, []
    costs = {}
    if table is not None:
        costs = {"v": table.v, **table.draft_costs(table.drafts.get(drafter, FREE), 1)}
    counters, ratio = everything.sides[SPECULATIVE].counters, everything.speedup.ratio_of_totals
    best = oracles(counters, ratio, levels=found.method.get("levels"), **costs)
    words = {"free_draft": "were drafts free {:.2f}", "perfect_draft": "were every draft right {:.2f}"}
    said = [text.format(best[key]) for key, text in words.items() if best[key] is not None]
    if best["best_gamma"] is not None:
        hindsight = best["best_gamma"]
        said.append(f"with the best fixed length in hindsight ({hindsight['gamma']}) {hindsight['speedup']:.2f}")
    return {"oracles": best}, [f"speed-up {', '.join(said)}"] if said else []


def _predicted(found: RunRecord, table: CostTable | None, drafter: str) -> Part:
    """The cost model's prediction beside the measurement, where this machine's costs are known."""
    if table is None:
        return {}, ["predicted speed-up: unknown; +experiment=roofline measures this model's costs here and keeps them"]
    why = explain_record(found, table, drafter=drafter)
    return ({}, []) if why is None else ({"explanation": dataclasses.asdict(why)}, list(why.lines()))


@dataclass(frozen=True)
class Prediction:
    """What the cost model says of a method, and what came out.

    Attributes:
        predicted, low, high: by the table, with its interval over texts and times.
        measured: by the clock.
        v, c, c0: of the mean round: its forward, a drafted token and the rest, in plain steps.
        rows: mean tokens of a draft, of a tree its nodes; a tree's drafting is all in c0.
    """

    predicted: float
    low: float
    high: float
    measured: float
    v: float
    c: float
    c0: float
    rows: float

    @property
    def over_measured(self) -> float:
        """1 where the model is right."""
        return self.predicted / self.measured

    @property
    def within(self) -> bool:
        """Whether the goal is met."""
        return abs(self.over_measured - 1) <= GOAL

    def to_dict(self) -> Json:
        """As plain values."""
        return {**asdict(self), "over_measured": self.over_measured, "within": self.within}


class Costed(NamedTuple):
    """Where a method's cost stands in the table, and the most tokens or nodes of its drafts."""

    key: str
    room: int


def costs_of(
    model: Model, methods: Mapping[str, tuple[MethodSettings, Method]], *, bar: Bar = silent
) -> tuple[CostTable, dict[str, Costed]]:
    """The model's table with what each method's drafts cost: a token of a chain, a tree as a whole."""
    found: dict[str, Costed] = {}
    table = None
    for name, (cfg, method) in methods.items():
        drafter, options = cfg.drafter.name, cfg.drafter.options
        tree = shape_of(cfg)
        if tree is None:
            table, key = measuring.table_for(model, drafter, options, bar=bar)
        else:
            table, key = measuring.table_for_tree(model, drafter, options, tree, method, bar=bar)
        found[name] = Costed(key, cfg.policy.gamma if tree is None else method.max_nodes)
    assert table is not None  # the caller has a method
    return table, found


def predict(name: str, groups: Mapping[str, Group], table: CostTable, costed: Costed) -> Prediction | None:
    """What the table says of one method by its own acceptance, of a tree by depth; None where it drafted nothing.

    Args:
        name: of the method.
        groups: its passes by task.
        table: of the target.
        costed: the method's place in it.
    """
    counted = {task: group.sides[SPECULATIVE].counters for task, group in groups.items() if SPECULATIVE in group.sides}
    acceptance, whole = AcceptedRates.from_groups("this run", counted), groups["all"]
    if acceptance is None or whole.speedup is None:
        return None
    side = whole.sides[SPECULATIVE]
    kv_length = (side.prefill_tokens + side.counters.num_emitted_tokens / 2) / side.passes
    clocks, candidate = Clocks.from_table(table, {name: costed.key}, 1.0, kv_length), Candidate(name, name)
    at, clock = at_shape(clocks, candidate, acceptance, DraftShape(costed.room)), clocks.expected
    rows = side.counters.num_draft_tokens / max(side.counters.num_drafts, 1)
    c, c0 = clock.costs(candidate, costed.room)
    return Prediction(at.speedup, at.low, at.high, whole.speedup.ratio_of_totals, clock.v(rows + 1), c, c0, rows)


def predictions(
    groups: Mapping[str, Mapping[str, Group]], table: CostTable, costed: Mapping[str, Costed]
) -> dict[str, Prediction]:
    """Of all methods that drafted, by name; `groups` are their passes by task."""
    made = {name: predict(name, own, table, costed[name]) for name, own in groups.items()}
    return {name: one for name, one in made.items() if one is not None}


def prediction_summary(found: Mapping[str, Prediction]) -> Json:
    """For the record: how many predictions, and how many within the goal."""
    return {"advice": {"methods": len(found), "within": sum(b.within for b in found.values())}} if found else {}


def prediction_parts(found: Mapping[str, Prediction]) -> Iterator[Table | str]:
    """A row a method, and how many are within the goal; nothing if nothing was predicted."""
    if not found:
        return
    out = tables.new("method", "measured", "predicted", "interval", "over measured", "drafted", "v", "c", "c0")
    for name, one in found.items():
        numbers = (one.over_measured, one.rows, one.v, one.c, one.c0)
        ends = intervals.shown(one.low, one.high)
        out.add_row(name, f"{one.measured:.2f}", f"{one.predicted:.2f}", ends, *(f"{value:.2f}" for value in numbers))
    yield out
    within = sum(one.within for one in found.values())
    yield f"advice: {within} of {len(found)} predictions within {GOAL:.0%} of the clock"
