"""The shared part of every experiment that decodes prompts: checks, the model, the prompts, and passes side by side."""

import dataclasses
import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specsparse.data import prompts
from specsparse.data.prompts import Prompt
from specsparse.engine import hosts
from specsparse.engine.model import Model
from specsparse.engine.noise import seed_at
from specsparse.engine.text.tokenizer import Tokenizer
from specsparse.errors import UserError
from specsparse.experiments import sparse_model
from specsparse.experiments.kind import Engine, RunContext
from specsparse.experiments.settings import DecodingSettings
from specsparse.measure import machine, speedups
from specsparse.measure.conditions import Conditions
from specsparse.measure.recording import LAWS_FILE, TRACE_FILE, Recorder, Trace
from specsparse.measure.speedups import Repeats, Width
from specsparse.models import catalogue
from specsparse.report import display, record
from specsparse.report.record import PLAIN, Pass
from specsparse.runtime.loops import RoundView
from specsparse.runtime.method import MethodSpec, resolve
from specsparse.runtime.prefix_cache import PrefixCache
from specsparse.runtime.results import Generation
from specsparse.speculative.base import Verifier
from specsparse.speculative.verifiers import SYNTHETIC, same_text
from specsparse.support import terminal
from specsparse.support.interleaved import alternating, schedule

WARM_UP = -1
"""The repeat of passes that are not timed."""


@dataclass(frozen=True)
class PreparedPrompt:
    prompt: Prompt
    ids: list[int]


@dataclass(frozen=True)
class Bench:
    """A loaded model with its jobs, and how long loading took."""

    model: Model
    jobs: list[PreparedPrompt]
    load_s: float


def check(cfg: DecodingSettings, specs: Iterable[MethodSpec], *, union_cap: bool = False) -> None:
    """Finds mistakes without loading the model: in the methods of `specs`, the prompts, and the files of all models.

    `union_cap`: whether the kind can decode with one. If model and draft model are missing, one line says so.
    """
    methods = [resolve(spec) for spec in specs]
    sparse_model.check(cfg, union_cap=union_cap)
    if cfg.data.turns == "both" and not cfg.data.chat:
        raise UserError("data.turns=both needs data.chat=true: a later turn answers within the chat template")
    cfg.data.prompts(turns=cfg.data.turns)
    named, missing = {"model.path": cfg.model.path}, {}
    for method in methods:
        named |= {f"drafter.{option}": file for option, file in method.files.items()}
    for key, file in named.items():
        try:
            catalogue.resolve(file)
        except catalogue.NotHere as error:
            missing[key] = next(iter(error.wanted.values()))
    if missing:
        raise catalogue.NotHere(missing)


def calibration(cfg: DecodingSettings, model: Model) -> list[list[int]]:
    """Token ids of the first built-in prompt of each task, by which acceptance is measured."""
    return [ids_of(model, p, chat=cfg.data.chat) for p in prompts.load(limit_per_task=1)]


def label(verifier: Verifier | str) -> str:
    name = verifier if isinstance(verifier, str) else verifier.name
    if same_text(name):
        return "lossless: plain decoding's tokens"
    if name == SYNTHETIC:
        return "synthetic acceptance: lossy, not text"
    return "lossless in distribution" if isinstance(verifier, str) or verifier.lossless else "lossy"


def prepare(cfg: DecodingSettings, ctx: RunContext, specs: Iterable[MethodSpec] = ()) -> Bench:
    """Loads the model, as wide as these methods need it if nobody says, and encodes the prompts."""
    started = time.perf_counter()
    model = sparse_model.load(cfg, ctx)
    model = model.holding(1 + max((resolve(spec).max_nodes for spec in specs), default=0))
    load_s = time.perf_counter() - started
    jobs = prepared_prompts(cfg, ctx.engine, model)
    longest = max((len(job.ids) for job in jobs), default=0)
    return Bench(model.sharing(longest + cfg.max_tokens), jobs, load_s)  # of one width: caches of one size


