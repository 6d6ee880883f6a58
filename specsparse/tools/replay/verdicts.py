"""The acceptance that other verifiers, draft lengths and temperatures would have had in a run's recorded rounds.

No model is needed: each round has the laws p and q of its nodes. The rounds begin where the recorded run's began, so a
figure says what another method would accept *from those places*; with the run's own method it is the run's own figure.
"""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specsparse.errors import UserError
from specsparse.measure.recording import Recording
from specsparse.speculative.base import ROOT, Draft, DraftKind, Verifier
from specsparse.speculative.proof.exact import End, ends
from specsparse.speculative.verifiers.match import Match
from specsparse.speculative.verify import get_verifier, valid_verifiers
from specsparse.tools.replay.at_temperature import at_temperature


@dataclasses.dataclass(frozen=True)
class Replayed:
    """What a verifier and a draft length make of the rounds.

    Attributes:
        verifier, gamma: the method; gamma bounds the depth.
        widths: most siblings on each level, None for as many as were recorded.
        rounds, drafts, drafted: rounds, those with a draft, drafted nodes.
        accepted: expected accepted nodes, over the coins.
        per_position: expected, by depth.
        realised: accepted nodes with the recorded run's own coins, or its own target tokens for `match` and `greedy`.
    """

    verifier: str
    gamma: int
    rounds: int
    drafts: int
    drafted: int
    accepted: float
    per_position: tuple[float, ...]
    realised: int
    widths: tuple[int, ...] | None = None

    @property
    def tokens_per_pass(self) -> float:
        """Expected emitted tokens a round: the accepted ones and one more."""
        return 1 + self.accepted / self.rounds

    @property
    def mean_acceptance_length(self) -> float | None:
        """1 + accepted / drafts."""
        return 1 + self.accepted / self.drafts if self.drafts else None


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
    recording: Recording,
    verifier: str | Verifier,
    *,
    gamma: int | None = None,
    widths: Sequence[int] | None = None,
    temperature: float | None = None,
) -> Replayed:
    """Acceptance of a verifier on drafts cut to a depth or to a narrower tree, at another temperature if given.

    Args:
        recording: the rounds.
        verifier: by name, or made.
        gamma: depth to cut to; None keeps the recorded one.
        widths: most siblings to keep on each level instead, the eldest, and no level beyond. For top siblings and
            independent draws that is the draft of the narrower tree; so it is for draws without replacement, where
            an elder sibling's law does not know the younger. (A dynamic tree would have other nodes instead.)
        temperature: of the target; None keeps the recorded one.

    Raises:
        UserError: a verifier that does not fit the draws, a gamma out of range, a tree wider or deeper than the
            recorded ones, a temperature that cannot be had.
    """
    about = recording.about
    verifier = get_verifier(verifier) if isinstance(verifier, str) else verifier
    gamma, shape = _cut(recording, gamma, widths)
    judged_at = about["temperature"] if temperature is None else temperature
    if not verifier.accepts(DraftKind(about["kind"]), tree=about["tree"], temperature=judged_at):
        names = ", ".join(valid_verifiers(DraftKind(about["kind"]), tree=about["tree"], temperature=judged_at))
        raise UserError(f"verifier={verifier.name} cannot verify the {about['kind']} drafts recorded: one of {names}")
    if temperature is not None and temperature != about["temperature"]:
        recording = at_temperature(recording, temperature)
    total, drafts, drafted, realised = np.zeros(gamma), 0, 0, 0
    for r in range(len(recording)):
        one = _round(recording, r, shape)
        count = int(one.draft.count)
        if not count:
            continue
        drafts, drafted = drafts + 1, drafted + count
        total += _expected(verifier, one, gamma)
        realised += _realised(verifier, one)
    per_position = tuple(float(t) / drafts for t in total) if drafts else ()
    return Replayed(
        verifier.name, gamma, len(recording), drafts, drafted, float(total.sum()), per_position, realised,
        None if widths is None else shape,
    )  # fmt: skip


def _cut(recording: Recording, gamma: int | None, widths: Sequence[int] | None) -> tuple[int, tuple[int, ...]]:
    """Depth, and most siblings to keep on each level: `widths`, or all of the levels down to `gamma`."""
    own = recording.about["depth"]
    if widths is None:
        depth = own if gamma is None else gamma
        if not 1 <= depth <= own:
            raise UserError(f"gamma={depth}: the record has drafts of 1..{own} tokens")
        return depth, (recording.nodes,) * depth
    shape = tuple(widths)
    asked = f"tree={','.join(map(str, shape))}"
    if gamma is not None:
        raise UserError(f"{asked} and gamma={gamma} both say how deep: give one of them")
    most = _widest(recording)
    if not (shape and min(shape) >= 1 and len(shape) <= len(most) and all(a <= b for a, b in zip(shape, most))):
        raise UserError(f"{asked}: the record has at most {','.join(map(str, most)) or 'no'} siblings on its levels")
    return len(shape), shape


def _widest(recording: Recording) -> tuple[int, ...]:
    """Most siblings on each level of any recorded draft."""
    most = [0] * recording.about["depth"]
    for r in range(len(recording)):
        for depth, rank in _places(recording, r):
            most[depth - 1] = max(most[depth - 1], rank + 1)
    return tuple(most[: most.index(0)] if 0 in most else most)


def _places(recording: Recording, r: int) -> list[tuple[int, int]]:
    """(depth, rank among its siblings) of every node of round r."""
    places: list[tuple[int, int]] = []
    born: Counter[int] = Counter()
    for parent in recording.parents[r, : recording.count[r]].tolist():
        places.append((1 if parent == ROOT else places[parent][0] + 1, born[parent]))
        born[parent] += 1
    return places


def _round(recording: Recording, r: int, shape: Sequence[int]) -> _Round:
    """Round r, ids turned into columns; of each level the `shape` eldest siblings, and none deeper.

    No token decides what is left out.
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


def _expected(verifier: Verifier, one: _Round, gamma: int) -> np.ndarray:
    """float[gamma]: chance that a node of each depth is accepted. Every node is visited once."""
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
