"""When `repeats=auto` stops: exact values, no clock."""

import json

import pytest

from specsparse.measure import speedups
from specsparse.measure.speedups import LIMIT, Repeats, Stop, Width


@pytest.mark.parametrize(
    ("interval", "timing", "why"),
    [
        (0.05, None, Stop.NARROW),
        (0.051, None, None),
        (0.051, 0.0171, None),
        (0.051, 0.0169, Stop.PROMPTS),  # a third: all that is left lies between the prompts
        (0.30, 0.09, Stop.PROMPTS),
        (None, None, None),
        (None, 0.05, Stop.NARROW),  # one prompt: its timing decides
        (None, 0.06, None),
    ],
)
def test_enough(interval, timing, why):
    assert Width(interval, timing).enough() is why


def decide(asked, done, *found):
    return speedups.decide_repeats(asked, done, lambda first: list(found))


def test_a_number_is_taken_as_it_is():
    assert decide(3, 2) is None
    found = decide(3, 3)
    assert found == Repeats(3, 3, Stop.GIVEN) and found.line() is None
    assert found.to_dict() == {"asked": 3, "done": 3, "stopped": "given", "half_width": None}


def test_auto_goes_on_until_every_speedup_is_known():
    narrow, wide, apart = Width(0.03, 0.01), Width(0.09, 0.06), Width(0.2, 0.02)
    assert decide("auto", 8, narrow, wide) is None
    assert decide("auto", 8, narrow, narrow) == Repeats("auto", 8, Stop.NARROW, narrow)
    assert decide("auto", 8, narrow, apart) == Repeats("auto", 8, Stop.PROMPTS, apart)
    assert decide("auto", LIMIT - 1, narrow, wide) is None
    assert decide("auto", LIMIT, narrow, wide) == Repeats("auto", LIMIT, Stop.LIMIT, wide)
    unknown = Width(None, None)
    assert decide("auto", LIMIT, narrow, unknown) == Repeats("auto", LIMIT, Stop.LIMIT, unknown)


def test_auto_decides_without_the_last_repeats():
    """What a decision looked at is narrow by chance now and then; the repeats that follow it are not."""
    asked = []

    def widths(first):
        asked.append(first)
        return [Width(0.04, 0.01) if first == 4 else Width(0.08, 0.03)]

    assert [speedups.decide_repeats("auto", done, widths) for done in range(1, 7)] == [None] * 6
    assert speedups.decide_repeats("auto", 7, widths) == Repeats("auto", 7, Stop.NARROW, Width(0.08, 0.03))
    assert asked == [3, 4, 7]  # never before three, and what is reported is of all


def test_why_it_stopped_is_said():
    lines = {why: Repeats("auto", 7, why, Width(0.123, 0.04)).line() for why in list(Stop)[1:]}
    assert all(line.startswith("repeats=auto stopped after 7: ") for line in lines.values())
    assert "known to ±12.3%" in lines[Stop.LIMIT] and "the limit" in lines[Stop.LIMIT]
    assert "of these prompts to ±4.0%; more prompts would narrow it" in lines[Stop.PROMPTS]
    assert "known to ±5% 3 repeats before, now it is to ±12.3%" in lines[Stop.NARROW]
    assert "an unknown width" in Repeats("auto", LIMIT, Stop.LIMIT, Width(None, None)).line()


def test_the_record_has_the_rule_and_what_came_of_it():
    found = json.loads(json.dumps(Repeats("auto", 7, Stop.NARROW, Width(0.04, 0.01)).to_dict()))
    assert found == {"asked": "auto", "done": 7, "stopped": "narrow", "wanted": 0.05, "limit": LIMIT,
                     "half_width": {"interval": 0.04, "timing": 0.01}}  # fmt: skip


def test_the_width_is_that_of_the_speedup():
    """Three prompts that are alike have no width; one or two have that of their repeats."""
    found = speedups.speedup([2.0, 4.0, 6.0] * 2, [1.0, 2.0, 3.0] * 2, prompts=[*"abc"] * 2)
    assert Width.from_speedup(found) == Width(pytest.approx(0.0, abs=1e-12), 0.0)
    one = speedups.speedup([2.0], [1.0], prompts=["a"])
    assert Width.from_speedup(one) == Width(None, None)
    for prompts in ("a", "ab"):
        found = speedups.speedup([2.0, 2.2] * len(prompts), [1.0, 1.0] * len(prompts), prompts=sorted(prompts * 2))
        half = (found.timing_high - found.timing_low) / 2 / 2.1
        assert Width.from_speedup(found) == Width(None, pytest.approx(half)) and half > 0.05


def test_plain_decoding_alone_is_known_by_its_time():
    assert Width.from_plain([2.0]) == Width(None, None)
    assert Width.from_plain([2.0, 2.0, 2.0]) == Width(None, 0.0)
    assert Width.from_plain([1.0, 3.0]).timing == pytest.approx(12.706 / 2, rel=1e-3)  # t(1) / sqrt 2 * sd / mean
