"""What a run's numbers mean: where the time went, what the policy decided, what other choices would have given."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from specsparse.experiments.methods.decoding import Passes
from specsparse.measure import speedup
from specsparse.measure.costs.explain import explain_record, oracles
from specsparse.report.record import PLAIN, SPECULATIVE, Pass, RunRecord
from specsparse.runtime import metrics
from specsparse.runtime.metrics import Times
from specsparse.runtime.timing_cache import CostTable


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
    parts = [
        _split(split),
        _host(passes),
        _policy(loop.policies),
        _predicted(found, table, drafter),
        _oracles(found, table, drafter),
        _exports(found),
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
    ratio = speedup.speedup(host_s, jit_s, prompts=ids)
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
        options = table.policy_options(1, drafter)
        costs = {"v": table.v, "c": options["c"], "c0": options["c0"]}
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


def _exports(found: RunRecord) -> Part:
    counters = found.groups["all"].sides[SPECULATIVE].counters
    tree = found.method.get("levels") is not None
    return {"exports": {style: metrics.export(counters, style, tree=tree) for style in metrics.STYLES}}, []
