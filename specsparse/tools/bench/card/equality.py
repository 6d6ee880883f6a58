"""Whether rows of a step see neither their place nor their neighbours on this device, and the margins where they do."""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine import cache as kv
from specsparse.engine.llama import Want
from specsparse.engine.model import Model
from specsparse.support.files import Json
from specsparse.tools.bench.card.models import WIDTHS, random_model, wide
from specsparse.tools.bench.card.stages import CardPlan

_BATCH = 2
_BEFORE = 62  # tokens in the cache: paths of a tree then cross a block of 16 positions


def equality(plan: CardPlan) -> Iterator[Json]:
    """Rows permuted, neighbours changed, fewer of them valid, and a tree against its paths fed one by one.

    A row of the answer for each model and width: values that differ from those they should equal, by what was done, the
    largest difference, and among rows that differ those whose most likely token is another and the narrowest margin.
    """
    cases = [(plan.small, "Q8_0"), (plan.small, "Q4_0"), (plan.large, "BF16")]
    for name, kind in cases[:1] if plan.tiny else cases:
        model = random_model(name, kind, layers=2, backend=plan.backend, width=WIDTHS[0])
        for width in WIDTHS[:1] if plan.tiny else WIDTHS:
            yield {"what": f"equal bits, {name} {kind} in 2 layers", "width": width, **_checked(wide(model, width))}


class _Steps:
    """Steps of one width after the same text."""

    def __init__(self, model: Model):
        self.model, rng = model, np.random.default_rng(0)
        capacity = model.capacity_for(_BEFORE + 4 * model.width)
        self.params = model.params_for(capacity)
        text = jnp.asarray(rng.integers(0, model.config.vocab_size, (_BATCH, _BEFORE)), jnp.int32)
        feed = jax.jit(lambda p, t, c: model.forward(p, t, c, want=Want("none"))[1])
        filled = feed(self.params, text, model.new_cache(_BATCH, capacity))
        self.start = kv.commit(filled, jnp.full(_BATCH, _BEFORE, jnp.int32))
        self._tree = jax.jit(partial(_forward, model))
        self._chain = jax.jit(lambda p, t, c: model.forward(p, t, c))

    def tree(self, tokens_Bn: np.ndarray, parents_n: np.ndarray, valid: int | None = None) -> np.ndarray:
        """Logits f32[B, n, V] of a verification of these rows."""
        n = tokens_Bn.shape[1]
        parents = np.broadcast_to(parents_n, tokens_Bn.shape)
        counts = np.full(_BATCH, n if valid is None else valid)
        return np.asarray(self._tree(self.params, *map(_ints, (tokens_Bn, parents, counts)), self.start))

    def one_by_one(self, tokens_Bn: np.ndarray) -> np.ndarray:
        """Logits f32[B, n, V] of the same tokens, a plain step each."""
        cache, out = self.start, []
        for i in range(tokens_Bn.shape[1]):
            step, cache = self._chain(self.params, _ints(tokens_Bn[:, i : i + 1]), cache)
            cache = kv.commit(cache, jnp.ones(_BATCH, jnp.int32))
            out.append(np.asarray(step.logits)[:, 0])
        return np.stack(out, axis=1)


def _ints(values: np.ndarray) -> jax.Array:
    return jnp.asarray(values, jnp.int32)


def _forward(model: Model, params, tokens_Bn, parents_Bn, counts_B, cache) -> jax.Array:
    return model.forward(params, tokens_Bn, cache, n_valid_B=counts_B, parents_Bn=parents_Bn)[0].logits


def _checked(model: Model) -> Json:
    steps, width, rng = _Steps(model), model.width, np.random.default_rng(1)
    tokens = rng.integers(0, model.config.vocab_size, (_BATCH, width))
    roots, order = np.full(width, -1), rng.permutation(width)
    whole, others = steps.tree(tokens, roots), rng.integers(0, model.config.vocab_size, tokens.shape)
    others[:, 3] = tokens[:, 3]
    pairs = {
        "permuted": (steps.tree(tokens[:, order], roots), whole[:, order]),
        "neighbours": (steps.tree(others, roots)[:, 3], whole[:, 3]),
        **{f"{n} valid": (steps.tree(tokens, roots, n)[:, :n], whole[:, :n]) for n in range(1, width)},
    }
    parents = np.array([-1, 0, 0, 1, 2, 4, 1, 6, *range(7, width - 1)])
    tree = steps.tree(tokens, parents)
    for leaf in (5, width - 1):
        path = [leaf]
        while parents[path[0]] >= 0:
            path.insert(0, int(parents[path[0]]))
        pairs[f"path of {len(path)}"] = (steps.one_by_one(tokens[:, path]), tree[:, path])
    differing = {name: int((a != b).sum()) for name, (a, b) in pairs.items() if (a != b).any()}
    apart = [(a[rows], b[rows]) for a, b in pairs.values() if (rows := (a != b).any(axis=-1)).any()]
    found: Json = {"equal": not differing, "values": sum(a.size for a, _ in pairs.values()), "differing": differing}
    if apart:
        a, b = (np.concatenate(side) for side in zip(*apart))
        best = np.sort(b, axis=-1)
        found |= {
            "largest_difference": float(np.abs(a - b).max()),
            "rows": len(a),
            "other_argmax": int((a.argmax(-1) != b.argmax(-1)).sum()),
            "narrowest_margin": float((best[:, -1] - best[:, -2]).min()),
        }
    return found
