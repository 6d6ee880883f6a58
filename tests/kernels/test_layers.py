"""All layers in one call equal their composition from `linear` and `attend`, bit for bit."""

import dataclasses

import jax
import numpy as np
import pytest

from specsparse import kernels
from specsparse.engine import llama
from specsparse.engine.llama import Want
from specsparse.errors import UserError
from specsparse.kernels.native import cpu
from tests.contracts.rigs import WIDTH, Rig, random_tree, tiny_rig

pytestmark = pytest.mark.skipif(not cpu.available(), reason=str(cpu.why_missing()))

MODELS = {
    "q4_1": {"quant": "Q4_1", "d_model": 96, "d_ff": 160, "n_heads": 6, "n_kv_heads": 2, "n_layers": 3},
    "mixed-bias-neox": {"quant": "Q8_0", "architecture": "qwen2", "bias": True, "head_dim": 32, "d_ff": 64},
    "floats": {"quant": "F16", "d_model": 80, "d_ff": 77, "head_dim": 16, "n_kv_heads": 4},
}


@pytest.fixture(scope="module", params=MODELS)
def pair(request, tmp_path_factory) -> tuple[Rig, Rig]:
    """A model in one call and layer by layer."""
    one = tiny_rig(tmp_path_factory.mktemp(request.param), **MODELS[request.param])
    parts = dataclasses.replace(kernels.get("native"), layers=None)
    return one, dataclasses.replace(one, forward=llama.make_forward(one.config, parts), programs={})


def check(pair, tokens, counts=None, parents=None, prefix=()) -> None:
    outs = []
    for rig in pair:
        cache = rig.cache(len(tokens))
        if prefix:
            _, cache = rig.feed([list(prefix)] * len(tokens), cache)
        logits, cache = rig.feed(tokens, cache, counts, parents, commit=False)
        outs.append((logits, cache))
    (a, cache_a), (b, cache_b) = outs
    counts = [len(t) for t in tokens] if counts is None else counts
    for row, n in enumerate(counts):
        assert n == 0 or np.isfinite(a[row, :n]).all()
        np.testing.assert_array_equal(a[row, :n], b[row, :n])
    for x, y in zip(jax.tree.leaves(cache_a), jax.tree.leaves(cache_b), strict=True):
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


@pytest.mark.parametrize("n", [1, 2, 5, 9, WIDTH])
def test_rows(pair, n):
    check(pair, [list(range(3, 3 + n))], prefix=[7, 8, 9])


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_batch_with_rows_that_do_not_count(pair, threads):
    before = cpu.threads()
    cpu.set_threads(threads)
    try:
        check(pair, [[1, 2, 3, 4], [5, 6], [9]], counts=[3, 2, 0], prefix=[7, 8])
    finally:
        cpu.set_threads(before)


def test_trees(pair):
    parents = [random_tree(np.random.default_rng(seed), WIDTH) for seed in range(2)]
    check(pair, [list(range(WIDTH)), list(range(20, 20 + WIDTH))], parents=np.stack(parents), prefix=[7, 8, 9, 10])


@pytest.mark.parametrize("isa", ["portable", "avx2"])
def test_instruction_sets(pair, isa):
    before = cpu.isa()
    try:
        cpu.set_isa(isa)
    except UserError:
        pytest.skip(f"no {isa} here")
    try:
        check(pair, [[4, 5, 6, 7, 8]], prefix=[1, 2])
    finally:
        cpu.set_isa(before)


@pytest.mark.parametrize("layers", [(), (1,), (1, 0)])
def test_chosen_layers(pair, layers):
    outs = []
    for rig in pair:
        run = jax.jit(lambda p, t, c, f=rig.forward: f(p, t, c, want=Want(layers=layers, hidden=True)))
        out, _ = run(rig.params, np.array([[3, 4, 5]], np.int32), rig.cache())
        outs.append(np.asarray(out.hidden))
    np.testing.assert_array_equal(*outs)
