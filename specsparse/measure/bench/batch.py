"""Throughput and speed-up of speculation against the number of sequences in a batch, as `bench --batch 1,2,4,8`."""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from specsparse import kernels
from specsparse.data import prompts
from specsparse.engine.model import Model
from specsparse.engine.sampling.params import SamplingParams
from specsparse.errors import UserError
from specsparse.measure.bench.peers import Peer
from specsparse.measure.bench.samples import paired_ratio, summary
from specsparse.measure.bench.sides import token_ids
from specsparse.measure.peers.process import PEERS
from specsparse.models import catalogue
from specsparse.runtime import manifest
from specsparse.runtime.binding import make_method
from specsparse.runtime.device_batch import Method, Request
from specsparse.runtime.load import load
from specsparse.runtime.requests import prompt_ids
from specsparse.runtime.session import Session
from specsparse.support import tables, terminal
from specsparse.support.in_turn import in_turn
from specsparse.support.json_files import Json

TASKS = ("summarise", "code-edit", "chat", "maths", "code", "retrieve")
"""Of the built-in prompts, in the order in which sequences of a batch take them."""
SPECULATIVE = "speculative"


@dataclass(frozen=True)
class BatchPlan:
    """What to measure.

    Attributes:
        sizes: sequences in a batch, each 1 or more.
        pp: prompt tokens of each sequence; below 2 leaves prompts out.
        tg: tokens each sequence writes, end or no end.
        repeats: timings of each.
        drafter: name of the drafter; greedy decoding, `match`.
    """

    sizes: tuple[int, ...]
    pp: int = 512
    tg: int = 128
    repeats: int = 5
    drafter: str = "prompt_lookup"


class TimedBatch(NamedTuple):
    """Seconds of all texts once in batches of one size (of the prompts None where left out), and what was accepted.

    `peers` are the seconds of each peer by name and flash attention.
    """

    prompt: float | None
    plain: float
    speculative: float
    tokens_per_pass: float
    peers: dict[str, dict[bool, float]]


def measure(
    plan: BatchPlan, model: Model, done: Callable[[], None] = lambda: None, *, peers: Sequence[Peer] = ()
) -> list[Json]:
    """A row for each size: tokens per second in all and the speed-up, with their deviations.

    Every size decodes the same texts, as many as the largest batch holds, in batches of its size: sizes differ in
    nothing else, and take turns. Plain and speculative decoding of one batch stand side by side in time, and the peers'
    of the same lengths. `done` is called after each repeat of each size, the warm-up counted.
    """
    texts = list(itertools.islice(itertools.cycle(_texts(model, plan)), max(plan.sizes)))
    params = SamplingParams(temperature=0.0, max_tokens=plan.tg, ignore_eos=True)
    method = make_method(model, plan.drafter, None, params)

    def batches(size: int) -> list[list[np.ndarray]]:
        return [list(itertools.islice(itertools.cycle(texts), i, i + size)) for i in range(0, len(texts), size)]

    found = in_turn(
        {size: partial(_once, plan, model, method, batches(size), params, peers) for size in plan.sizes},
        repeats=plan.repeats, done=done,
    )  # fmt: skip
    return [_row(plan, size, timed) for size, timed in found.items()]


def _texts(model: Model, plan: BatchPlan) -> list[np.ndarray]:
    """Built-in prompts, cut so that they and the output fit the context."""
    room = model.config.context_length - plan.tg - 1
    if room < 1 or plan.pp > model.config.context_length:
        most = model.config.context_length
        raise UserError(f"pp {plan.pp} and tg {plan.tg} do not fit the context of {most} tokens: choose smaller ones")
    rows = [p for task in TASKS for p in prompts.load(tasks=[task], limit_per_task=1)]
    plain = SamplingParams(temperature=0.0, truncate_prompt_tokens=min(room, 512))
    return [prompt_ids(model, _chat(model, p.text), plain) for p in rows]


def _chat(model: Model, text: str) -> str:
    try:
        return model.tokenizer.apply_chat_template([{"role": "user", "content": text}])
    except UserError:  # a base model has no template
        return text


def _once(
    plan: BatchPlan, model: Model, method: Method, batches: list[list[np.ndarray]], params: SamplingParams,
    peers: Sequence[Peer],
) -> TimedBatch:  # fmt: skip
    """All batches once on all sides; the prompt test once for one batch."""
    prompt_s, plain_s, fast_s, emitted, rounds = None, 0.0, 0.0, 0, 0
    if plan.pp > 1:
        ids, one = token_ids(plan.pp, model.config.vocab_size), params.merged(max_tokens=1)
        prompt_s = Session(model, [Request(ids, one, seed=0) for _ in batches[0]], Method()).prefill_s
    for batch in batches:
        requests = [Request(ids, params, seed=0) for ids in batch]
        plain, fast = (Session(model, requests, how) for how in (Method(), method))
        plain.advance()
        fast.advance()
        plain_s, fast_s = plain_s + plain.decode_s, fast_s + fast.decode_s
        each = fast.counters()
        emitted, rounds = emitted + sum(c.num_emitted_tokens for c in each), rounds + sum(c.num_rounds for c in each)
    theirs = {p.name: {on: sum(p.batch(b, plan.tg, flash=on) for b in batches) for on in (True, False)} for p in peers}
    return TimedBatch(prompt_s, plain_s, fast_s, emitted / rounds, theirs)


