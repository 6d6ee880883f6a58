"""How far the text of a callable is from the target's, case by case, and how much of it rounding may explain."""

import dataclasses
from collections.abc import Iterator

import numpy as np

from specsparse.speculative.proof.cases import CORNERS, Case, keep_top, make_case, map_tables, random_tables
from specsparse.speculative.proof.chain_law import power, round_laws, sampled_law, several_rounds, true_p
from specsparse.speculative.proof.driver import STEPS
from specsparse.speculative.proof.exact import continuations, total_variation
from specsparse.speculative.proof.handed import Handed
from specsparse.speculative.proof.results import CALLABLE, SAMPLED, Result
from specsparse.speculative.tree import TreeTemplate

ROUNDS, SAMPLED_LENGTH = 4, 3
"""Tokens of the text of several rounds: where it is enumerated (over two tokens), and where it is sampled."""

SAMPLED_CORNERS = ("random", "p equals q at the root", "truncated differently", "q heated")
"""Corners that are sampled; each has its share of the level."""


def driver_tv(template: TreeTemplate, *, vocab: int, steps: int = STEPS) -> float:
    """Most total variation of a lossless driver: float32 rounding, in the worst case of everything.

    With e = 1 / steps (2^-24: float32's unit roundoff, and the step of a uniform), V tokens, T coins on a path at most:

    * A token drawn from a law: each of V-1 edges is off by at most 2V e (two sums of V terms, a product, a step), and p
      itself by e. Together 2V^2 e. `match` draws T+1 tokens, all others one.
    * A law after a rejection: at most (V+8) e in L1 (p and q rounded, the difference, its sum, the division; an earlier
      weight or rho) over the chance to be there, which its weight in the joint law cancels. After j rejections it is
      j (V+8) e.
    * A coin: 6 e (p and q rounded, a product, the division, a step), and what its law is off by.

    All of it adds up to less than (T+1) ((T+1) (V+8) + 2V^2) e.
    """

    def coins(row: int) -> int:
        return max((tested + coins(node + 1) for tested, node in enumerate(template.children[row], 1)), default=0)

    draws = coins(0) + 1
    return draws * (draws * (vocab + 8) + 2 * vocab**2) / steps


def measure_handed(how: Handed, *, vocab: int, gamma: int, seed: int) -> list[Result]:
    """Every case of a callable: one round on each corner, and several rounds; or samples of several rounds.

    Raises:
        UserError: it raised, handed back no verdict, or is no function of thresholds of its uniforms.
    """
    if not how.exact:
        return [
            _sampled(how, case, gamma, seed)
            for case in _long_cases(how, SAMPLED_CORNERS, vocab, SAMPLED_LENGTH, gamma, seed)
        ]
    found = []
    for length in range(1, gamma + 1):
        shape = TreeTemplate.chain(length)
        tried = [_greedy(how, make_case(corner, how.drafts, shape, vocab=vocab, seed=seed)) for corner in CORNERS]
        laws = round_laws(how, tried, seed=seed)
        found += [_result(how, case, law, drafts) for case, (law, drafts) in zip(tried, laws)]
    for case in _long_cases(how, ("random",), 2, ROUNDS, gamma, seed):
        law, drafts = several_rounds(how, case, gamma, ROUNDS, seed=seed)
        found.append(_result(how, case, law, drafts))
    return found


def _long_cases(
    how: Handed, corners: tuple[str, ...], vocab: int, length: int, gamma: int, seed: int
) -> Iterator[Case]:
    """Cases whose tables reach as far as several rounds may."""
    rng = np.random.default_rng([seed, vocab, 9])
    for corner in corners:
        p, q = (random_tables(rng, vocab=vocab, depth=length - 1 + gamma) for _ in range(2))
        name = f"{corner}, {length} tokens by rounds"
        yield _greedy(how, Case(name, how.drafts, TreeTemplate.chain(gamma), *CORNERS[corner](p, q)))


def _greedy(how: Handed, case: Case) -> Case:
    return dataclasses.replace(case, p=map_tables(case.p, keep_top(1))) if how.greedy else case


def _result(how: Handed, case: Case, law: np.ndarray, drafts: int) -> Result:
    target = continuations(true_p(how, case), law.ndim)[0]
    template, vocab = case.template, law.shape[0]
    bound = law.ndim * driver_tv(template, vocab=vocab, steps=how.steps)
    tv = total_variation(law, target)
    shape = (case.kind.value, template.parents, vocab)
    return Result(how.name, how.lossless, *shape, case.name, drafts, tv, CALLABLE, bound, law, target)


def _sampled(how: Handed, case: Case, gamma: int, seed: int) -> Result:
    law = sampled_law(how, case, gamma, SAMPLED_LENGTH, seed=seed)
    target = continuations(true_p(how, case), SAMPLED_LENGTH)[0]
    can = power(target, how.samples, cases=len(SAMPLED_CORNERS))
    tv = total_variation(law, target)
    shape = (case.kind.value, case.template.parents, law.shape[0])
    return Result(how.name, how.lossless, *shape, case.name, how.samples, tv, SAMPLED, can.bound, law, target, can)
