"""Exact verification: the rules of the engine with weights in place of coins, in float64.

Every way a round can end is listed with its probability, so that the distribution of the output is a finite sum. Drafts
here are those of one sequence: no batch axis, numpy arrays.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from specsparse.speculative.base import Draft
from specsparse.speculative.verifiers import residuals
from specsparse.speculative.verifiers.draft_rules import Block, Match
from specsparse.speculative.verifiers.siblings import Child, SiblingRule, children, next_child


class Coin(NamedTuple):
    """One coin of a path to an end: it is under `chance` (`passed`) or not."""

    node: int
    chance: float
    passed: bool


class End(NamedTuple):
    """One way a round ends.

    Attributes:
        weight: probability of this end, given the draft.
        path: accepted nodes from the root down.
        probs: float64[V], distribution of the token after them.
        coins: coin intervals that lead here (empty for match, which has none).
    """

    weight: float
    path: tuple[int, ...]
    probs: np.ndarray
    coins: tuple[Coin, ...] = ()


class Outcome(NamedTuple):
    """One draft a drafter may make: its probability, the draft, and p float64[K+1, V] as the verifier sees it."""

    weight: float
    draft: Draft
    p: np.ndarray


def ends(rule: Any, draft: Draft, p_nV: np.ndarray) -> list[End]:
    """All ends of positive probability; their weights sum to 1."""
    if isinstance(rule, Match):
        return _match_ends(rule, draft, p_nV)
    if isinstance(rule, SiblingRule):
        return _sibling_ends(rule, draft, p_nV)
    return _block_ends(rule, draft, p_nV)


def _q_row(draft: Draft, node: int, like_V: np.ndarray) -> np.ndarray:
    return residuals.one_hot(like_V, draft.tokens[node]) if draft.q is None else draft.q[node]


@functools.lru_cache(maxsize=1024)
def _entered(rule: SiblingRule, p: bytes, q: bytes, siblings: int) -> tuple:
    """The memo at a parent. Many drafts have the same parents."""
    return rule.enter(np.frombuffer(p), np.frombuffer(q), np.float64(siblings))


def _sibling_ends(rule: SiblingRule, draft: Draft, p_nV: np.ndarray) -> list[End]:
    """Both sides of every coin, depth first."""
    found: list[End] = []
    K, count = draft.max_nodes, draft.count

    def enter(at: int, node: int) -> tuple:
        siblings = int(children(draft.parents, count, at))
        return _entered(rule, p_nV[at].tobytes(), _q_row(draft, node, p_nV[at]).tobytes(), siblings)

    def visit(node, at, probs, memo, weight, path, coins):
        if weight == 0:
            return
        if node == K:
            found.append(End(weight, path, probs, coins))
            return
        x, q_V = draft.tokens[node], _q_row(draft, node, probs)
        chance = float(rule.accept(probs[x], q_V[x], memo))
        below, beside = (int(next_child(draft.parents, count, row, node)) for row in (node + 1, at))
        deeper = enter(node + 1, below) if below < K else ()
        yes, no = (*coins, Coin(node, chance, True)), (*coins, Coin(node, chance, False))
        visit(below, node + 1, p_nV[node + 1], deeper, weight * chance, (*path, node), yes)
        if chance < 1:
            rest, memo = rule.reject(probs, q_V, Child(x, q_V[x]), memo, beside == K)
            visit(beside, at, rest, memo, weight * (1 - chance), path, no)

    first = int(next_child(draft.parents, count, 0, -1))
    visit(first, 0, p_nV[0], enter(0, first) if first < K else (), 1.0, (), ())
    return found


def _block_ends(rule: Block, draft: Draft, p_nV: np.ndarray) -> list[End]:
    """The largest passed coin decides: walk from the last node to the first."""
    count = int(draft.count)
    q_KV = draft.q
    if q_KV is None:
        q_KV = np.stack([residuals.one_hot(p_nV[i], draft.tokens[i]) for i in range(count)]) if count else p_nV[:0]
    weights, stops = [np.float64(1)], []
    for i in range(count):
        x = draft.tokens[i]
        weights.append(rule.weight(weights[-1], p_nV[i, x], q_KV[i, x]))
        end = i + 1 == count
        stops.append(float(weights[-1] if end else rule.stop(weights[-1], p_nV[i + 1], q_KV[i + 1])))
    found, open_weight, coins = [], 1.0, ()
    for i in range(count, -1, -1):
        chance = stops[i - 1] if i else 1.0
        probs = p_nV[i] if i == count else rule.probs(weights[i], p_nV[i], q_KV[i])
        here = (*coins, Coin(i - 1, chance, True)) if i else coins
        found.append(End(open_weight * chance, tuple(range(i)), probs, here))
        open_weight, coins = open_weight * (1 - chance), (*coins, Coin(i - 1, chance, False))
    return [end for end in found if end.weight > 0]


def _match_ends(rule: Match, draft: Draft, p_nV: np.ndarray) -> list[End]:
    """Every token the target may sample at every row that is reached."""
    found: list[End] = []

    def visit(at: int, weight: float, path: tuple[int, ...]):
        nodes = [int(rule.child(draft.tokens, draft.parents, draft.count, at, x)) for x in range(p_nV.shape[1])]
        off = np.where(np.array(nodes) == draft.max_nodes, p_nV[at], 0.0)
        if off.sum() > 0:
            found.append(End(weight * off.sum(), path, off / off.sum()))
        for x, node in enumerate(nodes):
            if node < draft.max_nodes and p_nV[at, x] > 0:
                visit(node + 1, weight * p_nV[at, x], (*path, node))

    visit(0, 1.0, ())
    return found


def continuations(p: Sequence[np.ndarray], length: int) -> list[np.ndarray]:
    """Distribution of plain sampling to `length` tokens after each context: entry d has shape [V] * length.

    Its first d axes are the context (entry `length` is all ones). `p[d]` has shape [V] * (d + 1): the distribution
    after a context of d tokens.
    """
    V = p[0].shape[0]
    probs_by_depth = [np.ones((V,) * length)]
    for d in range(length - 1, -1, -1):
        probs_by_depth.append(probs_by_depth[-1] * p[d].reshape(p[d].shape + (1,) * (length - d - 1)))
    return probs_by_depth[::-1]


def output_probs(rule: Any, outcomes: Iterable[Outcome], p: Sequence[np.ndarray], length: int) -> np.ndarray:
    """Joint distribution [V] * length of the tokens of one round, continued by plain sampling from p."""
    rest = continuations(p, length)
    probs = np.zeros((p[0].shape[0],) * length)
    for outcome in outcomes:
        for end in ends(rule, outcome.draft, outcome.p):
            emitted = tuple(int(x) for x in outcome.draft.tokens[list(end.path)])
            after = rest[len(emitted) + 1][emitted]
            last = end.probs.reshape((-1,) + (1,) * (after.ndim - 1))
            probs[emitted] += outcome.weight * end.weight * last * after
    return probs


def total_variation(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).sum() / 2)
