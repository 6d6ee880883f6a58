"""The record of a run, made of its passes: sums, rates, speed-up, identity of the texts, bandwidth."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from specsparse.measure import conditions, speedups
from specsparse.measure.conditions import UNKNOWN, Conditions
from specsparse.measure.speedups import Repeats, Speedup
from specsparse.runtime import metrics
from specsparse.runtime.metrics import Counters
from specsparse.speculative.verifiers import same_text
from specsparse.support import notebook
from specsparse.support.files import Json
from specsparse.support.tables import cell

PLAIN, SPECULATIVE, HOST = "plain", "speculative", "host loop"
"""Sides; the last decodes with the method in the host loop."""
ROWS_FILE, POINTS_FILE, RECORD_FILE = "prompts.jsonl", "metrics.jsonl", "record.json"
STOPPED = "stopped"
"""The "state" of a record whose run was ended by a signal; other records have none."""

DEFINITIONS = {**metrics.DEFINITIONS, **conditions.DEFINITIONS}
"""Of the numbers of runs that time passes."""


@dataclass(frozen=True)
class StandIn:
    """An embedded pair that ran since the models of an experiment could not be had."""

    asked: Json  # the parts that differ, by group of the config: a name, or a name and the options that were set
    used: Json  # the same of what stood in
    why: str  # the models could not be had

    @property
    def parts(self) -> str:
        def words(parts: Json) -> str:
            said = []
            for group, part in parts.items():
                name, *options = [part] if group == "model" else [part["name"], *(key for key in part if key != "name")]
                values = [f"{key} {x:g}" if isinstance(x := part[key], float) else f"{key} {x}" for key in options]
                said.append(f"{group} {name}" + (f" ({', '.join(values)})" if values else ""))
            return ", ".join(said)

        return f"{words(self.used)} in place of {words(self.asked)}"

    def __str__(self) -> str:
        return f"stand-in: {self.parts}; these figures are the stand-in's ({self.why}; stand_in=false takes none)"


@dataclass(frozen=True)
class Pass:
    """One decoding of one prompt. Times in seconds without compilation; `generate` with `seed` writes the same text."""

    prompt_id: str
    task: str
    side: str
    repeat: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    counters: Counters
    prefill_s: float
    prefill_tokens: int
    decode_s: float
    compile_s: float
    seed: int = 0
    cached_tokens: int = 0  # of the prompt's, those that were not read for this pass

    @classmethod
    def from_generation(cls, prompt_id: str, task: str, side: str, repeat: int, generation: Any) -> "Pass":
        stats, ids = generation.stats, tuple(int(i) for i in generation.token_ids)
        times = dataclasses.replace(stats.counters.times, prefill=stats.prefill_s, total=stats.decode_s)
        return cls(
            prompt_id, task, side, repeat, ids, generation.text, str(generation.finish_reason),
            counters=dataclasses.replace(stats.counters, times=times), prefill_s=float(stats.prefill_s),
            prefill_tokens=int(stats.prefill_tokens), decode_s=float(stats.decode_s),
            compile_s=float(stats.compile_s), seed=int(generation.seed), cached_tokens=int(stats.cached_tokens),
        )  # fmt: skip

    @classmethod
    def from_row(cls, row: Json) -> "Pass":
        """The inverse of `row`; older rows have no seed and no cached tokens."""
        own = {f.name: row[f.name] for f in dataclasses.fields(cls) if f.name in row}
        return cls(**own | {"token_ids": tuple(row["token_ids"]), "counters": metrics.from_dict(row["counters"])})

    def row(self) -> Json:
        return {
            **{f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "counters"},
            "tokens": len(self.token_ids),
            "counters": metrics.to_dict(self.counters),
            "rates": metrics.rates(self.counters),
        }


@dataclass(frozen=True)
class Identity:
    """Whether speculation wrote plain decoding's tokens; `promised` says whether its verifier must.

    `tokens` and `differing` are over all passes, untimed and later plain ones too, each beside its prompt's first plain
    one.
    """

    promised: bool
    tokens: int
    differing: int
    prompts_differing: tuple[str, ...]
    passes: int

    @property
    def counted(self) -> str:
        return f"over {self.passes} passes, untimed ones and repeats included, each beside its prompt's first plain one"


@dataclass(frozen=True)
class SidePasses:
    """All passes of one side together; `draws_z` as in `metrics.DEFINITIONS`."""

    counters: Counters
    rates: Json
    passes: int
    prefill_s: float
    prefill_tokens: int
    decode_s: float
    bytes_per_second: float | None
    bandwidth_share: float | None
    draws_z: float | None = None
    cached_tokens: int = 0  # of `prefill_tokens`, those that were not read again


@dataclass(frozen=True)
class Group:
    """The passes of one task, or of all."""

    sides: dict[str, SidePasses]
    speedup: Speedup | None

    @property
    def impossible(self) -> str | None:
        """One line if the speed-up is above the tokens per target pass, else None."""
        if self.speedup is None:
            return None
        rates = self.sides[SPECULATIVE].rates
        return conditions.impossible(self.speedup.ratio_of_totals, rates["tokens_per_target_pass"])


@dataclass(frozen=True)
class RunRecord:
    """The result of a run that times passes."""

    name: str
    method: Json  # drafter, verifier, policy, gamma, and what the verifier promises
    groups: dict[str, Group]  # a `Group` per task, and "all"
    identity: Identity | None  # None for plain decoding alone
    load_s: float
    first_text_s: float | None  # seconds from the start of the run to the first text; None if none was streamed
    compile_s: float
    read_bandwidth: float | None  # bytes per second that this machine read while the passes were timed
    bytes_per_pass: int  # bytes of the model file that one target pass reads
    findings: Json = dataclasses.field(default_factory=dict)  # what else was measured, by name, as plain values
    notes: tuple[str, ...] = ()  # the same in a sentence each, for the terminal
    conditions: Conditions = UNKNOWN
    repeats: Repeats | None = None

    @property
    def as_promised(self) -> bool:
        """False when the verifier promises plain decoding's tokens and the run found others."""
        return self.identity is None or not self.identity.promised or self.identity.differing == 0

    @property
    def warnings(self) -> tuple[str, ...]:
        """Doubts of the text and of the times: a busy machine, speed-ups that no method can have."""
        tasks = self.groups if len(self.groups) > 2 else {"all": self.groups["all"]}
        lines = {"" if task == "all" else task: group.impossible for task, group in tasks.items()}
        skewed = conditions.all_skewed((task, g.speedup.interval if g.speedup else None) for task, g in tasks.items())
        of_text = metrics.draws_doubts((name, side.draws_z) for name, side in self.groups["all"].sides.items())
        return (*of_text, *conditions.doubts(self.conditions, lines), *skewed)

    @property
    def objective(self) -> float | None:
        """Tokens per second of the method: what a sweeper maximises."""
        sides = self.groups["all"].sides
        return sides.get(SPECULATIVE, sides[PLAIN]).rates["tokens_per_second"]

    def _repr_html_(self) -> str:
        shown = [[label, *cells] for label, cells in rows(list(self.groups.values()))]
        if self.identity is not None:
            shown.append(["tokens that differ from plain", f"{self.identity.differing} of {self.identity.tokens}"])
        how = "" if SPECULATIVE not in self.groups["all"].sides else ": {drafter} x {verifier}".format(**self.method)
        return notebook.table(shown, columns=["", *self.groups], title=self.name + how)

    def to_dict(self) -> Json:
        """As plain values: method, summary and tasks of its record."""
        groups: Json = {}
        for name, group in self.groups.items():
            sides = {side: dataclasses.asdict(passes) for side, passes in group.sides.items()}
            groups[name] = {**sides, "speedup": group.speedup and group.speedup.to_dict()}
        numbers = ("load_s", "first_text_s", "compile_s", "read_bandwidth", "bytes_per_pass")
        summary = {
            **groups.pop("all"),
            "identity": self.identity and dataclasses.asdict(self.identity),
            **{name: getattr(self, name) for name in numbers},
            "warnings": list(self.warnings),
            "conditions": self.conditions.to_dict(),
            "repeats": self.repeats and self.repeats.to_dict(),
            **self.findings,
        }
        return {"method": self.method, "summary": summary, "tasks": groups}


