"""Steps of one width on xla kernels: rows see neither place nor neighbours, and speculation writes plain text."""

import jax.numpy as jnp
import numpy as np
import pytest

import specsparse
from specsparse import SamplingParams
from specsparse.engine import cache as kv
from specsparse.engine import weights
from specsparse.engine.fixed_width import check_rows
from specsparse.errors import UserError
from specsparse.kernels import promise
from specsparse.speculative.drafters import get_drafter
from specsparse.speculative.trees import get_tree
from specsparse.testing import write_tiny_gguf

WIDTH = 8
PROMPTS = ["hello world hello world hello", "the cat and the abcabcabc", "a"]


@pytest.fixture(scope="module", params=["Q4_0", "F32"])
def model(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("width") / "m.gguf"
    write_tiny_gguf(path, quant=request.param, context_length=128, n_layers=2)
    return specsparse.load(path, backend="xla", width=WIDTH)


@pytest.fixture(scope="module")
def run(model):
    """run(tokens_Bn, parents_Bn, n_valid_B, length) -> logits after `length` committed tokens, the same for all."""
    capacity = model.capacity_for(1)
    params, rng = model.params_for(capacity), np.random.default_rng(0)
    assert capacity == 128  # that of the context, whatever is asked for
    context = jnp.asarray(rng.integers(3, 250, (2, 24)), jnp.int32)
    _, filled = model.forward(params, context, model.new_cache(2, capacity))
    step = model.devices.jit(lambda t, p, v, c: model.forward(params, t, c, n_valid_B=v, parents_Bn=p)[0].logits)

    def one(tokens_Bn, parents_Bn=None, n_valid_B=None, length=24):
        n_valid_B = jnp.full(2, np.shape(tokens_Bn)[1], jnp.int32) if n_valid_B is None else jnp.asarray(n_valid_B)
        parents_Bn = None if parents_Bn is None else jnp.asarray(parents_Bn, jnp.int32)
        cache = kv.rollback(filled, jnp.full(2, length, jnp.int32))._replace(length=jnp.full(2, length, jnp.int32))
        return np.asarray(step(jnp.asarray(tokens_Bn, jnp.int32), parents_Bn, n_valid_B, cache))

    return one


def test_rows_have_the_bits_of_any_other_place_and_neighbours_with_a_fixed_width(run):
    rng = np.random.default_rng(1)
    tokens = rng.integers(3, 250, (2, WIDTH))
    roots = np.full((2, WIDTH), -1)
    got = run(tokens, roots)
    for _ in range(6):
        order = rng.permutation(WIDTH)
        assert (run(tokens[:, order], roots) == got[:, order]).all()
        others = rng.integers(3, 250, (2, WIDTH))
        others[:, 3] = tokens[:, 3]
        assert (run(others, roots)[:, 3] == got[:, 3]).all()
        others[0] = tokens[0]
        assert (run(others, roots)[0] == got[0]).all()  # the other sequence changed
    for rows in range(1, WIDTH):
        assert (run(tokens[:, :rows], roots[:, :rows]) == got[:, :rows]).all()
        assert (run(tokens, roots, [rows, WIDTH])[0, :rows] == got[0, :rows]).all()


def test_a_verification_has_the_bits_of_its_tokens_one_by_one_with_a_fixed_width(model, run):
    """A chain and a tree, against plain steps."""
    rng = np.random.default_rng(2)
    tokens, parents = rng.integers(3, 250, WIDTH), np.array([-1, 0, 0, 1, 2, 4, 1, 6])
    paths = []
    for i in range(WIDTH):
        path = [i]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        paths.append(path)
    tree = run(np.tile(tokens, (2, 1)), np.tile(parents, (2, 1)))
    for i, path in enumerate(paths):
        chain = run(np.tile(tokens[path], (2, 1)))
        assert (chain[:, -1] == tree[:, i]).all()
    capacity = model.capacity_for(1)
    params, cache = model.params_for(capacity), model.new_cache(2, capacity)
    context = jnp.asarray(np.random.default_rng(0).integers(3, 250, (2, 24)), jnp.int32)
    _, cache = model.forward(params, context, cache)
    cache = kv.commit(cache, jnp.full(2, 24, jnp.int32))
    step = model.devices.jit(lambda t, c: model.forward(params, t, c))
    for i in paths[5]:
        out, cache = step(jnp.full((2, 1), tokens[i], jnp.int32), cache)
        cache = kv.commit(cache, jnp.ones(2, jnp.int32))
        assert (np.asarray(out.logits)[:, 0] == tree[:, i]).all()


@pytest.mark.parametrize("tree", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_speculation_writes_the_text_of_plain_decoding_with_a_fixed_width(model, tree):
    """The model's own layers draft, so that part of it is accepted: chains, and paths of trees."""
    if any(kind != "F32" for kind in weights.types(model.params)):
        pytest.skip("texts are compared in float32 alone: it is the same program with other weights")
    law = SamplingParams(temperature=0.9, max_tokens=24, ignore_eos=True)
    shape = {"tree": get_tree("static", widths=(2, 2))} if tree else {"gamma": WIDTH - 1}
    drafter = get_drafter("layer_skip", layers=[0, 1], **shape)
    plain = specsparse.generate(model, PROMPTS, sampling=law, seed=3)
    how = {"drafter": drafter, "verifier": "tree_match" if tree else "match"}
    got = specsparse.generate(model, PROMPTS, sampling=law, seed=3, **how)
    assert [g.token_ids for g in got] == [g.token_ids for g in plain]
    assert sum(g.stats.counters.num_draft_tokens for g in got) > 40
    assert sum(g.stats.counters.num_accepted_tokens for g in got) > 0


def test_what_a_width_does_not_hold_is_one_line(model, tmp_path):
    assert model.promise.startswith("equal bits") and f"{WIDTH} rows" in model.promise
    assert promise("xla").startswith("equal law") and promise("native").startswith("equal bits")
    with pytest.raises(UserError, match="verify 17 rows, and the model's width is 8: load it with width=24"):
        specsparse.generate(model, "hello", drafter=get_drafter("prompt_lookup", gamma=16))
    check_rows(17, 0)
    check_rows(8, 8)
    with pytest.raises(UserError, match="draft 63 tokens at most"):
        check_rows(65, 64)
    path = write_tiny_gguf(tmp_path / "m.gguf")
    for options, says in (
        ({"backend": "xla", "width": 12}, "a multiple of 8 from 8 to 64"),
        ({"backend": "reference", "width": 8}, "reference kernels give equal bits at any width"),
        ({"backend": "xla", "width": 8, "mesh": 1}, "for dense models on one device"),
    ):
        with pytest.raises(UserError, match=says) as caught:
            specsparse.load(path, **options)
        assert "\n" not in str(caught.value)
    assert specsparse.load(path, backend="xla").width == 0  # on a CPU only where it is asked for
