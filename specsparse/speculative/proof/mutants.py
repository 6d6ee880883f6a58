"""Known wrong ways to verify, each of them a real bug of a real system or one slip away from a correct rule.

They test the certificate: a check that passes them proves nothing. A mutant of a rule builds a small random round
around its mistake; everything else in it is right. A mutant of a driver puts one mistake around the jitted verdict of
a right rule: in its arguments, or in the verdict. Arrays of drivers have the leading axes [L, B] of `driver.Driver`.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from specsparse.speculative.base import PAD, DraftKind
from specsparse.speculative.proof.cases import (
    Case,
    RowProbs,
    Tables,
    draw_probs,
    keep_top,
    make_case,
    map_tables,
    outcomes,
    random_tables,
    tempered,
    tie_top,
)
from specsparse.speculative.proof.driver import Driver, driver_probs, jitted
from specsparse.speculative.proof.exact import Outcome, continuations, output_probs, total_variation
from specsparse.speculative.proof.results import DRIVER, MutantResult
from specsparse.speculative.trees.template import TreeTemplate
from specsparse.speculative.verifiers import get_verifier, residuals
from specsparse.speculative.verifiers.draft_rules import Block
from specsparse.speculative.verifiers.rejection import Rejection
from specsparse.speculative.verifiers.sibling_rules import KSeq

VOCAB = 4
CHAIN, PAIR, PAIR_AND_CHILDREN = TreeTemplate.chain(2), TreeTemplate.kary((2,)), TreeTemplate.kary((2, 1))

MUTANT_CASES = 3
"""Random cases per mutant."""


def measure_mutant(name: str, *, seed: int) -> MutantResult:
    """Largest total variation of a mutant, of a rule or a driver, over `MUTANT_CASES` random cases."""
    seeds = range(seed * MUTANT_CASES, (seed + 1) * MUTANT_CASES)
    if name in MUTANTS:
        mistake, build = MUTANTS[name]
        made = [build(*random_p_q(s)) for s in seeds]
        found = [(output_probs(r.rule, r.outcomes, r.p, r.length), continuations(r.p, r.length)[0]) for r in made]
        return MutantResult(name, mistake, max(total_variation(*both) for both in found))
    mutant = DRIVER_MUTANTS[name]
    tried, verifier = mutant.cases(seeds), get_verifier(mutant.verifier)
    made = driver_probs(mutant.wrong(jitted(verifier)), verifier, tried, seed=seed)
    found = [(probs, continuations(case.p, case.length)[0]) for case, (probs, _) in zip(tried, made)]
    return MutantResult(name, mutant.mistake, max(total_variation(*both) for both in found), DRIVER)


def random_p_q(seed: int) -> tuple[Tables, ...]:
    rng = np.random.default_rng([seed, 7])
    return tuple(random_tables(rng, vocab=VOCAB, depth=3, concentration=1.0) for _ in range(2))


# -- rules --


class MutantRound(NamedTuple):
    """One round: the rule, its drafts, the true distribution p, and how many tokens to compare."""

    rule: Any
    outcomes: Iterable[Outcome]
    p: Tables
    length: int


def mutant_round(
    p: Tables, draw: RowProbs, *, rule: Any = None, template: TreeTemplate = CHAIN, seen: Tables | None = None,
    record: RowProbs | None = None, edit: Callable | None = None,
) -> MutantRound:  # fmt: skip
    """A round whose verifier sees `seen` for p; `edit` changes the draft after it was drawn."""
    found = outcomes(template, seen or p, draw=draw, record=record)
    edited = (o._replace(draft=edit(o.draft)) for o in found) if edit else found
    return MutantRound(rule or Rejection(), edited, p, template.max_depth + 1)


def iid(q: Tables) -> RowProbs:
    return draw_probs(DraftKind.IID, q)


@dataclasses.dataclass(frozen=True)
class WrongResidual(Rejection):
    """Goes on from `rest(p, q, rejected token)` after a rejection."""

    rest: Callable[..., Any]

    def reject(self, probs_V, q_V, child, memo, last):
        return self.rest(probs_V, q_V, child.token), memo


@dataclasses.dataclass(frozen=True)
class KSeqWithRejectionsResidual(KSeq):
    def reject(self, probs_V, q_V, child, memo, last):
        return residuals.residual(probs_V, q_V), memo


@dataclasses.dataclass(frozen=True)
class StaleP(Rejection):
    """p of the previous branch stands in for a token that the truncated p does not hold."""

    def enter(self, p_V, q_V, siblings):
        return (np.float64(0),)

    def accept(self, p_x, q_x, memo):
        return super().accept(p_x if p_x > 0 else memo[0], q_x, ())

    def reject(self, probs_V, q_V, child, memo, last):
        rest_V, _ = super().reject(probs_V, q_V, child, (), last)
        return rest_V, (probs_V[child.token] if probs_V[child.token] > 0 else memo[0],)


@dataclasses.dataclass(frozen=True)
class RoomForThree(Rejection):
    """Room for three rejected siblings: a fourth takes nothing from p."""

    def enter(self, p_V, q_V, siblings):
        return (np.float64(0),)

    def reject(self, probs_V, q_V, child, memo, last):
        rest_V, _ = super().reject(probs_V, q_V, child, (), last)
        return rest_V if memo[0] < 3 else probs_V, (memo[0] + 1,)


@dataclasses.dataclass(frozen=True)
class BlockWithTokenResidual(Block):
    def probs(self, weight, p_V, q_V):
        return residuals.residual(p_V, q_V)


def residual_of_compacted(p_V, q_V, token):
    """The i-th kept token of p against the i-th kept token of q."""
    kept, kept_q = (np.argsort(-row, kind="stable")[: np.count_nonzero(row)] for row in (p_V, q_V))
    shifted_V = np.zeros_like(q_V)
    both = min(len(kept), len(kept_q))
    shifted_V[kept[:both]] = q_V[kept_q[:both]]
    return residuals.residual(p_V, shifted_V)


def penalties_of_committed_only(p, q):
    def penalised(d):
        table = p[d].copy()
        for context in np.ndindex(*table.shape[:d]):
            table[(*context, list(set(context)))] *= 0.4
        return table / table.sum(axis=-1, keepdims=True)

    return mutant_round([penalised(d) for d in range(len(p))], iid(q), seen=p)


def coinciding_draws_merged(p, q):
    def edit(draft):
        return draft._replace(count=np.int32(1)) if draft.tokens[0] == draft.tokens[1] else draft

    return mutant_round(p, iid(q), template=PAIR, edit=edit)


def shared_draw_tested_twice(p, q):
    def draw(node, context, elders):
        return residuals.one_hot(q[0], elders[0]) if elders else q[0]

    return mutant_round(p, draw, template=PAIR, record=iid(q))


def wor_not_renormalised(p, q):
    def record(node, context, elders):
        row = q[0].copy()
        row[list(elders)] = 0
        return row

    return mutant_round(p, draw_probs(DraftKind.WOR, q), template=PAIR, record=record)


def dropped_by_n_min(p, q):
    def edit(draft):
        # The draft stops before its second token when the drafter is unsure there, and is then shorter than n_min = 2.
        sure = q[1][draft.tokens[0]].max() >= np.median(q[1].max(axis=1))
        return draft._replace(count=np.int32(2 if sure else 0))

    return mutant_round(p, iid(q), edit=edit)


def pruned_by_own_probability(p, q):
    def edit(draft):
        keep = np.flatnonzero(q[0][draft.tokens] >= np.median(q[0]))
        order = np.concatenate([keep, np.setdiff1d(np.arange(2), keep)])
        return draft._replace(tokens=draft.tokens[order], count=np.int32(keep.size))

    return mutant_round(p, iid(q), template=PAIR, edit=edit)


def ties_struck_out(p, q):
    rule = WrongResidual(lambda p_V, q_V, x: residuals.normalise(p_V * (p_V != p_V[x]), p_V))
    tied = map_tables(p, tie_top)
    return mutant_round(tied, draw_probs(DraftKind.ONE_HOT, tied), rule=rule, template=PAIR)


CUT, COLD = keep_top(2), tempered(0.5)

MUTANTS: dict[str, tuple[str, Callable[[Tables, Tables], MutantRound]]] = {
    "argmax_as_sampled": (
        "argmax-drafted token verified with p/q as if drawn from q",
        lambda p, q: mutant_round(p, draw_probs(DraftKind.ONE_HOT, q), record=iid(q)),
    ),
    "q_before_truncation": (
        "q recorded before the truncation it was drawn with",
        lambda p, q: mutant_round(p, iid(map_tables(q, CUT)), record=iid(q)),
    ),
    "q_at_other_temperature": (
        "q recorded at another temperature than the draw",
        lambda p, q: mutant_round(p, iid(map_tables(q, COLD)), record=iid(q)),
    ),
    "target_temperature_ignored": (
        "verified against p at temperature 1",
        lambda p, q: mutant_round(map_tables(p, COLD), iid(q), seen=p),
    ),
    "target_truncation_ignored": (
        "verified against p before truncation",
        lambda p, q: mutant_round(map_tables(p, CUT), iid(q), seen=p),
    ),
    "residual_by_index": (
        "residual by array index after different truncations",
        lambda p, q: mutant_round(
            map_tables(p, keep_top(3)), iid(map_tables(q, CUT)), rule=WrongResidual(residual_of_compacted)
        ),
    ),
    "stale_p": (
        "p of the previous branch for a token outside the truncated p",
        lambda p, q: mutant_round(map_tables(p, CUT), iid(q), rule=StaleP(), template=PAIR),
    ),
    "penalties_of_committed_only": ("penalties do not see the draft prefix", penalties_of_committed_only),
    "coinciding_draws_merged": ("equal mss draws merged and tested once", coinciding_draws_merged),
    "shared_draw_tested_twice": ("one draw shared by two branches, tested twice", shared_draw_tested_twice),
    "wor_not_renormalised": ("used token removed from q, the rest not renormalised", wor_not_renormalised),
    "dropped_by_n_min": ("a drawn token dropped because the draft is too short", dropped_by_n_min),
    "pruned_by_own_probability": ("drawn siblings pruned by their own q", pruned_by_own_probability),
    "mss_residual_in_kseq": (
        "kseq thresholds, mss residual",
        lambda p, q: mutant_round(p, iid(q), rule=KSeqWithRejectionsResidual(), template=PAIR),
    ),
    "ties_struck_out": ("tokens as likely as the rejected one struck out with it", ties_struck_out),
    "fourth_sibling_forgotten": (
        "room for three rejected siblings, no more",
        lambda p, q: mutant_round(p, iid(map_tables(q, COLD)), rule=RoomForThree(), template=TreeTemplate.kary((4,))),
    ),
    "token_residual_in_block": (
        "block stopping, Leviathan's residual",
        lambda p, q: mutant_round(p, iid(q), rule=BlockWithTokenResidual()),
    ),
}
"""Mutants of rules by name: the mistake, and (p, q) -> a round that makes it."""


# -- drivers --


@dataclasses.dataclass(frozen=True)
class DriverMutant:
    """A mistake around the driver of one lossless verifier: one line on it, and a right driver -> a wrong one."""

    mistake: str
    verifier: str
    wrong: Callable[[Driver], Driver]

    def cases(self, seeds: Iterable[int]) -> list[Case]:
        kind, template = (DraftKind.SAMPLED, CHAIN)
        if self.verifier == "mss":
            kind, template = (DraftKind.IID, PAIR_AND_CHILDREN)
        return [make_case("random", kind, template, vocab=VOCAB, seed=s) for s in seeds]


def _last_row(verdict):
    """int[L, B], row of the last accepted node, 0 if none was accepted."""
    nodes = np.pad(verdict.nodes + 1, ((0, 0), (0, 0), (1, 0)))
    return np.take_along_axis(nodes, verdict.accepted[..., None], axis=-1)[..., 0]


def _last_token(verdict, where):
    """bool[L, B, n], the place of the last token of the sequences `where` bool[L, B]."""
    return (np.arange(verdict.tokens.shape[-1]) == verdict.accepted[..., None]) & where[..., None]


def _redrawn(verdict, rows, index, where, uniforms, minus=0):
    """The verdict with its last token drawn from row `index` [L, B] instead, less `minus`, where it is `where` and has
    mass."""
    probs = np.maximum(np.take_along_axis(rows, index[..., None, None], axis=-2)[..., 0, :] - minus, 0)
    last = residuals.inverse_cdf(probs.reshape(-1, probs.shape[-1]), uniforms[..., -1].reshape(-1)).reshape(where.shape)
    place = _last_token(verdict, where & (probs.sum(axis=-1) > 0))
    return verdict._replace(tokens=np.where(place, last[..., None], verdict.tokens))


def _rejected(verdict, draft):
    """bool[L, B]: the chain's walk ended on a rejection, of node `accepted`."""
    return verdict.accepted < draft.count


