"""Prefill: texts go into a model's cache chunk by chunk. Prompts, texts to score, texts to measure on."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import jax
import numpy as np

from specsparse.engine.cache import KVCache

CHUNKS = (32, 128, 512)
"""Rows of a prompt's chunk: few sizes, so that few programs are compiled."""

Out = TypeVar("Out")


@dataclass(frozen=True, eq=False)
class Chunk:
    """The part of each text that one forward pass reads."""

    start: int  # of it in each text
    tokens: np.ndarray  # int32[B, rows]; 0 beyond the end of a text
    count: np.ndarray  # int32[B], tokens of each text among the rows
    last: bool  # whether no other chunk comes after it

    @property
    def arrays(self) -> tuple[jax.Array, jax.Array]:
        return jax.device_put((self.tokens, self.count))


def chunk_rows(length: int) -> list[int]:
    """Rows of the chunks that cover a text of that length: large ones first, then the smallest that fits."""
    rows: list[int] = []
    while (left := length - sum(rows)) > 0:
        rows.append(next((c for c in CHUNKS if c >= left), CHUNKS[-1]))
    return rows


def prefill(
    program: Callable[[Chunk, KVCache], tuple[Out, KVCache]], texts: Sequence[np.ndarray], cache: KVCache, *,
    rows: int | None = None,
) -> Iterator[tuple[Chunk, Out, KVCache]]:  # fmt: skip
    """Feeds texts side by side: each chunk, what the program returned for it, and the cache after it.

    Args:
        program: a forward pass that commits the tokens of a chunk and returns the cache as it is then.
        texts: B texts int32[n], of any lengths. If all are empty, there is no chunk.
        cache: before the first chunk; `program` takes it over.
        rows: of every chunk; None for those of `chunk_rows`.
    """
    longest, start = max(map(len, texts), default=0), 0
    sizes = chunk_rows(longest) if rows is None else [rows] * -(-longest // rows)
    for size in sizes:
        tokens, count = np.zeros((len(texts), size), np.int32), np.zeros(len(texts), np.int32)
        for b, ids in enumerate(texts):
            part = ids[start : start + size]
            tokens[b, : len(part)], count[b] = part, len(part)
        chunk = Chunk(start, tokens, count, start + size >= longest)
        out, cache = program(chunk, cache)
        yield chunk, out, cache
        start += size
