"""SiLU to ReLU: the function that is trained, layers rebuilt, a model distilled, `+experiment=relufy` end to end."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as GGML
from gguf import quants
from hydra import compose, initialize_config_dir

import specsparse
from specsparse import run
from specsparse.engine.gguf.reader import open_gguf
from specsparse.errors import UserError
from specsparse.experiments import runner
from specsparse.experiments.kinds import relufy, train_drafter, train_settings
from specsparse.experiments.kinds.train_settings import TrainSpec
from specsparse.experiments.settings import from_omegaconf
from specsparse.kernels.packing.dequant import embed_rows
from specsparse.models.convert.edit import apply_delta, tensors_hash
from specsparse.support.files import save_state
from specsparse.testing import write_tiny_gguf
from specsparse.training import corpus, relu, training_loop
from specsparse.training.corpus import Features
from tests.cells import cells
from tests.experiments import playing
from tests.experiments.playing import changed, run_config, settings, stop_at

OPTIONS = {
    "batch": 4, "answer": 24, "prompt_tokens": 300, "temperatures": [0.0, 0.9], "held_out": 2, "judge_every": 2,
    "layer_tokens": 700, "layer_batch": 64, "steps": 4, "rows": 384, "candidates": 96, "warmup": 1, "share": 0.4,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", quant="F32", context_length=512, n_layers=2)
    return specsparse.load(path)


@pytest.fixture(scope="module")
def texts(model, tmp_path_factory):
    options = corpus.DataOptions(batch=4, batches=1, answer=24, prompt_tokens=300, temperatures=(0.0, 0.9), chat=False)
    return Features(model, (model.config.n_layers,)).of(corpus.make_shard(model, options, 0))


@pytest.fixture(scope="module")
def distiller(model):
    return relu.Distiller(model, relu.DistillOptions(steps=40, rows=384, candidates=96, rate=2e-3, share=0.4))


def test_rows_are_the_engines(model, texts):
    """Several texts in one window give the rows that each gives alone, as the engine computes them."""
    assert len(texts[0].tokens) + len(texts[1].tokens) <= 384
    packed = relu.pack_texts(texts[:2], 384)
    x = embed_rows(model.params.embedding, jnp.asarray(packed.tokens))
    found, shares = relu.forward(
        model.config,
        relu.frozen_layers(model, 384),
        relu.ffns_of(model),
        x,
        packed,
        jax.nn.silu,
        lambda z, a: a.shape[1],
    )
    used = packed.text >= 0
    assert used.sum() == len(texts[0].tokens) + len(texts[1].tokens)
    np.testing.assert_allclose(np.asarray(found)[used], packed.hidden[used], rtol=0, atol=2e-2)
    assert list(np.asarray(shares)) == [model.config.d_ff] * 2


OTHERS = {
    "qwen3": {"architecture": "qwen3", "head_dim": 32, "n_layers": 1},
    "smollm3": {"architecture": "smollm3", "n_layers": 4},
    "window": {"window": 6, "n_layers": 1},
}


@pytest.mark.parametrize("name", cells(OTHERS, ["smollm3", "window"]))  # Qwen3 is in test_forms.py
def test_rows_of_other_architectures_are_the_engines(tmp_path, name):
    """Norms of heads, layers without RoPE and windows: what the table of architectures says of a layer."""
    path = write_tiny_gguf(tmp_path / "m.gguf", quant="F32", context_length=64, **OTHERS[name])
    other = specsparse.load(path, kv_dtype="f32")
    ids = np.random.default_rng(0).integers(3, 300, 44).astype(np.int32)
    texts = [corpus.Text(ids[:24], 4), corpus.Text(ids[24:], 3)]
    packed = relu.pack_texts(Features(other, (other.config.n_layers,)).of(texts), 48)
    frozen, x = relu.frozen_layers(other, 48), embed_rows(other.params.embedding, jnp.asarray(packed.tokens))
    run = jax.jit(lambda w, f, x: relu.forward(other.config, w, f, x, packed, jax.nn.silu, lambda z, a: 0)[0])
    found = np.asarray(run(frozen, relu.ffns_of(other), x))[:44]
    assert np.square(found - packed.hidden[:44]).sum() < 1e-8 * np.square(packed.hidden[:44]).sum()


def planted(n=3000, D=16, F=192):
    """An FFN with most gates a little below 0, and inputs of which one is nearly constant, as a norm's outputs have."""
    rng = np.random.default_rng(0)
    gate, up, down = (rng.normal(size=s) * 0.3 for s in ((F, D), (F, D), (D, F)))
    gate[:, 0], gate[:, 1:] = -0.125, gate[:, 1:] / 2
    z = rng.normal(size=(n, D))
    z[:, 0] = z[:, 0] / 20 + 4
    return relu.FfnMatrices(*(jnp.asarray(w, jnp.float32) for w in (gate, up, down))), z.astype(np.float16)


