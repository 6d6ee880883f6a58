"""One audit from names to its report: every engine in every setting on the same windows of text."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from specsparse import kernels
from specsparse.engine.gguf import requantise
from specsparse.engine.gguf.reader import open_gguf
from specsparse.engine.model import Model
from specsparse.errors import UserError
from specsparse.measure import inspection
from specsparse.measure.trials import requantised
from specsparse.models import catalogue
from specsparse.runtime import manifest
from specsparse.runtime.load import load
from specsparse.support import terminal
from specsparse.support.files import Json
from specsparse.tools.audit.compare import Tally, WidthGroup, groups
from specsparse.tools.peers import windows
from specsparse.tools.peers.check import Check, Judge
from specsparse.tools.peers.engines import (
    CHECKED,
    ENGINES,
    OURS,
    PIECE,
    OurRows,
    PeerRows,
    RowEngine,
    real_text,
    rows_by,
)
from specsparse.tools.peers.process import PeerError, PeerProcess
from specsparse.tools.peers.windows import AuditWindow

VERSION = 1
"""Of the report's format."""
ONE_GROUP, BITS, FORKS, WRONG, UNSTEADY, FAILED = (
    "one group", "other bits", "forks", "wrong logits", "not repeatable", "failed",
)  # fmt: skip


@dataclass(frozen=True)
class AuditPlan:
    """What is asked.

    Attributes:
        model: a name or a file.
        engines: names of `ENGINES`.
        threads: numbers of them; empty for all cores.
        widths: rows of a batch.
        types: the file requantised to each; empty for the file as it is.
        flash: flash attention on and off, of engines that have the choice.
        windows, prompt_tokens, tokens: of the text: how many, and the rows of both parts.
        greedy: the rows are those of the engine's own one-row greedy text, so that a flip is where decoding forks; not
            those of the real text.
        text: a file; None for the built-in prompts.
    """

    model: str
    engines: tuple[str, ...] = (OURS,)
    threads: tuple[int, ...] = ()
    widths: tuple[int, ...] = (*range(1, 17), 24, 32, 48)
    types: tuple[str, ...] = ()
    flash: tuple[bool, ...] = (True, False)
    windows: int = 4
    prompt_tokens: int = 40
    tokens: int = 48
    greedy: bool = True
    text: Path | None = None

    def check(self) -> None:
        """What can be refused before anything is loaded.

        Raises:
            UserError: an unknown engine or type.
        """
        for name in self.engines:
            if name not in ENGINES:
                raise UserError(f"unknown engine {name!r}: there are {', '.join(ENGINES)}")
        for name in self.types:
            requantise.kind_of(name)

    @property
    def room(self) -> int:
        """Tokens of the longest feed."""
        return max(self.prompt_tokens + self.tokens, CHECKED) + max(self.widths)

    @property
    def cases(self) -> int:
        """Of all types, engines and settings."""
        return max(len(self.types), 1) * sum(len(list(self.settings(engine))) for engine in self.engines)

    def settings(self, engine: str) -> Iterator[tuple[int | None, bool | None]]:
        """Threads and flash attention of each case of an engine; ours has one kind of attention."""
        for threads in self.threads or (None,):
            for flash in (None,) if engine == OURS else self.flash:
                yield threads, flash


Rows = Callable[[Sequence[int], Sequence[int], int], np.ndarray]
"""Prompt, text and width: the logits of the text's rows, all computed in batches of exactly that width."""


def run(plan: AuditPlan, out: Console, after: Callable[[Json], None] = lambda report: None) -> Json:
    """Audits, showing progress on `out`.

    Args:
        plan: what is asked.
        out: the terminal.
        after: called with the report so far after each case, so that a run that is stopped loses no case.

    Returns:
        "audit", "version", "plan", "complete" (whether all cases are there), "cases" and "manifest". A case has
        "engine", "version", "weights", "threads", "flash", "verdict" (one of this module's words), "failed" (a line, or
        None), "one_row_bits" (a digest), "repeatable", "check" (`Check.cells` of real text, or None for ours) and
        "groups" (`WidthGroup.cells`).

    Raises:
        UserError: anything wrong with the plan, the model or the text, or a peer that is missing.
    """
    plan.check()
    for name in plan.engines:
        if name != OURS:
            PeerProcess(name, option="--engine").close()  # first: a missing package costs no time
    path = catalogue.resolve(plan.model)
    asked = {**asdict(plan), "text": plan.text and str(plan.text), "prompt_batches": PIECE}
    found: Json = {"audit": "specsparse audit", "version": VERSION, "plan": asked, "complete": False, "cases": [],
                   "manifest": manifest.build({}, path)}  # fmt: skip
    for kind in plan.types or (None,):
        file = path if kind is None else requantised(path, kind, out)
        with terminal.busy(out, f"loading {file.name}"):
            model = load(file)
        if plan.room > model.config.context_length:
            raise UserError(
                f"the windows need {plan.room} tokens and the context holds {model.config.context_length}: choose "
                "smaller --tokens, --prompt-tokens or --widths"
            )
        ids = windows.token_ids(model.tokenizer, plan.text)
        bos = model.tokenizer.bos_id if model.tokenizer.add_bos else None
        cut = windows.cut(ids, plan.windows, prompt=plan.prompt_tokens, following=plan.tokens, bos=bos)
        for engine in plan.engines:
            for threads, flash in plan.settings(engine):
                found["cases"].append(_case(plan, engine, model, cut, ids[:CHECKED], threads, flash, out))
                found["complete"] = len(found["cases"]) == plan.cases
                after(found)
    return found


