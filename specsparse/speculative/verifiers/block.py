"""Block verification of a chain: the whole draft is judged together (Sun et al. 2403.10444)."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specsparse.speculative.base import Draft
from specsparse.speculative.verifiers import laws
from specsparse.speculative.verifiers.laws import Array


@dataclasses.dataclass(frozen=True)
class Block:
    """Accept up to the largest i whose coin is under h_i, then sample norm(max(0, p_i p - q)), or p if i is the end.

    p_0 = 1, p_i = min(1, p_{i-1} p(x_i)/q(x_i)); s_i = sum_x max(0, p_i p(x given x_1..i) - q(x given x_1..i));
    h_i = s_i / (s_i + 1 - p_i), h_gamma = p_gamma (2403.10444, Alg. 2, eq. 4). Accepts at least as many tokens in
    expectation as `token`; of one-hot drafts, where q is 1 at the token, just as many as `delta`: no lossless rule can
    accept more of those. Written for numpy and jax.numpy.
    """

    def weight(self, before: Array, p_x: Array, q_x: Array) -> Array:
        """p_i from p_{i-1} and both laws at x_i."""
        return laws.cap(before * laws.ratio(p_x, q_x))

    def stop(self, weight: Array, p_V: Array, q_V: Array) -> Array:
        """h_i inside the draft, from p_i and the laws of position i+1. 0/0 (p_i = 1 and p = q) never stops there."""
        xp = laws.namespace(p_V)
        gap = self._scaled(weight, p_V) - q_V
        s = laws.total(xp.maximum(gap, xp.zeros_like(gap)))
        return laws.ratio(s, s + (1 - weight))

    def law(self, weight: Array, p_V: Array, q_V: Array) -> Array:
        """Law of the token after i accepted ones, i < gamma."""
        return laws.residual(self._scaled(weight, p_V), q_V)

    def _scaled(self, weight: Array, p_V: Array) -> Array:
        """weight * p. The maximum keeps a compiler from fusing the product with the difference that follows."""
        scaled = weight * p_V
        return laws.namespace(p_V).maximum(scaled, laws.namespace(p_V).zeros_like(scaled))


class BlockEnd(NamedTuple):
    """Where a block ends: int32 number of accepted tokens, and float[V] the law of the token after them."""

    accepted: jax.Array
    law: jax.Array


def judge(rule: Block, draft: Draft, p_BnV: jax.Array, coins_BK: jax.Array, b: jax.Array) -> BlockEnd:
    """Judges the chain of sequence b with one coin per position (uniforms in [0, 1))."""
    count = draft.count[b]

    def q_V(i):
        """What x_i was drawn from: all of it at x_i where the draft holds no laws."""
        return laws.one_hot(p_BnV[b, i], draft.tokens[b, i]) if draft.q is None else draft.q[b, i]

    def step(i, carry):
        weight, accepted, kept = carry
        x = draft.tokens[b, i]
        weight = rule.weight(weight, p_BnV[b, i, x], q_V(i)[x])
        end = i + 1 == count
        h = jax.lax.cond(end, lambda: weight, lambda: rule.stop(weight, p_BnV[b, i + 1], q_V(i + 1)))
        ok = coins_BK[b, i] < h
        return weight, jnp.where(ok, i + 1, accepted), jnp.where(ok, weight, kept)

    one = jnp.ones((), p_BnV.dtype)
    _, accepted, weight = jax.lax.fori_loop(jnp.int32(0), count, step, (one, jnp.int32(0), one))
    row = p_BnV[b, accepted]
    law_V = jax.lax.cond(accepted < count, lambda: rule.law(weight, row, q_V(accepted)), lambda: row)
    return BlockEnd(accepted, law_V)
