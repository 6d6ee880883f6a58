"""Intervals over prompts: what they are of, when there is none, and how often they hold the truth."""

import numpy as np
import pytest

from specsparse.measure import intervals, speedup

SPREAD, NOISE = 0.35, 0.02  # sd of the logarithms: speed-ups between prompts, timings between repeats


def coverage(prompts, repeats, *, runs, lengths=0.0):
    """Shares of simulated runs whose intervals hold the truth: (ratio of totals, geometric mean, timing alone)."""
    rng = np.random.default_rng(prompts)
    shape = (runs, prompts, repeats)
    plain_s = np.exp(rng.normal(0, lengths, (runs, prompts)))
    faster = 1.3 * np.exp(rng.normal(0, SPREAD, (runs, prompts)))
    plain = plain_s[..., None] * np.exp(rng.normal(0, NOISE, shape))
    method = (plain_s / faster)[..., None] * np.exp(rng.normal(0, NOISE, shape))
    keys = np.repeat(np.arange(prompts), repeats).tolist()
    held = np.zeros(3)
    for i in range(runs):
        s = speedup.speedup(plain[i].ravel(), method[i].ravel(), prompts=keys)
        here = plain_s[i].sum() / (plain_s[i] / faster[i]).sum()
        held += [
            s.low <= 1.3 * np.exp(-(SPREAD**2) / 2) <= s.high,  # E[plain] / E[plain / faster]
            s.geometric_low <= 1.3 <= s.geometric_high,
            s.timing_low <= here <= s.timing_high,
        ]
    return held / runs


@pytest.mark.parametrize(("prompts", "repeats"), [(6, 3), (20, 5)])
def test_intervals_hold_the_truth(prompts, repeats):
    """4,000 runs tell a coverage to 0.004 (one standard deviation); pairs drawn one by one came to 0.64 and 0.57."""
    totals, geometric, timing = coverage(prompts, repeats, runs=4000)
    assert 0.93 <= totals <= 0.97 and 0.93 <= geometric <= 0.97 and 0.93 <= timing <= 0.98


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [0.0, 0.5])
@pytest.mark.parametrize(("prompts", "repeats"), [(2, 3), (3, 3), (6, 3), (10, 3), (20, 5), (40, 2)])
def test_intervals_hold_the_truth_for_other_numbers_of_prompts(prompts, repeats, lengths):
    """Texts of unequal length weigh prompts unequally, which costs up to 0.02."""
    totals, geometric, timing = coverage(prompts, repeats, runs=20_000, lengths=lengths)
    assert totals >= (0.935 if lengths == 0 else 0.925)
    assert 0.945 <= geometric <= 0.955 and timing >= 0.93


def test_repeats_do_not_make_an_interval_narrower():
    """Three repeats of six prompts are six prompts."""
    plain, method = [2.0, 2.0, 3.0, 1.0, 4.0, 2.0], [1.0, 2.0, 2.0, 1.0, 1.5, 1.2]
    once = speedup.speedup(plain, method, prompts=range(6))
    thrice = speedup.speedup(plain * 3, method * 3, prompts=[*range(6)] * 3)
    assert (thrice.low, thrice.high) == pytest.approx((once.low, once.high))
    assert (thrice.geometric_low, thrice.geometric_high) == pytest.approx((once.geometric_low, once.geometric_high))
    assert (once.prompts, once.pairs, thrice.prompts, thrice.pairs) == (6, 6, 6, 18)
    assert once.timing_low is None and thrice.timing_low == pytest.approx(thrice.ratio_of_totals)


def test_one_prompt_has_no_interval_over_prompts():
    s = speedup.speedup([2.0, 2.2], [1.0, 1.0], prompts=["a", "a"])
    assert s.low is s.high is s.geometric_low is s.geometric_high is None
    assert s.timing_low < s.ratio_of_totals < s.timing_high
    assert (s.interval.ends(), s.interval.sentence()) == ("-", "one prompt: no interval")


def test_a_ratio_is_of_sums_and_its_interval_is_over_prompts():
    found = intervals.ratio([2.0, 4.0], [1.0, 1.0])
    assert (found.value, found.prompts) == (3.0, 2) and found.low < 2.0 and found.high > 4.0
    assert found.low * found.high == pytest.approx(9.0)  # symmetric in the logarithm
    shared = intervals.ratio([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])  # what both sides of a prompt share cancels
    assert shared == pytest.approx((2.0, 2.0, 2.0, 3))
    assert intervals.ratio([3.0], [2.0]) == (1.5, None, None, 1)
    assert intervals.ratio([0.0, 0.0], [0.0, 0.0]) is None
    assert intervals.ratio([1.0, 1.0], [0.0, 1.0]) == (2.0, None, None, 2)  # without the second prompt there is none
    with pytest.raises(ValueError, match="as many"):
        intervals.ratio([1.0], [1.0, 2.0])


def test_a_share_stays_between_nothing_and_all():
    found = intervals.share([19.0, 10.0, 18.0], [20.0, 20.0, 20.0])
    assert found.value == 47 / 60 and 0 < found.low < found.value < found.high < 1
    rest = intervals.share([1.0, 10.0, 2.0], [20.0, 20.0, 20.0])
    assert (rest.low, rest.high) == pytest.approx((1 - found.high, 1 - found.low))
    for parts in ([0.0, 0.0], [0.0, 5.0], [20.0, 20.0], [20.0, 5.0]):
        assert intervals.share(parts, [20.0, 20.0]) == (sum(parts) / 40, None, None, 2)
    assert intervals.share([0.0], [0.0]) is None


def test_one_ratio_over_another():
    found = intervals.ratio_of_ratios([(4.0, 1.0), (8.0, 1.0)], [(2.0, 1.0), (4.0, 1.0)])
    assert found == pytest.approx((2.0, 2.0, 2.0, 2))
    assert intervals.ratio_of_ratios([(4.0, 2.0)], [(1.0, 1.0)]) == (2.0, None, None, 1)
    assert intervals.ratio_of_ratios([(1.0, 1.0)], [(0.0, 1.0)]) is None


def test_a_mean_of_seeds():
    found = intervals.mean([1.0, 2.0, 3.0])
    half = 4.3027 / 3**0.5  # t with 2 degrees of freedom, standard error 1 / sqrt(3)
    assert found == pytest.approx((2.0, 2.0 - half, 2.0 + half, 3), abs=1e-4)
    assert intervals.mean([1.5]) == (1.5, None, None, 1)
