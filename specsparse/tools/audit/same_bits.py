"""An audit: the same rows by every engine and every width of batch; which widths share bits, what the others change.

T rows, a vocabulary of V. The row at position i reads the given token i and predicts the one after it.
"""

import hashlib
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console

from specsparse import kernels
from specsparse.engine.gguf import requantise
from specsparse.engine.gguf.reader import open_gguf
from specsparse.engine.model import Model
from specsparse.errors import UserError
from specsparse.measure import intervals, manifest
from specsparse.measure.trials import need_room, requantised
from specsparse.models import catalogue
from specsparse.runtime.load import load
from specsparse.support import terminal
from specsparse.support.files import Json
from specsparse.tools.peers.logits import (
    CHECKED,
    CHUNK,
    OURS,
    Check,
    Judge,
    OurRows,
    RowEngine,
    real_text,
    rows_by,
    text_ids,
)
from specsparse.tools.peers.peer import Peer, PeerError

VERSION = 1
"""Of the report's format."""
ONE_GROUP, BITS, FORKS, WRONG, UNSTEADY, FAILED = (
    "one group", "other bits", "forks", "wrong logits", "not repeatable", "failed",
)  # fmt: skip
"""Verdicts."""


class Flip(NamedTuple):
    """A row whose most likely token is not the one that it has alone."""

    window: str
    position: int  # of the row; decoding writes another token as number `position` + 1 of the given ones, from 0
    one_row: int  # the most likely token alone
    batch: int  # the most likely token in a batch
    margin: float  # logit of `one_row` minus that of the second most likely token, alone


class Rate(NamedTuple):
    """Events for each thousand positions, with the 95 % interval of `intervals.binomial`; independent positions."""

    per_1000: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.per_1000:.1f} ({self.low:.1f} to {self.high:.1f})"


def rate(count: int, positions: int) -> Rate:
    """The rate of `count` events at so many positions, at least one."""
    low, high = intervals.binomial(count, positions)
    return Rate(1000 * count / positions, 1000 * low, 1000 * high)


@dataclass
class Tally:
    """The rows of one width, window by window."""

    width: int  # rows of a batch
    positions: int = 0  # rows compared
    rows_differing: int = 0  # rows with other bits than alone
    largest: float = 0.0  # largest difference of two logits; infinite if one of them is no number
    flips: list[Flip] = field(default_factory=list)
    check: Check | None = None  # this width beside our logits, or None
    _bits: list[bytes] = field(default_factory=list)

    def add(self, window: str, one_TV: np.ndarray, rows_TV: np.ndarray, judge: Judge | None = None) -> None:
        """A window's rows alone and in batches, float32[T, V] each; `judge` has our distributions there."""
        digest = hashlib.sha256(np.ascontiguousarray(rows_TV).data).digest()
        self._bits.append(digest)
        self.positions += len(rows_TV)
        if judge is not None:
            found = judge.check(digest, rows_TV)
            self.check = found if self.check is None else self.check.plus(found)
        other = np.flatnonzero((rows_TV.view(np.uint32) != one_TV.view(np.uint32)).any(axis=1))
        if not len(other):
            return
        self.rows_differing += len(other)
        one_nV, rows_nV = one_TV[other], rows_TV[other]
        with np.errstate(invalid="ignore"):
            apart = np.abs(rows_nV.astype(np.float64) - one_nV)
        apart[one_nV == rows_nV] = 0.0  # infinities too
        self.largest = max(self.largest, float(np.where(np.isnan(apart), np.inf, apart).max()))
        best_n, now_n = one_nV.argmax(axis=1), rows_nV.argmax(axis=1)
        for i in np.flatnonzero(best_n != now_n):
            second, first = np.partition(one_nV[i], -2)[-2:]
            margin = float(first) - float(second)
            self.flips.append(Flip(window, int(other[i]), int(best_n[i]), int(now_n[i]), margin))

    @property
    def digest(self) -> str:
        """A digest of all rows' bits: equal for widths that share them."""
        return hashlib.sha256(b"".join(self._bits)).hexdigest()[:16]


