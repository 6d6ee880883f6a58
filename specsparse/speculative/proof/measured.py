"""The distribution of the text that an external verifier emits, round after round, and its distance from the target's.

It is enumerated if the callable takes uniforms, else sampled with a stated power.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence

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
    draw_rows,
    make_case,
    map_tables,
    outcomes,
    random_tables,
)
from specsparse.speculative.proof.exact import Outcome, continuations, text_probs
from specsparse.speculative.proof.external import ExternalVerifier
from specsparse.speculative.proof.results import CALLABLE, POWER, SAMPLED, WRONG_SHARE, Result, driver_tv, power
from specsparse.speculative.trees.template import TreeTemplate
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


Progress = Callable[[str], None]


def measure_external(
    how: ExternalVerifier, *, vocab: int | None = None, gamma: int | None = None, seed: int,
    progress: Progress | None = None,
) -> list[Result]:  # fmt: skip
    """Every case of a callable: one round on each corner, and several rounds; or samples of several rounds. UserError:
    it raised, returned no verdict, or is no function of thresholds of its uniforms.

    Args:
        how: the callable.
        vocab, gamma: tokens, and the longest draft. Drafts of every length from `how.shortest` on are tried.
        seed: of the random distributions and of points and samples.
        progress: gets a line before each shape of drafts.
    """
    say, found = progress or (lambda line: None), list[Result]()
    shapes = [shape for shape in _shapes(how, vocab, gamma) if shape[2].size >= how.shortest]
    gamma = gamma or GAMMA
    largest = TreeTemplate.kary((2, 1)[:gamma]) if how.tree else TreeTemplate.chain(gamma)
    if how.shortest > largest.size:
        raise UserError(f"{how.name} takes drafts of {how.shortest} tokens or more: gamma={gamma} leaves none")
    if not how.exact:
        length, vocab = max(SAMPLED_LENGTH, gamma + 1), vocab or VOCAB
        smaller = sorted({t for _, _, t in shapes if t.max_depth <= gamma} - {largest}, key=lambda t: t.size)
        tried = [(corner, largest) for corner in SAMPLED_CORNERS] + [("random", template) for template in smaller]
        for i, (corner, template) in enumerate(tried):
            say(f"{how.name}: case {i + 1} of {len(tried)}, {how.samples:,} samples")
            case = _long_case(how, corner, vocab, length, template, seed)
            found += [_sampled(how, case, length, len(tried), seed)] if _drawable(case) else []
        return found
    for i, (corners, V, template) in enumerate(shapes):
        cases = [make_case(c, how.kind, template, vocab=V, seed=seed) for c in corners]
        cases = [at_temperature_0(case) if how.greedy else case for case in cases if _drawable(case)]
        say(f"{how.name}: shape {i + 1} of {len(shapes) + 1}, {V} tokens, {template.size} drafts, {len(cases)} cases")
        found += [_exact(how, case, *made) for case, made in zip(cases, round_probs(how, cases, seed=seed))]
    say(f"{how.name}: shape {len(shapes) + 1} of {len(shapes) + 1}, {ROUNDS} tokens by rounds")
    case = _long_case(how, "random", 2, ROUNDS, largest, seed)
    return [*found, _exact(how, case, *several_rounds(how, case, ROUNDS, seed=seed))]


def _shapes(
    how: ExternalVerifier, vocab: int | None, gamma: int | None
) -> list[tuple[Iterable[str], int, TreeTemplate]]:
    """Corners, tokens and shape of the drafts; empty drafts last, so that a mistake is not said of these first."""
    beyond, wide = vocab is None and gamma is None and not how.uniforms, vocab is None or vocab >= 4
    vocab, gamma = vocab or VOCAB, gamma or GAMMA
    shapes: list[tuple[Iterable[str], int, TreeTemplate]]
    if not how.tree:
        shapes = [(CORNERS, vocab, TreeTemplate.chain(K)) for K in (*range(1, gamma + 1), 0)]
        shapes += [(("random",), V, TreeTemplate.chain(K)) for V, K in BEYOND if beyond]
        return shapes
    some, ragged = ("random", "p flat, q tied"), TreeTemplate.from_paths([(0, 0, 0), (1,), (2,)])
    shapes = [
        (CORNERS, 2, TreeTemplate.kary((2, 1))),
        (CORNERS, vocab, TreeTemplate.kary((2,))),
        (some, 2 if how.kind is DraftKind.IID else 3, ragged),
        *[(some, 4, TreeTemplate.kary((4,)))] * wide,  # the rejection of a fourth sibling shows if tokens are left
        (CORNERS, vocab, TreeTemplate.chain(1)),
        (CORNERS, vocab, TreeTemplate.chain(0)),
    ]
    return [shape for shape in shapes if shape[2].max_depth <= gamma + beyond]


def _drawable(case: Case) -> bool:
    """Whether siblings drawn without replacement are no more than q has tokens."""
    width = max(map(len, case.template.children))
    return case.kind is not DraftKind.WOR or all((table > 0).sum(axis=-1).min() >= width for table in case.q)


def _long_case(how: ExternalVerifier, corner: str, vocab: int, length: int, template: TreeTemplate, seed: int) -> Case:
    """A case whose tables reach as far as several rounds may."""
    rng = np.random.default_rng([seed, vocab, SAMPLED_CORNERS.index(corner), 9])
    p, q = (random_tables(rng, vocab=vocab, depth=length - 1 + template.max_depth) for _ in range(2))
    case = Case(f"{corner}, {length} tokens by rounds", how.kind, template, *CORNERS[corner](p, q))
    return at_temperature_0(case) if how.greedy else case


def _exact(how: ExternalVerifier, case: Case, probs: np.ndarray, drafts: int) -> Result:
    target = continuations(true_p(how, case), probs.ndim)[0]
    bound = probs.ndim * driver_tv(case.template, vocab=len(probs), steps=how.steps)
    of = {"drafts": drafts, "part": CALLABLE, "bound": bound, "window": window(how)}
    return Result.from_probs(how.name, how.lossless, case, probs, target, **of)


def _sampled(how: ExternalVerifier, case: Case, length: int, cases: int, seed: int) -> Result:
    probs = sampled_probs(how, case, length, seed=seed)
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


def true_p(how: ExternalVerifier, case: Case) -> Tables:
    """The target's distribution that the callable must keep."""
    return case.p if how.target_transform is None else map_tables(case.p, how.target_transform)


