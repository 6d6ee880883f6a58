"""Collecting residuals and judging predictors on whole models."""

import csv
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsparse.engine.llama import Want, make_forward
from specsparse.errors import UserError
from specsparse.experiments.kinds.train_predictors import by_layer, comparison, figure
from specsparse.predictors import get_predictor
from specsparse.predictors.collect import collect, windows
from specsparse.predictors.evaluate import (
    Evaluator,
    LayerQuality,
    cost_of,
    fit_layers,
    layer_sums,
    model_sums,
)
from specsparse.predictors.scored import SignBitWeights
from tests.predictors.planted import F, plant, planted_model, true_neurons

WINDOW = 32


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return planted_model(tmp_path_factory.mktemp("model"), d_ff=192)


@pytest.fixture(scope="module")
def text(model):
    return np.random.default_rng(0).integers(3, model.config.vocab_size, (6, WINDOW)).astype(np.int32)


@pytest.fixture(scope="module")
def rows(model, text):
    return collect(model, text[:4])


@pytest.fixture(scope="module")
def evaluator(model, text):
    return Evaluator(model, text[4:])


@pytest.fixture(scope="module")
def found(model, evaluator, rows):
    """Evaluations by name."""

    def judge(name, **options):
        predictor = get_predictor(name, evaluator.ffn, **options)
        weights = None if name == "sequence" else fit_layers(predictor, model.params.layers, rows)
        return evaluator(predictor, weights)

    return {
        "oracle": judge("oracle"),
        "all": judge("random", share=1.0),
        "svd": judge("svd", rank=6),
        "random": judge("random", share=0.2),
        "sequence": judge("sequence", share=0.4),
    }


def test_what_is_collected_is_what_each_ffn_reads(model, text, rows, evaluator):
    """The last layer's residual and its FFN give the hidden rows of the model itself, bit for bit."""
    assert rows.shape == (2, 4 * WINDOW, model.config.d_model)
    last = model.params.layers[-1]
    n = jnp.asarray([WINDOW], jnp.int32)
    x = jnp.asarray(rows[-1, :WINDOW])
    forward = make_forward(model.config, model.kernels)
    run = jax.jit(lambda params, ids, cache: forward(params, ids, cache, want=Want(logits="none", hidden=True)))
    capacity = model.capacity_for(WINDOW)
    out, _ = run(model.params_for(capacity), jnp.asarray(text[:1]), model.new_cache(1, capacity))
    y = evaluator.ffn.down(last, evaluator.ffn.neurons(last, x, n), n, residual=x)
    np.testing.assert_array_equal(out.hidden[0], y)


def test_windows_cut_the_text_in_order():
    assert windows([[1, 2, 3], [4], [5, 6, 7, 8]], 3).tolist() == [[1, 2, 3], [4, 5, 6]]
    for texts in ([], [[1, 2]]):
        with pytest.raises(UserError, match="give a longer text"):
            windows(texts, 3)


def test_the_oracle_is_the_dense_model(found):
    for name in ("oracle", "all"):
        e = found[name]
        assert e.mean.recall == 1 and e.mean.energy == 1 and e.mean.error == 0
        assert e.model.kl == pytest.approx(0, abs=1e-7) and e.model.same_top == 1
        assert e.model.perplexity == e.model.perplexity_dense
    assert found["oracle"].mean.precision == 1 and found["oracle"].mean.kept == found["oracle"].mean.active < 0.4
    assert found["all"].mean.kept == 1


