"""Engines that are audited: ours, and peers in processes of their own, behind one small interface."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import jax.numpy as jnp
import numpy as np

from specsparse import kernels
from specsparse.engine import cache as kv
from specsparse.engine.feed import feed
from specsparse.engine.model import Model
from specsparse.tools.peers.check import Check, Judge
from specsparse.tools.peers.process import PEERS, PeerError, PeerProcess

OURS = "specsparse"
ENGINES = (OURS, *PEERS)
PIECE = 16
"""Rows of a prompt's batches, the same for every width that is asked about."""
CHECKED = 128
"""Tokens of real text whose perplexity a peer must share with us."""
_PATIENT = {"OMP_WAIT_POLICY": "passive"}  # nothing is timed: threads that wait leave the processor to others


class RowEngine(Protocol):
    """A model that is open; tokens are ids of its vocabulary, V of them."""

    version: str

    def write(self, prompt: Sequence[int], count: int) -> list[int]:
        """The greedy continuation of a prompt, one row at a time; no token ends it."""

    def rows(self, prompt: Sequence[int], text: Sequence[int], width: int) -> np.ndarray:
        """float32[len(text), V]: the logits of a text behind a prompt, in batches of `width` rows."""

    def close(self) -> None:
        """Gives back what it holds."""


class OurRows:
    """specsparse: the forward pass of the speculative loop, in programs of `width` rows."""

    def __init__(self, model: Model, room: int, threads: int | None = None):
        """Takes a cache of `room` tokens; `threads` as in `specsparse.load`."""
        if threads is not None:
            kernels.set_threads(threads)
        self.version = f"{model.facts()['kernels']} kernels"
        capacity = model.capacity_for(room)
        self._model, self._params = model, model.params_for(capacity)
        self._cache, self._prompt = model.new_cache(1, capacity), None

    def _feed(self, ids: Sequence[int], width: int) -> np.ndarray:
        program, text, out = self._model.logits_program, np.asarray(ids, np.int32), []
        for fed in feed(lambda p, c: program(self._params, *p.arrays, c), [text], self._cache, rows=width):
            self._cache = fed.cache
            out.append(np.asarray(fed.out)[: fed.piece.count[0]])
        return np.concatenate(out)

    def _begin(self, prompt: Sequence[int]) -> np.ndarray | None:
        """A cache of the prompt alone; the logits of its last token, or None where it was there already."""
        known = tuple(prompt) == self._prompt
        self._cache = kv.rollback(self._cache, jnp.full((1,), len(prompt) if known else 0, jnp.int32))
        self._prompt = tuple(prompt)
        return self._feed(prompt, PIECE)[-1] if prompt and not known else None

    def write(self, prompt: Sequence[int], count: int) -> list[int]:
        """See `RowEngine`."""
        self._prompt = None
        last = self._begin(prompt)
        out = [int(last.argmax())]
        while len(out) < count:
            out.append(int(self._feed(out[-1:], 1)[0].argmax()))
        return out

    def rows(self, prompt: Sequence[int], text: Sequence[int], width: int) -> np.ndarray:
        """See `RowEngine`."""
        self._begin(prompt)
        return self._feed(text, width)

    def close(self) -> None:
        """Nothing is held outside of the process."""


class PeerRows:
    """A peer that is open; its logits come in a file."""

    def __init__(self, process: PeerProcess):
        """Takes over a process in which a model was opened."""
        self._process, self.version = process, process.version

    @classmethod
    def start(cls, name: str, model: Path, room: int, *, threads: int, flash: bool | None) -> "PeerRows":
        """Starts a process and loads the model for `room` tokens.

        Raises:
            UserError: the peer is missing.
            PeerError: it cannot load the file, or ended.
        """
        process = PeerProcess(name, option="--engine", environment=_PATIENT)
        request = {"model": str(model.resolve()), "threads": threads, "room": room, "depth": 0, "tokens": []}
        try:
            process.ask(do="open", flash=flash, **request, **process.kind.options)
        except BaseException:
            process.close()
            raise
        return cls(process)

    def write(self, prompt: Sequence[int], count: int) -> list[int]:
        """See `RowEngine`; PeerError as below."""
        return list(self._process.ask(do="write", prompt=list(prompt), count=count, pieces=PIECE)["tokens"])

    def rows(self, prompt: Sequence[int], text: Sequence[int], width: int) -> np.ndarray:
        """See `RowEngine`.

        Raises:
            PeerError: it failed, or its process ended.
        """
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "rows")
            said = self._process.ask(
                do="rows", prompt=list(prompt), text=list(text), width=width, pieces=PIECE, file=str(file)
            )
            found = np.fromfile(file, np.float32)
        if found.size != len(text) * said["vocabulary"]:
            raise PeerError(f"the peer {self._process.name} wrote {found.size} logits for {len(text)} rows")
        return found.reshape(len(text), -1)

    def close(self) -> None:
        """Ends the process."""
        self._process.close()


def whole_batches(text: Sequence[int], width: int) -> list[int]:
    """The text, filled up with its own beginning to whole batches: no row is computed in a smaller one."""
    missing = -len(text) % width
    return [*text, *(text[i % len(text)] for i in range(missing))]


def rows_by(engine: RowEngine, prompt: Sequence[int], text: Sequence[int], width: int) -> np.ndarray:
    """The text's rows float32[len(text), V], each computed in a batch of exactly `width`."""
    return engine.rows(prompt, whole_batches(text, width), width)[: len(text)]


def real_text(engine: RowEngine, ours: RowEngine, real: Sequence[int], widest: int) -> tuple[Check, Check]:
    """Real text one row at a time and in batches of `widest` rows, beside ours.

    Raises:
        PeerError: the engine failed.
    """
    judge = Judge(rows_by(ours, (), real, PIECE), np.asarray(real))
    one, wide = (judge.check(str(width).encode(), rows_by(engine, (), real, width)) for width in (1, widest))
    return one, wide
