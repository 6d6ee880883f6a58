"""Speculative decoding beside a peer's: the same prompts, the same draft model, every side in turn."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
from rich.console import Console
from rich.table import Table

from specsparse import kernels
from specsparse.data import prompts
from specsparse.engine.model import Model
from specsparse.engine.sampling.params import SamplingParams
from specsparse.errors import UserError
from specsparse.models import catalogue
from specsparse.runtime import manifest
from specsparse.runtime.device_batch import Request
from specsparse.runtime.load import load
from specsparse.runtime.method import Method, MethodSpec, resolve
from specsparse.runtime.session import Session
from specsparse.speculative.drafters.registry import DRAFTERS
from specsparse.speculative.policies.base import Fixed
from specsparse.support import tables, terminal
from specsparse.support.files import Json
from specsparse.support.interleaved import interleaved
from specsparse.support.registry import Choice
from specsparse.tools.peers.timed import Peer, WrittenText

PLAIN, PEER_PLAIN = "ours plain", "peer plain"
PROMPT = 900
"""Tokens of a prompt at most, the last ones."""


@dataclass(frozen=True)
class SpeculationPlan:
    """What to measure.

    Attributes:
        drafter: a drafter's name, or the name or file of a draft model.
        drafted: tokens of a draft, each measured.
        tg: tokens written after the first one, end or no end.
        repeats: timings of each side on each prompt.
        limit_per_task: built-in prompts of a task.
    """

    drafter: str
    drafted: tuple[int, ...] = (2, 4)
    tg: int = 128
    repeats: int = 1
    limit_per_task: int = 1


class Speculator(Protocol):
    """What is needed of a peer."""

    def speculate(self, ids: list[int], n: int, *, drafted: int, draft: Path | None = None) -> WrittenText:
        """See `tools.peers.timed.Peer`."""


def draft_file(drafter: str) -> Path | None:
    """The file of a draft model; None for the name of a drafter."""
    return None if DRAFTERS.holds(drafter) else catalogue.resolve(drafter)


def method_of(model: Model, drafter: str, drafted: int | None, *, batch: int = 1) -> Method:
    """Greedy speculation with a drafter's name, or the name or file of a draft model.

    `drafted` tokens in each draft; None for the length that the drafter takes by itself in such a batch.
    """
    file = draft_file(drafter)
    named = Choice("model", {"model": str(file)}) if file else Choice(drafter)
    return resolve(MethodSpec(named, policy=None if drafted is None else Fixed(drafted)), model, batch=batch)


def ours(model: Model, method: Method, ids: Sequence[int], tokens: int) -> WrittenText:
    """Greedy tokens after a prompt and a first round, whose tokens are not timed; as if it had written one."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens + 1, ignore_eos=True)
    session = Session(model, [Request(np.asarray(ids, np.int32), params, seed=0)], method)
    session.advance(1)
    begun, done, rounds = session.decode_s, len(session.tokens()[0]), session.counters()[0].num_rounds
    session.advance()
    share = tokens / (tokens + 1 - done)
    passes = (session.counters()[0].num_rounds - rounds) * share
    return WrittenText((session.decode_s - begun) * share, session.tokens()[0].tolist(), passes)


def sides(
    model: Model, peer: Speculator | None, plan: SpeculationPlan
) -> dict[str, Callable[[list[int]], WrittenText]]:
    """What writes a text, by name."""
    draft, methods = draft_file(plan.drafter), {PLAIN: Method()}
    methods |= {f"ours {k}": method_of(model, plan.drafter, k) for k in plan.drafted}
    found = {name: (lambda ids, how=how: ours(model, how, ids, plan.tg)) for name, how in methods.items()}
    if peer is not None:
        asked = {PEER_PLAIN: (0, None)}
        asked |= {f"peer {k}": (k, draft) for k in plan.drafted if draft}
        asked |= {f"peer lookup {k}": (k, None) for k in plan.drafted}
        for name, (k, file) in asked.items():
            found[name] = lambda ids, k=k, file=file: peer.speculate(ids, plan.tg, drafted=k, draft=file)
    return found


Found = TypeVar("Found")


def measure(
    writers: Mapping[str, Callable[[list[int]], Found]], jobs: Sequence[tuple[str, list[int]]], *, repeats: int,
    done: Callable[[], None] = lambda: None,
) -> dict[str, dict[str, list[Found]]]:  # fmt: skip
    """By task and side, repeat by repeat; `done` is called after each text, those of the warm-up too."""
    found: dict[str, dict[str, list[Found]]] = {}
    for task, ids in jobs:
        kept = found.setdefault(task, {name: [] for name in writers})
        texts = interleaved({n: partial(write, ids) for n, write in writers.items()}, repeats=repeats, done=done)
        for name, written in texts.items():
            kept[name] += written
    return found


