"""A bound on the neurons that the rows of one pass may read together."""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp

from specsparse.engine.pytree import Pytree
from specsparse.engine.weights import Layer
from specsparse.predictors.base import Needs, Predictor
from specsparse.support.options import Share


@dataclass(frozen=True)
class UnionCap(Predictor):
    """Of the neurons that some row keeps, those that are most likely to be of use: round(share * F) at most.

    Row i of a draft counts only if all before it are accepted, so a neuron is worth the sum of decay^i over the rows i
    that keep it; ties go to the lower index. The same idea for experts is MoE-Spec's (arXiv:2602.16052). Lossy, and
    contract C1 does not hold: a row's neurons depend on the rows beside it, so speculation may write another text than
    plain decoding. Rows are taken to be a chain; nodes of a tree count by their order.

    Attributes:
        inner: what is capped.
        share: of the neurons that one pass may read.
        decay: chance that a drafted token is accepted.
        rows: of each sequence up to which a pass is capped; longer ones read a prompt.
    """

    name: ClassVar[str] = "union_cap"
    inner: Predictor
    share: Share
    decay: Share = 0.7
    rows: int = 16

    @property
    def needs(self) -> Needs:
        """What the capped one needs."""
        return self.inner.needs

    def fit(self, layer: Layer, rows_ND: jax.Array | None = None, *, index: int = 0) -> Pytree:
        """The weights of the capped one."""
        return self.inner.fit(layer, rows_ND, index=index)

    def keep(self, weights: Pytree, layer: Layer, x_RD: jax.Array, n_valid_B: jax.Array) -> jax.Array:
        """uint8[R, F]."""
        keep_RF = self.inner.keep(weights, layer, x_RD, n_valid_B)
        n, width = x_RD.shape[0] // n_valid_B.shape[0], keep_RF.shape[1]
        count = max(1, round(self.share * width))
        if n > self.rows or count == width:
            return keep_RF
        place_R = jnp.arange(x_RD.shape[0], dtype=jnp.int32) % n
        worth_F = (jnp.float32(self.decay) ** place_R.astype(jnp.float32)) @ keep_RF.astype(jnp.float32)
        _, ids = jax.lax.top_k(worth_F, count)
        return keep_RF * jnp.zeros((width,), jnp.uint8).at[ids].set(jnp.uint8(1))[None]
