"""The contract suite of verifiers: ours pass it, and named mistakes do not."""

import dataclasses

import pytest

from specsparse.speculative.base import DraftKind, Verifier
from specsparse.speculative.verifiers.rejection import Rejection
from specsparse.speculative.verify import VERIFIERS
from specsparse.testing.verifiers import VERIFIER_CHECKS, check_verifier, the_promise_is_kept

ONE_HOT = frozenset({DraftKind.ONE_HOT})


@pytest.mark.parametrize("name", VERIFIERS)
def test_ours_keep_the_contract(name):
    """Their promise is certified in tests/speculative/proof, case by case."""
    for check in VERIFIER_CHECKS:
        if check is not the_promise_is_kept:
            check(VERIFIERS[name])


@dataclasses.dataclass(frozen=True)
class Bad(Rejection):
    """Breaks one rule."""

    wrong: str

    def accept(self, law_x, q_x, memo):
        right = super().accept(law_x, q_x, memo)
        return {"eager": right**0.5, "chance": right + 1}.get(self.wrong, right)

    def reject(self, law_V, q_V, child, memo, last):
        rest_V, memo = super().reject(law_V, q_V, child, memo, last)
        return rest_V * (0.5 if self.wrong == "law" else 1), memo


@pytest.mark.parametrize(
    ("wrong", "words"), [("eager", "it is not lossless"), ("chance", "have the probability"), ("law", "masses")]
)
def test_the_contract_refuses(wrong, words):
    with pytest.raises(AssertionError, match=words):
        check_verifier(Verifier("bad", Bad(wrong), ONE_HOT))


def test_it_takes_a_right_one_and_a_lossy_one():
    check_verifier(Verifier("good", Bad("nothing"), ONE_HOT))
    check_verifier(Verifier("eager", Bad("eager"), ONE_HOT, lossless=False))


def test_a_verifier_is_for_some_drafts():
    with pytest.raises(AssertionError, match="some DraftKinds"):
        check_verifier(Verifier("none", Rejection(), frozenset()))
