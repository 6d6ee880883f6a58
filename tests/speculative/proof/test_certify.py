"""The certificate of the rules, and the test of the test; `test_driver` has that of what runs."""

import dataclasses

import numpy as np
import pytest

from specsparse.speculative.base import DraftKind
from specsparse.speculative.proof.cases import CORNERS, draw_probs, make_case, outcomes
from specsparse.speculative.proof.certify import certify, measure
from specsparse.speculative.proof.exact import continuations, output_probs, total_variation
from specsparse.speculative.proof.mutants import MUTANTS, measure_mutant
from specsparse.speculative.proof.results import LOSSLESS_TV, MUTANT_TV
from specsparse.speculative.trees.template import TreeTemplate
from specsparse.speculative.verifiers import VERIFIERS, get_verifier
from tests.cells import cells

LOSSLESS = [name for name, v in VERIFIERS.items() if v.lossless]
LOSSY = [name for name, v in VERIFIERS.items() if not v.lossless]


@pytest.mark.parametrize("name", LOSSLESS)
def test_lossless_verifiers_have_the_distribution_of_p(name):
    report = certify([VERIFIERS[name]], mutants=False, driver=False)
    assert report.passed, report.failures
    assert report.worst(name).tv <= LOSSLESS_TV
    assert {r.corner for r in report.results} == {r.corner for r in report.results if not r.parents} == set(CORNERS)
    assert VERIFIERS[name].tree == ("trees to 8 nodes and 5 siblings" in report.covered(name))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 4))
def test_another_seed(seed):
    for name in ("token", "wor", "block"):
        assert certify([VERIFIERS[name]], seed=seed, mutants=False, driver=False).passed


@pytest.mark.parametrize("name", LOSSY)
def test_lossy_verifiers_are_caught(name):
    case = make_case("random", DraftKind.SAMPLED, TreeTemplate.chain(2), vocab=4, seed=0)
    result = measure(VERIFIERS[name], case)
    assert not result.lossless
    assert result.tv > MUTANT_TV


def test_threshold_at_one_is_lossless():
    at_one = get_verifier("threshold", single=1.0, total=1.0)
    for kind in (DraftKind.ONE_HOT, DraftKind.IID):
        case = make_case("random", kind, TreeTemplate.kary((2, 1)), vocab=4, seed=0)
        assert measure(at_one, case).tv <= LOSSLESS_TV


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name):
    assert measure_mutant(name, seed=0).tv > MUTANT_TV


def test_llama_cpp_argmax_example():
    p = [np.array([0.5, 0.3, 0.2]), np.full((3, 3), 1 / 3)]
    drafts = outcomes(TreeTemplate.chain(1), p, draw=lambda *_: np.array([1.0, 0, 0]), record=lambda *_: p[0])
    probs = output_probs(VERIFIERS["token"].rule, drafts, p, 2)
    np.testing.assert_allclose(probs.sum(axis=1), [1, 0, 0], atol=1e-15)


def expected_accepted(rule, outcomes):
    return sum(o.weight * e.weight * len(e.path) for o in outcomes for e in rule.ends(o.draft, o.p))


@pytest.mark.parametrize("corner", CORNERS)
@pytest.mark.parametrize("seed", cells(range(3), [0]))
@pytest.mark.parametrize(("kind", "other"), [(DraftKind.SAMPLED, "token"), (DraftKind.ONE_HOT, "delta")])
def test_block_accepts_at_least_as_much_one_by_one(corner, seed, kind, other):
    case = make_case(corner, kind, TreeTemplate.chain(3), vocab=4, seed=seed)
    token, block = (expected_accepted(VERIFIERS[n].rule, case.outcomes()) for n in (other, "block"))
    assert block >= token - 1e-12


@pytest.mark.parametrize("corner", CORNERS)
def test_no_lossless_rule_accepts_more_of_a_given_text(corner):
    """A one-hot draft is a text, and plain decoding begins with its first i tokens as often as i may be accepted."""
    case = make_case(corner, DraftKind.ONE_HOT, TreeTemplate.chain(3), vocab=4, seed=0)
    delta, block = (expected_accepted(VERIFIERS[n].rule, case.outcomes()) for n in ("delta", "block"))
    assert block == pytest.approx(delta, abs=1e-12)


