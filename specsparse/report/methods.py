"""What was decoded how: the methods of all runs under names that tell them apart, prompt by prompt."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from specsparse import intervals, metrics
from specsparse.experiments import varied
from specsparse.experiments.speed import HOST
from specsparse.intervals import Interval
from specsparse.metrics import Counters
from specsparse.record import PLAIN, SPECULATIVE
from specsparse.report.runs import Run

GAMMA, TEMPERATURE = "policy.gamma", "sampling.temperature"
_PAIR = ("drafter.name", "verifier.name")
_WORDS = {
    GAMMA: "gamma",
    TEMPERATURE: "T",
    "tree.name": "tree",
    "policy.name": "policy",
    "model.path": "model",
    "max_tokens": "tokens",
}
_NOT_A_METHOD = (
    "tracker.", "data.", "compare.", "certify.", "roofline.", "train.", "kind", "stream", "warmup",
    "seed", "repeats", "time_split", "debug", "trace", "record_laws", "loop", "sampling.ignore_eos",
)  # fmt: skip


class Sample(NamedTuple):
    """One prompt on both sides, its repeats summed; seconds for plain decoding's number of tokens."""

    prompt: str
    task: str
    plain_s: float
    method_s: float
    plain: Counters
    method: Counters


@dataclass(frozen=True)
class Method:
    """One method of one run.

    Attributes:
        run: where it was run.
        side: its name in the rows.
        pair: drafter x verifier.
        names: what tells it from the others: words by key of the config.
        samples: its prompts.
    """

    run: Run
    side: str
    pair: str
    names: dict[str, str]
    samples: tuple[Sample, ...]

    @property
    def label(self) -> str:
        """For legends and tables."""
        return self.without("")

    def without(self, key: str) -> str:
        """The label with one key of the config left out: what a line over that key is called."""
        return ", ".join(word for name, word in self.names.items() if name != key) or self.pair

    @property
    def tasks(self) -> list[str]:
        """In order of appearance."""
        return list(dict.fromkeys(s.task for s in self.samples))

    def of(self, task: str) -> "Method":
        """The same on the prompts of one task."""
        return replace(self, samples=tuple(s for s in self.samples if s.task == task))

    def ratio(self, numerator: Callable[[Sample], float], denominator: Callable[[Sample], float]) -> Interval | None:
        """Of sums over the prompts, with its interval."""
        return intervals.ratio([numerator(s) for s in self.samples], [denominator(s) for s in self.samples])

    def share(self, part: Callable[[Sample], float], whole: Callable[[Sample], float]) -> Interval | None:
        """The same where the value lies between 0 and 1."""
        return intervals.share([part(s) for s in self.samples], [whole(s) for s in self.samples])

    def speedup(self) -> Interval | None:
        """Plain over the method's seconds for the same tokens, prompts excluded."""
        return self.ratio(lambda s: s.plain_s, lambda s: s.method_s)

    def acceptance(self) -> Interval | None:
        """Accepted / drafted tokens."""
        return self.share(lambda s: s.method.num_accepted_tokens, lambda s: s.method.num_draft_tokens)

    def tokens_per_pass(self) -> Interval | None:
        """Emitted tokens / rounds."""
        return self.ratio(lambda s: s.method.num_emitted_tokens, lambda s: s.method.num_rounds)

    def tokens_per_second(self) -> Interval | None:
        """Emitted tokens / decode time."""
        return self.ratio(lambda s: s.method.num_emitted_tokens, lambda s: s.method.times.total)

    def positions(self) -> int:
        """Draft positions up to the deepest accepted one."""
        return max((len(s.method.num_accepted_tokens_per_pos) for s in self.samples), default=0)

    def accepted_at(self, position: int) -> Interval | None:
        """Accepted at a position, 0 first / rounds with a draft."""

        def accepted(sample: Sample) -> float:
            found = sample.method.num_accepted_tokens_per_pos
            return found[position] if position < len(found) else 0

        return self.share(accepted, lambda s: s.method.num_drafts)


