"""Predicted speed-ups of a target's possible drafters: E[tokens] of a round over the time that it takes.

A `Candidate` says what drafting a token reads, a `Clock` how long that and the target's forwards take (by a table that
was measured here, or on paper by a device's sheet), a `DraftShape` what a round drafts.
"""

import functools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType

from specsparse.data.devices import THIS, Device
from specsparse.measure import intervals
from specsparse.measure.costs.acceptance import Accepted, AcceptedRates
from specsparse.measure.costs.roofline import Matrix, ModelOutline, Roofline, Traffic, bits_per_weight, kv_bytes
from specsparse.runtime.timing_cache import FREE, STEP_FLOOR, CostTable, DraftCost
from specsparse.speculative import expected
from specsparse.speculative.drafters.heads.head import DRAFT_IDS, shipped_for
from specsparse.speculative.drafters.self_draft import default_layers
from specsparse.speculative.trees.static import GUESSED_ACCEPTANCE, sequoia
from specsparse.speculative.trees.template import TreeTemplate
from specsparse.support.files import Json

LOOKUPS = ("prompt_lookup", "ngram_simple", "suffix")
"""Drafters that copy from the text."""
EAGLE_IDS = 32000
"""Ids that a published EAGLE-3 head scores (Li et al. 2025, arXiv:2503.01840)."""
TREE = " tree"
"""Suffix of the name of a drafter that drafts trees."""


@dataclass(frozen=True)
class Candidate:
    name: str  # in tables; of a draft model the model's
    drafter: str
    options: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    token: Traffic | None = None  # what drafting a token reads and computes; None: next to nothing
    kernels: int = 0  # that an accelerator starts for it
    nbytes: float = 0.0  # of weights beside the target's
    assumed: bool = False  # its weights are made up, as those of a head that nobody named
    tree: bool = False  # it drafts trees; their levels cost what the chain's tokens do

    @property
    def chain(self) -> str:
        """The name of the drafter when it drafts chains."""
        return self.name.removesuffix(TREE) if self.tree else self.name


def candidates(target: ModelOutline, drafts: tuple[ModelOutline, ...], *, kv_dtype: str = "f16") -> Iterator[Candidate]:
    """The drafters that copy, the draft models, the target's own layers, its trained head or one of EAGLE-3's shape.

    Those that score tokens come twice: for chains, and for trees.
    """
    yield from (Candidate(name, name) for name in LOOKUPS)
    scoring = []
    for draft in drafts:
        load, options = draft.traffic(kv_dtype=kv_dtype), {"model": draft.name}
        scoring.append(Candidate(draft.name, "model", options, load, draft.kernels(), draft.nbytes))
    layers = default_layers(target.config.n_layers)
    own = target.traffic(kv_dtype=kv_dtype, layers=layers)
    scoring.append(Candidate("layer_skip", "layer_skip", {}, own, target.kernels(len(layers))))
    scoring.append(_trained_head(target) or eagle3(target))
    for one in scoring:
        yield one
        yield replace(one, name=one.name + TREE, tree=True)


def _trained_head(target: ModelOutline) -> Candidate | None:
    """The head that travels with specsparse for this target, by its header, or None."""
    if target.file is None or "output_norm.weight" not in target.file.tensors:
        return None
    head = shipped_for(target.file.tensors["output_norm.weight"].dequantize())
    if head is None:
        return None
    c, ids = target.config, head.get(DRAFT_IDS, "numbers", None)
    share = (c.vocab_size if ids is None else len(ids)) / c.vocab_size
    own = [Matrix(t.type.name, t.nbytes, math.prod(t.shape) if len(t.shape) == 2 else 0) for t in head.tensors.values()]
    output = [
        Matrix(m.type_name, m.nbytes * share, m.macs_per_row * share)
        for m in target.traffic().matrices
        if m.macs_per_row == c.vocab_size * c.d_model
    ]
    load = Traffic((*own, *output[-1:]), kv_bytes(c, 1, "f16") / c.n_layers, 2 * c.n_heads * c.head_dim)
    return Candidate("head", "head", {}, load, target.kernels(1), sum(m.nbytes for m in own))


