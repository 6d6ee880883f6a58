import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specsparse.measure.speedups import speedup
from specsparse.runtime import metrics
from specsparse.runtime.metrics import Counters, Times, rates

# Two rounds of 3 drafted tokens (2 accepted, then none) and one round without a draft.
RUN = Counters(
    num_rounds=3, num_drafts=2, num_draft_tokens=6, num_tested=4, num_accepted_tokens=2,
    num_accepted_tokens_per_pos=(1, 1, 0), num_emitted_tokens=5, target_passes=4,
    times=Times(prefill=1.0, draft=0.1, verify=0.3, total=0.5),
)  # fmt: skip


def test_rates_are_the_definitions():
    r = rates(RUN)
    assert r["mean_acceptance_length"] == 1 + 2 / 2
    assert r["tokens_per_target_pass"] == 5 / 3
    assert r["draft_acceptance_rate"] == 2 / 6
    assert r["acceptance_per_position"] == [0.5, 0.5, 0.0]
    assert r["conditional_acceptance_per_position"] == [0.5, 1.0, 0.0]
    assert r["realised_alpha"] == 2 / 4
    assert r["tokens_per_second"] == 10
    assert (r["share_draft"], r["share_verify"]) == (0.1 / 0.5, 0.3 / 0.5)
    assert r["share_rest"] == pytest.approx(0.2)


def test_every_rate_has_a_definition():
    assert set(rates(RUN)) <= set(metrics.DEFINITIONS)


def test_nothing_happened_gives_none_not_an_error():
    r = rates(Counters())
    assert r["mean_acceptance_length"] is None
    assert r["tokens_per_second"] is None
    assert r["acceptance_per_position"] == []


def test_unmeasured_stages_have_no_share():
    r = rates(dataclasses.replace(RUN, times=Times(total=0.5)))
    assert r["share_draft"] is None and r["share_rest"] is None
    assert r["tokens_per_second"] == 10


def test_counters_add_and_pad_positions():
    total = RUN + Counters(num_rounds=1, num_drafts=1, num_accepted_tokens=1, num_accepted_tokens_per_pos=(1,))
    assert total.num_rounds == 4
    assert total.num_accepted_tokens_per_pos == (2, 1, 0)
    assert total.times == RUN.times
    assert sum([RUN, RUN], Counters()).num_emitted_tokens == 10


def test_validate_finds_a_contradiction():
    RUN.validate()
    with pytest.raises(ValueError, match="accepted <= tested"):
        dataclasses.replace(RUN, num_tested=1).validate()
    with pytest.raises(ValueError, match="per position sums"):
        dataclasses.replace(RUN, num_accepted_tokens_per_pos=(1,)).validate()


def test_dict_round_trip():
    assert metrics.from_dict(metrics.to_dict(RUN)) == RUN


def test_speedup_of_equal_ratios_has_no_spread():
    s = speedup([2.0, 4.0, 6.0], [1.0, 2.0, 3.0], prompts="abc")
    assert (s.ratio_of_totals, s.mean_of_ratios, s.low, s.high, s.prompts) == pytest.approx((2.0, 2.0, 2.0, 2.0, 3))


def test_ratio_of_totals_and_mean_of_ratios_differ():
    s = speedup([1.0, 9.0], [1.0, 3.0], prompts="ab")
    assert s.ratio_of_totals == 2.5
    assert s.mean_of_ratios == 2.0
    assert s.geometric_mean == pytest.approx(3**0.5)


@given(st.lists(st.tuples(st.floats(0.01, 10), st.floats(0.01, 10)), min_size=1, max_size=12))
def test_speedup_is_within_the_smallest_and_largest_ratio(pairs):
    plain, method = zip(*pairs, strict=True)
    s = speedup(plain, method, prompts=range(len(pairs)))
    ratios = np.divide(plain, method)
    slack = 1e-9
    for value in (s.ratio_of_totals, s.mean_of_ratios, s.geometric_mean):
        assert ratios.min() * (1 - slack) <= value <= ratios.max() * (1 + slack)
    if len(pairs) > 2:
        assert s.low <= s.ratio_of_totals <= s.high and s.geometric_low <= s.geometric_mean <= s.geometric_high
