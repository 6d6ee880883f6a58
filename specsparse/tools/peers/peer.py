"""Another engine: its process, which keeps its threads and native libraries apart from ours, and its tests.

It is timed with the faster of its kinds of attention, and its logits are compared with ours before.
"""

import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from specsparse.engine.config import ModelConfig
from specsparse.engine.model import Model
from specsparse.errors import UserError, pip_install
from specsparse.measure.trials import TrialPlan, token_ids
from specsparse.support.files import Json
from specsparse.support.interleaved import interleaved
from specsparse.tools.peers import PEERS, PYTHON_VARIABLE
from specsparse.tools.peers.logits import CHECKED, CHUNK, Check, OurRows, RowRouting, real_text, text_ids

EXPECTED_TG = {"Q4_1": 149.0, "Q4_0": 201.0, "Q8_0": 165.0}
"""llama.cpp's tokens per second on SmolLM2-135M: native build, two threads, a machine with AVX-512 VNNI and 34 GB/s."""
_EXPECTED_SHAPE = (30, 576, 49152)
_LONGEST_S = 900.0
_PAUSE_S = 0.05
"""After each timed request: OpenMP's threads spin for some milliseconds after their work, which would be our time."""
_BATCH_STEPS = 8  # tokens of each sequence in the batches by which the attention is chosen
_FAILURE = re.compile(r"assert|error|abort|terminate", re.IGNORECASE)


class PeerError(UserError):
    """A peer failed at a request: its error, or the last words of its process."""


class TimedText(NamedTuple):
    """A text: its token ids, and of all but the first token the seconds and the passes of the target."""

    seconds: float
    tokens: Sequence[int]
    passes: float


