"""Every valid method of a list on the same prompts, plain decoding once, all in turn; one ranked table."""

import itertools
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from rich.table import Table
from rich.text import Text

from specsparse.engine.model import Model
from specsparse.errors import UserError
from specsparse.experiments import configured, decoding
from specsparse.experiments.decoding import Bench, Passes
from specsparse.experiments.kind import Kind, RunContext, RunResult
from specsparse.experiments.settings import DecodingSettings, MethodSettings
from specsparse.measure import conditions, intervals
from specsparse.measure.conditions import UNKNOWN, Conditions, Rank
from specsparse.measure.costs import measuring
from specsparse.measure.costs.acceptance import AcceptedRates
from specsparse.measure.costs.forecast import Candidate, Clocks, DraftShape, at_shape
from specsparse.measure.costs.measuring import Bar, silent
from specsparse.measure.intervals import Interval
from specsparse.measure.speedups import Repeats
from specsparse.measure.trials import Ours, need_room
from specsparse.report import display, record
from specsparse.report.record import PLAIN, SPECULATIVE, Group, Identity, Pass
from specsparse.runtime import metrics
from specsparse.runtime.method import NO_DRAFTER, Method, UnfitPair, drafts_trees, resolve
from specsparse.runtime.timing_cache import CostTable
from specsparse.speculative.base import Verifier
from specsparse.speculative.trees import CHAIN
from specsparse.speculative.verifiers import VERIFIERS
from specsparse.support import tables
from specsparse.support.files import Json
from specsparse.support.interleaved import interleaved
from specsparse.support.options import Count
from specsparse.support.registry import Choice

GOAL = 0.1
"""How far a prediction may be off, as a share of what was measured."""
DEFINITIONS = {
    **metrics.DEFINITIONS,
    **conditions.DEFINITIONS,
    "advice": "speed-up by the cost model: times measured here before the run, acceptance and share of rounds with a "
    "draft as this run counted them; over_measured: predicted / measured",
}
_FEW = 2  # methods that a line names; more are counted
_REPEATS = 5  # of each forward behind the prompts of a task


@dataclass(frozen=True)
class ComparedMethod:
    """One method: its verifier's promise, both sides' numbers by task, and whether the text is the same.

    `about` is what else is known of its drafter, such as how two vocabularies go together.
    """

    name: str
    label: str
    groups: dict[str, Group]
    identity: Identity
    about: Mapping[str, object] = field(default_factory=dict)

    @property
    def speedup(self) -> float:
        """Ratio of totals over all prompts; 0 if nothing was decoded."""
        found = self.groups["all"].speedup
        return 0.0 if found is None else found.ratio_of_totals

    @property
    def interval(self) -> Interval | None:
        found = self.groups["all"].speedup
        return None if found is None else found.interval

    def to_dict(self) -> Json:
        tasks: Json = {}
        for task, group in self.groups.items():
            sides = {k: {"rates": s.rates, "counters": metrics.to_dict(s.counters)} for k, s in group.sides.items()}
            tasks[task] = {**sides, "speedup": group.speedup and group.speedup.to_dict()}
        identity = asdict(self.identity)
        return {"name": self.name, "label": self.label, "identity": identity, "tasks": tasks, **self.about}


@dataclass(frozen=True)
class Comparison:
    """All methods, the fastest first, the pairs that were left out, and the conditions that all were timed under."""

    entries: tuple[ComparedMethod, ...]
    refused: tuple[str, ...]
    conditions: Conditions = UNKNOWN
    repeats: Repeats | None = None

    @property
    def as_promised(self) -> bool:
        """No method whose verifier promises plain decoding's tokens wrote others."""
        return not any(e.identity.promised and e.identity.differing for e in self.entries)

    @property
    def ranks(self) -> list[Rank | None]:
        return conditions.ranks([e.interval for e in self.entries])

    @property
    def warnings(self) -> tuple[str, ...]:
        """Doubts of the texts and of the times."""
        of_texts = metrics.draws_doubts((e.name, e.groups["all"].sides[SPECULATIVE].draws_z) for e in self.entries)
        skewed = conditions.all_skewed((e.name, e.interval) for e in self.entries)
        beyond = {e.name: e.groups["all"].impossible for e in self.entries}
        return (*of_texts, *conditions.doubts(self.conditions, beyond), *skewed)


