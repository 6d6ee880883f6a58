"""Known wrong ways to verify, each of them a real bug of a real system or one slip away from a correct rule.

They test the certificate: a check that passes them proves nothing. Each builds a small random round around its mistake;
everything else in it is right.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from specsparse.speculative.base import DraftKind
from specsparse.speculative.proof.cases import (
    Tables,
    draw_probs,
    keep_top,
    map_tables,
    outcomes,
    random_tables,
    ranked,
    tempered,
    tie_top,
)
from specsparse.speculative.proof.exact import Outcome
from specsparse.speculative.tree import TreeTemplate
from specsparse.speculative.verifiers import residuals
from specsparse.speculative.verifiers.draft_rules import Block
from specsparse.speculative.verifiers.rejection import Rejection
from specsparse.speculative.verifiers.sibling_rules import KSeq
from specsparse.speculative.verifiers.siblings import SiblingRule

VOCAB = 4
PAIR, CHAIN = TreeTemplate.kary((2,)), TreeTemplate.chain(2)


class MutantRound(NamedTuple):
    """One round: the rule, its drafts, the true distribution p, and how many tokens to compare."""

    rule: Any
    outcomes: Iterable[Outcome]
    p: Tables
    length: int


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A mistake: name, one line on what is wrong, and how to build a random round that makes it."""

    name: str
    mistake: str
    build: Callable[[Tables, Tables], MutantRound]

    def round(self, seed: int) -> MutantRound:
        """The mutant's round on random distributions."""
        rng = np.random.default_rng([seed, 7])
        p, q = (random_tables(rng, vocab=VOCAB, depth=3, concentration=1.0) for _ in range(2))
        return self.build(p, q)


def _round(rule, template, p, *, seen=None, draw, record=None, edit=None) -> MutantRound:
    """A round whose verifier sees `seen` for p; `edit` changes the draft after it was drawn."""
    found = outcomes(template, seen or p, draw=draw, record=record)
    edited = (o._replace(draft=edit(o.draft)) for o in found) if edit else found
    return MutantRound(rule, edited, p, template.max_depth + 1)


def _iid(q: Tables):
    return draw_probs(DraftKind.IID, q)


def _argmax_as_sampled(p, q):
    return _round(Rejection(), CHAIN, p, draw=lambda n, ctx, e: ranked(q[len(ctx)][ctx], 0), record=_iid(q))


def _q_before_truncation(p, q):
    return _round(Rejection(), CHAIN, p, draw=_iid(map_tables(q, keep_top(2))), record=_iid(q))


def _q_at_other_temperature(p, q):
    return _round(Rejection(), CHAIN, p, draw=_iid(map_tables(q, tempered(0.5))), record=_iid(q))


def _target_temperature_ignored(p, q):
    return _round(Rejection(), CHAIN, map_tables(p, tempered(0.5)), seen=p, draw=_iid(q))


def _target_truncation_ignored(p, q):
    return _round(Rejection(), CHAIN, map_tables(p, keep_top(2)), seen=p, draw=_iid(q))


def _penalties_of_committed_only(p, q):
    def penalised(d):
        table = p[d].copy()
        for context in np.ndindex(*table.shape[:d]):
            table[(*context, list(set(context)))] *= 0.4
        return table / table.sum(axis=-1, keepdims=True)

    return _round(Rejection(), CHAIN, [penalised(d) for d in range(len(p))], seen=p, draw=_iid(q))


def _merge(draft):
    same = draft.tokens[0] == draft.tokens[1]
    return draft._replace(count=np.int32(1)) if same else draft


def _coinciding_draws_merged(p, q):
    return _round(Rejection(), PAIR, p, draw=_iid(q), edit=_merge)


def _shared_draw_tested_twice(p, q):
    def draw(node, context, elders):
        return residuals.one_hot(q[0], elders[0]) if elders else q[0]

    return _round(Rejection(), PAIR, p, draw=draw, record=_iid(q))


def _wor_not_renormalised(p, q):
    def record(node, context, elders):
        row = q[0].copy()
        row[list(elders)] = 0
        return row

    return _round(Rejection(), PAIR, p, draw=draw_probs(DraftKind.WOR, q), record=record)


def _dropped_by_n_min(p, q):
    def edit(draft):
        # The draft stops before its second token when the drafter is unsure there, and is then shorter than n_min = 2.
        sure = q[1][draft.tokens[0]].max() >= np.median(q[1].max(axis=1))
        return draft._replace(count=np.int32(2 if sure else 0))

    return _round(Rejection(), CHAIN, p, draw=_iid(q), edit=edit)


def _pruned_by_own_probability(p, q):
    def edit(draft):
        keep = np.flatnonzero(q[0][draft.tokens] >= np.median(q[0]))
        order = np.concatenate([keep, np.setdiff1d(np.arange(2), keep)])
        return draft._replace(tokens=draft.tokens[order], count=np.int32(keep.size))

    return _round(Rejection(), PAIR, p, draw=_iid(q), edit=edit)


@dataclasses.dataclass(frozen=True)
class _IndexResidual(SiblingRule):
    """Residual of the compacted arrays: i-th kept token of p against i-th kept token of q."""

    def enter(self, p_V, q_V, siblings):
        return ()

    def accept(self, p_x, q_x, memo):
        return Rejection().accept(p_x, q_x, memo)

    def reject(self, probs_V, q_V, child, memo, last):
        kept, kept_q = (np.argsort(-row, kind="stable")[: np.count_nonzero(row)] for row in (probs_V, q_V))
        shifted_V = np.zeros_like(q_V)
        both = min(len(kept), len(kept_q))
        shifted_V[kept[:both]] = q_V[kept_q[:both]]
        return residuals.residual(probs_V, shifted_V), ()


