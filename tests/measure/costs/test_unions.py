"""Unions of experts: counts by hand, rows by chance against their formula, bytes against the tensors of a file, and
what a forward says of its rows against the file's own matrices."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specsparse
from specsparse.engine.config import ACTIVATION_KEY
from specsparse.engine.experts import ChosenExperts
from specsparse.engine.gguf.reader import open_gguf
from specsparse.measure.costs.roofline import ModelOutline
from specsparse.measure.costs.unions import Union, of_text, watching
from specsparse.testing import write_tiny_gguf

IDS = np.random.default_rng(1).integers(3, 300, 12).tolist()
MODELS = {
    "experts": {"architecture": "smallthinker", "n_experts": 6, "n_chosen": 2},
    "dense": {"metadata": {ACTIVATION_KEY: "relu"}},
}


@pytest.fixture(scope="module", params=MODELS)
def path(request, tmp_path_factory):
    return write_tiny_gguf(tmp_path_factory.mktemp("m") / "m.gguf", d_ff=32, n_layers=1, **MODELS[request.param])


def seen(experts, active) -> ChosenExperts:
    return ChosenExperts(np.array(experts), None, np.array(active, bool))


def test_a_union_is_counted_by_expert_and_by_neuron():
    experts = [[[0, 1], [1, 3], [0, 1]]]
    active = [[[[1, 0], [0, 0]], [[0, 1], [1, 1]], [[0, 1], [0, 0]]]]
    found = Union.from_rows(seen(experts, active), [[0, 1], [0, 2]])
    assert found.experts_L == pytest.approx([(3 + 2) / 2])
    # experts 0, 1 and 3 with 1, 1 and 2 neurons; experts 0 and 1 with 2 and 0
    assert found.active_L == pytest.approx([(4 + 2) / 2])
    assert found.idle_L == pytest.approx([1 - 3 / 5]) and found.rows_an_expert == pytest.approx(2 * 2 / 2.5)


def test_rows_by_chance_wake_what_the_formula_says():
    rng, (E, k, n) = np.random.default_rng(0), (16, 2, 4)
    experts = rng.random((2, 4000, E)).argsort(-1)[..., :k]
    active = rng.random((2, 4000, k, 8)) < 0.3
    found = Union.from_rows(seen(experts, active), np.arange(4000).reshape(-1, n))
    np.testing.assert_allclose(found.experts_L, E * (1 - (1 - k / E) ** n), rtol=0.01)
    whole = Union.from_rows(seen(np.zeros_like(experts[..., :1]), active[:, :, :1]), np.arange(4000).reshape(-1, n))
    np.testing.assert_allclose(whole.idle_L, 0.7**n, rtol=0.05)


def test_bytes_are_those_of_the_woken_experts_and_their_active_neurons(path):
    model = ModelOutline.from_file("m", path)
    config, tensors = model.config, open_gguf(path).tensors
    k, F = max(config.n_chosen, 1), config.d_ff
    one = Union(1, 1, np.array([float(k)]), np.array([float(k * F)]), k, F)
    assert one.read_bytes(model) == pytest.approx(model.traffic().weight_bytes)
    end = "_exps.weight" if config.n_experts else ".weight"
    gate, up, down = (tensors[f"blk.0.ffn_{n}{end}"].nbytes / max(config.n_experts, 1) for n in ("gate", "up", "down"))
    idle = replace(one, active_L=one.active_L / 4)
    assert one.read_bytes(model) - idle.read_bytes(model) == pytest.approx(k * 0.75 * (up + down))
    if config.n_experts:
        more = replace(one, experts_L=one.experts_L * 1.5, active_L=one.active_L * 1.5)
        assert more.read_bytes(model) - one.read_bytes(model) == pytest.approx(0.5 * k * (gate + up + down))


def test_a_watched_forward_has_the_same_bits_and_says_which_neurons_are_active(path):
    model, f = specsparse.load(path, ffn="dense"), open_gguf(path)
    (layer,), config = model.params.layers, model.config
    nothing = replace(layer.attn_output, data=jnp.zeros_like(layer.attn_output.data))
    model = replace(model, params=model.params._replace(layers=(layer._replace(attn_output=nothing),)))
    watched = watching(model)
    np.testing.assert_array_equal(watched.logits(IDS), model.logits(IDS))
    found = jax.tree.map(np.asarray, of_text(watched, IDS))
    x = f.tensors["token_embd.weight"].dequantize()[IDS]
    z = x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps) * f.tensors["blk.0.ffn_norm.weight"].dequantize()
    gate = f.tensors[f"blk.0.ffn_gate{'_exps' if config.n_experts else ''}.weight"].dequantize()
    gate = gate.reshape(-1, config.d_ff, config.d_model)
    for row, chosen, active in zip(z, found.experts[0], found.active[0], strict=True):
        for e, neurons in zip(chosen, active, strict=True):
            np.testing.assert_array_equal(neurons, gate[e] @ row > 0)

