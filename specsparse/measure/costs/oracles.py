"""What a run would have been with a free draft, a perfect draft, or the best draft length known beforehand."""

from collections.abc import Callable
from typing import NamedTuple

from specsparse.runtime.metrics import Counters
from specsparse.speculative import expected
from specsparse.support.files import Json


class Costs(NamedTuple):
    """Times in plain steps: v(n) of a forward of n rows, c to draft a token, c0 a round besides."""

    v: Callable[[int], float]
    c: float = 0.0
    c0: float = 0.0


def oracles(counters: Counters, speedup: float, costs: Costs | None = None, *, levels: int | None = None) -> Json:
    """Speed-ups of three oracles, None where the run does not say.

    Args:
        counters: of the speculative side.
        speedup: measured.
        costs: for the best length in hindsight.
        levels: most levels of the drafted trees, None for chains.

    Returns:
        `free_draft`: the same rounds without the time of drafting (needs the time split). `perfect_draft`: the same
        drafts and round times with every drafted token of a chain accepted, or a path down all `levels` of a tree.
        `best_gamma`: {"gamma", "speedup"} of the fixed length up to the longest drafted that predicts best from the
        acceptance found at each position; None for trees, whose positions are no draft lengths.
    """
    c, t = counters, counters.times
    free = speedup * t.total / (t.total - t.draft) if t.draft and t.verify and t.total > t.draft else None
    perfect = None
    if c.num_rounds and c.num_emitted_tokens:
        right = c.num_draft_tokens if levels is None else c.num_drafts * levels
        perfect = speedup * (c.num_rounds + right) / c.num_emitted_tokens
    best = _best_gamma(c, costs) if levels is None else None
    return {"free_draft": free, "perfect_draft": perfect, "best_gamma": best}


def _best_gamma(c: Counters, costs: Costs | None) -> Json | None:
    """Rounds without a draft stay plain steps; those with one draft g tokens and keep the first min(accepted, g)."""
    if costs is None or not c.num_drafts:
        return None
    plain = c.num_rounds - c.num_drafts
    found = []
    for g in range(len(c.num_accepted_tokens_per_pos) + 1):
        tokens = c.num_rounds + sum(c.num_accepted_tokens_per_pos[:g])
        drafted = c.num_drafts * expected.round_cost(costs.v, g, c=costs.c, c0=costs.c0)
        found.append((tokens / (plain + drafted), g))
    best, gamma = max(found)
    return {"gamma": gamma, "speedup": best}
