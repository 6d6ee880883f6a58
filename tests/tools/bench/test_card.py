"""`bench device`: stages that fail alone, models from shapes, every stage with tiny shapes on XLA's CPU backend."""

import json
import sys

import jax
import numpy as np
import pytest

from specsparse.cli.main import main
from specsparse.kernels import TILE_ROWS, Fragments
from specsparse.kernels.gpu.fragments import widened
from specsparse.kernels.packing.dequant import dequantize
from specsparse.tools.bench import device_figures, device_stages
from specsparse.tools.bench.device_figures import CardPlan
from specsparse.tools.bench.device_stages import DeviceBench, Stage, StageReport, run_apart, run_here, shown
from tests.cells import cells

TINY = CardPlan("cpu", tiny=True, tokens=6, repeats=1, backend="xla")


def ran(*names: str, plan: CardPlan = TINY) -> dict[str, list]:
    """The rows of some stages, none of which failed."""
    found = device_stages.run(plan, names, lambda line: None, apart=False)
    assert found["failed"] == [], found["stages"]
    return {stage["name"]: stage["rows"] for stage in found["stages"]}


@pytest.mark.slow
def test_rows_are_equal_and_their_checks_can_fail(monkeypatch):
    found = ran("equality")["equality"][0]
    assert found["equal"] and found["width"] == 8 and found["values"] > 10_000 and not found["differing"]
    exact = device_figures.fixed_width
    monkeypatch.setattr(
        device_figures, "fixed_width", lambda forward, width: exact(forward, width) if width == 16 else forward
    )
    broken = ran("equality")["equality"][0]  # programs of as many rows as there are tokens
    assert not broken["equal"] and broken["differing"]
    assert broken["largest_difference"] > 0 and broken["rows"] > 0 and broken["narrowest_margin"] >= 0


def test_the_device_and_one_product():
    found = ran("status", "int4")
    device, kernels, read, _ = found["status"]
    assert device["platform"] == "cpu" and kernels["chosen"] == "xla" and read["bytes_per_second"] > 1e8
    (product,) = found["int4"]
    assert set(product["seconds"]) == {"ours_q4_0", "jax_int4", "bf16"} and min(product["seconds"].values()) > 0


@pytest.mark.slow
def test_decoding_and_speculation():
    found = ran("q4_0", "speculation")
    (decoded,) = found["q4_0"]
    assert decoded["width"] == 8 and decoded["tokens_per_second"] > 0 and 0 < decoded["share_of_bandwidth"] < 1
    (fast,) = found["speculation"]
    assert fast["expected_tokens_per_round"] == pytest.approx(3.3616) and 1 <= fast["tokens_per_round"] <= 5


@pytest.mark.slow
def test_the_other_stages():
    found = ran("small", "bf16", "q8_0", "trees", "widths")
    assert all(row["same_tokens"] and row["width"] == 8 for row in found["trees"]) and len(found["trees"]) == 2
    assert found["widths"][0]["v"][1] == 1.0 and found["widths"][0]["padded"][8] > 0
    assert {row["what"].split()[-1] for name in ("small", "bf16", "q8_0") for row in found[name]} == {"Q8_0", "BF16"}


@pytest.mark.slow
def test_hot_and_cold_neurons_beside_their_baselines():
    (found,) = ran("hybrid")["hybrid"]
    assert set(found["seconds"]) == {"hybrid", "layers", "host"} and min(found["seconds"].values()) > 0
    assert 0 < found["kept"] < 0.5 and set(found["waits_s"]) == {"hot", "cold"}
    assert found["card_layers"] == 1  # two layers, half of whose bytes are attention and hot neurons


@pytest.mark.parametrize("kind", cells(["F32", "BF16", "Q8_0", "Q4_0"], ["BF16", "Q4_0"]))
def test_random_weights_have_the_deviation_that_keeps_rows_near_one(kind):
    w = device_figures.random_matrix(3, kind, (72, 256))
    values = np.asarray(dequantize(w))
    assert values.shape == (72, 256) and w.layout.source == kind
    assert values.std() * 16 == pytest.approx(1.0, abs=0.05) and abs(values.mean()) * 16 < 0.15
    assert (np.asarray(dequantize(device_figures.random_matrix(4, kind, (72, 256)))) != values).any()


def test_random_weights_for_a_card_have_the_same_deviation():
    packed = device_figures.random_matrix(3, "Q4_0", (72, 256), kept="packed")
    plain = device_figures.random_matrix(3, "Q4_0", (72, 256), kept="bf16")
    assert isinstance(packed, Fragments) and str(plain.data.dtype) == "bfloat16"
    for values in (np.asarray(jax.jit(lambda w: widened(w, np.float32))(packed)), np.asarray(plain.data, np.float32)):
        assert values.shape == (72, 256) and values.std() * 16 == pytest.approx(1.0, abs=0.05)


