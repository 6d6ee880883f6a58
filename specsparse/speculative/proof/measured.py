"""The distribution of the text that an external verifier emits, round after round, and its distance from the target's.

It is enumerated if the callable takes uniforms, else sampled with a stated power.

Contexts of a target are nodes of a V-ary tree: the root is 0, and the context x further is node V i + 1 + x. So tables
of every depth lie behind each other in one array of rows.
"""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specsparse.errors import UserError
from specsparse.speculative.base import PAD, DraftKind
from specsparse.speculative.proof import boxes
from specsparse.speculative.proof.cases import (
    CORNERS,
    Case,
    Tables,
    at_temperature_0,
    draw_probs,
    make_case,
    map_tables,
    random_tables,
)
from specsparse.speculative.proof.driver import driver_tv
from specsparse.speculative.proof.exact import continuations
from specsparse.speculative.proof.external import ExternalVerifier
from specsparse.speculative.proof.results import CALLABLE, POWER, SAMPLED, WRONG_SHARE, Result, power
from specsparse.speculative.trees.base import TreeTemplate
from specsparse.speculative.verifiers import residuals

INSIDE, BOXES = 6, 100
"""Points drawn inside each box, beside its two corners; and the most boxes of a draft, on average."""

UNSETTLED = 0.9
"""Least share of a draft's uniforms in settled boxes. The distribution lacks the rest, and so fails."""

ROUNDS, SAMPLED_LENGTH = 4, 3
"""Tokens of the text of several rounds: enumerated (over two tokens), and sampled."""

SAMPLED_CORNERS = (
    "random",
    "p equals q at the root",
    "truncated differently",
    "q heated",
    "p tied, q on one of them",
    "one token each",
)
"""Corners that are sampled."""

VOCAB, GAMMA, BEYOND = 3, 2, ((2, 4), (6, 1))
"""Default number of tokens and longest draft; with the defaults, one case each of other tokens and a draft is added."""


def measure_external(
    how: ExternalVerifier, *, vocab: int | None = None, gamma: int | None = None, seed: int
) -> list[Result]:
    """Every case of a callable: one round on each corner, and several rounds; or samples of several rounds.

    Args:
        how: the callable.
        vocab, gamma: tokens, and the longest draft. Drafts of every length from `how.shortest` on are tried.
        seed: of the random distributions and of points and samples.

    Raises:
        UserError: it raised, returned no verdict, or is no function of thresholds of its uniforms.
    """
    beyond = BEYOND if vocab is None and gamma is None and not how.uniforms else ()
    vocab, gamma = vocab or VOCAB, gamma or GAMMA
    if how.shortest > gamma:
        raise UserError(f"{how.name} takes drafts of {how.shortest} tokens or more: gamma={gamma} leaves none")
    if not how.exact:
        length = max(SAMPLED_LENGTH, gamma + 1)
        tried = [(corner, gamma) for corner in SAMPLED_CORNERS] + [("random", K) for K in range(how.shortest, gamma)]
        return [_sampled(how, _long_case(how, c, vocab, length, K, seed), length, len(tried), seed) for c, K in tried]
    found = []
    lengths = sorted(range(how.shortest, gamma + 1), key=lambda K: not K)  # a mistake is not said of empty drafts first
    shapes = [(CORNERS, vocab, K) for K in lengths] + [(("random",), *more) for more in beyond]
    for corners, V, K in shapes:
        cases = [make_case(c, how.drafts, TreeTemplate.chain(K), vocab=V, seed=seed) for c in corners]
        cases = [at_temperature_0(case) if how.greedy else case for case in cases]
        found += [_exact(how, case, *made) for case, made in zip(cases, round_probs(how, cases, seed=seed))]
    case = _long_case(how, "random", 2, ROUNDS, gamma, seed)
    return [*found, _exact(how, case, *several_rounds(how, case, gamma, ROUNDS, seed=seed))]


