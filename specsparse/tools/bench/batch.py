"""`bench batch 1,2,4,8`: throughput and the speed-up of speculation against the number of sequences in a batch."""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
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
from specsparse.measure import intervals
from specsparse.measure.trials import paired_ratio, summary, token_ids
from specsparse.models import catalogue
from specsparse.runtime import manifest
from specsparse.runtime.device_batch import Request
from specsparse.runtime.load import load
from specsparse.runtime.method import Method
from specsparse.runtime.requests import prompt_ids
from specsparse.runtime.session import Session
from specsparse.support import tables, terminal
from specsparse.support.files import Json
from specsparse.support.interleaved import interleaved
from specsparse.tools.bench.speculation import method_of
from specsparse.tools.peers.process import PEERS
from specsparse.tools.peers.timed import Peer, perplexities, wrong_logits

TASKS = ("summarise", "code-edit", "chat", "maths")
"""Of the built-in prompts: each size decodes every one of them equally often."""
_MOST_PROMPT = 512
Batches = list[list[np.ndarray]]
"""Prompts int32[n] of each sequence of each batch."""


class TimedBatch(NamedTuple):
    """Seconds of all texts once in batches of one size.

    Attributes:
        prompt: of the prompt test, or None.
        plain: of plain decoding.
        fast: by method.
        tokens_per_pass: what the target wrote in a round, by method.
        peers: by name.
    """

    prompt: float | None
    plain: float
    fast: dict[str, float]
    tokens_per_pass: dict[str, float]
    peers: dict[str, float]


