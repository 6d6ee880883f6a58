"""Verification node by node: siblings are tested in draw order, an accepted one becomes the new parent.

A rule says how likely a node is accepted and what the distribution becomes when it is not. `walk` turns that into a
path with coins; `SiblingRule.ends` turns the same rule into exact weights.
"""

import abc
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.speculative.base import PAD, Draft, Verdict
from specsparse.speculative.verifiers import residuals
from specsparse.speculative.verifiers.residuals import Array, Scalar
from specsparse.speculative.verify import (
    Coin,
    End,
    Noise,
    Rule,
    Target,
    drawn,
    emitted,
    has_child,
    judged_at_once,
    with_alpha,
)


class Child(NamedTuple):
    """A child under test: its token, and its draft distribution at that token (1 for one-hot drafts)."""

    token: Scalar
    q: Scalar


class SiblingRule(Rule):
    """Base of the rules that test siblings one after the other.

    Rules are final frozen dataclasses, written for numpy and jax.numpy. `probs` is the distribution still owed at the
    current parent: p there, less what rejected siblings have taken. `memo` is a tuple of scalars that lives as long as
    the walk stays at one parent.

    One's own rule says what `Rule` asks for.
    """

    def verdict(self, draft: Draft, target: Target, noise: Noise) -> Verdict:
        """Walks down each draft, then draws from what is owed where the walk ended."""
        if target.rows is not None:
            return judged_at_once(self, draft, target, noise)
        p_BnV = target.probs

        def one(b):
            s = walk(self, draft, p_BnV, noise.coins, b)
            return s.nodes, s.accepted, s.at, jnp.where(s.fresh, p_BnV[b, s.at], s.probs)

        nodes_BK, accepted_B, at_B, probs_BV = jax.lax.map(one, jnp.arange(draft.tokens.shape[0]))
        tested_B = accepted_B + has_child(draft, at_B)
        verdict = emitted(draft, nodes_BK, accepted_B, tested_B, *drawn(probs_BV, noise.last, target.draw))
        return with_alpha(verdict, draft, target)

    def ends(self, draft: Draft, p_nV: np.ndarray) -> list[End]:
        """Both sides of every coin, depth first."""
        found: list[End] = []
        K, count = draft.max_nodes, draft.count

        def q_row(node: int) -> np.ndarray:
            return residuals.one_hot(p_nV[0], draft.tokens[node]) if draft.q is None else draft.q[node]

        def enter(at: int, node: int) -> tuple:
            siblings = int(children(draft.parents, count, at))
            return _entered(self, p_nV[at].tobytes(), q_row(node).tobytes(), siblings)

        def visit(node, at, probs, memo, weight, path, coins):
            if weight == 0:
                return
            if node == K:
                found.append(End(weight, path, probs, coins))
                return
            x, q_V = draft.tokens[node], q_row(node)
            chance = float(self.accept(probs[x], q_V[x], memo))
            below, beside = (int(next_child(draft.parents, count, row, node)) for row in (node + 1, at))
            deeper = enter(node + 1, below) if below < K else ()
            yes, no = (*coins, Coin(node, chance, True)), (*coins, Coin(node, chance, False))
            visit(below, node + 1, p_nV[node + 1], deeper, weight * chance, (*path, node), yes)
            if chance < 1:
                rest, memo = self.reject(probs, q_V, Child(x, q_V[x]), memo, beside == K)
                visit(beside, at, rest, memo, weight * (1 - chance), path, no)

        first = int(next_child(draft.parents, count, 0, -1))
        visit(first, 0, p_nV[0], enter(0, first) if first < K else (), 1.0, (), ())
        return found

    @abc.abstractmethod
    def enter(self, p_V: Array, q_V: Array, siblings: Scalar) -> tuple:
        """Memo at a parent with distribution `p_V` and `siblings` children, the first of them drawn from `q_V`."""

    @abc.abstractmethod
    def accept(self, p_x: Scalar, q_x: Scalar, memo: tuple) -> Scalar:
        """Acceptance probability of a child x, from the mass still owed and the draft's, both at x."""

    @abc.abstractmethod
    def reject(self, probs_V: Array, q_V: Array, child: Child, memo: tuple, last: Scalar) -> tuple[Array, tuple]:
        """Distribution and memo after a child drawn from `q_V` is rejected; `last`: it has no younger sibling."""


