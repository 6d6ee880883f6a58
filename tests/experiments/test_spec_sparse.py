"""`kind: spec_sparse` on a tiny model: four cells, five with a cap, unions, files, and what is refused."""

import dataclasses
import json

import pytest

from specsparse.engine.config import ACTIVATION_KEY
from specsparse.errors import UserError
from specsparse.experiments import runner
from specsparse.experiments.kinds import spec_sparse
from specsparse.experiments.kinds.sparsity import SparsitySpec
from specsparse.experiments.kinds.spec_sparse import FfnReading, Joined, SparseCell
from specsparse.experiments.settings import FfnSpec, ModelSpec
from specsparse.kernels.native import cpu
from specsparse.measure import speedups
from specsparse.powerinfer.fewer import UnionPoint
from specsparse.runtime.metrics import Counters
from specsparse.support.registry import Choice
from specsparse.testing import write_tiny_gguf
from tests.experiments.playing import GREEDY, play, replaced, run_config


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("m")
    write_tiny_gguf(folder / "m.gguf", tokenizer="spm", vocab_size=300, n_layers=1, context_length=128)
    (folder / "prompts.jsonl").write_text(json.dumps({"id": "chat-1", "task": "chat", "text": "abc abc abc " * 8}))
    return folder


@pytest.fixture
def cfg(files):
    return run_config(
        files / "m.gguf", drafter="prompt_lookup", gamma=3, sampling=GREEDY, text=files / "prompts.jsonl", chat=False,
        max_tokens=12, repeats=1, kind="spec_sparse", ffn=FfnSpec("predicted", tokens=64, union_cap=0.3),
        predictor=Choice("gate_threshold", {"share": 0.3}), sparsity=SparsitySpec(window=16, judged=2),
    )  # fmt: skip


def test_five_cells(cfg, tmp_path):
    run, shown, written = play(cfg, tmp_path, width=160)
    found, record = run.result, written["summary"]
    assert list(found.cells) == ["plain dense", "plain sparse", "spec dense", "spec sparse", "spec sparse, capped"]
    dense, sparse, spec_dense, spec_sparse, capped = found.cells.values()
    assert found.as_promised and spec_dense.differing == spec_sparse.differing == 0
    assert dense.speedup.ratio_of_totals == 1.0 == dense.by_bytes and dense.read == spec_dense.read == 1.0
    assert sparse.read < spec_sparse.read < 1 and capped.read <= 0.31
    assert sparse.by_bytes > 1.0 and spec_dense.by_bytes == pytest.approx(12 / spec_dense.counters.num_rounds)
    assert [(p.batch, p.rows) for p in found.text] == [(1, 1), (1, 2), (1, 4), (1, 8), (2, 8)]
    assert sum(p.passes for p in found.seen) > 1
    assert found.quality["spec sparse, capped"].kl > found.quality["spec sparse"].kl > 0
    assert record["product"] == pytest.approx(found.combined["product"]) and "lossy" in record["ffn_label"]
    assert record["conditions"]["plain_tokens_per_second"] > 0 and record["repeats"]["done"] == 1
    faster = sparse.speedup.ratio_of_totals * spec_sparse.tokens_per_pass  # what plain sparse and the passes can give
    for more, impossible in ((1.0, False), (1.1, True)):
        cell = dataclasses.replace(spec_sparse, speedup=sparse.speedup._replace(ratio_of_totals=more * faster))
        lines = dataclasses.replace(found, cells={**found.cells, cell.name: cell}).warnings
        assert any(line.startswith("spec sparse: speed-up") for line in lines) == impossible
    assert "taken at: read bandwidth" in shown
    for part in ("rows of a pass", "product of the two", "lossy against the dense model", "by bytes"):
        assert part in shown
    for name in ("union.csv", "union.png", "cells.csv", "cells.png"):
        assert (tmp_path / name).is_file()