def of(runs: Sequence[Run]) -> list[Method]:
    """The methods of all runs that decoded plainly beside them, in order; plain decoding alone is none."""
    found = [(run, side) for run in runs for side in _sides(run)]
    differing = varied.settings([run.config for run in runs if _sides(run)])
    keys = [setting.key for setting in differing if not setting.key.startswith(_NOT_A_METHOD)]
    out = [Method(run, side, _pair(run, side), _names(run, side, keys), _samples(run, side)) for run, side in found]
    out = [m for m in out if m.samples]
    labels = Counter(m.label for m in out)
    return _shortened([_told_apart(m) if labels[m.label] > 1 else m for m in out])


def common_pair(methods: Sequence[Method]) -> str | None:
    """The drafter and verifier that all methods share and their labels leave out; None where they differ."""
    pairs = {m.pair for m in methods}
    return pairs.pop() if len(pairs) == 1 else None


def fastest(methods: Sequence[Method], most: int) -> list[Method]:
    """Those with the highest speed-up, in their own order."""
    if len(methods) <= most:
        return list(methods)
    ranked = sorted(methods, key=lambda m: -(m.speedup() or intervals.Interval(0, None, None, 0)).value)
    return [m for m in methods if m in ranked[:most]]


def _sides(run: Run) -> list[str]:
    return [s for s in dict.fromkeys(str(row["side"]) for row in run.passes) if s not in (PLAIN, HOST)]


def _pair(run: Run, side: str) -> str:
    """Sides of a comparison are named so."""
    if side != SPECULATIVE:
        return side
    method = run.record.get("method") or {}
    return f"{run.setting('drafter.name')} x {method.get('verifier') or run.setting('verifier.name')}"


def _names(run: Run, side: str, varied: Sequence[str]) -> dict[str, str]:
    """The pair of drafter and verifier, then whatever else differs between the runs."""
    values = [(key, run.setting(key)) for key in varied if key not in _PAIR]
    return {"pair": _pair(run, side)} | {
        key: f"{_WORDS.get(key, key.split('.')[-1])} {_short(v)}" for key, v in values if v is not None
    }


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).rsplit("/", 1)[-1]


def _shortened(methods: list[Method]) -> list[Method]:
    """Without the pair where it is the same everywhere and something else tells the methods apart."""
    if common_pair(methods) is None or not all(len(m.names) > 1 for m in methods):
        return methods
    return [replace(m, names={k: v for k, v in m.names.items() if k != "pair"}) for m in methods]


def _told_apart(method: Method) -> Method:
    """Two runs of the same config: their directories tell them apart."""
    where = "/".join(method.run.directory.resolve().parts[-2:])
    return replace(method, names={**method.names, "directory": where})


def _samples(run: Run, side: str) -> tuple[Sample, ...]:
    """The prompts that both sides decoded, repeats paired and summed."""
    plain = {(r["prompt_id"], r["repeat"]): r for r in run.passes if r["side"] == PLAIN}
    sums: dict[str, Sample] = {}
    for row in run.passes:
        other = plain.get((row["prompt_id"], row["repeat"]))
        if row["side"] != side or other is None:
            continue
        ours, theirs = metrics.from_dict(row["counters"]), metrics.from_dict(other["counters"])
        if not (ours.num_emitted_tokens and theirs.num_emitted_tokens and row["decode_s"] and other["decode_s"]):
            continue
        seconds = row["decode_s"] * theirs.num_emitted_tokens / ours.num_emitted_tokens
        one = Sample(row["prompt_id"], row["task"], other["decode_s"], seconds, theirs, ours)
        sums[one.prompt] = _add(sums[one.prompt], one) if one.prompt in sums else one
    return tuple(sums.values())


def _add(a: Sample, b: Sample) -> Sample:
    return Sample(a.prompt, a.task, *(x + y for x, y in zip(a[2:], b[2:], strict=True)))
