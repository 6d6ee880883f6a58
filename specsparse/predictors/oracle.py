"""Bounds for every predictor: the true set, and a set drawn at random."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from specsparse.engine.weights import Layer
from specsparse.kernels import NeuronChoice
from specsparse.predictors.base import InOneCall, Needs, Predictor, as_mask
from specsparse.predictors.ffn import FFN
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
        """uint8[R, F]."""
        return as_mask(self.ffn.neurons(layer, x_RD, n_valid_B) != 0, n_valid_B)

    def choice(self, weights: None, layer: Layer) -> NeuronChoice:
        """See `InOneCall`."""
        return NeuronChoice()


class RandomWeights(NamedTuple):
    """Weights of one layer.

    Attributes:
        salt: uint32[F], what tells the neurons and layers apart.
    """

    salt: jax.Array


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

    def fit(self, layer: Layer, rows_ND: jax.Array | None = None, *, index: int = 0) -> RandomWeights:
        """The salt of a layer."""
        key = jax.random.fold_in(jax.random.key(self.seed), index)
        return RandomWeights(jax.random.bits(key, (layer.ffn_up.shape[0],), jnp.uint32))

    def keep(self, weights: RandomWeights, layer: Layer, x_RD: jax.Array, n_valid_B: jax.Array) -> jax.Array:
        """uint8[R, F]."""
        place_D = 2 * jnp.arange(x_RD.shape[1], dtype=jnp.uint32) + jnp.uint32(1)
        words_RD = jax.lax.bitcast_convert_type(x_RD, jnp.uint32)
        row_R = _mixed(jnp.sum(words_RD * place_D[None], axis=1, dtype=jnp.uint32))
        drawn_RF = _mixed(row_R[:, None] ^ weights.salt[None]) >> jnp.uint32(8)
        return as_mask(drawn_RF < jnp.uint32(round(self.share * (1 << 24))), n_valid_B)


def _mixed(x: jax.Array) -> jax.Array:
    """A bijection of uint32 that spreads every bit (the finaliser of MurmurHash3)."""
    x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> jnp.uint32(13))) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> jnp.uint32(16))
