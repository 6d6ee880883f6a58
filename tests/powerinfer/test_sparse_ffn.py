"""The sparse FFN on rows of neurons: any predictor gates it, and the masked dense product is its definition."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specsparse
from specsparse import kernels
from specsparse.engine.config import ACTIVATION_KEY, ModelConfig
from specsparse.engine.gguf.reader import open_gguf
from specsparse.engine.llama import Want, make_forward
from specsparse.engine.weights import Params
from specsparse.errors import UserError
from specsparse.kernels.native import cpu
from specsparse.powerinfer.sparse_ffn import make_ffn, masked_ffn, sparse_params
from specsparse.predictors import FFN, Needs, get_predictor
from specsparse.predictors.scored import as_mlp, factorise, mlp_weights, normed_gate
from specsparse.testing import write_tiny_gguf
from tests.powerinfer.tiny import write_tiny_powerinfer
from tests.predictors.planted import EPS, D, F, plant
from tests.tolerances import nmse

B, N = 2, 3
IDS = [1, 5, 9, 200, 17, 42, 42, 8]
PREDICTORS = {
    "mlp": {},
    "svd": {"rank": 8},
    "signbit": {},
    "gate_threshold": {"share": 0.3},
    "sequence": {"share": 0.3},
    "oracle": {},
    "random": {"share": 0.3},
}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = write_tiny_gguf(tmp_path_factory.mktemp("m") / "m.gguf", quant="F32", d_model=D, d_ff=F)
    return ModelConfig.from_gguf(open_gguf(path), overrides={"activation": "relu"})


@pytest.fixture(scope="module")
def planted():
    return plant()


def fitted(predictor, planted):
    if predictor.needs is Needs.TRAINING:
        return mlp_weights(*as_mlp(*factorise(normed_gate(planted.layer), 8)))
    return predictor.fit(planted.layer, jnp.asarray(planted.rows))


def rows_of(layer, weights):
    """The layer with its neurons in rows, and no dense matrix."""
    (made,) = sparse_params(Params(None, (layer,), None, None), [weights]).layers
    assert made.ffn_gate is made.ffn_up is made.ffn_down is None
    return made


@pytest.mark.parametrize("name", PREDICTORS)
def test_every_predictor_gates_it(config, planted, name):
    """The output and the counts of the masked product, and a row at any place of a batch to the bit."""
    predictor = get_predictor(name, planted.ffn, **PREDICTORS[name])
    weights = fitted(predictor, planted)
    x = jnp.asarray(planted.held_out[: B * N])
    n_valid = jnp.asarray([N, 2], jnp.int32)
    layer = planted.layer._replace(sparse=weights)
    sparse = jax.jit(make_ffn(config, planted.ffn.kernels, predictor))
    y, stats = sparse(rows_of(planted.layer, weights), x, n_valid)
    wanted, counted = jax.jit(masked_ffn(config, planted.ffn.kernels, predictor))(layer, x, n_valid)
    assert nmse(y[: B * N - 1], wanted[: B * N - 1]) < 1e-10
    for field in stats._fields:
        np.testing.assert_array_equal(getattr(stats, field), getattr(counted, field), err_msg=field)
    assert 0 < int(stats.union) < F and not stats.kept[B * N - 1]
    alone, _ = sparse(rows_of(planted.layer, weights), x[4:5], jnp.asarray([1], jnp.int32))
    np.testing.assert_array_equal(alone[0], y[4])


@pytest.mark.parametrize(("backend", "down_type"), [("reference", None), ("native", "F16"), ("native", "Q8_0")])
def test_down_rows_may_be_smaller(config, planted, backend, down_type):
    chosen = kernels.get(backend)
    predictor = get_predictor("oracle", FFN(chosen, EPS, "relu"))
    (layer,) = sparse_params(Params(None, (planted.layer,), None, None), [None], down_type=down_type).layers
    x, n = jnp.asarray(planted.held_out[:4]), jnp.asarray([4], jnp.int32)
    y, _ = jax.jit(make_ffn(config, chosen, predictor))(layer, x, n)
    wanted, _ = jax.jit(masked_ffn(config, chosen, predictor))(planted.layer, x, n)
    error = nmse(y - x, wanted - x)
    assert error < (1e-10 if down_type is None else 1e-3) and (down_type is None or error > 0)
    assert layer.sparse.down_t.layout.source == (down_type or "F32")


def test_what_cannot_be_packed(planted):
    with pytest.raises(UserError, match="columns become F32, F16"):
        sparse_params(Params(None, (planted.layer,), None, None), [None], down_type="IQ2_S")


@pytest.fixture(scope="module", params=["bamboo", "ungated", "q4_0"])
def sparse_path(request, tmp_path_factory):
    """A dReLU model, one without a gate, and a quantised one."""
    path = tmp_path_factory.mktemp("m") / f"{request.param}.gguf"
    if request.param == "ungated":
        return write_tiny_gguf(path, gated=False, metadata={ACTIVATION_KEY: "relu2"})
    if request.param == "bamboo":
        return write_tiny_powerinfer(path, architecture="bamboo")
    return write_tiny_powerinfer(path, out_type="q4_0", d_model=256, d_ff=256)


def test_models_run_end_to_end(sparse_path):
    """All neurons are the dense model; a row's logits do not depend on threads or on how the prompt was cut."""
    mode = {"ffn": "oracle"} if sparse_path.stem == "ungated" else {"threshold": -1e30}
    model = specsparse.load(sparse_path, **mode)
    logits = model.logits(IDS)
    assert nmse(logits, specsparse.load(sparse_path, ffn="dense").logits(IDS)) < 1e-3
    assert np.array_equal(model.logits(IDS[:3]), logits[:3])
    before = cpu.threads()
    try:
        kernels.set_threads(1)
        assert np.array_equal(model.logits(IDS), logits)
    finally:
        kernels.set_threads(before or 1)