def rows(groups: list[Group]) -> list[tuple[str, list[str]]]:
    """Rows of the table of a record: (label, a cell for each group)."""
    plain, method = ([g.sides.get(side) for g in groups] for side in (PLAIN, SPECULATIVE))

    def rates(label: str, name: str, spec: str, sides: list = method) -> tuple[str, list[str]]:
        return label, [cell(s.rates[name] if s else None, spec) for s in sides]

    out = [rates("plain, tok/s", "tokens_per_second", ".1f", plain)]
    if any(method):
        faster = [g.speedup for g in groups]
        out += [
            rates("speculative, tok/s", "tokens_per_second", ".1f"),
            ("speed-up", [cell(s.ratio_of_totals if s else None, ".2f") for s in faster]),
            ("  95 % interval", [s.interval.ends() if s else "-" for s in faster]),
            rates("tokens per target pass", "tokens_per_target_pass", ".2f"),
            rates("mean acceptance length", "mean_acceptance_length", ".2f"),
        ]
        if any(s and s.rates["alpha"] is not None for s in method):
            names = {"alpha": ("alpha", ".3f"), "  realised": ("realised_alpha", ".3f"), "  z": ("alpha_z", "+.1f")}
            out += [rates(label, *name) for label, name in names.items()]
        # A tree has more nodes than levels: positions beyond the deepest accepted one are left out.
        per_pos = [s.rates["acceptance_per_position"] if s else [] for s in method]
        for i in range(max((i + 1 for p in per_pos for i, share in enumerate(p) if share), default=0)):
            shares = [p[i] if i < len(p) else None for p in per_pos]
            out.append((f"  accepted at position {i + 1}", [cell(share, ".0f", 100, " %") for share in shares]))
    for name, sides in (("plain", plain), ("speculative", method)):
        if any(sides):
            out.append((f"{name}, GB/s", [cell(s.bytes_per_second if s else None, ".1f", 1e-9) for s in sides]))
            shares = [s.bandwidth_share if s else None for s in sides]
            out.append(("  of read bandwidth", [cell(share, ".0f", 100, " %") for share in shares]))
    stages = (rates(f"time in {name}", f"share_{name}", ".0%") for name in ("draft", "verify", "sample", "commit"))
    return out + [row for row in stages if any(text != "-" for text in row[1])]