def _long_case(how: ExternalVerifier, corner: str, vocab: int, length: int, K: int, seed: int) -> Case:
    """A case whose tables reach as far as several rounds may."""
    rng = np.random.default_rng([seed, vocab, SAMPLED_CORNERS.index(corner), 9])
    p, q = (random_tables(rng, vocab=vocab, depth=length - 1 + K) for _ in range(2))
    name = f"{corner}, {length} tokens by rounds"
    case = Case(name, how.drafts, TreeTemplate.chain(K), *CORNERS[corner](p, q))
    return at_temperature_0(case) if how.greedy else case


def _exact(how: ExternalVerifier, case: Case, probs: np.ndarray, drafts: int) -> Result:
    target = continuations(true_p(how, case), probs.ndim)[0]
    bound = probs.ndim * driver_tv(case.template, vocab=len(probs), steps=how.steps)
    of = {"drafts": drafts, "part": CALLABLE, "bound": bound, "window": window(how)}
    return Result.from_probs(how.name, how.lossless, case, probs, target, **of)


def _sampled(how: ExternalVerifier, case: Case, length: int, cases: int, seed: int) -> Result:
    probs = sampled_probs(how, case, case.template.size, length, seed=seed)
    target = continuations(true_p(how, case), length)[0]
    can = power(target, how.samples, cases=cases)
    of = {"drafts": how.samples, "part": SAMPLED, "bound": can.bound, "power": can}
    return Result.from_probs(how.name, how.lossless, case, probs, target, **of)


