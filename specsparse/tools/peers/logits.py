"""Logits of the same rows by specsparse and by other engines: whether they are the model's, from one text by any width.

`Judge` compares an engine's rows with ours. Rounding moves a distribution by about 0.001 nats, a defect of a kernel by
whole nats; the speed and the forks of an engine, or a width, whose logits are wrong say nothing.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np

from specsparse.data import prompts
from specsparse.engine import cache as kv
from specsparse.engine.llama import Want
from specsparse.engine.model import Model
from specsparse.engine.prefill import prefill
from specsparse.engine.text.tokenizer import Tokenizer
from specsparse.support.files import Json, read_text

OURS = "specsparse"
CHUNK = 16
"""Rows of a prompt's batches, the same for every width."""
CHECKED = 128
"""Tokens of real text whose perplexity a peer must share with us."""
MOST_KL = 0.1
"""Mean KL(ours, theirs) in nats from which logits are wrong; eight-bit activations move it by 0.001 to 0.01."""
MOST_NLL = 0.1
"""The same for the difference of the mean negative log-likelihoods: a perplexity 10 % apart."""


class RowRouting(NamedTuple):
    """Experts int32[L, T, k] and weights float32[L, T, k] of T rows in L layers, best first."""

    experts: np.ndarray
    weights: np.ndarray


class RowEngine(Protocol):
    """A model that is open; tokens are ids of its vocabulary, V of them. A peer may raise PeerError."""

    version: str

    def write(self, prompt: Sequence[int], count: int) -> list[int]:
        """The greedy continuation of a prompt, one row at a time; no token ends it."""

    def rows(self, prompt: Sequence[int], text: Sequence[int], width: int) -> np.ndarray:
        """float32[len(text), V]: the logits of a text behind a prompt, in batches of `width` rows."""

    def close(self) -> None:
        """Gives back the memory and files that it holds."""


class OurRows:
    """specsparse: the forward pass of the speculative loop, in programs of `width` rows."""

    def __init__(self, model: Model, room: int):
        self.version = f"{model.facts()['kernels']} kernels"
        capacity = model.capacity_for(room)
        self._model, self._params = model, model.params_for(capacity)
        self._cache = model.new_cache(1, capacity)
        self._prompt: tuple[int, ...] | None = None

    def _passes(self, program: Callable, ids: Sequence[int], width: int) -> Iterator[tuple[int, Any]]:
        """Feeds ids; the rows of each pass and what the program gave for them."""
        text = np.asarray(ids, np.int32)
        for chunk, out, after in prefill(
            lambda c, kv: program(self._params, *c.arrays, kv), [text], self._cache, rows=width
        ):
            self._cache = after
            yield int(chunk.count[0]), out

    def _feed(self, ids: Sequence[int], width: int) -> np.ndarray:
        passes = self._passes(self._model.logits_program, ids, width)
        return np.concatenate([np.asarray(logits)[:count] for count, logits in passes])

    def _begin(self, prompt: Sequence[int]) -> np.ndarray | None:
        """A cache of the prompt alone; the logits of its last token, or None if it was there already."""
        known = tuple(prompt) == self._prompt
        self._cache = kv.rollback(self._cache, jnp.full((1,), len(prompt) if known else 0, jnp.int32))
        self._prompt = tuple(prompt)
        return self._feed(prompt, CHUNK)[-1] if prompt and not known else None

    def write(self, prompt: Sequence[int], count: int) -> list[int]:
        self._prompt = None
        last = self._begin(prompt)
        assert last is not None
        out = [int(last.argmax())]
        while len(out) < count:
            out.append(int(self._feed(out[-1:], 1)[0].argmax()))
        return out

    def rows(self, prompt: Sequence[int], text: Sequence[int], width: int) -> np.ndarray:
        self._begin(prompt)
        return self._feed(text, width)

    def routing(self, prompt: Sequence[int], text: Sequence[int], width: int) -> RowRouting:
        """The experts of a text behind a prompt, in batches of `width` rows; of a model that has experts."""
        model = self._model

        def chosen(params, tokens, n_valid, cache):
            out, cache = model.forward(params, tokens, cache, n_valid_B=n_valid, want=Want(logits="none"))
            return out.stats, kv.commit(cache, n_valid)

        program = model.programs.once(("routing",), lambda: model.devices.jit(chosen, donate_argnums=3))
        self._begin(prompt)
        passes = self._passes(program, text, width)
        found = [[np.asarray(a)[:, :count] for a in (out.experts, out.weights)] for count, out in passes]
        return RowRouting(*(np.concatenate(parts, axis=1) for parts in zip(*found, strict=True)))

    def close(self) -> None:
        pass


