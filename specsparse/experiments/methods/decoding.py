"""What every experiment that decodes prompts shares: checks, the model, the prompts, and passes side by side."""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console

from specsparse.data import prompts
from specsparse.engine.model import Model
from specsparse.engine.noise import seed_at
from specsparse.errors import UserError
from specsparse.experiments import sparse_model
from specsparse.experiments.kind import Engine, RunContext
from specsparse.experiments.settings import DecodingSettings
from specsparse.measure import machine, speedups
from specsparse.measure.conditions import Conditions
from specsparse.measure.costs.measuring import Bar
from specsparse.measure.recording import LAWS_FILE, TRACE_FILE, Recorder, Trace
from specsparse.measure.speedups import Repeats, Width
from specsparse.models import catalogue
from specsparse.report import display, record
from specsparse.report.record import PLAIN, SAME_TEXT_VERIFIERS, Pass
from specsparse.runtime.loops import RoundView, Watch
from specsparse.runtime.method import MethodSpec, resolve
from specsparse.runtime.results import Generation
from specsparse.speculative.base import Verifier
from specsparse.speculative.verifiers import SYNTHETIC
from specsparse.support import terminal
from specsparse.support.interleaved import alternating, schedule

WARM_UP = -1
"""The repeat of passes that are not timed."""


@dataclass(frozen=True)
class PreparedPrompt:
    """A prompt ready to decode."""

    prompt: prompts.Prompt
    ids: list[int]


@dataclass(frozen=True)
class Bench:
    """A loaded model with its jobs, and how long loading took."""

    model: Model
    jobs: list[PreparedPrompt]
    load_s: float


def check(cfg: DecodingSettings, specs: Iterable[MethodSpec], *, union_cap: bool = False) -> None:
    """What can be found wrong without loading the model, so that a mistake costs no time and leaves no directory.

    Args:
        cfg: the run.
        specs: of the methods that it decodes with.
        union_cap: whether the kind can decode with one.

    Raises:
        UserError: parts of a method that do not fit, no such model file or prompts, or a prompt's file that does not
            parse. If the model and a draft model are missing, one line says so.
    """
    methods = [resolve(spec) for spec in specs]
    sparse_model.check(cfg, union_cap=union_cap)
    prompts_of(cfg)
    named = {"model.path": cfg.model.path}
    for method in methods:
        named |= {f"drafter.{option}": file for option, file in method.files.items()}
    missing = {}
    for key, file in named.items():
        try:
            catalogue.resolve(file)
        except catalogue.NotHere as error:
            missing[key] = next(iter(error.wanted.values()))
    if missing:
        raise catalogue.NotHere(missing)


def calibration(cfg: DecodingSettings, model: Model) -> list[list[int]]:
    """What acceptance is measured on: the first built-in prompt of each task."""
    return [ids_of(model, p, chat=cfg.data.chat) for p in prompts.load(limit_per_task=1)]


def bar_on(out: Console) -> Bar:
    """Bars for what is measured, in the terminal."""

    @contextlib.contextmanager
    def shown(what: str, steps: int) -> Iterator[Callable[[], None]]:
        with terminal.counting(out, what, steps) as progress:
            yield lambda: progress.advance(progress.task_ids[0])

    return shown


def label(verifier: Verifier | str) -> str:
    """What the verifier promises about the text."""
    name = verifier if isinstance(verifier, str) else verifier.name
    if name in SAME_TEXT_VERIFIERS:
        return "lossless: plain decoding's tokens"
    if name == SYNTHETIC:
        return "synthetic acceptance: lossy, not text"
    return "lossless in distribution" if isinstance(verifier, str) or verifier.lossless else "lossy"


def prepare(cfg: DecodingSettings, ctx: RunContext, specs: Iterable[MethodSpec] = ()) -> Bench:
    """Loads the model, as wide as these methods need it where nobody says, and encodes the prompts.

    Where steps have one width, all prompts share a size of caches.
    """
    started = time.perf_counter()
    model = sparse_model.load(cfg, ctx)
    model = model.holding(1 + max((resolve(spec).max_nodes for spec in specs), default=0))
    load_s = time.perf_counter() - started
    jobs = prepared_prompts(cfg, ctx.engine, model)
    longest = max((len(job.ids) for job in jobs), default=0)
    return Bench(model.sharing(longest + cfg.max_tokens), jobs, load_s)


