"""The distribution of the text that a callable verifier emits, round after round: enumerated, or sampled with a stated
power.

Contexts of a target are nodes of a V-ary tree: the root is 0, and the context x further is node V i + 1 + x. So tables
of every depth lie behind each other in one array of rows.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from specsparse.errors import UserError
from specsparse.speculative.base import PAD, DraftKind
from specsparse.speculative.proof import boxes
from specsparse.speculative.proof.cases import Case, Tables, draw_probs, map_tables
from specsparse.speculative.proof.exact import continuations
from specsparse.speculative.proof.external import ExternalVerifier, fresh, generator
from specsparse.speculative.verifiers import residuals

INSIDE, BOXES = 6, 100
"""Points drawn inside each box, beside its two corners; and the most boxes of a draft, on average."""

UNSETTLED = 0.9
"""What the boxes of a draft hold at least of its uniforms. What they lack, the distribution lacks, and fails."""

LEVEL = 1e-6
"""Chance that a sampled report calls any of its lossless cases lossy."""

POWER = 0.95
"""Chance to find a total variation of `Power.finds`, and a window of `window`."""

WRONG_SHARE = 0.25
"""How many of the verdicts in a window are wrong, where it is said how narrow a window would be seen."""


@dataclasses.dataclass(frozen=True)
class Power:
    """What a sampled result can tell.

    Attributes:
        samples: sequences.
        level: chance that a lossless case is called lossy, its share of `LEVEL`.
        bound: the measured total variation from which on a case is called lossy.
        finds: the true total variation that is found with the chance `POWER`.
    """

    samples: int
    level: float
    bound: float
    finds: float


def power(target: np.ndarray, samples: int, *, cases: int) -> Power:
    """The power of n samples of a distribution, in every finite sample and for every alternative.

    The measured total variation of n samples from the distribution itself is at most sum_i sqrt(p_i (1 - p_i) / n) / 2
    in expectation, and one sample changes it by at most 1/n. So it is over that by t with a chance of at most
    exp(-2 n t^2) (McDiarmid 1989), and the frequency of one event is under its probability by t no likelier (Hoeffding
    1963). That event is the one on which the distributions differ most.

    Args:
        target: the distribution, of any shape.
        samples: n.
        cases: how many share `LEVEL`.
    """
    level = LEVEL / cases
    chance = math.sqrt(math.log(1 / level) / (2 * samples))
    bound = float(np.sqrt(target * (1 - target) / samples).sum() / 2) + chance
    return Power(samples, level, bound, bound + math.sqrt(math.log(1 / (1 - POWER)) / (2 * samples)))


def window(how: ExternalVerifier) -> float:
    """Width of the narrowest window of one uniform that would be seen, wherever it lies; nearer to an edge, far less.

    Of N points, one lies in each N-th part of every uniform. So w N lie in a window of the width w, and all of them
    miss a wrong verdict, which `WRONG_SHARE` of drafts and other uniforms have there, with (1 - `WRONG_SHARE`)^(w N).
    """
    return math.log(1 - POWER) / math.log(1 - WRONG_SHARE) / how.points


class ChainProbs(NamedTuple):
    """A target and a drafter as rows by context: what is true, and what the callable sees of it."""

    p: np.ndarray
    q: np.ndarray
    seen_p: np.ndarray
    seen_q: np.ndarray

    @property
    def vocab(self) -> int:
        """V."""
        return self.p.shape[1]


def true_p(how: ExternalVerifier, case: Case) -> Tables:
    """The target's distribution that the callable must keep."""
    return case.p if how.target_law is None else map_tables(case.p, how.target_law)


def chain(how: ExternalVerifier, case: Case) -> ChainProbs:
    """The rows of a case."""
    probs = draw_probs(how.drafts, case.q)
    q = case.q
    if how.drafts is DraftKind.ONE_HOT:
        q = [np.array([probs(0, c, ()) for c in np.ndindex(*t.shape[:-1])]).reshape(t.shape) for t in q]
    drawn = q if how.draft_law is None else map_tables(q, how.draft_law)
    before = how.target_law is not None or how.draft_law is not None
    seen = (case.p, q) if before else (true_p(how, case), drawn)
    rows = (
        np.concatenate([t.reshape(-1, t.shape[-1]) for t in tables]) for tables in (true_p(how, case), drawn, *seen)
    )
    return ChainProbs(*rows)