def test_stats_reach_the_caller(tmp_path):
    """One row a layer: kept, union, nonzero, active; only a part is kept, and fewer neurons than rows times kept."""
    model = specsparse.load(write_tiny_powerinfer(tmp_path / "m.gguf", n_layers=2))
    capacity = model.capacity_for(len(IDS))
    out, _ = jax.jit(partial(model.forward, want=Want(logits="none")))(
        model.params_for(capacity), jnp.asarray([IDS]), model.new_cache(1, capacity)
    )
    kept, union, nonzero, active = (np.asarray(field) for field in out.stats)
    width = model.config.d_ff
    assert kept.shape == nonzero.shape == (2, len(IDS)) and union.shape == active.shape == (2,)
    assert (nonzero > 0).all() and (nonzero < kept).all() and (kept < width).all()
    assert (kept.max(axis=1) <= union).all() and (active <= union).all() and (union <= width).all()
    assert model.params.layers[0].ffn_up is None and model.footprint.packed > 0


def test_a_dense_model_keeps_the_predictors_of_its_file(tmp_path):
    """So that they can be judged, and gate it on rows like any other."""
    path = write_tiny_powerinfer(tmp_path / "m.gguf", threshold=0.125)
    dense, own = specsparse.load(path, ffn="dense"), specsparse.load(path)
    weights = [layer.sparse for layer in dense.params.layers]
    predictors = sum(w.fc1.nbytes + w.fc2.nbytes for w in weights)
    assert own.footprint.packed == dense.footprint.packed + predictors > predictors
    mlp = get_predictor("mlp", FFN.from_config(dense.config, dense.kernels))
    forward = make_forward(dense.config, dense.kernels, make_ffn(dense.config, dense.kernels, mlp))
    gated = replace(dense, params=sparse_params(dense.params, weights), forward=forward)
    np.testing.assert_array_equal(gated.logits(IDS), own.logits(IDS))
