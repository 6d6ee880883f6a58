"""The key/value cache: preallocated, appended to by the forward pass, committed by the caller."""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine.config import ModelConfig
from specsparse.kernels.reference import q8_cache

LANES = 16
"""Positions of one key block; the capacity is a multiple of it."""


class KVCache(NamedTuple):
    """Keys and values of B sequences. Slots at and beyond `length` hold nothing that counts."""

    k: tuple[jax.Array, ...]  # L arrays [B, G, C/16, d, 16]; position s is lane s % 16 of block s // 16
    # L arrays [B, G, C, d]; of q8_0 codes and scales, see `specsparse.kernels.reference.q8_cache`
    v: tuple[jax.Array, ...]
    length: jax.Array  # int32[B], committed tokens of each sequence
    # int32[B], position less slot of new rows, if this cache holds only chosen slots of a longer one; None for 0
    shift: Any = None  # not `jax.Array | None`: who reads it knows which it is

    @property
    def capacity(self) -> int:
        return self.v[0].shape[2]


def init(*, layers: int, batch: int, kv_heads: int, capacity: int, head_dim: int, dtype=jnp.float16) -> KVCache:
    """An empty cache; `capacity` is rounded up to a multiple of 16. UserError: a q8_0 cache of heads whose size is not
    a multiple of 32."""
    blocks = -(-capacity // LANES)
    row = q8_cache.row_size(head_dim) if dtype == q8_cache.DTYPE else head_dim
    k = tuple(jnp.zeros((batch, kv_heads, blocks, row, LANES), dtype) for _ in range(layers))
    v = tuple(jnp.zeros((batch, kv_heads, blocks * LANES, row), dtype) for _ in range(layers))
    return KVCache(k, v, jax.device_put(np.zeros((batch,), np.int32)))


def commit(cache: KVCache, count_B: jax.Array) -> KVCache:
    """Keeps the first `count_B` rows of the last forward pass (a chain)."""
    return cache._replace(length=cache.length + count_B)


def rollback(cache: KVCache, length_B: jax.Array) -> KVCache:
    return cache._replace(length=jnp.minimum(cache.length, length_B))


def commit_path(cache: KVCache, nodes_Bm: jax.Array, count_B: jax.Array) -> KVCache:
    """Keeps rows `nodes_Bm[:, :count]` of the last forward pass, a root-to-leaf path of its tree, in that order.

    `nodes_Bm` is ascending in each row (a parent precedes its children), so moving down in order never overwrites a
    slot that is still to be read; rows past `count_B` are left as they are.
    """
    m = nodes_Bm.shape[1]
    base_B = cache.length
    keep = jnp.arange(m)[None] < count_B[:, None]
    limit = cache.capacity - 1
    target = jnp.minimum(base_B[:, None] + jnp.arange(m)[None], limit)
    source = jnp.minimum(jnp.where(keep, base_B[:, None] + nodes_Bm, target), limit)

    def move_v(v, src, dst):
        return v.at[:, dst].set(v[:, src])

    def move_k(k, src, dst):
        return k.at[:, dst // LANES, :, dst % LANES].set(k[:, src // LANES, :, src % LANES])

    def move(keys, values):
        k = tuple(jax.vmap(move_k)(k, source, target) for k in keys)
        return k, tuple(jax.vmap(move_v)(v, source, target) for v in values)

    # The first rows of the pass, as those of a draft's first path, lie where they are kept.
    k, v = jax.lax.cond((source != target).any(), move, lambda *same: same, cache.k, cache.v)
    return cache._replace(k=k, v=v, length=base_B + count_B)


@dataclass(frozen=True)
class LayerWindows:
    """How much of a cache the layers read; counts are means over the layers, in tokens of one sequence."""

    # (window, share of the layers that have it); a window of 0 has no end. The shares add up to 1
    shares: tuple[tuple[int, float], ...] = ((0, 1.0),)

    @staticmethod
    def from_config(config: ModelConfig) -> "LayerWindows":
        counts = Counter(config.kind(i).window for i in range(config.n_layers))
        return LayerWindows(tuple((window, count / config.n_layers) for window, count in sorted(counts.items())))

    def __bool__(self) -> bool:
        return any(window for window, _ in self.shares)

    @property
    def endless(self) -> float:
        """Share of the layers without a window."""
        return sum(share for window, share in self.shares if not window)

    def read(self, rows: float, before: float) -> float:
        """Positions that `rows` rows in sequence read together, `before` tokens before the first: each once."""
        return sum(
            share * min(before + rows, window + rows - 1 if window else math.inf) for window, share in self.shares
        )

    def attended(self, rows: float, before: float) -> float:
        """The same, each row counted on its own: row i sees `before` + i + 1 positions, or its window."""
        total = 0.0
        for window, share in self.shares:
            short = min(max(math.floor(window - before), 0), rows) if window else rows  # rows that see all before them
            total += share * (short * (before + (short + 1) / 2) + (rows - short) * window)
        return total


WHOLE = LayerWindows()
"""No layer has a window."""
