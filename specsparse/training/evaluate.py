"""How well a drafter drafts held-out answers, without decoding: what it would have proposed at every position."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine.model import Model
from specsparse.engine.pytree import Pytree
from specsparse.errors import UserError
from specsparse.kernels import QTensor
from specsparse.training.data import Text
from specsparse.training.features import Features
from specsparse.training.form import Form
from specsparse.training.unroll import Frozen, Window
from specsparse.training.windows import fill, pack


@dataclass(frozen=True)
class DraftQuality:
    """Drafts of gamma argmax tokens begun at every position of some greedy answers.

    Attributes:
        tokens: positions a draft was begun at.
        agreement: for each place in the draft, how often its token is the answer's where those before it were.
        acceptance: mean acceptance length, bonus token included, if rounds began at every position equally often.
    """

    tokens: int
    agreement: tuple[float, ...]
    acceptance: float


def evaluate(
    model: Model, form: Form, weights: Pytree, frozen: Frozen, texts: Sequence[Text], *,
    gamma: int, shape: tuple[int, int],
) -> DraftQuality:  # fmt: skip
    """Judges drafts of `gamma` tokens on greedy answers; `shape` is (rows, drafting rows) of a window.

    Raises:
        UserError: no answer is longer than gamma.
    """
    rows, drafting = shape
    texts = Features(model, form.layers).of(texts)
    reach = np.zeros(gamma + 1)
    judge = jax.jit(partial(_right, form, gamma=gamma))
    for group in pack(texts, range(len(texts)), rows=rows, drafting=drafting):
        filled = fill([texts[i] for i in group], rows=rows, drafting=drafting, width=model.config.d_model)
        window = jax.tree.map(jnp.asarray, filled)
        right_sm = np.asarray(judge(weights, frozen, model.params.embedding, window))
        reach += _reach(right_sm, np.asarray(window.depth))
    if not reach[0]:
        raise UserError(f"no held-out answer is longer than gamma={gamma} tokens: raise train.answer")
    agreement = tuple(float(b / a) if a else 0.0 for a, b in itertools.pairwise(reach))
    return DraftQuality(int(reach[0]), agreement, float(1 + reach[1:].sum() / reach[0]))


def _right(form: Form, weights: Pytree, frozen: Frozen, embedding: QTensor, window: Window, *, gamma: int) -> jax.Array:
    """bool[gamma, m]: whether each stream's argmax at a drafting row is the token of the text."""
    following = jnp.roll(window.tokens, -1)[window.rows]
    found = form.logits(weights, frozen, embedding, window, gamma)
    return jnp.stack([frozen.ids[jnp.argmax(logits, axis=-1)] == following for logits in found])


def _reach(right_sm: np.ndarray, depth_m: np.ndarray) -> np.ndarray:
    """float[gamma + 1]: drafts begun, and those of them whose first s tokens are right.

    The draft that begins at row r has its token s in stream s at row r + s - 1. Drafts that the text's end cuts off do
    not count, nor does the last row of a text, whose next token is not kept.
    """
    gamma, m = right_sm.shape
    out = np.zeros(gamma + 1)
    for r in range(m - gamma):
        if depth_m[r] < 0 or depth_m[r + gamma] != depth_m[r] + gamma:
            continue
        right = [right_sm[s, r + s] for s in range(gamma)]
        out[0] += 1
        out[1:] += np.cumprod(right)
    return out
