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
    """A mistake of a rule: one line on it, and (p, q) -> a round that makes it."""

    name: str
    mistake: str
    build: Callable[[Tables, Tables], MutantRound]

    def round(self, seed: int) -> MutantRound:
        rng = np.random.default_rng([seed, 7])
        p, q = (random_tables(rng, vocab=VOCAB, depth=3, concentration=1.0) for _ in range(2))
        return self.build(p, q)


MUTANTS: dict[str, Mutant] = {}
"""Mutants of rules by name."""


def _mutant(mistake: str) -> Callable:
    """Adds a function (p, q) -> `MutantRound` to `MUTANTS` under its own name."""

    def add(build):
        MUTANTS[build.__name__] = Mutant(build.__name__, mistake, build)
        return build

    return add


def _round(rule, template, p, *, seen=None, draw, record=None, edit=None) -> MutantRound:
    """A round whose verifier sees `seen` for p; `edit` changes the draft after it was drawn."""
    found = outcomes(template, seen or p, draw=draw, record=record)
    edited = (o._replace(draft=edit(o.draft)) for o in found) if edit else found
    return MutantRound(rule, edited, p, template.max_depth + 1)


def _iid(q: Tables):
    return draw_probs(DraftKind.IID, q)


@_mutant("argmax-drafted token verified with p/q as if drawn from q")
def argmax_as_sampled(p, q):
    return _round(Rejection(), CHAIN, p, draw=lambda n, ctx, e: ranked(q[len(ctx)][ctx], 0), record=_iid(q))


@_mutant("q recorded before the truncation it was drawn with")
def q_before_truncation(p, q):
    return _round(Rejection(), CHAIN, p, draw=_iid(map_tables(q, keep_top(2))), record=_iid(q))


@_mutant("q recorded at another temperature than the draw")
def q_at_other_temperature(p, q):
    return _round(Rejection(), CHAIN, p, draw=_iid(map_tables(q, tempered(0.5))), record=_iid(q))


@_mutant("verified against p at temperature 1")
def target_temperature_ignored(p, q):
    return _round(Rejection(), CHAIN, map_tables(p, tempered(0.5)), seen=p, draw=_iid(q))


@_mutant("verified against p before truncation")
def target_truncation_ignored(p, q):
    return _round(Rejection(), CHAIN, map_tables(p, keep_top(2)), seen=p, draw=_iid(q))


@dataclasses.dataclass(frozen=True)
class _WrongResidual(SiblingRule):
    """A right rule that goes on from `rest(p, q, rejected token)` after a rejection."""

    rule: SiblingRule
    rest: Callable[[np.ndarray, np.ndarray, int], np.ndarray]

    def enter(self, p_V, q_V, siblings):
        return self.rule.enter(p_V, q_V, siblings)

    def accept(self, p_x, q_x, memo):
        return self.rule.accept(p_x, q_x, memo)

    def reject(self, probs_V, q_V, child, memo, last):
        return self.rest(probs_V, q_V, child.token), memo


@_mutant("residual by array index after different truncations")
def residual_by_index(p, q):
    def rest(p_V, q_V, token):
        """Residual of the compacted arrays: i-th kept token of p against i-th kept token of q."""
        kept, kept_q = (np.argsort(-row, kind="stable")[: np.count_nonzero(row)] for row in (p_V, q_V))
        shifted_V = np.zeros_like(q_V)
        both = min(len(kept), len(kept_q))
        shifted_V[kept[:both]] = q_V[kept_q[:both]]
        return residuals.residual(p_V, shifted_V)

    draw = _iid(map_tables(q, keep_top(2)))
    return _round(_WrongResidual(Rejection(), rest), CHAIN, map_tables(p, keep_top(3)), draw=draw)


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


@_mutant("p of the previous branch for a token outside the truncated p")
def stale_p(p, q):
    return _round(_StaleP(), PAIR, map_tables(p, keep_top(2)), draw=_iid(q))


@_mutant("penalties do not see the draft prefix")
def penalties_of_committed_only(p, q):
    def penalised(d):
        table = p[d].copy()
        for context in np.ndindex(*table.shape[:d]):
            table[(*context, list(set(context)))] *= 0.4
        return table / table.sum(axis=-1, keepdims=True)

    return _round(Rejection(), CHAIN, [penalised(d) for d in range(len(p))], seen=p, draw=_iid(q))


@_mutant("equal mss draws merged and tested once")
def coinciding_draws_merged(p, q):
    def edit(draft):
        return draft._replace(count=np.int32(1)) if draft.tokens[0] == draft.tokens[1] else draft

    return _round(Rejection(), PAIR, p, draw=_iid(q), edit=edit)


