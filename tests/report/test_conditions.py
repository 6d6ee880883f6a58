"""Which timings may be compared, and what is said of those that may not: exact values, no clock."""

import json

import pytest

from specsparse.measure import conditions, machine
from specsparse.measure.conditions import Conditions, ResultConditions
from specsparse.measure.intervals import Interval


def taken(read, plain, *, where="here", work="this"):
    return ResultConditions(Conditions(read, plain_tokens_per_second=plain), where, work)


def test_a_cell_at_102_is_not_ranked_with_one_at_160_without_a_word():
    line = conditions.differ([taken(28.4e9, 160.0), taken(27.9e9, 102.0)])
    assert line is not None and "plain decoding 102.0 to 160.0 tok/s" in line
    assert "read bandwidth" not in line and "\n" not in line
    line = conditions.differ([taken(28.4e9, 160.0), taken(18.0e9, 102.0)])
    assert "read bandwidth 18.0 to 28.4 GB/s, plain decoding" in line


@pytest.mark.parametrize(("slower", "said"), [(110.0, False), (110.2, True)])
def test_ten_percent_is_still_one_machine(slower, said):
    found = [taken(20e9, 100.0), taken(20e9, slower), taken(20e9, 105.0)]
    assert (conditions.differ(found) is not None) == said
    found = [taken(slower * 1e8, 100.0), taken(100e8, 100.0)]
    assert (conditions.differ(found) is not None) == said


def test_only_the_same_work_on_the_same_machine_is_held_together():
    """Another model is slower by right, and another machine reads at another speed."""
    assert conditions.differ([taken(20e9, 100.0, work="135m"), taken(20e9, 10.0, work="7b")]) is None
    assert conditions.differ([taken(20e9, None, where="a"), taken(40e9, None, where="b")]) is None
    assert conditions.differ([taken(None, None), taken(20e9, 100.0)]) is None
    assert conditions.differ([]) is None
    mixed = [taken(20e9, 10.0, work="7b"), taken(20e9, 100.0), taken(20e9, 150.0)]
    assert "plain decoding 100.0 to 150.0" in conditions.differ(mixed)


def record(plain, *, read=20e9, gamma=2, model="a.gguf", cpu="EPYC", **summary):
    config = {"model": {"path": model}, "policy": {"gamma": gamma}, "max_tokens": 64}
    found = {"conditions": Conditions(read, plain_tokens_per_second=plain).to_dict(), **summary}
    return {"summary": found, "manifest": {"cpu": {"model": cpu, "cores": 2}}, "config": config}


def test_records_say_what_they_were_taken_at():
    two = [conditions.from_record(json.loads(json.dumps(record(p, gamma=g)))) for p, g in ((160.0, 2), (102.0, 4))]
    assert [t.conditions.plain_tokens_per_second for t in two] == [160.0, 102.0]
    assert two[0].work == two[1].work  # the draft length is no work of plain decoding
    assert conditions.differ(two) is not None
    other = conditions.from_record(record(102.0, model="b.gguf"))
    assert conditions.differ([two[0], other]) is None
    assert conditions.differ([conditions.from_record(record(160.0, cpu=c)) for c in ("EPYC", "Xeon")]) is None


def test_everything_in_a_record_is_defined():
    assert {f"conditions.{key}" for key in conditions.UNKNOWN.to_dict()} == set(conditions.DEFINITIONS)


def test_records_of_before_are_read_too():
    old = record(1.0, read=1.0)
    old["summary"] = {"read_bandwidth": 30e9, "plain": {"rates": {"tokens_per_second": 99.0}}}
    assert conditions.from_record(old).conditions == Conditions(30e9, plain_tokens_per_second=99.0)
    assert conditions.from_record({"summary": {"conditions": None}}).conditions == conditions.UNKNOWN
    assert conditions.from_record({}).conditions == conditions.UNKNOWN


def test_what_is_known_is_said_in_one_line():
    whole = Conditions(28.14e9, 0.01, 160.2, 0.02, 0.34)
    line = "taken at: read bandwidth 28.1 GB/s, plain decoding 160.2 tok/s, other processes on 0.3 cores"
    assert whole.line() == line and conditions.UNKNOWN.line() is None
    assert Conditions.from_dict({**whole.to_dict(), "of_another_version": 1}) == whole


def test_a_machine_that_changed_under_one_timing_was_busy():
    assert conditions.busy(Conditions(20e9, 0.05, 100.0, 0.05)) is None
    assert conditions.busy(conditions.UNKNOWN) is None
    line = conditions.busy(Conditions(20e9, 0.07, 100.0, 0.12))
    assert line.startswith("read bandwidth varied by 7% and plain decoding's time varied by 12% between repeats")


def test_a_speedup_above_tokens_per_pass_is_impossible():
    line = conditions.impossible(2.4, 2.1)
    assert line.startswith("speed-up 2.40 is impossible with 2.10 tokens per target pass")
    assert "the machine changed between the sides" in line
    assert conditions.impossible(2.1, 2.1) is None and conditions.impossible(1.01, 1.0) is None  # noise of the timer
    assert conditions.impossible(1.03, 1.0) is not None
    assert conditions.impossible(None, 1.0) is None and conditions.impossible(2.0, None) is None


def test_doubts_are_named():
    found = conditions.doubts(Conditions(20e9, 0.2), {"a x b": "impossible", "c": None, "": "this too"})
    assert found[1:] == ("a x b: impossible", "this too") and "the machine was busy" in found[0]
    assert conditions.doubts(conditions.UNKNOWN, {"a": None}) == ()