class Peer:
    """A peer's process: a `trials.Side` and a `logits.RowEngine` once it has a model. Use as a context manager.

    `flash` says by method of `Side` whether flash attention is on; other methods run as the library chooses.
    """

    load_s = 0.0
    checked: tuple[Check, Check] | None = None  # its logits beside ours, one row at a time and in wide batches
    unchecked: str | None = None  # why those could not be compared

    def __init__(self, name: str, *, option: str = "--peer", patient: bool = False):
        """Starts the child and asks for its version; UserError if it does not start, or lacks packages.

        `option` named the peer, for messages. If nothing is timed (`patient`), its waiting threads leave the processor
        to others.
        """
        self.name, self.kind, self._option = name, PEERS[name], option
        self.flash: dict[str, bool] = {}
        self._on: bool | None = None
        self._methods: dict[int, str] = {}
        self._python = os.environ.get(PYTHON_VARIABLE) or sys.executable
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - lives as long as the child
        script = str(Path(__file__).with_name(self.kind.script))
        try:
            self._child = subprocess.Popen(
                [self._python, "-u", script, *self.kind.arguments],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
                env={**os.environ, **({"OMP_WAIT_POLICY": "passive"} if patient else {})},
            )  # fmt: skip
        except OSError as error:
            self._errors.close()
            raise UserError(f"{PYTHON_VARIABLE}={self._python}: cannot be started: {error.strerror or error}") from None
        assert self._child.stdin is not None and self._child.stdout is not None
        self._requests, self._replies = self._child.stdin, self._child.stdout
        try:
            hello = self.ask(do="hello")
        except BaseException:
            self.close()
            raise
        self.version, self.system_info = hello["version"], hello["system_info"]

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._requests.close()
        try:
            self._child.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._replies.close()
        self._errors.close()

    def ask(self, **request: object) -> Json:
        """The reply to one request.

        UserError if its packages are missing; PeerError if it fails, takes more than 15 minutes, or its process ends.
        """
        watchdog = threading.Timer(_LONGEST_S, self._child.kill)
        watchdog.start()
        try:
            self._requests.write(json.dumps(request) + "\n")
            self._requests.flush()
            reply = json.loads(self._replies.readline())
        except (OSError, ValueError):  # of an empty line too
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(timeout=2)
            self._errors.seek(0)
            lines = [line.strip() for line in self._errors.read().splitlines() if line.strip()]
            lines = [line for line in lines if _FAILURE.search(line)] or lines  # a backtrace may follow
            code = self._child.returncode
            ending = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
            reply = {"error": ": ".join(["its process ended", ending, *(line[:300] for line in lines[-1:])])}
        finally:
            watchdog.cancel()
        if "missing" in reply:
            raise UserError(
                f"{self._option} {self.name} needs {', '.join(self.kind.needs)}: "
                f"{pip_install(*self.kind.needs, python=str(self._python))}, or name an interpreter that has them in "
                f"{PYTHON_VARIABLE} ({reply['missing']})"
            )
        if "error" in reply:
            raise PeerError(f"the peer {self.name} failed: {reply['error']}")
        return reply

    def timed(self, **request: object) -> Json:
        """`ask` for a request whose reply has times; returns when the child's threads rest."""
        reply = self.ask(**request)
        time.sleep(_PAUSE_S)
        return reply

    def load(
        self, model: Path, *, threads: int, room: int, depth: int = 0, tokens: Sequence[int] = (), flash: bool | None
    ) -> None:
        """Loads `model` for up to `room` tokens after `depth` of these `tokens`, with flash attention or without."""
        request = {"model": str(model.resolve()), "threads": threads, "room": room, "depth": depth, "tokens": tokens}
        self.load_s = self.timed(do="open", flash=flash, **request, **self.kind.options)["seconds"]
        self._on = flash

    def open(self, model: Path, config: ModelConfig, *, threads: int, room: int, depth: int) -> None:
        """Loads `model` for timed tests of up to `room` tokens after `depth`."""
        tokens = token_ids(depth + room, config.vocab_size).tolist()
        self.load(model, threads=threads, room=room, depth=depth, tokens=tokens, flash=self.kind.flash or None)

    # A side of a benchmark.

    def attend(self, flash: bool | None) -> None:
        """Goes on with flash attention or without; None as it is."""
        if flash is not None and flash != self._on:
            self.timed(do="attend", flash=flash)
            self._on = flash

    def _seconds(self, method: str, n: int, flash: bool | None) -> float:
        self.attend(flash)
        return self.timed(do=method, n=n)["seconds"]

    def prompt(self, n: int) -> float:
        return self._seconds("prompt", n, self.flash.get("prompt"))

    def decode(self, n: int) -> float:
        return self._seconds("decode", n, self.flash.get("decode"))

    def verify(self, n: int) -> float:
        return self._seconds("verify", n, self.flash.get("verify"))

    def batch(self, prompts: Sequence[Iterable[int]], n: int, flash: bool) -> float:
        """Seconds of n tokens of each sequence behind its prompt, one of each a pass; peers with an "attend" only."""
        return self.timed(do="batch", prompts=[list(map(int, p)) for p in prompts], n=n, flash=flash)["seconds"]

    def speculate(
        self, ids: list[int], n: int, *, drafted: int = 0, draft: Path | None = None, flash: bool | None = None
    ) -> TimedText:
        """n greedy tokens after a prompt and a first token, with drafts of a second model, else by prompt lookup.

        `drafted` 0 is plain decoding. llama.cpp only.
        """
        on = self.flash.get("speculate", False) if flash is None else flash
        file = None if draft is None else str(draft.resolve())
        return TimedText(**self.timed(do="speculate", ids=ids, n=n, drafted=drafted, draft=file, flash=on))

    def choose(self, plan: TrialPlan) -> None:
        """Takes the faster of flash attention on and off for each kind of test, by its longest."""
        longest = {test.method: test for test in plan.tests()}
        for method, test in longest.items() if self.kind.flash else ():
            self.flash[method] = _faster(partial(self._seconds, method, test.n))

    def choose_for_batches(self, sizes: Mapping[int, Sequence[Iterable[int]]], n: int) -> dict[int, bool]:
        """The same for batches of up to n tokens of each sequence, by their number; `sizes` are their prompts.

        The smallest batch stands for `decode` and the largest for `verify` in `check` and in `facts`.
        """
        chosen = {size: _faster(partial(self.batch, prompts, min(n, _BATCH_STEPS))) for size, prompts in sizes.items()}
        self.flash = {"decode": chosen[min(sizes)], "verify": chosen[max(sizes)]}
        return chosen

    def choose_for_writing(self, ids: list[int], n: int) -> None:
        """The same for `speculate`, by a plain text of n tokens."""
        self.flash["speculate"] = _faster(lambda on: self.speculate(ids, n, flash=on).seconds)

    # Its logits.

    def write(self, prompt: Sequence[int], count: int) -> list[int]:
        return list(self.ask(do="write", prompt=list(prompt), count=count, chunk=CHUNK)["tokens"])

    def rows(self, prompt: Sequence[int], text: Sequence[int], width: int) -> np.ndarray:
        self.attend(self.flash.get(self._methods.get(width, "")))
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "rows")
            request = {"prompt": list(prompt), "text": list(text), "width": width, "chunk": CHUNK, "file": str(file)}
            vocabulary = self.ask(do="rows", **request)["vocabulary"]
            logits = np.fromfile(file, np.float32)
        if logits.size != len(text) * vocabulary:
            raise PeerError(f"the peer {self.name} wrote {logits.size} logits for {len(text)} rows")
        return logits.reshape(len(text), -1)

    def routing(self, prompt: Sequence[int], text: Sequence[int], width: int) -> RowRouting:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "routing")
            request = {"prompt": list(prompt), "text": list(text), "width": width, "chunk": CHUNK, "file": str(file)}
            found = self.ask(do="routing", **request)
            each = np.fromfile(file, np.int32).reshape(2, found["layers"], len(text), found["chosen"])
        return RowRouting(each[0], each[1].view(np.float32))

    def check(self, model: Model, *, widest: int, one: str = "decode", wide: str = "verify") -> None:
        """Compares its logits of real text with those of `model`, from the same file, before anything is timed.

        One row and batches of `widest` rows take the attention that was chosen for the methods `one` and `wide`.
        """
        real = text_ids(model.tokenizer, None)[: min(CHECKED, model.config.context_length - widest)]
        self._methods = {1: one, widest: wide}
        try:
            self.checked = real_text(self, OurRows(model, len(real) + widest), real, widest)
        except PeerError as error:
            self.unchecked = str(error)

    def facts(self) -> Json:
        """The facts for a report: "check" has the two of `checked` under "one_row" and "widest"."""
        checked = self.checked and dict(zip(("one_row", "widest"), (part.to_dict() for part in self.checked)))
        return {
            "name": self.name, "version": self.version, "system_info": self.system_info, "load_s": self.load_s,
            "flash": dict(self.flash), "check": checked, "unchecked": self.unchecked,
        }  # fmt: skip


