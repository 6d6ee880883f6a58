"""A predictor's mask in every FFN: the config that asks for it, the model it makes, and what it refuses."""

import json

import numpy as np
import pytest

import specsparse
from specsparse.errors import UserError
from specsparse.experiments import runner, sparse_model
from specsparse.experiments.settings import FfnSpec
from specsparse.measure import machine
from specsparse.models import catalogue
from specsparse.powerinfer.fewer import gated
from specsparse.predictors import FFN, get_predictor
from specsparse.predictors.evaluate import fit_layers
from specsparse.predictors.fit_mlp import save_predictors
from specsparse.support.registry import Choice
from specsparse.testing import write_tiny_gguf
from tests.experiments.playing import GREEDY, play, quiet_context, replaced, run_config
from tests.tolerances import nmse

IDS = [1, 5, 9, 200, 17, 42, 42, 8]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_tiny_gguf(tmp_path_factory.mktemp("m") / "m.gguf", tokenizer="spm", vocab_size=300, n_layers=2)


@pytest.fixture(scope="module")
def relu(path):
    return specsparse.load(path, activation="relu")


def with_predictor(model, name, **options):
    predictor = get_predictor(name, FFN.from_config(model.config, model.kernels), **options)
    return gated(model, predictor, fit_layers(predictor, model.params.layers, None))


def test_a_perfect_predictor_changes_nothing_and_a_bad_one_does(relu):
    dense = relu.logits(IDS)
    assert nmse(with_predictor(relu, "oracle").logits(IDS), dense) < 1e-10
    assert nmse(with_predictor(relu, "random", share=0.5).logits(IDS), dense) > 1e-3
    assert np.array_equal(relu.logits(IDS), dense)  # the model it came from is as it was


def test_rows_do_not_depend_on_their_batch(relu):
    """C1 with a mask: also greedy speculation writes plain decoding's tokens."""
    model = with_predictor(relu, "signbit")
    assert np.array_equal(model.logits(IDS[:3]), model.logits(IDS)[:3])
    plain = specsparse.generate(model, IDS, max_tokens=12, ignore_eos=True)
    drafted = specsparse.generate(model, IDS, max_tokens=12, ignore_eos=True, drafter="prompt_lookup")
    assert plain.token_ids == drafted.token_ids


@pytest.fixture
def cfg(path, tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "read_bandwidth", lambda: 40e9)
    text = tmp_path / "prompts.jsonl"
    text.write_text(json.dumps({"id": "chat-1", "task": "chat", "text": "abc abc abc"}))
    return run_config(
        path, drafter="prompt_lookup", gamma=3, sampling=GREEDY, text=text, chat=False, max_tokens=12, stream=False,
        time_split=0, predictor=Choice("gate_threshold", {"share": 0.4}), ffn=FfnSpec("predicted", tokens=64),
    )  # fmt: skip


def test_an_experiment_runs_on_a_gated_model(cfg, tmp_path):
    found, text, written = play(cfg, tmp_path / "run")
    assert found.as_promised and found.result.identity.differing == 0
    assert written["method"]["ffn"] == "predicted: gate_threshold(share=0.4)"
    assert "lossy against the dense model" in text


def test_the_share_of_a_fitted_predictor_is_kept(cfg, path):
    model = sparse_model.load(cfg, quiet_context())
    assert model.ffn == "predicted" and model.rule == "gate_threshold(share=0.4)"
    text = sparse_model.calibration_text(cfg, model)
    assert text.shape == (1, 64) and cfg.ffn.tokens == text.size
    weights = [layer.sparse.predictor for layer in model.params.layers]
    assert len({float(w.threshold) for w in weights}) == 2  # one a layer


def test_trained_predictors_come_from_their_file_or_travel_with_the_model(cfg, path, tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    config = specsparse.load(path).config
    d, f = config.d_model, config.d_ff
    pairs = [(rng.normal(size=(8, d)).astype(np.float32), rng.normal(size=(f, 8)).astype(np.float32)) for _ in range(2)]
    file = tmp_path / "p.safetensors"
    save_predictors(file, pairs)
    cfg = replaced(cfg, predictor=Choice("mlp"), ffn=FfnSpec("predicted", weights=str(file)), drafter=Choice("none"))
    runner.check(cfg)
    model = sparse_model.load(cfg, quiet_context())
    assert model.params.layers[1].sparse.predictor.fc1.shape == (8, d)
    monkeypatch.setattr(
        catalogue, "companion", lambda name, what: file if (name, what) == (str(path), "predictors") else None
    )
    travelling = replaced(cfg, ffn=FfnSpec("predicted"))
    runner.check(travelling)
    other = sparse_model.load(travelling, quiet_context())
    assert np.array_equal(other.logits(IDS), model.logits(IDS))
    save_predictors(file, pairs[:1])
    with pytest.raises(UserError, match=r"is for 1 layers of .*, and .* has 2 layers of"):
        sparse_model.load(cfg, quiet_context())


MISTAKES = {
    "no predictor": ({"predictor": Choice("none")}, "ffn=predicted needs a predictor"),
    "no ffn": ({"ffn": FfnSpec()}, "predictor=gate_threshold does nothing with ffn=null: give ffn=predicted"),
    "teal": ({"predictor": Choice("teal")}, "no kernel skips: judge it with"),
    "sequence": ({"predictor": Choice("griffin")}, "anew for each prompt"),
    "an option": ({"predictor": Choice("signbit", {"alhpa": 2.0})}, "predictor.alhpa"),
    "no weights": ({"predictor": Choice("mlp")}, r"is trained: .* give ffn\.weights="),
    "no file": ({"predictor": Choice("mlp"), "ffn": FfnSpec("predicted", weights="x.st")}, "no such file"),
    "a file for nothing": ({"ffn": FfnSpec("predicted", weights="x.st")}, "predictor=gate_threshold reads no file"),
    "a threshold": ({"ffn": FfnSpec("predicted", threshold=0.5)}, "belong to ffn=powerinfer"),
    "another kind": ({"kind": "certify", "predictor": Choice("none")}, "kind=certify takes no ffn"),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_mistakes_are_found_before_anything_is_loaded(cfg, what):
    changes, says = MISTAKES[what]
    with pytest.raises(UserError, match=says):
        runner.check(replaced(cfg, **changes))