def _case(
    plan: AuditPlan, name: str, model: Model, cut: Sequence[AuditWindow], real: Sequence[int], threads: int | None,
    flash: bool | None, out: Console,
) -> Json:  # fmt: skip
    """One engine in one setting on one file."""
    if threads is not None:
        kernels.set_threads(threads)
    count = threads or int(kernels.status()["threads"] or 1)
    found: Json = {
        "engine": name, "version": "", "weights": inspection.main_type(open_gguf(model.path)),
        "file": model.path.name, "threads": count, "flash": flash,
    }  # fmt: skip
    begun = time.perf_counter()
    said = f"{name}, {found['weights']}, {count} threads{'' if flash is None else f', flash {_on(flash)}'}"
    try:
        ours = OurRows(model, plan.room)
        engine: RowEngine = (
            ours if name == OURS else PeerRows.start(name, model.path, plan.room, threads=count, flash=flash)
        )
        found["version"] = engine.version
        with closing(engine), terminal.counting(out, said, len(cut) * len(plan.widths)) as bar:
            step = bar.task_ids[0]
            found |= audit(engine, plan, cut, real, ours=None if name == OURS else ours,
                           done=lambda: bar.advance(step))  # fmt: skip
    except PeerError as error:
        found |= {"verdict": FAILED, "failed": " ".join(str(error).split()), "one_row_bits": None, "repeatable": None,
                  "check": None, "groups": []}  # fmt: skip
    return {**found, "seconds": time.perf_counter() - begun}


def _on(flash: bool) -> str:
    return "on" if flash else "off"


def audit(
    engine: RowEngine, plan: AuditPlan, cut: Sequence[AuditWindow], real: Sequence[int], *,
    ours: RowEngine | None = None, done: Callable[[], None] = lambda: None,
) -> Json:  # fmt: skip
    """An open engine's part of a case (see `run`); `ours` is the reference of another one, `real` a text for it."""
    check = None if ours is None else real_text(engine, ours, real, max(plan.widths))
    if check is not None and check[0].wrong:
        return {"verdict": WRONG, "failed": None, "one_row_bits": None, "repeatable": None,
                "check": _checked(check), "groups": []}  # fmt: skip
    tallies, repeatable, texts = [Tally(w) for w in sorted({1, *plan.widths})], True, []
    for window in cut:
        text = engine.write(window.prompt, plan.tokens) if plan.greedy else list(window.following)
        texts.append(text)
        alone = rows_by(engine, window.prompt, text, 1)
        judge = None if ours is None else Judge(rows_by(ours, window.prompt, text, PIECE), np.asarray(text))
        for tally in tallies:
            tally.add(window.name, alone, rows_by(engine, window.prompt, text, tally.width), judge)
            done()
        again = rows_by(engine, window.prompt, text, 1)
        repeatable &= bool(np.array_equal(alone.view(np.uint32), again.view(np.uint32)))
    found = groups(tallies)
    return {
        "verdict": verdict(found, repeatable), "failed": None, "one_row_bits": tallies[0].digest,
        "repeatable": repeatable, "check": check and _checked(check), "groups": [group.cells() for group in found],
        "texts": dict(zip((window.name for window in cut), texts)),
    }  # fmt: skip


def verdict(found: Sequence[WidthGroup], repeatable: bool) -> str:
    """In a word of this module; where the logits of some widths are wrong, that comes before any fork."""
    if not repeatable:
        return UNSTEADY
    if any(group.wrong for group in found):
        return WRONG
    if any(group.flips for group in found):
        return FORKS
    return BITS if len(found) > 1 else ONE_GROUP


def _checked(check: tuple[Check, Check]) -> Json:
    return {"one_row": check[0].cells(), "widest": check[1].cells()}