def eagle3(target: ModelOutline) -> Candidate:
    """A head of EAGLE-3's shape for the target: three streams joined, one layer on two of them, 32,000 ids."""
    c = target.config
    D, F, q, kv = c.d_model, c.d_ff, c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    shapes = (3 * D * D, 2 * D * q, 2 * D * kv, 2 * D * kv, q * D, 3 * D * F, min(EAGLE_IDS, c.vocab_size) * D)
    own = tuple(Matrix("F16", macs * bits_per_weight("F16") / 8, macs) for macs in shapes)
    load = Traffic(own, kv_bytes(c, 1, "f16") / c.n_layers, 2 * c.n_heads * c.head_dim)
    return Candidate("eagle3", "eagle3", {}, load, target.kernels(1), load.weight_bytes, assumed=True)


REACHED = (0.8, 0.6)
"""Shares of its bandwidth and of its arithmetic that a device on paper is taken to reach. Our kernels reach 0.71 to
0.89 of the bandwidth on two machines (docs/measured.md); of the arithmetic of eight rows less is known."""
REACHED_AT_MOST = ((0.9, 0.4), (0.7, 0.8))
"""The two corners between which it lies: v(n) depends on their quotient alone."""
RESTLESS = 0.1
"""Deviation of a forward between repeats from which on the machine was busy: 0.06 alone, 0.14 beside others."""
DOUBTS = (2.0, -2.0)
"""Standard deviations of a measured time to which its interval reaches: slow, and fast."""


@dataclass(frozen=True)
class Clock:
    """Times of one target, for one cache length and batch size. Every sequence of a batch has n rows."""

    step_s: float  # seconds of a plain step
    v: Callable[[float], float]  # n -> a forward of n rows a sequence in plain steps
    # gamma -> c0 in plain steps: verdict, commit and counters of a round of gamma tokens
    overhead: Callable[[int], float]
    # (candidate, nodes) -> seconds to draft a token, or a level of a tree with so many nodes
    draft: Callable[..., DraftCost]

    @classmethod
    def on_paper(
        cls,
        device: Device,
        load: Traffic,
        kernels: int,
        kv_length: float,
        batch: int = 1,
        reached: tuple[float, float] = REACHED,
    ) -> "Clock":
        """The clock of the roofline of a device that reaches these shares of its bandwidth and its arithmetic.

        `load` and `kernels` are the traffic of the target's forward and the kernels that it starts.
        """

        def forward_s(load: Traffic, kernels: int, n: float) -> float:
            """The roofline's seconds, and the part of its shorter side that shows."""
            roofline, size = Roofline(device.reaching(*reached), load), (n, kv_length, batch)
            shorter = min(roofline.memory_s(*size), roofline.compute_s(*size))
            return roofline.forward_s(*size) + (1 - device.overlap) * shorter + kernels * device.dispatch

        def draft(candidate: Candidate, width: float = 1.0) -> DraftCost:
            token = candidate.token
            return FREE if token is None else DraftCost(forward_s(token, candidate.kernels, width))

        step_s = forward_s(load, kernels, 1)
        return cls(step_s, lambda n: forward_s(load, kernels, n) / step_s, lambda _: 0.0, draft)  # c0 is not known

    @classmethod
    def from_table(
        cls,
        table: CostTable,
        keys: Mapping[str, str],
        footprint: float,
        kv_length: float,
        batch: int = 1,
        doubt: float = 0.0,
    ) -> "Clock":
        """The clock of times that were measured here with one sequence.

        `keys` are those of the drafters' costs in the table, by the candidates' names; trees have the usual width of a
        level. A draft that was not timed is weighed against the `footprint`, bytes of the target. v(n) is moved by
        `doubt` relative deviations of the timings.
        """
        step_s, spread = table.step(kv_length, batch), _spread(table)

        def v(n: float) -> float:
            near = f"near {min(table.ns, key=lambda m: abs(m - n))}"
            return table.v(n, kv_length, batch) * (1 + doubt * spread.get(near, 0.0) if n > 1 else 1)

        def draft(candidate: Candidate, width: float = 1.0) -> DraftCost:  # whatever the width
            key, token = keys.get(candidate.name), candidate.token
            if key in table.drafts:
                return table.drafts[key]
            return FREE if token is None else DraftCost((token.weight_bytes / footprint + STEP_FLOOR) * step_s)

        return cls(step_s, v, lambda gamma: table.overhead(gamma, kv_length, batch), draft)

    def costs(self, candidate: Candidate, gamma: int, width: float = 1.0) -> tuple[float, float]:
        """(c, c0) in plain steps, as `speculative.expected` takes them."""
        draft = self.draft(candidate, width)
        return draft.token_s / self.step_s, self.overhead(gamma) + draft.fixed_s / self.step_s


