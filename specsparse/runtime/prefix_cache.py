"""Prefix caching: a prompt that begins as an earlier text did reads only the rest.

vLLM keeps blocks of keys and values of all requests (arXiv:2309.06180, section 4.4); here whole texts are kept, the
latest ones. A row's bits do not depend on the rows computed beside it (contract C1), so a text is the same with and
without. Kernels that do not keep this contract, meshes and batches read their prompts whole.
"""

from dataclasses import dataclass

import jax
import numpy as np

from specsparse import kernels
from specsparse.engine import cache as kv
from specsparse.engine.cache import KVCache
from specsparse.engine.model import Model
from specsparse.engine.prefill import CHUNKS
from specsparse.errors import UserError
from specsparse.support.files import need_memory
from specsparse.support.options import shown


@dataclass(frozen=True, eq=False)
class ReadText:
    """A text that `model` has read."""

    model: Model
    tokens: np.ndarray  # int32[n], those whose keys and values the cache holds
    cache: KVCache  # of one sequence
    hidden: np.ndarray | None  # float32[1, m, d], hidden rows of its first m tokens, as a drafter wanted them
    wants: bool | tuple[int, ...]  # which hidden rows these are


class PrefixCache:
    """Keys and values of the latest `texts` texts; handed to `generate` and `stream`, it makes later prompts read less.

    It holds a cache of its own for each text, of the text's length. UserError: no number of texts.
    """

    def __init__(self, texts: int = 1):
        if isinstance(texts, bool) or not isinstance(texts, int) or texts < 0:
            raise UserError(f"texts={shown(texts)} must be a whole number, of the texts that are kept")
        self._most, self._texts = texts, list[ReadText]()

    def find(self, model: Model, prompt: np.ndarray, wants: bool | tuple[int, ...]) -> tuple[int, ReadText] | None:
        """How many tokens of `prompt`, int32[n], need not be read (at most n - 1), and the text that has most of them.

        None if they are fewer than the smallest chunk: reading them takes no longer than copying a cache.
        """

        def spared(text: ReadText) -> int:
            if text.model is not model:
                return 0
            known = min(shared(text.tokens, prompt), len(prompt) - 1)
            if not wants:
                return known
            return 0 if text.hidden is None or text.wants != wants else min(known, text.hidden.shape[1])

        found = max(self._texts, key=spared, default=None)
        return (spared(found), found) if found is not None and spared(found) >= CHUNKS[0] else None

    def keep(self, new: ReadText, prompt: int) -> None:
        """Keeps a text whose prompt had so many tokens, in place of those that know no more of it."""

        def replaced(old: ReadText) -> bool:
            serves = old.model is new.model and (not old.wants or old.wants == new.wants)
            return serves and shared(old.tokens, new.tokens) >= min(len(old.tokens), prompt - 1)

        self._texts = [*(t for t in self._texts if not replaced(t)), new][-self._most :] if self._most else []

    def forget(self) -> bool:
        """Drops all texts; whether there were any."""
        texts, self._texts = self._texts, []
        return bool(texts)


def applies(model: Model, batch: int) -> bool:
    """Whether a row's bits are the same whatever is read beside it, and the batch is one text on one device."""
    return batch == 1 and model.devices.ways is None and not kernels.depends_on_rows(model.kernels.name)


def shared(a: np.ndarray, b: np.ndarray) -> int:
    """Tokens that two texts, int32[n] and int32[m], begin with alike."""
    n = min(len(a), len(b))
    return int(np.append(a[:n] != b[:n], True).argmax())


def shortened(cache: KVCache, capacity: int) -> KVCache:
    """The first slots of a cache: one for a long context mostly holds nothing. By numpy, which compiles nothing.
    UserError: there is no memory for them."""
    size = sum(a.nbytes for a in (*cache.k, *cache.v)) * capacity // cache.capacity
    need_memory("a text that is kept", size, "keep fewer")
    keys = [np.asarray(k)[:, :, : capacity // kv.LANES].copy() for k in cache.k]
    values = [np.asarray(v)[:, :, :capacity].copy() for v in cache.v]
    return cache._replace(k=tuple(jax.device_put(keys)), v=tuple(jax.device_put(values)))


def continued(_: object, old: KVCache, empty: KVCache, length_B: jax.Array) -> KVCache:
    """`empty` with the first `length_B`, int32[1], tokens of `old`, which stays as it is. A program without weights."""
    n = min(old.capacity, empty.capacity)

    def copied(axis: int, n: int, source: jax.Array, target: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(target, jax.lax.slice_in_dim(source, 0, n, axis=axis), 0, axis)

    keys = (copied(2, n // kv.LANES, *pair) for pair in zip(old.k, empty.k, strict=True))
    values = (copied(2, n, *pair) for pair in zip(old.v, empty.v, strict=True))
    return KVCache(tuple(keys), tuple(values), length_B)