def filled(text: Sequence[int], width: int) -> list[int]:
    """The text, filled up with its own beginning to whole batches, so that no row is computed in a smaller one."""
    return [text[i % len(text)] for i in range(len(text) + -len(text) % width)]


def rows_by(engine: RowEngine, prompt: Sequence[int], text: Sequence[int], width: int) -> np.ndarray:
    """The text's rows float32[len(text), V], each computed in a batch of exactly `width`."""
    return engine.rows(prompt, filled(text, width), width)[: len(text)]


def text_ids(tokenizer: Tokenizer, file: Path | None) -> list[int]:
    """The tokens of a file, or of the built-in prompts; UserError if the file cannot be read."""
    if file is None:
        return tokenizer.encode("\n\n".join(prompt.text for prompt in prompts.load()))
    return tokenizer.encode(read_text(file, f"--text {file}"))


@dataclass(frozen=True)
class Check:
    """Their logits beside ours: sums over scored rows."""

    tokens: int  # whose likelihood was scored
    nll: float  # their negative log-likelihood in nats
    ours_nll: float
    rows: int  # whose distribution was compared
    kl: float  # KL(ours, theirs) in nats

    def plus(self, other: "Check") -> "Check":
        return Check(self.tokens + other.tokens, self.nll + other.nll, self.ours_nll + other.ours_nll,
                     self.rows + other.rows, self.kl + other.kl)  # fmt: skip

    @property
    def wrong(self) -> bool:
        """Whether they are too far from ours to be the same model's; NaN is wrong."""
        apart = abs(self.nll - self.ours_nll) / self.tokens
        return not (self.kl / self.rows <= MOST_KL and apart <= MOST_NLL)

    def to_dict(self) -> Json:
        theirs, ours = (nll / self.tokens for nll in (self.nll, self.ours_nll))
        theirs, ours = (math.exp(nll) if nll < 700 else math.inf for nll in (theirs, ours))
        kl = self.kl / self.rows
        return {"tokens": self.tokens, "perplexity": theirs, "ours": ours, "kl": kl, "wrong": self.wrong}


class Judge:
    """Our distributions at the rows of one text; rows that were judged once are not judged again."""

    def __init__(self, ours_TV: np.ndarray, text_T: np.ndarray):
        """Takes our logits float32[T, V] and the tokens int[T] that the rows read, at least two."""
        self._ours_TV, self._next = _log_softmax(ours_TV), np.asarray(text_T[1:], np.int64)
        self._known: dict[bytes, Check] = {}

    def check(self, digest: bytes, rows_TV: np.ndarray) -> Check:
        """Their logits on the same rows; `digest` is of their bits."""
        if digest not in self._known:
            n = len(self._next)
            with np.errstate(invalid="ignore", over="ignore"):
                theirs_TV = _log_softmax(rows_TV)
                kl_T = (np.exp(self._ours_TV) * (self._ours_TV - theirs_TV)).sum(axis=1, dtype=np.float64)
            scored = (theirs_TV, self._ours_TV)
            nll, ours = (-float(a[np.arange(n), self._next].sum(dtype=np.float64)) for a in scored)
            self._known[digest] = Check(n, nll, ours, len(rows_TV), float(kl_T.sum()))
        return self._known[digest]


def _log_softmax(logits_TV: np.ndarray) -> np.ndarray:
    shifted = logits_TV - logits_TV.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def real_text(engine: RowEngine, ours: RowEngine, ids: Sequence[int], widest: int) -> tuple[Check, Check]:
    """Real text one row at a time and in batches of `widest` rows, beside ours."""
    judge = Judge(rows_by(ours, (), ids, CHUNK), np.asarray(ids))
    one, wide = (judge.check(str(width).encode(), rows_by(engine, (), ids, width)) for width in (1, widest))
    return one, wide
