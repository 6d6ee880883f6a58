"""The contract suite of verifiers: ours pass it, and named mistakes do not."""

import dataclasses

import pytest

from specsparse.speculative.base import DraftKind, Verifier
from specsparse.speculative.proof.certify import certify
from specsparse.speculative.verifiers import VERIFIERS, residuals
from specsparse.speculative.verifiers.rejection import Rejection
from specsparse.testing.verifiers import (
    VERIFIER_CHECKS,
    check_verifier,
    every_round_ends_somewhere,
    the_promise_is_kept,
)
from tests.cells import cells

ONE_HOT = frozenset({DraftKind.ONE_HOT})


# One lossy verifier stays, whose ends no certificate has looked at.
@pytest.mark.parametrize("name", cells(VERIFIERS, [name for name in VERIFIERS if name != "threshold"]))
def test_ours_keep_the_contract(name):
    """The promise of lossless ones is certified in tests/speculative/proof, case by case: their ends lack nothing."""
    known = (the_promise_is_kept, every_round_ends_somewhere) if VERIFIERS[name].lossless else ()
    for check in VERIFIER_CHECKS:
        if check not in known:
            check(VERIFIERS[name])


@dataclasses.dataclass(frozen=True)
class Bad(Rejection):
    """Breaks one rule."""

    wrong: str

    def enter(self, p_V, q_V, siblings):
        return (siblings * 0,)  # rejected ones

    def accept(self, p_x, q_x, memo):
        right = super().accept(p_x, q_x, memo)
        return {"eager": right**0.5, "chance": right + 1}.get(self.wrong, right)

    def reject(self, probs_V, q_V, child, memo, last):
        rest_V, _ = super().reject(probs_V, q_V, child, memo, last)
        xp = residuals.namespace(probs_V)
        if self.wrong == "tied":  # struck out by value
            rest_V = residuals.normalise(
                xp.where(probs_V == probs_V[child.token], xp.zeros_like(probs_V), probs_V), probs_V
            )
        if self.wrong in ("fourth", "fifth"):  # as if it had not been rejected
            rest_V = xp.where(memo[0] < ("fourth", "fifth").index(self.wrong) + 3, rest_V, probs_V)
        return rest_V * (0.5 if self.wrong == "law" else 1), (memo[0] + 1,)


@pytest.mark.parametrize(
    ("wrong", "words"), [("eager", "it is not lossless"), ("chance", "have the probability"), ("law", "masses")]
)
def test_the_contract_refuses(wrong, words):
    with pytest.raises(AssertionError, match=words):
        check_verifier(Verifier("bad", Bad(wrong), ONE_HOT))


def kept(wrong, kind):
    return Verifier("bad", Bad(wrong), frozenset({kind}), tree=True)


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        ("tied", DraftKind.ONE_HOT),
        ("fourth", DraftKind.ONE_HOT),
        ("fourth", DraftKind.IID),
        ("fifth", DraftKind.IID),
        ("fifth", DraftKind.WOR),
    ],
)
def test_fooled_by_no_ties_and_no_fourth_sibling(wrong, kind):
    """Right but for rejected tokens among equals, and but for the siblings from the fourth or fifth on."""
    report = certify(kept(wrong, kind), vocab=3, driver=False, mutants=False)
    broken = [r for r in report.results if not r.holds]
    assert broken and (wrong == "tied" or all(len(r.parents) >= 4 for r in broken))


@pytest.mark.parametrize("wrong", ["tied", "fourth"])
def test_fooled_is_no_contract_by_ties_and_a_fourth_sibling(wrong):
    with pytest.raises(AssertionError, match="it is not lossless"):
        the_promise_is_kept(kept(wrong, DraftKind.ONE_HOT))


def test_it_takes_a_right_one_and_a_lossy_one():
    check_verifier(Verifier("good", Bad("nothing"), ONE_HOT))
    check_verifier(Verifier("eager", Bad("eager"), ONE_HOT, lossless=False))


def test_a_verifier_is_for_some_drafts():
    with pytest.raises(AssertionError, match="some DraftKinds"):
        check_verifier(Verifier("none", Rejection(), frozenset()))
