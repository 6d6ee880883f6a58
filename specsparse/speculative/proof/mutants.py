"""Known wrong ways to verify, each of them a real bug of a real system or one slip away from a correct rule.

They test the certificate: a check that passes them proves nothing. A mutant of a rule builds a small random round
around its mistake; everything else in it is right. A mutant of a driver puts one mistake around the jitted verdict of
a right rule: in its arguments, or in the verdict. Arrays of drivers have the leading axes [L, B] of `driver.Driver`.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from specsparse.speculative.base import PAD, DraftKind
from specsparse.speculative.proof.cases import (
    Case,
    Tables,
    draw_probs,
    keep_top,
    make_case,
    map_tables,
    outcomes,
    random_tables,
    ranked,
    tempered,
    tie_top,
)
from specsparse.speculative.proof.driver import Driver, driver_probs, jitted
from specsparse.speculative.proof.exact import Outcome, continuations, output_probs, total_variation
from specsparse.speculative.proof.results import DRIVER, MutantResult
from specsparse.speculative.trees.base import TreeTemplate
from specsparse.speculative.verifiers import get_verifier, residuals
from specsparse.speculative.verifiers.draft_rules import Block
from specsparse.speculative.verifiers.rejection import Rejection
from specsparse.speculative.verifiers.sibling_rules import KSeq
from specsparse.speculative.verifiers.siblings import SiblingRule

VOCAB = 4
CHAIN, PAIR, PAIR_AND_CHILDREN = TreeTemplate.chain(2), TreeTemplate.kary((2,)), TreeTemplate.kary((2, 1))

MUTANT_CASES = 3
"""Random cases per mutant."""


def measure_mutant(name: str, *, seed: int) -> MutantResult:
    """Largest total variation of a mutant, of a rule or a driver, over `MUTANT_CASES` random cases."""
    seeds = range(seed * MUTANT_CASES, (seed + 1) * MUTANT_CASES)
    if name in MUTANTS:
        made = [MUTANTS[name].round(s) for s in seeds]
        found = [(output_probs(r.rule, r.outcomes, r.p, r.length), continuations(r.p, r.length)[0]) for r in made]
        return MutantResult(name, MUTANTS[name].mistake, max(total_variation(*both) for both in found))
    mutant = DRIVER_MUTANTS[name]
    tried = mutant.cases(seeds)
    verifier = get_verifier(mutant.verifier)
    made = driver_probs(mutant.wrong(jitted(verifier)), verifier, tried, seed=seed)
    found = [(probs, continuations(case.p, case.length)[0]) for case, (probs, _) in zip(tried, made)]
    return MutantResult(name, mutant.mistake, max(total_variation(*both) for both in found), DRIVER)


# -- rules --


class MutantRound(NamedTuple):
    """One round: the rule, its drafts, the true distribution p, and how many tokens to compare."""

    rule: Any
    outcomes: Iterable[Outcome]
    p: Tables
    length: int


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A mistake of a rule.

    Attributes:
        name: of it.
        mistake: one line.
        build: (p, q) -> a round that makes the mistake.
    """

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


def _recorded_before(change):
    """q is recorded without the change that it was drawn with."""
    return lambda p, q: _round(Rejection(), CHAIN, p, draw=_iid(map_tables(q, change)), record=_iid(q))


def _target_without(change):
    """The verifier's p lacks a change of the target."""
    return lambda p, q: _round(Rejection(), CHAIN, map_tables(p, change), seen=p, draw=_iid(q))


def _penalties_of_committed_only(p, q):
    def penalised(d):
        table = p[d].copy()
        for context in np.ndindex(*table.shape[:d]):
            table[(*context, list(set(context)))] *= 0.4
        return table / table.sum(axis=-1, keepdims=True)

    return _round(Rejection(), CHAIN, [penalised(d) for d in range(len(p))], seen=p, draw=_iid(q))


def _coinciding_draws_merged(p, q):
    def edit(draft):
        return draft._replace(count=np.int32(1)) if draft.tokens[0] == draft.tokens[1] else draft

    return _round(Rejection(), PAIR, p, draw=_iid(q), edit=edit)


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
class _WrongResidual(SiblingRule):
    """A right rule that goes on from `rest(p, q, rejected token)` after a rejection."""

    rest: Callable[[np.ndarray, np.ndarray, int], np.ndarray]
    rule: SiblingRule

    def enter(self, p_V, q_V, siblings):
        return self.rule.enter(p_V, q_V, siblings)

    def accept(self, p_x, q_x, memo):
        return self.rule.accept(p_x, q_x, memo)

    def reject(self, probs_V, q_V, child, memo, last):
        return self.rest(probs_V, q_V, child.token), memo


def _index_residual(p_V, q_V, token):
    """Residual of the compacted arrays: i-th kept token of p against i-th kept token of q."""
    kept, kept_q = (np.argsort(-row, kind="stable")[: np.count_nonzero(row)] for row in (p_V, q_V))
    shifted_V = np.zeros_like(q_V)
    both = min(len(kept), len(kept_q))
    shifted_V[kept[:both]] = q_V[kept_q[:both]]
    return residuals.residual(p_V, shifted_V)