@dataclass(frozen=True)
class BatchBench:
    """Plain and speculative decoding of the same texts in batches of several sizes.

    Attributes:
        sizes: sequences in a batch, each 1 or more.
        model: a name or a file.
        pp: prompt tokens of each sequence; below 2 leaves prompts out.
        tg: tokens each sequence writes, end or no end.
        repeats: timings of each.
        drafter: a drafter's name, or the name or file of a draft model; greedy decoding, `match`.
        drafted: fixed lengths of drafts, each measured; () for the length that the drafter takes by itself.
        threads, kv_dtype, backend: as in `load`.
        peers: names of other engines.
    """

    sizes: tuple[int, ...]
    model: str
    pp: int = 512
    tg: int = 128
    repeats: int = 5
    drafter: str = "prompt_lookup"
    drafted: tuple[int, ...] = ()
    threads: int | None = None
    kv_dtype: str | None = None
    backend: str | None = None
    peers: tuple[str, ...] = ()

    def methods(self) -> dict[str, int | None]:
        """Tokens of a draft by the method's name in the report."""
        return {f"{self.drafter} {k}": k for k in self.drafted} or {self.drafter: None}

    def check(self) -> None:
        if without := [name for name in self.peers if not PEERS[name].flash]:
            raise UserError(f"--peer {without[0]} has no batches here: llama.cpp and ik_llama.cpp have")

    def run(self, out: Console) -> Json:
        """The report: `rows` of `measure`, the plan and the manifest.

        Raises:
            UserError: anything wrong with the model, the options or a peer.
        """
        with ExitStack() as stack:
            peers = [stack.enter_context(Peer(name)) for name in self.peers]
            path = catalogue.resolve(self.model)
            with terminal.busy(out, f"loading {self.model}"):
                model = load(path, kv_dtype=self.kv_dtype, threads=self.threads, backend=self.backend)
            for peer in peers:
                peer.open(path, model.config, threads=kernels.status()["threads"] or 1, room=self.tg, depth=0)
            started = time.perf_counter()
            with terminal.counting(out, "timing batches", len(self.sizes) * (self.repeats + 1)) as bar:
                rows = self.measure(model, partial(bar.advance, bar.task_ids[0]), peers=peers)
        return {
            "bench": "specsparse batch",
            "plan": asdict(self),
            "rows": rows,
            "break_even": {name: break_even(rows, name) for name in self.methods()},
            "peers": [peer.facts() for peer in peers],
            "seconds": time.perf_counter() - started,
            "manifest": manifest.build({}, path),
        }

    def measure(self, model: Model, done: Callable[[], None], *, peers: Sequence[Peer] = ()) -> list[Json]:
        """A row for each size: tokens per second in all and the speed-up, with their deviations.

        All sizes decode the same mix of texts, interleaved. Plain and speculative decoding of one batch stand side by
        side in time, and the peers' of the same prompts and as many tokens, each with flash attention on or off,
        whichever is faster at that size. `done` is called after each repeat of each size, the warm-up counted.
        """
        texts = self.texts(model)
        params = SamplingParams(temperature=0.0, max_tokens=self.tg, ignore_eos=True)
        methods = {
            size: {name: method_of(model, self.drafter, k, batch=size) for name, k in self.methods().items()}
            for size in self.sizes
        }
        batches = {size: batches_of(texts, size) for size in self.sizes}
        flash = {peer.name: peer.choose_for_batches({s: b[0] for s, b in batches.items()}, self.tg) for peer in peers}
        for peer in peers:
            peer.check(model, widest=max(self.sizes))

        def once(size: int) -> TimedBatch:
            ours = self._ours(model, methods[size], batches[size], params)
            theirs = {p.name: sum(p.batch(b, self.tg, flash[p.name][size]) for b in batches[size]) for p in peers}
            return ours._replace(peers=theirs)

        found = interleaved({size: partial(once, size) for size in self.sizes}, repeats=self.repeats, done=done)
        return [
            self._row(size, sum(map(len, batches[size])), timed, {name: by[size] for name, by in flash.items()})
            for size, timed in found.items()
        ]

    def texts(self, model: Model) -> list[np.ndarray]:
        """Built-in prompts int32[n], cut so that they and the output fit the context."""
        most = model.config.context_length
        room = most - self.tg - 1
        if room < 1 or self.pp > most:
            raise UserError(
                f"pp {self.pp} and tg {self.tg} do not fit the context of {most} tokens: choose smaller ones"
            )
        plain = SamplingParams(temperature=0.0, truncate_prompt_tokens=min(room, _MOST_PROMPT))
        rows = [p for task in TASKS for p in prompts.load(tasks=[task], limit_per_task=1)]
        return [prompt_ids(model, _chat(model, p.text), plain) for p in rows]

    def _ours(self, model: Model, methods: dict[str, Method], batches: Batches, params: SamplingParams) -> TimedBatch:
        """All batches once, plain and by each method; the prompt test once for one batch."""
        prompt_s, seconds = None, dict.fromkeys(("", *methods), 0.0)
        emitted, rounds = dict.fromkeys(methods, 0), dict.fromkeys(methods, 0)
        if self.pp > 1:
            ids, one = token_ids(self.pp, model.config.vocab_size), params.merged(max_tokens=1)
            prompt_s = Session(model, [Request(ids, one, seed=0) for _ in batches[0]], Method()).prefill_s
        for batch in batches:
            requests = [Request(ids, params, seed=0) for ids in batch]
            for name, how in {"": Method(), **methods}.items():
                session = Session(model, requests, how)
                session.advance()
                seconds[name] += session.decode_s
                if name:
                    each = session.counters()
                    emitted[name] += sum(c.num_emitted_tokens for c in each)
                    rounds[name] += sum(c.num_rounds for c in each)
        return TimedBatch(prompt_s, seconds.pop(""), seconds, {n: emitted[n] / rounds[n] for n in methods}, {})

    def _row(self, size: int, sequences: int, timed: Sequence[TimedBatch], flash: dict[str, bool]) -> Json:
        plain, prompt = [t.plain for t in timed], [t.prompt for t in timed if t.prompt is not None]

        def rate(seconds: Sequence[float]) -> dict[str, float]:
            return summary([sequences * self.tg / s for s in seconds])

        fast, theirs = {}, {}
        for name in timed[0].fast:
            seconds = [t.fast[name] for t in timed]
            ratio = intervals.geometric_mean([a / b for a, b in zip(plain, seconds, strict=True)], least=2)
            fast[name] = {
                "tokens_per_second": rate(seconds),
                "tokens_per_target_pass": timed[-1].tokens_per_pass[name],
                "speedup": {"value": ratio.value, "low": ratio.low, "high": ratio.high, "repeats": len(timed)},
            }
        for name in timed[0].peers:
            seconds = [t.peers[name] for t in timed]
            theirs[name] = {
                "flash": flash[name], "tokens_per_second": rate(seconds), "ratio": paired_ratio(seconds, plain),
            }  # fmt: skip
        return {
            "batch": size,
            "sequences": sequences,
            "pp_tokens_per_second": summary([size * (self.pp - 1) / s for s in prompt]) if prompt else None,
            "plain_tokens_per_second": rate(plain),
            "speculative": fast,
            "peers": theirs,
        }

    def shown(self, report: Json) -> Iterator[Table | str]:
        """One row a batch size, medians; where each method stops paying, and what to know of the peers' figures."""
        plan, first = report["plan"], report["rows"][0]
        methods = [c for name in first["speculative"] for c in (f"{name}, tok/s", "tokens/pass", "speed-up", "95 %")]
        peers = [f"{name}, {column}" for name in first["peers"] for column in ("tok/s", "ours over it")]
        prompt = (f"pp{plan['pp']}, tok/s",) if first["pp_tokens_per_second"] else ()
        made = tables.new("batch", *prompt, f"tg{plan['tg']}, tok/s", "per sequence", *methods, *peers, left=())
        for row in report["rows"]:
            pp, plain = row["pp_tokens_per_second"], row["plain_tokens_per_second"]["median"]
            cells = [str(row["batch"]), *([f"{pp['median']:.0f}"] if pp else [])]
            cells += [f"{plain:.1f}", f"{plain / row['batch']:.1f}"]
            for found in row["speculative"].values():
                speedup = found["speedup"]
                cells += [f"{found['tokens_per_second']['median']:.1f}", f"{found['tokens_per_target_pass']:.2f}"]
                cells += [f"{speedup['value']:.2f}x", intervals.shown(speedup["low"], speedup["high"])]
            for found in row["peers"].values():
                flash = "flash" if found["flash"] else "no flash"
                cells += [f"{found['tokens_per_second']['median']:.1f} ({flash})", f"{found['ratio']['median']:.2f}x"]
            made.add_row(*cells)
        yield made
        for name, at in report["break_even"].items():
            yield _said(name, at, report["rows"])
        for peer in report["peers"]:
            if peer["check"]:
                yield f"{peer['name']}: {peer['version']}, {perplexities(peer['check'])}"
            yield from wrong_logits(peer)


