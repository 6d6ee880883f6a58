"""Predictors that guess a score for each neuron from the residual: trained, from the gate's SVD, or from signs."""

import abc
import math
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal, NamedTuple, NoReturn, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from gguf import quants
from gguf.constants import GGMLQuantizationType

from specsparse.engine.pytree import Pytree
from specsparse.engine.weights import Layer
from specsparse.errors import UserError
from specsparse.kernels import NeuronChoice, QTensor, SignRows, pack_signs
from specsparse.kernels.packing.dequant import dequantize, pack_float
from specsparse.kernels.packing.pack import pack_qtensor
from specsparse.kernels.qtensor import BLOCK
from specsparse.kernels.reference.sparse import signs_alike
from specsparse.predictors.base import FFN, InOneCall, Needs, Predictor, as_mask, gate_matrix, quantile, require_rows
from specsparse.support.options import Count, Internal, Positive, Share


@dataclass(frozen=True)
class Scored(Predictor):
    """A predictor that keeps the neurons whose score reaches `weights.threshold` (equality keeps).

    Attributes:
        ffn: the FFN it predicts for.
        recall: choose each layer's threshold so that this share of the true activations of a text is kept; None leaves
            the method's own threshold.
        share: choose it so that this share of a text's neurons is kept.
    """

    ffn: Annotated[FFN, Internal()]
    recall: Share | None = None
    share: Share | None = None

    def __post_init__(self):
        if self.recall is not None and self.share is not None:
            raise UserError(f"predictor.recall and predictor.share both set the threshold of {self.name}: give one")

    @property
    def by_text(self) -> bool:
        return self.recall is not None or self.share is not None

    def differs_by_text(self, other: Predictor) -> bool:
        """Whether thresholds set by a text are all that tells it from another predictor."""
        if not (isinstance(other, Scored) and self.by_text and other.by_text):
            return False
        return replace(other, recall=None, share=None) == replace(self, recall=None, share=None)

    @property
    def needs(self) -> Needs:
        return Needs.TEXT if self.by_text else Needs.NOTHING

    def fit(self, layer: Layer, rows_ND: jax.Array | None = None, *, index: int = 0) -> Pytree:
        weights = self.own_weights(layer)
        return self.on_text(weights, layer, rows_ND) if self.by_text else weights

    def on_text(self, weights: Pytree, layer: Layer, rows_ND: jax.Array | None) -> Pytree:
        """`weights` under the highest threshold that keeps `recall` of the active neurons of `rows_ND`, or `share` of
        all. UserError, for `recall`: an activation without zeros (every neuron counts as active), or no neuron is
        active."""
        rows_ND = require_rows(self, rows_ND)
        if self.share is None and not self.ffn.has_zeros:
            raise UserError(
                f"{self.name}: recall={self.recall} means nothing with SiLU, where no neuron is zero: give its share"
            )
        n = jnp.asarray([rows_ND.shape[0]], jnp.int32)
        scores = self.score(weights, layer, rows_ND, n)
        if self.share is not None:
            return weights._replace(threshold=jnp.asarray(quantile(scores, 1 - self.share, method="higher")))
        active = self.ffn.neurons(layer, rows_ND, n) != 0
        count = int(jnp.sum(active, dtype=jnp.int32))
        if count == 0:
            raise UserError(f"{self.name}: no neuron is active on the calibration text; give a longer text")
        ranked = jnp.sort(jnp.where(active, scores, -jnp.inf).reshape(-1))[::-1]
        assert self.recall is not None
        return weights._replace(threshold=ranked[min(max(math.ceil(self.recall * count), 1), count) - 1])

    @abc.abstractmethod
    def own_weights(self, layer: Layer) -> Pytree:
        """Weights with the method's own `threshold` f32[]."""

    @abc.abstractmethod
    def score(self, weights: Pytree, layer: Layer, x_RD: jax.Array, n_valid_B: jax.Array) -> jax.Array:
        """f32[R, F]; the larger, the surer that the neuron is active."""

    def keep(self, weights: Pytree, layer: Layer, x_RD: jax.Array, n_valid_B: jax.Array) -> jax.Array:
        return as_mask(self.score(weights, layer, x_RD, n_valid_B) >= weights.threshold, n_valid_B)