def groups(passes: Sequence[Pass], *, bytes_per_pass: int, read_bandwidth: float | None) -> dict[str, Group]:
    """A `Group` for each task in order of appearance, and "all" last."""
    by_task = {task: [p for p in passes if p.task == task] for task in dict.fromkeys(p.task for p in passes)}
    out = {}
    for task, some in {**by_task, "all": passes}.items():
        by_side = {side: [p for p in some if p.side == side] for side in (PLAIN, SPECULATIVE)}
        sides = {}
        for side, own in by_side.items():
            counters, seconds = sum((p.counters for p in own), Counters()), sum(p.decode_s for p in own)
            achieved = counters.num_rounds * bytes_per_pass / seconds if seconds else None
            if own:
                sides[side] = SidePasses(
                    counters,
                    metrics.rates(counters),
                    len(own),
                    sum(p.prefill_s for p in own),
                    sum(p.prefill_tokens for p in own),
                    seconds,
                    bytes_per_second=achieved,
                    bandwidth_share=achieved / read_bandwidth if achieved and read_bandwidth else None,
                    draws_z=draws_z(own),
                    cached_tokens=sum(p.cached_tokens for p in own),
                )
        out[task] = Group(sides, speedup_of(some) if len(sides) == 2 else None)
    return out


def draws_z(passes: Sequence[Pass]) -> float | None:
    """As in `metrics.DEFINITIONS`, over each prompt's first pass."""
    return metrics.draws_z({p.prompt_id: p.counters for p in reversed(passes)}.values())


def pairs(
    passes: Sequence[Pass], side: str = SPECULATIVE, *, over: str = PLAIN
) -> Iterator[tuple[Pass, Pass, float]]:  # fmt: skip
    """(pass of `side`, pass of `over`, seconds of the first for the second's number of tokens), prompt by prompt and
    repeat by repeat; passes without a second token are left out."""
    beside = {(p.prompt_id, p.repeat): p for p in passes if p.side == over}
    for method in passes:
        plain = beside.get((method.prompt_id, method.repeat))
        if method.side == side and plain is not None:
            counts = plain.counters.num_emitted_tokens, method.counters.num_emitted_tokens
            if all(counts) and plain.decode_s and method.decode_s:  # a record's row may have null
                yield method, plain, method.decode_s * counts[0] / counts[1]


def speedup_of(passes: Sequence[Pass], side: str = SPECULATIVE, *, over: str = PLAIN) -> Speedup | None:
    """Time of `over` over that of `side` for the same number of tokens; None if no pass has a second token."""
    found = [(plain.decode_s, seconds, plain.prompt_id) for _, plain, seconds in pairs(passes, side, over=over)]
    if not found:
        return None
    plain_s, method_s, prompts = zip(*found, strict=True)
    return speedups.speedup(plain_s, method_s, prompts=prompts)


def differing_tokens(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Places at which the two have other tokens; what one has beyond the other differs."""
    return sum(a != b for a, b in zip(ours, theirs, strict=False)) + abs(len(ours) - len(theirs))


def identity_of(passes: Sequence[Pass], *, verifier: str) -> Identity:
    """Compare every pass with the first plain one of its prompt."""
    plain = {p.prompt_id: p for p in reversed(passes) if p.side == PLAIN}
    total = differing = compared = 0
    where = []
    for done in passes:
        expected = plain.get(done.prompt_id)
        if expected is None or expected is done:
            continue
        wrong = differing_tokens(expected.token_ids, done.token_ids)
        total += max(len(expected.token_ids), len(done.token_ids))
        differing += wrong
        compared += 1
        if wrong and done.prompt_id not in where:
            where.append(done.prompt_id)
    return Identity(same_text(verifier), total, differing, tuple(where), compared)