def batches_of(texts: Sequence[np.ndarray], size: int) -> Batches:
    """The fewest batches of one size that hold every text equally often."""
    endless = itertools.cycle(texts)
    return [list(itertools.islice(endless, size)) for _ in range(math.lcm(size, len(texts)) // size)]


def _chat(model: Model, text: str) -> str:
    try:
        return model.tokenizer.apply_chat_template([{"role": "user", "content": text}])
    except UserError:  # a base model has no template
        return text


def break_even(rows: Sequence[Json], method: str) -> float | None:
    """Sequences at which a method that paid for fewer stops paying, between two measured sizes.

    The speed-up's logarithm is taken as straight in that of the size. None if the smallest batch does not pay, or the
    largest still does.

    Args:
        rows: of `BatchBench.measure`.
        method: a key of their "speculative".
    """
    points = [(row["batch"], row["speculative"][method]["speedup"]["value"]) for row in rows]
    for (few, fast), (many, slow) in itertools.pairwise(points):
        if fast <= 1:
            return None
        if slow <= 1:
            share = math.log(fast) / (math.log(fast) - math.log(slow))
            return few * (many / few) ** share
    return None


def _said(name: str, at: float | None, rows: Sequence[Json]) -> str:
    """Where a method stops paying, in words."""
    speedups = {row["batch"]: row["speculative"][name]["speedup"]["value"] for row in rows}
    (least, first), (most, last) = min(speedups.items()), max(speedups.items())
    if at is not None:
        return f"{name} stops paying at about {at:.0f} sequences"
    if first > 1:
        return f"{name} pays at every size measured: {last:.2f} times plain decoding's speed with {most}"
    return f"{name} does not pay: {first:.2f} times plain decoding's speed with {least}"