def _nodes(root: np.ndarray, drafts_NK: np.ndarray, V: int) -> np.ndarray:
    """int[N, K+1]: the contexts behind each prefix of a draft."""
    nodes = [root]
    for x_N in drafts_NK.T:
        nodes.append(V * nodes[-1] + 1 + x_N)
    return np.stack(nodes, axis=1)


class Tried(NamedTuple):
    """Every draft of some contexts of some chains.

    Attributes:
        chain: int[D], which chain.
        context: int[D], after which of its contexts.
        weight: float64[D], probability of the draft.
        drafts: int[D, K].
        nodes: int[D, K+1], contexts behind each prefix, in the rows of all chains behind each other.
    """

    chain: np.ndarray
    context: np.ndarray
    weight: np.ndarray
    drafts: np.ndarray
    nodes: np.ndarray


def _drafts(chains: Sequence[ChainProbs], contexts: Sequence[int], K: int) -> Tried:
    parts, offset = [], 0
    for c, rows in enumerate(chains):
        every = np.array(list(itertools.product(range(rows.vocab), repeat=K)), np.int64).reshape(rows.vocab**K, K)
        context = np.repeat(np.asarray(contexts, np.int64), len(every))
        drafts = np.tile(every, (len(contexts), 1))
        nodes = _nodes(context, drafts, rows.vocab)
        weight = np.take_along_axis(rows.q[nodes[:, :-1]], drafts[:, :, None], axis=2)[:, :, 0].prod(axis=1)
        fields = (np.full(len(weight), c), context, weight, drafts, nodes + offset)
        parts.append([a[weight > 0] for a in fields])
        offset += len(rows.p)
    return Tried(*(np.concatenate(several) for several in zip(*parts)))


def _judge(how: ExternalVerifier, chains: Sequence[ChainProbs], tried: Tried) -> boxes.Judge:
    """The callable as `boxes` takes it. What is asked twice is called once; jax sees batches of one size."""
    seen_p, seen_q = (np.concatenate([getattr(rows, name) for rows in chains]) for name in ("seen_p", "seen_q"))
    known: dict[tuple[int, bytes], np.ndarray] = {}

    def judge(index_N: np.ndarray) -> boxes.Verdicts:
        def verdicts(ticks_Nn: np.ndarray) -> np.ndarray:
            if not how.batched:
                return np.stack([one(i, ticks) for i, ticks in zip(index_N.tolist(), ticks_Nn)])
            N = len(index_N)
            lanes = np.resize(np.arange(N), boxes.LANES if how.arrays == "jax" else N)
            draft = index_N[lanes]
            at = tried.nodes[draft]
            return how.tokens(seen_p[at], seen_q[at[:, :-1]], tried.drafts[draft], ticks_Nn[lanes] / how.steps)[:N]

        return verdicts

    def one(i: int, ticks_n: np.ndarray) -> np.ndarray:
        key = (i, ticks_n.tobytes())
        if key not in known:
            p, q = seen_p[tried.nodes[i]], seen_q[tried.nodes[i, :-1]]
            known[key] = how.tokens(p, q, tried.drafts[i], ticks_n / how.steps)
        return known[key]

    return judge


class RoundWays(NamedTuple):
    """What one round emits: by context the tokens and the probability of each; and the drafts that were enumerated."""

    ways: dict[int, dict[tuple[int, ...], float]]
    drafts: int


def rounds(
    how: ExternalVerifier, chains: Sequence[ChainProbs], contexts: Sequence[int], K: int, *, seed: int
) -> list[RoundWays]:
    """What one round emits after each context of each chain, all of one vocabulary.

    Raises:
        UserError: it is no function of thresholds of its uniforms.
    """
    tried = _drafts(chains, contexts, K)
    judge, n, drafts = _judge(how, chains, tried), how.room(K), len(tried.weight)
    many = {"inside": INSIDE, "most": BOXES, "spots": how.points}
    found = boxes.settle(judge, drafts=drafts, uniforms=n, steps=how.steps, seed=seed, **many)
    volume = found.volume(how.steps)
    settled = np.bincount(found.boxes.draft, weights=volume, minlength=drafts)
    if (settled < UNSETTLED).any():
        raise UserError(
            f"{how.name} is no function of thresholds of its uniforms, so nothing can be enumerated: have it take a "
            "generator, and it is sampled"
        )
    count = np.bincount(tried.chain, minlength=len(chains)).tolist()
    made = [RoundWays({context: {} for context in contexts}, tried_c) for tried_c in count]
    for draft, chance, tokens in zip(found.boxes.draft, volume, found.verdict):
        way, emitted = made[tried.chain[draft]].ways[int(tried.context[draft])], tuple(tokens[tokens != PAD].tolist())
        way[emitted] = way.get(emitted, 0.0) + float(tried.weight[draft] * chance)
    return made