def _spread(table: CostTable) -> dict[str, float]:
    """Relative deviation of each timed thing between repeats."""
    spread = table.residuals.get("spread")
    return {name: float(value) for name, value in spread.items()} if isinstance(spread, Mapping) else {}


@dataclass(frozen=True)
class Clocks:
    """The expected times and both ends of what they may be; drafts pay most at the `fast` end. `source` says where the
    times are from, `note` what makes them doubtful."""

    expected: Clock
    slow: Clock
    fast: Clock
    source: str
    note: str | None = None

    @classmethod
    def on_paper(
        cls, device: Device, target: ModelOutline, kv_length: float, batch: int, *, kv_dtype: str = "f16"
    ) -> "Clocks":
        load, kernels = target.traffic(kv_dtype=kv_dtype), target.kernels()
        made = [
            Clock.on_paper(device, load, kernels, kv_length, batch, reached) for reached in (REACHED, *REACHED_AT_MOST)
        ]
        source = "measured peaks" if device.measured else f"sheet: {device.source}"
        return cls(*made, source=f"{device.title}, on paper ({source})")

    @classmethod
    def from_table(
        cls, table: CostTable, keys: Mapping[str, str], footprint: float, kv_length: float, batch: int = 1
    ) -> "Clocks":
        made = [Clock.from_table(table, keys, footprint, kv_length, batch, doubt) for doubt in (0.0, *DOUBTS)]
        forwards = [value for name, value in _spread(table).items() if name.startswith("near ")]
        usual, note = statistics.median(forwards) if forwards else 0.0, None
        if usual >= RESTLESS:
            busy = f"a forward varied by {usual:.0%} between repeats, the machine was busy"
            note = f"note: {busy}: --refresh measures it again"
        source = f"{table.identity.get('cpu', 'this machine')}, measured {table.identity.get('date')}"
        return cls(*made, source=source, note=note)


def device_of(table: CostTable) -> Device:
    title = str(table.identity.get("cpu", THIS))
    return Device(THIS, title, table.bandwidth, table.f32, None, table.int8, overlap=0.0, measured=True)


@dataclass(frozen=True)
class DraftShape:
    """The drafts of a round: a chain of up to `room` tokens, or the same tree of `room` nodes every round."""

    room: int
    template: TreeTemplate | None = None

    @classmethod
    def tree(cls, template: TreeTemplate) -> "DraftShape":
        return cls(template.size, template)

    def tokens(self, a: Accepted) -> float:
        """E[tokens] of a round, the bonus included. Acceptance counted by a chain's positions is used for levels."""
        t = self.template
        if t is None:
            return a.tokens(self.room)
        rates, reach = siblings(a), a.reach

        def further(depth: int) -> float:
            """Acceptance of a node on that level, once its parent was accepted, over that on the first level."""
            if depth == 1 or not reach or not reach[0]:
                return 1.0
            known = min(depth, len(reach))
            if known < 2 or not reach[known - 2]:
                return 0.0
            rarer = reach[known - 1] / reach[known - 2] / reach[0]
            return min(rarer, 1 / sum(rates)) if sum(rates) else 0.0

        chances = [(rates[r] if r < len(rates) else 0.0) * further(d) for r, d in zip(t.ranks, t.depths)]
        return expected.mean_tokens(expected.expected_tokens_tree(t.parents, chances), a.share)

    def steps(self, clock: Clock, candidate: Candidate, a: Accepted) -> float:
        """Time of a mean round in plain steps."""
        rows = a.rows(self.room) if self.template is None else float(self.room)
        drafted = rows if self.template is None else float(self.template.max_depth)  # tokens or levels
        c, c0 = clock.costs(candidate, self.room, width=rows / drafted if drafted else 1.0)
        if not rows:
            return clock.v(1)
        return expected.round_cost(clock.v, rows, c=c * drafted / rows, c0=c0, share=a.share)


