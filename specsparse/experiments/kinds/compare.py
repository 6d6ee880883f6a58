"""Every valid method of a list on the same prompts, plain decoding once, all in turn; one ranked table."""

import dataclasses
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table
from rich.text import Text

from specsparse.errors import UserError
from specsparse.experiments.kind import Kind, RunContext, RunResult
from specsparse.experiments.methods import configured, decoding, findings
from specsparse.experiments.methods.decoding import Passes
from specsparse.experiments.methods.findings import Prediction
from specsparse.experiments.settings import DecodingSettings
from specsparse.measure import conditions
from specsparse.measure.conditions import UNKNOWN, Conditions, Rank
from specsparse.measure.intervals import Interval
from specsparse.measure.speedups import Repeats
from specsparse.report import display, record
from specsparse.report.record import PLAIN, SPECULATIVE, Group, Identity, Pass
from specsparse.runtime import metrics
from specsparse.runtime.method import UnfitPair, drafts_trees, resolve
from specsparse.speculative.base import Verifier
from specsparse.speculative.trees import CHAIN
from specsparse.speculative.verify import VERIFIERS
from specsparse.support import tables
from specsparse.support.registry import Choice

_FEW = 2
"""Methods that a line names; more are counted."""


@dataclass(frozen=True)
class ComparedMethod:
    """One method: what its verifier promises, both sides' numbers by task, and whether the text is the same.

    `about` is what else is known of its drafter, such as how two vocabularies go together.
    """

    name: str
    label: str
    groups: dict[str, Group]
    identity: Identity
    about: Mapping[str, object] = field(default_factory=dict)

    @property
    def speedup(self) -> float:
        """Ratio of totals over all prompts; 0 where nothing was decoded."""
        found = self.groups["all"].speedup
        return 0.0 if found is None else found.ratio_of_totals

    def to_dict(self) -> dict[str, object]:
        """As plain values."""
        tasks = {task: _group(group) for task, group in self.groups.items()}
        identity = dataclasses.asdict(self.identity)
        return {"name": self.name, "label": self.label, "identity": identity, "tasks": tasks, **self.about}


def _group(group: Group) -> dict[str, object]:
    sides = {k: {"rates": s.rates, "counters": metrics.to_dict(s.counters)} for k, s in group.sides.items()}
    return {**sides, "speedup": None if group.speedup is None else group.speedup.to_dict()}


@dataclass(frozen=True)
class Comparison:
    """All methods, the fastest first, the pairs that were left out, and what all were taken at, in turn."""

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
        """Of the entries."""
        return conditions.ranks(self.intervals)

    @property
    def intervals(self) -> list[Interval | None]:
        """Of the entries' speed-ups."""
        found = [e.groups["all"].speedup for e in self.entries]
        return [None if f is None else f.interval for f in found]

    @property
    def warnings(self) -> tuple[str, ...]:
        """What makes the texts doubtful, and the times."""
        of_texts = metrics.draws_doubts((e.name, e.groups["all"].sides[SPECULATIVE].draws_z) for e in self.entries)
        named = zip((e.name for e in self.entries), self.intervals, strict=True)
        beyond = {e.name: e.groups["all"].impossible for e in self.entries}
        return (*of_texts, *conditions.doubts(self.conditions, beyond), *conditions.all_skewed(named))

    @property
    def objective(self) -> float | None:
        """The best speed-up."""
        return self.entries[0].speedup if self.entries else None


@dataclass(frozen=True)
class CompareSpec:
    """Which methods `kind: compare` tries: every valid pair; `verifiers` None is all lossless ones.

    With `advise` the cost model's prediction stands beside each method's speed-up.
    """

    drafters: tuple[str, ...] = ("prompt_lookup",)
    verifiers: tuple[str, ...] | None = None
    advise: bool = False


@dataclass(frozen=True, kw_only=True)
class CompareSettings(DecodingSettings):
    """What `kind: compare` reads of a config."""

    compare: CompareSpec = CompareSpec()


