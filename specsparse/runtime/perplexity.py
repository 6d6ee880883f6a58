"""Perplexity of a text and the distance of two models' distributions on it, by llama.cpp's definitions.

Without a stride the text is cut into windows of `context` tokens, the first of each replaced by BOS if the model
adds one, and the tokens of the second half are scored. With a stride s the windows hold context + s/2 tokens, begin s
apart, and the last s of each are scored (llama.cpp, tools/perplexity).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine import cache as kv
from specsparse.engine.llama import Want
from specsparse.engine.model import Model
from specsparse.engine.prefill import prefill
from specsparse.engine.pytree import Pytree
from specsparse.errors import UserError


@dataclass(frozen=True)
class Windows:
    """A text cut up for scoring: `tokens` int32[W, n]. Rows first .. n - 2 are scored, each on the token after it."""

    tokens: np.ndarray
    first: int

    @property
    def scored(self) -> int:
        """Tokens that are scored, all windows together."""
        count, n = self.tokens.shape
        return count * (n - 1 - self.first)


def windows(
    ids: Sequence[int], *, context: int, stride: int = 0, chunks: int | None = None, bos: int | None
) -> Windows:
    """Cuts a text. UserError: the text does not fill a window.

    Args:
        context: tokens of a window, at least 4; with a stride half of it comes on top.
        stride: 0, or the tokens from one window to the next.
        chunks: at most so many windows; None for all.
        bos: the token that begins every window if there is no stride, or None.
    """
    size = context + stride // 2 if stride else context
    count = -(-(len(ids) - size) // stride) if stride else len(ids) // size
    if count < 1:
        raise UserError(
            f"the text has {len(ids)} tokens and a window takes {size + bool(stride)}: "
            "give more text, or a smaller perplexity.context"
        )
    starts = np.arange(min(count, chunks or count)) * (stride or size)
    tokens = np.asarray(ids, np.int32)[starts[:, None] + np.arange(size)]
    if bos is not None and not stride:
        tokens[:, 0] = bos
    return Windows(tokens, size - stride - 1 if stride else size // 2)


@dataclass(frozen=True)
class Scores:
    nll: np.ndarray  # float64[N], negative log-likelihood in nats
    kl: np.ndarray | None = None  # float64[N], KL(base, model) in nats, or None without a base
    same: np.ndarray | None = None  # bool[N], whether both find the same token most likely, or None

    def summary(self) -> dict[str, float | int | None]:
        """Perplexity and KL with their standard errors, as llama.cpp prints them.

        Returns:
            tokens; perplexity = exp(mean nll) and perplexity_error; kl_mean, kl_error, kl_median, kl_99 (the 99th
            percentile), kl_max; same_top, a share. The last six are None without a base.
        """
        kl, perplexity = self.kl, float(np.exp(self.nll.mean()))
        out: dict[str, float | int | None] = {"tokens": len(self.nll), "perplexity": perplexity}
        out["perplexity_error"] = perplexity * _standard_error(self.nll)
        if kl is None or self.same is None:
            return out | dict.fromkeys(("kl_mean", "kl_error", "kl_median", "kl_99", "kl_max", "same_top"))
        return out | {
            "kl_mean": float(kl.mean()), "kl_error": _standard_error(kl), "kl_median": float(np.median(kl)),
            "kl_99": float(np.quantile(kl, 0.99)), "kl_max": float(kl.max()), "same_top": float(self.same.mean()),
        }  # fmt: skip


def _standard_error(values: np.ndarray) -> float:
    """The standard error of the mean: sqrt((E[x^2] - E[x]^2) / (n - 1)); 0 for one value."""
    return math.sqrt(float(values.var()) / (len(values) - 1)) if len(values) > 1 else 0.0


def score(
    model: Model, text: Windows, *, base: np.ndarray | None = None, keep: np.ndarray | None = None,
    progress: Callable[[int, "Scores"], None] = lambda done, so_far: None,
) -> Scores:  # fmt: skip
    """Scores a text, window by window. UserError: a window longer than the model's context.

    Args:
        base: float32[N, V], the log-probabilities of another model on the same text; gives KL(base, model).
        keep: float32[N, V] that takes this model's log-probabilities, or None.
        progress: called after each window with how many are done and their scores.
    """
    size = text.tokens.shape[1]
    capacity = model.capacity_for(size)
    if size > model.config.context_length:
        raise UserError(f"windows of {size} tokens, and the context holds {model.config.context_length}")
    params, count, at = model.params_for(capacity), text.scored, 0
    compared = () if base is None else (np.empty(count), np.empty(count, bool))
    scores = np.empty(count), *compared
    for i, window in enumerate(text.tokens):
        for rows, out in _rows(model, params, window, text.first, model.new_cache(1, capacity)):
            here = slice(at, at + len(rows))
            at = here.stop
            found = _judge(out, jnp.asarray(window[rows + 1]), None if base is None else jnp.asarray(base[here]))
            for values, new in zip(scores, found):  # without a base it finds one thing
                values[here] = new
            if keep is not None:
                keep[here] = np.asarray(jax.nn.log_softmax(out, -1))
        progress(i + 1, Scores(*(values[:at] for values in scores)))
    return Scores(*scores)


def _rows(model: Model, params: Pytree, window: np.ndarray, first: int, cache: kv.KVCache):
    """(row numbers, their logits f32[n, V]) of the scored rows, chunk by chunk; those before `first` are only fed."""
    for begin, end, want in ((0, first, Want("none")), (first, len(window) - 1, Want())):

        def forward(params, tokens, valid, cache, want=want):
            out, cache = model.forward(params, tokens, cache, n_valid_B=valid, want=want)
            return None if out.logits is None else out.logits[0], kv.commit(cache, valid)

        make = partial(jax.jit, forward, donate_argnums=3)
        program = model.programs.once((("perplexity", want),), make)
        chunks = prefill(lambda c, kv, run=program: run(params, *c.arrays, kv), [window[begin:end]], cache)
        for chunk, logits_nV, after in chunks:
            cache, n = after, int(chunk.count[0])
            if logits_nV is not None:
                yield begin + chunk.start + np.arange(n), logits_nV[:n]


@jax.jit
def _judge(logits_nV: jax.Array, next_n: jax.Array, base_nV: jax.Array | None):
    """Negative log-likelihood of the next tokens, KL(base, this) and whether the most likely token is the same."""
    probs = jax.nn.log_softmax(logits_nV, -1)
    nll = -jnp.take_along_axis(probs, next_n[:, None], 1)[:, 0]
    if base_nV is None:
        return nll, None, None
    # sum p (log p - log q), as a sum of p (q/p - 1 - log q/p): no term is negative, so nothing cancels between them
    p_nV, gap_nV = jnp.exp(base_nV), probs - base_nV
    near = jnp.expm1(jnp.clip(gap_nV, -1.0, 1.0)) - gap_nV
    terms = jnp.where(jnp.abs(gap_nV) < 1.0, p_nV * near, jnp.exp(probs) - p_nV - p_nV * gap_nV)
    kl = jnp.sum(jnp.maximum(terms, 0.0), -1)
    return nll, kl, jnp.argmax(base_nV, -1) == jnp.argmax(probs, -1)
