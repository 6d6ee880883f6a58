"""PowerInfer's predictor fitted to a layer: labels, training, and the file of all layers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from specsparse.engine.weights import Layer
from specsparse.errors import UserError
from specsparse.predictors.base import FFN
from specsparse.predictors.scored import Codes, Factors, as_mlp, factorise, mlp_weights, normed_gate
from specsparse.support.files import read_tensors, write_tensors
from specsparse.support.options import Count, Internal, Positive, Range

DENSITY_OFFSET = 0.005
"""Added to the density for the weight of an inactive neuron, as the scripts of Deja Vu do."""
_CHUNK = 256  # rows of a product when labels are made
_FORMAT = "specsparse.predictors.mlp"


@dataclass(frozen=True)
class Labels:
    bits: np.ndarray  # uint8[N, ceil(F/8)], as `numpy.packbits` of the labels
    density: float  # share of ones


def need_zeros(ffn: FFN, active_share: float | None) -> None:
    """Refuses, with a UserError, an FFN without zeros and no `active_share`: no neuron is active but by a share."""
    if active_share is None and not ffn.has_zeros:
        raise UserError(
            "with SiLU no neuron is ever zero, so there is nothing to learn: give train.active_share=0.3 to call the "
            "largest 30 % active, or use predictor=gate_threshold, which needs no training"
        )


def label(ffn: FFN, layer: Layer, rows_ND: np.ndarray, *, active_share: float | None = None) -> Labels:
    """Labels of rows f32[N, D]: |a| > 0, or for `active_share` |a| above the quantile that leaves this share.

    The label is on a itself, gate and up together, and on its size: `relu(gate) * up > 0` would drop the neurons whose
    product is negative. UserError for a layer that is never or always active.
    """
    neurons = jax.jit(ffn.neurons)
    chunks = [rows_ND[i : i + _CHUNK] for i in range(0, len(rows_ND), _CHUNK)]
    size_NF = np.concatenate([np.abs(neurons(layer, jnp.asarray(c), jnp.asarray([len(c)], jnp.int32))) for c in chunks])
    active_NF = size_NF > (0.0 if active_share is None else float(np.quantile(size_NF, 1 - active_share)))
    density = float(active_NF.mean())
    if not 0 < density < 1:
        raise UserError(
            f"on this text {'no' if density == 0 else 'every'} neuron of a layer is active: nothing to learn"
        )
    return Labels(np.packbits(active_NF, axis=1), density)


@dataclass(frozen=True)
class FitOptions:
    rank: Count = 128  # r, rows of fc1
    epochs: Count = 20  # at most
    batch: Count = 128  # rows of a step
    learning_rate: Positive = 1e-3  # of AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101)
    weight_decay: float = 0.01  # of AdamW
    patience: Count = 5  # epochs without a lower held-out loss before training ends
    # share of the rows, the last ones, that training does not see
    held_out: Annotated[float, Range(0, 1, above=True, below=True)] = 0.1
    # of inactive neurons in the loss, the active ones having 1; None is density + 0.005, which gives both classes
    # about the same weight. Smaller raises recall and kept share
    negative_weight: Positive | None = None
    # "svd" starts from the training-free predictor, "random" from normal weights
    init: Literal["svd", "random"] = "svd"
    seed: Annotated[int, Internal()] = 0  # of the order of rows and of random weights


class Matrices(NamedTuple):
    """fc1 f32[r, D] on scaled rows, fc2 f32[F, r]."""

    fc1: jax.Array
    fc2: jax.Array


class FitState(NamedTuple):
    """All that a restart needs: a pytree of arrays."""

    matrices: Matrices
    optimiser: optax.OptState
    best: Matrices  # the matrices of the lowest held-out loss
    best_loss: jax.Array  # f32[]
    epoch: jax.Array  # int32[], epochs done
    stale: jax.Array  # int32[], epochs since the best


@dataclass(frozen=True)
class Epoch:
    """An epoch's number, and the rates on the held-out rows after it."""

    epoch: int
    loss: float
    recall: float
    precision: float
    kept: float