class Compare(Kind[CompareSettings]):
    """Plain decoding and every valid method of a list, in turn, ranked."""

    on_mesh = True

    def check(self, cfg: CompareSettings) -> None:
        """Unknown names, and lists without a valid pair are refused."""
        decoding.check(cfg, map(configured.spec_of, pairs(cfg)[0].values()))

    def run(self, cfg: CompareSettings, ctx: RunContext) -> RunResult:
        """Decodes and ranks, with a line of prompts.jsonl for each pass."""
        started, console = time.perf_counter(), ctx.console
        chosen, refused = pairs(cfg)
        bench = decoding.prepare(cfg, ctx, map(configured.spec_of, chosen.values()))
        chosen = {name: configured.filled(pair, bench.model, console) for name, pair in chosen.items()}
        specs = {name: configured.spec_of(pair) for name, pair in chosen.items()}
        sides = {name: spec.arguments() for name, spec in specs.items()}
        costs = None
        if cfg.compare.advise:
            bound = {name: (chosen[name], resolve(spec, bench.model)) for name, spec in specs.items()}
            costs = findings.costs_of(bench.model, bound, bar=decoding.bar_on(console))
        tracker = ctx.tracker
        passes = Passes(cfg, ctx, bench.model, {PLAIN: {}, **sides})
        if cfg.warmup:
            passes.show(bench.jobs, PLAIN, started)
        done = []
        for one in passes.timed(bench.jobs):
            done.append(one)
            tracker.log(one.row())
        taken, size = passes.conditions(), bench.model.footprint.file
        bandwidth = taken.read_bandwidth
        everything, measures = [*passes.warm_up, *done], {"bytes_per_pass": size, "bandwidth": bandwidth}
        entries = [
            dataclasses.replace(
                entry(name, method["verifier"], everything, done, **measures),
                about=resolve(specs[name], bench.model).about,  # with what the passes have loaded
            )
            for name, method in sides.items()
        ]
        found = Comparison(tuple(sorted(entries, key=lambda e: -e.speedup)), refused, taken, passes.repeats)
        predicted = {} if costs is None else findings.predictions({e.name: e.groups for e in found.entries}, *costs)
        title = Text(f"{cfg.name}: {len(sides)} methods on {len(bench.jobs)} prompts", style="bold")
        said = [Text(line, style="dim") for line in lines(found)]
        return RunResult(
            {**_summary(found), **findings.prediction_summary(predicted)},
            found,
            shown=[
                title,
                table(found),
                *display.condition_lines(taken, passes.repeats, found.warnings),
                *said,
                *findings.prediction_parts(predicted),
            ],
            definitions={**metrics.DEFINITIONS, **conditions.DEFINITIONS, **findings.PREDICTION_DEFINITIONS},
            more={**_methods(found, predicted), "load_s": bench.load_s, "compile_s": passes.compile_s},
            as_promised=found.as_promised,
            objective=found.objective,
        )


def _summary(found: Comparison) -> dict[str, object]:
    return {
        "best": found.entries[0].name,
        "speedup": found.objective,
        "as_promised": found.as_promised,
        "warnings": list(found.warnings),
        "conditions": found.conditions.to_dict(),
        "repeats": None if found.repeats is None else found.repeats.to_dict(),
    }


def _methods(found: Comparison, predicted: Mapping[str, Prediction]) -> dict[str, object]:
    taken, ranked = found.conditions.to_dict(), zip(found.ranks, found.entries, strict=True)
    rows = [{**e.to_dict(), "rank": None if r is None else str(r), "conditions": taken} for r, e in ranked]
    rows = [{**row, "advice": predicted[row["name"]].to_dict()} if row["name"] in predicted else row for row in rows]
    return {"methods": rows, "refused": list(found.refused)}


