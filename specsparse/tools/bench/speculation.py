"""`bench draft NAME`: speculative decoding beside a peer's; the same prompts, the same draft model, interleaved."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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


class Speculator(Protocol):
    """What is needed of a peer."""

    def speculate(self, ids: list[int], n: int, *, drafted: int, draft: Path | None = None) -> WrittenText:
        """See `Peer.speculate`."""


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


def writers_of(
    model: Model, peer: Speculator | None, drafter: str, *, drafted: Sequence[int] = (2, 4), tg: int = 128
) -> dict[str, Callable[[list[int]], WrittenText]]:
    """Our sides and the peer's by name; each writes `tg` tokens after a prompt's ids and a first token."""
    draft, methods = draft_file(drafter), {PLAIN: Method()}
    methods |= {f"ours {k}": method_of(model, drafter, k) for k in drafted}
    found = {name: (lambda ids, how=how: ours(model, how, ids, tg)) for name, how in methods.items()}
    if peer is not None:
        asked = {PEER_PLAIN: (0, None)}
        asked |= {f"peer {k}": (k, draft) for k in drafted if draft}
        asked |= {f"peer lookup {k}": (k, None) for k in drafted}
        for name, (k, file) in asked.items():
            found[name] = lambda ids, k=k, file=file: peer.speculate(ids, tg, drafted=k, draft=file)
    return found


Result = TypeVar("Result")


def measure(
    writers: Mapping[str, Callable[[list[int]], Result]], jobs: Sequence[tuple[str, list[int]]], *, repeats: int,
    done: Callable[[], None] = lambda: None,
) -> dict[str, dict[str, list[Result]]]:  # fmt: skip
    """By task and side, repeat by repeat; `done` is called after each text, those of the warm-up too."""
    found: dict[str, dict[str, list[Result]]] = {}
    for task, ids in jobs:
        kept = found.setdefault(task, {name: [] for name in writers})
        texts = interleaved({n: partial(write, ids) for n, write in writers.items()}, repeats=repeats, done=done)
        for name, written in texts.items():
            kept[name] += written
    return found


def summary(found: Mapping[str, Mapping[str, list[WrittenText]]], tg: int) -> Json:
    """Tokens a second and a target pass by task and side ("all": of the mean time), and tasks whose text differs.

    Our texts are compared with our plain decoding, the peer's with its own. "ratios" are of our best draft length over
    our plain decoding, over the peer's with the same model, and over the peer's best.
    """
    seconds = {t: {n: statistics.median(w.seconds for w in each) for n, each in s.items()} for t, s in found.items()}
    passes = {t: {n: statistics.fmean(w.passes for w in each) for n, each in s.items()} for t, s in found.items()}
    for by in (seconds, passes):
        by["all"] = {name: statistics.fmean(row[name] for row in by.values()) for name in next(iter(by.values()))}
    differing = {name: list[str]() for name in next(iter(found.values()))}
    for task, sides in found.items():
        for name, written in sides.items():
            plain = sides[PLAIN if name.startswith("ours") else PEER_PLAIN][0]
            if any(text.tokens != plain.tokens for text in written):
                differing[name].append(task)
    speeds, per_pass = ({t: {n: tg / x for n, x in row.items()} for t, row in by.items()} for by in (seconds, passes))
    whole = speeds["all"]
    peer = {name: speed for name, speed in whole.items() if name.startswith("peer")}
    drafts = [speed for name, speed in peer.items() if name != PEER_PLAIN and "lookup" not in name]
    best = max(speed for name, speed in whole.items() if name.startswith("ours") and name != PLAIN)
    ratios = {"over_plain": best / whole[PLAIN]}
    if drafts:
        ratios["over_peer_drafts"] = best / max(drafts)
    if peer:
        ratios["over_peer_best"] = best / max(peer.values())
    return {"tok_s": speeds, "tokens_per_pass": per_pass, "differing": differing, "ratios": ratios}


def jobs_of(
    model: Model, *, room: int, tasks: Sequence[str] | None = None, limit_per_task: int = 1
) -> list[tuple[str, list[int]]]:
    """The built-in prompts, or those of some tasks, as a chat's first turn: (task, ids), `room` tokens left free.

    Raises:
        UserError: an unknown task, or a context that holds no prompt beside what is written.
    """
    most = min(PROMPT, model.config.context_length - room)
    if most < 1:
        raise UserError(f"--tg does not fit the context of {model.config.context_length} tokens: choose less")
    out = []
    for p in prompts.load(tasks=tasks, limit_per_task=limit_per_task):
        text = model.tokenizer.apply_chat_template([{"role": "user", "content": p.text}])
        out.append((p.task, model.tokenizer.encode(text, parse_special=True)[-most:]))
    return out


@dataclass(frozen=True)
class DraftBench:
    """Texts plainly and with drafts, here and by a peer.

    Attributes:
        drafter: a drafter's name, or the name or file of a draft model.
        model: the target's name or file.
        drafted: tokens of a draft, each measured.
        tg: tokens written after the first one, end or no end.
        repeats: timings of each side on each prompt.
        threads, kv_dtype, backend: as in `load`.
        peers: llama.cpp, or none.
    """

    drafter: str
    model: str
    drafted: tuple[int, ...] = (2, 4)
    tg: int = 128
    repeats: int = 1
    threads: int | None = None
    kv_dtype: str | None = None
    backend: str | None = None
    peers: tuple[str, ...] = ()

    def check(self) -> None:
        if without := [name for name in self.peers if name != "llama.cpp"]:
            raise UserError(f"--peer {without[0]} has no speculative decoding here: llama.cpp has")
        draft_file(self.drafter)

    def run(self, out: Console) -> Json:
        """`summary` with the plan and the manifest.

        Raises:
            UserError: anything wrong with a model, the options or the peer.
        """
        with ExitStack() as stack:
            peer = stack.enter_context(Peer(self.peers[0])) if self.peers else None
            with terminal.busy(out, f"loading {self.model}"):
                path = catalogue.resolve(self.model)
                model = load(path, kv_dtype=self.kv_dtype, threads=self.threads, backend=self.backend)
            room = self.tg + max(self.drafted) + 2
            jobs = jobs_of(model, room=room)
            if peer is not None:
                room += max(len(ids) for _, ids in jobs)
                with terminal.busy(out, f"loading {peer.name}, choosing its attention"):
                    peer.open(path, model.config, threads=kernels.status()["threads"] or 1, room=room, depth=0)
                    peer.choose_for_writing(jobs[0][1], self.tg)
            started = time.perf_counter()
            writers = writers_of(model, peer, self.drafter, drafted=self.drafted, tg=self.tg)
            with terminal.counting(out, "timing texts", len(jobs) * len(writers) * (self.repeats + 1)) as bar:
                found = measure(writers, jobs, repeats=self.repeats, done=partial(bar.advance, bar.task_ids[0]))
        return {
            "bench": "specsparse speculation", "plan": asdict(self), **summary(found, self.tg),
            "peer": peer and {"name": peer.name, "version": peer.version, "flash": peer.flash["speculate"]},
            "seconds": time.perf_counter() - started, "manifest": manifest.build({}, path),
        }  # fmt: skip

    def shown(self, report: Json) -> Iterator[Table | str]:
        """Tokens a second by task and side, those of a target pass under them; ratios; whose texts are not plain."""
        rows = report["tok_s"]
        made = tables.new("tok/s", *rows["all"])
        for task, row in rows.items():
            made.add_row(task, *(f"{rate:.1f}" for rate in row.values()))
        made.add_row("tokens a pass", *(f"{x:.2f}" for x in report["tokens_per_pass"]["all"].values()))
        yield made
        names = {
            "over_plain": "plain decoding",
            "over_peer_drafts": "the peer's drafts",
            "over_peer_best": "the peer's best",
        }
        yield "our best over " + ", over ".join(f"{names[key]} {x:.2f}x" for key, x in report["ratios"].items())
        if report["peer"]:
            flash = "on" if report["peer"]["flash"] else "off"
            yield f"the peer's flash attention, the faster of on and off: {flash}"
        for name, tasks in report["differing"].items():
            if tasks:
                yield f"{name} differs from plain decoding in {', '.join(tasks)}"