def _tables(how: ExternalVerifier, case: Case) -> tuple[Tables, Tables, Tables]:
    """What drafts are drawn from; and p and q as the callable gets them, before or after the sampling parameters."""
    drawn = case.q if how.draft_transform is None else map_tables(case.q, how.draft_transform)
    transforms_itself = how.target_transform is not None or how.draft_transform is not None
    return drawn, case.p, case.q if transforms_itself else drawn


def _outcomes(how: ExternalVerifier, case: Case) -> list[Outcome]:
    """Every draft, with p and q as the callable gets them."""
    drawn, p, q = _tables(how, case)
    draw, record = (draw_probs(case.kind, tables) for tables in (drawn, q))
    return list(outcomes(case.template, p, draw=draw, record=record))


def round_texts(
    how: ExternalVerifier, cases: Sequence[Case], *, seed: int
) -> list[tuple[dict[tuple[int, ...], float], int]]:
    """The tokens that one round emits in each case, with their probability; and how many drafts were enumerated.

    All cases are of one shape and vocabulary. UserError if the callable is no function of thresholds of its uniforms.
    """
    every, K = [_outcomes(how, case) for case in cases], cases[0].template.size
    made = list(itertools.chain.from_iterable(every))
    case_N, N = np.repeat(np.arange(len(cases)), [len(several) for several in every]), len(made)
    p_NnV, q_NKV, tokens_NK = (
        np.stack(rows)
        for rows in zip(*((o.p[: K + 1], np.asarray(o.draft.q)[:K], o.draft.tokens[:K].astype(np.int64)) for o in made))
    )
    known: dict[tuple[int, bytes], np.ndarray] = {}

    parents_K = np.array(cases[0].template.parents, np.int64)

    def call(index, ticks: np.ndarray) -> np.ndarray:
        return how.tokens(p_NnV[index], q_NKV[index], tokens_NK[index], ticks / how.steps, parents_K)

    def one(i: int, ticks_n: np.ndarray) -> np.ndarray:
        """The callable is called once for equal arguments."""
        key = (i, ticks_n.tobytes())
        if key not in known:
            known[key] = call(i, ticks_n)
        return known[key]

    def judge(index_N: np.ndarray) -> boxes.Verdicts:
        def verdicts(ticks_Nn: np.ndarray) -> np.ndarray:
            if not how.batched:
                return np.stack([one(i, ticks) for i, ticks in zip(index_N.tolist(), ticks_Nn)])
            # jax sees batches of one size
            lanes = np.resize(np.arange(len(index_N)), boxes.LANES if how.arrays == "jax" else len(index_N))
            return call(index_N[lanes], ticks_Nn[lanes])[: len(index_N)]

        return verdicts

    points = {"inside": INSIDE, "most": BOXES, "spots": how.samples // 2}
    n = how.uniforms or 2 * K + 1
    found = boxes.settle(judge, drafts=N, uniforms=n, steps=how.steps, seed=seed, **points)
    volume = found.volume(how.steps)
    if (np.bincount(found.draft, weights=volume, minlength=N) < UNSETTLED).any():
        raise UserError(
            f"{how.name} is no function of thresholds of its uniforms, so nothing can be enumerated: have it take a "
            "generator, and it is sampled"
        )
    texts: list[dict[tuple[int, ...], float]] = [{} for _ in cases]
    for draft, chance, tokens in zip(found.draft, volume, found.verdict):
        emitted, said = tuple(tokens[tokens != PAD].tolist()), texts[case_N[draft]]
        said[emitted] = said.get(emitted, 0.0) + float(made[draft].weight * chance)
    return [(said, len(several)) for said, several in zip(texts, every)]


def round_probs(how: ExternalVerifier, cases: Sequence[Case], *, seed: int) -> list[tuple[np.ndarray, int]]:
    """Joint distribution [V] * length of one round, continued by plain sampling, and the drafts that were enumerated.

    All cases are of one shape and vocabulary; `seed` is that of the points inside the boxes.
    """
    found = zip(cases, round_texts(how, cases, seed=seed))
    return [(text_probs(said.items(), true_p(how, case), case.length), drafts) for case, (said, drafts) in found]


def several_rounds(how: ExternalVerifier, case: Case, length: int, *, seed: int) -> tuple[np.ndarray, int]:
    """Joint distribution [V] * length of the text of as many rounds as it takes, and the drafts that were enumerated.

    The case's tables reach to a depth of `length` - 1 and the draft's.
    """
    V = len(case.p[0])
    contexts = [text for d in range(length) for text in itertools.product(range(V), repeat=d)]
    found = round_texts(how, [case.after(context) for context in contexts], seed=seed)
    probs = np.zeros((V,) * length)
    mass: dict[tuple[int, ...], float] = {(): 1.0}
    for context, (texts, _) in zip(contexts, found):
        for emitted, chance in texts.items():
            longer = (*context, *emitted)[:length]
            part = mass.get(context, 0.0) * chance
            if len(longer) == length:
                probs[longer] += part
            else:
                mass[longer] = mass.get(longer, 0.0) + part
    return probs, sum(drafts for _, drafts in found)


def sampled_probs(how: ExternalVerifier, case: Case, length: int, *, seed: int) -> np.ndarray:
    """Frequencies [V] * length of the texts of `how.samples` sequences, each decoded round by round.

    The case's tables reach to a depth of `length` - 1 and the draft's. One generator flows through all rounds. A
    batched callable gets `how.samples` rows always.
    """
    rng = np.random.default_rng([seed, 4])
    random, template, V, N = how.random_source(rng, seed), case.template, len(case.p[0]), how.samples
    parents_K = np.array(template.parents, np.int64)
    # Contexts are nodes of a V-ary tree: the root is 0, and the context x further is node V i + 1 + x.
    drawn, p, q = (np.concatenate([t.reshape(-1, V) for t in tables]) for tables in _tables(how, case))
    node, count = np.zeros(N, np.int64), np.zeros(N, np.int64)
    while (count < length).any():
        active = np.flatnonzero(count < length)
        contexts, q_rows = [node[active]], []
        drafts_NK = np.zeros((len(active), template.size), np.int64)
        for i, parent in enumerate(template.parents):
            above = contexts[parent + 1]
            elders = drafts_NK[:, [e for e in template.children[parent + 1] if e < i]]
            drafts_NK[:, i] = residuals.inverse_cdf(draw_rows(case.kind, drawn[above], elders), rng.random(len(active)))
            q_rows.append(draw_rows(case.kind, q[above], elders))
            contexts.append(V * above + 1 + drafts_NK[:, i])
        p_NnV = p[np.stack(contexts, axis=1)]
        q_NKV = np.stack(q_rows, axis=1) if q_rows else np.zeros((len(active), 0, V))
        if how.batched:
            lanes = np.resize(np.arange(len(active)), N)
            tokens = how.tokens(p_NnV[lanes], q_NKV[lanes], drafts_NK[lanes], random(), parents_K)[: len(active)]
        else:
            tokens = np.stack([how.tokens(*given, random(), parents_K) for given in zip(p_NnV, q_NKV, drafts_NK)])
        for place in range(tokens.shape[1]):
            grows = (tokens[:, place] != PAD) & (count[active] < length)
            longer = active[grows]
            node[longer] = V * node[longer] + 1 + tokens[grows, place]
            count[longer] += 1
    first = (V**length - 1) // (V - 1)
    return np.bincount(node - first, minlength=V**length).reshape((V,) * length) / N
