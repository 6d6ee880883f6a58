"""What a predictor is: it names the neurons of an FFN worth computing for each row, before they are computed."""

import abc
import enum
import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import jax
import jax.numpy as jnp

from specsparse.engine.pytree import Pytree
from specsparse.engine.weights import Layer
from specsparse.errors import UserError
from specsparse.kernels import NeuronChoice
from specsparse.predictors.ffn import FFN
from specsparse.support.options import Internal, Share


class Needs(enum.Enum):
    """What `fit` reads beside the layer's own weights."""

    NOTHING = "nothing"
    TEXT = "rows of any text"
    PROMPT = "the prompt's own rows"
    TRAINING = "trained weights"


class Predictor(abc.ABC):
    """A rule for which neurons to compute. Final classes are frozen dataclasses, static under jit; their fields are the
    options, but for `ffn: Annotated[FFN, Internal()]`, which every one has.

    Contract C1 holds: a row's mask depends on that row alone (and, where `needs` is PROMPT, on its sequence's prompt).

    Attributes:
        name: in the registry and in `conf/predictor`; by default that of the class.
    """

    name: ClassVar[str]

    def __init_subclass__(cls) -> None:
        cls.name = vars(cls).get("name", cls.__name__)

    @property
    @abc.abstractmethod
    def needs(self) -> Needs:
        """What `fit` reads."""

    @abc.abstractmethod
    def fit(self, layer: Layer, rows_ND: jax.Array | None = None, *, index: int = 0) -> Pytree:
        """The predictor's weights for a layer: a pytree of arrays, made once on the host.

        Args:
            layer: with its dense matrices.
            rows_ND: f32[N, D] residuals before `ffn_norm`, where `needs` asks for them.
            index: of the layer.

        Raises:
            UserError: what `needs` asks for is not there.
        """

    @abc.abstractmethod
    def keep(self, weights: Pytree, layer: Layer, x_RD: jax.Array, n_valid_B: jax.Array) -> jax.Array:
        """Which neurons to compute: uint8[R, F], 1 = compute; all 0 in rows i >= n_valid[b] of sequence b.

        Args:
            weights: of this layer, from `fit` or from a file.
            layer: the layer.
            x_RD: f32[R, D] residual before `ffn_norm`, R = B * n.
            n_valid_B: int32[B].
        """


class InOneCall(abc.ABC):
    """A predictor whose `keep` the native kernels also compute within their one call for all layers, bit for bit."""

    @abc.abstractmethod
    def choice(self, weights: Pytree, layer: Layer) -> NeuronChoice:
        """The rule of a layer, of the predictor's weights there."""


@dataclass(frozen=True)
class Scored(Predictor):
    """A predictor that keeps the neurons whose score reaches `weights.threshold` (equality keeps).

    Attributes:
        ffn: the FFN it predicts for.
        recall: choose each layer's threshold so that this share of the true activations of a text is kept; None leaves
            the method's own threshold.
    """

    ffn: Annotated[FFN, Internal()]
    recall: Share | None = None

    @property
    def needs(self) -> Needs:
        """Rows of a text where the threshold is calibrated."""
        return Needs.NOTHING if self.recall is None else Needs.TEXT

    def fit(self, layer: Layer, rows_ND: jax.Array | None = None, *, index: int = 0) -> Pytree:
        """The method's own weights, the threshold calibrated where `recall` asks for it."""
        weights = self.own_weights(layer)
        if self.recall is None:
            return weights
        return at_recall(self, weights, layer, require_rows(self, rows_ND), recall=self.recall)

    @abc.abstractmethod
    def own_weights(self, layer: Layer) -> Pytree:
        """Weights with the method's own `threshold` f32[]."""

    @abc.abstractmethod
    def score(self, weights: Pytree, layer: Layer, x_RD: jax.Array, n_valid_B: jax.Array) -> jax.Array:
        """f32[R, F]; the larger, the surer that the neuron is active."""

    def keep(self, weights: Pytree, layer: Layer, x_RD: jax.Array, n_valid_B: jax.Array) -> jax.Array:
        """uint8[R, F]: score >= threshold."""
        return as_mask(self.score(weights, layer, x_RD, n_valid_B) >= weights.threshold, n_valid_B)


@dataclass(frozen=True)
class OfText(Predictor):
    """A predictor that keeps a share of what it looks at, by thresholds that are quantiles over a text.

    Attributes:
        ffn: the FFN it predicts for.
        share: to keep, on average over the text.
    """

    needs: ClassVar[Needs] = Needs.TEXT
    ffn: Annotated[FFN, Internal()]
    share: Share = 0.5


def at_recall(predictor: Scored, weights: Pytree, layer: Layer, rows_ND: jax.Array, *, recall: float) -> Pytree:
    """`weights` with the highest threshold that keeps a share `recall` of the true activations of `rows_ND`.

    Raises:
        UserError: the activation has no zeros, so that every neuron counts as active, or none is active on those rows.
    """
    if not predictor.ffn.has_zeros:
        raise UserError(
            f"{predictor.name}: recall={recall} means nothing with SiLU, where no neuron is ever zero: "
            "give predictor=gate_threshold and its share"
        )
    n = jnp.asarray([rows_ND.shape[0]], jnp.int32)
    scores = predictor.score(weights, layer, rows_ND, n)
    active = predictor.ffn.neurons(layer, rows_ND, n) != 0
    count = int(jnp.sum(active, dtype=jnp.int32))
    if count == 0:
        raise UserError(f"{predictor.name}: no neuron is active on the calibration text; give a longer text")
    ranked = jnp.sort(jnp.where(active, scores, -jnp.inf).reshape(-1))[::-1]
    return weights._replace(threshold=ranked[min(max(math.ceil(recall * count), 1), count) - 1])


def as_mask(keep_RF: jax.Array, n_valid_B: jax.Array) -> jax.Array:
    """bool[R, F] as uint8[R, F], zero in the rows that do not count."""
    rows, batch = keep_RF.shape[0], n_valid_B.shape[0]
    n = rows // batch
    valid = (jnp.arange(n, dtype=jnp.int32)[None] < n_valid_B[:, None]).reshape(rows, 1)
    return (keep_RF & valid).astype(jnp.uint8)


def require_rows(predictor: Predictor, rows_ND: jax.Array | None) -> jax.Array:
    """`rows_ND`, or a UserError that says what they are for."""
    if rows_ND is None or rows_ND.shape[0] == 0:
        raise UserError(f"predictor {predictor.name} needs {predictor.needs.value}: give residuals")
    return rows_ND
