"""`kind: sparsity` on tiny models: points, files, a sweep's table, and what is refused."""

import csv
import dataclasses
import io
import json

import pytest
from hydra import compose, initialize_config_dir
from rich.console import Console

from specsparse.errors import UserError
from specsparse.experiments import runner, sweeps
from specsparse.experiments.kinds.sparsity import Point, SparsitySpec, show_sweep
from specsparse.experiments.settings import FfnSpec, ModelSpec, from_omegaconf
from specsparse.predictors.evaluate import Cost, Evaluation, LayerQuality, ModelQuality
from specsparse.support.files import conf_dir, to_json
from specsparse.support.registry import Choice
from specsparse.testing import write_tiny_gguf
from tests.experiments import playing
from tests.experiments.playing import replaced, run_config
from tests.powerinfer.tiny import write_tiny_powerinfer

TINY = {"tokenizer": "spm", "vocab_size": 300, "n_layers": 1, "context_length": 128}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("m")
    write_tiny_gguf(folder / "dense.gguf", **TINY)
    write_tiny_powerinfer(folder / "m.powerinfer.gguf", **TINY)
    (folder / "prompts.jsonl").write_text(json.dumps({"text": "abc def ghi " * 20}))
    return folder


@pytest.fixture
def cfg(files):
    return run_config(
        files / "dense.gguf", text=files / "prompts.jsonl", kind="sparsity", ffn=FfnSpec("predicted", tokens=64),
        predictor=Choice("gate_threshold"),
        sparsity=SparsitySpec(values=(1.0, 0.5, 0.2), window=32, judged=2, tokens=4, repeats=2),
    )  # fmt: skip


def play(cfg, directory):
    found, text, record = playing.play(cfg, directory)
    assert found.objective == -found.result[-1].quality.model.kl
    return found.result, text, record


@pytest.mark.slow  # below, thresholds of such a file by the same kind
def test_the_experiment_of_relullama_runs_on_a_tiny_file(files, tmp_path):
    own = [f"model.path={files / 'm.powerinfer.gguf'}", f"data.source={files / 'prompts.jsonl'}", "data.tasks=null"]
    few = ["sparsity.window=32", "sparsity.judged=1", "sparsity.tokens=0"]
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        cfg = from_omegaconf(compose("config", ["+experiment=powerinfer_relullama_7b", *own, *few]))
    found, _, record = play(cfg, tmp_path)
    assert [point.value for point in found] == [0.0, 0.5] and record["summary"]["vary"] == "threshold"


@pytest.mark.slow  # tests/predictors judges them beside each other
def test_predictors_beside_each_other(cfg, tmp_path):
    relu = dataclasses.replace(cfg.model, activation="relu")
    many = dataclasses.replace(cfg.own["sparsity"], values=(), predictors=("oracle", "svd", "signbit"), recall=0.6)
    found, text, record = play(replaced(cfg, model=relu, sparsity=many), tmp_path / "a")
    assert [p.value for p in found] == ["oracle", "svd", "signbit"] == [p.quality.name for p in found]
    oracle, svd, signbit = (p.quality for p in found)
    assert oracle.model.kl < 1e-6 and oracle.mean.recall == 1 and oracle.mean.kept < 0.7
    assert svd.model.kl > 1e-6 and all(abs(q.mean.recall - 0.6) < 0.15 for q in (svd, signbit))
    assert "oracle, svd, signbit" in text and record["summary"]["vary"] == "predictor"
    rows = list(csv.DictReader((tmp_path / "a" / "sparsity.csv").open()))
    assert [r["predictor"] for r in rows] == ["oracle", "svd", "signbit"]
    assert (tmp_path / "a" / "sparsity.png").is_file()
    with pytest.raises(UserError, match=r"sparsity\.predictors needs ffn=predicted and no sparsity\.values"):
        runner.check(replaced(cfg, sparsity=dataclasses.replace(many, values=(0.5,))))


def test_fewer_neurons_cost_quality_and_save_bytes(cfg, tmp_path):
    found, text, record = play(cfg, tmp_path / "a")
    whole, half, fifth = found
    assert whole.quality.mean.kept == 1.0 and whole.quality.model.kl < 1e-6
    for point in (half, fifth):
        assert point.quality.mean.kept == pytest.approx(point.value, abs=0.12)
    assert 0 < half.quality.model.kl < fifth.quality.model.kl
    assert whole.by_bytes == pytest.approx(1, abs=1e-3) and whole.by_bytes < half.by_bytes < fifth.by_bytes < 1.5
    assert all((p.speedup.prompts, p.speedup.pairs) == (1, 2) and p.tokens_per_second > 0 for p in found)
    assert all(p.speedup.low is None and p.speedup.timing_low < p.speedup.timing_high for p in found)
    assert "(lossy)" in text and record["summary"]["label"] == "lossy" and len(record["summary"]["points"]) == 3
    taken = record["summary"]["conditions"]
    assert taken["read_bandwidth"] > 0 and taken["plain_tokens_per_second"] == found[0].dense_tokens_per_second
    rows = list(csv.DictReader((tmp_path / "a" / "sparsity.csv").open()))
    assert [float(r["share"]) for r in rows] == [1.0, 0.5, 0.2] and (tmp_path / "a" / "sparsity.png").is_file()