def parents_probs(draft, p, uniforms):
    rows = np.pad(draft.parents + 1, ((0, 0), (0, 0), (1, 0)))
    return draft, np.take_along_axis(p, rows[..., None], axis=-2), uniforms


def stale_residual(verdict, draft, p, uniforms):
    before = np.maximum(verdict.accepted - 1, 0)[..., None, None]
    q = np.take_along_axis(draft.q, before, axis=-2)[..., 0, :]
    return _redrawn(verdict, p, _last_row(verdict), _rejected(verdict, draft), uniforms, minus=q)


def early_bonus(verdict, draft, p, uniforms):
    return _redrawn(verdict, p, np.maximum(_last_row(verdict) - 1, 0), ~_rejected(verdict, draft), uniforms)


def rejected_emitted(verdict, draft, p, uniforms):
    at = np.minimum(verdict.accepted, draft.tokens.shape[-1] - 1)[..., None]
    token, place = np.take_along_axis(draft.tokens, at, axis=-1), _last_token(verdict, _rejected(verdict, draft))
    return verdict._replace(tokens=np.where(place, token, verdict.tokens))


def one_short(verdict, draft, p, uniforms):
    """The last accepted token is left out, the token after it kept."""
    accepted = np.maximum(verdict.accepted - 1, 0)[..., None]
    place, end = np.arange(verdict.tokens.shape[-1]), verdict.count[..., None] - 1
    tail = np.where(place == accepted, np.take_along_axis(verdict.tokens, end, axis=-1), PAD)
    tokens = np.where(place < accepted, verdict.tokens, tail)
    nodes = np.where(np.arange(verdict.nodes.shape[-1]) < accepted, verdict.nodes, PAD)
    return verdict._replace(tokens=tokens, nodes=nodes, accepted=accepted[..., 0], count=accepted[..., 0] + 1)