@dataclass(frozen=True)
class CompareSpec:
    """Every valid pair of these is tried; `verifiers` None is all lossless ones.

    With `advise` the cost model's prediction stands beside each method's speed-up. Forwards of `widths` rows are timed
    behind as many tokens as the prompts of each task have.
    """

    drafters: tuple[str, ...] = ("prompt_lookup",)
    verifiers: tuple[str, ...] | None = None
    advise: bool = False
    widths: tuple[Count, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CompareSettings(DecodingSettings):
    compare: CompareSpec = CompareSpec()


class Compare(Kind[CompareSettings]):
    """Plain decoding and every valid method of a list, in turn, ranked."""

    on_mesh = True
    takes_lengths = True

    def check(self, cfg: CompareSettings) -> None:
        decoding.check(cfg, [pair.spec for pair in pairs(cfg)[0].values()])

    def run(self, cfg: CompareSettings, ctx: RunContext) -> RunResult:
        """Decodes and ranks, with a line of prompts.jsonl for each pass."""
        started = time.perf_counter()
        chosen, refused = pairs(cfg)
        bench = decoding.prepare(cfg, ctx, [pair.spec for pair in chosen.values()])
        chosen = {name: configured.filled(pair, bench.model, ctx.counting) for name, pair in chosen.items()}
        specs = {name: pair.spec for name, pair in chosen.items()}
        sides = {name: spec.arguments() for name, spec in specs.items()}
        costs = None
        if cfg.compare.advise:
            methods = {name: (chosen[name], resolve(spec, bench.model)) for name, spec in specs.items()}
            costs = costs_of(bench.model, methods, bar=ctx.counting)
        passes = Passes(cfg, ctx, bench.model, {PLAIN: {}, **sides})
        if cfg.warmup:
            passes.show(bench.jobs, PLAIN, started)
        done = passes.logged(bench.jobs)
        taken, size = passes.conditions(), bench.model.footprint.file
        depths = at_depths(bench, cfg.compare.widths, bar=ctx.counting) if cfg.compare.widths else []
        entries = []
        for name, method in sides.items():
            made = entry(name, method["verifier"], [*passes.warm_up, *done], done, size, taken.read_bandwidth)
            entries.append(replace(made, about=resolve(specs[name], bench.model).about))  # with what was loaded
        found = Comparison(tuple(sorted(entries, key=lambda e: -e.speedup)), refused, taken, passes.repeats)
        predicted = predict({e.name: e.groups for e in found.entries}, *costs) if costs else {}
        warnings, best, rows = found.warnings, found.entries[0], []
        for rank, e in zip(found.ranks, found.entries, strict=True):
            advice = {"advice": predicted[e.name].to_dict()} if e.name in predicted else {}
            rows.append({**e.to_dict(), "rank": rank and str(rank), "conditions": taken.to_dict(), **advice})
        within = {"methods": len(predicted), "within": sum(one.within for one in predicted.values())}
        return RunResult(
            {
                "best": best.name,
                "speedup": best.speedup,
                "as_promised": found.as_promised,
                "warnings": list(warnings),
                "conditions": taken.to_dict(),
                "repeats": found.repeats and found.repeats.to_dict(),
                **({"advice": within} if predicted else {}),
                **({"depths": depths} if depths else {}),
            },
            found,
            shown=[
                Text(f"{cfg.name}: {len(sides)} methods on {len(bench.jobs)} prompts", style="bold"),
                table(found),
                *display.condition_lines(taken, passes.repeats, warnings),
                *(Text(line, style="dim") for line in lines(found)),
                *prediction_parts(predicted),
                *depth_parts(found, depths),
            ],
            definitions=DEFINITIONS,
            more={"methods": rows, "refused": refused, "load_s": bench.load_s, "compile_s": passes.compile_s},
            as_promised=found.as_promised,
            objective=best.speedup,
        )


def pairs(cfg: CompareSettings) -> tuple[dict[str, CompareSettings], tuple[str, ...]]:
    """The config of every valid pair by name, as if it were run alone, and one line for each pair that is not.

    Without a list of verifiers: every lossless rule that fits, under its first name. The drafter and the verifier of
    the config keep their options; others have their defaults. A drafter that drafts no trees drafts chains.
    UserError: no valid pair.
    """
    valid: dict[str, CompareSettings] = {}
    refused: list[str] = []
    seen: set[tuple[str, Any]] = set()
    verifiers = cfg.compare.verifiers or tuple(name for name, v in VERIFIERS.items() if v.lossless)
    drafters = [name for name in cfg.compare.drafters if name != NO_DRAFTER]  # plain decoding runs in any case
    for name, verifier in itertools.product(drafters, verifiers):
        pair = replace(
            cfg,
            drafter=configured.drafter_choice(cfg, name),
            verifier=cfg.verifier if cfg.verifier.name == verifier else Choice(verifier),
            tree=cfg.tree if drafts_trees(name) else Choice(CHAIN),
        )
        try:
            method = resolve(pair.spec)
        except UnfitPair as error:
            if cfg.compare.verifiers:
                refused.append(f"{name} x {verifier}: {verifier} does not verify {error.kind.value} drafts here")
            continue
        assert method.verifier is not None
        if cfg.compare.verifiers or (name, method.verifier.rule) not in seen:  # aliases of one rule do the same
            seen.add((name, method.verifier.rule))
            valid[f"{name} x {verifier}"] = pair
    if not valid:
        raise UserError("compare: no drafter of the list goes with a verifier of the list: " + "; ".join(refused))
    return valid, tuple(refused)


def entry(
    name: str, verifier: Verifier, seen: Sequence[Pass], timed: Sequence[Pass], bytes_per_pass: int,
    bandwidth: float | None,
) -> ComparedMethod:  # fmt: skip
    """A method's numbers over its timed passes; the texts are compared over all that were `seen`."""

    def both(passes: Sequence[Pass]) -> list[Pass]:
        own = [replace(p, side=SPECULATIVE) for p in passes if p.side == name]
        return [*(p for p in passes if p.side == PLAIN), *own]

    groups = record.groups(both(timed), bytes_per_pass=bytes_per_pass, read_bandwidth=bandwidth)
    identity = record.identity_of(both(seen), verifier=verifier.name)
    return ComparedMethod(name, decoding.label(verifier), groups, identity)


def table(found: Comparison) -> Table:
    """One row a method, the fastest first, plain decoding last."""
    note = metrics.lengths_note(per_pass="tok/pass", length="acc. length")
    rates = ("tok/s", "speed-up", "95 % interval", "tok/pass", "acc. length")
    out = tables.new("", "method", *rates, "text", "lossless", left=(1, 7, 8), note=note)
    for rank, e in zip(found.ranks, found.entries, strict=True):
        rates = e.groups["all"].sides[SPECULATIVE].rates
        text = Text("same", style="green")
        if e.identity.differing:
            text = Text("NOT THE SAME", style="bold red") if e.identity.promised else Text("another")
        lossless = "tokens" if e.label.startswith("lossless") else "NO"
        out.add_row(
            str(rank or "-"), e.name, tables.cell(rates["tokens_per_second"], ".1f"),
            *([f"{e.speedup:.2f}", e.interval.ends()] if e.interval else ["-", "-"]),
            *(tables.cell(rates[key], ".2f") for key in ("tokens_per_target_pass", "mean_acceptance_length")),
            text, "distribution" if e.label.startswith("lossless in") else lossless,
        )  # fmt: skip
    plain = found.entries[0].groups["all"].sides[PLAIN]
    out.add_row("", PLAIN, tables.cell(plain.rates["tokens_per_second"], ".1f"), "1.00", *[""] * 5)
    return out


def lines(found: Comparison) -> list[str]:
    """The meaning of the ranks, the best methods of each task, what was compared, and the pairs left out."""
    out = conditions.rank_lines([e.interval for e in found.entries])
    for task in (t for t in found.entries[0].groups if t != "all"):
        timed = [(e.name, s.interval) for e in found.entries if (s := e.groups[task].speedup) is not None]
        if timed:
            best, *others = conditions.ties([interval for _, interval in timed])[0]
            names = ", ".join(timed[i][0] for i in others) if len(others) <= _FEW else f"{len(others)} others"
            tied = f"; tied with {names}" if others else ""
            out.append(f"best for {task}: {timed[best][0]} ({timed[best][1].value:.2f}{tied})")
    out.append(f"text: a method's tokens beside plain decoding's, {found.entries[0].identity.counted}")
    return [*out, *(f"left out: {pair}" for pair in found.refused)]


@dataclass(frozen=True)
class Prediction:
    """The speed-up that the cost model predicts of a method, and the measured one."""

    predicted: float  # by the table
    low: float  # its interval over texts and times
    high: float
    measured: float  # by the clock
    v: float  # forward of the mean round, in plain steps
    c: float  # a drafted token, in plain steps
    c0: float  # the rest of the round, in plain steps
    rows: float  # mean tokens of a draft, of a tree its nodes; a tree's drafting is all in c0

    @property
    def over_measured(self) -> float:
        return self.predicted / self.measured

    @property
    def within(self) -> bool:
        return abs(self.over_measured - 1) <= GOAL

    def to_dict(self) -> Json:
        return {**asdict(self), "over_measured": self.over_measured, "within": self.within}


def costs_of(
    model: Model, methods: Mapping[str, tuple[MethodSettings, Method]], *, bar: Bar = silent
) -> tuple[CostTable, dict[str, tuple[str, int]]]:
    """The model's table with what each method's drafts cost: a token of a chain, a tree as a whole.

    By method the key of its cost in the table, and the most tokens or nodes of its drafts.
    """
    found: dict[str, tuple[str, int]] = {}
    table = None
    for name, (cfg, method) in methods.items():
        drafter, options, tree = cfg.drafter.name, cfg.drafter.options, configured.shape_of(cfg)
        if tree is None:
            table, key = measuring.table_for(model, drafter, options, bar=bar)
        else:
            table, key = measuring.table_for_tree(model, drafter, options, tree, method, bar=bar)
        found[name] = key, cfg.gamma if tree is None else method.max_nodes
    assert table is not None  # the caller has a method
    return table, found


def predict(
    groups: Mapping[str, Mapping[str, Group]], table: CostTable, costed: Mapping[str, tuple[str, int]]
) -> dict[str, Prediction]:
    """The table's prediction for each method that drafted, by its own acceptance, of a tree by depth.

    `groups` are a method's passes by task; `costed` as in `costs_of`.
    """
    out = {}
    for name, tasks in groups.items():
        counted = {
            task: group.sides[SPECULATIVE].counters for task, group in tasks.items() if SPECULATIVE in group.sides
        }
        acceptance, whole, (key, room) = AcceptedRates.from_groups("this run", counted), tasks["all"], costed[name]
        if acceptance is None or whole.speedup is None:
            continue
        side = whole.sides[SPECULATIVE]
        kv_length = (side.prefill_tokens + side.counters.num_emitted_tokens / 2) / side.passes
        clocks, candidate = Clocks.from_table(table, {name: key}, 1.0, kv_length), Candidate(name, name)
        at, clock = at_shape(clocks, candidate, acceptance, DraftShape(room)), clocks.expected
        rows = side.counters.num_draft_tokens / max(side.counters.num_drafts, 1)
        measured, costs = whole.speedup.ratio_of_totals, clock.costs(candidate, room)
        out[name] = Prediction(at.speedup, at.low, at.high, measured, clock.v(rows + 1), *costs, rows)
    return out


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


def at_depths(bench: Bench, widths: Sequence[int], *, bar: Bar = silent) -> list[Json]:
    """Seconds of forwards of one row and of `widths` rows behind the prompts of each task, and v(n), these in ones."""
    lengths: dict[str, list[int]] = {}
    for job in bench.jobs:
        lengths.setdefault(job.prompt.task, []).append(len(job.ids))
    depths, ns = {task: round(statistics.fmean(each)) for task, each in lengths.items()}, sorted({1, *widths})
    need_room(bench.model.config, max(depths.values()) + ns[-1], "compare.widths or data.lengths")
    side = Ours(bench.model, depth=max(depths.values()), room=ns[-1], forwards=2)

    def timed(depth: int, n: int) -> float:
        side.depth = depth
        return side.verify(n)

    calls = {(task, n): partial(timed, depth, n) for task, depth in depths.items() for n in ns}
    with bar("timing forwards at each length", _REPEATS) as step:
        taken = interleaved(calls, repeats=_REPEATS, done=step)
    found = {key: statistics.median(each) for key, each in taken.items()}
    return [
        {"task": task, "tokens": depths[task], "rows": n, "seconds": s, "v": s / found[task, 1]}
        for (task, n), s in found.items()
    ]


def depth_parts(found: Comparison, depths: Sequence[Json]) -> Iterator[Table]:
    """A row a task: its tokens, a forward of one row and v(n) behind them, each method's speed-up and tokens a pass."""
    if not depths:
        return
    ns = [n for n in dict.fromkeys(row["rows"] for row in depths) if n > 1]
    out = tables.new("tokens", "one row, ms", *(f"v({n})" for n in ns), *(e.name.split(" ")[0] for e in found.entries))
    for task in dict.fromkeys(row["task"] for row in depths):
        own = {row["rows"]: row for row in depths if row["task"] == task}
        cells = []
        for e in found.entries:
            group = e.groups[task]
            rate = group.sides[SPECULATIVE].rates["tokens_per_target_pass"]
            cells.append(f"{group.speedup.ratio_of_totals:.2f} ({rate:.2f})" if group.speedup else "-")
        forwards = [f"{1e3 * own[1]['seconds']:.1f}", *(f"{own[n]['v']:.2f}" for n in ns)]
        out.add_row(str(own[1]["tokens"]), *forwards, *cells)
    yield out
