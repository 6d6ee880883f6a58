"""Decode the same prompts plainly and with a method, in turn, and say what came of it.

DecodingSettings -> model, prompts -> shown pass -> timed passes (plain and speculative interleaved) -> RunRecord
"""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

from specsparse.experiments import configured, decoding, sparse_model
from specsparse.experiments.decoding import Bench, Passes, PreparedPrompt
from specsparse.experiments.kind import Kind, RunContext, RunResult
from specsparse.experiments.settings import DecodingSettings
from specsparse.measure.costs.explain import explain_record, oracles
from specsparse.report import display, record
from specsparse.report.record import DEFINITIONS, HOST, PLAIN, SPECULATIVE, Pass, RunRecord
from specsparse.runtime import metrics, timing_cache
from specsparse.runtime.method import Method, resolve
from specsparse.runtime.metrics import Times
from specsparse.runtime.timing_cache import FREE, CostTable


class Speed(Kind[DecodingSettings]):
    """The speed of one method over plain decoding, prompt by prompt in turn, and what it accepts."""

    on_mesh = True
    takes_lengths = True

    def check(self, cfg: DecodingSettings) -> None:
        decoding.check(cfg, [cfg.spec])

    def run(self, cfg: DecodingSettings, ctx: RunContext) -> RunResult:
        started = time.perf_counter()
        bench = decoding.prepare(cfg, ctx, [cfg.spec])
        spec = configured.filled(cfg, bench.model, ctx.counting).spec
        method = spec.arguments()
        sides: dict[str, dict[str, Any]] = {PLAIN: {}}
        if method:
            sides[SPECULATIVE] = method
        if method and cfg.loop == "host":
            sides[HOST] = {**method, "loop": "host"}
        passes = Passes(cfg, ctx, bench.model, sides)
        shown = SPECULATIVE if method else PLAIN
        first_text_s = passes.show(bench.jobs, shown, started) if cfg.warmup else None
        done = passes.logged(bench.jobs)
        split = time_split(cfg, passes, bench) if method else {}
        done = [with_split(p, split.get(p.task)) for p in done]
        resolved = resolve(spec, bench.model)  # with what the passes have loaded
        found = _record(cfg, passes, done, bench, first_text_s=first_text_s, method=resolved)
        table, key = timing_cache.load(bench.model), configured.draft_key(cfg)
        found = explain(found, done, passes, split=split, table=table, drafter=key)
        found = dataclasses.replace(found, notes=(*resolved.notes, *found.notes))
        parts = found.to_dict()
        return RunResult(
            parts["summary"], found, shown=display.report(found), definitions=DEFINITIONS,
            more={"method": parts["method"], "tasks": parts["tasks"]},
            as_promised=found.as_promised, objective=found.objective,
        )  # fmt: skip


def time_split(cfg: DecodingSettings, passes: Passes, bench: Bench) -> dict[str, Times]:
    """Seconds of each stage in a few rounds of the host loop, by task; the first prompt of each speaks for it."""
    if not cfg.time_split:
        return {}
    first: dict[str, PreparedPrompt] = {}
    for job in bench.jobs:
        first.setdefault(job.prompt.task, job)
    more = {"loop": "host", "max_tokens": min(cfg.time_split, cfg.max_tokens)}
    passes.generate(bench.jobs[0], SPECULATIVE, **more)  # compiles and warms up
    return {task: passes.generate(job, SPECULATIVE, **more).stats.counters.times for task, job in first.items()}


def with_split(done: Pass, stages: Times | None) -> Pass:
    """The pass with its decode time shared out as the stages were; the loop in one program has no host time."""
    if stages is None or done.side != SPECULATIVE:
        return done
    spent = {name: getattr(stages, name) or 0.0 for name in ("draft", "verify", "sample", "commit")}
    total = sum(spent.values())
    if not total:
        return done
    shares = {name: seconds / total * done.decode_s for name, seconds in spent.items()}
    times = dataclasses.replace(done.counters.times, **shares, host=0.0)
    return dataclasses.replace(done, counters=dataclasses.replace(done.counters, times=times))


