"""Steps of one width on xla kernels: rows see neither place nor neighbours, and speculation writes plain text."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import specsparse
from specsparse import SamplingParams
from specsparse.engine import cache as kv
from specsparse.engine.fixed_width import check_rows
from specsparse.engine.llama import Want
from specsparse.errors import UserError
from specsparse.kernels import promise
from specsparse.runtime.method import MethodSpec, ready
from specsparse.speculative.drafters import get_drafter
from specsparse.speculative.trees import get_tree
from specsparse.support.registry import Choice
from specsparse.testing import write_tiny_gguf

WIDTH, BEFORE = 8, 62
"""Rows of a step; tokens before those of the tests, so that paths cross from one block of 16 positions to the next."""
PROMPTS = ["hello world hello world hello", "the cat and the abcabcabc", "a"]


@pytest.fixture(scope="module", params=["F32", pytest.param("Q4_0", marks=pytest.mark.slow)])
def model(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("width") / f"{request.param}.gguf"
    write_tiny_gguf(path, quant=request.param, context_length=128, n_layers=2)
    return specsparse.load(path, backend="xla", width="auto")


@pytest.fixture(scope="module")
def begun(model):
    """Weights, and the cache of two texts of `BEFORE` tokens."""
    capacity, rng = model.capacity_for(1), np.random.default_rng(0)
    params = model.params_for(capacity)
    feed = model.devices.jit(lambda p, t, c: model.forward(p, t, c, want=Want("none"))[1])
    filled = feed(params, jnp.asarray(rng.integers(3, 250, (2, BEFORE)), jnp.int32), model.new_cache(2, capacity))
    return params, kv.commit(filled, jnp.full(2, BEFORE, jnp.int32))


@pytest.fixture(scope="module")
def run(model, begun):
    """run(tokens_Bn, parents_Bn, n_valid_B) -> logits after what has `begun`."""
    params, filled = begun

    @model.devices.jit
    def step(params, tokens_Bn, parents_Bn, n_valid_B, cache):
        return model.forward(params, tokens_Bn, cache, n_valid_B=n_valid_B, parents_Bn=parents_Bn)[0].logits

    def one(tokens_Bn, parents_Bn, n_valid_B=None):
        n_valid_B = jnp.full(2, np.shape(tokens_Bn)[1], jnp.int32) if n_valid_B is None else jnp.asarray(n_valid_B)
        given = (jnp.asarray(a, jnp.int32) for a in (tokens_Bn, parents_Bn))
        return np.asarray(step(params, *given, n_valid_B, filled))

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
        assert (run(tokens, roots, [rows, WIDTH])[0, :rows] == got[0, :rows]).all()
    assert (run(tokens[:, :3], roots[:, :3]) == got[:, :3]).all()


def test_a_verification_has_the_bits_of_its_tokens_one_by_one_with_a_fixed_width(model, begun, run):
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
        rows = np.resize(tokens[path], WIDTH)
        chain = run(np.tile(rows, (2, 1)), np.tile(np.arange(WIDTH) - 1, (2, 1)), [len(path)] * 2)
        assert (chain[:, len(path) - 1] == tree[:, i]).all()
    params, start = begun
    step = model.devices.jit(lambda p, t, c: model.forward(p, t, c))
    for leaf in (5, 7):  # the second path ends behind the block that the verification began in
        cache = start
        for i in paths[leaf]:
            out, cache = step(params, jnp.full((2, 1), tokens[i], jnp.int32), cache)
            cache = kv.commit(cache, jnp.ones(2, jnp.int32))
            assert (np.asarray(out.logits)[:, 0] == tree[:, i]).all()


HOW = {
    "greedy": (0.0, "match", "prompt_lookup", {"gamma": WIDTH - 1}),
    "chain": (0.9, "match", "layer_skip", {"layers": [0, 1], "gamma": WIDTH - 1}),
    "tree": (0.9, "tree_match", "layer_skip", {"layers": [0, 1], "tree": get_tree("static", widths=(2, 2))}),
}
"""Temperature, verifier and drafter; the model's own layers draft where little else would be accepted."""