@functools.lru_cache(maxsize=1024)
def _entered(rule: SiblingRule, p: bytes, q: bytes, siblings: int) -> tuple:
    """The memo at a parent. Many drafts have the same parents."""
    return rule.enter(np.frombuffer(p), np.frombuffer(q), np.float64(siblings))


class Walk(NamedTuple):
    node: jax.Array  # int32, next node to test; K when none is left
    at: jax.Array  # int32, row of the current parent (0 is the root)
    # bool, no child of the current parent was rejected yet: the distribution is p itself and `probs` holds nothing
    fresh: jax.Array
    probs: jax.Array  # float[V], distribution still owed otherwise
    memo: tuple  # the rule's memo
    nodes: jax.Array  # int32[K], accepted nodes, padded with `PAD`
    accepted: jax.Array  # int32


def next_child(parents_K: Array, count: Scalar, at: Scalar, after: Scalar) -> Scalar:
    """The first existing node beyond `after` whose parent is row `at`; K if there is none."""
    xp = residuals.namespace(parents_K)
    K = parents_K.shape[0]
    index_K = xp.arange(K)
    live_K = (parents_K == at - 1) & (index_K > after) & (index_K < count)
    return xp.where(live_K.any(), live_K.argmax(), K).astype(xp.int32)


def children(parents_K: Array, count: Scalar, at: Scalar) -> Scalar:
    """How many existing nodes have row `at` as parent."""
    xp = residuals.namespace(parents_K)
    return ((parents_K == at - 1) & (xp.arange(parents_K.shape[0]) < count)).sum()


def walk(rule: SiblingRule, draft: Draft, p_BnV: jax.Array, coins_BK: jax.Array, b: jax.Array) -> Walk:
    """Tests sequence b's nodes with one coin each (uniforms in [0, 1), accepted when under the acceptance probability).

    Work proportional to V is done once per rejection (and where the rule's `enter` asks for it), not per node.
    """
    K, V = draft.max_nodes, p_BnV.shape[-1]
    parents_K, count = draft.parents[b], draft.count[b]

    def q_row(node):
        return residuals.one_hot(p_BnV[b, 0], draft.tokens[b, node]) if draft.q is None else draft.q[b, node]

    def enter(at, node):
        return rule.enter(p_BnV[b, at], q_row(node), children(parents_K, count, at).astype(p_BnV.dtype))

    def reject(s, child):
        probs_V = jnp.where(s.fresh, p_BnV[b, s.at], s.probs)
        last = next_child(parents_K, count, s.at, s.node) == K
        return rule.reject(probs_V, q_row(s.node), child, s.memo, last)

    def test(s):
        x = draft.tokens[b, s.node]
        p_x = jnp.where(s.fresh, p_BnV[b, s.at, x], s.probs[x])
        q_x = jnp.ones_like(p_x) if draft.q is None else draft.q[b, s.node, x]
        ok = coins_BK[b, s.node] < rule.accept(p_x, q_x, s.memo)
        probs_V, memo = jax.lax.cond(ok, lambda s, _: (s.probs, s.memo), reject, s, Child(x, q_x))
        at = jnp.where(ok, s.node + 1, s.at)
        node = next_child(parents_K, count, at, s.node)
        memo = jax.lax.cond(ok & (node < K), enter, lambda *_: memo, at, node)
        nodes_K = jnp.where(ok & (jnp.arange(K) == s.accepted), s.node, s.nodes)
        return Walk(node, at, ok, probs_V, memo, nodes_K, s.accepted + ok.astype(jnp.int32))

    root = jnp.int32(0)
    first = next_child(parents_K, count, root, jnp.int32(-1))
    start = Walk(
        node=first,
        at=root,
        fresh=jnp.bool_(True),
        probs=jnp.zeros((V,), p_BnV.dtype),
        memo=enter(root, jnp.minimum(first, K - 1)),
        nodes=jnp.full((K,), PAD, jnp.int32),
        accepted=jnp.int32(0),
    )
    return jax.lax.while_loop(lambda s: s.node < K, test, start)
