"""The acceptance that other verifiers, draft lengths, trees and temperatures would have had in a run's recorded rounds.

No model is needed: each round has the distributions p and q of its nodes. The rounds begin where the recorded run's
began, so a figure is another method's acceptance *from those places*; with the run's own method it is the run's own
figure.
"""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specsparse.engine.sampling.params import GREEDY_TEMPERATURE
from specsparse.errors import UserError
from specsparse.measure.recording import Recording
from specsparse.speculative.base import ROOT, Draft, DraftKind, Verifier
from specsparse.speculative.verifiers import get_verifier, valid_verifiers
from specsparse.speculative.verifiers.draft_rules import Match

MOST_REST = 1e-3
"""Most mass that may lie beyond the recorded tokens of a distribution at either temperature."""


@dataclasses.dataclass(frozen=True)
class Replayed:
    """Acceptance of one verifier and draft length or tree."""

    verifier: str
    gamma: int  # bounds the depth
    rounds: int
    drafts: int  # rounds with a draft
    drafted: int  # drafted nodes
    accepted: float  # expected accepted nodes, over the coins
    per_position: tuple[float, ...]  # expected, by depth
    realised: int  # accepted nodes with the recorded run's own coins, or its own target tokens for `match` and `greedy`
    widths: tuple[int, ...] | None = None  # most siblings on each level; None for as many as were recorded

    @property
    def tokens_per_pass(self) -> float:
        """Expected emitted tokens a round: the accepted ones and one more."""
        return 1 + self.accepted / self.rounds

    @property
    def mean_acceptance_length(self) -> float | None:
        return 1 + self.accepted / self.drafts if self.drafts else None


def verifiers_of(recording: Recording) -> list[str]:
    """Names of the verifiers that fit the recorded draws at the recorded temperature, the run's own first."""
    about = recording.about
    fit = valid_verifiers(DraftKind(about["kind"]), tree=about["tree"], temperature=about["temperature"])
    own = about["verifier"]
    return [own, *(v for v in fit if v != own)] if own in fit else fit


def replay(
    recording: Recording, verifier: str | Verifier, *, gamma: int | None = None, widths: Sequence[int] | None = None,
    temperature: float | None = None,
) -> Replayed:  # fmt: skip
    """Acceptance of a verifier on drafts cut to a depth or to a narrower tree, at another temperature if given.
    UserError: a verifier that does not fit the draws, a gamma out of range, a tree wider or deeper than the recorded
    ones, a temperature that cannot be had.

    Args:
        gamma: depth to cut to; None keeps the recorded one.
        widths: instead of `gamma`, most siblings to keep on each level, the eldest, and no level beyond. For top
            siblings and independent draws that is the draft of the narrower tree; so it is for draws without
            replacement, where an elder sibling's distribution does not know the younger. (A dynamic tree would have
            other nodes instead.)
        temperature: of the target; None keeps the recorded one.
    """
    about, depth = recording.about, recording.about["depth"]
    verifier = get_verifier(verifier) if isinstance(verifier, str) else verifier
    if widths is None:
        if gamma is not None and not 1 <= gamma <= depth:
            raise UserError(f"gamma={gamma}: the record has drafts of 1..{depth} tokens")
        shape = (recording.tokens.shape[1],) * (gamma or depth)
    else:
        shape, most = tuple(widths), Counter[int]()  # most siblings by level
        for level, rank in (place for r in range(len(recording)) for place in _places(recording, r)):
            most[level] = max(most[level], rank + 1)
        if not shape or min(shape) < 1 or any(width > most[level] for level, width in enumerate(shape, 1)):
            there = ",".join(str(most[level]) for level in sorted(most)) or "no"
            raise UserError(f"tree={','.join(map(str, shape))}: the record has at most {there} siblings on its levels")
    judged_at = about["temperature"] if temperature is None else temperature
    if not verifier.accepts(DraftKind(about["kind"]), tree=about["tree"], temperature=judged_at):
        names = ", ".join(valid_verifiers(DraftKind(about["kind"]), tree=about["tree"], temperature=judged_at))
        raise UserError(f"verifier={verifier.name} cannot verify the {about['kind']} drafts recorded: one of {names}")
    if judged_at != about["temperature"]:
        recording = at_temperature(recording, judged_at)
    total, drafts, drafted, realised = np.zeros(len(shape)), 0, 0, 0
    for r in range(len(recording)):
        one = _round(recording, r, shape)
        count = int(one.draft.count)
        if not count:
            continue
        drafts, drafted = drafts + 1, drafted + count
        chance, accepted = _judged(verifier, one, len(shape))
        total += chance
        realised += accepted
    per_position = tuple(float(t) / drafts for t in total) if drafts else ()
    return Replayed(
        verifier.name, len(shape), len(recording), drafts, drafted, float(total.sum()), per_position, realised,
        None if widths is None else shape,
    )  # fmt: skip


def _places(recording: Recording, r: int) -> list[tuple[int, int]]:
    """(depth, rank among its siblings) of every node of round r."""
    places: list[tuple[int, int]] = []
    born: Counter[int] = Counter()
    for parent in recording.parents[r, : recording.count[r]].tolist():
        places.append((1 if parent == ROOT else places[parent][0] + 1, born[parent]))
        born[parent] += 1
    return places


class _Round(NamedTuple):
    """A round for `Rule.ends`: tokens are columns of their parent's row, the last column is the rest."""

    draft: Draft
    p: np.ndarray
    depths: tuple[int, ...]
    coins: np.ndarray
    targets: np.ndarray


