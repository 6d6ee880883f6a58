"""`bench draft NAME`, `bench batch 1,2,4,8`: speculative decoding beside plain decoding and beside peers.

The same prompts and the same draft model, every side interleaved: text by text, and by the number of sequences at once.
"""

import itertools
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
from matplotlib.figure import Figure as Canvas
from rich.console import Console
from rich.table import Table

from specsparse import kernels
from specsparse.data import prompts
from specsparse.engine.model import Model
from specsparse.engine.sampling.params import SamplingParams
from specsparse.errors import UserError
from specsparse.measure import intervals, manifest, trials
from specsparse.measure.trials import paired_ratio
from specsparse.models import catalogue
from specsparse.report import plots
from specsparse.report.plots import Figure, Row
from specsparse.runtime.method import GREEDY, Method, MethodSpec, resolve
from specsparse.runtime.metrics import Counters
from specsparse.runtime.session import Request, Session, prompt_ids
from specsparse.speculative.drafters import DRAFTERS
from specsparse.speculative.policies.base import Fixed
from specsparse.support import tables, terminal
from specsparse.support.files import Json
from specsparse.support.interleaved import interleaved
from specsparse.support.registry import Choice
from specsparse.tools.bench.one_sequence import ModelBench
from specsparse.tools.peers import PEERS
from specsparse.tools.peers.peer import Peer, TimedText, perplexities, wrong_logits

PLAIN, PEER_PLAIN, _PROMPTS = "ours plain", "peer plain", "prompts"
PROMPT = 900
"""Tokens of a prompt at most, the last ones."""
TASKS = ("summarise", "code-edit", "chat", "maths")
"""Of the built-in prompts: each size of batch decodes every one of them equally often."""
_MOST_PROMPT = 512  # tokens of a prompt in a batch
_RATE, _SPEEDUP = "tokens a second, all sequences", "speed-up over plain decoding"
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class SpeculationBench(ModelBench):
    """Decoding of built-in prompts, plainly and with drafts; `tg` tokens of each, end or no end."""

    drafter: str  # a drafter's name, or the name or file of a draft model
    drafted: tuple[int, ...]  # tokens of a draft, each measured
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    @property
    def sampling(self) -> SamplingParams:
        own = {name: getattr(self, name) for name in ("temperature", "top_k", "top_p")}
        return SamplingParams.from_dict({**own, "max_tokens": self.tg, "ignore_eos": True})

    def check_peers(self, what: str, able: Sequence[str]) -> None:
        for name in self.peers:
            if name not in able:
                raise UserError(f"--peer {name} has no {what} here: give {' or '.join(able)}")
        if self.peers and not self.sampling.greedy:
            raise UserError("--peer decodes greedily here: leave --temp out")

    @contextmanager
    def opened(self, out: Console) -> Generator[tuple[Model, list[Peer], int]]:
        """The model, the peers, which have not loaded it, and the threads of all."""
        with ExitStack() as stack:
            peers = [stack.enter_context(Peer(name)) for name in self.peers]  # first: a missing package costs no time
            path = catalogue.resolve(self.model)
            yield self.load(path, out), peers, kernels.status()["threads"] or 1


def draft_file(drafter: str) -> Path | None:
    """The file of a draft model; None for the name of a drafter."""
    return None if DRAFTERS.holds(drafter) else catalogue.resolve(drafter)


def method_of(
    model: Model, drafter: str, drafted: int | None, *, batch: int = 1, sampling: SamplingParams = GREEDY
) -> Method:
    """Speculation with a drafter's name, or the name or file of a draft model.

    `drafted` tokens in each draft; None for the length that the drafter takes by itself in such a batch.
    """
    file = draft_file(drafter)
    choice = Choice("model", {"model": str(file)}) if file else Choice(drafter)
    policy = None if drafted is None else Fixed(drafted)
    return resolve(MethodSpec(choice, policy=policy, sampling=sampling), model, batch=batch)


def _chat(model: Model, text: str) -> str:
    """A chat's first turn, as the model's template has it."""
    try:
        return model.tokenizer.apply_chat_template([{"role": "user", "content": text}])
    except UserError:  # a base model has no template
        return text


