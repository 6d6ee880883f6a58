"""A verifier of anybody's, as a callable: what it is handed, and what it hands back.

    def verifier(p, q, drafts, uniforms): ...

* `p` [K+1, V]: row i is the target's distribution after the first i drafts.
* `q` [K, V]: row i is the distribution that `drafts[i]` was drawn from; one-hot rows where the drafts are argmax.
* `drafts` int[K].
* randomness: `uniforms` float[n] in [0, 1), or a `generator` of the array library, a jax `key`, an int `seed`; a
  callable of three arguments has randomness of its own.

It hands back a tuple of two, the number of accepted drafts and the token after them; or a list or array of the tokens
it emits. Everything is of one sequence; a batched callable has a leading axis N everywhere (`seed` and `generator`
excepted), and pads emitted tokens with -1.
"""

import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import SupportsInt

import numpy as np

from specsparse.errors import UserError, own_line
from specsparse.speculative.base import PAD, DraftKind
from specsparse.support.options import nearest

Transform = Callable[[np.ndarray], np.ndarray]
"""float64[V] -> float64[V], both distributions: temperature, truncation, another order of ids."""

ARRAYS = {"numpy": "float64", "torch": "float32", "jax": "float32"}
"""Array libraries, and the precision that each is handed unless it is told otherwise."""

RANDOMNESS = ("uniforms", "generator", "key", "seed", "own")
"""How randomness is handed in; with "own" it is not."""

GRID = {"float64": 1 << 36, "float32": 1 << 24}
"""Values of a uniform by precision: multiples of the grid's step, all below 1 in that precision."""

_NO_NUMBERS = (TypeError, ValueError, OverflowError, RuntimeError)
"""What int() and numpy raise of an object that is no number or array; torch says RuntimeError."""

ALIKE = {"rng": "generator", "gen": "generator"}


@dataclasses.dataclass(frozen=True)
class ExternalVerifier:
    """A callable and how it is handed its arguments. What is left empty follows from the callable.

    Attributes:
        call: yours.
        name: of the lines in reports.
        arrays: one of `ARRAYS`.
        dtype: "float64" or "float32", of p, q and uniforms.
        randomness: one of `RANDOMNESS`; by default the name of the fourth parameter, else "uniforms".
        uniforms: how many of them a call takes at most, 2K+1 by default.
        batched: whether everything has a leading axis N.
        drafts: how drafts are chosen: drawn from q, or its argmax (then q is one-hot).
        greedy: whether p is handed at temperature 0, one-hot.
        target_law: the sampling parameters of the target. With it or `draft_law` the callable is handed the
            distributions before the sampling parameters and applies them itself: `target_law(p)` is what it must keep.
        draft_law: those of the draft: drafts are drawn from `draft_law(q)`.
        samples: sequences of each case; if uniforms are handed in, twice the points drawn anew for a length of draft.
        shortest: tokens of the shortest draft that it is handed; at 0 it must know empty ones.
        lossless: what it promises.
    """

    call: Callable
    name: str = ""
    arrays: str = "numpy"
    dtype: str = ""
    randomness: str = ""
    uniforms: int = 0
    batched: bool = False
    drafts: DraftKind = DraftKind.SAMPLED
    greedy: bool = False
    target_law: Transform | None = None
    draft_law: Transform | None = None
    samples: int = 0
    shortest: int = 0
    lossless: bool = True

    def __post_init__(self):
        fill = functools.partial(object.__setattr__, self)
        fill("name", self.name or getattr(self.call, "__name__", type(self.call).__name__))
        _one_of(self.name, "arrays", self.arrays, tuple(ARRAYS))
        fill("dtype", self.dtype or ARRAYS[self.arrays])
        _one_of(self.name, "dtype", self.dtype, tuple(GRID))
        fill("randomness", self.randomness or _fourth(self.call))
        _one_of(self.name, "randomness", self.randomness, RANDOMNESS)
        fill("samples", self.samples or (200_000 if self.batched else 20_000))
        if self.drafts not in (DraftKind.SAMPLED, DraftKind.ONE_HOT):
            raise UserError(f"{self.name}: drafts are a chain, DraftKind.SAMPLED or DraftKind.ONE_HOT")

    @property
    def exact(self) -> bool:
        """Whether its distribution is enumerated; else it is sampled."""
        return self.randomness == "uniforms"

    @property
    def steps(self) -> int:
        """Values of a uniform."""
        return GRID[self.dtype]

    @property
    def points(self) -> int:
        """Points of uniforms that are drawn anew for drafts of a length."""
        return self.samples // 2

    def room(self, K: int) -> int:
        """How many uniforms a call is handed."""
        return self.uniforms or 2 * K + 1

    def tokens(self, p: np.ndarray, q: np.ndarray, drafts: np.ndarray, random: object) -> np.ndarray:
        """Calls it once and reads what it hands back.

        Args:
            p: float64[K+1, V], or with a leading axis N where it is batched.
            q: float64[K, V], likewise.
            drafts: int64[K], likewise.
            random: float64[n] uniforms, or any other randomness as it is; None hands none.

        Returns:
            int64[K+1], emitted tokens padded with `PAD`, likewise.

        Raises:
            UserError: it raised, or handed back what is no verdict.
        """
        dtype = self.dtype
        given = [_array(self.arrays, p, dtype), _array(self.arrays, q, dtype), _array(self.arrays, drafts, "int64")]
        if isinstance(random, np.ndarray) and self.exact:
            random = _array(self.arrays, random, dtype)
        try:
            back = self.call(*given, *(() if self.randomness == "own" else (random,)))
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            hint = (
                f"; ExternalVerifier(..., uniforms=n) hands more than {random.shape[-1]}"
                if _too_few(error, random)
                else ""
            )
            hint = hint if drafts.shape[-1] else "; on an empty draft: ExternalVerifier(..., shortest=1) hands it none"
            at = f" ({line})" if (line := own_line(error)) else ""
            raise UserError(f"{self.name} raised {type(error).__name__}: {error}{at}{hint}") from error
        K, V = drafts.shape[-1], p.shape[-1]
        found = (_rows if self.batched else _row)(back, drafts, V)
        if found is None:
            raise UserError(
                f"{self.name} handed back {_short(back)}: hand back a tuple (accepted 0..{K}, next token), or a list "
                f"of 1..{K + 1} tokens, each below {V}"
            )
        return found