def _residual_by_index(p, q):
    kept_p, kept_q = map_tables(p, keep_top(3)), map_tables(q, keep_top(2))
    return _round(_WrongResidual(_index_residual, Rejection()), CHAIN, kept_p, draw=_iid(kept_q))


def _mss_residual_in_kseq(p, q):
    rule = _WrongResidual(lambda p_V, q_V, token: residuals.residual(p_V, q_V), KSeq())
    return _round(rule, PAIR, p, draw=_iid(q))


def _ties_struck_out(p, q):
    def rest(p_V, q_V, token):
        return residuals.normalise(p_V * (p_V != p_V[token]), p_V)

    tied = map_tables(p, tie_top)
    return _round(_WrongResidual(rest, Rejection()), PAIR, tied, draw=draw_probs(DraftKind.ONE_HOT, tied))


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
class _RoomForThree(SiblingRule):
    """Room for three rejected siblings: a fourth takes nothing from p."""

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


COLD, CUT = tempered(0.5), keep_top(2)

MUTANTS: dict[str, Mutant] = {
    m.name: m
    for m in (
        Mutant("argmax_as_sampled", "argmax-drafted token verified with p/q as if drawn from q", _argmax_as_sampled),
        Mutant("q_before_truncation", "q recorded before the truncation it was drawn with", _recorded_before(CUT)),
        Mutant("q_at_other_temperature", "q recorded at another temperature than the draw", _recorded_before(COLD)),
        Mutant("target_temperature_ignored", "verified against p at temperature 1", _target_without(COLD)),
        Mutant("target_truncation_ignored", "verified against p before truncation", _target_without(CUT)),
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
"""Mutants of rules by name."""


# -- drivers --


@dataclasses.dataclass(frozen=True)
class DriverMutant:
    """A mistake around the driver of one verifier.

    Attributes:
        name: of the mistake and the verifier.
        mistake: one line.
        verifier: name of a lossless one.
        kind: how the drafts are drawn.
        template: shape of the drafts.
        wrong: a right driver -> one that makes the mistake.
    """

    name: str
    mistake: str
    verifier: str
    kind: DraftKind
    template: TreeTemplate
    wrong: Callable[[Driver], Driver]

    def cases(self, seeds: Iterable[int]) -> list[Case]:
        """Random cases."""
        return [make_case("random", self.kind, self.template, vocab=VOCAB, seed=s) for s in seeds]


def _arguments(change: Callable) -> Callable[[Driver], Driver]:
    """The driver gets `change(draft, p, uniforms)`."""
    return lambda run: lambda *given: run(*change(*given))


def _uniforms(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Driver], Driver]:
    """The driver gets other uniforms."""
    return _arguments(lambda draft, p, uniforms: (draft, p, change(uniforms)))


def _coins(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Driver], Driver]:
    """The driver gets other coins; the uniform of the last token stays."""
    return _uniforms(lambda u: np.concatenate([change(u[..., :-1]), u[..., -1:]], axis=-1))


def _verdict(change: Callable) -> Callable[[Driver], Driver]:
    """The verdict becomes `change(verdict, draft, p, uniforms)`."""

    def wrong(run):
        def driver(draft, p, uniforms):
            verdict = run(draft, p, uniforms)
            return change(type(verdict)(*map(np.array, verdict)), draft, p, uniforms)

        return driver

    return wrong


def _first_for_all(u):
    return np.broadcast_to(u[..., :1], u.shape)


def _coin_draws_token(u):
    return np.concatenate([u[..., :-1], u[..., :1]], axis=-1)


def _probs_of_another(draft, p, uniforms):
    return draft, p[:, [0, 0]], uniforms


def _without_root(draft, p, uniforms):
    return draft, np.roll(p, -1, axis=-2), uniforms


def _probs_of_parent(draft, p, uniforms):
    rows = np.pad(draft.parents + 1, ((0, 0), (0, 0), (1, 0)))
    return draft, np.take_along_axis(p, rows[..., None], axis=-2), uniforms


def _q_of_previous(draft, p, uniforms):
    return draft._replace(q=draft.q[..., np.maximum(np.arange(draft.q.shape[-2]) - 1, 0), :]), p, uniforms


def _all_nodes(draft, p, uniforms):
    return draft._replace(count=np.full_like(draft.count, draft.tokens.shape[-1])), p, uniforms


def _one_node_more(draft, p, uniforms):
    return draft._replace(count=np.minimum(draft.count + 1, draft.tokens.shape[-1])), p, uniforms


def _pick(rows, index):
    """rows[.., index, :], index [L, B]."""
    return np.take_along_axis(rows, index[..., None, None], axis=-2)[..., 0, :]


def _last_row(verdict):
    """int[L, B], row of the last accepted node, 0 if none was accepted."""
    nodes = np.pad(verdict.nodes + 1, ((0, 0), (0, 0), (1, 0)))
    return np.take_along_axis(nodes, verdict.accepted[..., None], axis=-1)[..., 0]


