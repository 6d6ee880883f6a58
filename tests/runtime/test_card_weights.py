"""Backends that keep weights as an accelerator wants them, here in jnp on a CPU: logits, bits of rows, what is said."""

import jax.numpy as jnp
import numpy as np
import pytest

import specsparse
from specsparse.errors import UserError
from specsparse.kernels import Fragments, PlainMatrix, described, kept_as
from specsparse.kernels.native import cpu
from specsparse.testing import write_tiny_gguf
from tests.tolerances import FORWARD_NMSE, nmse


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    where = tmp_path_factory.mktemp("card")
    return write_tiny_gguf(where / "m.gguf", quant="Q4_0", embedding_quant="F16", n_layers=1, context_length=64)


@pytest.mark.parametrize(
    ("backend", "kind"), [("packed", Fragments), pytest.param("bf16", PlainMatrix, marks=pytest.mark.slow)]
)
def test_logits_agree_and_rows_keep_their_bits_in_any_place(path, backend, kind):
    model = specsparse.load(path, backend=backend, width=8)
    assert isinstance(model.params.layers[0].ffn_up, kind) and isinstance(model.params.embedding, PlainMatrix)
    assert model.params.embedding.data.dtype == jnp.float16
    says = model.facts()
    assert says["stored"].startswith("Q4_0 read packed" if backend == "packed" else "Q4_0 widened to bf16")
    assert "F16 as stored (as asked for)" in says["stored"]
    assert says["weights"] == "F16 + Q4_0" + ("" if backend == "packed" else " as bf16")
    params, cache = model.params_for(64), model.new_cache(1, 64)
    forward = model.devices.jit(lambda p, t, c, parents: model.forward(p, t, c, parents_Bn=parents)[0].logits[0])

    def step(tokens, parents):
        return np.asarray(forward(params, tokens, cache, jnp.asarray([parents], jnp.int32)))

    tokens = np.arange(5, 13, dtype=np.int32)[None]
    wanted = specsparse.load(path, backend="native" if cpu.available() else "reference").logits(tokens[0])
    assert nmse(step(tokens, range(-1, 7)), wanted) <= FORWARD_NMSE["Q8_0/f16"]
    roots = [-1] * 8
    got, order = step(tokens, roots), np.random.default_rng(1).permutation(8)
    assert (step(tokens[:, order], roots) == got[order]).all()
    others = tokens.copy()
    others[:, 1:] = 7
    assert (step(others, roots)[0] == got[0]).all()


def test_what_is_kept_and_why_is_one_line():
    assert kept_as(7_000_000_000, 150_000_000_000) == ("bf16", "bf16: 14 GB of bf16 weights fit 150 GB")
    kept, why = kept_as(70_000_000_000, 150_000_000_000)
    assert kept == "packed" and why == "packed: 140 GB of bf16 weights do not fit 80% of 150 GB"
    assert kept_as(7, None)[0] == "packed"
    assert described(["Q4_K", "F32", "Q6_K"], "packed") == "Q4_K, Q6_K read packed; F32 as stored"


def test_a_model_that_cannot_be_kept_so_is_refused_in_one_line(path):
    with pytest.raises(UserError, match="backend=packed is for dense models on one device; use backend=xla"):
        specsparse.load(path, backend="packed", mesh=1)