def test_a_better_predictor_is_judged_better(found):
    good, bad = found["svd"], found["random"]
    assert good.mean.recall > 0.9 > 0.3 > bad.mean.recall
    assert good.mean.error < 0.2 < bad.mean.error
    assert 0 < good.model.kl < bad.model.kl and good.model.same_top > bad.model.same_top
    assert bad.model.perplexity_dense == good.model.perplexity_dense
    assert good.model.tokens == 2 * (WINDOW // 2 - 1)
    for e in found.values():
        kept = [q.kept for q in e.layers]
        assert min(kept) <= e.mean.kept <= max(kept)


def test_a_set_of_the_prompt_keeps_its_share_in_every_layer(found):
    assert [q.kept for q in found["sequence"].layers] == pytest.approx([round(0.4 * F) / F] * 2)
    assert found["sequence"].mean.recall > 0.45


def test_layer_sums_are_their_definitions():
    planted = plant()
    predictor = get_predictor("svd", planted.ffn, rank=3)
    weights = predictor.fit(planted.layer)
    x = planted.held_out[:50]
    keep = np.asarray(predictor.keep(weights, planted.layer, jnp.asarray(x), jnp.asarray([50], jnp.int32))) == 1
    s = layer_sums(predictor, planted.ffn, weights, planted.layer, jnp.asarray(x))
    s = SimpleNamespace(**{name: float(total) for name, total in s.items()})
    a = true_neurons(planted, x)
    assert (s.neurons, s.active, s.kept, s.both) == (50 * F, (a != 0).sum(), keep.sum(), (keep & (a != 0)).sum())
    assert s.energy == pytest.approx((a**2).sum(), rel=1e-4)
    assert s.kept_energy == pytest.approx((a[keep] ** 2).sum(), rel=1e-4)
    from specsparse.kernels.packing.dequant import dequantize

    down = np.asarray(dequantize(planted.layer.ffn_down), np.float64)
    assert s.error == pytest.approx((((a * ~keep) @ down.T) ** 2).sum(), rel=1e-3)
    assert LayerQuality.from_sums(vars(s)).error == pytest.approx(math.sqrt(s.error / s.output))


def test_model_sums_are_their_definitions():
    rng = np.random.default_rng(1)
    dense, sparse = rng.normal(0, 1, (2, 5, 7))
    following = np.array([0, 3, 6, 1, 1])
    p, q = (np.exp(x) / np.exp(x).sum(axis=1, keepdims=True) for x in (dense, sparse))
    args = (jnp.asarray(x, jnp.float32) for x in (dense, sparse))
    s = SimpleNamespace(**model_sums(*args, jnp.asarray(following, jnp.int32)))
    assert s.tokens == 5 and float(s.kl) == pytest.approx((p * np.log(p / q)).sum(), rel=1e-5)
    at = np.arange(5), following
    assert (float(s.dense), float(s.sparse)) == pytest.approx((-np.log(p[at]).sum(), -np.log(q[at]).sum()), rel=1e-5)
    assert int(s.same) == (p.argmax(axis=1) == q.argmax(axis=1)).sum()


def test_bytes_are_those_a_token_reads():
    """A CATS gate is read whole and once; sign bits take an eighth of a byte; an oracle reads nothing."""
    planted = plant(act="silu")
    rows = jnp.asarray(planted.rows)
    matrix = planted.layer.ffn_gate.nbytes

    def cost(name, kept, **options):
        predictor = get_predictor(name, planted.ffn, **options)
        weights = predictor.fit(planted.layer, rows)
        return cost_of(predictor, planted.ffn, weights, planted.layer, kept=kept, width=64), weights

    cats, _ = cost("gate_threshold", 0.25)
    assert cats.dense_bytes == 3 * matrix
    assert (cats.predictor_bytes, cats.sparse_bytes) == (matrix + 4, matrix // 2)
    assert cats.bytes_share == pytest.approx(0.5, abs=1e-3)
    signs, weights = cost("signbit", 0.5)
    assert isinstance(weights, SignBitWeights) and signs.predictor_bytes == F * 8 + 4
    assert signs.sparse_bytes == round(1.5 * matrix) and signs.dense_s > 0
    svd, _ = cost("svd", 0.5, rank=16)
    assert svd.predictor_bytes == 2 * 16 * (64 + F) + 4
    assert cost("oracle", 0.1)[0].predictor_bytes == 0


def test_tables_csv_and_figure(found, tmp_path):
    evaluations = list(found.values())
    assert comparison(evaluations).row_count == 5 and by_layer(evaluations[2]).row_count == 3
    figure(evaluations, title="test").write(tmp_path)
    lines = list(csv.DictReader((tmp_path / "predictors.csv").open()))
    assert len(lines) == 5 * 3
    (whole,) = [row for row in lines if row["predictor"] == "svd" and row["layer"] == "all"]
    assert float(whole["kl"]) == found["svd"].model.kl and float(whole["recall"]) == found["svd"].mean.recall
    assert lines[0]["kl"] == "" and float(lines[1]["kept"]) == found["oracle"].layers[1].kept
    drawn = (tmp_path / "predictors.png").read_bytes()
    assert drawn.startswith(b"\x89PNG") and len(drawn) > 10_000


@pytest.mark.slow
def test_cats_and_griffin_on_the_real_model(smollm2):
    """Half the neurons of a SiLU model: most of the energy stays, and both beat a random half by far."""
    from specsparse.data import prompts

    ids = [smollm2.tokenizer.encode(p.text, add_special=True) for p in prompts.load(limit_per_task=2)]
    text = windows(ids, 64)[:8]
    evaluator, rows = Evaluator(smollm2, text[6:]), collect(smollm2, text[:4])
    kl = {}
    for name in ("gate_threshold", "sequence", "random"):
        predictor = get_predictor(name, evaluator.ffn, share=0.5)
        weights = None if name == "sequence" else fit_layers(predictor, smollm2.params.layers, rows)
        e = evaluator(predictor, weights)
        assert e.mean.kept == pytest.approx(0.5, abs=0.05)
        kl[name] = e.model.kl
    assert kl["gate_threshold"] < 0.5 and kl["gate_threshold"] < kl["sequence"] < 0.5 * kl["random"]
