"""How far the text of a callable is from the target's, case by case, and how much of it rounding may explain."""

import numpy as np

from specsparse.errors import UserError
from specsparse.speculative.proof.cases import CORNERS, Case, at_temperature_0, make_case, random_tables
from specsparse.speculative.proof.chain_probs import power, round_probs, sampled_probs, several_rounds, true_p, window
from specsparse.speculative.proof.driver import STEPS
from specsparse.speculative.proof.exact import continuations, total_variation
from specsparse.speculative.proof.external import ExternalVerifier
from specsparse.speculative.proof.results import CALLABLE, SAMPLED, Result
from specsparse.speculative.tree import TreeTemplate

ROUNDS, SAMPLED_LENGTH = 4, 3
"""Tokens of the text of several rounds: where it is enumerated (over two tokens), and where it is sampled."""

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
"""Tokens and longest draft unless others are asked for; then one case each of other tokens and a draft is added."""


def driver_tv(template: TreeTemplate, *, vocab: int, steps: int = STEPS) -> float:
    """Most total variation of a lossless driver: float32 rounding, in the worst case of everything.

    With e = 1 / steps (2^-24: float32's unit roundoff, and the step of a uniform), V tokens, T coins on a path at most:

    * A token drawn from a distribution: each of V-1 edges is off by at most 2V e (two sums of V terms, a product, a
      step), and p itself by e. Together 2V^2 e. `match` draws T+1 tokens, all others one.
    * A distribution after a rejection: at most (V+8) e in L1 (p and q rounded, the difference, its sum, the division;
      an earlier weight or rho) over the chance to be there, which its weight in the joint distribution cancels. After j
      rejections it is j (V+8) e.
    * A coin: 6 e (p and q rounded, a product, the division, a step), and what its distribution is off by.

    All of it adds up to less than (T+1) ((T+1) (V+8) + 2V^2) e.
    """

    def coins(row: int) -> int:
        return max((tested + coins(node + 1) for tested, node in enumerate(template.children[row], 1)), default=0)

    draws = coins(0) + 1
    return draws * (draws * (vocab + 8) + 2 * vocab**2) / steps


def measure_external(
    how: ExternalVerifier, *, vocab: int | None = None, gamma: int | None = None, seed: int
) -> list[Result]:
    """Every case of a callable: one round on each corner, and several rounds; or samples of several rounds.

    Args:
        how: the callable.
        vocab, gamma: tokens, and the longest draft. Drafts of every length from `how.shortest` on are tried.
        seed: of the random distributions and of points and samples.

    Raises:
        UserError: it raised, handed back no verdict, or is no function of thresholds of its uniforms.
    """
    beyond = BEYOND if vocab is None and gamma is None and not how.uniforms else ()
    vocab, gamma = vocab or VOCAB, gamma or GAMMA
    if how.shortest > gamma:
        raise UserError(f"{how.name} is handed drafts of {how.shortest} tokens or more: gamma={gamma} leaves none")
    if not how.exact:
        length = max(SAMPLED_LENGTH, gamma + 1)
        tried = [(corner, gamma) for corner in SAMPLED_CORNERS] + [("random", K) for K in range(how.shortest, gamma)]
        cases = [_long_case(how, corner, vocab, length, K, seed) for corner, K in tried]
        return [_sampled(how, case, length, len(cases), seed) for case in cases]
    found = []
    lengths = sorted(range(how.shortest, gamma + 1), key=lambda K: not K)  # a mistake is not said of empty drafts first
    shapes = [(CORNERS, vocab, K) for K in lengths] + [(("random",), *more) for more in beyond]
    for corners, V, K in shapes:
        tried = [_greedy(how, make_case(c, how.drafts, TreeTemplate.chain(K), vocab=V, seed=seed)) for c in corners]
        probs = round_probs(how, tried, seed=seed)
        found += [_result(how, case, probs, drafts) for case, (probs, drafts) in zip(tried, probs)]
    case = _long_case(how, "random", 2, ROUNDS, gamma, seed)
    probs, drafts = several_rounds(how, case, gamma, ROUNDS, seed=seed)
    return [*found, _result(how, case, probs, drafts)]


def _long_case(how: ExternalVerifier, corner: str, vocab: int, length: int, K: int, seed: int) -> Case:
    """A case whose tables reach as far as several rounds may."""
    rng = np.random.default_rng([seed, vocab, SAMPLED_CORNERS.index(corner), 9])
    p, q = (random_tables(rng, vocab=vocab, depth=length - 1 + K) for _ in range(2))
    name = f"{corner}, {length} tokens by rounds"
    return _greedy(how, Case(name, how.drafts, TreeTemplate.chain(K), *CORNERS[corner](p, q)))


def _greedy(how: ExternalVerifier, case: Case) -> Case:
    return at_temperature_0(case) if how.greedy else case


def _result(how: ExternalVerifier, case: Case, probs: np.ndarray, drafts: int) -> Result:
    target = continuations(true_p(how, case), probs.ndim)[0]
    template, vocab = case.template, probs.shape[0]
    bound = probs.ndim * driver_tv(template, vocab=vocab, steps=how.steps)
    tv = total_variation(probs, target)
    shape, seen = (case.kind.value, template.parents, vocab), window(how)
    return Result(how.name, how.lossless, *shape, case.name, drafts, tv, CALLABLE, bound, probs, target, window=seen)


def _sampled(how: ExternalVerifier, case: Case, length: int, cases: int, seed: int) -> Result:
    probs = sampled_probs(how, case, case.template.size, length, seed=seed)
    target = continuations(true_p(how, case), length)[0]
    can = power(target, how.samples, cases=cases)
    tv = total_variation(probs, target)
    shape = (case.kind.value, case.template.parents, probs.shape[0])
    return Result(how.name, how.lossless, *shape, case.name, how.samples, tv, SAMPLED, can.bound, probs, target, can)
