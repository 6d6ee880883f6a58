"""A verifier of anybody's, as a callable: its arguments and its result. Importing this needs numpy alone.

    def verifier(p, q, drafts, uniforms): ...
    def tree_verifier(p, q, drafts, parents, uniforms): ...

* `p` [K+1, V]: row 0 is the target's distribution before the first draft, row 1+i the one after draft i (and, in a
  tree, after those on the way to it).
* `q` [K, V]: row i is the distribution that `drafts[i]` was drawn from; one-hot rows if the drafts are argmax, or top
  ranks. Without replacement it is that without the elder siblings, normalised.
* `drafts` int[K].
* `parents` int[K] of a tree: the draft before each, -1 for those that follow the text. Siblings stand in draw order.
* randomness: `uniforms` float[n] in [0, 1), or a `generator` of the array library, a jax `key`, an int `seed`; a
  callable without that argument has randomness of its own.

It returns a tuple of two, the number of accepted drafts (of a tree: their indices, the first one first) and the token
after them; or a list or array of the tokens it emits. Everything is of one sequence; a batched callable has a leading
axis N everywhere (`seed` and `generator` excepted), and pads tokens and indices with -1.
"""

import dataclasses
import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import numpy as np

from specsparse.engine.pytree import AnyArray
from specsparse.errors import UserError, own_line, refuse
from specsparse.speculative.base import PAD, ROOT, DraftKind
from specsparse.support.options import Range, checked, nearest, options_of

Transform = Callable[[np.ndarray], np.ndarray]
"""float64[V] -> float64[V], both distributions: temperature, truncation, another order of ids."""

ARRAYS = {"numpy": "float64", "torch": "float32", "jax": "float32"}
"""Array libraries, and the default precision of each."""

RANDOMNESS = ("uniforms", "generator", "key", "seed", "own")
"""The forms of randomness; "own" passes none."""

GRID = {"float64": 1 << 36, "float32": 1 << 24}
"""Values of a uniform by precision: multiples of the grid's step, all below 1 in that precision."""