@_mutant("one draw shared by two branches, tested twice")
def shared_draw_tested_twice(p, q):
    def draw(node, context, elders):
        return residuals.one_hot(q[0], elders[0]) if elders else q[0]

    return _round(Rejection(), PAIR, p, draw=draw, record=_iid(q))


@_mutant("used token removed from q, the rest not renormalised")
def wor_not_renormalised(p, q):
    def record(node, context, elders):
        row = q[0].copy()
        row[list(elders)] = 0
        return row

    return _round(Rejection(), PAIR, p, draw=draw_probs(DraftKind.WOR, q), record=record)


@_mutant("a drawn token dropped because the draft is too short")
def dropped_by_n_min(p, q):
    def edit(draft):
        # The draft stops before its second token when the drafter is unsure there, and is then shorter than n_min = 2.
        sure = q[1][draft.tokens[0]].max() >= np.median(q[1].max(axis=1))
        return draft._replace(count=np.int32(2 if sure else 0))

    return _round(Rejection(), CHAIN, p, draw=_iid(q), edit=edit)


@_mutant("drawn siblings pruned by their own q")
def pruned_by_own_probability(p, q):
    def edit(draft):
        keep = np.flatnonzero(q[0][draft.tokens] >= np.median(q[0]))
        order = np.concatenate([keep, np.setdiff1d(np.arange(2), keep)])
        return draft._replace(tokens=draft.tokens[order], count=np.int32(keep.size))

    return _round(Rejection(), PAIR, p, draw=_iid(q), edit=edit)


@_mutant("kseq thresholds, mss residual")
def mss_residual_in_kseq(p, q):
    rule = _WrongResidual(KSeq(), lambda p_V, q_V, token: residuals.residual(p_V, q_V))
    return _round(rule, PAIR, p, draw=_iid(q))


@_mutant("tokens as likely as the rejected one struck out with it")
def ties_struck_out(p, q):
    rule = _WrongResidual(Rejection(), lambda p_V, q_V, x: residuals.normalise(p_V * (p_V != p_V[x]), p_V))
    tied = map_tables(p, tie_top)
    return _round(rule, PAIR, tied, draw=draw_probs(DraftKind.ONE_HOT, tied))


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


@_mutant("room for three rejected siblings, no more")
def fourth_sibling_forgotten(p, q):
    return _round(_RoomForThree(), TreeTemplate.kary((4,)), p, draw=_iid(map_tables(q, tempered(0.5))))


@dataclasses.dataclass(frozen=True)
class _BlockWithTokenResidual:
    def weight(self, before, p_x, q_x):
        return Block().weight(before, p_x, q_x)

    def stop(self, weight, p_V, q_V):
        return Block().stop(weight, p_V, q_V)

    def probs(self, weight, p_V, q_V):
        return residuals.residual(p_V, q_V)


@_mutant("block stopping, Leviathan's residual")
def token_residual_in_block(p, q):
    return _round(_BlockWithTokenResidual(), CHAIN, p, draw=_iid(q))


# -- drivers --


@dataclasses.dataclass(frozen=True)
class DriverMutant:
    """A mistake around the driver of one lossless verifier: one line on it, and a right driver -> a wrong one."""

    name: str
    mistake: str
    verifier: str
    wrong: Callable[[Driver], Driver]

    def cases(self, seeds: Iterable[int]) -> list[Case]:
        kind, template = (DraftKind.SAMPLED, CHAIN)
        if self.verifier == "mss":
            kind, template = (DraftKind.IID, PAIR_AND_CHILDREN)
        return [make_case("random", kind, template, vocab=VOCAB, seed=s) for s in seeds]


DRIVER_MUTANTS: dict[str, DriverMutant] = {}
"""Mutants of drivers by name, which is that of the mistake and of the verifier."""


def _driver_mutant(verifiers: str, mistake: str, change: Callable, wrong: Callable[[Driver], Driver]) -> Callable:
    for verifier in verifiers.split():
        name = f"{change.__name__}_{verifier}"
        DRIVER_MUTANTS[name] = DriverMutant(name, mistake, verifier, wrong)
    return change


def _arguments(verifiers: str, mistake: str) -> Callable:
    """The driver gets `change(draft, p, uniforms)`."""

    def add(change):
        return _driver_mutant(verifiers, mistake, change, lambda run: lambda *given: run(*change(*given)))

    return add


def _verdict(verifiers: str, mistake: str) -> Callable:
    """The verdict becomes `change(verdict, draft, p, uniforms)`."""

    def add(change):
        def wrong(run):
            def driver(*given):
                verdict = run(*given)
                return change(type(verdict)(*map(np.array, verdict)), *given)

            return driver

        return _driver_mutant(verifiers, mistake, change, wrong)

    return add


