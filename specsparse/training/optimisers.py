"""Optimisers of a distillation: Adam, and Muon for stacks of matrices.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) takes a matrix's momentum to the nearest matrix with
orthonormal rows or columns, so that directions with small gradients move as far as those with large ones. The size of a
step is Adam's, by the factor 0.2 sqrt(larger side) of Liu et al., arXiv:2502.16982, eq. 4: rates carry over.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from specsparse.errors import UserError
from specsparse.training.products import dot, halved, turned

OPTIMISERS = ("adam", "muon")

_ROUNDS = 5
_QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients of a x + b x^3 + c x^5, which takes singular values of (0, 1] to around 1 in five rounds."""


class _Momentum(NamedTuple):
    mean: Any


def check_optimiser(name: str) -> None:
    """UserError where `name` is none of `OPTIMISERS`."""
    if name not in OPTIMISERS:
        raise UserError(f"train.optimiser={name} does not exist; choose one of {', '.join(OPTIMISERS)}")


def optimiser(name: str, rate: Callable, *, clip: float, precision: str = "auto") -> optax.GradientTransformation:
    """One of `OPTIMISERS` for matrices [L, outputs, inputs].

    Args:
        name: which.
        rate: of a step, by its number.
        clip: largest norm of a gradient.
        precision: of Muon's products, see `training.products`.
    """
    check_optimiser(name)
    inner = optax.adam(rate, b2=0.98) if name == "adam" else _muon(rate, precision)
    return optax.chain(optax.clip_by_global_norm(clip), inner)


def _muon(rate: Callable, precision: str) -> optax.GradientTransformation:
    return optax.chain(_orthogonal(0.95, precision), optax.scale_by_learning_rate(rate))


def _orthogonal(decay: float, precision: str) -> optax.GradientTransformation:
    """Nesterov's momentum, made orthogonal matrix by matrix."""

    def init(params):
        return _Momentum(jax.tree.map(jnp.zeros_like, params))

    def update(grads, state, params=None):
        del params
        mean = jax.tree.map(lambda m, g: decay * m + (1 - decay) * g, state.mean, grads)

        def one(m, g):
            ahead = decay * m + (1 - decay) * g
            return (0.2 * max(ahead.shape) ** 0.5) * orthogonal(ahead, precision)

        return jax.tree.map(lambda m, g: jax.lax.map(lambda each: one(*each), (m, g)), mean, grads), _Momentum(mean)

    return optax.GradientTransformation(init, update)


def orthogonal(w_OI: jax.Array, precision: str = "float32") -> jax.Array:
    """U V^T of w = U S V^T, nearly: singular values between 0.7 and 1.2, by Newton and Schulz's iteration."""
    if w_OI.shape[0] > w_OI.shape[1]:
        return turned(orthogonal(turned(w_OI), precision))
    a, b, c = _QUINTIC
    x = w_OI / (jnp.linalg.norm(w_OI) + 1e-12)
    for _ in range(_ROUNDS):
        half = halved(x, precision)
        gram = dot(half, half, 1)
        square = halved(gram, precision)  # symmetric
        mixed = b * gram + c * dot(square, square, 1)
        x = a * x + dot(halved(mixed, precision), half, 0)
    return x