def siblings(a: Accepted) -> tuple[float, ...]:
    """Chance of each child of a node to be the accepted one, by rank: as counted, else supposed.

    What the first child leaves is shared by the others as in `sequoia.GUESSED_ACCEPTANCE`, and less of it if the
    first is right less often than there.
    """
    if a.ranks:
        return tuple(rate / max(sum(a.ranks), 1.0) for rate in a.ranks)  # rounded rates may add up to 1.001
    first = min(a.reach[0] if a.reach else a.alpha, 1.0)
    guessed, *others = GUESSED_ACCEPTANCE
    left = (1 - first) * min(first / guessed, 1.0)
    return (first, *(left * rate / (1 - guessed) for rate in others))


MOST_LEVELS = 8
"""Of a tree."""


def tree_for(clock: Clock, candidate: Candidate, acceptance: AcceptedRates, nodes: int) -> DraftShape:
    """The tree of at most so many nodes that Sequoia's programme finds for the mean acceptance by rank."""
    whole = sum(a.weight for a in acceptance.tasks.values())
    each = [(a.weight / whole, siblings(a)) for a in acceptance.tasks.values()]
    most = max(len(rates) for _, rates in each)
    mean = tuple(sum(w * rates[r] for w, rates in each if r < len(rates)) for r in range(most))
    return DraftShape.tree(_sequoia(*_tree_costs(clock, candidate, nodes), mean, nodes))


def tree_break_even(clock: Clock, candidate: Candidate, nodes: int) -> float | None:
    """The least acceptance of first children at which some tree pays, the others as `siblings` supposes, or None."""
    cost, level = _tree_costs(clock, candidate, nodes)

    def pays(alpha: float) -> bool:
        tree = _sequoia(cost, level, siblings(Accepted(alpha)), nodes)
        return DraftShape.tree(tree).tokens(Accepted(alpha)) >= cost[tree.size] + level * tree.max_depth

    return expected.least(pays, steps=12)


def _tree_costs(clock: Clock, candidate: Candidate, nodes: int) -> tuple[tuple[float, ...], float]:
    """(cost of a round by its number of nodes, drafting of the levels left out; cost of drafting a level), in steps."""
    costs = [clock.costs(candidate, n) for n in range(nodes + 1)]
    return tuple(round(clock.v(n + 1) + costs[n][1], 4) for n in range(nodes + 1)), round(costs[0][0], 4)


@functools.lru_cache(maxsize=4096)
def _sequoia(cost: tuple[float, ...], level: float, rates: tuple[float, ...], nodes: int) -> TreeTemplate:
    return sequoia(rates, cost, nodes, min(MOST_LEVELS, nodes), level_cost=level)


LENGTHS = (*range(1, 9), 10, 12, 16)
"""Draft lengths that are looked at."""


@dataclass(frozen=True)
class ForecastPoint:
    """One method at one draft length, or with one tree."""

    gamma: int  # tokens that a draft may have, or nodes of the tree; `levels` of the tree, None for chains
    tokens: float  # emitted a round
    round_steps: float  # time of a round in plain steps
    speedup: float  # over plain decoding
    low: float  # its interval: over kinds of text if several were counted, and over what the times may be
    high: float
    levels: int | None = None

    @property
    def size(self) -> str:
        """The size in words: a chain's length, or nodes and levels of a tree."""
        return f"gamma {self.gamma}" if self.levels is None else f"{self.gamma} nodes on {self.levels} levels"


