"""`kind: perplexity` and `kind: quant_table` on a tiny model: what they write, print and refuse."""

import dataclasses
import json

import numpy as np
import pytest

import specsparse
from specsparse.errors import UserError
from specsparse.experiments.kinds.quality import PerplexitySpec, QuantTableSpec, doubts
from specsparse.experiments.settings import FfnSpec
from specsparse.measure.conditions import Conditions
from specsparse.runtime.perplexity import score, windows
from specsparse.support.registry import Choice
from specsparse.testing import write_tiny_gguf
from tests.experiments import playing
from tests.experiments.playing import replaced, run_config

TEXT = "hello the world, and hello again: " * 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    write_tiny_gguf(folder / "m.gguf", tokenizer="spm", quant="F16", n_layers=1)
    write_tiny_gguf(folder / "bpe.gguf", tokenizer="bpe", n_layers=1, vocab_size=320)
    (folder / "text.txt").write_text(TEXT)
    return folder


@pytest.fixture
def cfg(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECSPARSE_CACHE", str(tmp_path / "cache"))
    perplexity = PerplexitySpec(text=str(folder / "text.txt"), context=64, chunks=2)
    return run_config(
        folder / "m.gguf", gamma=3, sampling={"temperature": 0.0}, kind="perplexity", perplexity=perplexity
    )


def play(cfg, directory):
    played = playing.play(cfg, directory, width=140)
    files = {p.name for p in directory.iterdir()}
    assert files - {"metrics.jsonl"} == {"record.json"}  # the base's distributions are gone
    return played


def test_perplexity_and_the_distance_to_float32(cfg, folder, tmp_path):
    found, text, written = play(cfg, tmp_path / "run")
    model = specsparse.load(folder / "m.gguf")
    ids = model.tokenizer.encode(TEXT, add_special=True)
    cut = windows(ids, context=64, chunks=2, bos=model.tokenizer.bos_id)
    assert found.summary["perplexity"] == score(model, cut).summary()["perplexity"] == -found.objective
    base = np.empty((cut.scored, 300), np.float32)
    score(specsparse.load(folder / "m.gguf", float_weights=True, kv_dtype="f32"), cut, keep=base)
    assert found.summary["kl_mean"] == score(model, cut, base=base).summary()["kl_mean"] > 0
    assert written["summary"] == found.summary and written["summary"]["tokens"] == 62
    assert "62 tokens scored in 2 windows of 64" in text and "KL from the same weights in float32" in text


def test_without_a_base(cfg, tmp_path):
    cfg = replaced(cfg, perplexity=dataclasses.replace(cfg.own["perplexity"], base=None, stride=8))
    found, text, _ = play(cfg, tmp_path / "run")
    assert found.summary["kl_mean"] is None and "KL" not in text and found.summary["window"] == 68
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["window"] == found.summary["windows"] and "kl" not in last
    assert last["perplexity"] == pytest.approx(found.summary["perplexity"])


def test_neurons_that_are_left_out_are_judged_against_all_of_them(cfg, tmp_path):
    whole, _, _ = play(cfg, tmp_path / "whole")
    predictor = Choice("gate_threshold", {"share": 0.2})
    sparse = replaced(cfg, ffn=FfnSpec("predicted", tokens=64), predictor=predictor)
    found, _, written = play(sparse, tmp_path / "sparse")
    assert found.summary["perplexity"] != whole.summary["perplexity"]
    assert found.summary["kl_mean"] > 10 * whole.summary["kl_mean"]
    assert written["summary"]["ffn_label"] == "lossy against the dense model" and "ffn" not in whole.summary
    with pytest.raises(UserError, match="predictor=gate_threshold does nothing with ffn=null"):
        play(replaced(cfg, predictor=predictor), tmp_path / "none")
    with pytest.raises(UserError, match="kind=quant_table takes no ffn"):
        play(replaced(sparse, kind="quant_table", quant_table=QuantTableSpec()), tmp_path / "table")


def _read(row, rate, deviation):
    return {**row, "conditions": Conditions(rate, deviation).to_dict()}


def test_the_table_of_types(cfg, folder, tmp_path):
    spec = QuantTableSpec(types=("F32", "Q4_0"), files=(str(folder / "m.gguf"),), pp=0, tg=4, timings=1)
    found, text, written = play(replaced(cfg, kind="quant_table", quant_table=spec), tmp_path / "run")
    found = found.result
    rows = {row["type"]: row for row in found}
    assert list(rows) == ["F32", "Q4_0", "F16"] and written["summary"]["notes"] == []
    assert 0 <= rows["F32"]["kl_mean"] < rows["Q4_0"]["kl_mean"]
    assert rows["F32"]["bits_per_weight"] == 32 and rows["F16"]["bytes"] > rows["Q4_0"]["bytes"]
    assert all(row["decode"]["median"] > 0 and row["prompt"] is None for row in found)
    for row in found:
        assert row["conditions"]["read_bandwidth"] > 0
        assert row["conditions"]["plain_tokens_per_second"] == row["decode"]["median"]
    assert written["summary"]["conditions"]["read_bandwidth"] > 0
    apart, restless = doubts([_read(found[0], 20e9, 0.2), _read(found[1], 30e9, 0.0)])
    assert "read bandwidth 20.0 to 30.0 GB/s" in apart and restless.startswith(f"{found[0]['file']}: read bandw")
    assert len(written["summary"]["rows"]) == 3 and "62 tokens scored; KL from the model's own weights" in text


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"text": "none.txt"}, "perplexity.text=none.txt: cannot be read: No such file"),
        ({"context": 9999}, "a window takes 9999: give more text"),
        ({"stride": 65}, "perplexity.stride=65 must be at most perplexity.context=64"),
        ({"base": "none.gguf"}, "none.gguf: no such file"),
        ({"base": "bpe.gguf"}, "has 300 tokens and perplexity.base has 320"),
    ],
)
def test_mistakes(cfg, folder, tmp_path, monkeypatch, change, says):
    monkeypatch.chdir(folder)
    with pytest.raises(UserError, match=says.replace("(", "\\(")):
        play(replaced(cfg, perplexity=dataclasses.replace(cfg.own["perplexity"], **change)), tmp_path / "run")


def test_times_need_room_in_the_context(cfg, tmp_path):
    with pytest.raises(UserError, match=r"choose a smaller quant_table\.pp"):
        play(replaced(cfg, kind="quant_table", quant_table=QuantTableSpec(types=("Q8_0",), pp=9999)), tmp_path)


def test_an_unknown_type(cfg, tmp_path):
    with pytest.raises(UserError, match="cannot quantise to 'Q9'"):
        play(replaced(cfg, kind="quant_table", quant_table=QuantTableSpec(types=("Q9",))), tmp_path)
