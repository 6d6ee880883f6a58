"""`+experiment=train_predictors` end to end on a tiny planted model: stopped, started again, judged, exported."""

import dataclasses
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from specsparse.errors import UserError
from specsparse.experiments import runner, sparse_model
from specsparse.experiments.kinds import train_predictors
from specsparse.experiments.kinds.train_settings import TrainSpec
from specsparse.experiments.settings import FfnSpec, ModelSpec
from specsparse.powerinfer.model_files import read_predictor, read_threshold
from specsparse.predictors import FFN, get_predictor
from specsparse.predictors.evaluate import with_weights
from specsparse.predictors.fit_mlp import load_pairs, save_predictors
from specsparse.predictors.scored import as_mlp, factorise, mlp_weights, normed_gate
from specsparse.support.registry import Choice
from specsparse.testing import write_tiny_gguf
from tests.cells import cells
from tests.experiments.playing import (
    changed,
    play,
    quiet_context,
    random_texts,
    replaced,
    run_config,
    settings,
    stop_at,
)
from tests.predictors.planted import planted_model

OPTIONS = {"rank": 16, "epochs": 3, "batch": 64}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return planted_model(tmp_path_factory.mktemp("model"), d_ff=192)


@pytest.fixture
def cfg(model, tmp_path):
    train = TrainSpec(tokens=640, window=32, judged=2, output=str(tmp_path / "out"), options=OPTIONS)
    text = random_texts(tmp_path / "text.jsonl", 20, 120)
    predictor = Choice("mlp")
    cfg = run_config(model.path, text=text, kind="train_predictors", predictor=predictor, train=train)
    return changed(cfg, "model", activation="relu")  # as the model was loaded


