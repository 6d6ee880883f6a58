"""Why a run was as fast as it was: the predicted speed-up, and the factors that lead from it to the measured one."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from specsparse.runtime.metrics import Counters
from specsparse.runtime.times.kept import FREE, CostTable, DraftCost
from specsparse.speculative import expected
from specsparse.support.files import Json


@dataclass(frozen=True)
class Factor:
    """One step from the predicted to the measured speed-up: it multiplies by `value`."""

    name: str
    value: float
    text: str


@dataclass(frozen=True)
class Explanation:
    """Invariant: predicted times all factors is measured.

    Attributes:
        alpha: realised, accepted / tested.
        gamma: tokens a draft has room for.
        levels: of a tree, or None for chains.
        share: of the rounds that drafted; the others are plain steps that emit one token.
        expected_tokens: of a round that drafts, from alpha and gamma, or levels.
        v, draft, overhead: its time in plain steps: v(gamma+1), drafting, the rest of a round.
        predicted: as `advise` does, (share expected_tokens + 1 - share) / (share (v + draft + overhead) + 1 - share).
        measured: plain over speculative seconds per token.
        best_gamma, best_predicted: what gamma this alpha asks for, and its predicted speed-up; None for trees.
        factors: from predicted to measured.
        stages: seconds a round of each stage, measured and predicted, where the run timed stages.
    """

    alpha: float
    gamma: int
    levels: int | None
    share: float
    expected_tokens: float
    v: float
    draft: float
    overhead: float
    predicted: float
    measured: float
    best_gamma: int | None
    best_predicted: float | None
    factors: tuple[Factor, ...]
    stages: dict[str, dict[str, float]]

    def to_dict(self) -> Json:
        """As plain values for a record."""
        return asdict(self)

    def lines(self) -> Iterator[str]:
        """For the terminal."""
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


def explain(
    plain: Counters,
    method: Counters,
    table: CostTable,
    *,
    gamma: int,
    levels: int | None = None,
    draft: DraftCost = FREE,
    calls: tuple[int, int] = (1, 1),
    kv_length: float | None = None,
) -> Explanation | None:
    """The terms of a run; None where one side decoded or drafted nothing, or was not timed.

    Args:
        plain, method: counters of both sides with `times.total`, compilation and prompts excluded.
        table: measured costs.
        gamma: tokens a draft has room for.
        levels: of a tree, None for chains; alpha is then of a level, and `draft.token_s` too.
        draft: cost of the drafter.
        calls: generations of the plain and of the speculative side.
        kv_length: mean tokens in the cache.
    """
    c, plain_s, method_s = method, plain.times.total, method.times.total
    if not (plain.num_emitted_tokens and c.num_emitted_tokens and c.num_tested and plain_s > 0 and method_s > 0):
        return None
    step = table.step(kv_length)
    alpha = c.num_accepted_tokens / c.num_tested
    share = c.num_drafts / c.num_rounds
    of_draft = expected.expected_tokens(alpha, levels or gamma)
    whole = expected.mean_tokens(of_draft, share)
    overhead = table.overhead(gamma, kv_length)
    drafting = (draft.fixed_s + (levels or gamma) * draft.token_s) / step
    v = table.v(gamma + 1, kv_length)
    full = expected.round_cost(lambda n: table.v(n, kv_length), gamma, c0=drafting + overhead, share=share)
    rows = 1 + c.num_draft_tokens / c.num_drafts  # as the drafts were: some shorter than gamma
    real_draft = share * (draft.fixed_s + (levels or rows - 1) * draft.token_s) / step
    verify = share * table.v(rows, kv_length) + 1 - share
    real = verify + real_draft + share * overhead
    tokens = c.num_emitted_tokens / c.num_rounds
    plain_table = plain.num_emitted_tokens * step
    method_table = c.num_rounds * real * step
    hosts = calls[0] * table.host_s / plain_table, calls[1] * table.host_s / method_table
    drift = plain_s / (plain_table * (1 + hosts[0])), method_s / (method_table * (1 + hosts[1]))
    plain_each, method_each = plain_s / plain.num_emitted_tokens, method_s / c.num_emitted_tokens
    shorter = f"drafts of {rows - 1:.1f} tokens"
    factors = (
        Factor("acceptance", tokens / whole, f"{tokens:.2f} tokens a round, short drafts and ends included"),
        Factor("draft length", full / real, f"{shorter}: {real:.2f} plain steps a round"),
        Factor("host", (1 + hosts[0]) / (1 + hosts[1]), f"{1e3 * table.host_s:.2f} ms a call of the loop"),
        Factor("rest", drift[0] / drift[1], _rest(drift, plain_each, step, method_s / c.num_rounds, real * step)),
    )
    best: tuple[int | None, float | None] = (None, None)
    if levels is None:
        best = table.best_gamma(alpha, draft=draft, kv_length=kv_length, share=share)
    return Explanation(
        alpha=alpha,
        gamma=gamma,
        levels=levels,
        share=share,
        expected_tokens=of_draft,
        v=v,
        draft=drafting,
        overhead=overhead,
        predicted=whole / full,
        measured=plain_each / method_each,
        best_gamma=best[0],
        best_predicted=best[1],
        factors=factors,
        stages=_stages(c, step, verify=verify, draft=real_draft, overhead=share * overhead),
    )


def explain_record(record: Any, table: CostTable, *, drafter: str | None = None) -> Explanation | None:
    """The terms of a `RunRecord`, all prompts together; None where it has no speculative side.

    Args:
        record: with `groups["all"].sides` and `method["gamma"]`.
        table: measured costs.
        drafter: its name in the table; by default the record's. One that was not measured costs what the run's own
            time split says, or nothing where there is none.
    """
    sides = record.groups["all"].sides
    if not {"plain", "speculative"} <= sides.keys() or not record.method.get("gamma"):
        return None
    plain, method = sides["plain"], sides["speculative"]
    tokens, levels = method.prefill_tokens + method.counters.num_emitted_tokens / 2, record.method.get("levels")
    return explain(
        plain.counters,
        method.counters,
        table,
        gamma=record.method["gamma"],
        levels=levels,
        draft=table.drafts.get(drafter or record.method["drafter"]) or _own_draft_cost(method.counters, levels),
        calls=(plain.passes, method.passes),
        kv_length=tokens / method.passes,
    )


def _rest(drift: tuple[float, float], token_s: float, step: float, round_s: float, predicted_s: float) -> str:
    """Both sides' times over the table's: a machine that is slower today slows both, and that cancels."""
    plain = f"a plain token took {drift[0]:.2f} of the table's time ({1e3 * token_s:.2f} ms for {1e3 * step:.2f})"
    return f"{plain}, a round {drift[1]:.2f} ({1e3 * round_s:.2f} for {1e3 * predicted_s:.2f})"


def _own_draft_cost(c: Counters, levels: int | None) -> DraftCost:
    """From the stages of the run: by the token where every round drafts a chain, else by the round that drafts."""
    if levels is None and c.num_drafts and c.num_drafts == c.num_rounds:
        return DraftCost(token_s=(c.times.draft or 0.0) / c.num_draft_tokens)
    return DraftCost(fixed_s=(c.times.draft or 0.0) / c.num_drafts if c.num_drafts else 0.0)


def _stages(c: Counters, step: float, *, verify: float, draft: float, overhead: float) -> dict[str, dict[str, float]]:
    """Measured and predicted seconds a round of each stage; empty where the run did not time them."""
    t = c.times
    if not (t.draft or t.verify):
        return {}
    rest = sum(getattr(t, name) or 0.0 for name in ("sample", "commit", "host"))
    measured = {"draft": t.draft or 0.0, "verify": t.verify or 0.0, "rest": rest}
    predicted = {"draft": draft, "verify": verify, "rest": overhead}
    return {
        name: {"measured_s": measured[name] / c.num_rounds, "predicted_s": predicted[name] * step} for name in measured
    }