def round_probs(how: ExternalVerifier, cases: Sequence[Case], *, seed: int) -> list[tuple[np.ndarray, int]]:
    """Joint distribution [V] * length of one round, continued by plain sampling, and the drafts that were enumerated.

    Args:
        how: the callable.
        cases: all of one shape and vocabulary.
        seed: of the points inside the boxes.
    """
    found = []
    made = rounds(how, [chain(how, case) for case in cases], [0], cases[0].template.size, seed=seed)
    for case, (ways, drafts) in zip(cases, made):
        rest = continuations(true_p(how, case), case.length)
        probs = np.zeros_like(rest[0])
        for text, chance in ways[0].items():
            probs[text] += chance * rest[len(text)][text]
        found.append((probs, drafts))
    return found


def several_rounds(how: ExternalVerifier, case: Case, K: int, length: int, *, seed: int) -> tuple[np.ndarray, int]:
    """Joint distribution [V] * length of the text of as many rounds as it takes, and the drafts that were enumerated.

    The case's tables reach to a depth of `length` - 1 + K.
    """
    rows = chain(how, case)
    V = rows.vocab
    short = [text for d in range(length) for text in itertools.product(range(V), repeat=d)]
    node = {text: _node(text, V) for text in short}
    [(ways, drafts)] = rounds(how, [rows], list(node.values()), K, seed=seed)
    probs, mass = np.zeros((V,) * length), {(): 1.0}
    for text in short:
        for emitted, chance in ways[node[text]].items():
            longer = (*text, *emitted)[:length]
            part = mass.get(text, 0.0) * chance
            if len(longer) == length:
                probs[longer] += part
            else:
                mass[longer] = mass.get(longer, 0.0) + part
    return probs, drafts


def _node(text: tuple[int, ...], V: int) -> int:
    node = 0
    for x in text:
        node = V * node + 1 + x
    return node


def sampled_probs(how: ExternalVerifier, case: Case, K: int, length: int, *, seed: int) -> np.ndarray:
    """Frequencies [V] * length of the texts of `how.samples` sequences, each decoded round by round.

    The case's tables reach to a depth of `length` - 1 + K. One generator flows through all rounds.
    """
    rows, rng = chain(how, case), np.random.default_rng([seed, 4])
    flowing = generator(how, seed)
    V, N = rows.vocab, how.samples
    node, count = np.zeros(N, np.int64), np.zeros(N, np.int64)
    while (count < length).any():
        active = np.flatnonzero(count < length)
        at, drafts_NK = [node[active]], np.zeros((len(active), K), np.int64)
        for i in range(K):
            drafts_NK[:, i] = residuals.inverse_cdf(rows.q[at[-1]], rng.random(len(active)))
            at.append(V * at[-1] + 1 + drafts_NK[:, i])
        at_Nn = np.stack(at, axis=1)
        tokens = _call(how, rows, at_Nn, drafts_NK, lambda: fresh(how, rng, flowing))
        for place in range(K + 1):
            grows = (tokens[:, place] != PAD) & (count[active] < length)
            longer = active[grows]
            node[longer] = V * node[longer] + 1 + tokens[grows, place]
            count[longer] += 1
    first = (V**length - 1) // (V - 1)
    return np.bincount(node - first, minlength=V**length).reshape((V,) * length) / N


def _call(
    how: ExternalVerifier, rows: ChainProbs, at_Nn: np.ndarray, drafts_NK: np.ndarray, random: Callable[[], object]
) -> np.ndarray:
    """int[N, K+1]: what it emits for each of N drafts; a batch has always `how.samples` rows."""
    if how.batched:
        lanes = np.resize(np.arange(len(at_Nn)), how.samples)
        p, q = rows.seen_p[at_Nn[lanes]], rows.seen_q[at_Nn[lanes, :-1]]
        return how.tokens(p, q, drafts_NK[lanes], random())[: len(at_Nn)]
    return np.stack([how.tokens(rows.seen_p[at], rows.seen_q[at[:-1]], x, random()) for at, x in zip(at_Nn, drafts_NK)])