def groups(tallies: Sequence[Tally]) -> list[Json]:
    """Widths of the same bits together, in order of their least; the tally of width 1 must be among them.

    Each is a group of the report: "widths", whether their bits are those of one row ("same_bits"), the figures of one
    of the tallies, which are those of all, and in "first_flips" where decoding forks first in each window.
    """
    alone = next(tally.digest for tally in tallies if tally.width == 1)
    found: dict[str, list[Tally]] = {}
    for tally in sorted(tallies, key=lambda t: t.width):
        found.setdefault(tally.digest, []).append(tally)
    out = list[Json]()
    for bits, own in found.items():
        tally, first_flips = own[0], dict[str, int]()
        for flip in tally.flips:  # those of a window ascend
            first_flips.setdefault(flip.window, flip.position)
        out.append({
            "widths": tuple(t.width for t in own), "same_bits": bits == alone, "positions": tally.positions,
            "rows_differing": tally.rows_differing, "largest_difference": tally.largest,
            "flips_count": len(tally.flips), "fork_rate": rate(len(tally.flips), tally.positions)._asdict(),
            "first_flips": first_flips, "flips": [flip._asdict() for flip in tally.flips],
            "check": tally.check and tally.check.to_dict(), "wrong": tally.check is not None and tally.check.wrong,
        })  # fmt: skip
    return out


class AuditWindow(NamedTuple):
    """A prompt, and the tokens that follow it in the text; `name` says where it stands."""

    name: str
    prompt: tuple[int, ...]
    following: tuple[int, ...]


def windows_of(ids: Sequence[int], count: int, *, prompt: int, following: int, bos: int | None) -> list[AuditWindow]:
    """Windows evenly spread over a text, which do not overlap; UserError if the text is too short.

    `bos` replaces the first token of each prompt; None for nothing.
    """
    size = prompt + following
    if len(ids) < count * size:
        raise UserError(
            f"the text has {len(ids)} tokens and {count} windows of {size} take {count * size}: give a longer --text, "
            "or fewer --windows, --prompt-tokens or --tokens"
        )
    stride, out = len(ids) // count, []
    for start in range(0, count * stride, stride):
        head = (ids[start] if bos is None else bos, *ids[start + 1 : start + prompt])
        out.append(AuditWindow(f"token {start}", head, tuple(ids[start + prompt : start + size])))
    return out


@dataclass(frozen=True)
class AuditPlan:
    """The options of an audit. Without `types` the file is audited as it is."""

    model: str  # a name or a file
    engines: tuple[str, ...] = (OURS,)  # "specsparse", and names of `peers.PEERS`
    threads: tuple[int, ...] = ()  # numbers of them; () for all cores
    widths: tuple[int, ...] = (*range(1, 17), 24, 32, 48)  # rows of a batch
    types: tuple[str, ...] = ()  # the file is requantised to each
    flash: tuple[bool, ...] = (True, False)  # flash attention on and off, of engines that have the choice
    windows: int = 4  # of the text
    prompt_tokens: int = 40  # of each window
    tokens: int = 48  # rows of each window
    greedy: bool = True  # rows of the engine's own one-row greedy text, where a flip is a fork; not of the real text
    text: Path | None = None  # None for the built-in prompts

    @property
    def room(self) -> int:
        return max(self.prompt_tokens + self.tokens, CHECKED) + max(self.widths)

    def settings(self) -> list[tuple[str, int | None, bool | None]]:
        """Engine, threads and flash attention of each case; ours has one kind of attention."""
        return [
            (engine, threads, flash)
            for engine in self.engines
            for threads in self.threads or (None,)
            for flash in ((None,) if engine == OURS else self.flash)
        ]


def run(plan: AuditPlan, out: Console, after: Callable[[Json], None] = lambda report: None) -> Json:
    """Audits, showing progress on `out`; `after` gets the report so far after each case, so that no case is lost.

    Returns:
        "audit", "version", "plan", "complete" (whether all cases are there), "cases" and "manifest". A case has
        "engine", "version", "weights", "threads", "flash", "verdict" (one of this module's), "failed" (a line, or
        None), "one_row_bits" (a digest), "repeatable", "check" (`Check.to_dict` of real text, or None for ours) and
        "groups" (see `groups`).
    """
    for name in plan.types:
        requantise.kind_of(name)
    for name in plan.engines:
        if name != OURS:
            Peer(name, option="--engine").close()  # first: a missing package costs no time
    path = catalogue.resolve(plan.model)
    found: Json = {
        "audit": "specsparse audit", "version": VERSION,
        "plan": {**asdict(plan), "text": plan.text and str(plan.text), "prompt_batches": CHUNK},
        "complete": False, "cases": [], "manifest": manifest.build({}, path),
    }  # fmt: skip
    settings = plan.settings()
    cases = max(len(plan.types), 1) * len(settings)
    for kind in plan.types or (None,):
        file = path if kind is None else requantised(path, kind, out)
        with terminal.busy(out, f"loading {file.name}"):
            model = load(file)
        need_room(model.config, plan.room, "--tokens, --prompt-tokens or --widths")
        ids = text_ids(model.tokenizer, plan.text)
        bos = model.tokenizer.bos_id if model.tokenizer.add_bos else None
        cut = windows_of(ids, plan.windows, prompt=plan.prompt_tokens, following=plan.tokens, bos=bos)
        for setting in settings:
            found["cases"].append(_case(plan, *setting, model, cut, ids[:CHECKED], out))
            found["complete"] = len(found["cases"]) == cases
            after(found)
    return found