def scheduled(times: Sequence[float], *, ahead: bool) -> Callable:
    """A change that cuts drafts to the length at which the scheduler of DSpark (arXiv:2607.05147, algorithm 1) expects
    most tokens a second, by the times of rounds that verify 0, 1, .. nodes. Its confidence of a node is what the draft
    gave the token before, and 1 of the first.

    It stops before the first node that lowers the rate, so that whether a node is verified depends on those before it
    alone. `ahead` takes the best of all lengths: whether a node is verified then depends on what its own token makes of
    the confidence after it (appendix A).
    """

    def change(draft, p, uniforms):
        drawn = np.take_along_axis(draft.q, draft.tokens[..., None], axis=-1)[..., 0]
        one = np.ones_like(drawn[..., :1])
        survivals = np.cumprod(np.concatenate([one, one, drawn[..., :-1]], axis=-1), axis=-1)
        rate = np.cumsum(survivals, axis=-1) / np.asarray(times)
        rate = np.where(np.arange(len(times)) <= draft.count[..., None], rate, 0)
        fell = np.concatenate([rate[..., 1:] < rate[..., :-1], one > 0], axis=-1)
        length = np.argmax(rate if ahead else fell, axis=-1)
        return draft._replace(count=length.astype(np.int32)), p, uniforms

    return change