def test_what_is_nearly_constant_is_a_bias():
    z = jnp.asarray(planted()[1], jnp.float32)
    assert float(jnp.mean((z @ relu.constant_direction(z) - 1) ** 2)) < 5e-3


def test_a_count_that_can_be_differentiated():
    """Near the share, whatever the size of the activations, and steep for those near 0 alone."""
    a = np.where(np.arange(200) % 4, 0.0, np.linspace(0.2, 2.0, 200)).astype(np.float32)[None]
    counted, sloping = (
        jax.jit(relu.nearly_counted),
        jax.jit(jax.grad(lambda a: relu.nearly_counted(a)[0])),
    )
    for size in (1e-3, 1.0, 1e3):
        np.testing.assert_allclose(counted(a * np.float32(size)), 0.25, atol=0.04)
    slope = np.asarray(sloping(a))[0, ::4]
    assert (slope > 0).all() and slope[0] > 10 * slope[-1]
    assert np.isfinite(sloping(np.zeros((1, 8), np.float32))).all()


@pytest.mark.parametrize(("linear", "limit"), cells([(0.0, 0.15), (1 / 12, 0.07)], [(1 / 12, 0.07)]))
def test_a_layer_is_rebuilt(linear, limit):
    """Linear neurons take what ReLU leaves over; the share is what was asked for, on tokens not seen before."""
    ffn, z = planted()
    plain = relu.judge(ffn, ffn, z[2000:])
    options = relu.LayerOptions(share=0.3, linear=linear, passes=4, layer_batch=100, layer_rate=2e-3)
    found = relu.judge(relu.Rebuilder(options, 2000).rebuild(ffn, z[:2000]), ffn, z[2000:])
    assert found.error < limit * plain.error and abs(found.share - 0.3) < 0.05


def test_rounding_is_the_quantisers(distiller):
    rng = np.random.default_rng(0)
    w = rng.normal(size=(6, 96)).astype(np.float32)
    w[0, :32] = 0
    want = quants.dequantize(quants.quantize(w, GGML.Q4_0), GGML.Q4_0)
    np.testing.assert_array_equal(np.asarray(jax.jit(relu.rounded_q4_0)(w)), want)
    grads = jax.jit(jax.grad(lambda x: jnp.sum(relu.straight_through(x) * 3)))(w)
    assert (np.asarray(grads) == 3).all()


def test_the_original_is_at_no_distance_from_itself(model, texts):
    exact = relu.Distiller(model, relu.DistillOptions(rows=384, rounded=False), act=jax.nn.silu)
    found = exact.judge(relu.ffns_of(model), texts[:2])
    assert (
        found.divergence < 1e-3
        and found.agreement > 0.95
        and found.perplexity == pytest.approx(found.original, rel=5e-2)
    )
    assert found.rows == sum(len(t.tokens) - t.prompt for t in texts[:2]) and found.share == (1.0, 1.0)


@pytest.mark.slow
def test_rows_of_prompts_can_be_left_out(model, texts):
    packed = relu.pack_texts(texts[:1], 384)
    assert packed.answer.sum() == len(texts[0].tokens) - texts[0].prompt + 1
    other = packed._replace(hidden=np.where(packed.answer[:, None], packed.hidden, np.float32(1)))
    for weight in (0.0, 1.0):
        options = relu.DistillOptions(steps=4, rows=384, candidates=96, prompts=weight, measure="count")
        distiller = relu.Distiller(model, options)
        ids = next(distiller.batches(texts[:1], 0))[1]
        mine, others = (
            distiller.step(distiller.start(relu.ffns_of(model)), relu.DistillBatch(p, ids))[1].divergence
            for p in (packed, other)
        )
        assert (float(mine) == float(others)) == (weight == 0)


@pytest.mark.slow
def test_distillation_learns(model, texts, distiller):
    state, losses = distiller.start(relu.ffns_of(model)), []
    batches = distiller.batches(texts, 0)
    for _ in range(40):
        state, found = distiller.step(state, next(batches))
        losses.append(found)
    first, last = (np.mean([[float(x) for x in step] for step in part], axis=0) for part in (losses[:3], losses[-3:]))
    assert last[0] < 0.7 * first[0] and last[1] < 0.7 * first[1]
    assert int(state.step) == 40


def test_batches_begin_anywhere(texts, distiller):
    """A step's window and candidates depend on its number alone; candidates are different ids that hold its tokens."""
    batches = distiller.batches(texts, 0)
    found = [next(batches) for _ in range(6)]
    packed, ids = next(distiller.batches(texts, 5))
    np.testing.assert_array_equal(packed.tokens, found[5][0].tokens)
    np.testing.assert_array_equal(ids, found[5][1])
    assert len(set(ids.tolist())) == len(ids) >= 96 and set(packed.tokens.tolist()) <= set(ids.tolist())