def _faster(seconds: Callable[[bool], float]) -> bool:
    """Whether flash attention is faster, by medians of three interleaved timings; `seconds(on)` runs one."""
    found = interleaved({on: partial(seconds, on) for on in (True, False)}, repeats=3)
    return statistics.median(found[True]) <= statistics.median(found[False])


def perplexities(check: Json) -> str:
    one, wide = (check[how] for how in ("one_row", "widest"))
    theirs = f"{one['perplexity']:.2f} one row at a time, {wide['perplexity']:.2f} in batches"
    return f"perplexity {theirs}; ours {one['ours']:.2f}"


def wrong_logits(peer: Json) -> Iterator[str]:
    """Lines on a peer (see `Peer.facts`) whose figures are not those of this model."""
    if peer["unchecked"]:
        yield f"{peer['name']}: its perplexity was not compared with ours, so take care: {peer['unchecked']}"
    for how, found in (peer["check"] or {}).items():
        if found["wrong"]:
            rows = "one row at a time" if how == "one_row" else "in wide batches"
            yield (
                f"{peer['name']} computes other logits than this model's {rows}: perplexity {found['perplexity']:.4g}, "
                f"ours {found['ours']:.4g}, KL {found['kl']:.2g} nats; its times there are of something else"
            )


def below_expectation(
    config: ModelConfig, kind: str, rate: float, flags: list[str], threads: int, *, depth: int = 0
) -> str | None:
    """A line if llama.cpp decodes more than 20 % under its known figure, else None.

    The figures are for SmolLM2-135M by main tensor type, two threads, AVX-512 and an empty cache.
    """
    expected = EXPECTED_TG.get(kind)
    shape = (config.n_layers, config.d_model, config.vocab_size)
    if expected is None or shape != _EXPECTED_SHAPE or threads < 2 or depth or rate >= 0.8 * expected:
        return None
    line = f"llama.cpp decodes {rate:.0f} tok/s, {1 - rate / expected:.0%} under the {expected:.0f} known for {kind}"
    if "avx512f" not in flags:
        return f"{line} on a machine with AVX-512, which this one lacks"
    return f"{line}: a build without AVX-512, or a busy machine; take the ratio with care"