def prepared_prompts(cfg: DecodingSettings, engine: Engine, model: Model) -> list[PreparedPrompt]:
    """The prompts with their ids; text that a later turn refers to is decoded plainly first, the same for every method.

    UserError: prompts that the context does not hold.
    """
    jobs, asked = [], cfg.data.prompts(turns=cfg.data.turns)
    if cfg.data.lengths:
        others = dataclasses.replace(cfg.data, tasks=None, limit_per_task=None).prompts()
        asked = [behind(others, p, n, model.tokenizer) for n in cfg.data.lengths for p in asked]
    for prompt in asked:
        said = [{"role": "system", "content": prompt.system}] if prompt.system else []
        for turn in prompt.before:
            said.append({"role": "user", "content": turn})
            answer = engine.generate(model, _chat_ids(model, said), **draws(cfg, prompt))
            said.append({"role": "assistant", "content": answer.text})
        jobs.append(PreparedPrompt(prompt, ids_of(model, prompt, chat=cfg.data.chat, said=said)))
    context = model.config.context_length
    long = [job for job in jobs if len(job.ids) > context]
    if long:
        first, several = long[0], f", as {len(long)} of {len(jobs)} are" if len(long) > 1 else ""
        raise UserError(
            f"prompt {first.prompt.id} has {len(first.ids)} tokens, more than the {context} of the context"
            f"{several}: choose others (data.tasks, data.limit_per_task) or give a larger model.context_length"
        )
    return jobs


def behind(others: Sequence[Prompt], prompt: Prompt, length: int, tokenizer: Tokenizer) -> Prompt:
    """The prompt with the texts of the `others` before it, its last `length` tokens; its task is that length.

    UserError: the texts are shorter.
    """
    ids = tokenizer.encode("\n\n".join([*(other.text for other in others if other.id != prompt.id), prompt.text]))
    if len(ids) < length:
        raise UserError(
            f"data.lengths: {length} tokens are asked for and all prompts together have {len(ids)}: choose a shorter "
            "length or another data.source"
        )
    text = tokenizer.decode(ids[-length:])
    return prompt._replace(id=f"{prompt.id} of {length}", task=str(length), text=text)


def draws(cfg: DecodingSettings, prompt: Prompt) -> dict[str, Any]:
    """Keyword arguments of generate for a prompt, the same for every method and repeat; noise is keyed by its id."""
    params = cfg.params
    shared = cfg.seed if params.seed is None else params.seed
    seed = shared if cfg.common_noise else seed_at(shared, prompt.id)
    return {"max_tokens": cfg.max_tokens, "sampling": params.merged(seed=None), "seed": seed}


def ids_of(model: Model, prompt: Prompt, *, chat: bool, said: Sequence[dict[str, str]] = ()) -> list[int]:
    """Token ids of a prompt, as a user's turn of a chat after what was `said`, or as it is."""
    if not chat:
        return model.tokenizer.encode(prompt.text, add_special=True)
    return _chat_ids(model, [*said, {"role": "user", "content": prompt.text}])


def _chat_ids(model: Model, messages: Sequence[dict[str, str]]) -> list[int]:
    return model.tokenizer.encode(model.tokenizer.apply_chat_template(list(messages)), parse_special=True)


Sides = Mapping[str, Mapping[str, Any]]
"""Keyword arguments of generate by name of the side; the first is plain decoding, what the others are compared with."""


