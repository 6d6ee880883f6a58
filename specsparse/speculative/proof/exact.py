"""Exact verification: the rules of the engine with weights in place of coins, in float64.

Every way a round can end is listed with its probability (`Rule.ends`), so that the distribution of the output is a
finite sum. Drafts here are those of one sequence: no batch axis, numpy arrays.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from specsparse.speculative.base import Draft


class Outcome(NamedTuple):
    """One draft a drafter may make: its probability, the draft, and p float64[K+1, V] as the verifier sees it."""

    weight: float
    draft: Draft
    p: np.ndarray


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
    probs = np.zeros_like(rest[0])
    for outcome in outcomes:
        for end in rule.ends(outcome.draft, outcome.p):
            emitted = tuple(int(x) for x in outcome.draft.tokens[list(end.path)])
            after = rest[len(emitted) + 1][emitted]
            last = end.probs.reshape((-1,) + (1,) * (after.ndim - 1))
            probs[emitted] += outcome.weight * end.weight * last * after
    return probs


def text_probs(texts: Iterable[tuple[tuple[int, ...], float]], p: Sequence[np.ndarray], length: int) -> np.ndarray:
    """Joint distribution [V] * length of texts with their chances, each continued by plain sampling from p."""
    rest = continuations(p, length)
    probs = np.zeros_like(rest[0])
    for text, chance in texts:
        probs[text] += chance * rest[len(text)][text]
    return probs


def total_variation(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).sum() / 2)