CHILDREN = {
    "ends": ('print(\'row {"what": "a", "x": 1.5}\'); print(\'chatter\')', None, 1),
    "fails": ("print('row {\"what\": \"a\"}', flush=True); import sys; sys.exit('out of memory')", "out of memory", 1),
    "dies": ("print('row {}', flush=True); import os; os.abort()", "signal 6", 1),
    "hangs": ("print('row {}', flush=True); import time; time.sleep(60)", "took longer than its 1 s; 1 figures", 1),
}


@pytest.mark.parametrize("how", CHILDREN)
def test_what_was_measured_stays_whatever_comes_after(how):
    script, error, rows = CHILDREN[how]
    said: list[str] = []
    found = run_apart(how, 1.0, [sys.executable, "-c", script], said.append)
    assert len(found.rows) == rows and (found.error or "").startswith(error or "") and bool(found.error) == bool(error)
    assert said == [*map(shown, found.rows), *([f"failed: {found.error}"] if error else [])]
    assert found.seconds < 20


def test_a_stage_that_raises_leaves_its_rows():
    def rows(plan):
        yield {"what": "first", "seconds": 0.25}
        raise ValueError("no such kernel\nwith a trace")

    found = run_here(Stage("x", rows, 1.0), TINY, (said := []).append)
    assert found.rows == said == [{"what": "first", "seconds": 0.25}] and shown(said[0]) == "first: seconds=0.25"
    assert found.error == "ValueError: no such kernel"


def test_no_time_left_is_said_and_nothing_begun(monkeypatch):
    monkeypatch.setattr(device_stages, "TOTAL_S", 0.0)
    found = device_stages.run(TINY, ["status"], lambda line: None)
    assert found["failed"] == ["status"] and "no time was left" in [*DeviceBench("cpu").parts(found)][1]


def test_one_stage_after_the_other_in_processes_of_their_own(monkeypatch):
    given = []

    def apart(name, limit_s, command, say, *, environment, unsaid):
        given.append((name, limit_s, CardPlan(**json.loads(command[-1])), environment))
        return StageReport(name, limit_s, rows=[{"what": name}], error="it broke" if name == "small" else None)

    monkeypatch.setattr(device_stages, "run_apart", apart)
    found = device_stages.run(TINY, (), lambda line: None)
    assert [g[0] for g in given] == list(device_stages.STAGES) and found["failed"] == ["small"]
    assert all(g[1] <= device_stages.STAGES[g[0]].limit_s and g[2] == TINY for g in given)
    assert given[0][3]["JAX_NUM_CPU_DEVICES"] == "2" and len(found["stages"]) == len(device_stages.STAGES)
    assert len(found["predicted"]) == len(device_figures.DEVICES) * 2 * len(device_figures.KINDS)


def test_without_a_card_there_is_one_line(capsys):
    assert main(["bench", "device", "gpu", "--all"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and "no gpu is here: jax " in said.err
    assert "pip install 'jax[cuda13]" in said.err and "bench device cpu --tiny --all" in said.err


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["vpu", "--all"], "invalid choice: 'vpu'"),
        (["gpu"], "one of the arguments --all --stages is required"),
        (["gpu", "--all", "--peer", "llama.cpp"], "unknown argument --peer"),
        (["cpu", "--tiny", "--stages", "statsu"], "did you mean status"),
    ],
)
def test_mistakes_are_one_line(args, says, capsys):
    assert main(["bench", "device", *args]) == 2
    assert says in capsys.readouterr().err


def test_the_report_is_the_last_line(capsys):
    assert main(["bench", "device", "cpu", "--tiny", "--stages", "status"]) == 0
    last = capsys.readouterr().out.strip().splitlines()[-1]
    found = json.loads(last)
    assert found["bench"] == "device" and found["plan"]["backend"] == "xla" and found["stages"][0]["rows"]


def test_figures_on_paper_are_the_rooflines():
    rows = {(r["device"], r["model"], r["type"]): r for r in device_figures.predictions(CardPlan())}
    large = {name: rows[name, "llama-2-7b", "BF16"] for name, _, _ in rows}
    h200 = large["NVIDIA H200 SXM"]
    read = 6_607_077_376 * 2 + 32 * 2 * 4096 * 2 * 97  # weights but the embedding, cache
    assert h200["step_s"] == pytest.approx(read / (0.8 * 4.8e12) + 322 * 0.5e-6, rel=2e-3)
    assert h200["speculation_over_padded"] == pytest.approx(3.3616)
    assert large["NVIDIA H100 SXM"]["step_s"] > h200["step_s"] > large["AMD Instinct MI300X"]["step_s"]
    server = next(row for name, row in large.items() if "EPYC" in name)
    assert server["v8"] > 1.5 > 1.01 > h200["v8"]  # the cores that read are those that multiply
    assert device_figures.GAMMA + 1 <= TILE_ROWS