def summary(found: Mapping[str, Mapping[str, list[WrittenText]]], tg: int) -> Json:
    """Tokens a second and a target pass by task and side ("all": of the mean time), and tasks whose text differs.

    Our texts are compared with our plain decoding, the peer's with its own.
    """
    seconds = {t: {n: statistics.median(w.seconds for w in each) for n, each in s.items()} for t, s in found.items()}
    passes = {t: {n: statistics.fmean(w.passes for w in each) for n, each in s.items()} for t, s in found.items()}
    for by in (seconds, passes):
        by["all"] = {name: statistics.fmean(row[name] for row in by.values()) for name in next(iter(by.values()))}
    differing = {
        name: [task for task, s in found.items() if any(w.tokens != _plain_of(s, name).tokens for w in s[name])]
        for name in next(iter(found.values()))
    }
    rates = [{t: {n: tg / x for n, x in row.items()} for t, row in by.items()} for by in (seconds, passes)]
    return {"tok_s": rates[0], "tokens_per_pass": rates[1], "differing": differing, "ratios": _ratios(rates[0]["all"])}


def _plain_of(by_side: Mapping[str, list[WrittenText]], name: str) -> WrittenText:
    return by_side[PLAIN if name.startswith("ours") else PEER_PLAIN][0]


def _ratios(row: Mapping[str, float]) -> dict[str, float]:
    """Our best draft length over our plain decoding, over the peer's with the same model, and over the peer's best."""
    peer = {name: rate for name, rate in row.items() if name.startswith("peer")}
    drafts = [rate for name, rate in peer.items() if name.split()[-1].isdigit() and "lookup" not in name]
    best = max(rate for name, rate in row.items() if name.startswith("ours") and name != PLAIN)
    out = {"over_plain": best / row[PLAIN]}
    if drafts:
        out["over_peer_drafts"] = best / max(drafts)
    return out | ({"over_peer_best": best / max(peer.values())} if peer else {})


def jobs_of(model: Model, plan: SpeculationPlan, *, tasks: Sequence[str] | None = None) -> list[tuple[str, list[int]]]:
    """The built-in prompts, or those of some tasks, as a chat's first turn.

    Raises:
        UserError: an unknown task, or a context that holds no prompt beside what is written.
    """
    room = min(PROMPT, model.config.context_length - plan.tg - max(plan.drafted) - 2)
    if room < 1:
        raise UserError(f"tg {plan.tg} does not fit the context of {model.config.context_length} tokens: choose less")
    out = []
    for p in prompts.load(tasks=tasks, limit_per_task=plan.limit_per_task):
        text = model.tokenizer.apply_chat_template([{"role": "user", "content": p.text}])
        out.append((p.task, model.tokenizer.encode(text, parse_special=True)[-room:]))
    return out


def run(
    plan: SpeculationPlan, out: Console, *, model: str, peers: Sequence[str] = (), threads: int | None = None,
    kv_dtype: str | None = None, backend: str | None = None,
) -> Json:  # fmt: skip
    """Loads, measures, and returns `summary` with the plan and the manifest.

    Raises:
        UserError: anything wrong with a model, the plan or the peer.
    """
    if without := [name for name in peers if name != "llama.cpp"]:
        raise UserError(f"--peer {without[0]} has no speculative decoding here: llama.cpp has")
    with ExitStack() as stack:
        other = stack.enter_context(Peer(peers[0])) if peers else None
        draft_file(plan.drafter)
        with terminal.busy(out, f"loading {model}"):
            loaded = load(catalogue.resolve(model), kv_dtype=kv_dtype, threads=threads, backend=backend)
        jobs = jobs_of(loaded, plan)
        if other is not None:
            room = max(len(ids) for _, ids in jobs) + plan.tg + max(plan.drafted) + 2
            threads = kernels.status()["threads"] or 1
            with terminal.busy(out, f"loading {other.name}, choosing its attention"):
                other.open(loaded.path, loaded.config, threads=threads, room=room, depth=0)
                other.choose_for_writing(jobs[0][1], plan.tg)
        started = time.perf_counter()
        writers = sides(loaded, other, plan)
        with terminal.counting(out, "timing texts", len(jobs) * len(writers) * (plan.repeats + 1)) as bar:
            found = measure(writers, jobs, repeats=plan.repeats, done=lambda: bar.advance(bar.task_ids[0]))
    return {
        "bench": "specsparse speculation", "plan": asdict(plan), **summary(found, plan.tg),
        "peer": other and {"name": other.name, "version": other.version, "flash": other.flash["speculate"]},
        "seconds": time.perf_counter() - started, "manifest": manifest.build({}, loaded.path),
    }  # fmt: skip


def table(report: Json) -> Table:
    """Tokens a second by task and side, under them the tokens of a target pass."""
    rows = report["tok_s"]
    made = tables.new("tok/s", *rows["all"])
    for task, row in rows.items():
        made.add_row(task, *(f"{rate:.1f}" for rate in row.values()))
    made.add_row("tokens a pass", *(f"{x:.2f}" for x in report["tokens_per_pass"]["all"].values()))
    return made


def lines(report: Json) -> list[str]:
    """The ratios, and whose texts are not plain decoding's."""
    names = {
        "over_plain": "plain decoding",
        "over_peer_drafts": "the peer's drafts",
        "over_peer_best": "the peer's best",
    }
    out = ["our best over " + ", over ".join(f"{names[key]} {x:.2f}x" for key, x in report["ratios"].items())]
    differing = {name: tasks for name, tasks in report["differing"].items() if tasks}
    if report["peer"]:
        out.append(
            f"the peer's flash attention, the faster of on and off: {'on' if report['peer']['flash'] else 'off'}"
        )
    return out + [f"{name} differs from plain decoding in {', '.join(tasks)}" for name, tasks in differing.items()]