# Texts one by one.


def ours(model: Model, method: Method, ids: Sequence[int], tokens: int, sampling: SamplingParams = GREEDY) -> TimedText:
    """Tokens after a prompt and a first round, whose tokens are not timed; as if it had written one."""
    params = sampling.merged(max_tokens=tokens + 1, ignore_eos=True)
    session = Session(model, [Request(np.asarray(ids, np.int32), params, seed=0)], method)
    session.advance(1)
    begun, done, rounds = session.times.total, len(session.tokens()[0]), session.counters()[0].num_rounds
    session.advance()
    share = tokens / (tokens + 1 - done)
    passes = (session.counters()[0].num_rounds - rounds) * share
    return TimedText((session.times.total - begun) * share, session.tokens()[0].tolist(), passes)


def writers_of(
    model: Model, peer: Peer | None, drafter: str, *, drafted: Sequence[int] = (2, 4), tg: int = 128,
    sampling: SamplingParams = GREEDY,
) -> dict[str, Callable[[list[int]], TimedText]]:  # fmt: skip
    """Our sides and the peer's by name; each writes `tg` tokens after a prompt's ids and a first token."""
    methods = {PLAIN: Method()} | {f"ours {k}": method_of(model, drafter, k, sampling=sampling) for k in drafted}
    writers: dict[str, Callable[[list[int]], TimedText]] = {}
    for name, method in methods.items():
        writers[name] = lambda ids, m=method: ours(model, m, ids, tg, sampling)
    if peer is not None:
        draft = draft_file(drafter)
        drafts: dict[str, tuple[int, Path | None]] = {PEER_PLAIN: (0, None)}
        drafts |= {f"peer {k}": (k, draft) for k in drafted if draft}
        drafts |= {f"peer lookup {k}": (k, None) for k in drafted}
        for name, (k, file) in drafts.items():
            writers[name] = lambda ids, k=k, file=file: peer.speculate(ids, tg, drafted=k, draft=file)
    return writers


def measure(
    writers: Mapping[str, Callable[[list[int]], Result]], jobs: Sequence[tuple[str, list[int]]], *, repeats: int,
    done: Callable[[], None] = lambda: None,
) -> dict[str, dict[str, list[Result]]]:  # fmt: skip
    """Results by task and side, repeat by repeat; `done` is called after each text, those of the warm-up too."""
    found: dict[str, dict[str, list[Result]]] = {}
    for task, ids in jobs:
        kept = found.setdefault(task, {name: [] for name in writers})
        texts = interleaved({n: partial(write, ids) for n, write in writers.items()}, repeats=repeats, done=done)
        for name, written in texts.items():
            kept[name] += written
    return found


def summary_of(found: Mapping[str, Mapping[str, list[TimedText]]], tg: int) -> Json:
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
    """(task, ids) of the built-in prompts, or of those of some tasks, as a chat's first turn.

    UserError if a task is unknown, or if the context holds no prompt beside the `room` for the text.
    """
    trials.need_room(model.config, room + 1, "--tg")
    most = min(PROMPT, model.config.context_length - room)
    chosen = prompts.load(tasks=tasks, limit_per_task=limit_per_task)
    return [(p.task, model.tokenizer.encode(_chat(model, p.text), parse_special=True)[-most:]) for p in chosen]


