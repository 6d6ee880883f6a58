"""Training of PowerInfer's predictor for one layer: weighted cross-entropy on the form that inference runs."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from specsparse.engine.weights import Layer
from specsparse.errors import UserError
from specsparse.predictors.fit.labels import Labels
from specsparse.predictors.svd import as_mlp, factorise, normed_gate
from specsparse.support.options import Count, Internal, Positive, Range

DENSITY_OFFSET = 0.005
"""Added to the density for the weight of an inactive neuron, as the scripts of Deja Vu do."""


@dataclass(frozen=True)
class FitOptions:
    """How to train.

    Attributes:
        rank: r, rows of fc1.
        epochs: at most.
        batch: rows of a step.
        learning_rate, weight_decay: of AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101).
        patience: epochs without a lower held-out loss before training ends.
        held_out: share of the rows, the last ones, that training does not see.
        negative_weight: of inactive neurons in the loss, the active ones having 1; None is density + 0.005, which
            gives both classes about the same weight. Smaller raises recall and kept share.
        init: "svd" starts from the training-free predictor, "random" from normal weights.
        seed: of the order of rows and of random weights.
    """

    rank: Count = 128
    epochs: Count = 20
    batch: Count = 128
    learning_rate: Positive = 1e-3
    weight_decay: float = 0.01
    patience: Count = 5
    held_out: Annotated[float, Range(0, 1, above=True, below=True)] = 0.1
    negative_weight: Positive | None = None
    init: Literal["svd", "random"] = "svd"
    seed: Annotated[int, Internal()] = 0


class Matrices(NamedTuple):
    """fc1 f32[r, D] on scaled rows, fc2 f32[F, r]."""

    fc1: jax.Array
    fc2: jax.Array


class FitState(NamedTuple):
    """What a restart needs: a pytree of arrays.

    Attributes:
        matrices, optimiser: as they are.
        best: the matrices of the lowest held-out loss.
        best_loss: f32[].
        epoch, stale: int32[], epochs done, and those since the best.
    """

    matrices: Matrices
    optimiser: optax.OptState
    best: Matrices
    best_loss: jax.Array
    epoch: jax.Array
    stale: jax.Array


@dataclass(frozen=True)
class Epoch:
    """What an epoch left on the held-out rows."""

    epoch: int
    loss: float
    recall: float
    precision: float
    kept: float


@dataclass(eq=False)
class LayerTrainer:
    """Trains one layer, epoch by epoch; an epoch depends on state and seed alone, so a restart changes nothing.

    Rows are divided by their rms and by each channel's deviation: a few channels of real residuals are larger than the
    others by orders of magnitude. The first changes no sign of the output (there is no bias, and a ReLU is
    homogeneous), the second is folded into fc1 at the end, so that the result reads the residual as it is, at
    threshold 0.

    Attributes:
        options: how.
        layer: with its gate, for the start.
        rows_ND: f32[N, D] residuals.
        labels: of those rows.
        index: of the layer.
    """

    options: FitOptions
    layer: Layer
    rows_ND: np.ndarray
    labels: Labels
    index: int = 0

    def __post_init__(self):
        x = np.asarray(self.rows_ND, np.float32)
        x = x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + np.float32(1e-12))
        deviation = np.sqrt(np.mean(x * x, axis=0))
        self.scale = np.maximum(deviation, 1e-3 * np.sqrt(np.mean(deviation**2))).astype(np.float32)
        held = max(1, round(self.options.held_out * len(x)))
        if held >= len(x):
            raise UserError(f"{len(x)} rows are too few to train on: raise train.tokens")
        x /= self.scale
        self._train = jnp.asarray(x[:-held]), jnp.asarray(self.labels.bits[:-held])
        self._held = jnp.asarray(x[-held:]), jnp.asarray(self.labels.bits[-held:])
        weight = self.options.negative_weight
        self._weight = jnp.float32(self.labels.density + DENSITY_OFFSET if weight is None else weight)
        self.batch = min(self.options.batch, len(x) - held)

    def start(self) -> FitState:
        """The state before the first epoch; the start itself counts as the best so far."""
        matrices = self._first()
        optimiser = _optimiser(self.options).init(matrices)
        loss = _judge(matrices, *self._held, self._weight)[0]
        zero = jnp.zeros((), jnp.int32)
        return FitState(matrices, optimiser, matrices, loss, zero, zero)

    def _first(self) -> Matrices:
        rng = np.random.default_rng([self.options.seed, self.index, 1 << 20])
        rank, (neurons, width) = self.options.rank, self.layer.ffn_up.shape
        fc1 = rng.normal(0, 1 / np.sqrt(width), (rank, width))
        fc2 = rng.normal(0, 1 / np.sqrt(rank), (neurons, rank))
        if self.options.init == "svd":
            u, v = factorise(normed_gate(self.layer), rank // 2)
            first, second = as_mlp(u, v * self.scale)
            fc1[: len(first)], fc2[:, : second.shape[1]] = first, second
            fc2[:, second.shape[1] :] *= 0.01  # a rank beyond the gate's own says nothing yet
        return Matrices(jnp.asarray(fc1, jnp.float32), jnp.asarray(fc2, jnp.float32))

    def step(self, state: FitState) -> tuple[FitState, Epoch]:
        """One epoch, and what it left on the held-out rows."""
        epoch = int(state.epoch)
        order = np.random.default_rng([self.options.seed, self.index, epoch]).permutation(len(self._train[0]))
        count = len(order) // self.batch
        order = jnp.asarray(order[: count * self.batch].reshape(count, self.batch))
        matrices, optimiser = _epoch(
            replace(self.options, seed=0), state.matrices, state.optimiser, *self._train, order, self._weight
        )
        loss, recall, precision, kept = (x for x in _judge(matrices, *self._held, self._weight))
        better = bool(loss < state.best_loss)
        state = FitState(
            matrices,
            optimiser,
            matrices if better else state.best,
            loss if better else state.best_loss,
            state.epoch + 1,
            jnp.zeros((), jnp.int32) if better else state.stale + 1,
        )
        return state, Epoch(epoch + 1, float(loss), float(recall), float(precision), float(kept))

    def done(self, state: FitState) -> bool:
        """Whether all epochs are over, or the held-out loss has stopped falling."""
        return int(state.epoch) >= self.options.epochs or int(state.stale) >= self.options.patience

    def result(self, state: FitState) -> tuple[np.ndarray, np.ndarray]:
        """(fc1 f32[r, D], fc2 f32[F, r]) for residuals as they are; the largest entry of each is 1."""
        fc1, fc2 = np.asarray(state.best.fc1) / self.scale, np.asarray(state.best.fc2)
        return fc1 / np.abs(fc1).max(), fc2 / np.abs(fc2).max()


def _optimiser(options: FitOptions) -> optax.GradientTransformation:
    return optax.adamw(options.learning_rate, weight_decay=options.weight_decay)


def _scores(matrices: Matrices, x_RD: jax.Array) -> jax.Array:
    """With the ReLU that inference has; the published scripts train without it."""
    return jax.nn.relu(x_RD @ matrices.fc1.T) @ matrices.fc2.T


def _unpack(bits: jax.Array, neurons: int) -> jax.Array:
    return jnp.unpackbits(bits, axis=1)[:, :neurons].astype(jnp.float32)


def _loss(matrices: Matrices, x_RD: jax.Array, bits: jax.Array, weight: jax.Array) -> jax.Array:
    """Mean of w * BCE(sigmoid(score), label), w = 1 where active and `weight` where not."""
    scores = _scores(matrices, x_RD)
    y = _unpack(bits, scores.shape[1])
    return jnp.mean(jnp.where(y > 0, jnp.float32(1), weight) * optax.sigmoid_binary_cross_entropy(scores, y))


@partial(jax.jit, static_argnums=0)
def _epoch(options: FitOptions, matrices, optimiser, x_ND, bits, order, weight):
    update = _optimiser(options).update

    def step(carry, ids):
        matrices, optimiser = carry
        grads = jax.grad(_loss)(matrices, x_ND[ids], bits[ids], weight)
        with jax.numpy_dtype_promotion("standard"):  # optax raises a float to the power of its int32 counter
            updates, optimiser = update(grads, optimiser, matrices)
        return (optax.apply_updates(matrices, updates), optimiser), None

    return jax.lax.scan(step, (matrices, optimiser), order)[0]


@jax.jit
def _judge(matrices: Matrices, x_RD: jax.Array, bits: jax.Array, weight: jax.Array):
    """(loss, recall, precision, kept share) at threshold 0."""
    scores = _scores(matrices, x_RD)
    active, kept = _unpack(bits, scores.shape[1]) > 0, scores >= 0
    both = jnp.sum(active & kept, dtype=jnp.float32)
    ones, found = jnp.sum(active, dtype=jnp.float32), jnp.sum(kept, dtype=jnp.float32)
    floor = jnp.float32(1)
    return (
        _loss(matrices, x_RD, bits, weight),
        both / jnp.maximum(ones, floor),
        both / jnp.maximum(found, floor),
        found / jnp.float32(scores.size),
    )