@dataclass(frozen=True)
class Forecast:
    candidate: Candidate
    acceptance: AcceptedRates
    c: float  # a drafted token, in plain steps
    c0: float  # a round of drafts of one token besides, in plain steps
    points: tuple[ForecastPoint, ...]  # by draft length
    break_even: float | None  # least acceptance at which some length pays, or None
    v: tuple[float, ...]  # of the target, by rows, from v(1)

    @property
    def best(self) -> ForecastPoint:
        return max(self.points, key=lambda p: p.speedup)

    @property
    def pays(self) -> bool:
        return self.best.speedup > 1

    def why_not(self) -> str | None:
        """Why no length pays, in one sentence; None if one does."""
        if self.pays:
            return None
        alpha, v2 = self.acceptance.alpha, self.v[1]
        free = expected.break_even(lambda n: self.v[int(n) - 1], most=len(self.v) - 1)
        if free is None or free > 0.95:
            return f"the device has no arithmetic to spare: a forward of two rows takes {v2:.2f} plain steps"
        if self.break_even is None:
            return f"a drafted token costs {self.c:.2f} plain steps, which no acceptance wins back"
        if self.break_even > alpha:
            costs = f"{self.c:.2f} plain steps a drafted token, v(2) {v2:.2f}"
            return f"{alpha:.2f} of the drafted tokens are accepted, and {self.break_even:.2f} are needed ({costs})"
        some = f"only {self.acceptance.share:.0%} of the rounds find something to draft"
        return f"{some}, and what all rounds pay besides is more"

    def to_dict(self) -> Json:
        best = asdict(self.best) if self.pays else None
        return {
            "method": self.candidate.name, "drafter": self.candidate.drafter, "assumed_head": self.candidate.assumed,
            "alpha": self.acceptance.alpha, "acceptance": self.acceptance.source,
            "tasks": {task: asdict(one) for task, one in self.acceptance.tasks.items()},
            "c": self.c, "c0": self.c0, "break_even": self.break_even, "best": best, "why_not": self.why_not(),
            "lengths": [asdict(p) for p in self.points],
        }  # fmt: skip


def forecast(
    clocks: Clocks, candidate: Candidate, acceptance: AcceptedRates, *, lengths: Sequence[int] = LENGTHS
) -> Forecast:
    """The speed-ups of a method; `lengths` of chains are cut to the longest that was counted, of trees most nodes."""
    clock, longest = clocks.expected, acceptance.longest
    if longest is not None and not candidate.tree:
        lengths = sorted({min(gamma, longest) for gamma in lengths})
    c, c0 = clock.costs(candidate, 1)
    v = tuple(clock.v(n) for n in range(1, max(lengths) + 2))
    if candidate.tree:
        trees = {tree.room: tree for tree in (tree_for(clock, candidate, acceptance, n) for n in lengths)}
        shapes = [trees[n] for n in sorted(trees)]
        least = tree_break_even(clock, candidate, min(max(lengths), 8))
    else:
        shapes = [DraftShape(gamma) for gamma in lengths]
        least = expected.break_even(lambda n: v[int(n) - 1], c=c, c0=c0, most=max(lengths))
    points = tuple(at_shape(clocks, candidate, acceptance, shape) for shape in shapes)
    return Forecast(candidate, acceptance, c, c0, points, least, v)


def at_shape(clocks: Clocks, candidate: Candidate, acceptance: AcceptedRates, shape: DraftShape) -> ForecastPoint:
    """One draft length or tree: tokens of all tasks over the time that they take."""
    tasks = acceptance.tasks.values()

    def speedup(clock: Clock) -> intervals.Interval:
        """Plain time of all tasks over the method's, as a run computes it over prompts."""
        plain = [a.weight for a in tasks]
        method = [a.weight / shape.tokens(a) * shape.steps(clock, candidate, a) for a in tasks]
        found = intervals.ratio(plain, method)
        assert found is not None  # rounds take time
        return found

    middle, slow, fast = (speedup(clock) for clock in (clocks.expected, clocks.slow, clocks.fast))
    ends = [end for found in (middle, slow, fast) for end in (found.value, found.low, found.high) if end is not None]
    tokens = sum(a.weight for a in tasks) / sum(a.weight / shape.tokens(a) for a in tasks)
    levels = None if shape.template is None else shape.template.max_depth
    return ForecastPoint(shape.room, tokens, tokens / middle.value, middle.value, min(ends), max(ends), levels)
