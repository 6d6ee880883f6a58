"""PowerInfer's predictor: two matrices with a ReLU between them, on the residual before `ffn_norm`."""

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine.weights import Layer
from specsparse.errors import UserError
from specsparse.kernels import NeuronChoice, QTensor
from specsparse.predictors.base import InOneCall, Needs, Predictor, Scored
from specsparse.predictors.factors import Codes, pack_factor
from specsparse.predictors.ffn import gate_matrix


class MlpWeights(NamedTuple):
    """Weights of one layer.

    Attributes:
        fc1: QTensor [r, D].
        fc2: QTensor [F, r].
        threshold: f32[], on the raw output of fc2.
    """

    fc1: QTensor
    fc2: QTensor
    threshold: jax.Array


@dataclass(frozen=True)
class Mlp(Scored, InOneCall):
    """keep_j where (fc2 relu(fc1 x))_j >= threshold (PowerInfer, arXiv:2312.12456; Deja Vu, arXiv:2310.17157).

    x is the residual itself, not normalised, so that only the threshold 0 means the same for every row.

    Attributes:
        codes: type of the packed matrices; None follows the model's own gates: Q4_0 for codes of four bits, Q8_0 for
            others, F16 for floats.
    """

    name: ClassVar[str] = "mlp"
    needs: ClassVar[Needs] = Needs.TRAINING
    codes: Codes | None = None

    def own_weights(self, layer: Layer) -> NoReturn:
        """Raises UserError: there is nothing to derive them from."""
        raise UserError("predictor mlp is trained or read from a file: run +experiment=train_predictors")

    def score(self, weights: MlpWeights, layer: Layer, x_RD: jax.Array, n_valid_B: jax.Array) -> jax.Array:
        """fc2 relu(fc1 x)."""
        (h_Rr,) = self.ffn.kernels.linear(x_RD, (weights.fc1,), n_valid=n_valid_B)
        (scores_RF,) = self.ffn.kernels.linear(jnp.maximum(h_Rr, jnp.float32(0)), (weights.fc2,), n_valid=n_valid_B)
        return scores_RF

    def choice(self, weights: MlpWeights, layer: Layer) -> NeuronChoice:
        """See `InOneCall`."""
        return NeuronChoice("scores", weights.fc1, weights.fc2, relu=True, threshold=weights.threshold)


def settled(predictor: Predictor, layer: Layer) -> tuple[Predictor, Codes]:
    """A trained predictor for a model with such layers, the type of its matrices chosen, and that type."""
    if not isinstance(predictor, Mlp):
        return predictor, "f16"
    own: dict[str, Codes] = {"nibble": "q4_0", "int8": "q8_0"}
    codes = predictor.codes or own.get(gate_matrix(layer).layout.codes, "f16")
    return replace(predictor, codes=codes), codes


def mlp_weights(fc1: np.ndarray, fc2: np.ndarray, threshold: float = 0.0, *, codes: Codes = "f16") -> MlpWeights:
    """Packs fc1 f32[r, D] and fc2 f32[F, r] as `predictors.factors.pack_factor` does.

    Raises:
        UserError: shapes that do not fit, a threshold that is NaN, values the type cannot hold.
    """
    if fc1.ndim != 2 or fc2.ndim != 2 or fc1.shape[0] != fc2.shape[1]:
        raise UserError(f"a predictor of fc1 {fc1.shape} and fc2 {fc2.shape}: their ranks differ")
    if np.isnan(threshold):
        raise UserError("a predictor's threshold is NaN; give a number")
    limit = np.inf if codes in ("f32", "bf16") else 65504.0
    for name, matrix in (("fc1", fc1), ("fc2", fc2)):
        if not np.isfinite(matrix).all() or np.abs(matrix).max(initial=0) > limit:
            raise UserError(f"predictor {name} holds values that {codes} cannot hold; train it again or use f32")
    return MlpWeights(pack_factor(fc1, codes), pack_factor(fc2, codes), jnp.float32(threshold))
