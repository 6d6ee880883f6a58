"""Texts of several rounds follow the target's distribution, with the very keys that the engine draws its noise by
(contract C1).

A certificate of one round cannot see noise that is used twice, in one round or in two. Here whole texts are decoded by
the engine's loop, drafters and verifiers over tables, every round drafting anew after a rejection or a bonus token, and
the joint distribution of four tokens is compared with the exact one: Pearson's chi-square at level 1e-6. What it is
sure to see (99 % power, every kind of deviation) is a total variation of 0.010 at 500,000 runs, 0.028 at 65,536.

The test of the test: keys that leave a part out, so that two uses share their noise. Each must be refused.
"""

import functools

import numpy as np
import pytest

from specsparse.speculative.base import DraftKind
from specsparse.speculative.trees import get_tree
from specsparse.speculative.trees.static import StaticTree
from specsparse.speculative.trees.template import TreeTemplate
from specsparse.speculative.verifiers import VERIFIERS
from tests.statistics.chi_square import ALPHA, chi_square, least_tv
from tests.statistics.tabular import Engine, Key, drafter, joint_distribution, random_tables

RUNS, MANY = 65_536, 500_000
LEAST_TV = {RUNS: 0.028, MANY: 0.0102}
"""The power: every distribution that far from the target's is refused with probability 0.99."""
MUTANT_RUNS = 16_384

SAMPLED, ONE_HOT = DraftKind.SAMPLED, DraftKind.ONE_HOT
RAGGED = TreeTemplate.from_paths([(0, 0, 0), (0, 1), (1,)])


def tree(name, *widths):
    return drafter(get_tree(name, widths=widths))


CASES = {
    "plain": (None, None),
    "token": (VERIFIERS["token"], lambda: drafter(3, SAMPLED)),
    "block": (VERIFIERS["block"], lambda: drafter(3, SAMPLED)),
    "match": (VERIFIERS["match"], lambda: drafter(2, SAMPLED)),
    "match one-hot": (VERIFIERS["match"], lambda: drafter(3, ONE_HOT)),
    "delta": (VERIFIERS["delta"], lambda: drafter(3, ONE_HOT)),
    "tree_delta 2x2": (VERIFIERS["tree_delta"], lambda: tree("static", 2, 2)),
    "tree_delta p_split": (
        VERIFIERS["tree_delta"],
        lambda: drafter(get_tree("p_split", nodes=5, n_parallel=3, p_split=0.2, depth=3)),
    ),
    "mss 2x1": (VERIFIERS["mss"], lambda: tree("sampled_iid", 2, 1)),
    "mss ragged": (VERIFIERS["mss"], lambda: drafter(StaticTree(RAGGED, DraftKind.IID))),
    "kseq 2x1": (VERIFIERS["kseq"], lambda: tree("sampled_iid", 2, 1)),
    "kseq 3": (VERIFIERS["kseq"], lambda: tree("sampled_iid", 3)),
    "wor 2x1": (VERIFIERS["wor"], lambda: tree("sampled_wor", 2, 1)),
    "wor ragged": (VERIFIERS["wor"], lambda: drafter(StaticTree(RAGGED, DraftKind.WOR))),
    "tree_match 2x1": (VERIFIERS["tree_match"], lambda: tree("sampled_iid", 2, 1)),
    "tree_match wor": (VERIFIERS["tree_match"], lambda: tree("sampled_wor", 2, 1)),
}
"""A lossless verifier and the engine's drafter."""

QUICK = ("token", "kseq 3")
"""Cases of the ordinary suite: the draws, coins and residuals of a chain and of a tree. The slow ones run all, eight
times as often; plain draws of the engine are in test_sampling_at_scale.py."""

REPEATED = {
    "position alone": Key(round=0, node=0, stream=0),  # draft, coins and residual of a position share one number
    "no stream": Key(stream=0),
    "no node": Key(node=0),
    "no position or round": Key(position=0, round=0),  # every round repeats the first one's
    "no sample": Key(sample=0),
}
"""Mutants that use noise twice where acceptance is a matter of coins. (Position or round alone may be left out: with
the node, the other tells the rounds apart.)"""


@functools.cache
def probs() -> np.ndarray:
    return joint_distribution(random_tables(0))


@functools.cache
def engine(case: str) -> Engine:
    verifier, draft = CASES[case]
    return Engine(draft() if draft else None, verifier)


def check(case: str, runs: int) -> None:
    """The right keys pass, after rejections and bonus tokens."""
    out = engine(case)(random_tables(0), runs)
    assert out.counts.sum() == runs
    if case != "plain":
        assert min(out.complete, out.rounds - out.complete) > 1000, "too few bonus tokens or rejections to judge"
    found = chi_square(out.counts, probs())
    assert least_tv(found.freedom, runs) < LEAST_TV[runs]
    assert found.p > ALPHA, found


@pytest.mark.parametrize("case", QUICK)
def test_texts_follow_the_targets_distribution(case):
    check(case, RUNS)


def check_mutants(case: str) -> None:
    verifier = CASES[case][0]
    by_target = verifier is None or not verifier.needs_p
    right = engine(case)(random_tables(0), MUTANT_RUNS).counts
    for name, key in REPEATED.items():
        counts = engine(case)(random_tables(0), MUTANT_RUNS, key).counts
        if by_target and name not in ("no sample", "no position or round"):
            # The target's own noise is all that counts, whatever the drafts have in common with it.
            np.testing.assert_array_equal(counts, right, err_msg=name)
        else:
            assert chi_square(counts, probs()).p < ALPHA, f"{case}: {name} is not refused"


@pytest.mark.parametrize("case", QUICK)
def test_noise_used_twice_is_refused(case):
    check_mutants(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_half_a_million_texts(case):
    """Up to a minute a case; memory stays small."""
    check(case, MANY)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case not in QUICK])
def test_noise_used_twice_is_refused_by_every_verifier(case):
    check_mutants(case)


@pytest.mark.slow
def test_the_masked_keys_are_the_engines_own():
    """With all parts of the key the engine draws what it draws unpatched."""
    own = Engine(drafter(2, SAMPLED), VERIFIERS["match"], masked=False)(random_tables(0), 4096)
    masked = engine("match")(random_tables(0), 4096)
    np.testing.assert_array_equal(own.counts, masked.counts)
    assert (own.rounds, own.complete) == (masked.rounds, masked.complete)


@pytest.mark.slow  # through models it is ordinary, in tests/contracts
def test_match_writes_the_text_of_plain_decoding():
    """Run by run, through tables as through models: the counts are the same."""
    plain = engine("plain")(random_tables(0), MUTANT_RUNS).counts
    np.testing.assert_array_equal(engine("match")(random_tables(0), MUTANT_RUNS).counts, plain)


@pytest.mark.slow
def test_a_draft_model_with_a_cache_of_its_own_draws_the_same():
    own = Engine(drafter(3, SAMPLED, own=True), VERIFIERS["token"])(random_tables(0), MUTANT_RUNS)
    on_target = engine("token")(random_tables(0), MUTANT_RUNS)
    np.testing.assert_array_equal(own.counts, on_target.counts)
    assert (own.rounds, own.complete) == (on_target.rounds, on_target.complete)


def test_every_lossless_sampling_verifier_is_here():
    wanted = {name for name, v in VERIFIERS.items() if v.lossless and not v.greedy_only}
    assert wanted == {verifier.name for verifier, _ in CASES.values() if verifier}
