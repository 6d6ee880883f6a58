"""The base of predictors: each names the neurons of an FFN worth computing for a row, before they are computed."""

import abc
import enum
from dataclasses import dataclass
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine.config import Act, ModelConfig, parse_activation
from specsparse.engine.pytree import Pytree
from specsparse.engine.weights import Layer
from specsparse.errors import UserError
from specsparse.kernels import Kernels, NeuronChoice, QTensor
from specsparse.kernels.reference.dense import activate
from specsparse.support.options import read
from specsparse.support.registry import Registry


@dataclass(frozen=True)
class FFN:
    """The FFN that predictors are fitted to and judged by, on the model's dense matrices. Static under jit.

    a = act(gate z) * up_act(up z), y = down a, with z = rmsnorm(x) * ffn_norm.
    """

    kernels: Kernels  # of the products
    eps: float  # of the norm
    act: Act = "silu"  # of the gate, or of `up` if the layer has no gate
    up_act: Act | None = None  # of `up` ("relu" for dReLU, arXiv:2406.05955), or None

    @staticmethod
    def from_config(config: ModelConfig, kernels: Kernels) -> "FFN":
        """The FFN of a model, or a UserError if it has biases, which no predictor here takes into account."""
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
        gate, up, _ = layer.dense
        if gate is None:
            return activate(self.gate(layer, x_RD, n_valid_B), self.act)
        g_RF, u_RF = self._products(layer, (gate, up), x_RD, n_valid_B)
        return activate(g_RF, self.act) * activate(u_RF, self.up_act)

    def down(self, layer: Layer, a_RF: jax.Array, n_valid_B: jax.Array, residual=None) -> jax.Array:
        """The output f32[R, D] of neurons a, added to `residual` if there is one."""
        (y_RD,) = self.kernels.linear(a_RF, (layer.ffn_down,), residual=residual, n_valid=n_valid_B)
        return y_RD

    def _products(self, layer: Layer, matrices: tuple[QTensor, ...], x_RD: jax.Array, n_valid_B: jax.Array):
        return self.kernels.linear(x_RD, matrices, norm=layer.ffn_norm, eps=self.eps, n_valid=n_valid_B)


def gate_matrix(layer: Layer) -> QTensor:
    """The matrix that decides which neurons are active, [F, D]: the gate, or `up` of an ungated FFN."""
    gate, up, _ = layer.dense
    return up if gate is None else gate


class Needs(enum.Enum):
    """The data that `fit` reads beside the layer's own weights."""

    NOTHING = "nothing"
    TEXT = "rows of any text"
    PROMPT = "the prompt's own rows"
    TRAINING = "trained weights"


class Predictor(abc.ABC):
    """A rule for which neurons to compute. Final classes are frozen dataclasses, static under jit; their fields are the
    options, but for `ffn: Annotated[FFN, Internal()]`, which every one has.

    Contract C1 holds: a row's mask depends on that row alone (and, if `needs` is PROMPT, on its sequence's prompt).

    Attributes:
        name: in the registry and in `conf/predictor`; by default that of the class.
    """

    name: ClassVar[str]

    def __init_subclass__(cls) -> None:
        cls.name = vars(cls).get("name", cls.__name__)

    @property
    def needs(self) -> Needs:
        """The data that `fit` reads, beside the layer's weights."""
        return Needs.NOTHING

    def fit(self, layer: Layer, rows_ND: jax.Array | None = None, *, index: int = 0) -> Pytree:
        """The predictor's weights for a layer: a pytree of arrays, made once on the host; by default none.

        `rows_ND` are residuals before `ffn_norm`, f32[N, D]; UserError if `needs` asks for them and they are None.
        `index` is the layer's number in the model.
        """
        return None

    @abc.abstractmethod
    def keep(self, weights: Pytree, layer: Layer, x_RD: jax.Array, n_valid_B: jax.Array) -> jax.Array:
        """The neurons to compute: uint8[R, F], 1 = compute; all 0 in rows i >= n_valid[b] of sequence b.

        `weights` are the layer's, from `fit` or from a file; `x_RD` are residuals before `ffn_norm`, f32[R, D], of B
        sequences of n rows each, R = B n; `n_valid_B`, int32[B], are the rows of each that count.
        """


class InOneCall(Predictor):
    """A predictor whose `keep` the native kernels also compute within their one call for all layers, bit for bit."""

    @abc.abstractmethod
    def choice(self, weights: Pytree, layer: Layer) -> NeuronChoice:
        """The rule of a layer, from the predictor's weights there."""


def as_mask(keep_RF: jax.Array, n_valid_B: jax.Array) -> jax.Array:
    """bool[R, F] as uint8[R, F], zero in the rows that do not count."""
    rows, batch = keep_RF.shape[0], n_valid_B.shape[0]
    n = rows // batch
    valid = (jnp.arange(n, dtype=jnp.int32)[None] < n_valid_B[:, None]).reshape(rows, 1)
    return (keep_RF & valid).astype(jnp.uint8)


def quantile(values: jax.Array, at: float, *, method: Literal["linear", "higher"] = "linear") -> np.float32:
    """By numpy, which sorts nothing; XLA's sort takes a second to compile."""
    return np.float32(np.quantile(np.asarray(values), at, method=method))


def require_rows(predictor: Predictor, rows_ND: jax.Array | None) -> jax.Array:
    """`rows_ND`, or a UserError that says which are needed."""
    if rows_ND is None or rows_ND.shape[0] == 0:
        raise UserError(f"predictor {predictor.name} needs {predictor.needs.value}: give residuals")
    return rows_ND


PREDICTORS: Registry[Predictor] = Registry(
    "predictor",
    "specsparse.predictors.base:Predictor",
    "specsparse.predictors",
    {
        "mlp": "scored:Mlp",
        "svd": "scored:Svd",
        "signbit": "scored:SignBit",
        "gate_threshold": "rules:GateThreshold",
        "sequence": "rules:Sequence",
        "hot": "rules:Hot",
        "oracle": "rules:Oracle",
        "random": "rules:Random",
        "teal": "rules:Teal",
    },
    aliases={
        "powerinfer": "mlp",
        "dejavu": "mlp",
        "sparseinfer": "signbit",
        "cats": "gate_threshold",
        "griffin": "sequence",
        "coreinfer": "sequence",
    },
)
"""Predictors by name. Names of papers stand for the same ones; coreinfer sets the rule, too."""


def get_predictor(name: str, ffn: FFN, **options: object) -> Predictor:
    """The predictor of that name, or `module:Class`, for an FFN; an option None counts as not given. UserError for an
    unknown name or option (with the nearest valid one), and for a value of the wrong type or out of range."""
    rule = {"rule": name} if name in ("coreinfer", "griffin") and options.get("rule") is None else {}
    return read(PREDICTORS.find(name), {**options, **rule}, group="predictor", name=name, internal={"ffn": ffn})