def _record(
    cfg: DecodingSettings, loop: Passes, passes: list[Pass], bench: Bench, *, first_text_s: float | None, method: Method
) -> RunRecord:
    bytes_per_pass = bench.model.footprint.file
    conditions = loop.conditions()
    verifier = method.verifier.name if method.verifier else cfg.verifier.name
    size = {"gamma": cfg.gamma}
    if method.drafter is not None and method.drafter.tree:
        size = {"gamma": method.max_nodes, "levels": method.drafter.max_depth}
    return RunRecord(
        name=cfg.name,
        method={
            "drafter": cfg.drafter.name, "verifier": verifier, "policy": cfg.policy.name, **size,
            "equality": bench.model.promise, **({"stored": bench.model.storage} if bench.model.storage else {}),
            "label": decoding.label(method.verifier or verifier), **sparse_model.label(bench.model), **method.about,
        },
        groups=record.groups(passes, bytes_per_pass=bytes_per_pass, read_bandwidth=conditions.read_bandwidth),
        identity=record.identity_of([*passes, *loop.warm_up], verifier=verifier) if method.verifier else None,
        load_s=bench.load_s,
        first_text_s=first_text_s,
        compile_s=loop.compile_s,
        read_bandwidth=conditions.read_bandwidth,
        bytes_per_pass=bytes_per_pass,
        conditions=conditions,
        repeats=loop.repeats,
    )  # fmt: skip


def explain(
    found: RunRecord, passes: Sequence[Pass], loop: Passes, *,
    split: Mapping[str, Times], table: CostTable | None, drafter: str,
) -> RunRecord:  # fmt: skip
    """The record with its findings and notes; `table` is what is known of the model's costs on this machine."""
    everything = found.groups["all"]
    if SPECULATIVE not in everything.sides:
        return found
    counters, levels = everything.sides[SPECULATIVE].counters, found.method.get("levels")
    findings: dict[str, object] = {}
    notes: list[str] = []
    total = sum(split.values(), Times())
    if total.draft or total.verify:
        findings["time_split"] = dataclasses.asdict(total)
        notes.append(
            "time split: measured stage by stage on the first prompt of each task, applied to the timed passes"
        )
    if (ratio := record.speedup_of(passes, over=HOST)) is not None:  # both loops were timed
        findings["jit_over_host_loop"] = ratio.to_dict()
        notes.append(
            f"one program for the whole decode is {ratio.ratio_of_totals:.2f} times as fast as the host loop "
            f"({ratio.interval.sentence()}), same tokens"
        )
    _policy(loop.policies, findings, notes)
    if table is None:
        measures = "+experiment=roofline measures this model's costs here and keeps them"
        notes.append(f"predicted speed-up: unknown; {measures}")
    elif (why := explain_record(found, table, drafter=drafter)) is not None:
        findings["explanation"] = dataclasses.asdict(why)
        notes += why.lines()
    if everything.speedup is not None:
        costs: dict[str, Any] = {}
        if table is not None:
            costs = {"v": table.v, **table.draft_costs(table.drafts.get(drafter, FREE), 1)}
        best = oracles(counters, everything.speedup.ratio_of_totals, levels=levels, **costs)
        findings["oracles"] = best
        words = {"free_draft": "were drafts free {:.2f}", "perfect_draft": "were every draft right {:.2f}"}
        said = [text.format(best[key]) for key, text in words.items() if best[key] is not None]
        if (hindsight := best["best_gamma"]) is not None:
            length, speedup = hindsight["gamma"], hindsight["speedup"]
            said.append(f"with the best fixed length in hindsight ({length}) {speedup:.2f}")
        notes += [f"speed-up {', '.join(said)}"] if said else []
    findings["exports"] = {style: metrics.export(counters, style, tree=levels is not None) for style in metrics.STYLES}
    return dataclasses.replace(found, findings=findings, notes=tuple(notes))


def _policy(reports: Sequence[Any], findings: dict[str, object], notes: list[str]) -> None:
    if not reports:
        return
    rounds, off = sum(r.rounds_off for r in reports), sum(r.off for r in reports)
    predicted = [r.predicted for r in reports if r.predicted is not None]
    findings["policy"] = out = {"rounds_off": rounds, "passes": len(reports)}
    if predicted:
        mean = sum(predicted) / len(predicted)
        out |= {"off_at_end": off, "predicted_speedup": mean}
        state = "never turned drafting off" if not rounds else f"left {rounds} rounds without a draft"
        at_end = f"at the end it was off in {off} of {len(reports)} passes (predicted speed-up {mean:.2f})"
        notes.append(f"auto_off {state}; {at_end}")
