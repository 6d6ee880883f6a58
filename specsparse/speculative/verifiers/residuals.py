"""Arithmetic on distributions over the vocabulary, for numpy (float64) and jax.numpy (float32) alike."""

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

if TYPE_CHECKING:  # numpy alone is enough to import this
    import jax

Array = TypeVar("Array", "jax.Array", np.ndarray)
"""Arrays that rules compute with: traced by jax, or numpy's in float64 (the exact certificate)."""
Scalar: TypeAlias = Any
"""A number of these: an array without axes, numpy's, or a plain one."""


def namespace(x: Scalar) -> ModuleType:
    """numpy for numpy values, jax.numpy for everything else (tracers included), which numpy alone never imports."""
    return np if isinstance(x, np.ndarray | np.generic) else importlib.import_module("jax.numpy")


def repeat_while(condition: Callable, step: Callable, state: tuple) -> tuple:
    """`step` applied to a tuple of arrays while `condition` holds: a Python loop for numpy, a compiled one for jax."""
    if namespace(state[0]) is not np:
        return importlib.import_module("jax").lax.while_loop(condition, step, state)
    while condition(state):
        state = step(state)
    return state


def total(x_V: Array) -> Scalar:
    """Sum over the vocabulary, by jax in the order of `probs.mass`, which kernels of other makes keep too."""
    if namespace(x_V) is np:
        return x_V.sum()
    return importlib.import_module("specsparse.engine.sampling.probs").mass(x_V[None])[0]


def one_hot(like_V: Array, token: Scalar) -> Array:
    """The distribution that is 1 at `token`, in the shape and dtype of `like_V`."""
    xp = namespace(like_V)
    return (xp.arange(like_V.shape[0]) == token).astype(like_V.dtype)


def ratio(p_x: Scalar, q_x: Scalar) -> Scalar:
    """p/q where q is positive, else 0 (also where q is NaN): a token that q could not have drawn is never accepted."""
    xp = namespace(p_x)
    drawn = q_x > 0
    return xp.where(drawn, p_x / xp.where(drawn, q_x, xp.ones_like(q_x)), xp.zeros_like(p_x))


def cap(a: Scalar) -> Scalar:
    """min(1, a); NaN stays NaN, and no coin is under NaN."""
    xp = namespace(a)
    return xp.minimum(a, xp.ones_like(a))


def normalise(weights_V: Array, fallback_V: Array, usable: Scalar = True) -> Array:
    """`weights / sum`, or `fallback` where not `usable` or where the sum is not positive (0/0 residuals, NaN)."""
    xp = namespace(weights_V)
    left = total(weights_V)
    good = (left > 0) & usable
    safe = xp.where(good, left, xp.ones_like(left))
    return xp.where(good, weights_V / safe, fallback_V)


def residual(probs_V: Array, q_V: Array, usable: Scalar = True) -> Array:
    """norm(max(0, distribution - q)), the distribution after a rejection (Leviathan et al. 2211.17192, Alg. 1).

    `probs` itself when the residual is 0/0 or not `usable`.
    """
    xp = namespace(probs_V)
    gap = probs_V - q_V
    return normalise(xp.maximum(gap, xp.zeros_like(gap)), probs_V, usable)


def remove(probs_V: Array, token: Scalar) -> Array:
    """`probs` without one token, renormalised: what the next sibling is drawn from without replacement.

    All zeros when nothing is left; a node drawn from that is never accepted.
    """
    xp = namespace(probs_V)
    rest = xp.where(xp.arange(probs_V.shape[0]) == token, xp.zeros_like(probs_V), probs_V)
    return normalise(rest, xp.zeros_like(probs_V))


def inverse_cdf(p_RV: Array, u_R: Array) -> Array:
    """Draws one token a row by inverse CDF in vocabulary order: the first id whose cumulative mass exceeds u * total.

    The plain definition; the engine injects its own. A token of zero mass is never drawn.
    """
    xp = namespace(p_RV)
    cdf = xp.cumsum(p_RV, axis=1)
    below = (cdf <= u_R[:, None] * cdf[:, -1:]).sum(axis=1)
    last = p_RV.shape[1] - 1 - xp.argmax(p_RV[:, ::-1] > 0, axis=1)
    return xp.minimum(below, last).astype(xp.int32)
