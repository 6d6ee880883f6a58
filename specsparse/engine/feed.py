"""Text that is given into a model's cache, piece by piece: prompts, texts to score, texts to measure on."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import jax
import numpy as np

from specsparse.engine.cache import KVCache

CHUNKS = (32, 128, 512)
"""Rows of a prompt piece: few sizes, so that few programs are compiled."""

Out = TypeVar("Out")


@dataclass(frozen=True, eq=False)
class Piece:
    """What one forward pass reads of every text.

    Attributes:
        start: of it in each text.
        tokens: int32[B, rows]; 0 beyond the end of a text.
        count: int32[B], tokens of each text among the rows.
        last: whether no other piece comes after it.
    """

    start: int
    tokens: np.ndarray
    count: np.ndarray
    last: bool

    @property
    def rows(self) -> int:
        """Rows of the pass."""
        return self.tokens.shape[1]

    @property
    def arrays(self) -> tuple[jax.Array, jax.Array]:
        """`tokens` and `count` on the device."""
        return jax.device_put((self.tokens, self.count))


@dataclass(frozen=True, eq=False)
class Fed(Generic[Out]):
    """A piece, what the program returned for it, and the cache after it."""

    piece: Piece
    out: Out
    cache: KVCache


def piece_rows(length: int) -> list[int]:
    """Rows of the pieces that cover a text of that length: large ones first, then the smallest that fits."""
    found: list[int] = []
    while (left := length - sum(found)) > 0:
        found.append(next((c for c in CHUNKS if c >= left), CHUNKS[-1]))
    return found


def feed(
    program: Callable[[Piece, KVCache], tuple[Out, KVCache]],
    texts: Sequence[np.ndarray],
    cache: KVCache,
    *,
    rows: int | None = None,
) -> Iterator[Fed[Out]]:
    """Feeds texts side by side; nothing where all are empty.

    Args:
        program: a forward pass that commits the tokens of a piece and returns the cache as it is then.
        texts: B texts int32[n], of any lengths.
        cache: before the first piece; handed to `program` and no longer used.
        rows: of every piece; None for those of `piece_rows`.
    """
    longest, start = max(map(len, texts), default=0), 0
    sizes = piece_rows(longest) if rows is None else [rows] * -(-longest // rows)
    for size in sizes:
        tokens, count = np.zeros((len(texts), size), np.int32), np.zeros(len(texts), np.int32)
        for b, ids in enumerate(texts):
            part = ids[start : start + size]
            tokens[b, : len(part)], count[b] = part, len(part)
        piece = Piece(start, tokens, count, start + size >= longest)
        out, cache = program(piece, cache)
        yield Fed(piece, out, cache)
        start += size