def test_a_run_that_was_stopped_ends_as_one_that_was_not(cfg, model, tmp_path, monkeypatch):
    whole, text, record = play(
        changed(cfg, "train", compare=("signbit", "random", "mlp")), tmp_path / "a", model=model
    )
    assert [e.name for e in whole.result] == ["mlp", "signbit", "random"]
    mlp, signbit, random = whole.result
    assert mlp.mean.recall > 0.9 and mlp.mean.precision > 0.5 and mlp.mean.kept < 0.6
    assert signbit.mean.recall == pytest.approx(mlp.mean.recall, abs=0.05)
    assert signbit.mean.kept > mlp.mean.kept and random.model.kl > mlp.model.kl
    for part in (
        "mlp, layer by layer",
        "error",
        "dense perplexity",
        "predictors.png",
        "for PowerInfer's converter",
    ):
        assert part in text
    assert len(record["summary"]["epochs"]) == 2 and len(record["summary"]["epochs"][0]) == 3
    for name in ("predictors.csv", "predictors.png"):
        assert (tmp_path / "a" / name).is_file()

    saves = stop_at(monkeypatch, train_predictors, "save_state", 2, 4)  # in the first layer, and in the second
    again = changed(cfg, "train", output=str(tmp_path / "again"))
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            play(again, tmp_path / "b", model=model)
    found, _, _ = play(again, tmp_path / "b", model=model)
    assert len(saves) == 6  # no epoch twice
    for name in ("predictors.safetensors", "layer_0.safetensors", "layer_1.safetensors"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    assert found.result[0].layers == whole.result[0].layers and found.result[0].model == whole.result[0].model

    pairs, threshold = load_pairs(tmp_path / "out" / "predictors.safetensors")
    folder = tmp_path / "out" / "powerinfer"
    assert threshold == 0.0 == read_threshold(folder)
    for i, (fc1, fc2) in enumerate(pairs):
        exported = read_predictor(folder, i, d_model=model.config.d_model, d_ff=model.config.d_ff)
        np.testing.assert_array_equal(exported.fc1.astype(np.float16), fc1)
        np.testing.assert_array_equal(exported.fc2.astype(np.float16), fc2)
    with pytest.raises(UserError, match=r"holds a training with another options: give train.output"):
        play(changed(cfg, "train", options={**OPTIONS, "rank": 8}), tmp_path / "c", model=model)


def test_a_retrained_model_does_not_take_the_residuals_of_the_old_one(cfg, model, tmp_path):
    shape = {"tokenizer": "spm", "n_layers": 2, "context_length": 64, "d_ff": 192}
    other = write_tiny_gguf(tmp_path / model.path.name, seed=1, **shape)
    assert other.stat().st_size == model.path.stat().st_size
    text = np.zeros((2, 8), np.int32)
    claim = partial(train_predictors._claim, tmp_path / "out")
    coarse = settings(replaced(cfg, model=ModelSpec(str(model.path), kv_dtype="f16")))
    cfg = settings(cfg)
    claim(cfg, model, text)
    claim(cfg, model, text)
    for changes in ((cfg, dataclasses.replace(model, path=other)), (coarse, model)):
        with pytest.raises(UserError, match="holds a training with another model"):
            claim(*changes, text)


def test_the_predictors_of_a_powerinfer_file_are_judged_as_they_are(cfg, model, tmp_path):
    svd = get_predictor("svd", FFN.from_config(model.config, model.kernels), rank=8)
    pairs = [as_mlp(*factorise(normed_gate(layer), svd.rank)) for layer in model.params.layers]
    own = dataclasses.replace(
        model,
        config=dataclasses.replace(model.config, predictor_ranks=(16, 16)),
        params=with_weights(model.params, [mlp_weights(*pair) for pair in pairs]),
    )
    found, text, _ = play(cfg, tmp_path / "a", model=own)
    assert found.result[0].name == "mlp" and found.result[0].mean.recall > 0.95
    assert "predictors of its own" in text and not (tmp_path / "out").exists()
    none = replaced(cfg, predictor=Choice("mlp", {"threshold": 1e9}))
    assert play(none, tmp_path / "none", model=own)[0].result[0].mean.kept == 0


def test_a_threshold_of_the_config_goes_before_the_files(cfg, model, tmp_path):
    file = tmp_path / "p.safetensors"
    save_predictors(file, [as_mlp(*factorise(normed_gate(layer), 8)) for layer in model.params.layers])
    x_RD, n, kept = jnp.asarray(np.random.default_rng(0).normal(size=(4, 64)), jnp.float32), jnp.asarray([4]), []
    for options in ({}, {"threshold": 1e9}):
        ffn, predictor = FfnSpec("predicted", weights=str(file)), Choice("mlp", options)
        sparse = sparse_model.sparse_of(settings(replaced(cfg, ffn=ffn, predictor=predictor)), quiet_context(), model)
        kept.append(int(sparse.predictor.keep(sparse.weights[0], model.params.layers[0], x_RD, n).sum()))
    assert kept[0] > 0 == kept[1]


@pytest.mark.parametrize("name", cells(["gate_threshold", "sequence"], ["gate_threshold"]))
def test_what_needs_no_training_is_only_judged(cfg, model, tmp_path, name):
    cfg = replaced(cfg, predictor=Choice(name, {"share": 0.3}))
    found, _, record = play(cfg, tmp_path / "a", model=model)
    (only,) = found.result
    assert only.name == name and found.objective == -only.model.kl and record["summary"]["label"] == "lossy"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"options": {"rnak": 3}}, "train.rnak is no option of kind=train_predictors; did you mean rank"),
        ({"options": {"rank": 2.5}}, r"train.rank=2.5 must be a whole number"),
        ({"options": {"epochs": 0}}, "train.epochs=0 must be a whole number of at least 1"),
        ({"compare": ("svds",)}, "did you mean svd"),
    ],
)
def test_mistakes_are_found_before_anything_is_loaded(cfg, changes, message):
    with pytest.raises(UserError, match=message):
        runner.check(changed(cfg, "train", **changes))


def test_a_predictor_and_enough_text_are_needed(cfg, model, tmp_path):
    with pytest.raises(UserError, match="give predictor=mlp"):
        runner.check(replaced(cfg, predictor=Choice("none")))
    for option in ("share", "recall"):
        with pytest.raises(UserError, match=rf"predictor\.{option}"):
            runner.check(replaced(cfg, predictor=Choice("mlp", {option: 0.3})))
    with pytest.raises(UserError, match=r"fewer train\.judged"):
        play(changed(cfg, "train", judged=500), tmp_path / "a", model=model)