def window(how: ExternalVerifier) -> float:
    """Width of the narrowest window of one uniform that would be seen, wherever it lies; nearer to an edge, far less.

    Of N points, one lies in each N-th part of every uniform. So w N lie in a window of the width w, and all of them
    miss a wrong verdict, which `WRONG_SHARE` of drafts and other uniforms have there, with (1 - `WRONG_SHARE`)^(w N).
    """
    return math.log(1 - POWER) / math.log(1 - WRONG_SHARE) / (how.samples // 2)


class ChainProbs(NamedTuple):
    """A target and a drafter as rows by context: the true distributions, and those that the callable gets."""

    p: np.ndarray
    q: np.ndarray
    given_p: np.ndarray
    given_q: np.ndarray

    @classmethod
    def from_case(cls, how: ExternalVerifier, case: Case) -> "ChainProbs":
        p, q = true_p(how, case), case.q
        if how.drafts is DraftKind.ONE_HOT:
            argmax = draw_probs(how.drafts, case.q)
            q = [np.array([argmax(0, c, ()) for c in np.ndindex(*t.shape[:-1])]).reshape(t.shape) for t in q]
        drawn = q if how.draft_transform is None else map_tables(q, how.draft_transform)
        transforms_itself = how.target_transform is not None or how.draft_transform is not None
        given = (case.p, q) if transforms_itself else (p, drawn)
        return cls(*(np.concatenate([t.reshape(-1, t.shape[-1]) for t in tables]) for tables in (p, drawn, *given)))


def true_p(how: ExternalVerifier, case: Case) -> Tables:
    """The target's distribution that the callable must keep."""
    return case.p if how.target_transform is None else map_tables(case.p, how.target_transform)


class ChainDrafts(NamedTuple):
    """Every draft of some contexts of some chains.

    Attributes:
        chain: int[D], which chain.
        context: int[D], after which of its contexts.
        weight: float64[D], probability of the draft.
        tokens: int[D, K].
        nodes: int[D, K+1], contexts behind each prefix, in the rows of all chains behind each other.
    """

    chain: np.ndarray
    context: np.ndarray
    weight: np.ndarray
    tokens: np.ndarray
    nodes: np.ndarray


def _drafts(chains: Sequence[ChainProbs], contexts: Sequence[int], K: int) -> ChainDrafts:
    parts, offset = [], 0
    for c, rows in enumerate(chains):
        V = rows.p.shape[1]
        every = np.array(list(itertools.product(range(V), repeat=K)), np.int64).reshape(V**K, K)
        context = np.repeat(np.asarray(contexts, np.int64), len(every))
        tokens = np.tile(every, (len(contexts), 1))
        prefixes = [context]
        for x_D in tokens.T:
            prefixes.append(V * prefixes[-1] + 1 + x_D)
        nodes = np.stack(prefixes, axis=1)
        weight = np.take_along_axis(rows.q[nodes[:, :-1]], tokens[:, :, None], axis=2)[:, :, 0].prod(axis=1)
        fields = (np.full(len(weight), c), context, weight, tokens, nodes + offset)
        parts.append([a[weight > 0] for a in fields])
        offset += len(rows.p)
    return ChainDrafts(*(np.concatenate(several) for several in zip(*parts)))


def _judge(how: ExternalVerifier, chains: Sequence[ChainProbs], drafts: ChainDrafts) -> boxes.Judge:
    """The callable for `boxes`. It is called once for equal arguments; jax sees batches of one size."""
    given_p, given_q = (np.concatenate(rows) for rows in zip(*((c.given_p, c.given_q) for c in chains)))
    known: dict[tuple[int, bytes], np.ndarray] = {}

    def call(index, ticks: np.ndarray) -> np.ndarray:
        nodes = drafts.nodes[index]
        return how.tokens(given_p[nodes], given_q[nodes[..., :-1]], drafts.tokens[index], ticks / how.steps)

    def one(i: int, ticks_n: np.ndarray) -> np.ndarray:
        key = (i, ticks_n.tobytes())
        if key not in known:
            known[key] = call(i, ticks_n)
        return known[key]

    def judge(index_N: np.ndarray) -> boxes.Verdicts:
        def verdicts(ticks_Nn: np.ndarray) -> np.ndarray:
            if not how.batched:
                return np.stack([one(i, ticks) for i, ticks in zip(index_N.tolist(), ticks_Nn)])
            N = len(index_N)
            lanes = np.resize(np.arange(N), boxes.LANES if how.arrays == "jax" else N)
            return call(index_N[lanes], ticks_Nn[lanes])[:N]

        return verdicts

    return judge


class RoundTexts(NamedTuple):
    """By context, the tokens that one round emits and the probability of each; and how many drafts were enumerated."""

    texts: dict[int, dict[tuple[int, ...], float]]
    drafts: int


def rounds(
    how: ExternalVerifier, chains: Sequence[ChainProbs], contexts: Sequence[int], K: int, *, seed: int
) -> list[RoundTexts]:
    """The texts of one round after each context of each chain, all of one vocabulary.

    Raises:
        UserError: it is no function of thresholds of its uniforms.
    """
    drafts = _drafts(chains, contexts, K)
    judge, count, n = _judge(how, chains, drafts), len(drafts.weight), how.uniforms or 2 * K + 1
    points = {"inside": INSIDE, "most": BOXES, "spots": how.samples // 2}
    found = boxes.settle(judge, drafts=count, uniforms=n, steps=how.steps, seed=seed, **points)
    volume = found.volume(how.steps)
    if (np.bincount(found.boxes.draft, weights=volume, minlength=count) < UNSETTLED).any():
        raise UserError(
            f"{how.name} is no function of thresholds of its uniforms, so nothing can be enumerated: have it take a "
            "generator, and it is sampled"
        )
    by_chain = np.bincount(drafts.chain, minlength=len(chains)).tolist()
    made = [RoundTexts({context: {} for context in contexts}, count) for count in by_chain]
    for draft, chance, tokens in zip(found.boxes.draft, volume, found.verdict):
        emitted, texts = tuple(tokens[tokens != PAD].tolist()), made[drafts.chain[draft]].texts[drafts.context[draft]]
        texts[emitted] = texts.get(emitted, 0.0) + float(drafts.weight[draft] * chance)
    return made


def round_probs(how: ExternalVerifier, cases: Sequence[Case], *, seed: int) -> list[tuple[np.ndarray, int]]:
    """Joint distribution [V] * length of one round, continued by plain sampling, and the drafts that were enumerated.

    Args:
        how: the callable.
        cases: all of one shape and vocabulary.
        seed: of the points inside the boxes.
    """
    found, chains = [], [ChainProbs.from_case(how, case) for case in cases]
    for case, (texts, drafts) in zip(cases, rounds(how, chains, [0], cases[0].template.size, seed=seed)):
        rest = continuations(true_p(how, case), case.length)
        probs = np.zeros_like(rest[0])
        for text, chance in texts[0].items():
            probs[text] += chance * rest[len(text)][text]
        found.append((probs, drafts))
    return found


def several_rounds(how: ExternalVerifier, case: Case, K: int, length: int, *, seed: int) -> tuple[np.ndarray, int]:
    """Joint distribution [V] * length of the text of as many rounds as it takes, and the drafts that were enumerated.

    The case's tables reach to a depth of `length` - 1 + K.
    """
    rows = ChainProbs.from_case(how, case)
    V = rows.p.shape[1]
    node = {(): 0}
    for text in itertools.chain.from_iterable(itertools.product(range(V), repeat=d) for d in range(1, length)):
        node[text] = V * node[text[:-1]] + 1 + text[-1]
    [(texts, drafts)] = rounds(how, [rows], list(node.values()), K, seed=seed)
    probs, mass = np.zeros((V,) * length), {(): 1.0}
    for text in node:
        for emitted, chance in texts[node[text]].items():
            longer = (*text, *emitted)[:length]
            part = mass.get(text, 0.0) * chance
            if len(longer) == length:
                probs[longer] += part
            else:
                mass[longer] = mass.get(longer, 0.0) + part
    return probs, drafts


def sampled_probs(how: ExternalVerifier, case: Case, K: int, length: int, *, seed: int) -> np.ndarray:
    """Frequencies [V] * length of the texts of `how.samples` sequences, each decoded round by round.

    The case's tables reach to a depth of `length` - 1 + K. One generator flows through all rounds. A batched callable
    gets `how.samples` rows always.
    """
    rows, rng = ChainProbs.from_case(how, case), np.random.default_rng([seed, 4])
    random = how.random_source(rng, seed)
    V, N = rows.p.shape[1], how.samples
    node, count = np.zeros(N, np.int64), np.zeros(N, np.int64)
    while (count < length).any():
        active = np.flatnonzero(count < length)
        prefixes, drafts_NK = [node[active]], np.zeros((len(active), K), np.int64)
        for i in range(K):
            drafts_NK[:, i] = residuals.inverse_cdf(rows.q[prefixes[-1]], rng.random(len(active)))
            prefixes.append(V * prefixes[-1] + 1 + drafts_NK[:, i])
        nodes_Nn = np.stack(prefixes, axis=1)
        if how.batched:
            lanes = np.resize(np.arange(len(active)), N)
            p, q = rows.given_p[nodes_Nn[lanes]], rows.given_q[nodes_Nn[lanes, :-1]]
            tokens = how.tokens(p, q, drafts_NK[lanes], random())[: len(active)]
        else:
            each = zip(nodes_Nn, drafts_NK)
            tokens = np.stack([how.tokens(rows.given_p[n], rows.given_q[n[:-1]], x, random()) for n, x in each])
        for place in range(K + 1):
            grows = (tokens[:, place] != PAD) & (count[active] < length)
            longer = active[grows]
            node[longer] = V * node[longer] + 1 + tokens[grows, place]
            count[longer] += 1
    first = (V**length - 1) // (V - 1)
    return np.bincount(node - first, minlength=V**length).reshape((V,) * length) / N
