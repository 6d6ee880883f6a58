"""Planted models: their predictors keep the share that was asked for, by a power law, another set for each token."""

import numpy as np
import pytest

import specsparse
from experiments.planted import best_length, power_law, write_planted_powerinfer
from specsparse.kernels.neurons import unpack_neurons
from specsparse.kernels.packing.dequant import dequantize
from specsparse.powerinfer import fewer
from specsparse.predictors import FFN
from specsparse.predictors.scored import Mlp

SMALL = {"d_model": 128, "d_ff": 512, "n_heads": 4, "rank": 96, "vocab_size": 300, "context_length": 128}


def test_a_quarter_of_the_neurons_does_most_of_the_work():
    probs = power_law(10_000, 0.1, seed=3)
    assert probs.mean() == pytest.approx(0.1, abs=1e-6) and probs.max() <= 0.95
    ranked = np.sort(probs)[::-1]
    assert ranked[:2600].sum() / ranked.sum() == pytest.approx(0.8, abs=0.02)
    with pytest.raises(ValueError, match=r"between 0 and 0\.9"):
        power_law(10, 0.95)


def test_the_share_is_kept_and_differs_by_token(tmp_path):
    path = write_planted_powerinfer(tmp_path / "p.powerinfer.gguf", **SMALL)
    model = specsparse.load(path)
    assert model.ffn == "powerinfer" and model.config.predictor_ranks == (96, 96)
    tokens = np.random.default_rng(0).integers(3, 300, (3, 32)).astype(np.int32)
    masks = fewer.kept_masks(model, Mlp(FFN.from_config(model.config, model.kernels)), tokens)
    assert masks.mean(axis=(0, 2, 3)) == pytest.approx(0.1, abs=0.03)  # both layers
    five = fewer.union_of_text(masks, tokens=5)
    assert 1.5 * five.kept < five.union < five.guess  # other sets, and a few hot neurons among them
    for layer, turned in zip(model.params.layers, specsparse.load(path, ffn="dense").params.layers, strict=True):
        assert turned.ffn_down.layout.codes == "nibble"  # the dense side is as fast as Q4_0 is
        assert np.array_equal(dequantize(turned.ffn_down), unpack_neurons(layer.sparse.down_t).T)


def test_drafts_are_as_long_as_pays():
    cheap = [(1, 1.0, 0.1), (2, 1.0, 0.2), (5, 1.0, 0.3)]
    assert best_length(cheap, 0.7) == 4
    # 1.7 tokens in 1.2 steps, 2.53 in 1.6, 2.77 in 2.1: 1.42, 1.58, 1.32.
    assert best_length([(1, 1.0, 0.1), (2, 1.2, 0.2), (4, 1.6, 0.3), (5, 2.1, 0.4)], 0.7) == 3
    assert best_length([(1, 1.0, 0.1), (2, 1.2, 0.2), (4, 2.0, 0.3)], 0.7) == 1
    assert best_length([(2, 3.0, 0.2), (4, 9.0, 0.3)], 0.0) == 1