@dataclass(frozen=True, kw_only=True)
class DraftBench(SpeculationBench):
    """Texts one by one; `tg` tokens after the first one. llama.cpp alone has drafts of its own."""

    drafted: tuple[int, ...] = (2, 4)
    repeats: int = 1

    def check(self) -> None:
        self.check_peers("speculative decoding", [name for name, kind in PEERS.items() if kind.drafts])
        if self.drafter is None:
            raise UserError("bench draft needs a drafter: its name, or -md with a model that drafts")
        draft_file(self.drafter)

    def run(self, out: Console) -> Json:
        """`summary_of` with the plan and the manifest."""
        room, peer = self.tg + max(self.drafted) + 2, None
        with self.opened(out) as (model, peers, threads):
            jobs = jobs_of(model, room=room)
            for peer in peers:
                longest = max(len(ids) for _, ids in jobs)
                with terminal.busy(out, f"loading {peer.name}, choosing its attention"):
                    peer.open(model.path, model.config, threads=threads, room=longest + room, depth=0)
                    peer.choose_for_writing(jobs[0][1], self.tg)
            started = time.perf_counter()
            how = {"drafted": self.drafted, "tg": self.tg, "sampling": self.sampling}
            writers = writers_of(model, peer, self.drafter, **how)
            with terminal.counting(out, "timing texts", len(jobs) * len(writers) * (self.repeats + 1)) as step:
                found = measure(writers, jobs, repeats=self.repeats, done=step)
        return {
            "bench": "specsparse speculation", "plan": asdict(self), **summary_of(found, self.tg),
            "peer": peer and {"name": peer.name, "version": peer.version, "flash": peer.flash["speculate"]},
            "seconds": time.perf_counter() - started, "manifest": manifest.build({}, model.path),
        }  # fmt: skip

    def parts(self, report: Json) -> Iterator[Table | str]:
        """Tokens a second by task and side, those of a target pass under them; ratios; texts that are not plain."""
        rows = [[task, *(f"{rate:.1f}" for rate in row.values())] for task, row in report["tok_s"].items()]
        rows.append(["tokens a pass", *(f"{x:.2f}" for x in report["tokens_per_pass"]["all"].values())])
        yield tables.new("tok/s", *report["tok_s"]["all"], rows=rows)
        names = {"over_plain": "plain decoding", "over_peer_drafts": "the peer's drafts",
                 "over_peer_best": "the peer's best"}  # fmt: skip
        yield "our best over " + ", over ".join(f"{names[key]} {x:.2f}x" for key, x in report["ratios"].items())
        if report["peer"]:
            flash = "on" if report["peer"]["flash"] else "off"
            yield f"the peer's flash attention, the faster of on and off: {flash}"
        for name, tasks in report["differing"].items():
            if tasks:
                yield f"{name} differs from plain decoding in {', '.join(tasks)}"


# Several sequences at once.


