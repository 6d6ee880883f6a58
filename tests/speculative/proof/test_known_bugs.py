"""Known bugs: every mistake is caught, what was called lossy is not, and the numbers of reports come out."""

import re
from pathlib import Path

import numpy as np
import pytest

from specsparse.speculative.base import DraftKind
from specsparse.speculative.proof.cases import Case, make_case
from specsparse.speculative.proof.exact import output_probs, total_variation
from specsparse.speculative.proof.known_bugs import KNOWN_BUGS
from specsparse.speculative.proof.libraries import known_bug_tables
from specsparse.speculative.proof.measured import round_probs
from specsparse.speculative.proof.results import SAMPLED
from specsparse.speculative.trees.template import TreeTemplate
from specsparse.speculative.verifiers.draft_rules import Match
from specsparse.speculative.verifiers.rejection import Rejection

PAGE = Path(__file__).resolve().parents[3] / "docs" / "certified.md"
EXACT = [name for name, e in KNOWN_BUGS.items() if e.how.exact]
DRAWS = [name for name in KNOWN_BUGS if name not in EXACT]
ONE, TWO = TreeTemplate.chain(1), TreeTemplate.chain(2)


@pytest.mark.parametrize("name", EXACT)
def test_mistakes_are_caught_exactly_and_what_is_none_is_certified(name):
    results = KNOWN_BUGS[name].measure(gamma=1)
    if KNOWN_BUGS[name].how.lossless:
        assert all(r.holds for r in results)
    else:
        assert max(r.tv for r in results) > 1e4 * max(r.bound for r in results)


@pytest.mark.parametrize("name", DRAWS)
def test_the_same_by_samples(name):
    results = KNOWN_BUGS[name].measure()
    assert {r.part for r in results} == {SAMPLED}
    over = [r.tv > r.bound for r in results]
    assert any(over) != KNOWN_BUGS[name].how.lossless


def two_tokens(p, q):
    """One draft over two tokens, whose first distributions are p and q."""
    tables = [[np.array(first), np.full((2, 2), 0.5)] for first in (p, q)]
    return Case("two tokens", DraftKind.SAMPLED, ONE, *tables)


def test_numbers_of_a_report_come_out():
    """transformers#32867: p = (.6, .4) and q = (.8, .2) give (.75, .25) when the draft is the argmax."""
    probs, _ = round_probs(KNOWN_BUGS["argmax_as_sampled"].how, [two_tokens((0.6, 0.4), (0.8, 0.2))], seed=0)[0]
    np.testing.assert_allclose(probs.sum(axis=1), [0.75, 0.25], atol=1e-9)


@pytest.mark.parametrize(
    ("name", "chance_of_0"),
    [
        ("coin_is_0", 0.8),
        ("two_chances", 0.8 * (0.75 + 0.25 * 0.6)),
        ("token_alone_subtracted", 0.6),
        ("softmax_residual", 0.6 + 0.2 / (1 + np.exp(0.2))),
        ("ratio_without_q", 0.8 * 0.6),
        ("draft_ids_kept", 0.2 * 0.75),
        ("next_row", 0.6 + 0.2 * 0.5),
    ],
)
def test_mistakes_by_hand(name, chance_of_0):
    """p = (.6, .4), q = (.8, .2): 0 is rejected with 1/4, 1 never, and the residual is all 1."""
    probs, _ = round_probs(KNOWN_BUGS[name].how, [two_tokens((0.6, 0.4), (0.8, 0.2))], seed=0)[0]
    np.testing.assert_allclose(probs[0].sum(), chance_of_0, atol=1e-9)


@pytest.mark.parametrize(("name", "rule"), [("sample_and_match", Match()), ("drawn_drafts_q_1", Rejection())])
def test_two_of_them_are_ours(name, rule):
    case = make_case("random", DraftKind.SAMPLED, TWO, vocab=3, seed=3)
    probs, _ = round_probs(KNOWN_BUGS[name].how, [case], seed=0)[0]
    assert total_variation(probs, output_probs(rule, case.outcomes(), case.p, case.length)) < 1e-8


def test_reports_are_named():
    for name, bug in KNOWN_BUGS.items():
        assert all(re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", report) for report in bug.reports)
        assert bug.reports or name == "ratio_without_q"


def test_the_page_is_what_comes_out():
    """The rows of three bugs, as they stand in docs/certified.md; and all of them stand there."""
    page = PAGE.read_text(encoding="utf-8")
    some = ("coin_is_0", "greedy_then_residual", "argmax_drafts_q_1")
    rows = [line for line in known_bug_tables(some) if line.startswith("| `")]
    assert len(rows) == 3 and all(row in page for row in rows)
    assert [name for name in KNOWN_BUGS if f"| `{name}` |" not in page] == []
    assert "**NO**" not in page
