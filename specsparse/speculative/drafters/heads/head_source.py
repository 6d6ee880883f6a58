"""A head on the target's features as a source of logits (EAGLE, Li et al., arXiv:2401.15077).

One layer, a plain Llama's of the target's sizes, reads h_i, the target's row before its output norm, and the token
after it, and gives what h_{i+1} will be; the target's own output matrix turns that into logits. What it drafts from,
it reads in place of h. A head may read rows of layers below too, and then has a matrix of its own for its own rows (as
EAGLE-3 has, arXiv:2503.01840).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax

from specsparse.engine.cache import KVCache
from specsparse.engine.weights import Layer, Params
from specsparse.kernels import QTensor
from specsparse.speculative.base import DraftContext
from specsparse.speculative.drafters.heads.feature_source import HeadState, OneLayerSource
from specsparse.speculative.drafters.sources import DraftWeights, FedRows


class Input(NamedTuple):
    """One input of a head: RMS norm f32[D], and QTensor [D, D] of what is normalised."""

    norm: jax.Array
    matrix: QTensor


class HeadParams(NamedTuple):
    """The weights of a head.

    Attributes:
        hidden_norm, token_norm: f32[D], RMS norms of its inputs.
        fc_hidden, fc_token: QTensor [D, D]; their products are added.
        layer: of `ModelConfig.plain`.
        output_norm: f32[D].
        below: of the target's rows that enter layers below; their products are added too.
        own: in place of `hidden_norm` and `fc_hidden` where the head reads its own row; None: the same.
    """

    hidden_norm: jax.Array
    token_norm: jax.Array
    fc_hidden: QTensor
    fc_token: QTensor
    layer: Layer
    output_norm: jax.Array
    below: tuple[Input, ...] = ()
    own: Input | None = None


@dataclasses.dataclass(frozen=True)
class HeadSource(OneLayerSource):
    """The head of EAGLE 1 and 2: it reads the target's rows before its output norm, and rows of layers below if it has
    matrices for them.

    Attributes:
        layers: `engine.llama.make_layers` of the head's one layer.
        eps: of the norms.
        features: ids of the layers whose entering rows it reads, as `engine.llama.Want.hidden`; the last rows are last.
    """

    layers: Callable
    eps: float
    features: tuple[int, ...] = ()

    @property
    def wants_hidden(self) -> bool | tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The rows that it reads; those before the output norm where there are no others."""
        return self.features or True

    def read(self, weights: DraftWeights, hidden_BnE: jax.Array, n_valid_B: jax.Array) -> jax.Array:
        """The products of the target's rows, added."""
        w: HeadParams = weights.params
        return self._sum((*w.below, Input(w.hidden_norm, w.fc_hidden)), hidden_BnE, n_valid_B)

    def again(self, weights: DraftWeights, y_BnD: jax.Array, n_valid_B: jax.Array) -> jax.Array:
        """The product of its own rows."""
        w: HeadParams = weights.params
        return self._sum((w.own or Input(w.hidden_norm, w.fc_hidden),), y_BnD, n_valid_B)

    def run(
        self, weights: DraftWeights, ctx: DraftContext, state: HeadState, read_BnD: jax.Array, rows: FedRows
    ) -> tuple[jax.Array, HeadState]:
        """What was read and the product of the token's embedding, added; one layer."""
        batch, n, width = read_BnD.shape
        w: HeadParams = weights.params
        tokens_R = self.vocab.to_draft(rows.tokens).reshape(-1)
        with jax.named_scope("head"):
            e_RD, read_RD = self.kernels.embed(ctx.params.embedding, tokens_R), read_BnD.reshape(batch * n, width)
            (x_RD,) = self.kernels.linear(
                e_RD, (w.fc_token,), norm=w.token_norm, eps=self.eps, residual=read_RD, n_valid=rows.n_valid
            )
            params = Params(ctx.params.embedding, (w.layer,), w.output_norm, None, ctx.params.cos, ctx.params.sin)
            cache = KVCache(state.k, state.v, state.length)
            y_RD, cache, *_ = self.layers(params, x_RD, cache, rows.n_valid, rows.parents, (0,))
        return y_RD.reshape(batch, n, width), state._replace(k=cache.k, v=cache.v)

    def logits(self, weights: DraftWeights, y_BnD: jax.Array, n_valid_B: jax.Array) -> jax.Array:
        """By the target's own output matrix."""
        norm = weights.params.output_norm
        with jax.named_scope("head/output"):
            logits_RN = self.score_rows(weights, y_BnD, n_valid_B, norm=norm, eps=self.eps)
        return logits_RN.reshape(*y_BnD.shape[:2], -1)

    def _sum(self, inputs: Sequence[Input], rows_BnW: jax.Array, n_valid_B: jax.Array) -> jax.Array:
        """float32[B, n, D]: the products of `inputs`, D numbers of `rows_BnW` for each, side by side."""
        batch, n, _ = rows_BnW.shape
        rows_RW, x_RD = rows_BnW.reshape(batch * n, -1), None
        with jax.named_scope("head/read"):
            for i, each in enumerate(inputs):
                h_RD = rows_RW[:, i * self.width : (i + 1) * self.width]
                (x_RD,) = self.kernels.linear(
                    h_RD, (each.matrix,), norm=each.norm, eps=self.eps, residual=x_RD, n_valid=n_valid_B
                )
        assert x_RD is not None
        return x_RD.reshape(batch, n, -1)