@pytest.mark.parametrize("how", ["greedy", *(pytest.param(how, marks=pytest.mark.slow) for how in ("chain", "tree"))])
def test_speculation_writes_the_text_of_plain_decoding_with_a_fixed_width(model, how):
    if model.path.stem != "F32":
        pytest.skip("texts are compared in float32 alone: it is the same program with other weights")
    temperature, verifier, drafter, options = HOW[how]
    sampling = SamplingParams(temperature=temperature, max_tokens=40, ignore_eos=True)
    plain = specsparse.generate(model, PROMPTS, sampling=sampling, seed=3)
    method = {"drafter": get_drafter(drafter, **options), "verifier": verifier}
    got = specsparse.generate(model, PROMPTS, sampling=sampling, seed=3, **method)
    assert [g.token_ids for g in got] == [g.token_ids for g in plain]
    assert sum(g.stats.counters.num_draft_tokens for g in got) > 40
    assert sum(g.stats.counters.num_accepted_tokens for g in got) > 0


def test_an_automatic_width_holds_the_longest_draft(model, tmp_path):
    assert (model.width, model.holding(8), model.holding(17).width, model.holding(64).width) == (8, model, 24, 64)
    assert model.promise.startswith("equal bits") and f"{WIDTH} rows" in model.promise
    assert "24 rows" in model.holding(17).promise and "the fewest tiles" in model.holding(17).promise
    assert model.holding(17).room_for(3) == model.holding(17).room_for(16) == 24  # caches alike for every method
    with pytest.raises(UserError, match="draft 63 tokens at most"):
        model.holding(65)
    path = write_tiny_gguf(tmp_path / "m.gguf")
    asked = specsparse.load(path, backend="xla", width=WIDTH)
    assert asked.holding(17) is asked and "as asked for" in asked.promise
    assert specsparse.load(path, width="auto", backend="reference").width == 0


def test_whoever_decodes_gets_a_model_as_wide_as_the_drafts(model):
    """The API, the server and the chat ask `ready`. What drafts no more than usual keeps plain decoding's width."""
    sampling, ten = SamplingParams(temperature=0.0), get_drafter("prompt_lookup", gamma=10)
    wide, method = ready(MethodSpec(ten, sampling=sampling), model)
    assert (wide.width, method.max_nodes) == (16, 10) and wide is model.holding(12) is wide.holding(9)
    assert ready(MethodSpec(), model)[0] is model is ready(MethodSpec("prompt_lookup", sampling=sampling), model)[0]
    assert ready(MethodSpec(Choice("prompt_lookup", {"gamma": 16})), model)[0] is model.holding(17) is wide.holding(17)
    with pytest.raises(UserError, match="drafter must be a registered name or a Drafter, not int"):
        MethodSpec(3)


@pytest.mark.slow
def test_long_drafts_write_plain_text_of_the_model_that_holds_them(model):
    sampling = {"max_tokens": 40, "ignore_eos": True}
    plain = specsparse.generate(model.holding(11), PROMPTS, **sampling)
    got = specsparse.generate(model, PROMPTS, drafter=get_drafter("prompt_lookup", gamma=10), **sampling)
    assert [g.token_ids for g in got] == [g.token_ids for g in plain]
    streamed = specsparse.stream(model, PROMPTS[0], drafter=get_drafter("prompt_lookup", gamma=10), **sampling)
    assert "".join(streamed) == specsparse.generate(model.holding(11), PROMPTS[0], **sampling).text


def test_what_a_width_does_not_hold_is_one_line(model, tmp_path):
    assert promise("xla").startswith("equal distribution") and promise("native").startswith("equal bits")
    asked = dataclasses.replace(model, narrow=None)  # a width that the user asked for
    with pytest.raises(UserError, match="verify 17 rows, and the model's width is 8: load it with width=24"):
        specsparse.generate(asked, "hello", drafter=get_drafter("prompt_lookup", gamma=16))
    check_rows(17, 0)
    check_rows(8, 8)
    with pytest.raises(UserError, match="draft 63 tokens at most"):
        check_rows(65, 64)
    path = write_tiny_gguf(tmp_path / "m.gguf")
    for options, says in (
        ({"backend": "xla", "width": 12}, "width=12"),
        ({"backend": "reference", "width": 8}, "reference kernels give equal bits at any width"),
        ({"backend": "xla", "width": 8, "mesh": 1}, "for dense models on one device"),
    ):
        with pytest.raises(UserError, match=says) as caught:
            specsparse.load(path, **options)
        assert "\n" not in str(caught.value)
    assert specsparse.load(path, backend="xla").width == 0  # on a CPU only where it is asked for