@dataclasses.dataclass(frozen=True)
class ExternalVerifier:
    """A callable and the form of its arguments. Empty fields follow from the callable.

    Attributes:
        call: yours.
        name: of the lines in reports.
        arrays: one of `ARRAYS`.
        dtype: "float64" or "float32", of p, q and uniforms.
        randomness: one of `RANDOMNESS`; by default the name of the fourth parameter, else "uniforms".
        uniforms: how many of them a call takes at most, 2K+1 by default.
        batched: whether everything has a leading axis N.
        tree: whether it judges trees; by default if its fourth parameter is `parents`.
        drafts: how drafts are chosen: drawn from q, or its argmax (then q is one-hot). Of a tree: siblings drawn
            independently (the default), without replacement, or the top ranks.
        greedy: whether p is that of temperature 0, one-hot.
        target_transform: the sampling parameters of the target. With it or `draft_transform` the callable gets the
            distributions before the sampling parameters and applies them itself: `target_transform(p)` is what it must
            keep.
        draft_transform: those of the draft: drafts are drawn from `draft_transform(q)`.
        samples: sequences of each case; for a callable of uniforms, twice the random points for a length of draft.
        shortest: tokens of the shortest draft that it gets; at 0 it must know empty ones.
        lossless: its promise.
    """

    call: Callable
    name: str = ""
    arrays: str = "numpy"
    dtype: str = ""
    randomness: str = ""
    uniforms: Annotated[int, Range(0, 4096)] = 0
    batched: bool = False
    tree: bool | None = None
    drafts: DraftKind | None = None
    greedy: bool = False
    target_transform: Transform | None = None
    draft_transform: Transform | None = None
    samples: Annotated[int, Range(0, 10**8)] = 0  # arrays of them fit into memory
    shortest: Annotated[int, Range(0, 64)] = 0
    lossless: bool = True

    def __post_init__(self):
        fill = functools.partial(object.__setattr__, self)
        fill("name", self.name or getattr(self.call, "__name__", type(self.call).__name__))
        fill("dtype", self.dtype or ARRAYS.get(self.arrays, ""))
        names = _parameters(self.call)
        fill("tree", names[3:4] == ["parents"] if self.tree is None else self.tree)
        fill("randomness", self.randomness or _randomness_of(names, 4 if self.tree else 3))
        wrong = {}
        for option, choices in (("arrays", ARRAYS), ("dtype", GRID), ("randomness", RANDOMNESS)):
            value = getattr(self, option)
            wrong[f"{option}={value!r} is unknown{nearest(str(value), choices)}"] = value not in choices
        for option in ("uniforms", "samples", "shortest"):
            own = options_of(ExternalVerifier)[option]
            fill(option, checked(own, getattr(self, option), f"{self.name}: {option}"))
        fit = (DraftKind.ONE_HOT, *((DraftKind.IID, DraftKind.WOR) if self.tree else (DraftKind.SAMPLED,)))
        what = "of a tree" if self.tree else "a chain"
        wrong[f"drafts are {what}: {', '.join(kind.value for kind in fit)}"] = self.kind not in fit
        refuse(wrong, self.name)
        for library in {self.arrays, "jax" if self.randomness == "key" else "numpy"} - {"numpy"}:
            refuse({f"needs {library}, which is not installed": not importlib.util.find_spec(library)}, self.name)
        fill("samples", max(self.samples, 2) if self.samples else 200_000 if self.batched else 20_000)

    @property
    def kind(self) -> DraftKind:
        return self.drafts or (DraftKind.IID if self.tree else DraftKind.SAMPLED)

    @property
    def exact(self) -> bool:
        """Whether its distribution is enumerated; else it is sampled."""
        return self.randomness == "uniforms"

    @property
    def steps(self) -> int:
        return GRID[self.dtype]

    @property
    def signature(self) -> str:
        """How it is called, and what it returns, in a line."""
        rows = "N, " if self.batched else ""
        given = [f"p [{rows}K+1, V]", f"q [{rows}K, V]", f"drafts int[{rows}K]"]
        given += [f"parents int[{rows}K]"] if self.tree else []
        if self.randomness != "own":
            given.append(f"uniforms [{rows}n]" if self.exact else self.randomness)
        name = self.name if self.name.isidentifier() else "verifier"
        accepted = "indices of the accepted drafts" if self.tree else "number of accepted drafts"
        return f"{name}({', '.join(given)}) -> ({accepted}, next token)"

    def tokens(
        self, p: np.ndarray, q: np.ndarray, drafts: np.ndarray, random: Any, parents: AnyArray = None
    ) -> np.ndarray:
        """Calls it once and reads its result. A batched one has a leading axis N in all arguments and the result.
        UserError: it raised, or its result is no verdict.

        Args:
            p: float64[K+1, V].
            q: float64[K, V].
            drafts: int64[K].
            random: float64[n] uniforms, or any other randomness as it is.
            parents: int64[K], of a tree.

        Returns:
            int64[K+1], emitted tokens padded with `PAD`.
        """
        K, V = drafts.shape[-1], p.shape[-1]
        given = [self._array(p, self.dtype), self._array(q, self.dtype), self._array(drafts, "int64")]
        if self.tree:
            given.append(self._array(np.broadcast_to(parents, drafts.shape), "int64"))
        if self.randomness != "own":
            given.append(self._array(random, self.dtype) if self.exact else random)
        try:
            back = self.call(*given)
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            hint, at = "", f" ({line})" if (line := own_line(error)) else ""
            if isinstance(error, TypeError) and not at:  # it was called with arguments that it does not take
                hint = f": it must be {self.signature}"
            elif not K:
                hint = "; on an empty draft: ExternalVerifier(..., shortest=1) gives it none"
            elif self.exact and isinstance(error, IndexError) and str(error).endswith(f"size {np.shape(random)[-1]}"):
                # numpy and torch name the length of the array whose index is too large
                hint = f"; ExternalVerifier(..., uniforms=n) gives more than {np.shape(random)[-1]}"
            raise UserError(f"{self.name} raised {type(error).__name__}: {error}{at}{hint}") from error
        if plain := self._plain(back, drafts, parents, V):
            return np.array(plain + [PAD] * (K + 1 - len(plain)), np.int64)
        batch = (back, drafts) if self.batched else (self._as_batch(back), drafts[None])
        emitted = _emitted(*batch, V, parents if self.tree else None)
        if emitted is None:
            accepted = "path of accepted indices" if self.tree else f"accepted 0..{K}"
            raise UserError(
                f"{self.name} returned {_short(back)}: return a tuple ({accepted}, next token), or a list of "
                f"1..{K + 1} tokens, each below {V}; it must be {self.signature}"
            )
        return emitted if self.batched else emitted[0]

    def _plain(self, back: object, drafts: np.ndarray, parents: AnyArray, V: int) -> list[int] | None:
        """The emitted tokens of a result of one sequence in plain numbers, None of any other.

        A hundred thousand calls return these, and arrays would take most of the time.
        """
        K = drafts.shape[-1]
        if not self.batched and type(back) is list:
            return back if len(back) <= K + 1 and all(type(t) is int and 0 <= t < V for t in back) else None
        if self.batched or not isinstance(back, tuple) or len(back) != 2 or type(back[1]) is not int:
            return None
        path, token = back
        if not 0 <= token < V:
            return None
        if not self.tree:
            return [*drafts[:path], token] if type(path) is int and 0 <= path <= K else None
        above = ROOT
        for node in path if type(path) is list else [None]:
            if type(node) is not int or not 0 <= node < K or parents[node] != above:
                return None
            above = node
        return [*drafts[path], token]

    def _as_batch(self, back: object) -> object:
        """The result of one sequence as that of a batch of one."""
        if isinstance(back, tuple) and len(back) == 2:
            return tuple([part.item() if hasattr(part, "item") and not np.ndim(part) else part] for part in back)
        return [back]

    def _array(self, values: object, dtype: str) -> object:
        """A copy of its own: a callable may write into it."""
        copy = np.array(values, dtype)
        if self.arrays == "torch":
            return importlib.import_module("torch").from_numpy(copy)
        return importlib.import_module("jax.numpy").asarray(copy) if self.arrays == "jax" else copy

    def random_source(self, rng: np.random.Generator, seed: int) -> Callable[[], object]:
        """Makes the randomness of each call, for a callable that draws its own samples.

        Seeds and keys are new for each call; one generator of the array library serves all calls.
        """
        if self.randomness == "seed":
            return lambda: int(rng.integers(1 << 31))
        if self.randomness == "key":
            make_key = importlib.import_module("jax").random.key
            return lambda: make_key(int(rng.integers(1 << 31)))
        one = None
        if self.randomness == "generator" and self.arrays == "torch":
            one = importlib.import_module("torch").Generator().manual_seed(seed)
        elif self.randomness == "generator":
            one = np.random.default_rng([seed, 5])
        return lambda: one


