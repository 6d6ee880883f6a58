"""The main job: decode the same prompts plainly and with a method, in turn, and say what came of it.

    RunConfig -> model, prompts -> shown pass -> timed passes (plain and speculative interleaved) -> RunRecord
"""

import itertools
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.text import Text

from specsparse import display, machine, manifest, models, prompts, record, trackers
from specsparse.config import RunConfig, sampling_params
from specsparse.errors import UserError
from specsparse.record import PLAIN, SPECULATIVE, Pass, RunRecord
from specsparse.speculative import verify
from specsparse.speculative.drafters.registry import get_drafter

NO_DRAFTER = "none"
WARM_UP = -1
"""The repeat of passes that are not timed."""


class Engine(Protocol):
    """What a run needs of `specsparse.api`; tests give a scripted one."""

    def load(self, spec: str, **overrides: Any) -> Any:
        """A model."""

    def generate(self, model: Any, prompt: Any, **options: Any) -> Any:
        """A `Generation`."""

    def stream(self, model: Any, prompt: Any, **options: Any) -> Any:
        """An iterator of text pieces with `.generation` at its end."""


@dataclass(frozen=True)
class Job:
    """A prompt ready to decode."""

    prompt: prompts.Prompt
    ids: list[int]


def check(cfg: RunConfig) -> None:
    """What can be found wrong without loading the model, so that a mistake costs no time and leaves no directory.

    Raises:
        UserError: no such model file, prompts, tracker, or a prompt's file that does not parse.
    """
    models.resolve(cfg.model.path)
    _prompts(cfg)
    trackers.check(cfg.tracker.name, cfg.tracker.options)
    _method(cfg)
    if cfg.name in ("", ".", "..") or "/" in cfg.name:
        raise UserError(f"name={cfg.name}: a plain name is needed, it becomes a directory")


def run(
    cfg: RunConfig, directory: Path, *, engine: Engine | None = None, console: Console | None = None
) -> RunRecord:
    """Run `cfg`, write prompts.jsonl and record.json into `directory`, and show the result.

    Args:
        cfg: the run.
        directory: made if it is not there.
        engine: `specsparse.api` by default.
        console: the terminal by default.

    Raises:
        UserError: a mistake in the config, the model file or the prompts.
    """
    check(cfg)
    engine = engine or _default_engine()
    out = console or display.console()
    started = time.perf_counter()
    method = _method(cfg)
    with display.loading(out, f"loading {cfg.model.path}") as progress:
        model = engine.load(cfg.model.path, progress=progress, **cfg.model.overrides())
    load_s = time.perf_counter() - started
    jobs = [Job(p, _ids(model, p, chat=cfg.data.chat)) for p in _prompts(cfg)]
    tracker = trackers.make(cfg.tracker.name, cfg.tracker.options, directory)

    loop = _Loop(cfg, engine, model, method, out)
    first_text_s = loop.show(jobs, started) if cfg.warmup else None
    passes = []
    for done in loop.timed(jobs):
        tracker.log(done.row())
        passes.append(done)
    found = _record(cfg, loop, passes, load_s=load_s, first_text_s=first_text_s)
    tracker.finish(found.to_dict())
    display.report(out, found)
    out.print(Text(f"record: {directory / trackers.RECORD_FILE}", style="dim"))
    return found


def _default_engine() -> Engine:
    from specsparse import api

    return api  # type: ignore[return-value]


def _prompts(cfg: RunConfig) -> list[prompts.Prompt]:
    return prompts.load(cfg.data.source, tasks=cfg.data.tasks, limit_per_task=cfg.data.limit_per_task)


def _method(cfg: RunConfig) -> dict[str, Any]:
    """Keyword arguments of generate for the speculative side; empty for plain decoding only."""
    if cfg.drafter.name == NO_DRAFTER:
        return {}
    drafter = get_drafter(cfg.drafter.name, gamma=cfg.policy.gamma, **cfg.drafter.options)
    verifier = verify.get_verifier(cfg.verifier.name, **cfg.verifier.options)
    verify.check_pair(drafter, verifier, temperature=sampling_params(cfg).temperature)
    return {"drafter": drafter, "verifier": verifier}