def test_thresholds_of_a_powerinfer_file_and_the_table_of_a_sweep(cfg, files, tmp_path):
    base = replaced(
        cfg, model=ModelSpec(str(files / "m.powerinfer.gguf")), ffn=FfnSpec("powerinfer"), predictor=Choice("none")
    )
    kept = []
    for number, value in enumerate((0.0, 1e9)):
        spec = SparsitySpec("threshold", (value,), window=32, judged=2, tokens=0)
        composed = {"sparsity": {"values": [value]}}
        found, _, _ = play(replaced(base, sparsity=spec, composed=composed), tmp_path / str(number))
        (point,) = found
        kept.append(point.quality.mean.kept)
        assert point.speedup is None and point.quality.name == "mlp"
    assert 0.3 < kept[0] < 0.7 and kept[1] == 0.0
    out = io.StringIO()
    sweeps.show(tmp_path, Console(file=out, width=200))
    heading, first = out.getvalue().splitlines()[1].split(), out.getvalue().splitlines()[3].split()
    assert heading[:2] == ["values", "kept"] and first[0] == "[0.0]"
    assert "[1000000000.0]" in out.getvalue() and f"records: {tmp_path}" in out.getvalue()


def test_predictors_by_share_make_one_table(cfg, files, tmp_path):
    """By a smaller dense model, by nothing (a bound), and by a PowerInfer file's own predictors."""
    relu, file = dataclasses.replace(cfg.model, activation="relu"), ModelSpec(str(files / "m.powerinfer.gguf"))
    points = {}
    for number, (name, model, values) in enumerate(
        (("hot", relu, (0.5, 0.25)), ("oracle", relu, (0.25,)), ("mlp", file, (0.25,)))
    ):
        spec = SparsitySpec(values=values, window=32, judged=1, tokens=4, repeats=1)
        composed = {"model": {"path": model.path}, "predictor": {"name": name}}
        changes = {"model": model, "predictor": Choice(name), "sparsity": spec, "composed": composed}
        points[name], _, record = play(replaced(cfg, **changes), tmp_path / str(number))
        assert [point["value"] for point in record["summary"]["points"]] == [*values]
        assert all(p.quality.mean.kept == pytest.approx(p.value, abs=0.2) for p in points[name])
    hot, (oracle,), (mlp,) = points.values()
    assert oracle.speedup is None and oracle.by_bytes > 1
    assert all(p.tokens_per_second > 0 for p in (*hot, mlp)) and hot[1].by_bytes > hot[0].by_bytes > 1
    assert oracle.quality.mean.energy > hot[1].quality.mean.energy > 0
    out = io.StringIO()
    sweeps.show(tmp_path, Console(file=out, width=200))
    lines = (tmp_path / "sparsity.md").read_text().splitlines()
    assert lines[0].startswith("| model | predictor | value | kept | recall |") and len(lines) == 2 + 4
    assert lines[4].startswith("| dense.gguf | oracle | 0.25 |") and lines[4].endswith("| - | - | - |")
    rows = list(csv.DictReader((tmp_path / "sparsity.csv").open()))
    assert [r["predictor"] for r in rows] == ["hot", "hot", "oracle", "mlp"]
    assert (tmp_path / "sparsity.png").is_file()


def test_settings_of_one_predictor_are_lines_of_their_own_and_numbers_that_are_none_are_dashes(tmp_path):
    nan = float("nan")
    layer, model = LayerQuality(0.3, 0.5, 0.9, 0.6, nan, nan), ModelQuality(8, nan, 9.0, nan, 1.0)
    points = [Point(v, Evaluation("svd", (), layer, model, Cost(1, 2, 4, 0.1, 0.2)), 1.2).to_dict() for v in (0.5, 0.3)]
    summary = json.loads(to_json({"vary": "share", "has_zeros": True, "points": points}))
    found = [{
        "name": "s", "summary": summary,
        "config": {"model": {"path": "m.gguf"}, "predictor": {"name": "svd", "rank": rank}, "stream": rank > 8},
    } for rank in (8, 64)]  # fmt: skip
    show_sweep(tmp_path, found, sweeps.swept(found), Console(file=io.StringIO(), width=200))
    rows = list(csv.DictReader((tmp_path / "sparsity.csv").open()))
    assert [(r["line"], r["rank"]) for r in rows] == 2 * [("svd, rank 8", "8")] + 2 * [("svd, rank 64", "64")]
    assert "| 0.3 | 50.0% | 90.0% | - | - | - | - | 100.0% |" in (tmp_path / "sparsity.md").read_text()


MISTAKES = {
    "no ffn": ({"ffn": FfnSpec("oracle"), "predictor": Choice("none")}, "kind=sparsity judges ffn=predicted"),
    "a share of a file": ({"ffn": FfnSpec("powerinfer"), "predictor": Choice("none")}, r"sparsity\.vary=threshold"),
    "no option": ({"sparsity": SparsitySpec("shaer", (0.5,))}, r"predictor\.shaer is no option of gate_threshold"),
    "two rules": (
        {"predictor": Choice("svd", {"recall": 0.9}), "sparsity": SparsitySpec("share", (0.5,))},
        r"predictor\.recall and predictor\.share both",
    ),
    "no share": ({"sparsity": SparsitySpec("share", (1.5,))}, r"share=1\.5 must be a number above 0"),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_mistakes_are_found_before_anything_is_loaded(cfg, what):
    changes, says = MISTAKES[what]
    with pytest.raises(UserError, match=says):
        runner.check(replaced(cfg, **changes))
