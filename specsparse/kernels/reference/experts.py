"""The experts of a layer in jnp: definition, oracle and fallback."""

import jax
import jax.numpy as jnp

from specsparse.kernels.experts import Experts
from specsparse.kernels.reference import dense


def combine(gate, up, act: str):
    """act(gate) * up of one of `kernels.experts.ACTS`."""
    if act != "clamped_swiglu":
        return dense.activate(gate, act) * up
    gate, up = jnp.minimum(gate, jnp.float32(7)), jnp.clip(up, jnp.float32(-7), jnp.float32(7))
    return gate * jax.nn.sigmoid(jnp.float32(1.702) * gate) * (up + jnp.float32(1))


def choice(logits_E, *, k, gating, normalised):
    """int32[k] experts and f32[k] weights of a row by its logits f32[E], or of rows f32[R, E], best first; ties go to
    the lower index.

    Args:
        gating: scores are the "softmax" of all logits, the "sigmoid" of each, or, of those "chosen", the softmax.
        normalised: weights are divided by their sum or by 2^-14, float16's least normal number, as in llama.cpp.
    """
    scores = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid, "chosen": lambda x: x}[gating](logits_E)
    scores = jnp.where(jnp.isnan(scores), jnp.float32(jnp.nan), scores)  # top_k passes over one with a minus sign
    weights, chosen = jax.lax.top_k(scores, k)
    if gating == "chosen":
        weights = jax.nn.softmax(weights)
    if normalised:
        weights = weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), jnp.float32(2.0**-14))
    return chosen, weights


def choose(logits_RE, *, n_valid, over_rows=dense.alone, **how):
    """`choice` of rows f32[R, E] one by one; -1 and 0 for those that do not count (`n_valid` as `linear` takes it)."""
    counts_R1 = dense.valid(n_valid, len(logits_RE))[:, None]
    chosen, weights = over_rows(lambda logits: choice(logits, **how), logits_RE)
    return jnp.where(counts_R1, chosen, jnp.int32(-1)), jnp.where(counts_R1, weights, jnp.float32(0))


def experts(x_RD, chosen_Rk, weights_Rk, experts: Experts):
    """y = sum over a row's chosen experts e, in the order given, of w_e (down_e combine(gate_e x, up_e x)), biases too.

    A row's bits depend on its own x, experts and weights alone.

    Args:
        x_RD: f32[R, D].
        chosen_Rk: int32[R, k], experts of each row; -1 for none, in all places of a row that does not count.
        weights_Rk: f32[R, k].

    Returns:
        f32[R, D]; a row without experts is 0.
    """

    def row(x, chosen, weights):
        def add(total, choice):
            e, weight = choice
            w = jax.tree.map(lambda each: each[jnp.maximum(e, 0)], experts)

            def product(z, matrix, bias):
                y = dense.multiplier(matrix)(z)
                return y if bias is None else y + bias

            h = combine(product(x, w.gate, w.gate_bias), product(x, w.up, w.up_bias), experts.act)
            y = weight * product(h, w.down, w.down_bias)
            return total + jnp.where((e < 0) | (e >= experts.count), jnp.float32(0), y), None

        return jax.lax.scan(add, jnp.zeros_like(x), (chosen, weights))[0]

    return dense.alone(row, x_RD, chosen_Rk, weights_Rk)