SECOND_OR_NONE = (1.0, 2.1, 2.25, 9.0)
"""One node never pays; two do if the draft gave the first more than a quarter, the mean over `VOCAB` tokens."""


ARGUMENTS = (
    (
        "no_coins", "token block mss", "coins not passed on: all 0",
        lambda draft, p, u: (draft, p, np.concatenate([np.zeros_like(u[..., :-1]), u[..., -1:]], axis=-1)),
    ),
    (
        "one_coin", "token block mss", "the first node's coin used for every node",
        lambda draft, p, u: (draft, p, np.concatenate([np.repeat(u[..., :1], u.shape[-1] - 1, -1), u[..., -1:]], -1)),
    ),
    (
        "one_uniform", "match", "one number for the target's noise at all rows",
        lambda draft, p, u: (draft, p, np.broadcast_to(u[..., :1], u.shape)),
    ),
    (
        "coin_drawn_with", "token block", "the last token drawn with a coin",
        lambda draft, p, u: (draft, p, np.concatenate([u[..., :-1], u[..., :1]], axis=-1)),
    ),
    (
        "others_noise", "token match", "coins and uniform of another sequence",
        lambda draft, p, u: (draft, p, u[:, [0, 0]]),
    ),
    ("others_probs", "token block match", "p of another sequence", lambda draft, p, u: (draft, p[:, [0, 0]], u)),
    (
        "no_root", "token block match", "p of the row after, for each row",
        lambda draft, p, u: (draft, np.roll(p, -1, axis=-2), u),
    ),
    ("parents_probs", "token mss", "p of the parent, for each node", parents_probs),
    (
        "stale_q", "token block", "q of the node before, for each node",
        lambda d, p, u: (d._replace(q=d.q[..., np.maximum(np.arange(d.q.shape[-2]) - 1, 0), :]), p, u),
    ),
    (
        "count_ignored", "token match mss", "nodes that do not exist are tested",
        lambda d, p, u: (d._replace(count=np.full_like(d.count, d.tokens.shape[-1])), p, u),
    ),
    (
        "count_plus_one", "token block", "one node that does not exist is tested",
        lambda d, p, u: (d._replace(count=np.minimum(d.count + 1, d.tokens.shape[-1])), p, u),
    ),
    (
        "looks_ahead", "token block", "a node is verified or not by what its own token makes of the next",
        scheduled(SECOND_OR_NONE, ahead=True),
    ),
    (
        "spares_experts", "token block", "nodes are verified up to the first whose own token wakes more experts",
        lambda d, p, u: (d._replace(count=np.minimum(d.count, np.cumprod(d.tokens != 1, axis=-1).sum(axis=-1))), p, u),
    ),
)  # fmt: skip
"""Name, verifiers, mistake, and a change of the driver's arguments (draft, p, uniforms)."""