def _case(
    plan: AuditPlan, name: str, threads: int | None, flash: bool | None, model: Model, cut: Sequence[AuditWindow],
    real: Sequence[int], out: Console,
) -> Json:  # fmt: skip
    if threads is not None:
        kernels.set_threads(threads)
    count = threads or int(kernels.status()["threads"] or 1)
    found: Json = {
        "engine": name, "version": "", "weights": open_gguf(model.path).main_type(),
        "file": model.path.name, "threads": count, "flash": flash,
    }  # fmt: skip
    begun = time.perf_counter()
    attention = "" if flash is None else f", flash {'on' if flash else 'off'}"
    said = f"{name}, {found['weights']}, {count} threads{attention}"
    try:
        ours = OurRows(model, plan.room)
        engine = ours if name == OURS else Peer(name, option="--engine", patient=True)
        with closing(engine), terminal.counting(out, said, len(cut) * len(plan.widths)) as done:
            found["version"] = engine.version
            if isinstance(engine, Peer):
                engine.load(model.path, threads=count, room=plan.room, flash=flash)
            found |= audit(engine, plan, cut, real, ours=None if name == OURS else ours, done=done)
    except PeerError as error:
        found |= _failed(FAILED, " ".join(str(error).split()))
    return {**found, "seconds": time.perf_counter() - begun}


def _failed(verdict: str, failed: str | None = None, check: Json | None = None) -> Json:
    nothing = {"one_row_bits": None, "repeatable": None, "groups": []}
    return {"verdict": verdict, "failed": failed, "check": check, **nothing}


def audit(
    engine: RowEngine, plan: AuditPlan, cut: Sequence[AuditWindow], real: Sequence[int], *,
    ours: RowEngine | None = None, done: Callable[[], None] = lambda: None,
) -> Json:  # fmt: skip
    """An open engine's part of a case (see `run`); `ours` is the reference of another engine, `real` a text for it."""
    checked = None
    if ours is not None:
        one_row, widest = real_text(engine, ours, real, max(plan.widths))
        checked = {"one_row": one_row.to_dict(), "widest": widest.to_dict()}
        if one_row.wrong:
            return _failed(WRONG, check=checked)
    tallies, repeatable, texts = [Tally(w) for w in sorted({1, *plan.widths})], True, {}
    for window in cut:
        text = engine.write(window.prompt, plan.tokens) if plan.greedy else list(window.following)
        texts[window.name] = text
        alone = rows_by(engine, window.prompt, text, 1)
        judge = None if ours is None else Judge(rows_by(ours, window.prompt, text, CHUNK), np.asarray(text))
        for tally in tallies:
            tally.add(window.name, alone, rows_by(engine, window.prompt, text, tally.width), judge)
            done()
        again = rows_by(engine, window.prompt, text, 1)
        repeatable &= bool(np.array_equal(alone.view(np.uint32), again.view(np.uint32)))
    found = groups(tallies)
    if not repeatable:
        verdict = UNSTEADY
    elif any(group["wrong"] for group in found):  # comes before any fork
        verdict = WRONG
    elif any(group["flips"] for group in found):
        verdict = FORKS
    else:
        verdict = BITS if len(found) > 1 else ONE_GROUP
    return {
        "verdict": verdict, "failed": None, "one_row_bits": tallies[0].digest, "repeatable": repeatable,
        "check": checked, "groups": found, "texts": texts,
    }  # fmt: skip