def _ids(model: Any, prompt: prompts.Prompt, *, chat: bool) -> list[int]:
    tokenizer = model.tokenizer
    if not chat:
        return tokenizer.encode(prompt.text, add_special=True)
    text = tokenizer.apply_chat_template([{"role": "user", "content": prompt.text}])
    return tokenizer.encode(text, parse_special=True)


class _Loop:
    """Decodes jobs on both sides with the same options."""

    def __init__(self, cfg: RunConfig, engine: Engine, model: Any, method: Mapping[str, Any], out: Console):
        self._cfg, self._engine, self.model, self._out = cfg, engine, model, out
        self._options = {"max_tokens": cfg.max_tokens, "sampling": sampling_params(cfg), "seed": cfg.seed}
        self._sides = {PLAIN: {}, **({SPECULATIVE: dict(method)} if method else {})}
        self.compile_s = 0.0
        self.warm_up: list[Pass] = []

    def show(self, jobs: list[Job], started: float) -> float | None:
        """Stream every prompt once, untimed; returns the seconds from `started` to the first text."""
        first = None
        side = SPECULATIVE if SPECULATIVE in self._sides else PLAIN
        for index, job in enumerate(jobs, 1):
            if self._cfg.stream:
                display.show_prompt(self._out, index, len(jobs), job.prompt.task, job.prompt.text)
            stream = self._engine.stream(self.model, job.ids, **self._options, **self._sides[side])
            pieces = iter(stream)
            with display.busy(self._out, "reading the prompt" if first else "compiling and reading the prompt"):
                piece = next(pieces, "")
            first = first or time.perf_counter() - started
            for text in itertools.chain([piece], pieces):
                if self._cfg.stream:
                    self._out.out(text, end="", highlight=False)
            if self._cfg.stream:
                self._out.out("\n")
            self._keep(job, side, WARM_UP, stream.generation)
        return first

    def _keep(self, job: Job, side: str, repeat: int, generation: Any) -> None:
        done = Pass.of(job.prompt.id, job.prompt.task, side, repeat, generation)
        self.compile_s += done.compile_s
        self.warm_up.append(done)

    def timed(self, jobs: list[Job]) -> Iterable[Pass]:
        """Every job on every side, `repeats` times; neighbours in time are compared, and the order alternates."""
        if self._cfg.warmup:
            with display.busy(self._out, "compiling the decode loops"):
                for side in self._sides:
                    self._keep(jobs[0], side, WARM_UP, self._generate(jobs[0], side))
        total = self._cfg.repeats * len(jobs) * len(self._sides)
        with display.counting(self._out, "timing", total) as progress:
            for repeat in range(self._cfg.repeats):
                for index, job in enumerate(jobs):
                    order = list(self._sides)
                    for side in order if (repeat + index) % 2 == 0 else reversed(order):
                        done = Pass.of(job.prompt.id, job.prompt.task, side, repeat, self._generate(job, side))
                        self.compile_s += done.compile_s
                        progress.advance(progress.task_ids[0])
                        yield done

    def _generate(self, job: Job, side: str) -> Any:
        return self._engine.generate(self.model, job.ids, **self._options, **self._sides[side])


def _record(
    cfg: RunConfig, loop: _Loop, passes: list[Pass], *, load_s: float, first_text_s: float | None
) -> RunRecord:
    bytes_per_pass = loop.model.footprint.file
    bandwidth = machine.read_bandwidth()
    speculative = any(p.side == SPECULATIVE for p in passes)
    return RunRecord(
        name=cfg.name,
        method={
            "drafter": cfg.drafter.name,
            "verifier": cfg.verifier.name,
            "policy": cfg.policy.name,
            "gamma": cfg.policy.gamma,
            "label": _label(cfg.verifier.name),
        },
        groups=record.groups(passes, bytes_per_pass=bytes_per_pass, read_bandwidth=bandwidth),
        identity=record.identity_of([*passes, *loop.warm_up], verifier=cfg.verifier.name) if speculative else None,
        load_s=load_s,
        first_text_s=first_text_s,
        compile_s=loop.compile_s,
        read_bandwidth=bandwidth,
        bytes_per_pass=bytes_per_pass,
        manifest=manifest.build(cfg.composed, loop.model.path),
    )


def _label(verifier: str) -> str:
    """What the verifier promises about the text."""
    if verifier in record.SAME_TEXT_VERIFIERS:
        return "lossless: plain decoding's tokens"
    return "lossless in law" if verify.get_verifier(verifier).lossless else "lossy"
