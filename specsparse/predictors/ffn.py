"""The gated FFN that predictors are fitted to and judged by, on the model's dense matrices."""

from dataclasses import dataclass

import jax

from specsparse.engine.activation import Act, activate, parse_activation
from specsparse.engine.config import ModelConfig
from specsparse.engine.weights import Layer
from specsparse.errors import UserError
from specsparse.kernels import Kernels, QTensor


@dataclass(frozen=True)
class FFN:
    """a = act(gate z) * up_act(up z), y = down a, with z = rmsnorm(x) * ffn_norm. Static under jit.

    Attributes:
        kernels: of the products.
        eps: of the norm.
        act: of the gate, or of `up` where the layer has no gate.
        up_act: of `up` ("relu" for dReLU, arXiv:2406.05955), or None.
    """

    kernels: Kernels
    eps: float
    act: Act = "silu"
    up_act: Act | None = None

    @staticmethod
    def of(config: ModelConfig, kernels: Kernels) -> "FFN":
        """The FFN of a model.

        Raises:
            UserError: its FFN has biases, which no predictor here takes into account.
        """
        biased = [name for name in config.biases if name.startswith("ffn_")]
        if biased:
            raise UserError(f"predictors need an FFN without biases, and this model has one on {biased[0]}")
        config.check_sums("a predictor")
        return FFN(kernels, config.norm_eps, *parse_activation(config.activation))

    @property
    def has_zeros(self) -> bool:
        """Whether neurons can be exactly zero (not so with SiLU and GELU)."""
        return self.act not in ("silu", "gelu_tanh")

    def gate(self, layer: Layer, x_RD: jax.Array, n_valid_B: jax.Array) -> jax.Array:
        """f32[R, F]: what `act` is applied to."""
        return self._products(layer, (gate_matrix(layer),), x_RD, n_valid_B)[0]

    def neurons(self, layer: Layer, x_RD: jax.Array, n_valid_B: jax.Array) -> jax.Array:
        """The neurons' values a, f32[R, F]; zero in rows that do not count."""
        gate = gate_matrix(layer)
        if layer.ffn_gate is None:
            return activate(self.gate(layer, x_RD, n_valid_B), self.act)
        g_RF, u_RF = self._products(layer, (gate, layer.ffn_up), x_RD, n_valid_B)
        return activate(g_RF, self.act) * activate(u_RF, self.up_act)

    def down(self, layer: Layer, a_RF: jax.Array, n_valid_B: jax.Array, residual=None) -> jax.Array:
        """The output f32[R, D] of neurons a, added to `residual` where there is one."""
        (y_RD,) = self.kernels.linear(a_RF, (layer.ffn_down,), residual=residual, n_valid=n_valid_B)
        return y_RD

    def _products(self, layer: Layer, matrices: tuple[QTensor, ...], x_RD: jax.Array, n_valid_B: jax.Array):
        return self.kernels.linear(x_RD, matrices, norm=layer.ffn_norm, eps=self.eps, n_valid=n_valid_B)


def gate_matrix(layer: Layer) -> QTensor:
    """The matrix that decides which neurons are active, [F, D]: the gate, or `up` of an ungated FFN.

    Raises:
        UserError: the layer keeps no dense matrices.
    """
    found = layer.ffn_gate if layer.ffn_gate is not None else layer.ffn_up
    if found is None or layer.ffn_down is None:
        raise UserError('a predictor is fitted on dense matrices, and this model keeps none: load it with ffn="dense"')
    return found