def _last_token(verdict, where):
    """bool[L, B, n], the place of the last token of the sequences `where` bool[L, B]."""
    return (np.arange(verdict.tokens.shape[-1]) == verdict.accepted[..., None]) & where[..., None]


def _redrawn(verdict, probs, where, uniforms):
    """The verdict with its last token drawn from `probs` [L, B, V] instead, `where` bool[L, B]."""
    V = probs.shape[-1]
    last = residuals.inverse_cdf(probs.reshape(-1, V), uniforms[..., -1].reshape(-1)).reshape(where.shape)
    return verdict._replace(tokens=np.where(_last_token(verdict, where), last[..., None], verdict.tokens))


def _rejected(verdict, draft):
    """bool[L, B]: the chain's walk ended on a rejection, of node `accepted`."""
    return verdict.accepted < draft.count


def _p_after_rejection(verdict, draft, p, uniforms):
    return _redrawn(verdict, _pick(p, _last_row(verdict)), _rejected(verdict, draft), uniforms)


def _residual_of_previous(verdict, draft, p, uniforms):
    q = _pick(draft.q, np.maximum(verdict.accepted - 1, 0))
    gap = np.maximum(_pick(p, _last_row(verdict)) - q, 0)
    return _redrawn(verdict, gap, _rejected(verdict, draft) & (gap.sum(axis=-1) > 0), uniforms)


def _bonus_of_row_before(verdict, draft, p, uniforms):
    row = np.maximum(_last_row(verdict) - 1, 0)
    return _redrawn(verdict, _pick(p, row), ~_rejected(verdict, draft), uniforms)


def _rejected_emitted(verdict, draft, p, uniforms):
    at = np.minimum(verdict.accepted, draft.tokens.shape[-1] - 1)[..., None]
    token, place = np.take_along_axis(draft.tokens, at, axis=-1), _last_token(verdict, _rejected(verdict, draft))
    return verdict._replace(tokens=np.where(place, token, verdict.tokens))


def _one_short(verdict, draft, p, uniforms):
    """The last accepted token is left out, the token after it kept."""
    accepted = np.maximum(verdict.accepted - 1, 0)[..., None]
    place, end = np.arange(verdict.tokens.shape[-1]), verdict.count[..., None] - 1
    tail = np.where(place == accepted, np.take_along_axis(verdict.tokens, end, axis=-1), PAD)
    tokens = np.where(place < accepted, verdict.tokens, tail)
    nodes = np.where(np.arange(verdict.nodes.shape[-1]) < accepted, verdict.nodes, PAD)
    return verdict._replace(tokens=tokens, nodes=nodes, accepted=accepted[..., 0], count=accepted[..., 0] + 1)


def _next_nodes(verdict, draft, p, uniforms):
    return verdict._replace(nodes=np.where(verdict.nodes >= 0, verdict.nodes + 1, PAD))


_SHAPES = {
    "token": (DraftKind.SAMPLED, CHAIN),
    "block": (DraftKind.SAMPLED, CHAIN),
    "match": (DraftKind.SAMPLED, CHAIN),
    "mss": (DraftKind.IID, PAIR_AND_CHILDREN),
}

DRIVER_MUTANTS: dict[str, DriverMutant] = {
    f"{name}_{verifier}": DriverMutant(f"{name}_{verifier}", mistake, verifier, *_SHAPES[verifier], wrong)
    for name, mistake, wrong, verifiers in (
        ("no_coins", "coins not handed over: all 0", _coins(np.zeros_like), "token block mss"),
        ("one_coin", "the first node's coin used for every node", _coins(_first_for_all), "token block mss"),
        ("one_uniform", "one number for the target's noise at all rows", _uniforms(_first_for_all), "match"),
        ("coin_drawn_with", "the last token drawn with a coin", _uniforms(_coin_draws_token), "token block"),
        ("others_noise", "coins and uniform of another sequence", _uniforms(lambda u: u[:, [0, 0]]), "token match"),
        ("others_probs", "p of another sequence", _arguments(_probs_of_another), "token block match"),
        ("no_root", "p of the row after, for each row", _arguments(_without_root), "token block match"),
        ("parents_probs", "p of the parent, for each node", _arguments(_probs_of_parent), "token mss"),
        ("stale_q", "q of the node before, for each node", _arguments(_q_of_previous), "token block"),
        ("count_ignored", "nodes that do not exist are tested", _arguments(_all_nodes), "token match mss"),
        ("count_plus_one", "one node that does not exist is tested", _arguments(_one_node_more), "token block"),
        ("no_residual", "p itself drawn from after a rejection", _verdict(_p_after_rejection), "token block"),
        ("stale_residual", "residual with q of the node before", _verdict(_residual_of_previous), "token"),
        ("early_bonus", "bonus token from the row before", _verdict(_bonus_of_row_before), "token"),
        ("rejected_emitted", "a rejected token is emitted", _verdict(_rejected_emitted), "token"),
        ("one_short", "one accepted token is not emitted", _verdict(_one_short), "token match"),
        ("next_nodes", "the cache keeps the nodes after the accepted ones", _verdict(_next_nodes), "mss"),
    )
    for verifier in verifiers.split()
}
"""Mutants of drivers by name."""
