"""Known wrong ways to drive right rules: each puts one mistake around the jitted verdict.

They test the certificate of the driver, as `mutants` tests that of the rules. A mistake is in what is handed over or in
what is made of the verdict. Arrays have the leading axes [L, B] of `driver.Driver`.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from specsparse.speculative.base import PAD, Draft, DraftKind, Verdict
from specsparse.speculative.proof.cases import Case, make_case
from specsparse.speculative.proof.driver import Driver, jitted
from specsparse.speculative.tree import TreeTemplate
from specsparse.speculative.verifiers import residuals
from specsparse.speculative.verify import get_verifier

VOCAB = 4
CHAIN, PAIR = TreeTemplate.chain(2), TreeTemplate.kary((2, 1))

ExternalVerifier = tuple[Draft, np.ndarray, np.ndarray]
"""What a driver is called with."""


@dataclasses.dataclass(frozen=True)
class DriverMutant:
    """A mistake around the driver of one verifier.

    Attributes:
        name: of the mistake and the verifier.
        mistake: one line on what is wrong.
        verifier: name of a lossless one.
        kind: how the drafts are drawn.
        template: shape of the drafts.
        wrong: makes the mistake of a right driver.
    """

    name: str
    mistake: str
    verifier: str
    kind: DraftKind
    template: TreeTemplate
    wrong: Callable[[Driver], Driver]

    def driver(self) -> Driver:
        """The verifier's driver with the mistake."""
        return self.wrong(jitted(get_verifier(self.verifier)))

    def cases(self, seed: int, *, count: int) -> list[Case]:
        """Random cases."""
        seeds = range(seed * count, (seed + 1) * count)
        return [make_case("random", self.kind, self.template, vocab=VOCAB, seed=s) for s in seeds]


def _handed(change: Callable[[Draft, np.ndarray, np.ndarray], ExternalVerifier]) -> Callable[[Driver], Driver]:
    """Something else is handed over."""
    return lambda run: lambda *given: run(*change(*given))


def _emitted(change: Callable[..., Verdict]) -> Callable[[Driver], Driver]:
    """Something else is made of the verdict."""

    def wrong(run):
        def driver(draft, p, uniforms):
            verdict = run(draft, p, uniforms)
            return change(Verdict(*map(np.array, verdict)), draft, p, uniforms)

        return driver

    return wrong


def _coins(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Driver], Driver]:
    """Other coins, the same uniform for the last token."""

    def external(draft, p, uniforms):
        return draft, p, np.concatenate([change(uniforms[..., :-1]), uniforms[..., -1:]], axis=-1)

    return _handed(external)


def _no_coins(coins):
    return np.zeros_like(coins)


def _first_coin(coins):
    return np.broadcast_to(coins[..., :1], coins.shape)


def _one_uniform(draft, p, uniforms):
    return draft, p, np.broadcast_to(uniforms[..., :1], uniforms.shape)


def _coin_drawn_with(draft, p, uniforms):
    return draft, p, np.concatenate([uniforms[..., :-1], uniforms[..., :1]], axis=-1)


def _uniforms_of_another(draft, p, uniforms):
    return draft, p, uniforms[:, [0, 0]]


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
    """int[L, B], row of the last accepted node, 0 where none was accepted."""
    nodes = np.pad(verdict.nodes + 1, ((0, 0), (0, 0), (1, 0)))
    return np.take_along_axis(nodes, verdict.accepted[..., None], axis=-1)[..., 0]


def _redrawn(verdict, probs, where, uniforms):
    """The verdict with its last token drawn from `probs` [L, B, V] instead, `where` bool[L, B]."""
    V = probs.shape[-1]
    last = residuals.inverse_cdf(probs.reshape(-1, V), uniforms[..., -1].reshape(-1)).reshape(where.shape)
    here = (np.arange(verdict.tokens.shape[-1]) == verdict.accepted[..., None]) & where[..., None]
    return verdict._replace(tokens=np.where(here, last[..., None], verdict.tokens))


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
    token = np.take_along_axis(draft.tokens, at, axis=-1)
    here = (np.arange(verdict.tokens.shape[-1]) == verdict.accepted[..., None]) & _rejected(verdict, draft)[..., None]
    return verdict._replace(tokens=np.where(here, token, verdict.tokens))


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


def _mutants() -> list[DriverMutant]:
    shapes = {
        "token": (DraftKind.SAMPLED, CHAIN),
        "block": (DraftKind.SAMPLED, CHAIN),
        "match": (DraftKind.SAMPLED, CHAIN),
        "mss": (DraftKind.IID, PAIR),
    }
    mistakes = [
        ("no_coins", "coins not handed over: all 0", _coins(_no_coins), "token block mss"),
        ("one_coin", "the first node's coin used for every node", _coins(_first_coin), "token block mss"),
        ("one_uniform", "one number for the target's noise at all rows", _handed(_one_uniform), "match"),
        ("coin_drawn_with", "the last token drawn with a coin", _handed(_coin_drawn_with), "token block"),
        ("others_noise", "coins and uniform of another sequence", _handed(_uniforms_of_another), "token match"),
        ("others_probs", "p of another sequence", _handed(_probs_of_another), "token block match"),
        ("no_root", "p of the row after, for each row", _handed(_without_root), "token block match"),
        ("parents_probs", "p of the parent, for each node", _handed(_probs_of_parent), "token mss"),
        ("stale_q", "q of the node before, for each node", _handed(_q_of_previous), "token block"),
        ("count_ignored", "nodes that do not exist are tested", _handed(_all_nodes), "token match mss"),
        ("count_plus_one", "one node that does not exist is tested", _handed(_one_node_more), "token block"),
        ("no_residual", "p itself drawn from after a rejection", _emitted(_p_after_rejection), "token block"),
        ("stale_residual", "residual with q of the node before", _emitted(_residual_of_previous), "token"),
        ("early_bonus", "bonus token from the row before", _emitted(_bonus_of_row_before), "token"),
        ("rejected_emitted", "a rejected token is emitted", _emitted(_rejected_emitted), "token"),
        ("one_short", "one accepted token is not emitted", _emitted(_one_short), "token match"),
        ("next_nodes", "the cache keeps the nodes after the accepted ones", _emitted(_next_nodes), "mss"),
    ]
    return [
        DriverMutant(f"{name}_{verifier}", mistake, verifier, *shapes[verifier], wrong)
        for name, mistake, wrong, verifiers in mistakes
        for verifier in verifiers.split()
    ]


DRIVER_MUTANTS: dict[str, DriverMutant] = {m.name: m for m in _mutants()}
"""All of them by name."""
