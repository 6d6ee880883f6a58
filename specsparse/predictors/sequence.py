"""One set of neurons for a whole sequence, chosen from its prompt: the cheapest mask there is for verification."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import jax
import jax.numpy as jnp

from specsparse.engine.weights import Layer
from specsparse.predictors.base import FFN, Needs, Predictor, as_mask, require_rows
from specsparse.support.options import Internal, Share


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

    def fit(self, layer: Layer, rows_ND: jax.Array | None = None, *, index: int = 0) -> jax.Array:
        """bool[1, F], the set of one prompt; those of a batch are bool[B, F], one below the other."""
        rows_ND = require_rows(self, rows_ND)
        a_NF = self.ffn.neurons(layer, rows_ND, jnp.asarray([rows_ND.shape[0]], jnp.int32))
        if self.rule == "griffin":
            norm = jnp.linalg.norm(a_NF, axis=1, keepdims=True)
            rank_F = jnp.sqrt(jnp.sum((a_NF / jnp.maximum(norm, jnp.float32(1e-30))) ** 2, axis=0))
        else:  # counts of neurons that are not zero, a tie decided by the mean size
            size = jnp.abs(a_NF)
            chosen = jax.vmap(lambda a: _largest(a, self.token_share))(size) & (size > 0)
            mean = jnp.mean(size, axis=0)
            rank_F = jnp.sum(chosen, axis=0).astype(jnp.float32) + mean / (jnp.max(mean) + jnp.float32(1e-30)) / 2
        return _largest(rank_F, self.share)[None]

    def keep(self, weights: jax.Array, layer: Layer, x_RD: jax.Array, n_valid_B: jax.Array) -> jax.Array:
        """Each row has the set of its sequence; one set serves all sequences."""
        batch = n_valid_B.shape[0]
        sets_BF = jnp.broadcast_to(weights, (batch, weights.shape[1]))
        return as_mask(jnp.repeat(sets_BF, x_RD.shape[0] // batch, axis=0), n_valid_B)


def _largest(values_F: jax.Array, share: float) -> jax.Array:
    """bool[F]: the round(share * F) largest values, at least one; the lower index first where values tie."""
    count = max(1, round(share * values_F.shape[0]))
    _, ids = jax.lax.top_k(values_F, count)
    return jnp.zeros(values_F.shape, bool).at[ids].set(True)
