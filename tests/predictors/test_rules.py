"""What each predictor finds on layers whose sparsity is planted."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

from specsparse.errors import UserError
from specsparse.kernels.packing.dequant import dequantize, pack_float
from specsparse.predictors import get_predictor
from specsparse.predictors.scored import as_mlp, factorise, mlp_weights, normed_gate
from tests.predictors.planted import D, F, plant, scores, true_neurons


@pytest.fixture(scope="module")
def planted():
    return plant()


@pytest.fixture(scope="module")
def active(planted):
    found = true_neurons(planted, planted.held_out) != 0
    assert 0.1 < found.mean() < 0.25  # what was planted
    return found


def kept(planted, name, weights=None, rows=None, **options):
    predictor = get_predictor(name, planted.ffn, **options)
    rows = planted.held_out if rows is None else rows
    weights = predictor.fit(planted.layer, jnp.asarray(planted.rows)) if weights is None else weights
    return np.asarray(predictor.keep(weights, planted.layer, jnp.asarray(rows), jnp.asarray([len(rows)], jnp.int32)))


def test_the_oracle_is_right(planted, active):
    recall, precision, share = scores(kept(planted, "oracle"), active)
    assert recall == precision == 1 and share == active.mean()


def test_the_oracle_of_other_activations(active):
    drelu = plant(act="relu", up_act="relu")
    a = true_neurons(drelu, drelu.held_out)
    assert scores(kept(drelu, "oracle"), a > 0)[:2] == (1, 1)
    fat = plant(act=("fatrelu", 0.3))
    assert 0 < kept(fat, "oracle").mean() < active.mean()
    assert kept(plant(act="silu"), "oracle").mean() > 0.999


def test_svd_is_exact_at_full_rank_and_good_at_the_planted_rank(planted, active):
    assert scores(kept(planted, "svd", rank=D, codes="f32"), active)[:2] == pytest.approx((1, 1), abs=2e-3)
    recall, precision, _ = scores(kept(planted, "svd", rank=8), active)
    assert recall > 0.9 and precision > 0.9
    worse = scores(kept(planted, "svd", rank=2), active)
    assert worse[0] < recall and worse[1] < precision


@pytest.mark.parametrize(("name", "options"), [("svd", {"rank": 4}), ("signbit", {})])
def test_a_threshold_for_a_recall_is_the_highest_that_reaches_it(name, options):
    planted = plant(rows=2000)
    own, active = (true_neurons(planted, rows) != 0 for rows in (planted.rows, planted.held_out))
    shares = []
    for wanted in (0.8, 0.99):
        predictor = get_predictor(name, planted.ffn, recall=wanted, **options)
        weights = predictor.fit(planted.layer, jnp.asarray(planted.rows))
        above = weights._replace(threshold=jnp.nextafter(weights.threshold, jnp.float32(math.inf)))
        assert scores(kept(planted, name, weights, planted.rows, **options), own)[0] >= wanted
        assert scores(kept(planted, name, above, planted.rows, **options), own)[0] < wanted
        recall, _, share = scores(kept(planted, name, weights, **options), active)
        assert recall > wanted - 0.02  # on another text
        shares.append(share)
    assert active.mean() < shares[0] < shares[1]


@pytest.mark.parametrize(("name", "options"), [("svd", {"rank": 4}), ("signbit", {}), ("mlp", {})])
def test_a_threshold_for_a_share_keeps_the_highest_scores(planted, name, options):
    rows, n = jnp.asarray(planted.rows), jnp.asarray([len(planted.rows)], jnp.int32)
    for share in (0.1, 0.4):
        predictor = get_predictor(name, planted.ffn, share=share, **options)
        own = mlp_weights(*as_mlp(*factorise(normed_gate(planted.layer), 8))) if name == "mlp" else None
        weights = predictor.on_text(own, planted.layer, rows) if own else predictor.fit(planted.layer, rows)
        scores = np.asarray(predictor.score(weights, planted.layer, rows, n))
        got = kept(planted, name, weights, planted.rows, **options)
        # As many as the share asks for, and with the last of them all that have its score: signs are counted.
        assert (scores > weights.threshold).mean() <= share + 0.01 and got.mean() >= share - 0.01
        assert scores[got == 1].min() >= weights.threshold > scores[got == 0].max()
    with pytest.raises(UserError, match=r"predictor\.recall and predictor\.share"):
        get_predictor(name, planted.ffn, share=0.5, recall=0.9, **options)


def test_a_hot_set_is_of_those_that_add_most(planted):
    got, a = kept(planted, "hot", share=0.25), true_neurons(planted, planted.rows)
    down = np.asarray(dequantize(planted.layer.ffn_down))
    added = (a**2).sum(axis=0) * (down**2).sum(axis=0)
    assert (got == got[0]).all() and set(np.flatnonzero(got[0])) == set(np.argsort(-added)[: F // 4])


def test_signs_say_more_than_chance(planted, active):
    recall, precision, share = scores(kept(planted, "signbit"), active)
    assert recall > share + 0.2 and precision > active.mean() + 0.1
    shares = [kept(planted, "signbit", alpha=alpha).mean() for alpha in (0.8, 1.0, 1.2)]
    assert shares == sorted(shares) and shares[0] < shares[2]


def test_sign_bits_count_signs(planted):
    """Against the definition in numpy, at a width that is no multiple of 8."""
    width = 61
    rng = np.random.default_rng(0)
    gate, x = rng.normal(0, 1, (F, width)), rng.normal(0, 1, (9, width)).astype(np.float32)
    cut = planted.layer._replace(
        ffn_gate=pack_float(jnp.asarray(gate, jnp.float32)), ffn_norm=planted.layer.ffn_norm[:width]
    )
    positive = (x[:, None] * (gate * np.asarray(cut.ffn_norm))[None] > 0).sum(axis=2)
    got = kept(planted._replace(layer=cut), "signbit", rows=x, alpha=1.1)
    np.testing.assert_array_equal(got, 1.1 * positive >= width - positive)


def test_an_exported_svd_is_a_powerinfer_predictor(planted):
    """fc2 relu(fc1 x) is u v x, and sparse at threshold 0 whatever the size of x."""
    u, v = factorise(normed_gate(planted.layer), 8)
    fc1, fc2 = as_mlp(u, v)
    assert fc1.shape == (16, D) and fc2.shape == (F, 16)
    weights = mlp_weights(fc1, fc2, codes="f32")
    same = kept(planted, "mlp", weights) == kept(planted, "svd", rank=8, codes="f32")
    assert same.mean() > 0.9999
    np.testing.assert_array_equal(kept(planted, "mlp", weights), kept(planted, "mlp", weights, 4 * planted.held_out))


def test_mlp_keeps_at_the_threshold(planted):
    """An output of exactly the threshold is kept; the residual itself is read, without the norm."""
    fc1, fc2 = np.zeros((2, D), np.float32), np.zeros((F, 2), np.float32)
    fc1[0, 0], fc2[0, 0], fc2[1, 0] = 1, 1, -1
    rows = np.zeros((2, D), np.float32)
    rows[:, 0] = 2, -2
    for threshold, wanted in ((0.0, [F - 1, F]), (2.0, [1, 0]), (2.5, [0, 0]), (-math.inf, [F, F])):
        assert kept(planted, "mlp", mlp_weights(fc1, fc2, threshold), rows).sum(axis=1).tolist() == wanted


@pytest.mark.parametrize(
    ("fc1", "fc2", "threshold", "message"),
    [
        (np.zeros((4, D)), np.zeros((F, 3)), 0.0, "ranks must be equal"),
        (np.zeros((4, D)), np.zeros((F, 4)), math.nan, "threshold a number"),
        (np.full((4, D), 1e6), np.zeros((F, 4)), 0.0, "f16 can hold"),
        (np.zeros((4, D)), np.full((F, 4), np.nan), 0.0, "f16 can hold"),
    ],
)
def test_predictors_that_are_none_are_refused(fc1, fc2, threshold, message):
    with pytest.raises(UserError, match=message):
        mlp_weights(fc1, fc2, threshold)


@pytest.mark.parametrize("name", ["gate_threshold", "teal", "oracle"])
def test_a_quantile_keeps_its_share_of_the_largest(name):
    planted = plant(act="silu")
    got = kept(planted, name, share=0.3)
    assert got.mean() == pytest.approx(0.3, abs=0.02)
    a = np.abs(true_neurons(planted, planted.held_out))
    assert a[got == 1].mean() > 3 * a[got == 0].mean()


@pytest.mark.parametrize("name", ["gate_threshold", "teal"])
def test_zeros_are_left_out_even_where_the_share_has_room_for_them(planted, active, name):
    if name == "gate_threshold":
        assert (kept(planted, name, share=0.9) == active).mean() > 0.999
    assert kept(planted, name, share=1.0).mean() == pytest.approx(active.mean(), abs=1e-3)


def test_a_sequence_keeps_one_set(planted):
    """The planted hot neurons of a prompt, in every row after it, by both rules; a batch has a set each."""
    for rule in ("griffin", "coreinfer"):
        predictor = get_predictor("sequence", planted.ffn, share=0.25, rule=rule)
        prompts = planted.rows[:50], planted.rows[50:100]
        sets = [predictor.fit(planted.layer, jnp.asarray(p)) for p in prompts]
        hot = np.abs(true_neurons(planted, prompts[0])).sum(axis=0)
        chosen = np.asarray(sets[0][0])
        assert chosen.sum() == round(0.25 * F) and hot[chosen].mean() > 2 * hot[~chosen].mean()
        rows = jnp.asarray(planted.held_out[:6])
        both = predictor.keep(jnp.concatenate(sets), planted.layer, rows, jnp.asarray([3, 3]))
        np.testing.assert_array_equal(both, np.repeat([np.asarray(s[0]) for s in sets], 3, axis=0))


def test_griffin_is_its_formula(planted):
    rows = planted.rows[:40]
    a = true_neurons(planted, rows)
    rank = np.linalg.norm(a / np.linalg.norm(a, axis=1, keepdims=True), axis=0)
    weights = get_predictor("griffin", planted.ffn, share=0.2).fit(planted.layer, jnp.asarray(rows))
    assert set(np.flatnonzero(weights[0])) == set(np.argsort(-rank)[: round(0.2 * F)])


def test_random_keeps_its_share_and_knows_nothing(planted, active):
    recall, precision, share = scores(kept(planted, "random", share=0.3), active)
    deviation = math.sqrt(0.3 * 0.7 / active.sum())
    assert abs(recall - 0.3) < 5 * deviation and abs(share - 0.3) < 5 * deviation
    assert precision == pytest.approx(active.mean(), abs=0.02)
    predictor = get_predictor("random", planted.ffn)
    masks = [
        np.asarray(dataclasses.replace(predictor, seed=seed).fit(planted.layer, index=index))
        for seed, index in ((0, 0), (0, 1), (1, 0))
    ]
    assert len({m.tobytes() for m in masks}) == 3


def test_without_zeros_no_recall_is_reached_by_a_threshold():
    planted = plant(act="silu")
    with pytest.raises(UserError, match=r"signbit: recall=0\.9 means nothing with SiLU"):
        get_predictor("signbit", planted.ffn, recall=0.9).fit(planted.layer, jnp.asarray(planted.rows))


def test_a_text_without_activations_cannot_calibrate(planted):
    rows = np.zeros((4, D), np.float32)
    rows[:, 0] = 1
    with pytest.raises(UserError, match="no neuron is active"):
        get_predictor("svd", planted.ffn, recall=0.9).fit(planted.layer, jnp.asarray(rows))
