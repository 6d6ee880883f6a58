"""`kind: placement` end to end on a tiny PowerInfer model: what it prints, writes and goes by."""

import csv
import dataclasses
import io

import numpy as np
import pytest
from rich.console import Console

import specsparse
from specsparse.data.devices import Device
from specsparse.engine.config import ModelConfig
from specsparse.engine.gguf.reader import open_gguf
from specsparse.errors import UserError
from specsparse.experiments import runner, sweeps
from specsparse.experiments.kinds import neuron_placement
from specsparse.experiments.kinds.neuron_placement import PlacementSpec
from specsparse.experiments.settings import ModelSpec
from specsparse.measure import machine
from specsparse.measure.costs import roofline
from specsparse.powerinfer.placement import GpuIndex, ModelParts, path_for, read_gpuidx, write_gpuidx
from specsparse.powerinfer.profiler import ActivationStats, read_activations, save_stats
from specsparse.support.registry import Choice
from specsparse.testing import write_tiny_gguf
from tests.experiments.playing import changed, play, random_texts, replaced, run_config, settings
from tests.powerinfer.tiny import write_tiny_powerinfer

MIB = 1 / 1024


@pytest.fixture(autouse=True)
def measured(monkeypatch):
    monkeypatch.setattr(machine, "read_bandwidth", lambda: 40e9)
    monkeypatch.setattr(roofline, "measure_device", lambda: Device("this", "here", 40e9, 1e12, measured=True))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("m")
    return write_tiny_powerinfer(folder / "m.powerinfer.gguf", tokenizer="spm", vocab_size=300, d_ff=1024)


@pytest.fixture
def cfg(path, tmp_path):
    text = random_texts(tmp_path / "text.jsonl", 4, 120)
    placement = PlacementSpec(tokens=64, window=32, context=64, latency_us=0.0, call_us=0.0)
    return run_config(path, text=text, kind="placement", vram_budget=0.7 * MIB, placement=placement)


def test_a_run_places_by_every_rule_and_keeps_its_choice(cfg, path, tmp_path):
    found, text, record = play(cfg, tmp_path / "a")
    times = {name: p.seconds for name, p in found.result.found.items()}
    assert times["optimal"] < times["none"] and times["optimal"] <= times["powerinfer"] <= times["none"]
    assert found.objective == 1 / times["optimal"]
    summary = record["summary"]
    chosen = summary["placements"]["optimal"]
    assert 0 < sum(chosen["hot_neurons"]) < 2048 and all(k % 256 == 0 for k in chosen["hot_neurons"])
    assert chosen["bytes_on_device"] <= summary["budget_bytes"] and chosen["bound_seconds"] <= chosen["seconds"]
    for part in ("attention", "predictors", "tok/s", "powerinfer", "layers", "over bound", "expected times only"):
        assert part in text
    index = read_gpuidx(path_for(path))
    assert [int(h.sum()) for h in index.hot] == chosen["hot_neurons"]
    assert index.vram_capacity == summary["neuron_budget_bytes"]
    stats = read_activations(tmp_path / "a" / "activations.safetensors", layers=2, d_ff=1024)
    exported = read_activations(tmp_path / "a" / "activation", layers=2, d_ff=1024)
    assert stats.tokens == 64 and all(map(np.array_equal, stats.counts, exported.counts))
    assert (tmp_path / "a" / "placement.png").is_file()

    for given in ("activations.safetensors", "activation"):
        again = changed(cfg, "placement", activations=str(tmp_path / "a" / given))
        same, text, _ = play(again, tmp_path / "b")
        assert all(map(np.array_equal, same.result.found["optimal"].hot, found.result.found["optimal"].hot))
        if given == "activations.safetensors":  # the .pt files do not say how many tokens were read
            assert "placement read from" in text
    off, text, record = play(replaced(again, disable_gpu_index=True), tmp_path / "c")
    assert off.result.chosen == record["summary"]["chosen"] == "none" and "disable_gpu_index" in text


