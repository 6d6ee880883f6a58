"""A predictor without training: the gate matrix itself, cut to its largest singular values."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine.weights import Layer
from specsparse.kernels import NeuronChoice, QTensor
from specsparse.kernels.packing.dequant import dequantize
from specsparse.predictors.base import InOneCall, Scored
from specsparse.predictors.factors import Codes, pack_factor
from specsparse.predictors.ffn import gate_matrix
from specsparse.support.options import Count


class SvdWeights(NamedTuple):
    """Weights of one layer: gate * diag(ffn_norm) ~ u v.

    Attributes:
        v: QTensor [k, D].
        u: QTensor [F, k].
        threshold: f32[], on the gate's own scale.
    """

    v: QTensor
    u: QTensor
    threshold: jax.Array


@dataclass(frozen=True)
class Svd(Scored, InOneCall):
    """keep_j where (U V x)_j >= threshold * rms(x), U V the truncated SVD of gate * diag(ffn_norm) (arXiv:2603.14110).

    Dividing by rms(x) puts the score on the scale of the gate, so that one threshold serves all rows.

    Attributes:
        rank: k; cut to what the matrix has.
        threshold: of the approximate gate before its activation.
        codes: type of the packed factors.
    """

    name: ClassVar[str] = "svd"
    rank: Count = 64
    threshold: float = 0.0
    codes: Codes = "f16"

    def own_weights(self, layer: Layer) -> SvdWeights:
        """The factors, each with half of the singular values."""
        u, v = factorise(normed_gate(layer), self.rank)
        return SvdWeights(pack_factor(v, self.codes), pack_factor(u, self.codes), jnp.float32(self.threshold))

    def score(self, weights: SvdWeights, layer: Layer, x_RD: jax.Array, n_valid_B: jax.Array) -> jax.Array:
        """U V z, where z is x over its rms."""
        ones = jnp.ones_like(layer.ffn_norm)
        linear = self.ffn.kernels.linear
        (h_Rk,) = linear(x_RD, (weights.v,), norm=ones, eps=self.ffn.eps, n_valid=n_valid_B)
        (scores_RF,) = linear(h_Rk, (weights.u,), n_valid=n_valid_B)
        return scores_RF

    def choice(self, weights: SvdWeights, layer: Layer) -> NeuronChoice:
        """See `InOneCall`."""
        ones = jnp.ones_like(layer.ffn_norm)
        return NeuronChoice("scores", weights.v, weights.u, norm=ones, threshold=weights.threshold)


def normed_gate(layer: Layer) -> np.ndarray:
    """gate * diag(ffn_norm), f32[F, D]: what the gate does to x / rms(x)."""
    return np.asarray(dequantize(gate_matrix(layer))) * np.asarray(layer.ffn_norm)[None]


def factorise(matrix: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """u f32[F, k] and v f32[k, D] of the best approximation u v of that rank (Eckart and Young 1936)."""
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    root = np.sqrt(values[:rank])
    return left[:, :rank] * root, root[:, None] * right[:rank]


def as_mlp(u: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(fc1, fc2) of PowerInfer's form with the same output: fc1 = [v; -v], fc2 = [u, -u], rank 2 k.

    The ReLU cancels: u (relu(v x) - relu(-v x)) = u v x. Only the threshold 0 carries over, since PowerInfer compares
    without dividing by rms(x).
    """
    return np.concatenate([v, -v], axis=0), np.concatenate([u, -u], axis=1)
