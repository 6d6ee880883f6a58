"""What a run's numbers mean: where the time went, what the policy decided, what other choices would have given."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from specsparse import metrics, oracles
from specsparse.experiments.decoding import Passes
from specsparse.metrics import Times
from specsparse.record import PLAIN, SPECULATIVE, Pass, RunRecord


def explain(
    found: RunRecord,
    passes: Sequence[Pass],
    loop: Passes,
    *,
    split: Mapping[str, Times],
    model: Any,
    drafter: str,
) -> RunRecord:
    """The record with its findings and notes."""
    if SPECULATIVE not in found.groups["all"].sides:
        return found
    parts = [_split(split), _host(passes), _policy(loop.policies), _oracles(found, model, drafter), _exports(found)]
    findings = {key: value for part, _ in parts for key, value in part.items()}
    return dataclasses.replace(found, findings=findings, notes=tuple(note for _, notes in parts for note in notes))


Part = tuple[dict[str, Any], list[str]]
"""Findings, and notes on them."""


def _split(split: Mapping[str, Times]) -> Part:
    total = sum(split.values(), Times())
    stages = total.draft + total.verify + total.sample + total.commit
    if not stages:
        return {}, []
    share = total.host / (stages + total.host)
    note = f"time split measured stage by stage on the first prompt of each task; stepping costs the host {share:.0%} more"
    return {"time_split": dataclasses.asdict(total)}, [note]


def _host(passes: Sequence[Pass]) -> Part:
    """The ablation: one program against a program a stage."""
    one = {(p.prompt_id, p.repeat): p for p in passes if p.side == SPECULATIVE}
    pairs = [(p, one[p.prompt_id, p.repeat]) for p in passes if p.side not in (PLAIN, SPECULATIVE)]
    pairs = [(a.decode_s, b.decode_s) for a, b in pairs if a.decode_s > 0 and b.decode_s > 0]
    if not pairs:
        return {}, []
    ratio = metrics.speedup(*zip(*pairs, strict=True))
    note = (
        f"one program for the whole decode is {ratio.ratio_of_totals:.2f} times as fast as the host loop "
        f"(95 % interval {ratio.low:.2f} to {ratio.high:.2f}), same tokens"
    )
    return {"jit_over_host_loop": ratio.to_dict()}, [note]


def _policy(reports: Sequence[Any]) -> Part:
    if not reports:
        return {}, []
    rounds, off = sum(r.rounds_off for r in reports), sum(r.off for r in reports)
    predicted = [r.predicted for r in reports if r.predicted is not None]
    out: dict[str, Any] = {"rounds_off": rounds, "passes": len(reports)}
    if not predicted:
        return {"policy": out}, []
    mean = sum(predicted) / len(predicted)
    out |= {"off_at_end": off, "predicted_speedup": mean}
    state = "never turned drafting off" if not rounds else f"left {rounds} rounds without a draft"
    note = f"auto_off {state}; at the end it was off in {off} of {len(reports)} passes (predicted speed-up {mean:.2f})"
    return {"policy": out}, [note]


def _oracles(found: RunRecord, model: Any, drafter: str) -> Part:
    everything = found.groups["all"]
    if everything.speedup is None:
        return {}, []
    costs = oracles.known_costs(model, drafter)
    best = oracles.oracles(everything.sides[SPECULATIVE].counters, everything.speedup.ratio_of_totals, costs)
    words = {
        "free_draft": "were drafts free {:.2f}",
        "perfect_draft": "were every draft right {:.2f}",
        "best_gamma": "with the best fixed length in hindsight",
    }
    said = [words[k].format(v) for k, v in best.items() if k != "best_gamma" and v is not None]
    if best["best_gamma"] is not None:
        said.append(f"{words['best_gamma']} ({best['best_gamma']['gamma']}) {best['best_gamma']['speedup']:.2f}")
    note = [f"speed-up {', '.join(said)}"] if said else []
    return {"oracles": best}, note


def _exports(found: RunRecord) -> Part:
    counters = found.groups["all"].sides[SPECULATIVE].counters
    return {"exports": {style: metrics.export(counters, style) for style in metrics.STYLES}}, []
