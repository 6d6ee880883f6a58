"""Bounds: the true set, a set drawn at random, and a limit on what the rows of one pass may read together."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import jax
import jax.numpy as jnp

from specsparse.engine.pytree import Pytree
from specsparse.engine.weights import Layer
from specsparse.kernels import NeuronChoice
from specsparse.predictors.base import FFN, InOneCall, Needs, Predictor, as_mask
from specsparse.support.options import Internal, Range, Share


@dataclass(frozen=True)
class Oracle(Predictor, InOneCall):
    """keep_j where the neuron is not zero: recall and precision are 1, the output is the dense one."""

    name: ClassVar[str] = "oracle"
    needs: ClassVar[Needs] = Needs.NOTHING
    ffn: Annotated[FFN, Internal()]

    def fit(self, layer: Layer, rows_ND: jax.Array | None = None, *, index: int = 0) -> None:
        """There are no weights but the layer's."""

    def keep(self, weights: None, layer: Layer, x_RD: jax.Array, n_valid_B: jax.Array) -> jax.Array:
        return as_mask(self.ffn.neurons(layer, x_RD, n_valid_B) != 0, n_valid_B)

    def choice(self, weights: None, layer: Layer) -> NeuronChoice:
        return NeuronChoice()


@dataclass(frozen=True)
class Random(Predictor):
    """keep_j for a random share of the neurons, drawn anew for each row; recall and kept share are the share.

    The draw hashes the row's own bits, so that it does not depend on where in a batch the row stands (contract C1).

    Attributes:
        ffn: the FFN it predicts for.
        share: of the neurons to keep.
        seed: 0 to 2^32 - 1.
    """

    name: ClassVar[str] = "random"
    needs: ClassVar[Needs] = Needs.NOTHING
    ffn: Annotated[FFN, Internal()]
    share: Share = 0.5
    seed: Annotated[int, Range(0, 2**32 - 1)] = 0

    def fit(self, layer: Layer, rows_ND: jax.Array | None = None, *, index: int = 0) -> jax.Array:
        """The salt uint32[F] that tells neurons and layers apart."""
        key = jax.random.fold_in(jax.random.key(self.seed), index)
        return jax.random.bits(key, (layer.ffn_up.shape[0],), jnp.uint32)

    def keep(self, weights: jax.Array, layer: Layer, x_RD: jax.Array, n_valid_B: jax.Array) -> jax.Array:
        place_D = 2 * jnp.arange(x_RD.shape[1], dtype=jnp.uint32) + jnp.uint32(1)
        words_RD = jax.lax.bitcast_convert_type(x_RD, jnp.uint32)
        row_R = _mixed(jnp.sum(words_RD * place_D[None], axis=1, dtype=jnp.uint32))
        drawn_RF = _mixed(row_R[:, None] ^ weights[None]) >> jnp.uint32(8)
        return as_mask(drawn_RF < jnp.uint32(round(self.share * (1 << 24))), n_valid_B)


def _mixed(x: jax.Array) -> jax.Array:
    """A bijection of uint32 that spreads every bit (the finaliser of MurmurHash3)."""
    x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> jnp.uint32(13))) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> jnp.uint32(16))


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
        return self.inner.needs

    def fit(self, layer: Layer, rows_ND: jax.Array | None = None, *, index: int = 0) -> Pytree:
        return self.inner.fit(layer, rows_ND, index=index)

    def keep(self, weights: Pytree, layer: Layer, x_RD: jax.Array, n_valid_B: jax.Array) -> jax.Array:
        keep_RF = self.inner.keep(weights, layer, x_RD, n_valid_B)
        n, width = x_RD.shape[0] // n_valid_B.shape[0], keep_RF.shape[1]
        count = max(1, round(self.share * width))
        if n > self.rows or count == width:
            return keep_RF
        place_R = jnp.arange(x_RD.shape[0], dtype=jnp.int32) % n
        worth_F = (jnp.float32(self.decay) ** place_R.astype(jnp.float32)) @ keep_RF.astype(jnp.float32)
        _, ids = jax.lax.top_k(worth_F, count)
        return keep_RF * jnp.zeros((width,), jnp.uint8).at[ids].set(jnp.uint8(1))[None]