def _round(recording: Recording, r: int, shape: Sequence[int]) -> _Round:
    """Round r, ids turned into columns; of each level the `shape` eldest siblings, and none deeper.

    Which nodes are left out does not depend on a token.
    """
    places, kept = _places(recording, r), []
    for i, (depth, rank) in enumerate(places):
        parent = int(recording.parents[r, i])
        if depth <= len(shape) and rank < shape[depth - 1] and (parent == ROOT or parent in kept):
            kept.append(i)
    index = {ROOT: ROOT, **{old: new for new, old in enumerate(kept)}}
    parents = np.array([index[int(recording.parents[r, i])] for i in kept], np.int32)
    rows = [0, *(1 + i for i in kept)]
    p_nW = np.concatenate([recording.p[r, rows], recording.p_rest[r, rows, None]], axis=1).astype(np.float64)
    ids_nW = recording.ids[r, rows]

    def column(row: int, token: int) -> int:
        hit = np.flatnonzero(ids_nW[row] == token)
        return int(hit[0]) if hit.size else p_nW.shape[1] - 1

    tokens = np.array([column(parent + 1, recording.tokens[r, i]) for parent, i in zip(parents, kept)], np.int32)
    targets = np.array([column(at, recording.targets[r, row]) for at, row in enumerate(rows)], np.int32)
    q = None
    if recording.q is not None and recording.q_rest is not None:
        q = np.concatenate([recording.q[r, kept], recording.q_rest[r, kept, None]], axis=1).astype(np.float64)
    draft = Draft(tokens, parents, np.int32(len(kept)), q)
    return _Round(draft, p_nW, tuple(places[i][0] for i in kept), recording.coins[r, kept], targets)


def _judged(verifier: Verifier, one: _Round, gamma: int) -> tuple[np.ndarray, int]:
    """float[gamma], the chance that a node of each depth is accepted, and how many the run's own draws accept."""
    chance, (tokens, parents, count) = np.zeros(gamma), one.draft[:3]
    if not isinstance(verifier.rule, Match):
        realised = None
        for end in verifier.rule.ends(one.draft, one.p):
            chance[: len(end.path)] += end.weight
            met = all((one.coins[coin.node] < np.float32(coin.chance)) == coin.passed for coin in end.coins)
            realised = len(end.path) if met and realised is None else realised
        assert realised is not None  # some end has these coins
        return chance, realised
    reach: list[float] = []
    for i, parent in enumerate(parents):
        first = bool(verifier.rule.child(tokens, parents, count, parent + 1, tokens[i]) == i)
        above = 1.0 if parent == ROOT else reach[parent]
        reach.append(above * float(one.p[parent + 1, tokens[i]]) * first)
        chance[one.depths[i] - 1] += reach[-1]
    at = realised = 0
    while (node := int(verifier.rule.child(tokens, parents, count, at, one.targets[at]))) < count:
        at, realised = node + 1, realised + 1
    return chance, realised


def at_temperature(recording: Recording, temperature: float) -> Recording:
    """p at another temperature: p^(T / T') at the recorded tokens; the mass beyond them must hardly count.

    That mass counts as one token's, the most it can come to if the distribution gets colder and the least if it gets
    hotter. The recorded target tokens are drawn anew. UserError: a greedy or truncated record, a temperature of 0, or
    too much mass beyond the recorded tokens.
    """
    about = recording.about
    why, power = None, about["temperature"] / max(temperature, GREEDY_TEMPERATURE)
    if about["temperature"] == 0:
        why = "it was greedy"
    elif about["truncated"]:
        why = "p was truncated"
    elif not GREEDY_TEMPERATURE <= temperature < np.inf:
        why = "it must be a number above 0"
    elif (rest := _most_rest(recording, power)) > MOST_REST:
        why = f"up to {rest:.1%} of p may lie beyond the recorded tokens; record more of them"
    if why:
        raise UserError(f"temperature={temperature:g} cannot be had from this record: {why}")
    p = recording.p.astype(np.float64) ** power
    tail = np.where(_beyond(recording) > 0, recording.p_rest.astype(np.float64) ** power, 0.0)
    mass = p.sum(axis=2) + tail
    safe = np.where(mass > 0, mass, 1.0)
    rng = np.random.default_rng(0)  # the recorded ones are draws of another distribution
    cdf = np.cumsum(p / safe[..., None], axis=2)
    columns = (cdf < rng.random(cdf.shape[:2])[..., None]).sum(axis=2)
    inside = np.minimum(columns, p.shape[2] - 1)
    targets = np.where(columns < p.shape[2], np.take_along_axis(recording.ids, inside[..., None], axis=2)[..., 0], -1)
    return dataclasses.replace(
        recording,
        about={**about, "temperature": temperature},
        p=p / safe[..., None],
        p_rest=tail / safe,
        targets=targets.astype(np.int32),
    )


def _most_rest(recording: Recording, power: float) -> float:
    """The largest share of a distribution that may lie beyond the recorded tokens, as recorded or as its `power`.

    n tokens of mass m have at most n (m / n)^power = n^(1 - power) m^power where power < 1: all alike.
    """
    exists = np.arange(recording.p.shape[1])[None] <= recording.count[:, None]
    rest = recording.p_rest.astype(np.float64)
    most = rest**power * _beyond(recording) ** max(0.0, 1 - power)
    kept = np.where(exists, (recording.p.astype(np.float64) ** power).sum(axis=2), 1.0)
    share = np.divide(most, kept + most, out=np.zeros_like(most), where=most > 0)
    return float(np.where(exists, np.maximum(rest, share), 0).max())


def _beyond(recording: Recording) -> np.ndarray:
    """float64[R, K+1]: tokens of the vocabulary that a row does not keep."""
    return recording.about["vocab"] - (recording.ids >= 0).sum(axis=2, dtype=np.float64)
