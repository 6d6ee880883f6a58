"""What the cost model predicts of methods that are decoded anyway: its times beside the clock, one line a method."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import NamedTuple, Protocol

from rich.table import Table

from specsparse.engine.model import Model
from specsparse.experiments.settings import MethodSettings
from specsparse.measure import intervals
from specsparse.measure.costs import measuring
from specsparse.measure.costs.acceptance import AcceptedRates
from specsparse.measure.costs.forecast import Candidate, Clocks, DraftShape, at_shape
from specsparse.measure.costs.measuring import Bar, silent
from specsparse.report.record import SPECULATIVE, Group
from specsparse.runtime.device_batch import Method
from specsparse.runtime.timing_cache import CostTable
from specsparse.speculative.trees.base import TreeShape
from specsparse.support import tables
from specsparse.support.files import Json

GOAL = 0.1
"""How far a prediction may be off, as a share of what was measured."""
DEFINITIONS = {
    "advice": "speed-up by the cost model: times measured here before the run, acceptance and share of rounds with a "
    "draft as this run counted them; over_measured: predicted / measured",
}


@dataclass(frozen=True)
class Beside:
    """A prediction and what came out.

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


class Wanted(NamedTuple):
    """A method whose cost is wanted: its config, the shape of its trees or None, and how it decodes."""

    pair: MethodSettings
    tree: TreeShape | None
    method: Method


def table_with(model: Model, wanted: Mapping[str, Wanted], *, bar: Bar = silent) -> tuple[CostTable, dict[str, Costed]]:
    """The model's table with what each method's drafts cost: a token of a chain, a tree as a whole."""
    found: dict[str, Costed] = {}
    table = None
    for name, (pair, tree, method) in wanted.items():
        named = (pair.drafter.name, pair.drafter.options)
        if tree is None:
            table, key = measuring.table_for(model, *named, bar=bar)
            found[name] = Costed(key, pair.policy.gamma)
        else:
            table, key = measuring.table_for_tree(model, *named, tree, method, bar=bar)
            found[name] = Costed(key, method.max_nodes)
    assert table is not None  # the caller has a method
    return table, found


def beside(name: str, groups: Mapping[str, Group], table: CostTable, costed: Costed) -> Beside | None:
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
    return Beside(at.speedup, at.low, at.high, whole.speedup.ratio_of_totals, clock.v(rows + 1), c, c0, rows)


class RankedMethod(Protocol):
    """A method of a comparison."""

    @property
    def name(self) -> str:
        """As in the table."""

    @property
    def groups(self) -> Mapping[str, Group]:
        """Its passes by task."""


def beside_all(entries: Iterable[RankedMethod], table: CostTable, costed: Mapping[str, Costed]) -> dict[str, Beside]:
    """The predictions of all methods that have one, by name."""
    made = {e.name: beside(e.name, e.groups, table, costed[e.name]) for e in entries}
    return {name: one for name, one in made.items() if one is not None}


def summary(found: Mapping[str, Beside]) -> Json:
    """For the record: how many predictions, and how many within the goal."""
    return {"advice": {"methods": len(found), "within": sum(b.within for b in found.values())}} if found else {}


def shown(found: Mapping[str, Beside]) -> Iterator[Table | str]:
    """A row a method, and how many are within the goal; nothing where nothing was predicted."""
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