VERDICTS = (
    (
        "no_residual", "token block", "p itself drawn from after a rejection",
        lambda v, draft, p, u: _redrawn(v, p, _last_row(v), _rejected(v, draft), u),
    ),
    ("stale_residual", "token", "residual with q of the node before", stale_residual),
    ("early_bonus", "token", "bonus token from the row before", early_bonus),
    ("rejected_emitted", "token", "a rejected token is emitted", rejected_emitted),
    ("one_short", "token match", "one accepted token is not emitted", one_short),
    (
        "next_nodes", "mss", "the cache keeps the nodes after the accepted ones",
        lambda v, draft, p, u: v._replace(nodes=np.where(v.nodes >= 0, v.nodes + 1, PAD)),
    ),
)  # fmt: skip
"""The same of (verdict, draft, p, uniforms) -> verdict."""


def _with_arguments(change: Callable) -> Callable[[Driver], Driver]:
    return lambda run: lambda *given: run(*change(*given))


def _with_verdict(change: Callable) -> Callable[[Driver], Driver]:
    def wrong(run):
        def driver(*given):
            verdict = run(*given)
            return change(type(verdict)(*map(np.array, verdict)), *given)

        return driver

    return wrong


DRIVER_MUTANTS: dict[str, DriverMutant] = {
    f"{name}_{verifier}": DriverMutant(mistake, verifier, wrong)
    for table, around in ((ARGUMENTS, _with_arguments), (VERDICTS, _with_verdict))
    for name, verifiers, mistake, change in table
    for wrong in [around(change)]
    for verifier in verifiers.split()
}
"""Mutants of drivers by name, which is that of the mistake and of the verifier."""
