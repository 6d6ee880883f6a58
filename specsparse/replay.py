"""The acceptance that other verifiers, draft lengths and temperatures would have had in a run's recorded rounds.

No model is needed: each round has the laws p and q of its nodes. The rounds begin where the recorded run's began, so a
figure says what another method would accept *from those places*; with the run's own method it is the run's own figure.
"""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from specsparse.errors import UserError
from specsparse.recording import Recording
from specsparse.speculative.base import ROOT, Draft, DraftKind, Verifier
from specsparse.speculative.exact import End, ends
from specsparse.speculative.verifiers.match import Match
from specsparse.speculative.verify import get_verifier, valid_verifiers

MAX_ENUMERATED = 10
"""Most nodes of a draft whose coins are enumerated; the run's own coins are used beyond."""
MOST_REST = 1e-3
"""Most mass beyond the recorded tokens at which a law may be reheated."""


@dataclasses.dataclass(frozen=True)
class Replayed:
    """What a verifier and a draft length make of the rounds.

    Attributes:
        verifier, gamma: the method; gamma bounds the depth.
        rounds, drafts, drafted: rounds, those with a draft, drafted nodes.
        accepted: expected accepted nodes, over the coins; None where that was not enumerated.
        per_position: expected, by depth.
        realised: accepted nodes with the recorded run's own coins, or its own target tokens for `match` and `greedy`.
    """

    verifier: str
    gamma: int
    rounds: int
    drafts: int
    drafted: int
    accepted: float | None
    per_position: tuple[float, ...]
    realised: int

    @property
    def tokens_per_pass(self) -> float:
        """Emitted tokens a round: the accepted ones and one more. Expected, or realised where that is not known."""
        return 1 + (self.realised if self.accepted is None else self.accepted) / self.rounds

    @property
    def mean_acceptance_length(self) -> float | None:
        """1 + accepted / drafts."""
        found = self.realised if self.accepted is None else self.accepted
        return 1 + found / self.drafts if self.drafts else None


class _Round(NamedTuple):
    """A round for `exact.ends`: tokens are columns of their parent's row, the last column is the rest."""

    draft: Draft
    p: np.ndarray
    depths: tuple[int, ...]
    coins: np.ndarray
    targets: np.ndarray


def verifiers_of(recording: Recording) -> list[str]:
    """Names of the verifiers that fit the recorded draws at the recorded temperature, the run's own first."""
    about = recording.about
    kind = DraftKind(about["kind"])
    fit = valid_verifiers(kind, tree=about["tree"], temperature=about["temperature"])
    own = about["verifier"]
    return [own, *(v for v in fit if v != own)] if own in fit else fit


def replay(
    recording: Recording, verifier: str | Verifier, *, gamma: int | None = None, temperature: float | None = None
) -> Replayed:
    """Acceptance of a verifier on drafts cut to depth `gamma`, at another temperature of the target if given.

    Raises:
        UserError: a verifier that does not fit the draws, a gamma out of range, a temperature that cannot be had.
    """
    about, own = recording.about, recording.about["depth"]
    verifier = get_verifier(verifier) if isinstance(verifier, str) else verifier
    gamma = own if gamma is None else gamma
    if not 1 <= gamma <= own:
        raise UserError(f"gamma={gamma}: the record has drafts of 1..{own} tokens")
    heat = about["temperature"] if temperature is None else temperature
    if not verifier.accepts(DraftKind(about["kind"]), tree=about["tree"], temperature=heat):
        names = ", ".join(valid_verifiers(DraftKind(about["kind"]), tree=about["tree"], temperature=heat))
        raise UserError(f"verifier={verifier.name} cannot verify the {about['kind']} drafts recorded: one of {names}")
    if temperature is not None and temperature != about["temperature"]:
        recording = _reheat(recording, temperature)
    total, drafts, drafted, realised = np.zeros(gamma), 0, 0, 0
    known = True
    for r in range(len(recording)):
        one = _round(recording, r, gamma)
        count = int(one.draft.count)
        if not count:
            continue
        drafts, drafted = drafts + 1, drafted + count
        found = None if count > MAX_ENUMERATED and about["tree"] else _expected(verifier, one, gamma)
        known = known and found is not None
        total += 0 if found is None else found
        realised += _realised(verifier, one)
    per_position = tuple(float(t) / drafts for t in total) if drafts and known else ()
    accepted = float(total.sum()) if known else None
    return Replayed(verifier.name, gamma, len(recording), drafts, drafted, accepted, per_position, realised)


def _round(recording: Recording, r: int, gamma: int) -> _Round:
    """Round r, nodes deeper than gamma left out (which no token decides), ids turned into columns."""
    depths: list[int] = []
    for i in range(recording.count[r]):
        parent = recording.parents[r, i]
        depths.append(1 if parent == ROOT else depths[parent] + 1)
    kept = [i for i, d in enumerate(depths) if d <= gamma]
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
    return _Round(draft, p_nW, tuple(depths[i] for i in kept), recording.coins[r, kept], targets)


def _expected(verifier: Verifier, one: _Round, gamma: int) -> np.ndarray:
    """float[gamma]: chance that a node of each depth is accepted."""
    chance = np.zeros(gamma)
    if isinstance(verifier.rule, Match):
        reach: list[float] = []
        for i, parent in enumerate(one.draft.parents):
            token = one.draft.tokens[i]
            first = verifier.rule.child(one.draft.tokens, one.draft.parents, one.draft.count, parent + 1, token) == i
            above = 1.0 if parent == ROOT else reach[parent]
            reach.append(above * float(one.p[parent + 1, token]) * first)
            chance[one.depths[i] - 1] += reach[-1]
        return chance
    for end in ends(verifier.rule, one.draft, one.p):
        chance[: len(end.path)] += end.weight
    return chance


def _realised(verifier: Verifier, one: _Round) -> int:
    """Nodes accepted with the run's own coins or target tokens."""
    count = int(one.draft.count)
    if isinstance(verifier.rule, Match):
        at = accepted = 0
        while (node := int(verifier.rule.child(*one.draft[:3], at, one.targets[at]))) < count:
            at, accepted = node + 1, accepted + 1
        return accepted
    return next(len(end.path) for end in ends(verifier.rule, one.draft, one.p) if _meets(end, one.coins))


def _meets(end: End, coins: np.ndarray) -> bool:
    return all((coins[coin.node] < np.float32(coin.chance)) == coin.passed for coin in end.coins)


def _reheat(recording: Recording, temperature: float) -> Recording:
    """p at another temperature: p^(T / T') at the recorded tokens; what lies beyond them must hardly count."""
    about: dict[str, Any] = recording.about
    exists = np.arange(recording.p.shape[1])[None] <= recording.count[:, None]
    rest = float(np.where(exists, recording.p_rest, 0).max())
    if about["temperature"] == 0 or about["truncated"] or rest > MOST_REST or temperature <= 0:
        why = (
            "it was greedy" if about["temperature"] == 0
            else "p was truncated" if about["truncated"]
            else "it must be above 0" if temperature <= 0
            else f"up to {rest:.1%} of p lies beyond the recorded tokens; record more of them"
        )  # fmt: skip
        raise UserError(f"temperature={temperature:g} cannot be had from this record: {why}")
    power = about["temperature"] / temperature
    p = recording.p.astype(np.float64) ** power
    tail = recording.p_rest.astype(np.float64) ** power
    mass = p.sum(axis=2) + tail
    safe = np.where(mass > 0, mass, 1.0)
    rng = np.random.default_rng(0)  # the recorded target tokens are draws of another law: draw anew
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