def _row(plan: BatchPlan, size: int, timed: Sequence[TimedBatch]) -> Json:
    sequences = -(-max(plan.sizes) // size) * size
    plain, fast = [t.plain for t in timed], [t.speculative for t in timed]
    prompt = [t.prompt for t in timed if t.prompt is not None]

    def rate(seconds: Sequence[float]) -> dict[str, float]:
        return summary([sequences * plan.tg / s for s in seconds])

    return {
        "batch": size,
        "pp_tokens_per_second": summary([size * (plan.pp - 1) / s for s in prompt]) if prompt else None,
        "plain_tokens_per_second": rate(plain),
        "speculative_tokens_per_second": rate(fast),
        "speedup": paired_ratio(plain, fast),
        "tokens_per_target_pass": timed[-1].tokens_per_pass,
        "peers": {name: _of_peer(rate, plain, [t.peers[name] for t in timed]) for name in timed[0].peers},
    }


def _of_peer(
    rate: Callable[[Sequence[float]], dict[str, float]], plain: Sequence[float], timed: Sequence[dict[bool, float]]
) -> Json:
    """A peer with flash attention on or off, whichever is faster, and our plain decoding over it."""
    by = {on: [t[on] for t in timed] for on in (True, False)}
    on = min(by, key=lambda flash: statistics.median(by[flash]))
    return {"flash": on, "tokens_per_second": rate(by[on]), "ratio": paired_ratio(by[on], plain)}


def run(
    plan: BatchPlan,
    out: Console,
    *,
    model: str,
    threads: int | None = None,
    kv_dtype: str | None = None,
    backend: str | None = None,
    peers: Sequence[str] = (),
) -> Json:
    """Loads the model, measures, and returns the report: `rows` of `measure`, the plan and the manifest.

    Raises:
        UserError: anything wrong with the model, the plan or a peer.
    """
    if without := [name for name in peers if name in PEERS and not PEERS[name].flash]:
        raise UserError(f"--peer {without[0]} has no batches here: llama.cpp and ik_llama.cpp have")
    with ExitStack() as stack:
        others = [stack.enter_context(Peer(name)) for name in peers]
        path = catalogue.resolve(model)
        with terminal.busy(out, f"loading {model}"):
            loaded = load(path, kv_dtype=kv_dtype, threads=threads, backend=backend)
        for other in others:
            other.open(path, loaded.config, threads=kernels.status()["threads"] or 1, room=plan.tg, depth=0)
        started = time.perf_counter()
        with terminal.counting(out, "timing batches", len(plan.sizes) * (plan.repeats + 1)) as progress:
            rows = measure(plan, loaded, lambda: progress.advance(progress.task_ids[0]), peers=others)
    return {
        "bench": "specsparse batch",
        "plan": {"sizes": plan.sizes, "pp": plan.pp, "tg": plan.tg, "repeats": plan.repeats, "drafter": plan.drafter},
        "rows": rows,
        "peers": [other.facts() for other in others],
        "seconds": time.perf_counter() - started,
        "manifest": manifest.build({}, path),
    }


def table(report: Json) -> Table:
    """One row a batch size; medians."""
    plan = report["plan"]
    sides = (f"pp{plan['pp']}, tok/s", f"tg{plan['tg']}, tok/s", "per sequence", f"{plan['drafter']}, tok/s")
    peers = [f"{name}, {column}" for name in report["rows"][0]["peers"] for column in ("tok/s", "ours over it")]
    made = tables.new("batch", *sides, "tokens/pass", "speed-up", "±", *peers, left=())
    for row in report["rows"]:
        pp, plain, fast = (row[f"{side}_tokens_per_second"] for side in ("pp", "plain", SPECULATIVE))
        made.add_row(
            str(row["batch"]),
            "-" if pp is None else f"{pp['median']:.0f}",
            f"{plain['median']:.1f}",
            f"{plain['median'] / row['batch']:.1f}",
            f"{fast['median']:.1f}",
            f"{row['tokens_per_target_pass']:.2f}",
            f"{row['speedup']['median']:.2f}x",
            f"{row['speedup']['sd']:.2f}",
            *(cell for peer in row["peers"].values() for cell in _cells(peer)),
        )
    return made


def _cells(peer: Json) -> tuple[str, str]:
    flash = "flash" if peer["flash"] else "no flash"
    return f"{peer['tokens_per_second']['median']:.1f} ({flash})", f"{peer['ratio']['median']:.2f}x"
