"""The analysis of an audit on made-up logits: groups, flips, rates, and logits that are no model's."""

from unittest import mock

import numpy as np
import pytest
from scipy import stats

from specsparse.measure import intervals
from specsparse.tools.audit.audit_page import spans
from specsparse.tools.audit.same_bits import Flip, Tally, groups, windows_of
from specsparse.tools.peers.logits import MOST_KL, Check, Judge, rows_by

ONE = np.array([[1, 5, 4.5, 0], [7, 2, 2, 1], [0, 0, 3, 2.75]], np.float32)


def tally(width, *rows):
    found = Tally(width)
    for i, each in enumerate(rows):
        found.add(f"w{i}", ONE, each)
    return found


def moved(row, column, by):
    out = ONE.copy()
    out[row, column] += np.float32(by)
    return out


def test_equal_bits_are_one_group():
    (found,) = groups([tally(w, ONE, ONE) for w in (1, 2, 5)])
    assert found["widths"] == (1, 2, 5) and found["same_bits"] and not found["flips"]
    assert (found["positions"], found["rows_differing"], found["largest_difference"]) == (6, 0, 0.0)


def test_a_flip_has_its_place_and_its_margin():
    wide = moved(2, 3, 0.5)
    first, other = groups([tally(1, ONE, ONE), tally(2, ONE, ONE), tally(4, ONE, wide), tally(8, ONE, wide)])
    assert first["widths"] == (1, 2) and other["widths"] == (4, 8) and not other["same_bits"]
    assert other["flips"] == [Flip("w1", 2, 2, 3, 0.25)._asdict()]
    assert (other["rows_differing"], other["largest_difference"], other["first_flips"]) == (1, 0.5, {"w1": 2})
    assert other["fork_rate"]["per_1000"] == pytest.approx(1000 / 6)


def test_decoding_forks_at_the_first_flip_of_each_window():
    wide = moved(2, 3, 0.5)
    wide[0, 0] += np.float32(9)
    _, other = groups([tally(1, ONE, ONE), tally(2, moved(2, 3, 0.5), wide)])
    assert other["flips_count"] == 3 and list(other["first_flips"].items()) == [("w0", 2), ("w1", 0)]


def test_other_bits_need_not_be_other_tokens():
    _, near = groups([tally(1, ONE), tally(3, moved(0, 0, 2**-20))])
    assert not near["same_bits"] and not near["flips"]
    assert near["rows_differing"] == 1 and near["largest_difference"] == 2**-20
    zero = ONE.copy()
    zero[0, 3] = -0.0  # equal as a number, not as bits
    assert len(groups([tally(1, ONE), tally(2, zero)])) == 2


def test_the_same_rows_in_another_window_are_another_group():
    wide = moved(2, 3, 0.5)
    assert len(groups([tally(1, ONE, ONE), tally(2, wide, ONE), tally(3, ONE, wide)])) == 3


def test_what_is_no_number_is_infinitely_far():
    rows = ONE.copy()
    rows[1] = np.nan
    assert groups([tally(1, ONE), tally(2, rows)])[1]["largest_difference"] == np.inf


@pytest.mark.parametrize(
    ("widths", "among", "said"),
    [((1, 2, 3), (1, 2, 3), "1-3"), ((1, 8, 16), (1, 2, 8, 16), "1,8-16"), ((48,), (1, 48), "48")],
)
def test_widths_in_words(widths, among, said):
    assert spans(widths, among) == said


def test_no_row_is_computed_in_a_smaller_batch():
    for text, width, fed in (([5, 6, 7], 2, [5, 6, 7, 5]), ([5, 6, 7], 3, [5, 6, 7]), ([5, 6], 5, [5, 6, 5, 6, 5])):
        engine = mock.Mock()
        engine.rows.side_effect = lambda prompt, text, width: text
        assert rows_by(engine, (), text, width) == text
        engine.rows.assert_called_once_with((), fed, width)


def test_windows_do_not_overlap_and_begin_with_bos():
    one, other = windows_of(range(100, 121), 2, prompt=3, following=2, bos=1)
    assert (one.prompt, one.following) == ((1, 101, 102), (103, 104))
    assert other.name == "token 10" and other.prompt == (1, 111, 112)


@pytest.mark.parametrize("trials", [1, 7, 40, 192])
def test_the_interval_of_a_share_is_exact(trials):
    """Every probability of a grid is held with at least 95 %: summed over all counts, nothing is drawn."""
    held = np.array([intervals.binomial(k, trials) for k in range(trials + 1)])
    for p in np.linspace(0, 1, 201):
        inside = (held[:, 0] <= p) & (p <= held[:, 1])
        assert stats.binom.pmf(np.arange(trials + 1), trials, p)[inside].sum() >= 0.95 - 1e-12
    for k in (0, trials // 2, trials):
        wanted = stats.binomtest(k, trials).proportion_ci(method="exact")
        assert intervals.binomial(k, trials) == pytest.approx((wanted.low, wanted.high), abs=1e-9)


def logits(seed, rows=40, vocabulary=30):
    return np.random.default_rng(seed).normal(0, 2, (rows, vocabulary)).astype(np.float32)


def test_perplexity_and_divergence_are_those_of_the_definition():
    ours, theirs, text = logits(0), logits(1), np.random.default_rng(2).integers(0, 30, 40)
    found = Judge(ours, text).check(b"", theirs)
    p, q = (np.exp(x.astype(np.float64)) for x in (ours, theirs))
    p, q = (x / x.sum(axis=1, keepdims=True) for x in (p, q))
    at = np.arange(39), text[1:]
    assert found.tokens == 39 and found.rows == 40
    wanted = {"perplexity": np.exp(-np.log(q[at]).mean()), "ours": np.exp(-np.log(p[at]).mean())}
    for name, value in wanted.items():
        assert found.to_dict()[name] == pytest.approx(value, rel=1e-5)
    assert found.kl / found.rows == pytest.approx((p * np.log(p / q)).sum(axis=1).mean(), rel=1e-4)
    assert found.wrong  # unrelated distributions


def test_rounding_is_not_wrong_and_a_broken_kernel_is():
    ours, text = logits(0), np.random.default_rng(2).integers(0, 30, 40)
    judge = Judge(ours, text)
    assert not judge.check(b"near", ours + logits(3) / 200).wrong
    broken = ours.copy()
    broken[::4] = logits(4)[::4]
    assert judge.check(b"broken", broken).wrong
    assert judge.check(b"nan", np.full_like(ours, np.nan)).wrong


def test_checks_add_up():
    one, other = Check(10, 20.0, 20.0, 10, 0.0), Check(10, 21.0, 20.0, 30, 40 * MOST_KL)
    both = one.plus(other)
    assert both.kl / both.rows == MOST_KL and not both.wrong and other.wrong
