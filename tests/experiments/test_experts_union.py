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
        rows=(1, 2, 4), window=16, judged=2, random=8, drafters=("prompt_lookup",), trees=(),
        dense=str(files / "dense.gguf"), repeats=1,
    )  # fmt: skip
    return run_config(
        files / "experts.gguf", sampling=GREEDY, text=files / "prompts.jsonl", chat=False, max_tokens=12,
        kind="experts_union", union=spec,
    )  # fmt: skip


def test_curves_by_kind_of_rows(cfg, tmp_path):
    run, shown, record = play(cfg, tmp_path)
    found = {row["n"]: row for row in record["summary"]["rows"]}
    assert [*found] == [1, 2, 4] and {*run.result} == {"chain", "random", "prompt_lookup"}
    one, four = found[1], found[4]
    assert one["experts"] == one["by_chance"] == 2 and one["rows_an_expert"] == 1
    assert one["v_active"] == one["v_woken"] == one["v_measured"] == 1
    assert four["by_chance"] == pytest.approx(8 * woken(2 / 8, 4)) and 2 <= four["experts"] <= 8
    assert 0 < four["dense_idle"] < one["dense_idle"] < 1 and 0 < four["idle"] <= one["idle"] < 1
    assert found[2]["by_overlap"] == pytest.approx(found[2]["experts"])
    assert four["rows_an_expert"] == pytest.approx(4 * 2 / four["experts"])
    assert four["v_woken"] > 1 and four["v_measured"] > 0
    assert run.result["prompt_lookup"][4].sets > 0
    assert run.result["chain"][4].sets == 2 * 16 // 4 and run.result["random"][2].sets == 8
    assert record["summary"]["methods"]["prompt_lookup"]["mean_acceptance_length"] >= 1
    assert len(record["summary"]["layers"]) == sum(len(unions) for unions in run.result.values())
    for part in ("by chance", "rows an expert", "of dense", "layer by layer", "acceptance length"):
        assert part in shown
    assert (tmp_path / "union.png").is_file() and (tmp_path / "layers.csv").is_file()


def test_what_is_missing_is_said_before_anything_is_loaded(cfg, files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for wrong, says in (
        (replaced(cfg, model=ModelSpec("experts/experts.gguf")), r"\+experiment=train_experts makes it"),
        (replaced(cfg, model=ModelSpec(str(files / "dense.gguf"))), "has none"),
        (changed(cfg, "union", rows=(2, 1)), "union.rows"),
    ):
        with pytest.raises(UserError, match=says):
            runner.check(wrong)
