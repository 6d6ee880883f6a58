"""An FFN of SiLU rebuilt with ReLU, one layer at a time: the same output from the same inputs, with fewer neurons.

Layers do not depend on each other. What is minimised is the squared error of the output, relative to its size at each
token, and a measure of how many neurons are active whose weight follows their share (the sparsity term of ProSparse,
Song et al., arXiv:2402.13516, raised step by step; the measure is Hoyer's square, DeepHoyer, arXiv:1908.09979, eq. 5,
which does not change with the size of the activations).
"""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from specsparse.errors import UserError
from specsparse.support.options import Count, Internal, Positive, Range, Share
from specsparse.training.ffn_model import FfnMatrices
from specsparse.training.loop import train, trapezoid, updated

_SEARCHED = 20480
"""Tokens that the place to begin is fitted on."""


@dataclass(frozen=True)
class LayerOptions:
    """How a layer is rebuilt.

    Attributes:
        share: of active neurons aimed at.
        linear: share of neurons that begin as linear ones, always active; they count as active.
        passes: over the tokens.
        layer_batch: tokens of a step.
        layer_rate: of Adam; it rises over a twentieth of the steps and falls to 0.
        pressure: how fast the weight of the sparsity term follows the share.
        seed: of the order of tokens.
    """

    share: Share = 0.3
    linear: Annotated[float, Range(0)] = 0.125
    passes: Positive = 1.0
    layer_batch: Count = 256
    layer_rate: Positive = 2e-4
    pressure: Positive = 0.5
    seed: Annotated[int, Internal()] = 0

    def __post_init__(self):
        if self.linear >= self.share:
            raise UserError(f"train.linear={self.linear} must be below train.share={self.share}")


class Judged(NamedTuple):
    """A rebuilt layer on tokens it has not seen: relative squared error of the output, share of active neurons."""

    error: float
    share: float


class _State(NamedTuple):
    ffn: FfnMatrices
    optimiser: optax.OptState
    pressure: jax.Array
    step: jax.Array


def output(ffn: FfnMatrices, z_nD: jax.Array, act=jax.nn.silu) -> jax.Array:
    """down(act(gate z) * up z), [n, D]."""
    return (act(z_nD @ ffn.gate.T) * (z_nD @ ffn.up.T)) @ ffn.down.T


def weights_of(y_nD: jax.Array) -> jax.Array:
    """[n], by which a token's squared error counts: one over its output's size, bounded where the output is small."""
    size = jnp.sum(y_nD * y_nD, axis=1)
    return 1.0 / (size + jnp.median(size))


def hoyer(a_nF: jax.Array) -> jax.Array:
    """[n], (sum a)^2 / (F sum a^2) for a >= 0: at most the share that is not 0, and equal to it if those are alike."""
    return jnp.square(a_nF.sum(axis=1)) / (a_nF.shape[1] * jnp.sum(a_nF * a_nF, axis=1) + 1e-12)


def nearly_counted(a_nF: jax.Array, softness: float = 0.1) -> jax.Array:
    """[n], mean of a / (a + t) for a >= 0, t that part of the active ones' root mean square: nearly their share.

    Its slope is steep near 0, where a model misses a neuron least, and hardly moves those that say much.
    """
    active = jnp.sum((a_nF > 0).astype(jnp.float32), axis=1)
    t = softness * jnp.sqrt(jnp.sum(a_nF * a_nF, axis=1) / jnp.maximum(active, 1.0))
    t = jax.lax.stop_gradient(t)[:, None] + 1e-9
    return jnp.mean(a_nF / (a_nF + t), axis=1)


def constant_direction(z_nD: jax.Array) -> jax.Array:
    """[D], the v with the least sum of (v . z - 1)^2: what a multiple of it adds to a row is nearly a bias."""
    gram = z_nD.T @ z_nD
    ridge = 1e-4 * jnp.trace(gram) / len(gram)
    return jnp.linalg.solve(gram + ridge * jnp.eye(len(gram)), z_nD.sum(axis=0))


def fit_down(h_nF: jax.Array, y_nD: jax.Array, weight_n: jax.Array, towards: jax.Array) -> jax.Array:
    """[D, F]: the weighted ridge regression of y on the neurons h, drawn to `towards` instead of to 0."""
    scaled = h_nF * weight_n[:, None]
    gram = h_nF.T @ scaled
    ridge = 1e-3 * jnp.trace(gram) / len(gram)
    rest = y_nD - h_nF @ towards.T
    return towards + jax.scipy.linalg.solve(gram + ridge * jnp.eye(len(gram)), scaled.T @ rest, assume_a="pos").T


def begin(ffn: FfnMatrices, z_nD: jax.Array, y_nD: jax.Array, options: LayerOptions) -> FfnMatrices:
    """Where training begins, without a step of the optimiser.

    SiLU's negative lobe, summed over all neurons, is nearly a linear map of the inputs. So the neurons that matter
    least become linear: their gate is a constant (`constant_direction`), `up` and `down` are the best map of that rank
    to what ReLU leaves over (reduced-rank regression). The gates of the others are shifted so that, all in all, a
    twentieth less than the share aimed at is active, since training raises it; `down` is fitted anew for all.
    """
    part = slice(0, _SEARCHED)
    width, inputs = ffn.gate.shape
    count = min(round(options.linear * width), inputs)  # a linear map has no higher rank
    share = max((0.95 * options.share * width - count) / (width - count), 0.01)
    return _begin(ffn, z_nD[part], y_nD[part], jnp.float32(min(share, 1.0)), count)


