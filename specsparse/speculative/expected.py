"""Expected tokens of a round, the time it takes, and the speed-up that follows: E[tokens] / T.

Times are in plain decoding steps: v(n) of a forward of n rows (v(1) = 1), c to draft a token, c0 a round's overhead.
"""

from collections.abc import Callable, Sequence
from typing import Any


def expected_tokens(alpha: float, gamma: int) -> float:
    """E[tokens] of a round of gamma drafted tokens, each accepted with chance alpha on its own, the bonus included.

    (1 - alpha^(gamma+1)) / (1 - alpha): Leviathan et al. 2211.17192, eq. 1. ValueError: alpha outside [0, 1] or gamma
    below 0."""
    if not 0 <= alpha <= 1 or gamma < 0:
        raise ValueError(f"alpha={alpha} must lie in [0, 1] and gamma={gamma} be at least 0")
    return float(sum(alpha**i for i in range(gamma + 1)))


def expected_tokens_tree(parents: Sequence[int], node_rates: Sequence[float]) -> float:
    """E[tokens] of a tree of nodes in order, each with its parent (-1: the root) before it.

    A node adds the chance that the whole path to it is accepted (Sequoia 2402.12374, section 3.1).

    Args:
        parents: index of each node's parent.
        node_rates: chance that a node is the one accepted once its parent was; siblings' rates add up to at most 1.
    """
    reach: list[float] = []
    for parent, rate in zip(parents, node_rates, strict=True):
        reach.append(rate * (1.0 if parent < 0 else reach[parent]))
    return 1.0 + sum(reach)


def mean_tokens(tokens: float, share: float) -> float:
    """E[tokens] of the mean round if only a `share` of the rounds drafts: these emit `tokens`, the others one."""
    return 1 + share * (tokens - 1)


def round_cost(
    v: Callable[[Any], float], gamma: float, *, c: float = 0.0, c0: float = 0.0, share: float = 1.0
) -> float:
    """T in plain steps, v(gamma+1) + (gamma c + c0); without any draft a plain step.

    If only a `share` of the rounds drafts, the mean round: the others are plain steps (0.98 of one as measured,
    docs/LOG.md), so c0 is of the rounds that draft.
    """
    return share * (v(gamma + 1) + (gamma * c + c0)) + (1 - share) * v(1) if gamma else v(1)


def predicted_speedup(
    alpha: float, gamma: int, v: Callable[[int], float], *, c: float = 0.0, c0: float = 0.0, share: float = 1.0
) -> float:
    """E[tokens] / T of chains of gamma tokens, which a `share` of the rounds drafts."""
    return mean_tokens(expected_tokens(alpha, gamma), share) / round_cost(v, gamma, c=c, c0=c0, share=share)


def break_even(v: Callable[[int], float], *, c: float = 0.0, c0: float = 0.0, most: int = 16) -> float | None:
    """The least alpha at which chains of some length up to `most` are as fast as plain decoding, by bisection.

    None if there is none, even with every draft accepted.
    """

    def pays(alpha: float) -> bool:
        return any(predicted_speedup(alpha, gamma, v, c=c, c0=c0) >= 1 for gamma in range(1, most + 1))

    return least(pays)


def least(pays: Callable[[float], bool], *, steps: int = 50) -> float | None:
    """The least chance from which on something pays, by bisection in so many steps; None if it never does."""
    if not pays(1.0):
        return None
    low, high = 0.0, 1.0
    if pays(low):
        return low
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high


def best_gamma(alpha: float, v: Callable[[int], float], *, c: float = 0.0, most: int = 16) -> tuple[int, float]:
    """The draft length of the highest predicted speed-up and that speed-up; 0 if no draft pays."""
    found = [(g, predicted_speedup(alpha, g, v, c=c)) for g in range(most + 1)]
    return max(found, key=lambda pair: pair[1])