Codes: TypeAlias = Literal["f32", "f16", "bf16", "q8_0", "q4_0"]
"""Types that a predictor's matrices are kept in: floats, or GGUF's blocks of 32 columns."""


def pack_factor(matrix: np.ndarray, codes: Codes) -> QTensor:
    """A matrix f32[rows, columns] in that type, or in F16 if its columns are no whole blocks."""
    if codes in ("f32", "f16", "bf16"):
        return pack_float(jnp.asarray(matrix), codes)
    if matrix.shape[1] % BLOCK:
        return pack_float(jnp.asarray(matrix), "f16")
    kind, matrix = GGMLQuantizationType[codes.upper()], np.ascontiguousarray(matrix, np.float32)
    rows, cols = matrix.shape
    return pack_qtensor(quants.quantize(matrix, kind), kind, (rows, cols))


class Factors(NamedTuple):
    """One layer's scores by two packed factors: fc1, QTensor [r, D], fc2, QTensor [F, r], and threshold, f32[]."""

    fc1: QTensor
    fc2: QTensor
    threshold: jax.Array


@dataclass(frozen=True)
class LowRank(Scored, InOneCall):
    """Scores of two factors: fc2 relu(fc1 x), or fc2 (fc1 x / rms(x)) if `relu` is False; x is the residual."""

    relu: ClassVar[bool]

    def _norm(self, layer: Layer) -> jax.Array | None:
        assert layer.ffn_norm is not None  # `FFN.from_config` refuses others
        return None if self.relu else jnp.ones_like(layer.ffn_norm)

    def score(self, weights: Factors, layer: Layer, x_RD: jax.Array, n_valid_B: jax.Array) -> jax.Array:
        linear = self.ffn.kernels.linear
        (h_Rr,) = linear(x_RD, (weights.fc1,), norm=self._norm(layer), eps=self.ffn.eps, n_valid=n_valid_B)
        h_Rr = jnp.maximum(h_Rr, jnp.float32(0)) if self.relu else h_Rr
        (scores_RF,) = linear(h_Rr, (weights.fc2,), n_valid=n_valid_B)
        return scores_RF

    def choice(self, weights: Factors, layer: Layer) -> NeuronChoice:
        fc1, fc2, threshold = weights
        return NeuronChoice("scores", fc1, fc2, norm=self._norm(layer), relu=self.relu, threshold=threshold)


@dataclass(frozen=True)
class Mlp(LowRank):
    """keep_j where (fc2 relu(fc1 x))_j >= threshold (PowerInfer, arXiv:2312.12456; Deja Vu, arXiv:2310.17157).

    x is the residual itself, not normalised, so that only the threshold 0 means the same for every row.

    Attributes:
        codes: type of the packed matrices; None follows the model's own gates: Q4_0 for codes of four bits, Q8_0 for
            others, F16 for floats.
        threshold: in place of the file's.
    """

    name: ClassVar[str] = "mlp"
    needs = Needs.TRAINING
    relu: ClassVar[bool] = True
    codes: Codes | None = None
    threshold: float | None = None

    def own_weights(self, layer: Layer) -> NoReturn:
        raise UserError("predictor mlp is trained or read from a file: run +experiment=train_predictors")


class Settled(NamedTuple):
    """A trained predictor for a model, the type of its matrices, and its threshold; None is the file's."""

    predictor: Predictor
    codes: Codes
    threshold: float | None = None


def settled(predictor: Predictor, layer: Layer) -> Settled:
    """A trained predictor for a model with such layers, the type of its matrices chosen."""
    if not isinstance(predictor, Mlp):
        return Settled(predictor, "f16")
    own: dict[str, Codes] = {"nibble": "q4_0", "int8": "q8_0"}
    codes = predictor.codes or own.get(gate_matrix(layer).layout.codes, "f16")
    return Settled(replace(predictor, codes=codes), codes, predictor.threshold)


