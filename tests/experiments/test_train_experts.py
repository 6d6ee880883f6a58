"""`+experiment=train_experts` on few texts: stopped, started again, its file beside the function that was trained."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specsparse
from specsparse.errors import UserError
from specsparse.experiments import runner
from specsparse.experiments.kinds import train_experts
from specsparse.experiments.kinds.train_settings import TrainSpec
from specsparse.training import mixture, training_loop
from specsparse.training.corpus import Document
from specsparse.training.mixture import MixtureOptions
from tests.experiments.playing import changed, play, run_config, stop_at
from tests.tolerances import FORWARD_NMSE, nmse

OPTIONS = {
    "vocab": 300, "width": 32, "heads": 2, "ffn": 32, "layers": 1, "experts": 4, "chosen": 2, "steps": 12, "windows": 2,
    "rows": 64, "learning_rate": 0.02, "warmup": 2, "save_every": 6, "held_out_every": 3,
}  # fmt: skip


@pytest.fixture
def cfg(tmp_path):
    words = [f"{a} {b} is {b} {a}. " for a in ("alpha", "beta", "gamma") for b in ("one", "two")]
    for i in range(3):
        (tmp_path / f"{i}.txt").write_text("".join(words[(i + j) % 6] for j in range(60)))
    documents = [str(tmp_path / f"{i}.txt") for i in range(3)]
    train = TrainSpec(output=str(tmp_path / "out"), options={**OPTIONS, "documents": documents})
    return run_config("none.gguf", text=documents[0], chat=False, kind="train_experts", train=train)


@pytest.mark.slow
def test_a_mixture_learns(cfg, tmp_path):
    run, shown, record = play(cfg, tmp_path / "a")
    first, last = record["summary"]["curve"]
    assert (first["step"], last["step"]) == (6, 12) and last["tokens"] == 2 * first["tokens"] == 12 * 2 * 64
    assert last["loss"] < first["loss"] < np.log(300) and last["held_out"] < first["held_out"]
    assert 0 < last["rarest"] <= 1 <= last["balance"] + 0.05 and "experts_union" in shown
    assert "alpha" in (tmp_path / "out" / train_experts.PROMPTS).read_text()
    assert specsparse.load(run.result).tokenizer.encode("alpha", add_special=True)[0] == 0
    with pytest.raises(UserError, match="another held_out_every"):  # it would have another vocabulary
        play(changed(cfg, "train", options={**cfg.own["train"].options, "held_out_every": 2}), tmp_path / "b")


@pytest.mark.slow
def test_a_training_that_was_stopped_ends_as_one_that_was_not(cfg, tmp_path, monkeypatch):
    whole = play(cfg, tmp_path / "a")[0].result.read_bytes()
    again = changed(cfg, "train", output=str(tmp_path / "again"))
    saves = stop_at(monkeypatch, training_loop, "save_state", 1)
    with pytest.raises(KeyboardInterrupt):
        play(again, tmp_path / "b")
    assert play(again, tmp_path / "b")[0].result.read_bytes() == whole and len(saves) == 2
    with pytest.raises(UserError, match="holds a training with another mixture"):
        play(changed(cfg, "train", options={**cfg.own["train"].options, "ffn": 48}), tmp_path / "c")


def test_the_file_runs_as_it_was_trained(tmp_path):
    names = {"vocab", "width", "heads", "ffn", "layers", "experts", "chosen", "rows"}
    options = MixtureOptions(**{name: value for name, value in OPTIONS.items() if name in names})
    weights, keys = mixture.first_weights(options), mixture.fitted_vocabulary([Document("a few words")], 300)
    path = mixture.write_mixture(options, weights, keys, tmp_path / "m.gguf", "f32")
    model = specsparse.load(path, kv_dtype="f32")
    assert model.config == options.config
    ids = np.random.default_rng(0).integers(0, 300, (2, 24))
    run = jax.jit(partial(mixture.rows_of, options.config))
    rows_RD, balance_L, share_LE = run(weights, jnp.asarray(ids, jnp.int32))
    trained = np.asarray(rows_RD @ weights.embedding.T).reshape(2, 24, -1)
    for window, logits in zip(ids, trained, strict=True):  # which does not see the other one
        found = model.logits(window)
        assert nmse(found, logits) <= FORWARD_NMSE["f32"]
        np.testing.assert_array_equal(found.argmax(axis=1), logits.argmax(axis=1))
    np.testing.assert_allclose(share_LE.sum(axis=1), 1, rtol=1e-6)
    assert (balance_L > 0.9).all()


def test_texts_are_this_packages_sources():
    documents = mixture.source_documents()
    assert any("def source_documents" in d.text for d in documents) and all(d.text for d in documents)


def test_mistakes_are_said_before_anything_is_read(cfg, tmp_path):
    for option, value in (("chosen", 5), ("ffn", 20), ("width", 40), ("quantise", "Q9"), ("documents", ["none.txt"])):
        with pytest.raises(UserError, match=option if option != "quantise" else "Q9"):
            runner.check(changed(cfg, "train", options={**OPTIONS, option: value}))


def test_a_text_that_is_too_short_leaves_no_folder(cfg, tmp_path):
    with pytest.raises(UserError, match=r"train\.rows"):
        play(changed(cfg, "train", options={**cfg.own["train"].options, "rows": 9999}), tmp_path / "a")
    assert not (tmp_path / "out").exists()