@pytest.fixture
def cfg(model, tmp_path):
    train = TrainSpec(tokens=150, output=str(tmp_path / "out"), options=OPTIONS)
    return run_config(model.path, chat=False, kind="relufy", train=train)


def play(cfg, model, directory):
    found, text, record = playing.play(cfg, directory, model=model)
    return found.result, text, record


@pytest.mark.slow
def test_a_run_that_was_stopped_ends_as_one_that_was_not(cfg, model, tmp_path, monkeypatch):
    whole, shown, record = play(cfg, model, tmp_path / "a")
    assert "ReLU model against the original" in shown
    assert [p["step"] for p in record["summary"]["curve"]] == [0, 2, 4] and len(record["summary"]["layers"]) == 2
    assert len((tmp_path / "a" / "curve.csv").read_text().splitlines()) == 4
    made = specsparse.load(whole)
    assert made.config.activation == "relu" and open_gguf(whole).tensors["blk.1.ffn_down.weight"].type == GGML.Q4_0
    again = apply_delta(model.path, record["summary"]["delta"], tmp_path / "again.gguf")
    assert tensors_hash(open_gguf(again)) == tensors_hash(open_gguf(whole))

    saves = stop_at(monkeypatch, training_loop, "save_state", 1)
    other = changed(cfg, "train", output=str(tmp_path / "other" / "out"))
    with pytest.raises(KeyboardInterrupt):
        play(other, model, tmp_path / "b")
    found, _, _ = play(other, model, tmp_path / "b")
    assert len(saves) == 2  # no step twice
    assert tensors_hash(open_gguf(found)) == tensors_hash(open_gguf(whole))
    with pytest.raises(UserError, match="holds a training with another layers: give train"):
        play(changed(cfg, "train", options={**OPTIONS, "layer_rate": 1e-3}), model, tmp_path / "c")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"shares": 0.3}, r"train\.shares is no option of kind=relufy; did you mean share\?"),
        ({"share": 1.5}, r"train\.share=1\.5 must be a number above 0 and at most 1"),
        ({"linear": 0.3}, r"train\.linear=0\.3 must be below train\.share=0\.3"),
        ({"steps": 0}, r"train\.steps=0 must be a whole number of at least 1"),
        ({"quantise": "Q9"}, "type 'Q9': choose one of"),
        ({"measure": "hoyers"}, r"train\.measure=hoyers must be one of hoyer, count"),
        ({"react": -1.0}, r"train\.react=-1\.0 must be a number of at least 0"),
        ({"prompts": -1.0}, r"train\.prompts=-1\.0 must be a number of at least 0"),
        ({"precision": "half"}, r"train\.precision=half must be one of auto, float32, bfloat16"),
        ({"rounded": "yes"}, r"train\.rounded=yes must be true or false"),
    ],
)
def test_mistakes_are_found_before_anything_is_loaded(cfg, options, says):
    with pytest.raises(UserError, match=says):
        runner.check(changed(cfg, "train", options=options))


@pytest.mark.parametrize("name", ["relufy", "train_drafter", "train_draft_model"])
def test_the_options_of_the_shipped_files_are_taken(name):
    with initialize_config_dir(str(run.conf_dir()), version_base="1.3"):
        cfg = from_omegaconf(compose("config", [f"+experiment={name}"]))
    own = settings(cfg)
    drafter = train_settings.options(own, *train_drafter.OWNERS) if name != "relufy" else None
    data = drafter[1] if drafter else relufy.Options.from_settings(own).data
    assert data.answer == cfg.own["train"]["answer"]


def test_only_a_relu_model_of_the_same_shape_is_gone_on_from(cfg, model):
    with pytest.raises(UserError, match=r"train\.begin=.*: neither a ReLU model of the shape of"):
        relufy._begin(model, str(model.path))


def test_a_checkpoint_is_gone_on_from(model, distiller, tmp_path):
    begin = relu.ffns_of(model)
    save_state(tmp_path / "state.safetensors", distiller.start(begin), {})
    found = relufy._begin(model, str(tmp_path / "state.safetensors"))
    for w, wanted in zip(found, begin, strict=True):
        np.testing.assert_array_equal(w, wanted)
    save_state(tmp_path / "other.safetensors", relu.FfnMatrices(*(w[:1] for w in begin)), {})
    with pytest.raises(UserError, match=r"train\.begin=.*: neither a ReLU model"):
        relufy._begin(model, str(tmp_path / "other.safetensors"))


def test_a_relu_model_is_refused(model):
    with pytest.raises(UserError, match="is turned to ReLU here"):
        relu.check(dataclasses.replace(model.config, activation="relu"))
