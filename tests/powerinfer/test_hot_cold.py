"""Hot and cold neurons apart on one device: the order of the sum, the masks, and what `load(placement=)` refuses."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specsparse
from specsparse import kernels
from specsparse.engine.llama import Want
from specsparse.errors import UserError
from specsparse.powerinfer.hot_cold import combine, hot_cold_ffn, part_ffn, predict
from specsparse.powerinfer.placement import GpuIndex, write_gpuidx
from specsparse.testing import write_tiny_gguf
from tests.cells import cells
from tests.powerinfer.tiny import write_tiny_powerinfer
from tests.tolerances import nmse

IDS = [1, 5, 9, 200, 17, 42, 42, 8]
LAYERS, D_FF = 3, 96


def index(seed=0, share=0.4) -> GpuIndex:
    """Mixed, all hot, none hot."""
    rng = np.random.default_rng(seed)
    hot = [rng.random(D_FF) < share for _ in range(LAYERS)]
    hot[1][:], hot[2][:] = True, False
    return GpuIndex(tuple(hot), 0)


def uniform(value: bool) -> GpuIndex:
    return GpuIndex((np.full(D_FF, value),) * LAYERS, 0)


def written(folder, out_type="f16"):
    return write_tiny_powerinfer(folder / "m.powerinfer.gguf", out_type=out_type, n_layers=LAYERS, d_ff=D_FF)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return written(tmp_path_factory.mktemp("m"))


@pytest.fixture(scope="module")
def model(path):
    return specsparse.load(path, placement=index())


def stats(model):
    run = jax.jit(partial(model.forward, want=Want("none")))
    return run(model.params_for(256), np.array([IDS], np.int32), model.new_cache(1, 256))[0].stats


def test_a_placement_changes_the_order_of_sums_only(path, model):
    whole = specsparse.load(path)
    assert 0 < nmse(model.logits(IDS), whole.logits(IDS)) < 1e-3
    placed, plain = stats(model), stats(whole)
    assert np.array_equal(placed.kept[0], plain.kept[0]) and placed.kept.shape == (LAYERS, len(IDS))
    assert np.array_equal(placed.hot[1], placed.kept[1]) and not placed.hot[2].any()
    assert 0 < placed.hot[0].sum() < placed.kept[0].sum() and (placed.nonzero <= placed.kept).all()
    assert (np.asarray(placed.union) >= np.asarray(placed.kept).max(1)).all()


def test_rows_do_not_depend_on_their_batch(model):
    """C1."""
    whole = model.logits(IDS)
    for n in (1, 3):
        assert np.array_equal(model.logits(IDS[:n]), whole[:n])


@pytest.mark.parametrize("out_type", cells(["f16", "q4_0"], ["q4_0"]))
def test_the_sum_is_x_plus_cold_plus_hot_in_this_order(tmp_path, out_type):
    model = specsparse.load(written(tmp_path, out_type), placement=index())
    x = jnp.asarray(np.random.default_rng(0).normal(0, 1, (5, 64)), jnp.float32)
    n, layer = jnp.asarray([5], jnp.int32), model.params.layers[0]
    y, _ = jax.jit(hot_cold_ffn(model.config, model.kernels))(layer, x, n)
    keep = jax.jit(partial(predict, model.kernels))(layer.sparse.predictor, x, n)
    part = jax.jit(part_ffn(model.config, model.kernels))
    cold, _ = part(layer.sparse.cold, layer.ffn_norm, x, keep[1], n)
    hot, _ = part(layer.sparse.hot, layer.ffn_norm, x, keep[0], n)
    plain = jax.jit(part_ffn(model.config, kernels.get("reference")))
    reference, _ = plain(layer.sparse.hot, layer.ffn_norm, x, keep[0], n)
    assert nmse(hot, reference) < 1e-3
    x, cold, hot = map(np.asarray, (x, cold, hot))
    assert np.array_equal(y, x + (cold + hot))
    assert not np.array_equal(y, (x + cold) + hot) and not np.array_equal(y, (x + hot) + cold)
    assert combine(x, None, None) is x and np.array_equal(combine(x, cold, None), x + cold)


def test_dense_hot_neurons_are_all_computed(path, model):
    """With every neuron hot that is the dense model; with few it is neither, and says so."""
    dense = specsparse.load(path, ffn="dense").logits(IDS)
    assert nmse(specsparse.load(path, placement=uniform(True), hot="dense").logits(IDS), dense) < 1e-3
    mixed = specsparse.load(path, placement=index(), hot="dense")
    assert "lossy" in mixed.ffn and nmse(mixed.logits(IDS), model.logits(IDS)) > 1e-3
    found = stats(mixed)
    assert (np.asarray(found.hot[0]) == index().hot[0].sum()).all()
    none_hot = specsparse.load(path, placement=uniform(False), hot="dense").logits(IDS)
    assert np.array_equal(none_hot, specsparse.load(path, placement=uniform(False)).logits(IDS))


def test_it_decodes_and_speculates(model):
    plain = specsparse.generate(model, IDS, max_tokens=12, ignore_eos=True)
    fast = specsparse.generate(model, IDS, max_tokens=12, ignore_eos=True, drafter="prompt_lookup", verifier="greedy")
    assert fast.token_ids == plain.token_ids


def test_placements_come_from_files_too(path, model, tmp_path):
    file = write_gpuidx(tmp_path / "x.gpuidx", index())
    assert np.array_equal(specsparse.load(path, placement=file).logits(IDS), model.logits(IDS))


BAD = {
    "no placement": ({"hot": "dense"}, "needs a placement"),
    "a rule": ({"placement": index(), "hot": "warm"}, "hot='warm' does not exist"),
    "three": ({"placement": index(), "devices": 3}, "devices=3: must be 1 or 2"),
    "one device": ({"placement": index(), "devices": 2}, "JAX_NUM_CPU_DEVICES=2"),
    "a number below zero": ({"placement": index(), "devices": ("cpu:0", "cpu:-1")}, "device 'cpu:-1' is not here"),
    "a space": ({"placement": index(), "devices": ("cpu: 0", "cpu:0")}, "device 'cpu: 0' is not here"),
    "an underscore": ({"placement": index(), "devices": ("cpu:0_0", "cpu:0")}, "device 'cpu:0_0' is not here"),
    "a list": ({"placement": [1]}, "is a gpuidx file, a GpuIndex or a Placement, not list"),
    "layers": ({"placement": GpuIndex(index().hot[:2], 0)}, "places 2 layers"),
    "a mode": ({"placement": index(), "ffn": "oracle"}, "ffn='oracle' does not go with a placement"),
    "rounding": ({"placement": index(), "faithful_f16": True}, "faithful_f16 does not go"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_options(path, what):
    options, says = BAD[what]
    with pytest.raises(UserError, match=says):
        specsparse.load(path, **options)


def test_a_file_without_predictors_is_refused(tmp_path):
    with pytest.raises(UserError, match="has no predictors"):
        specsparse.load(write_tiny_gguf(tmp_path / "m.gguf"), placement=index())