def external(verifier: object) -> ExternalVerifier:
    """An `ExternalVerifier` as it is, anything callable with the defaults."""
    if isinstance(verifier, ExternalVerifier):
        return verifier
    if not callable(verifier):
        raise UserError(
            f"{_short(verifier)} is no verifier: a name, a Verifier, an ExternalVerifier or a callable is one"
        )
    return ExternalVerifier(verifier)


def _parameters(call: Callable) -> list[str]:
    """Names of the positional parameters, none if they are not known: written in C, or any number of them."""
    try:
        parameters = list(inspect.signature(call).parameters.values())
    except (TypeError, ValueError):
        return []
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _randomness_of(names: list[str], place: int) -> str:
    """The form of randomness, by the name of the parameter behind the drafts."""
    if len(names) == place:
        return "own"
    name = names[place] if len(names) > place else "uniforms"  # of too few, it is told how it must be
    name = {"rng": "generator", "gen": "generator"}.get(name, name)
    return name if name in RANDOMNESS else "uniforms"


def _emitted(back: object, drafts: np.ndarray, V: int, parents: np.ndarray | None) -> np.ndarray | None:
    """int64[N, K+1], the emitted tokens of a batch, or None if a row is no verdict."""
    (N, K), place = drafts.shape, np.arange(drafts.shape[1] + 1)
    try:
        if isinstance(back, tuple) and len(back) == 2 and parents is not None:
            tokens = _along_path(back, drafts, parents)
        elif isinstance(back, tuple) and len(back) == 2:
            accepted, token = (_whole_numbers(part).reshape(N, 1) for part in back)
            if (accepted < 0).any() or (accepted > K).any():
                return None
            tokens = np.full((N, K + 1), PAD, np.int64)
            tokens[:, :K] = np.where(place[:K] < accepted, drafts, PAD)
            np.put_along_axis(tokens, accepted, token, axis=1)
        else:
            tokens = _whole_numbers(back)
    except Exception:  # no numbers; an object of anybody's may raise anything when it is read as an array
        return None
    if tokens.ndim != 2 or len(tokens) != N or (tokens[:, K + 1 :] != PAD).any():
        return None
    whole = np.full((N, K + 1), PAD, np.int64)
    whole[:, : tokens.shape[1]] = tokens[:, : K + 1]
    count = (whole != PAD).sum(axis=1, keepdims=True)
    sound = (count >= 1).all() and (whole[place < count] >= 0).all() and (whole < V).all()
    return whole if sound else None


def _along_path(back: tuple, drafts: np.ndarray, parents: np.ndarray) -> np.ndarray:
    """int64[N, K+1], the tokens of accepted nodes int[N, ..], and the one after them. ValueError: the nodes are no path
    from the root down."""
    (N, K), tokens = drafts.shape, np.full((len(drafts), drafts.shape[1] + 1), PAD, np.int64)
    for row, nodes, token in zip(range(N), back[0], _whole_numbers(back[1]).reshape(N), strict=True):
        path = [node for node in list(_whole_numbers(nodes)) if node != PAD]  # a number is no path: a TypeError
        if any(not 0 <= node < K or parents[node] != above for node, above in zip(path, [ROOT, *path])):
            raise ValueError
        tokens[row, : len(path)] = drafts[row, path]
        tokens[row, len(path)] = token
    return tokens


def _whole_numbers(values: object) -> np.ndarray:
    """int64 of whole numbers; of any other, such as 0.5, NaN or infinity, a ValueError."""
    given = np.asarray(values)
    with np.errstate(invalid="ignore"):  # of NaN and infinity, which the comparison finds
        whole = given.astype(np.int64)
    if not np.array_equal(whole, given):
        raise ValueError
    return whole


def _short(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."
