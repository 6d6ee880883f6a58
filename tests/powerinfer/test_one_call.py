"""Predicted FFNs within the one native call of all layers: the bits of the layers one by one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specsparse
from specsparse.engine.config import ACTIVATION_KEY
from specsparse.engine.llama import make_forward
from specsparse.errors import UserError
from specsparse.kernels.native import cpu
from specsparse.powerinfer.fewer import gated
from specsparse.powerinfer.sparse_ffn import make_ffn
from specsparse.predictors import FFN, Needs, get_predictor
from specsparse.predictors.scored import as_mlp, factorise, mlp_weights, normed_gate, settled
from specsparse.testing import write_tiny_gguf

pytestmark = pytest.mark.skipif(not cpu.available(), reason=str(cpu.why_missing()))

PREDICTORS = {"mlp": {}, "svd": {"rank": 8}, "signbit": {}, "gate_threshold": {"share": 0.4}, "oracle": {}}
MODELS = {
    "relu": {"quant": "Q4_0", "metadata": {ACTIVATION_KEY: "relu"}},
    "ungated": {"quant": "F16", "gated": False, "metadata": {ACTIVATION_KEY: "relu2"}},
    "ranged": {"quant": "Q4_0", "d_ff": 256, "metadata": {ACTIVATION_KEY: "relu"}},
    "silu": {"quant": "Q4_0", "d_model": 160, "d_ff": 224, "n_heads": 5, "n_kv_heads": 5, "head_dim": 32},
    "wide": {"quant": "Q4_0", "d_model": 2112, "n_heads": 33, "n_kv_heads": 3, "head_dim": 64, "n_layers": 1},
}


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """Dense models by name, 96 or 256 neurons of 64 columns."""
    folder, made = tmp_path_factory.mktemp("one_call"), {}

    def load(name):
        if name not in made:
            path = write_tiny_gguf(
                folder / f"{name}.gguf", **{"d_model": 64, "d_ff": 96, "n_layers": 2, "head_dim": 16, **MODELS[name]}
            )
            made[name] = specsparse.load(path)
        return made[name]

    return load


def weights_of(predictor, layer, index):
    if predictor.needs is Needs.TRAINING:
        return mlp_weights(*as_mlp(*factorise(normed_gate(layer), 16)), codes=predictor.codes or "f16")
    rows = np.random.default_rng(index).standard_normal((32, layer.ffn_norm.shape[0])).astype(np.float32)
    return predictor.fit(layer, jnp.asarray(rows), index=index)


def passes(model, predictor, shapes, *, masked=False, threshold=None):
    """(in one call, layer by layer) of each shape (sequences, rows, tree or chain); the last sequence is shorter."""
    weights = [weights_of(predictor, layer, i) for i, layer in enumerate(model.params.layers)]
    if threshold is not None:
        weights = [w._replace(threshold=jnp.float32(threshold)) for w in weights]
    one = gated(model, predictor, weights, down_type=None if masked else "Q8_0")
    assert masked == (one.params.layers[0].sparse.blocks is not None)
    kernels = dataclasses.replace(model.kernels, layers=None)
    apart = make_forward(model.config, kernels, make_ffn(model.config, kernels, predictor))
    for batch, rows, tree in shapes:
        capacity = one.capacity_for(rows)
        tokens = np.random.default_rng(rows).integers(1, 200, (batch, rows), dtype=np.int32)
        parents = np.tile(np.array([-1, *(max(0, i // 2) for i in range(rows - 1))], np.int32), (batch, 1))
        options = {"n_valid_B": jnp.asarray([rows] * (batch - 1) + [max(1, rows - 2)], jnp.int32)}
        options |= {"parents_Bn": jnp.asarray(parents)} if tree else {}
        args = one.params_for(capacity), jnp.asarray(tokens), one.new_cache(batch, capacity)
        yield tuple(jax.jit(forward)(*args, **options) for forward in (one.forward, apart))


@pytest.mark.parametrize("name", PREDICTORS)
def test_the_bits_of_the_layers_one_by_one(dense, name):
    model = dense("relu")
    predictor = get_predictor(name, FFN.from_config(model.config, model.kernels), **PREDICTORS[name])
    shapes = [(1, 1, False), (2, 5, True)] if name == "mlp" else [(2, 5, True)]
    for (together, cache), (apart, other) in passes(model, predictor, shapes):
        for a, b in zip(jax.tree.leaves((together, cache)), jax.tree.leaves((apart, other)), strict=True):
            np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
        kept = np.asarray(together.stats.kept)
        assert kept.shape[0] == 2 and kept[:, 0].min() > 0 and kept.max() <= 96
        assert (np.asarray(together.stats.nonzero) < 96).all()


def test_without_a_gate_and_with_more_rows_than_a_call_takes(dense):
    model = dense("ungated")
    predictor = get_predictor("oracle", FFN.from_config(model.config, model.kernels))
    for (together, _), (apart, _) in passes(model, predictor, [(1, 3, False), (1, 70, False)]):
        for a, b in zip(jax.tree.leaves(together), jax.tree.leaves(apart), strict=True):
            np.testing.assert_array_equal(a, b)


def set_isa_or_skip(isa):
    try:
        cpu.set_isa(isa or cpu.isa())
    except UserError as e:
        pytest.skip(str(e))


@pytest.mark.parametrize(
    ("name", "options", "threads", "isa"),
    [("mlp", {"codes": "q8_0"}, 2, None), ("mlp", {"codes": "q4_0"}, 1, "portable"),
     ("mlp", {"codes": "f16"}, 4, "avx2"),
     ("mlp", {"codes": "q4_0"}, 2, "avx2"), ("mlp", {"codes": "q8_0"}, 2, "portable"),
     ("signbit", {}, 2, None),
     ("gate_threshold", {"share": 0.4}, 4, None)],
)  # fmt: skip
def test_a_single_row_chooses_its_neurons_range_by_range(dense, name, options, threads, isa):
    model, before = dense("ranged"), (cpu.threads(), cpu.isa())
    predictor = get_predictor(name, FFN.from_config(model.config, model.kernels), **options)
    cpu.set_threads(threads)
    try:
        set_isa_or_skip(isa)
        # Several rows take the products of the dense kernels.
        shapes = [(1, 1, False), (1, 3, False)] if options.get("codes") == "q8_0" else [(1, 1, False)]
        for (together, _), (apart, _) in passes(model, predictor, shapes):
            for a, b in zip(jax.tree.leaves(together), jax.tree.leaves(apart), strict=True):
                np.testing.assert_array_equal(a, b)
            kept = np.asarray(together.stats.kept)
            assert kept[:, 0].min() > 0 and kept.max() < 256
    finally:
        cpu.set_threads(before[0])
        cpu.set_isa(before[1])


@pytest.mark.parametrize(
    ("name", "threshold", "model", "isa", "threads"),
    [("mlp", 1.9, "ranged", "portable", 1), ("mlp", 1.3, "silu", "avx2", 2), ("svd", -9.0, "silu", None, 3),
     ("signbit", 28.0, "ranged", "avx2", 2), ("mlp", 1.4, "wide", None, 2)],
)  # fmt: skip
def test_a_mask_on_dense_matrices_has_their_bits(dense, name, threshold, model, isa, threads):
    """Of rows that keep few neurons, which are read one by one, and of many, for which the dense kernels run."""
    model, before = dense(model), (cpu.threads(), cpu.isa())
    predictor = get_predictor(name, FFN.from_config(model.config, model.kernels))
    cpu.set_threads(threads)
    try:
        set_isa_or_skip(isa)
        shapes = [(1, 1, False), (2, 5, True), *[(1, 70, False)] * (name == "signbit")]
        for (together, _), (apart, _) in passes(model, predictor, shapes, masked=True, threshold=threshold):
            for a, b in zip(jax.tree.leaves(together), jax.tree.leaves(apart), strict=True):
                np.testing.assert_array_equal(a, b)
            kept = np.asarray(together.stats.kept)
            rows = {1: 1, 10: 8, 70: 68}[kept.shape[1]]  # of them that count
            share_L = kept.sum(axis=1) / (rows * model.config.d_ff)
            assert (share_L <= 0.1).all() if name == "mlp" else (share_L > 0.5).all()
    finally:
        cpu.set_threads(before[0])
        cpu.set_isa(before[1])


@pytest.mark.parametrize(("model", "name"), [("relu", "gate_threshold"), ("ungated", "signbit")])
def test_models_and_predictors_without_a_mask(dense, model, name):
    predictor = get_predictor(name, FFN.from_config(dense(model).config, dense(model).kernels))
    with pytest.raises(UserError, match=r"ffn\.masked=true"):
        gated(dense(model), predictor, [None] * 2, masked=True)


@pytest.mark.parametrize(("quant", "codes"), [("Q4_0", "q4_0"), ("Q8_0", "q8_0"), ("F16", "f16")])
def test_a_trained_predictor_is_kept_as_the_models_gates_are(tmp_path, quant, codes):
    model = specsparse.load(write_tiny_gguf(tmp_path / "m.gguf", d_model=64, d_ff=96, n_layers=1, quant=quant))
    predictor = get_predictor("mlp", FFN.from_config(model.config, model.kernels))
    chosen, found, _ = settled(predictor, model.params.layers[0])
    assert found == chosen.codes == codes
    fc1, fc2 = np.eye(48, 64, dtype=np.float32), np.ones((96, 48), np.float32)
    packed = mlp_weights(fc1, fc2, codes=codes)
    assert [m.layout.source for m in packed[:2]] == [codes.upper(), "F16"]  # 48 columns are no whole blocks
    assert settled(get_predictor("mlp", predictor.ffn, codes="bf16"), model.params.layers[0])[1] == "bf16"