class Passes:
    """Decodes jobs on all sides with the same options.

    Attributes:
        compile_s: seconds of compilation so far.
        warm_up: the passes that were not timed.
        policies: what the draft-length policy did in each timed pass that has one.
        repeats: how often everything was timed; None until `timed` is through.
    """

    def __init__(
        self, cfg: DecodingSettings, ctx: RunContext, model: Model, sides: Sides, *, other: Mapping[str, Model] = {}
    ):
        """`other`: models of the sides that `model` does not decode."""
        if cfg.prefix_caching:
            read = PrefixCache(texts=2**30)
            sides = {name: {**how, "prefix_cache": read} for name, how in sides.items()}
        self._cfg, self._ctx, self.model, self.sides, self._other = cfg, ctx, model, sides, other
        self._tracker = ctx.tracker  # makes the directory, into which an untimed pass may write
        self._meter, self._done = machine.Meter(), list[Pass]()
        self.repeats: Repeats | None = None
        self.compile_s = 0.0
        self.warm_up: list[Pass] = []
        self.policies: list[Any] = []

    def show(self, jobs: list[PreparedPrompt], side: str, started: float) -> float | None:
        """Show every prompt's text once, untimed; returns the seconds from `started` to the first text.

        The pass may be watched round by round: traced, or its distributions recorded, or both.
        """
        cfg, ctx, first = self._cfg, self._ctx, None
        recorder = Recorder(cfg.record_laws) if cfg.record_laws and side != PLAIN else None
        watchers: list[Trace | Recorder] = [] if recorder is None else [recorder]
        if cfg.trace and side != PLAIN:
            watchers.insert(0, Trace(ctx.directory / TRACE_FILE, ctx.console))

        def watch(view: RoundView) -> None:
            for watcher in watchers:
                watcher.round(view)

        for index, job in enumerate(jobs, 1):
            if cfg.stream:
                display.show_prompt(ctx.console, index, len(jobs), job.prompt.task, job.prompt.text)
            if watchers:
                for watcher in watchers:
                    watcher.start(job.prompt.id)
                generation, at = self.generate(job, side, watch=watch), time.perf_counter()
                if cfg.stream:
                    ctx.console.out(generation.text, highlight=False)
            else:
                stream = ctx.engine.stream(self.model, job.ids, **draws(cfg, job.prompt), **self.sides[side])
                pieces = iter(stream)
                with terminal.busy(ctx.console, f"{'' if first else 'compiling and '}reading the prompt"):
                    piece = next(pieces, "")
                at = time.perf_counter()
                try:
                    for text in itertools.chain([piece], pieces):
                        if cfg.stream:
                            ctx.console.out(text, end="", highlight=False)
                finally:  # a text that fails has an end, too
                    if cfg.stream:
                        ctx.console.out("\n\n", end="", highlight=False)
                generation = stream.generation
            first = first or at - started
            self._keep(job, side, WARM_UP, generation)
        if recorder is not None:
            recorder.recording().save(ctx.directory / LAWS_FILE)
        return first

    def _keep(self, job: PreparedPrompt, side: str, repeat: int, generation: Generation) -> Pass:
        done = Pass.from_generation(job.prompt.id, job.prompt.task, side, repeat, generation)
        self.compile_s += done.compile_s
        (self.warm_up if repeat == WARM_UP else self._done).append(done)
        return done

    def timed(self, jobs: list[PreparedPrompt]) -> Iterable[Pass]:
        """Every job on every side, `repeats` times; neighbours in time are compared, and the order alternates.

        The machine is looked at before each repeat and after the last.
        """
        if self._cfg.warmup:
            with terminal.busy(self._ctx.console, "compiling the decode loops"):
                for side in self.sides:
                    self._keep(jobs[0], side, WARM_UP, self.generate(jobs[0], side))

        def order(names: Sequence[tuple[PreparedPrompt, str]], repeat: int) -> Iterator[tuple[PreparedPrompt, str]]:
            """Job after job, the sides of every other one in reverse."""
            for index, start in enumerate(range(0, len(names), len(self.sides))):
                yield from alternating(names[start : start + len(self.sides)], repeat + index)

        def enough(done: int) -> bool:
            self.repeats = speedups.decide_repeats(self._cfg.repeats, done, self._widths)
            return self.repeats is not None

        most = speedups.LIMIT if self._cfg.repeats == speedups.AUTO else self._cfg.repeats
        total = most * len(jobs) * len(self.sides)
        self._meter = machine.Meter()  # what was compiled before is no load of others
        with self._ctx.counting("timing", total) as step:
            names = [(job, side) for job in jobs for side in self.sides]
            passes = schedule(names, repeats=enough, order=order, before=self._meter.sample)
            for repeat, (job, side) in passes:
                generation = self.generate(job, side)
                done = self._keep(job, side, repeat, generation)
                if generation.stats.policy is not None:
                    self.policies.append(generation.stats.policy)
                step()
                yield done
        self._meter.sample()

    def logged(self, jobs: list[PreparedPrompt]) -> list[Pass]:
        """The timed passes, each a line of prompts.jsonl as soon as it is done."""
        done = []
        for one in self.timed(jobs):
            done.append(one)
            self._tracker.log(one.row())
        return done

    def _widths(self, first: int) -> list[Width]:
        """How well the first repeats know the speed-up of each side; of plain decoding alone, its time."""
        plain, *others = self.sides
        own = [p for p in self._done if p.repeat < first]
        found = [record.speedup_of(own, side, over=plain) for side in others]
        known = [Width.from_speedup(f) for f in found if f is not None] or [Width.from_plain(self._plain_s()[:first])]
        return [Width(*halves) for halves in hosts.agreed([dataclasses.astuple(width) for width in known])]

    def _plain_s(self) -> list[float]:
        seconds: dict[int, float] = {}
        for done in self._done:
            if done.side == next(iter(self.sides)):
                seconds[done.repeat] = seconds.get(done.repeat, 0.0) + done.decode_s
        return list(seconds.values())

    def conditions(self) -> Conditions:
        seconds, plain = self._plain_s(), next(iter(self.sides))
        tokens = sum(done.counters.num_emitted_tokens for done in self._done if done.side == plain)
        return self._meter.conditions(tokens / sum(seconds) if sum(seconds) else None, seconds)

    def generate(self, job: PreparedPrompt, side: str, **more: Any) -> Generation:
        model = self._other.get(side, self.model)
        return self._ctx.engine.generate(model, job.ids, **{**draws(self._cfg, job.prompt), **self.sides[side], **more})