def batches_of(texts: Sequence[np.ndarray], size: int) -> list[list[np.ndarray]]:
    """The fewest batches of one size that hold every text equally often."""
    endless = itertools.cycle(texts)
    return [list(itertools.islice(endless, size)) for _ in range(math.lcm(size, len(texts)) // size)]


def break_even(rows: Sequence[Json], method: str) -> float | None:
    """Sequences at which a method that paid for fewer stops paying, between two measured sizes.

    The speed-up's logarithm is taken as straight in that of the size. None if the smallest batch does not pay, or the
    largest still does. `rows` are those of `BatchBench.measure`, `method` a key of their "speculative".
    """
    points = [(row["batch"], row["speculative"][method]["speedup"]["value"]) for row in rows]
    for (few, fast), (many, slow) in itertools.pairwise(points):
        if fast <= 1:
            return None
        if slow <= 1:
            share = math.log(fast) / (math.log(fast) - math.log(slow))
            return few * (many / few) ** share
    return None


def break_even_line(name: str, at: float | None, rows: Sequence[Json]) -> str:
    speedups = {row["batch"]: row["speculative"][name]["speedup"]["value"] for row in rows}
    (least, first), (most, last) = min(speedups.items()), max(speedups.items())
    if at is not None:
        return f"{name} stops paying at about {at:.0f} sequences"
    if first > 1:
        return f"{name} pays at every size measured: {last:.2f} times plain decoding's speed with {most}"
    return f"{name} does not pay: {first:.2f} times plain decoding's speed with {least}"


def batch_figure(report: Json) -> Figure:
    """Left all sides' tokens a second, right what speculation makes of ours; of the report of a `BatchBench`."""
    rows: list[Row] = []
    for measured in report["rows"]:
        size, fast = measured["batch"], measured["speculative"]
        rates = {"plain": measured["plain_tokens_per_second"]}
        rates |= {name: side["tokens_per_second"] for name, side in {**fast, **measured["peers"]}.items()}
        for name, rate in rates.items():
            ends = {"value": rate["median"], "low": rate["min"], "high": rate["max"]}
            rows.append({"what": _RATE, "side": name, "batch": size, **ends})
        for name, side in fast.items():
            ends = {key: side["speedup"][key] for key in ("value", "low", "high")}
            rows.append({"what": _SPEEDUP, "side": name, "batch": size, **ends})
    caption = (
        f"{report['plan']['tg']} tokens of each sequence, greedy, prompts not counted. Left: medians, whiskers from "
        "the slowest to the fastest. Right: plain decoding's time over that of speculation, mean of repeats with its "
        "95 % interval over repeats; under the dashed line it does not pay."
    )
    return Figure("batches", "Sequences decoded at once", caption, tuple(rows), _draw_batches, size=(9.2, 4.2))


def _draw_batches(canvas: Canvas, rows: Sequence[Row]) -> None:
    for axes, what in zip(canvas.subplots(1, 2), (_RATE, _SPEEDUP), strict=True):
        axes.set_xscale("log", base=2)
        own = [row for row in rows if row["what"] == what]
        plots.lines(axes, own, x="batch", series="side", names=plots.distinct(rows, "side"))
        axes.set(xlabel="sequences", ylabel=what)
        axes.set_ylim(bottom=0)
    plots.par(axes)
    plots.legend_below(canvas.axes[0])


@dataclass(frozen=True, kw_only=True)
class BatchBench(SpeculationBench):
    """The same texts in batches of several sizes, greedily, by `match`."""

    sizes: tuple[int, ...]  # sequences in a batch, each 1 or more
    pp: int = 512  # prompt tokens of each sequence; below 2 leaves prompts out
    drafter: str = "prompt_lookup"
    drafted: tuple[int, ...] = ()  # () for the length that the drafter takes by itself
    repeats: int = 5
    figure = staticmethod(batch_figure)

    def methods(self) -> dict[str, int | None]:
        """Tokens of a draft by the method's name in the report."""
        return {f"{self.drafter} {k}": k for k in self.drafted} or {self.drafter: None}

    def check(self) -> None:
        self.check_peers("batches", [name for name, kind in PEERS.items() if kind.flash])

    def run(self, out: Console) -> Json:
        """The report: `rows` of `measure`, the plan and the manifest."""
        with self.opened(out) as (model, peers, threads):
            for peer in peers:
                peer.open(model.path, model.config, threads=threads, room=self.tg, depth=0)
            started = time.perf_counter()
            with terminal.counting(out, "timing batches", len(self.sizes) * (self.repeats + 1)) as step:
                rows = self.measure(model, step, peers=peers)
        return {
            "bench": "specsparse batch", "plan": asdict(self), "rows": rows,
            "break_even": {name: break_even(rows, name) for name in self.methods()},
            "peers": [peer.facts() for peer in peers], "seconds": time.perf_counter() - started,
            "manifest": manifest.build({}, model.path),
        }  # fmt: skip

    def measure(self, model: Model, done: Callable[[], None], *, peers: Sequence[Peer] = ()) -> list[Json]:
        """A row for each size: tokens per second in all and the speed-up, with their deviations.

        All sizes decode the same mix of texts, interleaved. Plain and speculative decoding of one batch stand side by
        side in time, and the peers' of the same prompts and as many tokens, each with flash attention on or off,
        whichever is faster at that size. `done` is called after each repeat of each size, the warm-up counted.
        """
        trials.need_room(model.config, max(self.pp, self.tg + 2), "--pp or --tg")
        room = min(model.config.context_length - self.tg - 1, _MOST_PROMPT)
        cut = SamplingParams(temperature=0.0, truncate_prompt_tokens=room)
        given = [p for task in TASKS for p in prompts.load(tasks=[task], limit_per_task=1)]
        texts = [prompt_ids(model, _chat(model, p.text), cut) for p in given]
        params = self.sampling
        batches = {size: batches_of(texts, size) for size in self.sizes}
        methods = {
            size: {
                name: method_of(model, self.drafter, k, batch=size, sampling=params)
                for name, k in self.methods().items()
            }
            for size in self.sizes
        }
        flash = {peer.name: peer.choose_for_batches({s: b[0] for s, b in batches.items()}, self.tg) for peer in peers}
        for peer in peers:
            peer.check(model, widest=max(self.sizes))

        def once(size: int) -> tuple[dict[str, float], dict[str, Counters]]:
            """Seconds of all batches by side, of one batch's prompts for `_PROMPTS`; counters by method."""
            seconds, counted = defaultdict[str, float](float), dict.fromkeys(methods[size], Counters())
            if self.pp > 1:
                ids, one = trials.token_ids(self.pp, model.config.vocab_size), params.merged(max_tokens=1)
                seconds[_PROMPTS] = Session(model, [Request(ids, one, seed=0)] * size, Method()).times.prefill
            for batch in batches[size]:
                requests = [Request(ids, params, seed=0) for ids in batch]
                for name, method in {PLAIN: Method(), **methods[size]}.items():
                    session = Session(model, requests, method)
                    session.advance()
                    seconds[name] += session.times.total
                    if name in counted:
                        counted[name] = sum(session.counters(), counted[name])
                for peer in peers:
                    seconds[peer.name] += peer.batch(batch, self.tg, flash[peer.name][size])
            return seconds, counted

        def row(size: int, timed: Sequence[tuple[dict[str, float], dict[str, Counters]]]) -> Json:
            seconds = {name: [by[name] for by, _ in timed] for name in timed[0][0]}
            plain, sequences, fast, theirs = seconds[PLAIN], sum(map(len, batches[size])), {}, {}
            rates = {n: trials.summary([sequences * self.tg / s for s in each]) for n, each in seconds.items()}
            for name, counted in timed[-1][1].items():
                pairs = zip(plain, seconds[name], strict=True)
                ratio = intervals.geometric_mean([a / b for a, b in pairs], least=2)
                fast[name] = {
                    "tokens_per_second": rates[name],
                    "tokens_per_target_pass": counted.num_emitted_tokens / counted.num_rounds,
                    "speedup": {"value": ratio.value, "low": ratio.low, "high": ratio.high, "repeats": len(timed)},
                }
            for peer in peers:
                ratio, on = paired_ratio(seconds[peer.name], plain), flash[peer.name][size]
                theirs[peer.name] = {"flash": on, "tokens_per_second": rates[peer.name], "ratio": ratio}
            prompts = [size * (self.pp - 1) / s for s in seconds.get(_PROMPTS, ())]
            return {
                "batch": size, "sequences": sequences,
                "pp_tokens_per_second": trials.summary(prompts) if prompts else None,
                "plain_tokens_per_second": rates[PLAIN], "speculative": fast, "peers": theirs,
            }  # fmt: skip

        found = interleaved({size: partial(once, size) for size in self.sizes}, repeats=self.repeats, done=done)
        return [row(size, timed) for size, timed in found.items()]

    def parts(self, report: Json) -> Iterator[Table | str]:
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
            for side in row["speculative"].values():
                speedup = side["speedup"]
                cells += [f"{side['tokens_per_second']['median']:.1f}", f"{side['tokens_per_target_pass']:.2f}"]
                cells += [f"{speedup['value']:.2f}x", intervals.shown(speedup["low"], speedup["high"])]
            for side in row["peers"].values():
                flash = "flash" if side["flash"] else "no flash"
                cells += [f"{side['tokens_per_second']['median']:.1f} ({flash})", f"{side['ratio']['median']:.2f}x"]
            made.add_row(*cells)
        yield made
        for name, at in report["break_even"].items():
            yield break_even_line(name, at, report["rows"])
        for peer in report["peers"]:
            if peer["check"]:
                yield f"{peer['name']}: {peer['version']}, {perplexities(peer['check'])}"
            yield from wrong_logits(peer)
