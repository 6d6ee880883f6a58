"""All layers in one call equal their composition from `linear` and `attend`, bit for bit."""

import dataclasses
import re
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from specsparse import kernels
from specsparse.engine import llama
from specsparse.engine.llama import Want
from specsparse.errors import UserError
from specsparse.kernels.native import cpu, descriptor
from tests.cells import cells
from tests.contracts.rigs import WIDTH, Rig, random_tree, tiny_rig

pytestmark = pytest.mark.skipif(not cpu.available(), reason=str(cpu.why_missing()))

MODELS = {
    "q4_1": {"quant": "Q4_1", "d_model": 96, "d_ff": 160, "n_heads": 6, "n_kv_heads": 2, "n_layers": 3},
    "mixed-bias-neox": {"quant": "Q8_0", "architecture": "qwen2", "bias": True, "head_dim": 32, "d_ff": 64},
    "qwen3": {"quant": "Q8_0", "architecture": "qwen3", "head_dim": 32, "d_ff": 64},
    "mistral": {"quant": "Q4_1", "window": 6, "d_ff": 64},
    "smollm3": {"quant": "F16", "architecture": "smollm3", "n_layers": 4, "d_ff": 64},
    "gemma3": {"quant": "Q4_0", "architecture": "gemma3", "full_every": 2, "window": 6, "n_layers": 3, "d_ff": 64},
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


@pytest.mark.parametrize("pair", ["q4_1", "gemma3", "qwen3"], indirect=True)
def test_mass_and_shift(pair):
    """Of the one call and of the composition, with the rows that enter a layer beside them."""
    tokens, counts = np.array([[3, 4, 5, 6], [9, 8, 0, 0]], np.int32), np.array([4, 2], np.int32)
    outs = []
    for rig in pair:
        cache = rig.cache(2)._replace(shift=np.array([1, 5], np.int32))
        want = Want(hidden=(1,), mass=True)
        run = jax.jit(lambda p, t, c, f=rig.forward, w=want: f(p, t, c, n_valid_B=counts, want=w)[0])
        outs.append(run(rig.params, tokens, cache))
    one, parts = outs
    assert one.mass.shape[:3] == (pair[0].config.n_layers, 2, pair[0].config.n_kv_heads)
    np.testing.assert_array_equal(one.mass, parts.mass)
    np.testing.assert_array_equal(one.logits, parts.logits)
    np.testing.assert_array_equal(one.hidden, parts.hidden)
    np.testing.assert_allclose(one.mass.sum(axis=3), pair[0].config.n_heads / pair[0].config.n_kv_heads, rtol=1e-5)


FEATURES = [(name, layers) for name in MODELS for layers in (None, (1, 0), ())]
# Every architecture with chosen layers in an order of their own; all layers and none with two of them.
ORDINARY = [(name, layers) for name, layers in FEATURES if layers == (1, 0) or name in ("q4_1", "gemma3")]


@pytest.mark.parametrize(("pair", "layers"), cells(FEATURES, ORDINARY), indirect=["pair"])
def test_features_of_layers(pair, layers):
    """The rows that enter layers come out of the one call with the bits of the composition; nothing else changes."""
    n = pair[0].config.n_layers
    which = tuple(range(n)) if layers is None else layers
    ids = (n, *which, *which[:1])
    tokens, counts = np.array([[3, 4, 5, 6], [9, 8, 0, 0]], np.int32), np.array([4, 2], np.int32)
    outs = []
    for rig in pair:
        for want in (Want(layers=layers, hidden=True), Want(layers=layers, hidden=ids)):
            run = jax.jit(lambda p, t, c, f=rig.forward, w=want: f(p, t, c, n_valid_B=counts, want=w)[0])
            outs.append(run(rig.params, tokens, rig.cache(2)))
    plain, one, _, parts = outs
    np.testing.assert_array_equal(one.hidden, parts.hidden)
    np.testing.assert_array_equal(one.logits, plain.logits)
    width = plain.hidden.shape[-1]
    np.testing.assert_array_equal(one.hidden[0, ..., :width], plain.hidden[0])
    assert one.hidden.shape == (2, 4, len(ids) * width) and not np.any(one.hidden[1, 2:])
    for place in range(len(which)):  # what enters a layer is what the layers before it give
        before = partial(pair[1].forward, want=Want(layers=which[:place], hidden=True))
        wanted = jax.jit(before)(pair[1].params, tokens, pair[1].cache(2))[0].hidden
        at = slice((1 + place) * width, (2 + place) * width)
        np.testing.assert_array_equal(one.hidden[0, :, at], wanted[0])


@pytest.mark.parametrize(("struct", "record"), [("Matrix", descriptor.MATRIX), ("Layer", descriptor.LAYER)])
def test_records_have_the_fields_of_the_structs(struct, record):
    text = (Path(kernels.__file__).parent / "csrc/dense/descriptor.h").read_text(encoding="utf-8")
    body = re.search(rf"struct {struct}Descriptor {{(.*?)}};", text, re.DOTALL)[1]
    fields = [name for line in re.findall(r"int64_t ([^;]*);", body) for name in re.findall(r"[a-z_]+", line)]
    assert tuple(fields) == record.names
    assert f"kDescriptorVersion = {descriptor.VERSION};" in text


def test_a_library_of_another_version_is_one_line(monkeypatch):
    monkeypatch.setattr(cpu, "VERSION", descriptor.VERSION + 1)
    with pytest.raises(UserError, match="make native"):
        cpu.library.__wrapped__()