def test_what_is_true_of_several_is_said_once():
    restless, calm = Conditions(20e9, 0.07, 100.0, 0.12), Conditions(20e9, 0.01)
    assert conditions.all_busy([("a", calm), ("b", conditions.UNKNOWN)]) == []
    assert conditions.all_busy([("a", restless), ("b", calm)]) == [f"a: {conditions.busy(restless)}"]
    (line,) = conditions.all_busy([("a", restless), ("b", calm), ("c", Conditions(20e9, 0.26))])
    assert "varied by up to 26% between the repeats of 2 timings (a, c)" in line
    assert conditions.all_impossible([("a", 2.4, 2.1), ("b", 1.0, 2.0)]) == [f"a: {conditions.impossible(2.4, 2.1)}"]
    (line,) = conditions.all_impossible([("a", 2.4, 2.1), ("b", None, 2.0), ("c", 3.0, 2.0)])
    assert "a (2.40 with 2.10), c (3.00 with 2.00)" in line and "the machine changed between the sides" in line


def interval(value, half):
    return Interval(value, value - half, value + half, 6)


def test_what_intervals_do_not_tell_apart_is_tied():
    found = [interval(1.1, 0.1), interval(1.5, 0.1), interval(1.35, 0.06), interval(1.25, 0.1)]
    assert conditions.ties(found) == [[1, 2], [3, 0]]  # 1.25 overlaps with 1.35, but not with the best
    assert [str(rank) for rank in conditions.ranks(found)] == ["3=", "1=", "1=", "3="]


def test_ranks_without_ties_and_without_values():
    found = [interval(1.0, 0.1), None, interval(2.0, 0.1), interval(1.5, 0.1)]
    assert [rank and str(rank) for rank in conditions.ranks(found)] == ["3", None, "1", "2"]
    assert conditions.rank_lines(found) == []


def test_marks_that_all_would_have_are_none():
    """Nor is a single method the best of anything."""
    touching = [Interval(2.0, 1.5, 2.5, 3), Interval(1.0, 0.5, 1.5, 3)]
    assert conditions.ranks(touching) == [None, None] and conditions.ranks(touching[:1]) == [None]
    (line,) = conditions.rank_lines(touching)
    assert line.startswith("no ranks: ") and conditions.rank_lines(touching[:1]) == []


def test_one_prompt_never_ranks_beside_six():
    one = Interval(3.0, None, None, 1)
    found = [one, interval(1.0, 0.1), Interval(2.0, None, None, 2), interval(2.0, 0.1)]
    assert [rank and str(rank) for rank in conditions.ranks(found)] == [None, "2", None, "1"]
    assert conditions.rank_lines(found) == ["no rank for 2 of 4: there is no 95 % interval over fewer than 3 prompts"]
    assert conditions.ranks([one, one]) == [None, None]


def test_skewed_speedups_are_named_in_one_line():
    found = {"a": interval(1.0, 0.1), "b": interval(2.0, 0.1)._replace(skewed=True), "c": None}
    (line,) = conditions.all_skewed(found.items())
    assert "(b)" in line and "may not be believed" in line
    assert conditions.all_skewed([("a", found["a"])]) == []


STAT = "cpu  100 20 30 4000 50 6 7 8 0 0\ncpu0 50 10 15 2000 25 3 3 4 0 0\n"


def test_core_seconds_of_everybody_leave_waiting_out():
    assert machine.busy_seconds(STAT, 100) == pytest.approx((100 + 20 + 30 + 6 + 7 + 8) / 100)
    assert machine.busy_seconds("cpu 1 0 1 9 0 0 0", 1) == 2.0  # before steal time was counted
    for text in ("", "intr 5", "cpu 1 2", "cpu 0 0 0 0 0 0 0 0"):
        assert machine.busy_seconds(text, 100) is None


def test_a_meter_keeps_the_median_and_the_spread(monkeypatch):
    read, cores, now = iter([20e9, 30e9, 22e9]), iter([(10.0, 4.0), (18.0, 9.0)]), iter([100.0, 110.0])
    monkeypatch.setattr(machine, "read_bandwidth", lambda: next(read))
    monkeypatch.setattr(machine, "_core_seconds", lambda: next(cores))
    monkeypatch.setattr(machine.time, "monotonic", lambda: next(now))
    meter = machine.Meter()
    for _ in range(3):
        meter.sample()
    found = meter.conditions(160.0, [2.0, 2.0, 2.0])
    assert found.read_bandwidth == 22e9 and found.plain_tokens_per_second == 160.0
    assert found.read_deviation == pytest.approx(5.2915e9 / 24e9, rel=1e-4) and found.plain_deviation == 0.0
    assert found.other_load == pytest.approx((8.0 - 5.0) / 10.0)


def test_a_later_run_of_the_same_process_measures_the_bandwidth_anew(monkeypatch):
    """The cells of a sweep are one process."""
    rates = iter([20e9, 30e9])
    monkeypatch.setattr("specsparse.kernels.processor.ReadBuffer.rate", lambda self, passes: next(rates))
    assert [machine.read_bandwidth(mebibytes=1) for _ in range(2)] == [20e9, 30e9]


def test_a_machine_that_tells_nothing(monkeypatch):
    monkeypatch.setattr(machine, "_core_seconds", lambda: None)
    assert machine.Meter().conditions(None) == conditions.UNKNOWN