def _residual_by_index(p, q):
    kept_p, kept_q = map_tables(p, keep_top(3)), map_tables(q, keep_top(2))
    return _round(_IndexResidual(), CHAIN, kept_p, draw=_iid(kept_q))


@dataclasses.dataclass(frozen=True)
class _StaleP(SiblingRule):
    """p of the previous branch stands in for a token that the truncated p does not hold."""

    def enter(self, p_V, q_V, siblings):
        return (np.float64(0),)

    def accept(self, p_x, q_x, memo):
        return Rejection().accept(p_x if p_x > 0 else memo[0], q_x, ())

    def reject(self, probs_V, q_V, child, memo, last):
        rest_V, _ = Rejection().reject(probs_V, q_V, child, (), last)
        return rest_V, (probs_V[child.token] if probs_V[child.token] > 0 else memo[0],)


def _stale_p(p, q):
    return _round(_StaleP(), PAIR, map_tables(p, keep_top(2)), draw=_iid(q))


@dataclasses.dataclass(frozen=True)
class _KSeqWithMssResidual(SiblingRule):
    """KSeq's thresholds with the residual of multi-step sampling."""

    def enter(self, p_V, q_V, siblings):
        return KSeq().enter(p_V, q_V, siblings)

    def accept(self, p_x, q_x, memo):
        return KSeq().accept(p_x, q_x, memo)

    def reject(self, probs_V, q_V, child, memo, last):
        return residuals.residual(probs_V, q_V), memo


def _mss_residual_in_kseq(p, q):
    return _round(_KSeqWithMssResidual(), PAIR, p, draw=_iid(q))


@dataclasses.dataclass(frozen=True)
class _StruckOutByValue(SiblingRule):
    """Tokens as likely as the rejected one are struck out with it."""

    def enter(self, p_V, q_V, siblings):
        return ()

    def accept(self, p_x, q_x, memo):
        return Rejection().accept(p_x, q_x, memo)

    def reject(self, probs_V, q_V, child, memo, last):
        return residuals.normalise(probs_V * (probs_V != probs_V[child.token]), probs_V), ()


def _ties_struck_out(p, q):
    tied = map_tables(p, tie_top)
    return _round(_StruckOutByValue(), PAIR, tied, draw=draw_probs(DraftKind.ONE_HOT, tied))


@dataclasses.dataclass(frozen=True)
class _RoomForThree(SiblingRule):
    """Room for three rejected siblings: what a fourth has taken is not."""

    def enter(self, p_V, q_V, siblings):
        return (np.float64(0),)

    def accept(self, p_x, q_x, memo):
        return Rejection().accept(p_x, q_x, ())

    def reject(self, probs_V, q_V, child, memo, last):
        rest_V, _ = Rejection().reject(probs_V, q_V, child, (), last)
        return rest_V if memo[0] < 3 else probs_V, (memo[0] + 1,)


def _fourth_sibling_forgotten(p, q):
    return _round(_RoomForThree(), TreeTemplate.kary((4,)), p, draw=_iid(map_tables(q, tempered(0.5))))


@dataclasses.dataclass(frozen=True)
class _BlockWithTokenResidual:
    """Block's stopping rule with Leviathan's residual."""

    def weight(self, before, p_x, q_x):
        return Block().weight(before, p_x, q_x)

    def stop(self, weight, p_V, q_V):
        return Block().stop(weight, p_V, q_V)

    def probs(self, weight, p_V, q_V):
        return residuals.residual(p_V, q_V)


def _token_residual_in_block(p, q):
    return _round(_BlockWithTokenResidual(), CHAIN, p, draw=_iid(q))


MUTANTS: dict[str, Mutant] = {
    m.name: m
    for m in (
        Mutant("argmax_as_sampled", "argmax-drafted token verified with p/q as if drawn from q", _argmax_as_sampled),
        Mutant("q_before_truncation", "q recorded before the truncation it was drawn with", _q_before_truncation),
        Mutant("q_at_other_temperature", "q recorded at another temperature than the draw", _q_at_other_temperature),
        Mutant("target_temperature_ignored", "verified against p at temperature 1", _target_temperature_ignored),
        Mutant("target_truncation_ignored", "verified against p before truncation", _target_truncation_ignored),
        Mutant("residual_by_index", "residual by array index after different truncations", _residual_by_index),
        Mutant("stale_p", "p of the previous branch for a token outside the truncated p", _stale_p),
        Mutant("penalties_of_committed_only", "penalties do not see the draft prefix", _penalties_of_committed_only),
        Mutant("coinciding_draws_merged", "equal mss draws merged and tested once", _coinciding_draws_merged),
        Mutant("shared_draw_tested_twice", "one draw shared by two branches, tested twice", _shared_draw_tested_twice),
        Mutant("wor_not_renormalised", "used token removed from q, the rest not renormalised", _wor_not_renormalised),
        Mutant("dropped_by_n_min", "a drawn token dropped because the draft is too short", _dropped_by_n_min),
        Mutant("pruned_by_own_probability", "drawn siblings pruned by their own q", _pruned_by_own_probability),
        Mutant("mss_residual_in_kseq", "kseq thresholds, mss residual", _mss_residual_in_kseq),
        Mutant("ties_struck_out", "tokens as likely as the rejected one struck out with it", _ties_struck_out),
        Mutant("fourth_sibling_forgotten", "room for three rejected siblings, no more", _fourth_sibling_forgotten),
        Mutant("token_residual_in_block", "block stopping, Leviathan's residual", _token_residual_in_block),
    )
}
"""All mutants by name."""