@_arguments("token block mss", "coins not handed over: all 0")
def no_coins(draft, p, uniforms):
    return draft, p, np.concatenate([np.zeros_like(uniforms[..., :-1]), uniforms[..., -1:]], axis=-1)


@_arguments("token block mss", "the first node's coin used for every node")
def one_coin(draft, p, uniforms):
    coins = np.broadcast_to(uniforms[..., :1], uniforms[..., :-1].shape)
    return draft, p, np.concatenate([coins, uniforms[..., -1:]], axis=-1)


@_arguments("match", "one number for the target's noise at all rows")
def one_uniform(draft, p, uniforms):
    return draft, p, np.broadcast_to(uniforms[..., :1], uniforms.shape)


@_arguments("token block", "the last token drawn with a coin")
def coin_drawn_with(draft, p, uniforms):
    return draft, p, np.concatenate([uniforms[..., :-1], uniforms[..., :1]], axis=-1)


@_arguments("token match", "coins and uniform of another sequence")
def others_noise(draft, p, uniforms):
    return draft, p, uniforms[:, [0, 0]]


@_arguments("token block match", "p of another sequence")
def others_probs(draft, p, uniforms):
    return draft, p[:, [0, 0]], uniforms


@_arguments("token block match", "p of the row after, for each row")
def no_root(draft, p, uniforms):
    return draft, np.roll(p, -1, axis=-2), uniforms


@_arguments("token mss", "p of the parent, for each node")
def parents_probs(draft, p, uniforms):
    rows = np.pad(draft.parents + 1, ((0, 0), (0, 0), (1, 0)))
    return draft, np.take_along_axis(p, rows[..., None], axis=-2), uniforms


@_arguments("token block", "q of the node before, for each node")
def stale_q(draft, p, uniforms):
    return draft._replace(q=draft.q[..., np.maximum(np.arange(draft.q.shape[-2]) - 1, 0), :]), p, uniforms


@_arguments("token match mss", "nodes that do not exist are tested")
def count_ignored(draft, p, uniforms):
    return draft._replace(count=np.full_like(draft.count, draft.tokens.shape[-1])), p, uniforms


@_arguments("token block", "one node that does not exist is tested")
def count_plus_one(draft, p, uniforms):
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


@_verdict("token block", "p itself drawn from after a rejection")
def no_residual(verdict, draft, p, uniforms):
    return _redrawn(verdict, _pick(p, _last_row(verdict)), _rejected(verdict, draft), uniforms)


@_verdict("token", "residual with q of the node before")
def stale_residual(verdict, draft, p, uniforms):
    q = _pick(draft.q, np.maximum(verdict.accepted - 1, 0))
    gap = np.maximum(_pick(p, _last_row(verdict)) - q, 0)
    return _redrawn(verdict, gap, _rejected(verdict, draft) & (gap.sum(axis=-1) > 0), uniforms)


@_verdict("token", "bonus token from the row before")
def early_bonus(verdict, draft, p, uniforms):
    row = np.maximum(_last_row(verdict) - 1, 0)
    return _redrawn(verdict, _pick(p, row), ~_rejected(verdict, draft), uniforms)


@_verdict("token", "a rejected token is emitted")
def rejected_emitted(verdict, draft, p, uniforms):
    at = np.minimum(verdict.accepted, draft.tokens.shape[-1] - 1)[..., None]
    token, place = np.take_along_axis(draft.tokens, at, axis=-1), _last_token(verdict, _rejected(verdict, draft))
    return verdict._replace(tokens=np.where(place, token, verdict.tokens))


@_verdict("token match", "one accepted token is not emitted")
def one_short(verdict, draft, p, uniforms):
    """The last accepted token is left out, the token after it kept."""
    accepted = np.maximum(verdict.accepted - 1, 0)[..., None]
    place, end = np.arange(verdict.tokens.shape[-1]), verdict.count[..., None] - 1
    tail = np.where(place == accepted, np.take_along_axis(verdict.tokens, end, axis=-1), PAD)
    tokens = np.where(place < accepted, verdict.tokens, tail)
    nodes = np.where(np.arange(verdict.nodes.shape[-1]) < accepted, verdict.nodes, PAD)
    return verdict._replace(tokens=tokens, nodes=nodes, accepted=accepted[..., 0], count=accepted[..., 0] + 1)


@_verdict("mss", "the cache keeps the nodes after the accepted ones")
def next_nodes(verdict, draft, p, uniforms):
    return verdict._replace(nodes=np.where(verdict.nodes >= 0, verdict.nodes + 1, PAD))
