"""Products of training: float32, or bfloat16 factors with float32 sums (mixed precision, Micikevicius et al. 2018,
arXiv:1710.03740), by the type of the weight.

A training keeps float32 weights and differentiates through `halved` ones. Processors with matrix units for bfloat16
(AMX, GPUs) train several times faster so; others are slower, which is what `pays` is for.
"""

from typing import Literal, TypeVar

import jax
import jax.numpy as jnp

from specsparse.kernels import processor

Precision = Literal["auto", "float32", "bfloat16"]
"""Of a training's products; `auto` is bfloat16 where the processor has units for it."""

_Tree = TypeVar("_Tree")


def pays() -> bool:
    """Whether bfloat16 products are faster than float32 ones here."""
    return jax.default_backend() != "cpu" or "amx_bf16" in processor.cpu_info()["flags"]


def halved(weights: _Tree, precision: Precision) -> _Tree:
    """The weights with their matrices as bfloat16 where `precision` says so."""
    if precision == "float32" or (precision == "auto" and not pays()):
        return weights
    return jax.tree.map(lambda w: w.astype(jnp.bfloat16) if w.ndim > 1 else w, weights)


def times(x_RI: jax.Array, w_OI: jax.Array) -> jax.Array:
    """x w^T, float32[R, O]; a bfloat16 `w` has x rounded too, and both of their gradients made from rounded factors."""
    return _half(x_RI, w_OI) if w_OI.dtype == jnp.bfloat16 else x_RI @ w_OI.T


@jax.custom_vjp
def _half(x_RI: jax.Array, w_OI: jax.Array) -> jax.Array:
    return _dot(x_RI.astype(jnp.bfloat16), w_OI, 1)


def _forward(x_RI: jax.Array, w_OI: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    x = x_RI.astype(jnp.bfloat16)
    return _dot(x, w_OI, 1), (x, w_OI)


def _backward(kept: tuple[jax.Array, jax.Array], g_RO: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_RI, w_OI = kept
    g = g_RO.astype(jnp.bfloat16)
    return _dot(g, w_OI, 0), _dot(_turned(g), x_RI, 0).astype(jnp.bfloat16)


_half.defvjp(_forward, _backward)


def _dot(x: jax.Array, w: jax.Array, axis: int) -> jax.Array:
    """Over the last axis of x and `axis` of w. XLA's CPU backend has a fast product for these two and float32 sums."""
    return jax.lax.dot_general(x, w, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32)


def _turned(x: jax.Array) -> jax.Array:
    """x^T in memory. XLA would make the transposition part of the product, for which its CPU backend has no fast one;
    it cannot move it out of a loop whose one turn it does not know."""
    if jax.default_backend() != "cpu":
        return x.T
    once = 1 + (x[0, 0] != x[0, 0]).astype(jnp.int32)
    return jax.lax.fori_loop(0, once, lambda _, __: x.T, jnp.zeros(x.shape[::-1], x.dtype))