def test_experts_are_placed_by_how_often_rows_choose_them(cfg, tmp_path):
    path = write_tiny_gguf(tmp_path / "experts.gguf", architecture="smallthinker", n_layers=2, context_length=128)
    f = open_gguf(path)
    config = ModelConfig.from_gguf(f)
    parts = ModelParts.from_gguf(f, config, context=64)
    in_file = sum(t.nbytes for name, t in f.tensors.items() if name != "token_embd.weight")
    assert sum(parts.in_order().values()) - 2 * parts.cache == in_file
    budget = sum(parts.in_order().values()) - sum(parts.neurons) // 2
    cfg = replaced(cfg, model=ModelSpec(str(path)), vram_budget=budget / 2**30)
    found, text, record = play(cfg, tmp_path / "a")
    stats = read_activations(tmp_path / "a" / "activations.safetensors", layers=2, d_ff=config.n_experts)
    assert [int(counts.sum()) for counts in stats.counts] == [64 * config.n_chosen] * 2
    best = record["summary"]["placements"]["optimal"]
    assert sum(best["hot_neurons"]) == config.n_experts and best["seconds"] == best["row_seconds"]["1"]
    assert all(np.diff([best["row_seconds"][n] for n in "1248"]) > 0) and "hot experts" in text
    for counts, hot in zip(stats.counts, found.result.found["optimal"].hot, strict=True):
        assert not hot.any() or hot.all() or counts[hot].min() >= counts[~hot].max()
    with (tmp_path / "a" / "experts.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["hot"] == "True" for row in rows] == np.concatenate(found.result.found["optimal"].hot).tolist()
    assert sum(float(row["chosen"]) for row in rows) == pytest.approx(2 * config.n_chosen)
    assert not [*tmp_path.rglob("*.gpuidx")]
    for option, given in (("decode", 2), ("gpu_index", "x.gpuidx"), ("hot", "dense")):
        with pytest.raises(UserError, match=f"placement.{option}.* of experts is not run"):
            runner.check(changed(cfg, "placement", **{option: given}))
    with pytest.raises(UserError, match=r"placement .*experts"):
        specsparse.load(path, placement=found.result.found["optimal"])


def test_newcomer_gets_whole_layers_where_they_are_faster(cfg, path, tmp_path):
    """And reads what the bound compares, and which device is on paper; a placement that does not fit is not chosen."""
    slow = changed(cfg, "placement", latency_us=1e4, rule="optimal")
    found, text, record = play(replaced(slow, vram_budget=1.0 * MIB), tmp_path / "a")
    times = {name: values["seconds"] for name, values in record["summary"]["placements"].items()}
    assert times["layers"] < times["optimal"] and record["summary"]["chosen"] == found.result.chosen == "layers"
    assert found.objective == 1 / times["layers"]
    text = " ".join(text.split())
    assert "RTX 4090, 1,008 GB/s (on paper)" in text and "layers moves whole layers" in text and "whole layers;" in text
    assert record["summary"]["devices"] == {
        "hot": {"title": "NVIDIA GeForce RTX 4090", "on_paper": True}, "cold": {"title": "here", "on_paper": False},
    }  # fmt: skip
    index = read_gpuidx(path_for(path))  # what PowerInfer takes stays a choice of neurons
    assert [int(h.sum()) for h in index.hot] == record["summary"]["placements"]["optimal"]["hot_neurons"]
    tight, text, record = play(replaced(cfg, vram_budget=0.05 * MIB), tmp_path / "b")
    assert tight.result.chosen == "layers" and "(over the budget)" in text


def test_newcomer_gets_one_time_for_one_placement(cfg, tmp_path):
    """All neurons on the accelerator and all layers there are the same bytes in the same places."""
    started = changed(cfg, "placement", call_us=5.0)
    _, _, record = play(replaced(started, vram_budget=64 * MIB), tmp_path / "a")
    placements = record["summary"]["placements"]
    assert placements["optimal"]["bytes_on_device"] == placements["layers"]["bytes_on_device"]
    assert placements["optimal"]["seconds"] == pytest.approx(placements["layers"]["seconds"], rel=1e-12)
    assert record["summary"]["chosen"] == "optimal"


def test_what_somebody_else_placed_is_reported_as_it_is(cfg, tmp_path):
    """A file of PowerInfer's own says less about itself, and holds another placement than the rule makes."""
    counts = tuple(np.arange(1024) for _ in range(2))
    save_stats(tmp_path / "counts.safetensors", ActivationStats(counts, tokens=1023))
    cold = np.arange(1024) < 256
    write_gpuidx(tmp_path / "own.gpuidx", GpuIndex((cold, cold), 1 << 16))
    given = changed(
        cfg, "placement", activations=str(tmp_path / "counts.safetensors"), gpu_index=str(tmp_path / "own.gpuidx")
    )
    found, text, record = play(given, tmp_path / "a")
    summary = record["summary"]
    assert summary["chosen"] == found.result.chosen == "file" and "placement read from" in text
    assert summary["placements"]["file"]["hot_neurons"] == [256, 256]
    assert summary["placements"]["file"]["seconds"] > summary["placements"]["optimal"]["seconds"]
    assert found.objective == 1 / summary["placements"]["file"]["seconds"]


def test_the_text_to_decode_after_fits_the_context(cfg, path):
    f = open_gguf(path)
    config = dataclasses.replace(ModelConfig.from_gguf(f), context_length=16)
    assert len(neuron_placement.text_ids(settings(changed(cfg, "placement", decode=3)), f, config)) == 13
    assert len(neuron_placement.text_ids(settings(changed(cfg, "placement", decode=3, window=4)), f, config)) == 4
    with pytest.raises(UserError, match=r"placement\.decode=15 leaves no room .* of 16 tokens"):
        neuron_placement.text_ids(settings(changed(cfg, "placement", decode=15)), f, config)


def test_layers_and_predictors(cfg, tmp_path):
    by_layers = replaced(cfg, n_gpu_layers=1, vram_budget=1.0 * MIB)
    found, _, _ = play(changed(by_layers, "placement", rule="layers"), tmp_path / "a")
    assert found.result.gpu_index is None and found.result.found["layers"].host_layers == {0}
    by_mask = replaced(cfg, predictor=Choice("gate_threshold", {"share": 0.25}))
    found, _, _ = play(by_mask, tmp_path / "b")
    stats = read_activations(tmp_path / "b" / "activations.safetensors", layers=2, d_ff=1024)
    assert 0.2 < sum(c.sum() for c in stats.counts) / (64 * 2048) < 0.3


@pytest.mark.parametrize(
    ("rest", "placement", "message"),
    [
        ({"vram_budget": -1.0}, {}, r"vram_budget=-1\.0 must be a number of at least 0"),
        ({"n_gpu_layers": 3}, {}, "belongs to placement=layers"),
        ({}, {"hot_device": "4091"}, "device 4091 is unknown"),
        ({}, {"activations": "missing"}, "placement.activations=missing: no such"),
        ({"predictor": Choice("mlp")}, {}, "predictor=mlp needs trained weights"),
        ({"predictor": Choice("gate_threshold")}, {"active_share": 0.3}, "does nothing beside predictor=gate"),
        ({}, {"active_share": 0.3}, "does nothing beside the predictors of a PowerInfer file"),
        ({}, {"active_share": 0.3, "activations": "."}, "does nothing beside placement.activations"),
        ({"disable_gpu_index": True}, {"rule": "layers"}, "disable_gpu_index=true does nothing with placement=layers"),
        ({"reset_gpu_index": True}, {"rule": "none"}, "reset_gpu_index=true does nothing with placement=none"),
        ({"reset_gpu_index": True, "disable_gpu_index": True}, {}, "give one of them"),
    ],
)
def test_mistakes_are_found_before_anything_is_loaded(cfg, rest, placement, message):
    with pytest.raises(UserError, match=message):
        runner.check(replaced(changed(cfg, "placement", **placement), **rest))


def test_a_sweep_ends_with_table_csv_and_figure(cfg, tmp_path):
    counted, _, _ = play(replaced(cfg, vram_budget=0.3 * MIB), tmp_path / "1")
    given = changed(cfg, "placement", activations=str(tmp_path / "1" / "activations.safetensors"))
    play(replaced(given, vram_budget=0.6 * MIB), tmp_path / "0")
    out = io.StringIO()
    sweeps.show(tmp_path, Console(file=out, width=200))
    with (tmp_path / "vram_budget.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(r["budget_mib"]) for r in rows] == pytest.approx([0.3, 0.6], rel=1e-3)
    assert float(rows[0]["optimal_s"]) == counted.result.found["optimal"].seconds >= float(rows[1]["optimal_s"])
    assert (tmp_path / "vram_budget.png").is_file() and "over layers" in out.getvalue()


def test_decoding_measures_and_labels_dense_hot_neurons(cfg, tmp_path):
    found, text, record = play(changed(cfg, "placement", decode=3, hot="dense"), tmp_path / "a")
    measured = record["summary"]["measured"]
    assert measured == found.result.measured and measured["one"] > 0 and measured["overlapped"] is None
    taken = record["summary"]["conditions"]
    assert taken["read_bandwidth"] == 40e9 and taken["plain_tokens_per_second"] == 1 / measured["one"]
    assert "lossy" in measured["ffn"] and measured["quality"]["kl"] > 0 and len(measured["tokens"]) == 3
    assert found.as_promised and "two devices, overlapped" in text and "expected times only" not in text


def test_decoding_on_named_devices_has_both_baselines(cfg, tmp_path):
    """One CPU device stands for both, so nothing crosses; the path is the same."""
    cfg = replaced(changed(cfg, "placement", decode=2, devices=("cpu:0", "cpu")), vram_budget=0.6 * MIB)
    found, text, record = play(cfg, tmp_path / "a")
    measured = record["summary"]["measured"]
    assert measured["same_tokens"] and found.as_promised and "whole layers offloaded" in text
    assert measured["over_layers"] == measured["layers"] / measured["overlapped"] > 0 and measured["one"] > 0
    assert set(measured["waits"]) == {"hot", "cold"} and measured["crossed"] == {"hot": 0, "cold": 0}
    with pytest.raises(UserError, match=r"placement.devices names two, as \[cuda:0, cpu\]"):
        runner.check(changed(cfg, "placement", devices=("cpu",)))


def test_other_experiments_take_a_solved_placement(cfg):
    model = dataclasses.replace(cfg.model, placement="x.gpuidx", hot="dense", devices=2)
    assert model.overrides() == {"placement": "x.gpuidx", "hot": "dense", "devices": 2}
    with pytest.raises(UserError, match=r"are for other kinds: here placement\.\* says it"):
        runner.check(replaced(cfg, model=model))
    with pytest.raises(UserError, match=r"does nothing with kind=speed: .* give \+model\.placement=FILE"):
        runner.check(replaced(cfg, kind="speed", own={"placement": {}}))


def test_a_trace_has_a_row_a_device():
    spans = [("hot", 0, 2.0, 3.0), ("cold", 0, 1.5, 2.5), ("attention", 0, 1.0, 1.5)]
    names, events = np.split(neuron_placement.chrome_trace(spans)["traceEvents"], [2])
    assert [n["args"]["name"].split(":")[0] for n in names] == ["device 0", "device 1"]
    assert [(e["name"], e["tid"], e["ts"], e["dur"]) for e in events] == [
        ("attention 0", 0, 0, 5e5), ("cold 0", 1, 5e5, 1e6), ("hot 0", 0, 1e6, 1e6),
    ]  # fmt: skip