def pairs(cfg: CompareSettings) -> tuple[dict[str, CompareSettings], tuple[str, ...]]:
    """The config of every valid pair by name, as if it were run alone, and one line for each pair that is not.

    Without a list of verifiers: every lossless rule that fits, under its first name. The drafter and the verifier of
    the config keep their options; others have their defaults. A drafter that drafts no trees drafts chains.

    Raises:
        UserError: an unknown name, a mistaken option, or no valid pair.
    """
    found: dict[str, CompareSettings] = {}
    refused: list[str] = []
    seen: set[tuple[str, Any]] = set()
    verifiers = cfg.compare.verifiers or tuple(name for name, v in VERIFIERS.items() if v.lossless)
    for name, verifier in itertools.product(cfg.compare.drafters, verifiers):
        pair = dataclasses.replace(
            cfg,
            drafter=configured.drafter_choice(cfg, name),
            verifier=cfg.verifier if cfg.verifier.name == verifier else Choice(verifier),
            tree=cfg.tree if drafts_trees(name) else Choice(CHAIN),
        )
        try:
            method = resolve(configured.spec_of(pair))
        except UnfitPair as error:
            if cfg.compare.verifiers:
                refused.append(f"{name} x {verifier}: {verifier} does not verify {error.kind.value} drafts here")
            continue
        assert method.verifier is not None
        if cfg.compare.verifiers or (name, method.verifier.rule) not in seen:  # aliases of one rule do the same
            seen.add((name, method.verifier.rule))
            found[f"{name} x {verifier}"] = pair
    if not found:
        raise UserError("compare: no drafter of the list goes with a verifier of the list: " + "; ".join(refused))
    return found, tuple(refused)


def entry(
    name: str,
    verifier: Verifier,
    seen: Sequence[Pass],
    timed: Sequence[Pass],
    *,
    bytes_per_pass: int,
    bandwidth: float | None,
) -> ComparedMethod:
    """One method's numbers beside plain decoding's."""

    def of(passes: Sequence[Pass]) -> list[Pass]:
        own = [dataclasses.replace(p, side=SPECULATIVE) for p in passes if p.side == name]
        return [*(p for p in passes if p.side == PLAIN), *own]

    groups = record.groups(of(timed), bytes_per_pass=bytes_per_pass, read_bandwidth=bandwidth)
    identity = record.identity_of(of(seen), verifier=verifier.name)
    return ComparedMethod(name, decoding.label(verifier), groups, identity)


def table(found: Comparison) -> Table:
    """One row a method, the fastest first, plain decoding last."""
    note = metrics.lengths_note(per_pass="tok/pass", length="acc. length")
    rates = ("tok/s", "speed-up", "95 % interval", "tok/pass", "acc. length")
    out = tables.new("", "method", *rates, "text", "lossless", left=(1, 7, 8), note=note)
    for rank, e in zip(found.ranks, found.entries, strict=True):
        side, faster = e.groups["all"].sides[SPECULATIVE], e.groups["all"].speedup
        numbers = [_cell(side.rates[k], spec) for k, spec in (("tokens_per_second", ".1f"),)]
        numbers += ["-", "-"] if faster is None else [f"{e.speedup:.2f}", faster.interval.ends()]
        numbers += [_cell(side.rates[k], ".2f") for k in ("tokens_per_target_pass", "mean_acceptance_length")]
        out.add_row(str(rank or "-"), e.name, *numbers, _same(e.identity), _short(e.label))
    plain = found.entries[0].groups["all"].sides[PLAIN]
    out.add_row("", PLAIN, _cell(plain.rates["tokens_per_second"], ".1f"), "1.00", *[""] * 5)
    return out


def lines(found: Comparison) -> list[str]:
    """What the ranks mean, the best methods of each task, what was compared, and the pairs left out."""
    out = conditions.rank_lines(found.intervals)
    for task in (t for t in found.entries[0].groups if t != "all"):
        timed = [(e.name, s.interval) for e in found.entries if (s := e.groups[task].speedup) is not None]
        if timed:
            best, *others = conditions.ties([interval for _, interval in timed])[0]
            names = ", ".join(timed[i][0] for i in others) if len(others) <= _FEW else f"{len(others)} others"
            tied = f"; tied with {names}" if others else ""
            out.append(f"best for {task}: {timed[best][0]} ({timed[best][1].value:.2f}{tied})")
    counted = found.entries[0].identity.counted
    out.append(f"text: a method's tokens beside plain decoding's, {counted}")
    return [*out, *(f"left out: {pair}" for pair in found.refused)]


def _same(identity: Identity) -> Text:
    if not identity.differing:
        return Text("same", style="green")
    return Text("NOT THE SAME", style="bold red") if identity.promised else Text("another")


def _short(label: str) -> str:
    """ "tokens", "distribution" or "NO" under the heading lossless."""
    if label.startswith("lossless"):
        return "distribution" if label.startswith("lossless in") else "tokens"
    return "NO"


def _cell(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)
