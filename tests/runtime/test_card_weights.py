"""Backends that keep weights as an accelerator wants them, here in jnp on a CPU: logits, bits of rows, what is said."""

import jax.numpy as jnp
import numpy as np
import pytest

import specsparse
from specsparse.errors import UserError
from specsparse.kernels import Fragments, PlainMatrix, described, kept_as
from specsparse.kernels.native import cpu
from specsparse.powerinfer.fewer import gated, with_fewer_neurons
from specsparse.predictors import FFN
from specsparse.predictors.rules import Oracle
from specsparse.speculative.drafters import get_drafter
from specsparse.testing import write_tiny_gguf
from specsparse.testing.drafting import random_head
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


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "drafter"), [("packed", "head"), ("bf16", "layer_skip")])
def test_drafters_score_rows_of_a_kept_matrix_and_write_plain_text(path, backend, drafter, tmp_path):
    model = specsparse.load(path, backend=backend)
    own = {"draft_vocab": list(range(0, 300, 2)), "gamma": 2}
    if drafter == "head":
        own["head"] = str(random_head(tmp_path, specsparse.load(path)))
    how = {"max_tokens": 6, "ignore_eos": True}
    drafted = specsparse.generate(model, [5, 6, 7], drafter=get_drafter(drafter, **own), **how)
    assert drafted.token_ids == specsparse.generate(model, [5, 6, 7], **how).token_ids
    assert drafted.stats.counters.num_draft_tokens


def test_what_reads_packed_matrices_is_refused_in_one_line(path):
    model = specsparse.load(path, backend="bf16")
    says = "reads packed matrices, and bf16 kernels keep them otherwise here: load it with backend=xla and width=0"
    oracle = Oracle(FFN.from_config(model.config, model.kernels))
    for read in (lambda: gated(model, oracle, []), lambda: with_fewer_neurons(model)):
        with pytest.raises(UserError, match=says):
            read()