def test_a_figure_names_each_series_once():
    """Also where drafts of several sequences are verified together; each point is drawn once."""
    sizes = [(1, 1), (1, 4), (2, 8), (4, 16)]
    text = tuple(UnionPoint(rows, batch, 3, 0.2, 0.2 + rows / 50, 0.2 + rows / 40) for batch, rows in sizes)
    none = Counters()
    cells = {
        n: SparseCell(n, none, 1.0, speedups.speedup([1.0], [1.0], prompts=[0]), 1.1, 0.5, 0) for n in ("a", "b, c")
    }
    found = Joined(cells, text, text[:2], {}, promised=True, exact=False, labels={})
    for figure in (spec_sparse.unions(found, "t"), spec_sparse.cells_figure(found, "t")):
        (axes,) = figure.canvas().axes
        names = axes.get_legend_handles_labels()[1]
        assert len(names) >= 2 and len(names) == len(set(names))
        assert axes.get_title(loc="left") == "t"
    (union,) = spec_sparse.unions(found, "t").canvas().axes
    solid = [line for line in union.lines if line.get_linestyle() == "-"]
    drawn = [point for line in solid for point in zip(*line.get_data(), strict=True)]
    assert sorted(drawn) == [(p.rows, p.union) for p in text]


@pytest.mark.slow  # tests/powerinfer has the bits of a model that skips zeros
@pytest.mark.skipif(not cpu.available(), reason="zeros are skipped by the native kernels")
def test_a_model_that_skips_zeros_is_compared_with_the_dense_one(cfg, tmp_path):
    """Its bits are the dense model's; a pass of several rows reads all neurons."""
    path = write_tiny_gguf(
        tmp_path / "relu.gguf", tokenizer="spm", vocab_size=300, quant="Q4_0", context_length=128, n_layers=2,
        metadata={ACTIVATION_KEY: "relu"}, seed=1,
    )  # fmt: skip
    changes = {
        "model": ModelSpec(str(path)),
        "ffn": FfnSpec("predicted", union_cap=0.3),
        "predictor": Choice("oracle"),
        "drafter": Choice("prompt_lookup", {"ngram_min": 1}),
    }
    relu = replaced(cfg, **changes)
    run, shown, _ = play(relu, tmp_path / "run", width=160)
    found = run.result
    assert found.exact and found.as_promised
    assert not any(cell.differing for name, cell in found.cells.items() if "capped" not in name)
    sparse, spec_sparse = found.cells["plain sparse"], found.cells["spec sparse"]
    assert 0.2 < sparse.read < 0.8 and sparse.by_bytes > 1
    wide = sum(p.passes for p in found.seen if p.rows > 1)
    narrow = {p.rows: p for p in found.seen}[1]
    assert wide > 0
    assert spec_sparse.read == pytest.approx((wide + narrow.passes * narrow.union) / (wide + narrow.passes))
    capped = found.cells["spec sparse, capped"]
    assert capped.read <= 0.31 and capped.differing
    assert "spec sparse, capped: KL" in shown and "lossy against the dense model" in shown
    assert found.quality["spec sparse"].kl == 0 and "bit for bit the dense model" in shown


MISTAKES = {
    "no drafter": ({"drafter": Choice("none")}, "give drafter=prompt_lookup"),
    "no ffn": ({"ffn": FfnSpec("dense"), "predictor": Choice("none")}, "give ffn=predicted and a predictor"),
    "a cap elsewhere": ({"kind": "speed", "own": {}}, r"give \+experiment=spec_sparse"),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_mistakes_are_found_before_anything_is_loaded(cfg, what):
    changes, says = MISTAKES[what]
    with pytest.raises(UserError, match=says):
        runner.check(replaced(cfg, **changes))


def test_what_passes_read():
    """Wide passes of a model that skips zeros read everything, those of others their union."""
    points = [UnionPoint(1, 1, 3, 0.2, 0.2, 0.2), UnionPoint(4, 1, 1, 0.2, 0.6, 0.6)]
    gathers = FfnReading.from_points(points, (100, 1000), 2000, whole=lambda rows, kept: rows > 1 and kept > 0.2)
    assert gathers == pytest.approx((0.3, 400.0))
    skips = FfnReading.from_points(points, (100, 1000), 2000, whole=lambda rows, kept: rows > 1)
    assert skips == pytest.approx(((3 * 0.2 + 1) / 4, (3 * 300 + 2000) / 4))
    assert FfnReading.from_points([], (100, 1000), 2000, whole=lambda rows, kept: rows > 1) == (0.0, 0.0)