def prepared_prompts(cfg: DecodingSettings, engine: Engine, model: Model) -> list[PreparedPrompt]:
    """The prompts of the run with their ids.

    Raises:
        UserError: as `prompts_of`; prompts that the context does not hold, before any is decoded.
    """
    jobs = [PreparedPrompt(p, conversation_ids(cfg, engine, model, p)) for p in prompts_of(cfg)]
    context = model.config.context_length
    long = [job for job in jobs if len(job.ids) > context]
    if long:
        first, several = long[0], f", as {len(long)} of {len(jobs)} are" if len(long) > 1 else ""
        raise UserError(
            f"prompt {first.prompt.id} has {len(first.ids)} tokens, more than the {context} of the context"
            f"{several}: choose others (data.tasks, data.limit_per_task) or give a larger model.context_length"
        )
    return jobs


def prompts_of(cfg: DecodingSettings) -> list[prompts.Prompt]:
    """The prompts of the run.

    Raises:
        UserError: a file that cannot be read, later turns without a chat template.
    """
    data = cfg.data
    if data.turns == "both" and not data.chat:
        raise UserError("data.turns=both needs data.chat=true: a later turn answers within the chat template")
    return data.prompts(turns=data.turns)


def conversation_ids(cfg: DecodingSettings, engine: Engine, model: Model, prompt: prompts.Prompt) -> list[int]:
    """Ids of a prompt; what a later turn refers to is decoded plainly first, the same for every method."""
    said = [{"role": "system", "content": prompt.system}] if prompt.system else []
    for turn in prompt.before:
        said.append({"role": "user", "content": turn})
        answer = engine.generate(model, _chat_ids(model, said), **draws(cfg, prompt))
        said.append({"role": "assistant", "content": answer.text})
    return ids_of(model, prompt, chat=cfg.data.chat, said=said)


def draws(cfg: DecodingSettings, prompt: prompts.Prompt) -> dict[str, Any]:
    """Keyword arguments of generate for the text of a prompt, the same for every method and repeat.

    Noise is keyed by the prompt's id, so that prompts are independent and a part of them keeps its texts.
    """
    params = cfg.params
    shared = cfg.seed if params.seed is None else params.seed
    seed = shared if cfg.common_noise else seed_at(shared, prompt.id)
    return {"max_tokens": cfg.max_tokens, "sampling": params.merged(seed=None), "seed": seed}


def ids_of(model: Model, prompt: prompts.Prompt, *, chat: bool, said: Sequence[dict[str, str]] = ()) -> list[int]:
    """Token ids of a prompt, as a user's turn of a chat after what was `said`, or as it is."""
    if not chat:
        return model.tokenizer.encode(prompt.text, add_special=True)
    return _chat_ids(model, [*said, {"role": "user", "content": prompt.text}])


def _chat_ids(model: Model, messages: Sequence[dict[str, str]]) -> list[int]:
    return model.tokenizer.encode(model.tokenizer.apply_chat_template(list(messages)), parse_special=True)