@partial(jax.jit, static_argnums=4)
def _begin(ffn: FfnMatrices, z_nD: jax.Array, y_nD: jax.Array, share: jax.Array, count: int) -> FfnMatrices:
    weight, constant = weights_of(y_nD), constant_direction(z_nD)
    gate = ffn.gate - jnp.quantile(z_nD[:1024] @ ffn.gate.T, 1 - share) * constant[None]
    up, down = ffn.up, ffn.down
    if count:
        h_nF = jax.nn.relu(z_nD @ gate.T) * (z_nD @ up.T)
        value = (weight @ (h_nF * h_nF)) * jnp.sum(down * down, axis=0)
        least = jnp.argsort(value)[:count]
        inwards, outwards = _linear_map(z_nD, y_nD - h_nF @ down.T, weight, count)
        gate = gate.at[least].set(constant[None])
        up, down = up.at[least].set(inwards), down.at[:, least].set(outwards)
    h_nF = jax.nn.relu(z_nD @ gate.T) * (z_nD @ up.T)
    return FfnMatrices(gate, up, fit_down(h_nF, y_nD, weight, down))


def _linear_map(z_nD: jax.Array, y_nD: jax.Array, weight_n: jax.Array, rank: int) -> tuple[jax.Array, jax.Array]:
    """(inwards [rank, D], outwards [D, rank]): the map z -> y of that rank with the least weighted squared error."""
    scaled = z_nD * weight_n[:, None]
    gram = z_nD.T @ scaled
    ridge = 1e-3 * jnp.trace(gram) / len(gram)
    full = jnp.linalg.solve(gram + ridge * jnp.eye(len(gram)), scaled.T @ y_nD)
    basis = jnp.linalg.eigh(full.T @ gram @ full)[1][:, ::-1][:, :rank]
    return (full @ basis).T, basis


def _error(found, y_nD, weight_n) -> jax.Array:
    """Weighted relative squared error."""
    size = jnp.sum(y_nD * y_nD, axis=1)
    wrong = jnp.sum(jnp.square(found - y_nD), axis=1)
    return jnp.sum(weight_n * wrong) / jnp.sum(weight_n * size)


@jax.jit
def _judge(ffn: FfnMatrices, z_nD, y_nD) -> tuple[jax.Array, jax.Array]:
    a_nF = jax.nn.relu(z_nD @ ffn.gate.T)
    found = (a_nF * (z_nD @ ffn.up.T)) @ ffn.down.T
    return _error(found, y_nD, weights_of(y_nD)), jnp.mean((a_nF > 0).astype(jnp.float32))


def judge(ffn: FfnMatrices, original: FfnMatrices, z_nD: np.ndarray) -> Judged:
    """A rebuilt layer against its original."""
    z = jnp.asarray(z_nD, jnp.float32)
    return Judged(*map(float, _judge(ffn, z, output(original, z))))


class Rebuilder:
    """Rebuilds layers of one shape with one compiled step.

    Args:
        options: how.
        tokens: inputs that a layer is given.
    """

    def __init__(self, options: LayerOptions, tokens: int):
        self.options, self.steps = options, max(1, round(options.passes * tokens / min(options.layer_batch, tokens)))
        up = max(1, self.steps // 20)
        rate = trapezoid(options.layer_rate, self.steps, up=up, down=max(self.steps - up, 1))
        self._optimiser = optax.adam(rate, b2=0.98)
        self._step = jax.jit(self._one_step, donate_argnums=(0,))

    def rebuild(self, original: FfnMatrices, z_nD: np.ndarray) -> FfnMatrices:
        """The layer that gives what `original` gives on inputs [n, D]."""
        z = jnp.asarray(z_nD, jnp.float32)
        y = _outputs(original, z)
        ffn = begin(original, z, y, self.options)
        state = _State(ffn, self._optimiser.init(ffn), jnp.float32(1e-2), jnp.int32(0))
        rng, n, batch = np.random.default_rng(self.options.seed), len(z), min(self.options.layer_batch, len(z))
        order = np.concatenate([rng.permutation(n) for _ in range(-(-self.steps * batch // n))])
        batches = (jnp.asarray(order[s * batch : (s + 1) * batch]) for s in range(self.steps))
        state = train(state, batches, lambda state, rows: self._step(state, z, y, rows), steps=self.steps)
        return _fitted(state.ffn, z, y)

    def _one_step(self, state: _State, z_nD, y_nD, rows) -> tuple[_State, jax.Array]:
        z, y = z_nD[rows], y_nD[rows]
        weight = weights_of(y)

        def loss(ffn: FfnMatrices):
            a = jax.nn.relu(z @ ffn.gate.T)
            error = _error((a * (z @ ffn.up.T)) @ ffn.down.T, y, weight)
            share = jnp.mean((a > 0).astype(jnp.float32))
            return error + state.pressure * jnp.mean(hoyer(a)), share

        grads, share = jax.grad(loss, has_aux=True)(state.ffn)
        ffn, optimiser = updated(self._optimiser, grads, state.optimiser, state.ffn)
        follow = jnp.exp(self.options.pressure * (share / self.options.share - 1))
        pressure = jnp.clip(state.pressure * follow, 1e-4, 3.0)
        return _State(ffn, optimiser, pressure, state.step + 1), share


_outputs = jax.jit(partial(output, act=jax.nn.silu))


@jax.jit
def _fitted(ffn: FfnMatrices, z_nD: jax.Array, y_nD: jax.Array) -> FfnMatrices:
    """The layer with `down` fitted anew to all tokens at once."""
    h_nF = jax.nn.relu(z_nD @ ffn.gate.T) * (z_nD @ ffn.up.T)
    return ffn._replace(down=fit_down(h_nF, y_nD, weights_of(y_nD), ffn.down))