class LayerTrainer:
    """Trains one layer, epoch by epoch, by weighted cross-entropy on the form that inference runs.

    An epoch depends on state and seed alone, so a restart changes nothing. Rows are divided by their rms and by each
    channel's deviation: a few channels of real residuals are larger than the others by orders of magnitude. The first
    changes no sign of the output (there is no bias, and a ReLU is homogeneous), the second is folded into fc1 at the
    end, so that the result reads the residual as it is, at threshold 0.

    Training begins with the layer's gate. Rows are residuals f32[N, D]; UserError if they are too few.
    """

    def __init__(self, options: FitOptions, layer: Layer, rows_ND: np.ndarray, labels: Labels, index: int = 0):
        self.options, self.layer, self.index = options, layer, index
        x = np.asarray(rows_ND, np.float32)
        x = x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + np.float32(1e-12))
        deviation = np.sqrt(np.mean(x * x, axis=0))
        self.scale = np.maximum(deviation, 1e-3 * np.sqrt(np.mean(deviation**2))).astype(np.float32)
        held = max(1, round(options.held_out * len(x)))
        if held >= len(x):
            raise UserError(f"{len(x)} rows are too few to train on: raise train.tokens")
        x /= self.scale
        self._train = jnp.asarray(x[:-held]), jnp.asarray(labels.bits[:-held])
        self._held = jnp.asarray(x[-held:]), jnp.asarray(labels.bits[-held:])
        weight = options.negative_weight
        self._weight = jnp.float32(labels.density + DENSITY_OFFSET if weight is None else weight)
        self.batch = min(options.batch, len(x) - held)

    def start(self) -> FitState:
        """The state before the first epoch, which counts as the best so far."""
        rng = np.random.default_rng([self.options.seed, self.index, 1 << 20])
        rank, (neurons, width) = self.options.rank, self.layer.dense.up.shape
        fc1 = rng.normal(0, 1 / np.sqrt(width), (rank, width))
        fc2 = rng.normal(0, 1 / np.sqrt(rank), (neurons, rank))
        if self.options.init == "svd":
            u, v = factorise(normed_gate(self.layer), rank // 2)
            first, second = as_mlp(u, v * self.scale)
            fc1[: len(first)], fc2[:, : second.shape[1]] = first, second
            fc2[:, second.shape[1] :] *= 0.01  # a rank beyond the gate's own says nothing yet
        matrices = Matrices(jnp.asarray(fc1, jnp.float32), jnp.asarray(fc2, jnp.float32))
        loss = _judge(matrices, *self._held, self._weight)[0]
        zero = jnp.zeros((), jnp.int32)
        return FitState(matrices, _optimiser(self.options).init(matrices), matrices, loss, zero, zero)

    def step(self, state: FitState) -> tuple[FitState, Epoch]:
        """One epoch, and its rates on the held-out rows."""
        epoch = int(state.epoch)
        order = np.random.default_rng([self.options.seed, self.index, epoch]).permutation(len(self._train[0]))
        count = len(order) // self.batch
        order = jnp.asarray(order[: count * self.batch].reshape(count, self.batch))
        matrices, optimiser = _epoch(
            replace(self.options, seed=0), state.matrices, state.optimiser, *self._train, order, self._weight
        )
        loss, *rates = _judge(matrices, *self._held, self._weight)
        state = state._replace(matrices=matrices, optimiser=optimiser, epoch=state.epoch + 1, stale=state.stale + 1)
        if bool(loss < state.best_loss):
            state = state._replace(best=matrices, best_loss=loss, stale=jnp.zeros((), jnp.int32))
        return state, Epoch(epoch + 1, float(loss), *map(float, rates))

    def done(self, state: FitState) -> bool:
        """True if all epochs are over or the held-out loss has stopped falling."""
        return int(state.epoch) >= self.options.epochs or int(state.stale) >= self.options.patience

    def result(self, state: FitState) -> tuple[np.ndarray, np.ndarray]:
        """(fc1 f32[r, D], fc2 f32[F, r]) for residuals as they are; the largest entry of each is 1."""
        fc1, fc2 = np.asarray(state.best.fc1) / self.scale, np.asarray(state.best.fc2)
        return fc1 / np.abs(fc1).max(), fc2 / np.abs(fc2).max()


def _optimiser(options: FitOptions) -> optax.GradientTransformation:
    return optax.adamw(options.learning_rate, weight_decay=options.weight_decay)


def _loss(matrices: Matrices, x_RD: jax.Array, bits: jax.Array, weight: jax.Array):
    """(mean of w * BCE(sigmoid(score), label), (scores, labels)); w is 1 for active neurons and `weight` for others.

    The scores have the ReLU that inference has; the published scripts train without it.
    """
    scores = jax.nn.relu(x_RD @ matrices.fc1.T) @ matrices.fc2.T
    y = jnp.unpackbits(bits, axis=1)[:, : scores.shape[1]].astype(jnp.float32)
    loss = jnp.where(y > 0, jnp.float32(1), weight) * optax.sigmoid_binary_cross_entropy(scores, y)
    return jnp.mean(loss), (scores, y)


@partial(jax.jit, static_argnums=0)
def _epoch(options: FitOptions, matrices, optimiser, x_ND, bits, order, weight):
    update = _optimiser(options).update

    def step(carry, ids):
        matrices, optimiser = carry
        grads, _ = jax.grad(_loss, has_aux=True)(matrices, x_ND[ids], bits[ids], weight)
        with jax.numpy_dtype_promotion("standard"):  # optax raises a float to the power of its int32 counter
            updates, optimiser = update(grads, optimiser, matrices)
        return (optax.apply_updates(matrices, updates), optimiser), None

    return jax.lax.scan(step, (matrices, optimiser), order)[0]


@jax.jit
def _judge(matrices: Matrices, x_RD: jax.Array, bits: jax.Array, weight: jax.Array):
    """(loss, recall, precision, kept share) at threshold 0."""
    loss, (scores, y) = _loss(matrices, x_RD, bits, weight)
    active, kept, least = y > 0, scores >= 0, jnp.float32(1)
    both, ones, found = (jnp.sum(mask, dtype=jnp.float32) for mask in (active & kept, active, kept))
    return loss, both / jnp.maximum(ones, least), both / jnp.maximum(found, least), found / jnp.float32(scores.size)


def save_predictors(
    path: Path, pairs: Sequence[tuple[np.ndarray, np.ndarray]], *, threshold: float = 0.0, dtype: type = np.float32
) -> None:
    """Writes (fc1 [r, D], fc2 [F, r]) of every layer, in order, as float32 or float16, to one safetensors file."""
    tensors = {}
    for i, (fc1, fc2) in enumerate(pairs):
        tensors |= {f"layers.{i}.fc1.weight": fc1.astype(dtype), f"layers.{i}.fc2.weight": fc2.astype(dtype)}
    write_tensors(path, tensors, {"format": _FORMAT, "layers": len(pairs), "threshold": threshold})


def load_pairs(path: Path) -> tuple[list[tuple[np.ndarray, np.ndarray]], float]:
    """Pairs and threshold that `save_predictors` wrote; UserError for a missing or damaged file, or another kind."""
    tensors, meta = read_tensors(path)
    count = int(meta["layers"]) if meta.get("format") == _FORMAT else 0
    names = [(f"layers.{i}.fc1.weight", f"layers.{i}.fc2.weight") for i in range(count)]
    if not names or any(name not in tensors for pair in names for name in pair):
        raise UserError(f"{path}: holds no predictors of specsparse; train some with +experiment=train_predictors")
    return [(tensors[first], tensors[second]) for first, second in names], float(meta["threshold"])


def load_predictors(path: Path, *, codes: Codes = "f16", threshold: float | None = None) -> tuple[Factors, ...]:
    """The weights of every layer for `Mlp`, packed in the type and under the threshold that `settled` says; None: the
    file's."""
    pairs, own = load_pairs(path)
    threshold = own if threshold is None else threshold
    return tuple(mlp_weights(fc1, fc2, threshold, codes=codes) for fc1, fc2 in pairs)