def external(verifier: object) -> ExternalVerifier:
    """A `ExternalVerifier` as it is, anything callable with the defaults.

    Raises:
        UserError: it cannot be called.
    """
    if isinstance(verifier, ExternalVerifier):
        return verifier
    if not callable(verifier):
        raise UserError(f"{_short(verifier)} is no verifier: a name, a Verifier, a ExternalVerifier, or a callable is")
    return ExternalVerifier(verifier)


def generator(how: ExternalVerifier, seed: int) -> object:
    """The one generator of a run of calls, of the callable's array library; None where it takes none.

    Keys and seeds are made for each call by `SeedSequence`, see `fresh`.
    """
    if how.randomness != "generator":
        return None
    if how.arrays == "torch":
        return importlib.import_module("torch").Generator().manual_seed(seed)
    return np.random.default_rng([seed, 5])


def fresh(how: ExternalVerifier, rng: np.random.Generator, flowing: object) -> object:
    """Randomness of one call: `flowing` itself, or a new seed or key."""
    if how.randomness == "seed":
        return int(rng.integers(1 << 31))
    if how.randomness == "key":
        return importlib.import_module("jax").random.key(int(rng.integers(1 << 31)))
    return flowing


def _one_of(name: str, what: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise UserError(f"{name}: {what}={value!r} is none of {', '.join(choices)}{nearest(value, choices)}")


def _fourth(call: Callable) -> str:
    """How randomness is handed in, by the name of the fourth parameter."""
    try:
        named = list(inspect.signature(call).parameters.values())
    except (TypeError, ValueError):
        return "uniforms"
    if any(p.kind is p.VAR_POSITIONAL for p in named):
        return "uniforms"
    places = [p.name for p in named if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(places) < 4:
        return "own"
    word = ALIKE.get(places[3], places[3])
    return word if word in RANDOMNESS else "uniforms"


def _array(arrays: str, values: np.ndarray, dtype: str) -> object:
    """A copy of its own: a callable may write into it."""
    copy = np.array(values, dtype)
    if arrays == "torch":
        return importlib.import_module("torch").from_numpy(copy)
    return importlib.import_module("jax.numpy").asarray(copy) if arrays == "jax" else copy


def _too_few(error: Exception, random: object) -> bool:
    """Whether the index lies beyond the uniforms: numpy and torch name the length of what was indexed."""
    return isinstance(error, IndexError) and str(error).endswith(f"size {getattr(random, 'shape', [None])[-1]}")


def _row(back: object, drafts: np.ndarray, V: int) -> np.ndarray | None:
    """int64[K+1], the emitted tokens of one sequence; None where they are no verdict."""
    room = len(drafts) + 1
    try:
        if isinstance(back, tuple) and len(back) == 2:
            accepted, token = _whole(back[0]), _whole(back[1])
            tokens = [*drafts[:accepted].tolist(), token] if 0 <= accepted < room else []
        else:
            tokens = [_whole(x) for x in np.asarray(back).tolist()]
    except _NO_NUMBERS:
        return None
    while tokens and tokens[-1] == PAD:
        tokens.pop()
    if not 1 <= len(tokens) <= room or min(tokens) < 0 or max(tokens) >= V:
        return None
    return np.array(tokens + [PAD] * (room - len(tokens)), np.int64)


def _rows(back: object, drafts: np.ndarray, V: int) -> np.ndarray | None:
    """int64[N, K+1], the emitted tokens of a batch; None where a row is no verdict."""
    N, K = drafts.shape
    place = np.arange(K + 1)
    try:
        if isinstance(back, tuple) and len(back) == 2:
            accepted, token = (_all_whole(part).reshape(N, 1) for part in back)
            tokens = np.where(place < accepted, np.pad(drafts, ((0, 0), (0, 1))), PAD)
            tokens = np.where(place == accepted, token, tokens)
            if (accepted < 0).any() or (accepted > K).any():
                return None
        else:
            tokens = _all_whole(back)
    except _NO_NUMBERS:
        return None
    if tokens.ndim != 2 or len(tokens) != N or tokens.shape[1] > K + 1:
        return None
    tokens = np.pad(tokens, ((0, 0), (0, K + 1 - tokens.shape[1])), constant_values=PAD)
    count = (tokens != PAD).sum(axis=1, keepdims=True)
    real = place < count
    right = (count >= 1).all() and (tokens[real] >= 0).all() and (tokens < V).all()
    return tokens if right else None


def _whole(value: SupportsInt) -> int:
    """A whole number; 0.5, infinity and NaN are none."""
    found = int(value)
    if found != value:
        raise ValueError
    return found


def _all_whole(values: object) -> np.ndarray:
    """int64, of whole numbers alone."""
    given = np.asarray(values)
    with np.errstate(invalid="ignore"):  # of NaN and infinity, which the comparison finds
        found = given.astype(np.int64)
    if not np.array_equal(found, given):
        raise ValueError
    return found


def _short(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."
