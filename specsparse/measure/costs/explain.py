"""Why a run was as fast as it was, and what other drafts would have given.

`speedup_terms` leads by four factors from the speed-up that the cost model predicts to the measured one. `oracles` says
what the run would have been with a free draft, a perfect draft, or the best draft length known beforehand.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from specsparse.runtime.metrics import Counters
from specsparse.runtime.timing_cache import FREE, CostTable, DraftCost
from specsparse.speculative import expected
from specsparse.support.files import Json


def oracles(
    counters: Counters,
    speedup: float,
    *,
    levels: int | None = None,
    v: Callable[[float], float] | None = None,
    c: float = 0.0,
    c0: float = 0.0,
) -> Json:
    """Speed-ups of three oracles, None if the run does not say.

    Args:
        counters, speedup: of the speculative side, as measured.
        levels: most levels of the drafted trees, None for chains.
        v, c, c0: times in plain steps for the best length in hindsight, as in `speculative.expected`.

    Returns:
        `free_draft`: the same rounds without the time of drafting (needs the time split). `perfect_draft`: the same
        drafts and round times with every drafted token of a chain accepted, or a path down all `levels` of a tree.
        `best_gamma`: {"gamma", "speedup"} of the fixed length up to the longest drafted that predicts best from the
        acceptance found at each position; None for trees, whose positions are no draft lengths.
    """
    t, rounds, drafts = counters.times, counters.num_rounds, counters.num_drafts
    free = speedup * t.total / (t.total - t.draft) if t.draft and t.verify and t.total > t.draft else None
    perfect = best = None
    if rounds and counters.num_emitted_tokens:
        right = counters.num_draft_tokens if levels is None else drafts * levels
        perfect = speedup * (rounds + right) / counters.num_emitted_tokens
    if levels is None and v is not None and drafts:
        by_length = []  # rounds without a draft stay plain steps, the others keep the first min(accepted, g)
        for g in range(len(counters.num_accepted_tokens_per_pos) + 1):
            tokens = rounds + sum(counters.num_accepted_tokens_per_pos[:g])
            drafted = drafts * expected.round_cost(v, g, c=c, c0=c0)
            by_length.append((tokens / (rounds - drafts + drafted), g))
        gain, gamma = max(by_length)
        best = {"gamma": gamma, "speedup": gain}
    return {"free_draft": free, "perfect_draft": perfect, "best_gamma": best}


@dataclass(frozen=True)
class Factor:
    """One step from the predicted to the measured speed-up, which multiplies by `value`."""

    name: str
    value: float
    text: str


@dataclass(frozen=True)
class SpeedupTerms:
    """The terms of a run. Invariant: predicted times all factors is measured."""

    alpha: float  # realised, accepted / tested
    gamma: int  # tokens a draft has room for
    levels: int | None  # of a tree, or None for chains
    share: float  # of the rounds that drafted; the others are plain steps that emit one token
    expected_tokens: float  # of a round that drafts, from alpha and gamma, or levels
    v: float  # v(gamma+1): the forward of a round that drafts, in plain steps
    draft: float  # drafting in it, in plain steps
    overhead: float  # the rest of it, in plain steps
    # as `advise` does, (share expected_tokens + 1 - share) / (share (v + draft + overhead) + 1 - share)
    predicted: float
    measured: float  # plain over speculative seconds per token
    best_gamma: int | None  # the gamma that suits this alpha; None for trees
    best_predicted: float | None  # its predicted speed-up
    factors: tuple[Factor, ...]  # from predicted to measured
    # seconds a round of each stage, measured and predicted, if the run timed stages
    stages: dict[str, dict[str, float]]

    def lines(self) -> Iterator[str]:
        cost = f"v({self.gamma + 1}) {self.v:.2f} + draft {self.draft:.2f} + round {self.overhead:.2f}"
        shape = f"gamma {self.gamma}" if self.levels is None else f"{self.gamma} nodes on {self.levels} levels"
        tokens = f"{self.expected_tokens:.2f} tokens a round (alpha {self.alpha:.2f}, {shape})"
        silent = "" if self.share == 1 else f", in the {self.share:.0%} of the rounds that draft, the others plain"
        yield (
            f"predicted speed-up {self.predicted:.2f} = {tokens} / ({cost}) plain steps{silent}; "
            f"measured {self.measured:.2f}"
        )
        for factor in self.factors:
            yield f"  x {factor.value:.2f} {factor.name}: {factor.text}"
        if self.best_gamma is not None:
            yield f"  best gamma for this acceptance: {self.best_gamma}, predicted {self.best_predicted:.2f}"


def speedup_terms(
    plain: Counters,
    method: Counters,
    table: CostTable,
    *,
    gamma: int,
    levels: int | None = None,
    draft: DraftCost = FREE,
    calls: tuple[int, int] = (1, 1),
    kv_length: float | None = None,
) -> SpeedupTerms | None:
    """The terms of a run; None if one side decoded or drafted nothing, or was not timed.

    Args:
        plain, method: counters of both sides with `times.total`, compilation and prompts excluded.
        gamma: tokens a draft has room for.
        levels: of a tree, None for chains; alpha is then of a level, and `draft.token_s` too.
        calls: generations of the plain and of the speculative side.
        kv_length: mean tokens in the cache.
    """
    c, plain_s, method_s = method, plain.times.total, method.times.total
    if not (plain.num_emitted_tokens and c.num_emitted_tokens and c.num_tested and plain_s > 0 and method_s > 0):
        return None
    step, share = table.step(kv_length), c.num_drafts / c.num_rounds
    alpha, overhead = c.num_accepted_tokens / c.num_tested, table.overhead(gamma, kv_length)
    of_draft = expected.expected_tokens(alpha, levels or gamma)
    whole = expected.mean_tokens(of_draft, share)
    drafting = (draft.fixed_s + (levels or gamma) * draft.token_s) / step
    full = expected.round_cost(lambda n: table.v(n, kv_length), gamma, c0=drafting + overhead, share=share)
    rows = 1 + c.num_draft_tokens / c.num_drafts  # as the drafts were: some shorter than gamma
    real_draft = share * (draft.fixed_s + (levels or rows - 1) * draft.token_s) / step
    verify = share * table.v(rows, kv_length) + 1 - share
    real = verify + real_draft + share * overhead
    tokens = c.num_emitted_tokens / c.num_rounds
    plain_table, method_table = plain.num_emitted_tokens * step, c.num_rounds * real * step
    hosts = calls[0] * table.host_s / plain_table, calls[1] * table.host_s / method_table
    drift = plain_s / (plain_table * (1 + hosts[0])), method_s / (method_table * (1 + hosts[1]))
    plain_each, method_each = plain_s / plain.num_emitted_tokens, method_s / c.num_emitted_tokens
    # A machine that is slower today slows both sides, and that cancels.
    rest = (
        f"a plain token took {drift[0]:.2f} of the table's time ({1e3 * plain_each:.2f} ms for {1e3 * step:.2f}), "
        f"a round {drift[1]:.2f} ({1e3 * method_s / c.num_rounds:.2f} for {1e3 * (real * step):.2f})"
    )
    factors = (
        Factor("acceptance", tokens / whole, f"{tokens:.2f} tokens a round, short drafts and ends included"),
        Factor("draft length", full / real, f"drafts of {rows - 1:.1f} tokens: {real:.2f} plain steps a round"),
        Factor("host", (1 + hosts[0]) / (1 + hosts[1]), f"{1e3 * table.host_s:.2f} ms a call of the loop"),
        Factor("rest", drift[0] / drift[1], rest),
    )
    best: tuple[int | None, float | None] = (None, None)
    if levels is None:
        best = table.best_gamma(alpha, draft=draft, kv_length=kv_length, share=share)
    t, stages = c.times, {}
    if t.draft or t.verify:  # seconds a round
        measured = {"draft": t.draft, "verify": t.verify, "rest": sum(x or 0.0 for x in (t.sample, t.commit, t.host))}
        predicted = {"draft": real_draft, "verify": verify, "rest": share * overhead}
        for name, seconds in measured.items():
            stages[name] = {"measured_s": (seconds or 0.0) / c.num_rounds, "predicted_s": predicted[name] * step}
    return SpeedupTerms(
        alpha=alpha,
        gamma=gamma,
        levels=levels,
        share=share,
        expected_tokens=of_draft,
        v=table.v(gamma + 1, kv_length),
        draft=drafting,
        overhead=overhead,
        predicted=whole / full,
        measured=plain_each / method_each,
        best_gamma=best[0],
        best_predicted=best[1],
        factors=factors,
        stages=stages,
    )


def explain_record(record: Any, table: CostTable, *, drafter: str | None = None) -> SpeedupTerms | None:
    """The terms of a run (a `report.record.RunRecord`), all prompts together; None if it has no plain side.

    `drafter` is its name in the table, by default the record's. One that was not measured costs as much as the run's
    own time split says, or nothing without one.
    """
    sides = record.groups["all"].sides
    if not {"plain", "speculative"} <= sides.keys() or not record.method.get("gamma"):
        return None
    plain, method, levels = sides["plain"], sides["speculative"], record.method.get("levels")
    c, tokens = method.counters, method.prefill_tokens + method.counters.num_emitted_tokens / 2
    draft = table.drafts.get(drafter or record.method["drafter"])
    if draft is None:
        drafting_s = c.times.draft or 0.0
        if levels is None and c.num_drafts and c.num_drafts == c.num_rounds:  # every round drafts a chain
            draft = DraftCost(token_s=drafting_s / c.num_draft_tokens)
        else:
            draft = DraftCost(fixed_s=drafting_s / c.num_drafts if c.num_drafts else 0.0)
    return speedup_terms(
        plain.counters,
        c,
        table,
        gamma=record.method["gamma"],
        levels=levels,
        draft=draft,
        calls=(plain.passes, method.passes),
        kv_length=tokens / method.passes,
    )
