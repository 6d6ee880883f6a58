"""Advice for this machine: a table that is kept is found without weights, and what is missing alone is measured."""

import dataclasses

import pytest

import specsparse
from specsparse.measure.costs import measuring
from specsparse.measure.costs.forecast import Clock
from specsparse.runtime import timing_cache
from specsparse.runtime.timing_cache import CostTable, DraftCost
from specsparse.testing import write_tiny_gguf
from specsparse.tools.advise import advise as module
from specsparse.tools.advise.advise import Question, advise

TABLE = CostTable(
    ns=(1, 2, 4, 16), kv_base=10, forward_s=(0.010, 0.012, 0.016, 0.040), kv_s=1e-6, kv_row_s=1e-7, plain_s=0.010,
    round_s=0.001, round_token_s=0.0001, host_s=0.0, bandwidth=1e9, int8=None, f32=1e9,
    residuals={"spread": {"near 2": 0.01, "near 4": 0.02}}, identity={"cpu": "a processor", "date": "today"},
)  # fmt: skip
OWN = ("prompt_lookup", "ngram_simple", "suffix", "layer_skip")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return specsparse.load(str(write_tiny_gguf(tmp_path_factory.mktemp("m") / "m.gguf", n_layers=4)))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECSPARSE_CACHE", str(tmp_path))


def test_a_kept_table_is_found_without_weights(model, monkeypatch):
    assert timing_cache.find(model.path, model.config) is None
    table = TABLE
    for name in (*OWN, measuring.draft_key("layer_skip", draw="top")):
        table = table.with_draft(name, DraftCost(token_s=0.001, fixed_s=0.0005))
    timing_cache.save(model, table)
    assert timing_cache.find(model.path, model.config) == table == timing_cache.load(model)
    assert timing_cache.find(model.path, model.config, kv_dtype="f32") is None
    monkeypatch.setattr(module, "load", lambda *args, **options: pytest.fail("weights were loaded"))
    found = advise(Question(str(model.path), alphas=(0.7,), contexts=(10,)))
    f = next(f for f in found.cases[0].forecasts if f.candidate.name == "suffix")
    assert (f.c, f.c0) == pytest.approx((0.1, 0.001 / 0.01 + 0.0001 / 0.01 + 0.05))
    third = next(p for p in f.points if p.gamma == 3)
    c0 = (0.001 + 3 * 0.0001 + 0.0005) / 0.01
    assert third.speedup == pytest.approx((1 + 0.7 + 0.49 + 0.343) / (1 + 0.006 / 0.01 + 3 * 0.1 + c0))
    assert third.low < third.speedup < third.high and "a processor, measured today" in found.cases[0].clocks.source


def test_what_is_missing_is_measured_and_nothing_else(model, monkeypatch):
    timing_cache.save(model, TABLE.with_draft("suffix", DraftCost(0.001)))
    asked = []

    def measured(model, name, options, draw, bar):
        asked.append(name if draw is None else f"{name} trees")
        return TABLE.with_draft(name, DraftCost(0.002)), name

    monkeypatch.setattr(measuring, "table_for", measured)
    monkeypatch.setattr(module, "load", lambda *args, **options: model)
    advise(Question(str(model.path), alphas=(0.7,), contexts=(10,)))
    assert asked == [*OWN, "layer_skip trees"]


def test_a_busy_machine_is_said_and_measured_again(model, monkeypatch):
    table = TABLE
    for name in (*OWN, measuring.draft_key("layer_skip", draw="top")):
        table = table.with_draft(name, DraftCost(token_s=0.001))
    busy = dataclasses.replace(
        table, residuals={"spread": {"near 1": 0.2, "near 2": 0.14, "near 4": 0.09, "host": 3.0}}
    )
    timing_cache.save(model, busy)
    monkeypatch.setattr(module, "load", lambda *args, **options: model)
    question = Question(str(model.path), alphas=(0.7,), contexts=(10,))
    note = advise(question).cases[0].clocks.note
    assert note == "note: a forward varied by 14% between repeats, the machine was busy: --refresh measures it again"
    monkeypatch.setattr(measuring, "measure", lambda model, effort=None, done=None: TABLE)
    cost = lambda model, table, method, sizes: DraftCost(0.003 if method.drafter.tree else 0.002)  # noqa: E731
    monkeypatch.setattr(measuring, "measure_draft", cost)
    assert advise(dataclasses.replace(question, refresh=True)).cases[0].clocks.note is None
    assert {cost.token_s for cost in timing_cache.load(model).drafts.values()} == {0.002, 0.003}


def test_on_paper_this_machine_decodes_nothing(model, monkeypatch):
    monkeypatch.setattr(module, "load", lambda *args, **options: pytest.fail("weights were loaded"))
    found = advise(Question(str(model.path), alphas=(0.7,), contexts=(10,), paper=True))
    assert "on paper (measured peaks)" in found.cases[0].clocks.source and found.memory > 1e8


def test_a_batch_reads_the_weights_once_and_every_cache():
    one, four = (Clock.from_table(TABLE, {}, 1.0, 100.0, batch) for batch in (1, 4))
    further = (0.0 + 90) * (1e-6 + 1e-7)
    assert one.step_s == pytest.approx(0.010 + further)
    assert four.step_s == pytest.approx(0.010 + (0.016 - 0.010) + 4 * further + 3 * 1e-6 * 11)
    assert four.v(4) > one.v(4) > 1  # sixteen rows for four
