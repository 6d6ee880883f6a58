"""One set of neurons for a whole sequence, chosen from its prompt: the cheapest mask there is for verification."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp

from specsparse.engine.weights import Layer
from specsparse.predictors.base import Needs, Predictor, as_mask, require_rows
from specsparse.predictors.ffn import FFN
from specsparse.support.options import Internal, Share


class SequenceWeights(NamedTuple):
    """Weights of one layer.

    Attributes:
        keep: bool[B, F], or bool[1, F] for one set that all sequences share.
    """

    keep: jax.Array


@dataclass(frozen=True)
class Sequence(Predictor):
    """The neurons that matter most for the prompt, and no others after it.

    Attributes:
        ffn: the FFN it predicts for.
        share: of the neurons to keep.
        rule: "griffin" ranks by the norm over the prompt of a / |a|, per neuron (arXiv:2404.01365, eq. 6);
            "coreinfer" by how many tokens have the neuron among their `token_share` largest (arXiv:2410.18311).
        token_share: of coreinfer.
    """

    name: ClassVar[str] = "sequence"
    needs: ClassVar[Needs] = Needs.PROMPT
    ffn: Annotated[FFN, Internal()]
    share: Share = 0.5
    rule: Literal["griffin", "coreinfer"] = "griffin"
    token_share: Share = 0.4

    def fit(self, layer: Layer, rows_ND: jax.Array | None = None, *, index: int = 0) -> SequenceWeights:
        """The set of one prompt; `stack` joins those of a batch."""
        rows_ND = require_rows(self, rows_ND)
        a_NF = self.ffn.neurons(layer, rows_ND, jnp.asarray([rows_ND.shape[0]], jnp.int32))
        rank_F = self._griffin(a_NF) if self.rule == "griffin" else self._coreinfer(a_NF)
        return SequenceWeights(largest(rank_F, self.share)[None])

    def _griffin(self, a_NF: jax.Array) -> jax.Array:
        norm = jnp.linalg.norm(a_NF, axis=1, keepdims=True)
        return jnp.sqrt(jnp.sum((a_NF / jnp.maximum(norm, jnp.float32(1e-30))) ** 2, axis=0))

    def _coreinfer(self, a_NF: jax.Array) -> jax.Array:
        """Counts of neurons that are not zero, a tie decided by the mean size."""
        size = jnp.abs(a_NF)
        chosen = jax.vmap(lambda a: largest(a, self.token_share))(size) & (size > 0)
        mean = jnp.mean(size, axis=0)
        return jnp.sum(chosen, axis=0).astype(jnp.float32) + mean / (jnp.max(mean) + jnp.float32(1e-30)) / 2

    def keep(self, weights: SequenceWeights, layer: Layer, x_RD: jax.Array, n_valid_B: jax.Array) -> jax.Array:
        """uint8[R, F]: each row has the set of its sequence."""
        batch, width = n_valid_B.shape[0], weights.keep.shape[1]
        sets_BF = jnp.broadcast_to(weights.keep, (batch, width))
        return as_mask(jnp.repeat(sets_BF, x_RD.shape[0] // batch, axis=0), n_valid_B)


def stack(sets: list[SequenceWeights]) -> SequenceWeights:
    """The sets of B prompts as the weights of a batch."""
    return SequenceWeights(jnp.concatenate([s.keep for s in sets]))


def largest(values_F: jax.Array, share: float) -> jax.Array:
    """bool[F]: the round(share * F) largest values, at least one; the lower index first where values tie."""
    count = max(1, round(share * values_F.shape[0]))
    _, ids = jax.lax.top_k(values_F, count)
    return jnp.zeros(values_F.shape, bool).at[ids].set(True)