def mlp_weights(fc1: np.ndarray, fc2: np.ndarray, threshold: float = 0.0, *, codes: Codes = "f16") -> Factors:
    """Packs fc1 f32[r, D] and fc2 f32[F, r] with `pack_factor`; UserError for ranks that differ, a threshold that is
    NaN, or values that the type cannot hold."""
    limit = np.inf if codes in ("f32", "bf16") else 65504.0
    good = all(np.isfinite(m).all() and np.abs(m).max(initial=0) <= limit for m in (fc1, fc2))
    if fc1.ndim != 2 or fc2.ndim != 2 or fc1.shape[0] != fc2.shape[1] or np.isnan(threshold) or not good:
        raise UserError(
            f"a predictor of fc1 {fc1.shape} and fc2 {fc2.shape} at threshold {threshold}: ranks must be equal, the "
            f"threshold a number, and all values such that {codes} can hold them; train it again or use f32"
        )
    return Factors(pack_factor(fc1, codes), pack_factor(fc2, codes), jnp.float32(threshold))


@dataclass(frozen=True)
class Svd(LowRank):
    """keep_j where (U V x)_j >= threshold * rms(x), U V the truncated SVD of gate * diag(ffn_norm) (arXiv:2603.14110).

    Dividing by rms(x) puts the score on the scale of the gate, so that one threshold serves all rows.

    Attributes:
        rank: k, at most that of the matrix.
        threshold: of the approximate gate before its activation.
        codes: type of the packed factors.
    """

    name: ClassVar[str] = "svd"
    relu: ClassVar[bool] = False
    rank: Count = 64
    threshold: float = 0.0
    codes: Codes = "f16"

    def own_weights(self, layer: Layer) -> Factors:
        u, v = factorise(normed_gate(layer), self.rank)
        return Factors(pack_factor(v, self.codes), pack_factor(u, self.codes), jnp.float32(self.threshold))


def normed_gate(layer: Layer) -> np.ndarray:
    """gate * diag(ffn_norm), f32[F, D], the gate of x / rms(x)."""
    return np.asarray(dequantize(gate_matrix(layer))) * np.asarray(layer.ffn_norm)[None]


def factorise(matrix: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """u f32[F, k] and v f32[k, D] of the best approximation u v of that rank (Eckart and Young 1936), each with the
    roots of the singular values."""
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    root = np.sqrt(values[:rank])
    return left[:, :rank] * root, root[:, None] * right[:rank]


def as_mlp(u: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(fc1, fc2) of PowerInfer's form with the same output: fc1 = [v; -v], fc2 = [u, -u], rank 2 k.

    The ReLU cancels: u (relu(v x) - relu(-v x)) = u v x. Only the threshold 0 carries over, since PowerInfer compares
    without dividing by rms(x).
    """
    return np.concatenate([v, -v], axis=0), np.concatenate([u, -u], axis=1)


class SignBitWeights(NamedTuple):
    """One layer's signs of gate * ffn_norm, SignRows [F, D], and threshold, f32[], products that must agree in sign."""

    signs: SignRows
    threshold: jax.Array


@dataclass(frozen=True)
class SignBit(Scored, InOneCall):
    """keep_j where alpha * positives_j >= negatives_j, the products w_jk x_k counted by sign (arXiv:2411.12692).

    The signs of `ffn_norm` are folded into those of the gate, so that x is the residual and no norm is computed.

    Attributes:
        alpha: above 1 keeps more neurons.
    """

    name: ClassVar[str] = "signbit"
    alpha: Positive = 1.0

    def own_weights(self, layer: Layer) -> SignBitWeights:
        gate = normed_gate(layer)
        # alpha p >= D - p is p >= D / (1 + alpha)
        return SignBitWeights(pack_signs(gate), jnp.float32(gate.shape[1] / (1 + self.alpha)))

    def score(self, weights: SignBitWeights, layer: Layer, x_RD: jax.Array, n_valid_B: jax.Array) -> jax.Array:
        return signs_alike(x_RD, weights.signs)

    def keep(self, weights: SignBitWeights, layer: Layer, x_RD: jax.Array, n_valid_B: jax.Array) -> jax.Array:
        kernels = self.ffn.kernels
        return kernels.signbit_keep(x_RD, weights.signs, threshold=weights.threshold, n_valid=n_valid_B)

    def choice(self, weights: SignBitWeights, layer: Layer) -> NeuronChoice:
        return NeuronChoice("signs", signs=weights.signs, threshold=weights.threshold)
