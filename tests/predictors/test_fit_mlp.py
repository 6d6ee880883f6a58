"""Labels, training and checkpoints of one layer."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsparse.errors import UserError
from specsparse.predictors import get_predictor
from specsparse.predictors.fit_mlp import (
    FitOptions,
    LayerTrainer,
    label,
    load_pairs,
    load_predictors,
    need_zeros,
    save_predictors,
)
from specsparse.predictors.scored import mlp_weights
from specsparse.support.files import load_state, save_state
from specsparse.support.options import read
from tests.predictors.planted import D, F, plant, scores, true_neurons

OPTIONS = FitOptions(rank=32, epochs=8, batch=64)


@pytest.fixture(scope="module")
def planted():
    return plant(rows=2400)


@pytest.fixture(scope="module")
def labels(planted):
    return label(planted.ffn, planted.layer, planted.rows)


def trainer(planted, labels, **changes):
    return LayerTrainer(dataclasses.replace(OPTIONS, **changes), planted.layer, planted.rows, labels)


def trained(made, epochs=None):
    """(fc1, fc2) of a training to its end; what each epoch left is added to `epochs`."""
    state = made.start()
    while not made.done(state):
        state, epoch = made.step(state)
        if epochs is not None:
            epochs.append(epoch)
    return made.result(state)


def kept(planted, fc1, fc2, rows):
    predictor, n = get_predictor("mlp", planted.ffn), jnp.asarray([len(rows)], jnp.int32)
    weights = mlp_weights(fc1, fc2)
    return np.asarray(predictor.keep(weights, planted.layer, jnp.asarray(rows), n))


def test_a_label_is_a_neuron_that_is_not_zero(planted, labels):
    """Of either sign: relu(gate) * up < 0 is active too."""
    a = true_neurons(planted, planted.rows)
    np.testing.assert_array_equal(np.unpackbits(labels.bits, axis=1)[:, :F], a != 0)
    assert labels.density == pytest.approx((a != 0).mean()) and (a < 0).mean() > 0.05


def test_with_silu_a_label_is_among_the_largest():
    planted = plant(act="silu")
    with pytest.raises(UserError, match=r"give train.active_share=0.3 .* or use predictor=gate_threshold"):
        need_zeros(planted.ffn, None)
    found = label(planted.ffn, planted.layer, planted.rows, active_share=0.2)
    size = np.abs(true_neurons(planted, planted.rows))
    active = np.unpackbits(found.bits, axis=1)[:, :F] == 1
    assert found.density == pytest.approx(0.2, abs=1e-3) and size[active].min() >= size[~active].max() * 0.999


def test_a_layer_without_two_kinds_of_neurons_teaches_nothing(planted):
    rows = np.zeros((4, D), np.float32)
    rows[:, 0] = 1
    with pytest.raises(UserError, match="no neuron of a layer is active"):
        label(planted.ffn, planted.layer, rows)


def test_training_finds_the_active_neurons_and_reads_the_residual_as_it_is(planted, labels):
    """From random weights, in the form that is exported: f16, and rows of any size."""
    epochs = []
    fc1, fc2 = trained(trainer(planted, labels, init="random", epochs=20, learning_rate=0.01), epochs)
    losses = [e.loss for e in epochs]
    assert losses[-1] < 0.5 * losses[0] and len(epochs) <= 20
    active = true_neurons(planted, planted.held_out) != 0
    recall, precision, share = scores(kept(planted, fc1, fc2, planted.held_out), active)
    assert recall > 0.9 and precision > 0.6 and share < 2 * active.mean()
    assert recall == pytest.approx(epochs[-1].recall, abs=0.03)
    larger = kept(planted, fc1, fc2, 16 * planted.held_out)
    np.testing.assert_array_equal(larger, kept(planted, fc1, fc2, planted.held_out))
    assert max(np.abs(fc1).max(), np.abs(fc2).max()) == 1


def test_it_starts_from_the_training_free_predictor_and_never_ends_worse(planted, labels):
    start = trainer(planted, labels)
    state = start.start()
    active = true_neurons(planted, planted.held_out) != 0
    first = scores(kept(planted, *start.result(state), planted.held_out), active)
    assert first[0] > 0.9 and first[1] > 0.9
    after, _ = trainer(planted, labels, learning_rate=10.0).step(state)  # a step that ruins everything
    assert float(after.best_loss) == float(state.best_loss) and int(after.stale) == 1
    np.testing.assert_array_equal(after.best.fc1, state.best.fc1)


def test_it_stops_when_the_held_out_loss_stops_falling(planted, labels):
    epochs = []
    trained(trainer(planted, labels, learning_rate=10.0, patience=2), epochs)
    assert len(epochs) == 2


def test_the_weight_of_inactive_neurons_trades_kept_ones_for_recall(planted, labels):
    found = {}
    for weight in (0.02, 1.0):
        _, found[weight] = trainer(planted, labels, negative_weight=weight, init="random", rank=8).step(
            trainer(planted, labels, init="random", rank=8).start()
        )
    assert found[0.02].recall > found[1.0].recall and found[0.02].kept > found[1.0].kept


def test_a_restart_changes_nothing(planted, labels, tmp_path):
    """Equal bits, from the state after any epoch, in a new trainer."""
    whole = trainer(planted, labels, epochs=3)
    state = whole.start()
    for epoch in range(3):
        save_state(tmp_path / f"{epoch}.safetensors", state, {"epoch": epoch})
        state, _ = whole.step(state)
    wanted = whole.result(state)
    for epoch in (0, 2):
        again = trainer(planted, labels, epochs=3)
        found, meta = load_state(tmp_path / f"{epoch}.safetensors", again.start())
        assert meta == {"epoch": epoch} and int(found.epoch) == epoch
        while not again.done(found):
            found, _ = again.step(found)
        for a, b in zip(again.result(found), wanted, strict=True):
            np.testing.assert_array_equal(a, b)


def test_another_seed_is_another_training(planted, labels):
    one, other = (trainer(planted, labels, seed=seed, epochs=1) for seed in (0, 1))
    start = one.start()
    assert np.any(np.asarray(one.step(start)[0].matrices.fc1) != np.asarray(other.step(start)[0].matrices.fc1))


def test_predictors_come_back_from_their_file(tmp_path):
    rng = np.random.default_rng(0)
    pairs = [(rng.normal(0, 1, (r, 8)).astype(np.float32), rng.normal(0, 1, (5, r)).astype(np.float32)) for r in (3, 4)]
    path = tmp_path / "p.safetensors"
    save_predictors(path, pairs, threshold=0.25)
    found, threshold = load_pairs(path)
    assert threshold == 0.25 and [p.name for p in tmp_path.iterdir()] == ["p.safetensors"]
    for got, wanted in zip(found, pairs, strict=True):
        np.testing.assert_array_equal(got[0], wanted[0])
        np.testing.assert_array_equal(got[1], wanted[1])
    whole = load_predictors(path)
    save_predictors(path, pairs, threshold=0.25, dtype=np.float16)
    for one, other in zip(jax.tree.leaves(load_predictors(path)), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(one, other)
    layers = load_predictors(path)
    assert [w.fc1.shape for w in layers] == [(3, 8), (4, 8)] and float(layers[0].threshold) == 0.25


def test_files_that_hold_no_predictors_are_refused(tmp_path):
    path = tmp_path / "p.safetensors"
    with pytest.raises(UserError, match="no such file"):
        load_pairs(path)
    path.write_bytes(b"\xff" * 40)
    with pytest.raises(UserError, match="cannot be read as safetensors"):
        load_pairs(path)
    save_state(path, (jnp.zeros(3),), {})
    with pytest.raises(UserError, match="holds no predictors of specsparse"):
        load_pairs(path)
    with pytest.raises(UserError, match="checkpoint of another training"):
        load_state(path, (jnp.zeros(4),))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 0}, "train.rank=0"),
        ({"held_out": 1.0}, "train.held_out=1.0"),
        ({"learning_rate": 0.0}, "train.learning_rate=0.0"),
        ({"negative_weight": -1.0}, "train.negative_weight=-1.0"),
        ({"init": "zero"}, "train.init=zero"),
    ],
)
def test_options_out_of_range_are_named(change, message):
    with pytest.raises(UserError, match=message):
        read(FitOptions, change, group="train")
