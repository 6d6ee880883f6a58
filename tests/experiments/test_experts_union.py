"""`kind: experts_union` on tiny models: what is counted, what bytes predict, the files, and what is refused."""

import json

import pytest

from specsparse.engine.config import ACTIVATION_KEY, woken
from specsparse.errors import UserError
from specsparse.experiments import runner
from specsparse.experiments.kinds.experts_union import UnionSpec
from specsparse.experiments.settings import ModelSpec
from specsparse.testing import write_tiny_gguf
from tests.experiments.playing import GREEDY, changed, play, replaced, run_config


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("m")
    tiny = {"d_ff": 32, "n_layers": 1, "context_length": 128}
    write_tiny_gguf(folder / "experts.gguf", architecture="smallthinker", **tiny)
    write_tiny_gguf(folder / "dense.gguf", metadata={ACTIVATION_KEY: "relu"}, **tiny)
    text = [json.dumps({"id": str(i), "task": "t", "text": "abc abd abc" + " abc abd abc" * 5}) for i in range(2)]
    (folder / "prompts.jsonl").write_text("\n".join(text))
    return folder


@pytest.fixture
def cfg(files):
    spec = UnionSpec(
        rows=(1, 2), window=16, judged=2, random=8, drafters=("prompt_lookup",), trees=(),
        dense=str(files / "dense.gguf"), repeats=0,
    )  # fmt: skip
    return run_config(
        files / "experts.gguf", sampling=GREEDY, text=files / "prompts.jsonl", chat=False, max_tokens=12,
        kind="experts_union", union=spec,
    )  # fmt: skip


def test_curves_by_kind_of_rows(cfg, tmp_path):
    run, shown, record = play(cfg, tmp_path)
    found = {row["n"]: row for row in record["summary"]["rows"]}
    assert [*found] == [1, 2] and {*run.result} == {"chain", "random", "prompt_lookup"}
    one, two = found[1], found[2]
    assert one["experts"] == one["by_chance"] == 2 and one["rows_an_expert"] == 1
    assert one["v_active"] == one["v_woken"] == 1
    assert two["by_chance"] == pytest.approx(8 * woken(2 / 8, 2)) and 2 <= two["experts"] <= 4
    assert 0 < two["dense_idle"] < one["dense_idle"] < 1 and 0 < two["idle"] <= one["idle"] < 1
    assert two["by_overlap"] == pytest.approx(two["experts"])
    assert two["rows_an_expert"] == pytest.approx(2 * 2 / two["experts"])
    assert two["v_woken"] > 1 and two["v_measured"] is None
    assert run.result["prompt_lookup"][2].sets > 0
    assert run.result["chain"][2].sets == 2 * 16 // 2 and run.result["random"][2].sets == 8
    assert record["summary"]["methods"]["prompt_lookup"]["mean_acceptance_length"] >= 1
    assert len(record["summary"]["layers"]) == sum(len(unions) for unions in run.result.values())
    for part in ("by chance", "rows an expert", "of dense", "layer by layer", "acceptance length"):
        assert part in shown
    assert (tmp_path / "union.png").is_file() and (tmp_path / "layers.csv").is_file()


@pytest.mark.slow
def test_times_are_measured_beside_the_bytes(cfg, tmp_path):
    one, two = play(changed(cfg, "union", drafters=(), dense=None, repeats=1), tmp_path)[2]["summary"]["rows"]
    assert one["v_measured"] == 1 and two["v_measured"] > 0


def test_what_is_missing_is_said_before_anything_is_loaded(cfg, files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    short = write_tiny_gguf(tmp_path / "short.gguf", context_length=8)
    for wrong, says in (
        (replaced(cfg, model=ModelSpec("experts/experts.gguf")), r"\+experiment=train_experts makes it"),
        (replaced(cfg, model=ModelSpec(str(files / "dense.gguf"))), "has none"),
        *((changed(cfg, "union", rows=rows), "union.rows") for rows in ((2, 1), (1,), (), (1, 32))),
        (changed(cfg, "union", dense=str(files / "experts.gguf")), "union.dense"),
        (changed(cfg, "union", dense=str(short), rows=(1, 9)), "short.gguf reads 8 tokens"),
    ):
        with pytest.raises(UserError, match=says):
            runner.check(wrong)
