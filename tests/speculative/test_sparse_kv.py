"""`drafter=sparse_kv`: the slots that it copies, and that its drafts change no text."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specsparse
from specsparse import SamplingParams
from specsparse.errors import UserError
from specsparse.runtime.method import load_drafter
from specsparse.speculative.base import Draft, Feedback
from specsparse.speculative.drafters import get_drafter
from specsparse.speculative.drafters.sources import KeptRows
from specsparse.speculative.drafters.sparse_kv import SparseKv
from specsparse.testing import write_tiny_gguf
from specsparse.testing.drafting import draft_context, on_target
from tests.cells import cells

CAPACITY = 256
FEW = {"slots": 32, "window": 16, "refresh": 8}
"""Two blocks by their mass, one last block, the first one, and the block that is not full: 80 slots."""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    shape = {"d_model": 64, "n_heads": 4, "n_kv_heads": 2, "head_dim": 32, "d_ff": 64, "n_layers": 2}
    folder = tmp_path_factory.mktemp("sparse_kv")
    return write_tiny_gguf(folder / "m.gguf", quant="Q4_0", vocab_size=300, context_length=CAPACITY, **shape)


@pytest.fixture(scope="module")
def models(path):
    """By the type of their cache."""
    return {dtype: specsparse.load(path, kv_dtype=dtype) for dtype in ("f16", "q8_0")}


IDS = np.random.default_rng(0).integers(3, 300, CAPACITY).tolist()


@pytest.mark.parametrize("dtype", cells(["f16", "q8_0"], ["q8_0"]))
def test_the_blocks_with_most_mass_are_copied_and_then_the_rows_that_follow(models, dtype):
    model = models[dtype]
    loaded = load_drafter(model, get_drafter("sparse_kv", gamma=4, **FEW | {"refresh": 64}))
    source, weights = loaded.drafter.source, loaded.weights(CAPACITY)
    draft, n = Draft(jnp.zeros((1, 4), jnp.int32), None, None), 150

    def after(count):
        return on_target(model, draft_context([IDS[:count]], capacity=CAPACITY, budget=4))

    def by_block(cache, layer, group):
        """Keys and values of a sequence's head, [blocks, ..]."""
        v = np.asarray(cache.v[layer][0, group])
        return np.asarray(cache.k[layer][0, group]), v.reshape(-1, 16, v.shape[1])

    ctx = after(n)
    state = jax.jit(source.init)(weights, ctx)
    mass = np.zeros((2, 1, 2, CAPACITY // 16), np.float32)
    mass[..., 12] = 9  # beyond the text
    for layer, group in np.ndindex(2, 2):
        mass[layer, 0, group, [2 + layer, 5 + group]] = 1, 2
    keep = jax.jit(source.keep)
    ctx = after(n + 2)
    state = keep(weights, state, ctx, Feedback(draft, None, mass=jnp.asarray(mass)), KeptRows(None))
    small, held = state.cache, n + 1
    assert int(small.shift[0]) == 16 * (10 - 5) and int(small.length[0] + small.shift[0]) == held
    assert not state.mass.any() and int(state.age[0]) == 0
    for layer, group in np.ndindex(2, 2):
        blocks = [0, 2 + layer, 5 + group, 8, 9]
        for copied, whole in zip(by_block(small, layer, group), by_block(ctx.cache, layer, group), strict=True):
            np.testing.assert_array_equal(copied[:5], whole[blocks])
    ctx = after(n + 15)  # across the end of a block
    state = keep(weights, state, ctx, Feedback(draft, None, mass=jnp.asarray(mass)), KeptRows(None))
    assert int(state.cache.shift[0]) == 16 * (10 - 5) and int(state.age[0]) == 13 and (state.mass == mass).all()
    copied, whole = (np.asarray(cache.v[1][0, 1]) for cache in (state.cache, ctx.cache))
    np.testing.assert_array_equal(copied[4 * 16 : 4 * 16 + 20], whole[9 * 16 : 9 * 16 + 20])


def test_a_layer_with_a_window_gets_no_block_before_it(models, tmp_path):
    model = models["f16"]
    loaded = load_drafter(model, get_drafter("sparse_kv", gamma=4, **FEW))
    source = dataclasses.replace(loaded.drafter.source, attends=(100, 0))
    ctx = on_target(model, draft_context([IDS[:150]], capacity=CAPACITY, budget=4))
    small = jax.jit(source.init)(loaded.weights(CAPACITY), ctx).cache
    for layer, blocks in enumerate(([3, 4, 5, 8, 9], [0, 1, 2, 8, 9])):
        copied, whole = (np.asarray(cache.k[layer][0]) for cache in (small, ctx.cache))
        np.testing.assert_array_equal(copied[:, :5], whole[:, blocks])
    path = write_tiny_gguf(tmp_path / "m.gguf", architecture="gemma3", full_every=2, window=6, n_layers=2)
    windowed = SparseKv(refresh=10**12).build(specsparse.load(path), None).drafter.source
    assert windowed.attends == (6, 0) and windowed.refresh < 2**31


# Argmax drafts in f16 are the next test's.
@pytest.mark.parametrize(
    ("dtype", "temperature"), cells([("f16", 0.8), ("q8_0", 0.8), ("q8_0", 0.0)], [("q8_0", 0.8)])
)
def test_text_is_plain_decodings(models, dtype, temperature):
    model = models[dtype]
    sampling = SamplingParams(temperature=temperature, top_k=3, max_tokens=50, ignore_eos=True)
    prompts = [IDS[:170], IDS[:20]]
    plain = specsparse.generate(model, prompts, sampling=sampling, seed=1)
    drafter = get_drafter("sparse_kv", gamma=4, temperature=temperature, top_k=3, **FEW)
    got = specsparse.generate(model, prompts, sampling=sampling, seed=1, drafter=drafter, verifier="match")
    assert [g.token_ids for g in got] == [g.token_ids for g in plain]
    assert got[0].stats.counters.num_accepted_tokens > 0


def test_with_all_slots_every_draft_is_accepted(models):
    """Positions and bits of the small cache are the target's."""
    model = models["f16"]
    drafter = get_drafter("sparse_kv", gamma=4, slots=CAPACITY)
    got = specsparse.generate(model, IDS[:170], max_tokens=50, ignore_eos=True, drafter=drafter, verifier="greedy")
    assert got.stats.counters.num_rounds == 10 and got.stats.counters.num_accepted_tokens == 40


def test_two_devices_are_refused_in_one_line(models):
    model = models["f16"]

    class Stepped(type(model.devices)):
        one_program = False

    with pytest.raises(UserError, match="drafter=sparse_kv needs"):
        SparseKv().build(model.with_own_programs(devices=Stepped()), None)
