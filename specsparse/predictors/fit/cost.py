"""What a predictor costs for one token and layer, in bytes read and in seconds, beside the dense FFN."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import jax
import jax.numpy as jnp

from specsparse.engine.pytree import Pytree
from specsparse.engine.weights import Layer
from specsparse.kernels import QTensor
from specsparse.predictors.base import Predictor
from specsparse.predictors.ffn import FFN, gate_matrix
from specsparse.predictors.gate_threshold import GateThreshold
from specsparse.predictors.oracle import Oracle
from specsparse.support.in_turn import in_turn, seconds

_REPEATS, _CALLS = 7, 20


@dataclass(frozen=True)
class Cost:
    """Of one token in one layer.

    Attributes:
        predictor_bytes: weights that the prediction reads. An oracle reads nothing: it is a bound, not a method.
        sparse_bytes: of the FFN's matrices, for the kept neurons.
        dense_bytes: of the FFN's matrices, all of them.
        predictor_s, dense_s: seconds of the prediction, and of the dense FFN, by the model's kernels.
    """

    predictor_bytes: int
    sparse_bytes: int
    dense_bytes: int
    predictor_s: float
    dense_s: float

    @property
    def bytes_share(self) -> float:
        """Bytes of prediction and kept neurons over those of the dense FFN."""
        return (self.predictor_bytes + self.sparse_bytes) / self.dense_bytes


def cost_of(predictor: Predictor, ffn: FFN, weights: Pytree, layer: Layer, *, kept: float, width: int) -> Cost:
    """Counts and measures; `kept` is the share of neurons kept, `width` is D."""
    own, rest = bytes_of(predictor, weights, layer)

    def keep(weights, layer, x_RD):
        return predictor.keep(weights, layer, x_RD, one).astype(jnp.int32)

    def dense(weights, layer, x_RD):
        return ffn.down(layer, ffn.neurons(layer, x_RD, one), one)

    one = jnp.ones((1,), jnp.int32)
    calls = {f: _timing(f, weights, layer, width) for f in (keep, dense)}
    taken = in_turn(calls, repeats=_REPEATS)
    return Cost(
        predictor_bytes=own,
        sparse_bytes=round(kept * rest),
        dense_bytes=sum(m.nbytes for m in matrices(layer)),
        predictor_s=median(taken[keep]),
        dense_s=median(taken[dense]),
    )


def bytes_of(predictor: Predictor, weights: Pytree, layer: Layer) -> tuple[int, int]:
    """(bytes that the prediction reads, bytes of the FFN's matrices that follow the kept neurons) of a layer."""
    own, rest = sum(leaf.nbytes for leaf in jax.tree.leaves(weights)), sum(m.nbytes for m in matrices(layer))
    if isinstance(predictor, GateThreshold):  # its gate is read in full, and not again
        own, rest = own + gate_matrix(layer).nbytes, rest - gate_matrix(layer).nbytes
    return (0 if isinstance(predictor, Oracle) else own), rest


def matrices(layer: Layer) -> list[QTensor]:
    """The dense matrices of the layer's FFN."""
    return [m for m in (layer.ffn_gate, layer.ffn_up, layer.ffn_down) if m is not None]


def _timing(function: Callable, weights: Pytree, layer: Layer, width: int) -> Callable[[], float]:
    """Seconds of function(weights, layer, x f32[1, D]), many times in one program, each after the last."""

    @jax.jit
    def program(weights, layer, x_RD):
        def again(_, x_RD):  # depends on all of the result, and changes nothing
            total = jnp.sum(function(weights, layer, x_RD))
            return jnp.where(total == jnp.asarray(12345, total.dtype), -x_RD, x_RD)

        return jax.lax.fori_loop(0, _CALLS, again, x_RD)

    x_RD = jnp.ones((1, width), jnp.float32)
    return lambda: seconds(lambda: program(weights, layer, x_RD).block_until_ready()) / _CALLS
