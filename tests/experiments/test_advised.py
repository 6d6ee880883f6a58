"""Predictions beside the clock: a run that takes what the table says is predicted to the digit."""

from types import SimpleNamespace

import pytest

from specsparse.experiments.kinds import compare
from specsparse.experiments.settings import MethodSettings
from specsparse.measure.costs import measuring
from specsparse.report import record
from specsparse.report.record import PLAIN, SPECULATIVE, Pass
from specsparse.runtime.metrics import Counters, Times
from specsparse.runtime.timing_cache import CostTable, DraftCost
from specsparse.support.registry import Choice

TABLE = CostTable(
    ns=(1, 2, 4), kv_base=10, forward_s=(0.010, 0.012, 0.016), kv_s=0.0, kv_row_s=0.0, plain_s=0.010, round_s=0.001,
    round_token_s=0.0, host_s=0.0, bandwidth=1e9, int8=None, f32=1e9,
    drafts={"model": DraftCost(token_s=0.002, fixed_s=0.0005)}, residuals={"spread": {"near 2": 0.01, "near 4": 0.02}},
)  # fmt: skip
COSTED = ("model", 3)


def passes(task: str, reach: tuple[int, ...], drafts: int, *, factor: float = 1.0) -> list[Pass]:
    """Ten rounds of which some drafted three tokens, at the table's times (the method's times `factor`)."""
    tokens = 10 + sum(reach)
    c = Counters(
        num_rounds=10, num_drafts=drafts, num_draft_tokens=3 * drafts, num_tested=max(sum(reach), 2 * drafts),
        num_accepted_tokens=sum(reach), num_accepted_tokens_per_pos=reach, num_emitted_tokens=tokens,
    )  # fmt: skip
    seconds = factor * (drafts * (0.016 + 3 * 0.002 + 0.001 + 0.0005) + (10 - drafts) * 0.010)
    plain = Counters(num_rounds=tokens, num_emitted_tokens=tokens)
    out = []
    for side, counters, took in ((PLAIN, plain, 0.010 * tokens), (SPECULATIVE, c, seconds)):
        timed = Counters(**{**vars(counters), "times": Times(total=took)})
        out.append(Pass(task, task, side, 0, tuple(range(tokens)), "", "length", timed, 0.0, 5, took, 0.0))
    return out


def groups(*found: list[Pass]) -> dict[str, record.Group]:
    return record.groups([p for some in found for p in some], bytes_per_pass=1, read_bandwidth=None)


def test_a_run_at_the_tables_times_is_predicted_exactly():
    found = groups(passes("chat", (6, 4, 2), 8), passes("code", (9, 8, 7), 9), passes("still", (), 0))
    one = compare.predict({"m": found}, TABLE, {"m": COSTED})["m"]
    assert one.predicted == pytest.approx(one.measured, rel=1e-12) and one.within
    assert one.low < one.predicted < one.high
    assert (one.rows, one.v, one.c) == pytest.approx((3.0, 1.6, 0.2)) and one.c0 == pytest.approx(0.15)


def test_a_run_that_takes_longer_is_off_by_as_much():
    found = groups(passes("chat", (6, 4, 2), 8, factor=1.25))
    one = compare.predict({"m": found}, TABLE, {"m": COSTED})["m"]
    assert one.over_measured == pytest.approx(1.25) and not one.within
    lines = list(compare.prediction_parts({"m": one}))
    assert lines[1] == "advice: 0 of 1 predictions within 10% of the clock"
    assert one.to_dict()["over_measured"] == pytest.approx(1.25)


def test_a_tree_is_predicted_by_its_depths_and_its_nodes():
    """Three nodes on two levels, eight of ten rounds: tokens by depth, rows by node, drafting by the round."""
    table = TABLE.with_draft("tree", DraftCost(fixed_s=0.003))
    one = compare.predict({"m": groups(passes("chat", (6, 4), 8))}, table, {"m": ("tree", 3)})["m"]
    seconds = 8 * (0.016 + 0.001 + 0.003) + 2 * 0.010
    assert one.predicted == pytest.approx(20 * 0.010 / seconds, rel=1e-12)
    assert (one.rows, one.c, one.c0) == pytest.approx((3.0, 0.0, 0.4))


def test_the_cost_of_a_chain_is_a_tokens_and_of_a_tree_its_own(monkeypatch):
    cfg = {"drafter": Choice("head"), "verifier": Choice("match"), "policy": Choice("fixed", {"gamma": 4})}
    asked = []
    monkeypatch.setattr(measuring, "table_for", lambda model, name, options, bar: (TABLE, name))
    measured = lambda *args, bar: (asked.append(args[3].max_nodes) or TABLE, "tree")  # noqa: E731
    monkeypatch.setattr(measuring, "table_for_tree", measured)
    tree = MethodSettings(**cfg, tree=Choice("static", {"widths": [3, 2]}))
    methods = {"a": (MethodSettings(**cfg), None), "b": (tree, SimpleNamespace(max_nodes=9))}
    assert compare.costs_of(None, methods) == (TABLE, {"a": ("head", 4), "b": ("tree", 9)}) and asked == [9]


def test_a_method_that_drafts_nothing_has_no_prediction():
    assert compare.predict({"m": groups(passes("still", (), 0))}, TABLE, {"m": COSTED}) == {}
    assert list(compare.prediction_parts({})) == []