@pytest.mark.parametrize(("name", "kind"), [("mss", DraftKind.IID), ("kseq", DraftKind.IID), ("wor", DraftKind.WOR)])
def test_more_siblings_accept_more(name, kind):
    wide = make_case("random", kind, TreeTemplate.kary((3,)), vocab=5, seed=5)
    accepted = [
        expected_accepted(VERIFIERS[name].rule, dataclasses.replace(wide, template=TreeTemplate.kary((k,))).outcomes())
        for k in (1, 2, 3)
    ]
    assert accepted[0] < accepted[1] < accepted[2] < 1


@pytest.mark.parametrize("name", ["mss", "wor", "kseq", "block"])
def test_width_one_equals_token_bit_for_bit(name):
    template = TreeTemplate.chain(1)
    case = make_case("random", DraftKind.SAMPLED, template, vocab=6, seed=3)
    for outcome in case.outcomes():
        ours = VERIFIERS[name].rule.ends(outcome.draft, outcome.p)
        token = VERIFIERS["token"].rule.ends(outcome.draft, outcome.p)
        assert [(e.weight, e.path, e.probs.tobytes()) for e in ours] == [
            (e.weight, e.path, e.probs.tobytes()) for e in token
        ]


@pytest.mark.parametrize("name", ["mss", "wor", "kseq"])
def test_longer_chains_equal_token_bit_for_bit(name):
    case = make_case("truncated differently", DraftKind.SAMPLED, TreeTemplate.chain(3), vocab=4, seed=1)
    drafts = list(case.outcomes())
    ours, token = (output_probs(VERIFIERS[n].rule, drafts, case.p, case.length) for n in (name, "token"))
    assert ours.tobytes() == token.tobytes()


def test_delta_equals_token_on_written_out_one_hot_distributions():
    case = make_case("random", DraftKind.ONE_HOT, TreeTemplate.kary((2, 1)), vocab=4, seed=2)
    draw = draw_probs(DraftKind.ONE_HOT, case.q)
    short, long = (list(outcomes(case.template, case.p, draw=draw, one_hot=flag)) for flag in (True, False))
    rule = VERIFIERS["tree_delta"].rule
    assert short[0].draft.q is None
    a, b = (output_probs(rule, drafts, case.p, case.length) for drafts in (short, long))
    assert a.tobytes() == b.tobytes()


def test_weights_of_ends_sum_to_one():
    for name, kind in [("mss", DraftKind.IID), ("kseq", DraftKind.IID), ("block", DraftKind.SAMPLED)]:
        template = TreeTemplate.chain(3) if name == "block" else TreeTemplate.kary((2, 1))
        for outcome in make_case("random", kind, template, vocab=3, seed=0).outcomes():
            assert sum(e.weight for e in VERIFIERS[name].rule.ends(outcome.draft, outcome.p)) == pytest.approx(1)


def test_continuations_are_distributions():
    case = make_case("random", DraftKind.SAMPLED, TreeTemplate.chain(2), vocab=3, seed=0)
    rest = continuations(case.p, 3)
    assert rest[0].sum() == pytest.approx(1)
    assert rest[2][1, 2].sum() == pytest.approx(1)
    assert total_variation(rest[0], rest[0]) == 0


@pytest.fixture(scope="module")
def report():
    """With every mutant of the rules."""
    return certify([VERIFIERS["token"], VERIFIERS["typical"]], vocab=3, gamma=1, driver=False)


def test_report_prints_every_verifier_and_mutant(report):
    text = report.table()
    assert "token" in text
    assert "LOSSY" in text
    assert all(name in text for name in MUTANTS)
    assert "certificate holds" in text


def test_a_mutant_that_passes_fails_the_report(report):
    assert report.passed
    weak = dataclasses.replace(report.mutants[0], tv=1e-4)
    broken = dataclasses.replace(report, mutants=(weak,))
    assert not broken.passed
    assert "FAILS: mutant argmax_as_sampled" in broken.table()
    nan = dataclasses.replace(report, results=(dataclasses.replace(report.results[0], tv=float("nan")),))
    assert not nan.passed