class _Watching:
    """The untimed pass is watched round by round: traced, or its distributions recorded, or both."""

    def __init__(self, trace: Trace | None, recorder: Recorder | None, directory: Path):
        self._watchers, self._recorder, self._directory = [w for w in (trace, recorder) if w], recorder, directory

    @classmethod
    def of(cls, cfg: DecodingSettings, ctx: RunContext) -> "_Watching | None":
        """As the config asks for it; None if it does not."""
        trace = Trace(ctx.directory / TRACE_FILE, ctx.console) if cfg.trace else None
        recorder = Recorder(cfg.record_laws) if cfg.record_laws else None
        return cls(trace, recorder, ctx.directory) if trace or recorder else None

    def __enter__(self) -> "_Watching":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, where: TracebackType | None) -> None:
        if self._recorder is not None and error is None:
            self._recorder.recording().save(self._directory / LAWS_FILE)

    def start(self, prompt_id: str) -> Watch:
        """What to call with each round of the next prompt."""
        for watcher in self._watchers:
            watcher.start(prompt_id)

        def watch(view: RoundView) -> None:
            for watcher in self._watchers:
                watcher.round(view)

        return watch


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
        self,
        cfg: DecodingSettings,
        ctx: RunContext,
        model: Model,
        sides: Sides,
        *,
        other_models: Mapping[str, Model] | None = None,
    ):
        """`other_models`: of the sides that `model` does not decode."""
        self._cfg, self._ctx, self.model = cfg, ctx, model
        self.sides = sides
        self._other_models = other_models or {}
        self._meter, self._done = machine.Meter(), list[Pass]()
        self.repeats: Repeats | None = None
        self.compile_s = 0.0
        self.warm_up: list[Pass] = []
        self.policies: list[Any] = []

    def show(self, jobs: list[PreparedPrompt], side: str, started: float) -> float | None:
        """Show every prompt's text once, untimed; returns the seconds from `started` to the first text."""
        first = None
        watched = _Watching.of(self._cfg, self._ctx) if side != PLAIN else None
        with watched or contextlib.nullcontext():
            for index, job in enumerate(jobs, 1):
                if self._cfg.stream:
                    display.show_prompt(self._ctx.console, index, len(jobs), job.prompt.task, job.prompt.text)
                if watched is None:
                    generation, at = self._stream(job, side, first is None)
                else:
                    generation = self.generate(job, side, watch=watched.start(job.prompt.id))
                    at = time.perf_counter()
                    if self._cfg.stream:
                        self._ctx.console.out(generation.text, highlight=False)
                first = first or at - started
                self._keep(job, side, WARM_UP, generation)
        return first

    def _stream(self, job: PreparedPrompt, side: str, is_first: bool) -> tuple[Generation, float]:
        stream = self._ctx.engine.stream(self.model, job.ids, **draws(self._cfg, job.prompt), **self.sides[side])
        pieces = iter(stream)
        what = "compiling and reading the prompt" if is_first else "reading the prompt"
        with terminal.busy(self._ctx.console, what):
            piece = next(pieces, "")
        at = time.perf_counter()
        for text in itertools.chain([piece], pieces):
            if self._cfg.stream:
                self._ctx.console.out(text, end="", highlight=False)
        if self._cfg.stream:
            self._ctx.console.out("\n")
        return stream.generation, at

    def _keep(self, job: PreparedPrompt, side: str, repeat: int, generation: Generation) -> None:
        done = Pass.from_generation(job.prompt.id, job.prompt.task, side, repeat, generation)
        self.compile_s += done.compile_s
        self.warm_up.append(done)

    def timed(self, jobs: list[PreparedPrompt]) -> Iterable[Pass]:
        """Every job on every side, `repeats` times; neighbours in time are compared, and the order turns round.

        The machine is looked at before each repeat and after the last.
        """
        if self._cfg.warmup:
            with terminal.busy(self._ctx.console, "compiling the decode loops"):
                for side in self.sides:
                    self._keep(jobs[0], side, WARM_UP, self.generate(jobs[0], side))
        total = speedups.most_repeats(self._cfg.repeats) * len(jobs) * len(self.sides)
        self._meter = machine.Meter()  # what was compiled before is no load of others
        with terminal.counting(self._ctx.console, "timing", total) as progress:
            names = [(job, side) for job in jobs for side in self.sides]
            for repeat, (job, side) in schedule(
                names, repeats=self._enough, order=self._order, before=self._meter.sample
            ):
                generation = self.generate(job, side)
                done = Pass.from_generation(job.prompt.id, job.prompt.task, side, repeat, generation)
                self.compile_s += done.compile_s
                if generation.stats.policy is not None:
                    self.policies.append(generation.stats.policy)
                progress.advance(progress.task_ids[0])
                self._done.append(done)
                yield done
        self._meter.sample()

    def _order(self, names: Sequence[tuple[PreparedPrompt, str]], repeat: int) -> Iterator[tuple[PreparedPrompt, str]]:
        """Job after job, the sides of every other one turned round."""
        sides = len(self.sides)
        for index, start in enumerate(range(0, len(names), sides)):
            yield from alternating(names[start : start + sides], repeat + index)

    def _enough(self, done: int) -> bool:
        self.repeats = speedups.decide_repeats(self._cfg.repeats, done, self._widths)
        return self.repeats is not None

    def _widths(self, first: int) -> list[Width]:
        """How well the first repeats know the speed-up of each side; of plain decoding alone, its time."""
        plain, *others = self.sides
        own = [p for p in self._done if p.repeat < first]
        found = [record.speedup_of(own, side, over=plain) for side in others]
        return [Width.from_speedup(f) for f in found if f is not None] or [Width.from_plain(self._plain_s()[:first])]

    def _plain_s(self) -> list[float]:
        """Seconds of plain decoding, one entry a repeat."""
        plain: dict[int, float] = {}
        for done in self._done:
            if done.side == next(iter(self.sides)):
                plain[done.repeat] = plain.get(done.repeat, 0.0) + done.decode_s
        return list(plain.values())

    def conditions(self) -> Conditions:
        """What the timed passes were taken at."""
        plain = [d for d in self._done if d.side == next(iter(self.sides))]
        seconds = sum(d.decode_s for d in plain)
        rate = sum(d.counters.num_emitted_tokens for d in plain) / seconds if seconds else None
        return self._meter.conditions(rate, self._plain_s())

    def generate(self, job: PreparedPrompt, side: str, **more: Any) -> Generation:
        """One decoding."""
        model = self._other_models.get(side, self.model)
        return self._ctx.engine.generate(model, job.ids, **{**draws(self._cfg, job.prompt), **self.sides[side], **more})
