"""Decode the same prompts plainly and with a method, in turn, and say what came of it.

DecodingSettings -> model, prompts -> shown pass -> timed passes (plain and speculative interleaved) -> RunRecord
"""

import dataclasses
import time
from typing import Any

from specsparse.experiments import sparse_model
from specsparse.experiments.kind import Kind, RunContext, RunResult
from specsparse.experiments.methods import configured, decoding, findings
from specsparse.experiments.methods.decoding import Bench, Passes, PreparedPrompt
from specsparse.experiments.settings import DecodingSettings
from specsparse.report import display, record
from specsparse.report.record import DEFINITIONS, HOST, PLAIN, SPECULATIVE, Pass, RunRecord
from specsparse.runtime import metrics, timing_cache
from specsparse.runtime.method import Method, resolve


class Speed(Kind[DecodingSettings]):
    """Plain decoding and one method, interleaved."""

    on_mesh = True

    def check(self, cfg: DecodingSettings) -> None:
        """What `decoding.check` finds wrong, and a drafter, policy or verifier that does not fit are refused."""
        decoding.check(cfg, [configured.spec_of(cfg)])

    def run(self, cfg: DecodingSettings, ctx: RunContext) -> RunResult:
        """Decodes, with a line of prompts.jsonl for each pass."""
        started = time.perf_counter()
        bench = decoding.prepare(cfg, ctx, [configured.spec_of(cfg)])
        spec = configured.spec_of(configured.filled(cfg, bench.model, ctx.console))
        method = spec.arguments()
        tracker = ctx.tracker
        passes = Passes(cfg, ctx, bench.model, sides(cfg, method))
        side = SPECULATIVE if method else PLAIN
        first_text_s = passes.show(bench.jobs, side, started) if cfg.warmup else None
        done = []
        for one in passes.timed(bench.jobs):
            done.append(one)
            tracker.log(one.row())
        split = time_split(cfg, passes, bench) if method else {}
        done = [with_split(p, split.get(p.task)) for p in done]
        resolved = resolve(spec, bench.model)  # with what the passes have loaded
        found = _record(cfg, passes, done, bench, first_text_s=first_text_s, method=resolved)
        table, key = timing_cache.load(bench.model), configured.draft_key(cfg)
        found = findings.explain(found, done, passes, split=split, table=table, drafter=key)
        found = dataclasses.replace(found, notes=(*resolved.notes, *found.notes))
        parts = found.to_dict()
        return RunResult(
            parts["summary"], found, shown=display.report(found), definitions=DEFINITIONS,
            more={"method": parts["method"], "tasks": parts["tasks"]},
            as_promised=found.as_promised, objective=found.objective,
        )  # fmt: skip


def sides(cfg: DecodingSettings, method: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What is decoded in turn."""
    if not method:
        return {PLAIN: {}}
    out = {PLAIN: {}, SPECULATIVE: method}
    return {**out, HOST: {**method, "loop": "host"}} if cfg.loop == "host" else out


def time_split(cfg: DecodingSettings, passes: Passes, bench: Bench) -> dict[str, metrics.Times]:
    """Seconds of each stage in a few rounds stepped from the host, by task; the first prompt of each speaks for it."""
    if not cfg.time_split:
        return {}
    first: dict[str, PreparedPrompt] = {}
    for job in bench.jobs:
        first.setdefault(job.prompt.task, job)
    more = {"loop": "host", "max_tokens": min(cfg.time_split, cfg.max_tokens)}
    passes.generate(bench.jobs[0], SPECULATIVE, **more)  # compiles and warms up
    return {task: passes.generate(job, SPECULATIVE, **more).stats.counters.times for task, job in first.items()}


def with_split(done: Pass, stages: metrics.Times | None) -> Pass:
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


def size(cfg: DecodingSettings, method: Method) -> dict[str, int]:
    """Tokens a draft has room for, and the levels of a tree."""
    if method.drafter is None or not method.drafter.tree:
        return {"gamma": cfg.policy.gamma}
    return {"gamma": method.max_nodes, "levels": method.drafter.max_depth}


def _record(
    cfg: DecodingSettings, loop: Passes, passes: list[Pass], bench: Bench, *, first_text_s: float | None, method: Method
) -> RunRecord:
    bytes_per_pass = bench.model.footprint.file
    conditions = loop.conditions()
    verifier = method.verifier.name if method.verifier else cfg.verifier.name
    return RunRecord(
        name=cfg.name,
        method={
            "drafter": cfg.drafter.name,
            "verifier": verifier,
            "policy": cfg.policy.name,
            **size(cfg, method),
            "equality": bench.model.promise,
            **({"stored": bench.model.storage} if bench.model.storage else {}),
            "label": decoding.label(method.verifier or verifier),
            **sparse_model.label(bench.model),
            **method.about,
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
    )
