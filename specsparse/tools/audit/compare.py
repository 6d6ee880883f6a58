"""Logits of the same rows computed by several widths: which widths share bits, and what the others change.

T rows, a vocabulary of V. The row at position i reads the given token i and predicts the one after it.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from specsparse.measure import intervals
from specsparse.support.files import Json
from specsparse.tools.peers.check import Check, Judge


class Flip(NamedTuple):
    """A row whose most likely token is another one than alone.

    Attributes:
        window: of the text.
        position: of the row; decoding writes another token as number `position` + 1 of the given ones, from 0.
        one_row, batch: the most likely token alone and in a batch.
        margin: logit of `one_row` minus that of the second most likely token, alone.
    """

    window: str
    position: int
    one_row: int
    batch: int
    margin: float


class Rate(NamedTuple):
    """Events for each thousand positions, with the 95 % interval of `intervals.binomial`; independent positions."""

    per_1000: float
    low: float
    high: float

    def __str__(self) -> str:
        """For a cell of a table."""
        return f"{self.per_1000:.1f} ({self.low:.1f} to {self.high:.1f})"


def rate(count: int, positions: int) -> Rate:
    """Of `count` events at so many positions, at least one."""
    low, high = intervals.binomial(count, positions)
    return Rate(1000 * count / positions, 1000 * low, 1000 * high)


@dataclass
class Tally:
    """What one width came to, window by window.

    Attributes:
        width: rows of a batch.
        positions: rows compared.
        rows_differing: rows with other bits than alone.
        largest: of the differences of logits; infinite where one of them is no number.
        flips: in order.
        check: this width beside our logits, or None.
    """

    width: int
    positions: int = 0
    rows_differing: int = 0
    largest: float = 0.0
    flips: list[Flip] = field(default_factory=list)
    check: Check | None = None
    _bits: list[bytes] = field(default_factory=list)

    def add(self, window: str, one_TV: np.ndarray, rows_TV: np.ndarray, judge: Judge | None = None) -> None:
        """A window's rows alone and in batches, float32[T, V] each; `judge` knows what ours are there."""
        digest = hashlib.sha256(np.ascontiguousarray(rows_TV)).digest()
        other = np.flatnonzero((rows_TV.view(np.uint32) != one_TV.view(np.uint32)).any(axis=1))
        self._bits.append(digest)
        self.positions += len(rows_TV)
        self.rows_differing += len(other)
        if len(other):
            self._differing(window, one_TV[other], rows_TV[other], other)
        if judge is not None:
            found = judge.check(digest, rows_TV)
            self.check = found if self.check is None else self.check.plus(found)

    def _differing(self, window: str, one_nV: np.ndarray, rows_nV: np.ndarray, at_n: np.ndarray) -> None:
        with np.errstate(invalid="ignore"):
            apart = np.abs(rows_nV.astype(np.float64) - one_nV)
        apart[one_nV == rows_nV] = 0.0  # infinities too
        self.largest = max(self.largest, float(np.where(np.isnan(apart), np.inf, apart).max()))
        best_n, now_n = one_nV.argmax(axis=1), rows_nV.argmax(axis=1)
        for i in np.flatnonzero(best_n != now_n):
            second, first = np.partition(one_nV[i], -2)[-2:]
            margin = float(first) - float(second)
            self.flips.append(Flip(window, int(at_n[i]), int(best_n[i]), int(now_n[i]), margin))

    @property
    def digest(self) -> str:
        """Of all rows' bits: equal for widths that share them."""
        return hashlib.sha256(b"".join(self._bits)).hexdigest()[:16]


@dataclass(frozen=True)
class WidthGroup:
    """Widths whose rows have the same bits; the other attributes are those of each of their `Tally`.

    Attributes:
        same: whether the bits are those of one row at a time.
    """

    widths: tuple[int, ...]
    same: bool
    positions: int
    rows_differing: int
    largest: float
    flips: tuple[Flip, ...]
    check: Check | None

    @property
    def rate(self) -> Rate:
        """Flips for each thousand positions."""
        return rate(len(self.flips), self.positions)

    @property
    def wrong(self) -> bool:
        """Whether the logits are those of no such model."""
        return self.check is not None and self.check.wrong

    def first_flips(self) -> dict[str, int]:
        """Where decoding forks first in each window that has a flip."""
        found: dict[str, int] = {}
        for flip in self.flips:
            found.setdefault(flip.window, flip.position)
        return found

    def cells(self) -> Json:
        """For the report."""
        return {
            "widths": self.widths, "same_bits": self.same, "positions": self.positions,
            "rows_differing": self.rows_differing, "largest_difference": self.largest, "flips_count": len(self.flips),
            "fork_rate": self.rate._asdict(), "first_flips": self.first_flips(),
            "flips": [flip._asdict() for flip in self.flips], "check": self.check and self.check.cells(),
            "wrong": self.wrong,
        }  # fmt: skip


def groups(tallies: Sequence[Tally]) -> tuple[WidthGroup, ...]:
    """Widths of the same bits together, in order of their least; the tally of width 1 must be among them.

    Raises:
        ValueError: it is not.
    """
    alone = next((t for t in tallies if t.width == 1), None)
    if alone is None:
        raise ValueError("groups are relative to one row at a time")
    found: dict[str, list[Tally]] = {}
    for tally in sorted(tallies, key=lambda t: t.width):
        found.setdefault(tally.digest, []).append(tally)
    return tuple(
        WidthGroup(tuple(t.width for t in own), digest == alone.digest, own[0].positions, own[0].rows_differing,
              own[0].largest, tuple(own[0].flips), own[0].check)
        for digest, own in found.items()
    )  # fmt: skip


def spans(widths: Sequence[int], among: Sequence[int]) -> str:
    """Widths in words: those that follow one another among all that were asked are a span, `1-8,12`."""
    order, out = sorted(among), []
    places = [order.index(w) for w in sorted(widths)]
    begin = 0
    for i, place in enumerate(places):
        if i + 1 == len(places) or places[i + 1] != place + 1:
            first, last = order[places[begin]], order[place]
            out.append(str(first) if first == last else f"{first}-{last}")
            begin = i + 1
    return ",".join(out)
