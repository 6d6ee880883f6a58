"""What the contract tests run: forward passes of tiny models in a few compiled shapes, driven from numpy."""

from dataclasses import dataclass, field
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from specsparse import kernels
from specsparse.engine import cache as kv
from specsparse.engine import llama, rope, weights
from specsparse.engine.config import ModelConfig
from specsparse.engine.gguf.reader import open_gguf
from specsparse.engine.model import KV_DTYPES
from specsparse.testing import write_tiny_gguf

WIDTH = 16
"""Rows of the wide programs; `n_valid` says how many count."""


@dataclass
class Rig:
    """A forward function with its weights, compiled once for each shape it is called with."""

    config: ModelConfig
    forward: llama.ForwardFn
    params: weights.Params
    kv_dtype: str = "f16"
    capacity: int = 64
    programs: dict = field(default_factory=dict)

    def cache(self, batch: int = 1) -> kv.KVCache:
        """An empty cache, with NaN where nothing may be read (in q8_0 as a scale)."""
        c = self.config
        empty = kv.init(
            layers=c.n_layers, batch=batch, kv_heads=c.n_kv_heads, capacity=self.capacity, head_dim=c.head_dim,
            dtype=KV_DTYPES[self.kv_dtype],
        )  # fmt: skip
        nothing = {np.int32: 0, np.int8: -1}
        return jax.tree.map(lambda a: jnp.full_like(a, nothing.get(a.dtype.type, jnp.nan)), empty)

    def feed(self, tokens, cache: kv.KVCache, counts=None, parents=None, *, width: int = WIDTH, commit: bool = True):
        """(logits [B, width, V] as numpy, cache) after rows `tokens` (lists, one a sequence)."""
        counts = [len(t) for t in tokens] if counts is None else counts
        rows = np.zeros((len(tokens), width), np.int32)
        for row, ids in zip(rows, tokens, strict=True):
            row[: len(ids)] = ids
        key = (rows.shape, parents is None)
        if key not in self.programs:

            def call(params, tokens, cache, n_valid, parents):
                out, cache = self.forward(params, tokens, cache, n_valid_B=n_valid, parents_Bn=parents)
                return out.logits, cache

            self.programs[key] = jax.jit(call)
        parents = None if parents is None else jnp.asarray(parents, jnp.int32)
        n_valid = jnp.asarray(counts, jnp.int32)
        logits, cache = self.programs[key](self.params, jnp.asarray(rows), cache, n_valid, parents)
        return np.asarray(logits), kv.commit(cache, n_valid) if commit else cache

    def one_by_one(self, ids) -> np.ndarray:
        """Logits [n, V] of a sequence fed token by token: what everything is compared with."""
        cache, out = self.cache(), []
        for token in ids:
            logits, cache = self.feed([[token]], cache, width=1)
            out.append(logits[0, 0])
        return np.stack(out)

    def in_chunks(self, ids, sizes, *, width: int = WIDTH) -> np.ndarray:
        """The same in pieces."""
        cache, out, start = self.cache(), [], 0
        for size in sizes:
            logits, cache = self.feed([ids[start : start + size]], cache, width=width)
            out.append(logits[0, :size])
            start += size
        return np.concatenate(out)


def tiny_rig(folder: Path, backend: str = "native", kv_dtype: str = "f16", **model) -> Rig:
    """The rig of a tiny random model (keywords of `write_tiny_gguf`)."""
    f = open_gguf(write_tiny_gguf(folder / "model.gguf", tokenizer="none", **model))
    config = ModelConfig.from_gguf(f)
    chosen = kernels.get(backend)
    params = weights.load_params(f, config, floats=backend != "native")
    cos, sin = rope.model_tables(config.ropes, 64, weights.rope_factors(f, config))
    params = params._replace(cos=jnp.asarray(cos), sin=jnp.asarray(sin))
    return Rig(config, llama.make_forward(config, chosen), params, kv_dtype)


def random_tree(rng: np.random.Generator, n: int) -> np.ndarray:
    """Parents int[n] of a random tree: row 0 is its root, a parent precedes its children."""
    return np.array([-1, *(int(rng.integers(max(0, i - 4), i)) for i in range(1, n))])


def path_to(parents: np.ndarray, row: int) -> list[int]:
    """Rows from the root down to `row`."""
    path = [row]
    while parents[path[0]] >= 0:
        path.insert(0, int(parents[path[0]]))
    return path
