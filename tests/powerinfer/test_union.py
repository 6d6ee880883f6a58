"""Unions of masks, their cap, and quality read a few tokens at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specsparse
from specsparse.powerinfer import fewer
from specsparse.powerinfer.fewer import gated
from specsparse.powerinfer.sparse_ffn import SparseStats
from specsparse.predictors import FFN, get_predictor
from specsparse.predictors.evaluate import fit_layers, quality_in_chunks
from specsparse.predictors.rules import Oracle, UnionCap
from specsparse.testing import write_tiny_gguf

WINDOWS = np.random.default_rng(0).integers(3, 290, (3, 16)).astype(np.int32)


@pytest.fixture(scope="module")
def relu(tmp_path_factory):
    path = write_tiny_gguf(tmp_path_factory.mktemp("m") / "m.gguf", tokenizer="spm", vocab_size=300, n_layers=1)
    return specsparse.load(path, activation="relu")


@pytest.fixture(scope="module")
def half(relu):
    """A model whose masks hash the row: as good as independent."""
    predictor = get_predictor("random", FFN.from_config(relu.config, relu.kernels), share=0.3)
    return predictor, fit_layers(predictor, relu.params.layers, None)


@pytest.fixture(scope="module")
def free(relu, half):
    return gated(relu, *half)


def test_unions_of_a_text_are_those_of_its_passes(relu, half, free):
    masks = fewer.kept_masks(free, half[0], WINDOWS)
    assert masks.shape == (3, 1, 16, relu.config.d_ff)
    stats = _stats(free, WINDOWS[0])
    np.testing.assert_array_equal(masks[0].sum(axis=2), stats.kept)
    np.testing.assert_array_equal(masks[0].any(axis=1).sum(axis=1), stats.union)
    points = [fewer.union_of_text(masks, tokens=n) for n in (1, 2, 4)]
    for point in points:
        assert point.kept == pytest.approx(0.3, abs=0.05)
        assert point.union == pytest.approx(point.guess, abs=0.05)  # independent rows
    assert points[0].union == pytest.approx(points[0].kept) and points[2].passes == 3 * 4
    two = fewer.union_of_text(masks, tokens=2, batch=3)
    assert (two.rows, two.batch, two.passes) == (6, 3, 8) and two.union > points[2].union


def _stats(model, tokens):
    """Of one pass, as one program."""
    return jax.jit(model.forward)(model.params_for(256), tokens[None], model.new_cache(1, 256))[0].stats


def test_equal_rows_have_the_union_of_one():
    masks = np.broadcast_to(np.random.default_rng(0).random((1, 2, 1, 50)) < 0.2, (1, 2, 8, 50))
    point = fewer.union_of_text(masks, tokens=8)
    assert point.union == point.kept < point.guess


def test_a_watch_adds_up_passes_by_their_rows():
    watch = fewer.UnionWatch(width=10)
    for kept, together in (((2, 2), 3), ((4, 2), 5)):
        one = np.array([[*kept, 0], [*kept, 0]])  # two layers; the third row does not count
        watch(2, SparseStats(kept=one, union=np.array([together, together]), nonzero=one, active=None))
    watch(1, SparseStats(kept=np.array([[1, 0, 0]] * 2), union=np.array([1, 1]), nonzero=None, active=None))
    single, double = watch.points()
    assert (single.rows, single.passes, single.kept, single.union) == (1, 1, 0.1, 0.1)
    assert (double.rows, double.passes) == (2, 2)
    assert double.kept == pytest.approx(0.25) and double.union == pytest.approx(0.4)
    assert double.guess == pytest.approx(1 - 0.75**2)


class Fixed:
    """Masks that are given."""

    needs = None

    def __init__(self, masks):
        self.masks = jnp.asarray(masks, jnp.uint8)

    def keep(self, weights, layer, x_RD, n_valid_B):
        return self.masks


def test_a_cap_keeps_what_is_most_likely_of_use():
    """Neuron 0 serves the root only, 1 all later rows, 2 the last one, 3 none, 4 the first two."""
    masks = np.array([[1, 0, 0, 0, 1], [0, 1, 0, 0, 1], [0, 1, 1, 0, 0]])
    x, one = jnp.zeros((3, 4)), jnp.ones((1,), jnp.int32)
    caps = {share: jax.jit(UnionCap(Fixed(masks), share, 0.7).keep) for share in (0.2, 0.4, 0.6, 1.0)}
    kept = {share: np.asarray(keep(None, None, x, one)) for share, keep in caps.items()}
    assert kept[0.2].any(axis=0).nonzero()[0].tolist() == [4]  # 1 + 0.7
    assert kept[0.4].any(axis=0).nonzero()[0].tolist() == [1, 4]  # 0.7 + 0.49
    assert kept[0.6].any(axis=0).nonzero()[0].tolist() == [0, 1, 4]  # 1
    for mask in kept.values():
        assert not (mask & ~masks).any()
    assert np.array_equal(kept[1.0], masks)
    long = UnionCap(Fixed(masks), 0.2, rows=2).keep(None, None, x, one)
    assert np.array_equal(long, masks)  # a prompt is not capped


def test_the_cap_bounds_what_a_pass_reads_and_costs_quality(relu, half, free):
    predictor, weights = half
    capped = gated(relu, UnionCap(predictor, 0.4), weights)
    read, limit = (np.asarray(_stats(model, WINDOWS[0, :5]).union) for model in (capped, free)), 0.4 * relu.config.d_ff
    assert next(read).max() <= round(limit) < next(read).min()
    found, wanted = ([quality_in_chunks(relu, model, WINDOWS, rows=n).kl for n in (1, 5)] for model in (capped, free))
    assert wanted[0] == pytest.approx(wanted[1], rel=1e-6)  # C1: nothing depends on the rows beside
    assert found[0] == pytest.approx(wanted[0], rel=1e-6) and found[1] > 1.05 * wanted[1]
    exact = gated(relu, Oracle(FFN.from_config(relu.config, relu.kernels)), [None])
    assert quality_in_chunks(relu, exact, WINDOWS, rows=3).kl < 1e-6
