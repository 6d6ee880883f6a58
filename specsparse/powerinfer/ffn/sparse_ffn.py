"""The sparse FFN as an injected `ffn`: a predictor names the neurons of each row, and only their weights are read.

    keep = predictor(x)                                       x is the residual before ffn_norm
    a    = act(gate z) * up_act(up z), z = rmsnorm(x) * ffn_norm
    y    = x + sum of a_j down_t[j] over the kept j, ascending

Song et al. 2023 (arXiv:2312.12456). A mask belongs to its row at any batch size; rows that share a call share the
reading of their neurons.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from specsparse.engine.activation import activate, parse_activation
from specsparse.engine.config import ModelConfig
from specsparse.engine.llama import ChosenNeurons
from specsparse.engine.weights import Layer
from specsparse.errors import UserError
from specsparse.kernels import ChosenFfn, Kernels, SparseStats
from specsparse.powerinfer.ffn.sparse_weights import SparseWeights
from specsparse.predictors.base import InOneCall, Predictor
from specsparse.predictors.bounds import Oracle
from specsparse.predictors.thresholds import GateThreshold, Teal

Keep = Callable[[Layer, jax.Array, jax.Array, jax.Array], jax.Array]
"""keep(layer, x_RD, n_valid_B, a_RF) -> bool[R, F]."""


def by_gate(predictor: Predictor) -> bool:
    """Whether the gate itself decides which neurons are kept, so that it is read for all of them."""
    return isinstance(predictor, Oracle | GateThreshold)


def make_ffn(config: ModelConfig, kernels: Kernels, predictor: Predictor) -> Callable:
    """ffn(layer, x_RD, n_valid_B) -> (y_RD, SparseStats) for `engine.llama.make_forward`; `layer.sparse` is its
    `SparseWeights`, and no dense matrix is needed.

    The oracle and CATS decide by the gate, so it is read for all neurons and the other two matrices for the kept ones.
    What native kernels can decide themselves is a `ChosenNeurons`.

    Raises:
        UserError: an FFN with biases, or a predictor that leaves out inputs and not neurons.
    """
    check_neurons(config, predictor)
    kind = _InOneCall if isinstance(predictor, InOneCall) else _OneByOne
    return kind(config, kernels, predictor)


class _OneByOne:
    """`make_ffn` of any predictor."""

    def __init__(self, config: ModelConfig, kernels: Kernels, predictor: Predictor):
        act, up_act = parse_activation(config.activation)
        self.acts = act, up_act if config.gated else None
        self._config, self._kernels, self._predictor = config, kernels, predictor

    def __call__(self, layer: Layer, x_RD, n_valid_B):
        w: SparseWeights = layer.sparse
        predictor = self._predictor
        if by_gate(predictor):
            keep_RF = jnp.ones((x_RD.shape[0], w.up.shape[0]), jnp.uint8)
        else:
            keep_RF = predictor.keep(w.predictor, layer, x_RD, n_valid_B)
        y_RD, stats = self._kernels.sparse_ffn(
            x_RD, keep_RF, w.gate, w.up, w.down_t, norm=layer.ffn_norm, eps=self._config.norm_eps, n_valid=n_valid_B,
            act=self.acts[0], up_act=self.acts[1], residual=x_RD,
            least=w.predictor.threshold if isinstance(predictor, GateThreshold) else None,
        )  # fmt: skip
        return y_RD, self.seen(stats)

    def seen(self, stats: SparseStats) -> SparseStats:
        """Where the gate decides, what is kept is what is not zero."""
        return stats._replace(kept=stats.nonzero, union=stats.active) if by_gate(self._predictor) else stats


class _InOneCall(_OneByOne, ChosenNeurons):
    """`make_ffn` of a predictor that the kernels know."""

    def of_layer(self, layer: Layer) -> ChosenFfn:
        """See `ChosenNeurons`."""
        w: SparseWeights = layer.sparse
        return ChosenFfn(w.gate, w.up, w.down_t, self._predictor.choice(w.predictor, layer))


def check_neurons(config: ModelConfig, predictor: Predictor) -> None:
    """UserError where a model's neurons cannot be left out one by one."""
    config.check_sums("a sparse FFN")
    if biased := [name for name in config.biases if name.startswith("ffn_")]:
        raise UserError(f"a sparse FFN has no biases, and this model has one on {biased[0]}: load it with ffn='dense'")
    if isinstance(predictor, Teal):
        raise UserError(f"predictor {predictor.name} leaves out inputs and not neurons: it can be evaluated, not run")


def masked_ffn(config: ModelConfig, kernels: Kernels, keep: Keep) -> Callable:
    """The same computed densely and masked, from the layer's dense matrices: the definition, with biases and with
    whatever rounding `kernels` do between the products (F16-faithful mode)."""
    act, up_act = parse_activation(config.activation)
    names = ("ffn_gate", "ffn_up") if config.gated else ("ffn_up",)

    def ffn(layer: Layer, x_RD, n_valid_B):
        outs = kernels.linear(
            x_RD,
            tuple(getattr(layer, name) for name in names),
            norm=layer.ffn_norm,
            eps=config.norm_eps,
            biases=layer.bias(*names),
            n_valid=n_valid_B,
        )
        a_RF = activate(outs[0], act)
        a_RF = a_RF * activate(outs[1], up_act) if config.gated else a_RF
        keep_RF = keep(layer, x_RD, n_valid_B, a_RF) & valid_rows(n_valid_B, x_RD.shape[0])[:, None]
        a_RF = jnp.where(keep_RF, a_RF, jnp.float32(0))
        (y_RD,) = kernels.linear(
            a_RF, (layer.ffn_down,), biases=layer.bias("ffn_down"), residual=x_RD, n_valid=n_valid_B
        )
        return y_RD, _stats(keep_RF, a_RF)

    return ffn


def predicted(predictor: Predictor) -> Keep:
    """The mask of a predictor for `masked_ffn`; there `layer.sparse` is the predictor's own weights."""

    def keep(layer: Layer, x_RD, n_valid_B, a_RF):
        return predictor.keep(layer.sparse, layer, x_RD, n_valid_B) != jnp.uint8(0)

    return keep


def true_activations(layer: Layer, x_RD, n_valid_B, a_RF):
    """The oracle's rule: the activation is not zero."""
    return a_RF != jnp.float32(0)


def valid_rows(n_valid_B, rows: int):
    """bool[R]: whether row i of sequence b is below n_valid[b]."""
    n = rows // n_valid_B.shape[0]
    return (jnp.arange(n, dtype=jnp.int32)[None] < n_valid_B[:, None]).reshape(rows)


def _stats(keep_RF, a_RF) -> SparseStats:
    live_RF = a_RF != jnp.float32(0)
    return SparseStats(
        kept=jnp.sum(keep_RF, axis=1, dtype=jnp.int32),
        union=_in_any_row(keep_RF),
        nonzero=jnp.sum(live_RF, axis=1, dtype=jnp.int32),
        active=_in_any_row(live_RF),
    )


def _in_any_row(mask_RF: jax.Array) -> jax.Array:
    return jnp.sum(jnp.any(mask_RF, axis=0), dtype=jnp.int32)
