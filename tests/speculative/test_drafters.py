"""The contract every drafter keeps, and what a round trip through the verifiers does to each."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsparse.errors import UserError
from specsparse.speculative.base import ROOT, DraftKind, Feedback
from specsparse.speculative.drafters import Scripted, get_drafter
from specsparse.speculative.drafters.registry import DRAFTERS, Factory, register
from specsparse.speculative.tree import TreeTemplate, check_parents, node_depths
from specsparse.speculative.trees import get_tree
from specsparse.speculative.verify import match_verdict, valid_verifiers
from specsparse.testing.drafting import draft_context, drafted_ids, model_case

V, C, K = 5, 48, 6
TRUTH = tuple(int(t) for t in np.random.default_rng(7).integers(0, V, C))
TREE = TreeTemplate.kary((2, 2))

CASES = {
    "prompt_lookup": lambda: get_drafter("prompt_lookup", gamma=K),
    "prompt_lookup_min_2": lambda: get_drafter("prompt_lookup", gamma=K, prompt_lookup_min=2, prompt_lookup_max=4),
    "ngram_simple": lambda: get_drafter("ngram-simple", draft_max=K, size_n=2, size_m=4),
    "ngram_map": lambda: get_drafter("ngram-map-k", draft_max=K, size_n=2, size_m=4, min_hits=2),
    "suffix": lambda: get_drafter("suffix", num_speculative_tokens=K, factor=1.5, offset=1),
    "synthetic": lambda: get_drafter("synthetic", gamma=K, rate=0.6),
    "scripted_chain": lambda: get_drafter("scripted", gamma=K, accept=(2, 0, 6), vocab_size=V, truth=TRUTH),
    "scripted_tree": lambda: get_drafter("scripted", template=TREE, ends=(4, ROOT, 1), vocab_size=V, truth=TRUTH),
}

MODEL_CASES = {
    "model": ("model", {}),
    "model_sampled": ("model", {"temperature": 0.8}),
    "layer_skip_p_min": ("layer_skip", {"p_min": 0.3}),
    "sparse_self": ("sparse_self", {"share": 0.5, "temperature": 0.8}),
    "tree_static": ("layer_skip", {"tree": get_tree("static", widths=(2, 2))}),
    "tree_wor": ("model", {"temperature": 0.8, "tree": get_tree("sampled_wor", widths=(2, 1, 1))}),
    "tree_p_split": ("model", {"tree": get_tree("p_split", nodes=K, n_parallel=3, p_split=0.15)}),
    "tree_dynamic": ("model", {"tree": get_tree("dynamic", total=K, depth=3, top_k=2)}),
    "lookup_head": ("lookup_head", {"ngram_min": 3}),
    "lookup_head drawn": ("lookup_head", {"ngram_min": 3, "temperature": 0.7}),
    "head_sampled": ("head", {"temperature": 0.8}),
    "head_dynamic": ("head", {"tree": get_tree("dynamic", total=K, depth=3, top_k=2)}),
}

judge = jax.jit(match_verdict)


def texts(seed, batch=3):
    """Texts over five ids, so that they repeat themselves; different lengths."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, V, n).tolist() for n in rng.integers(1, C - K - 1, batch)]


def row(tree, b):
    return jax.tree.map(lambda x: x[b : b + 1], tree)


def fed(case, ctx):
    """A draft after a prompt, of which the last two tokens arrive through `commit`."""
    drafter, weights, prepare = case
    before = prepare(ctx._replace(length=jnp.maximum(ctx.length - 2, 1)))
    rows = features(drafter, before)
    state = drafter.init(weights, before, hidden=rows)
    drafted = drafter.draft(weights, state, before)
    nothing = jnp.full((len(ctx.length), drafter.max_nodes + 1), V, jnp.int32)  # no drafted token is accepted
    verdict = match_verdict(drafted.draft, nothing)
    after = prepare(ctx)
    hidden = None if rows is None else rows[:, : drafter.max_nodes + 1]
    state = drafter.commit(weights, drafted.state, after, Feedback(drafted.draft, verdict, hidden))
    return drafter.draft(weights, state, after).draft


def features(drafter, ctx, width=64):
    """Some rows for each text, a function of its ids alone; None for drafters that want none."""
    if not drafter.wants_hidden:
        return None
    held = jnp.arange(C)[None] < ctx.length[:, None]
    tokens = jnp.where(held, ctx.tokens, 0).astype(jnp.float32)
    return jnp.sin(tokens[:, :, None] * jnp.arange(1, width + 1, dtype=jnp.float32)[None, None])


def assert_same(a, b):
    """Equal as far as a draft says something: laws of nodes that do not exist may hold anything."""
    jax.tree.map(np.testing.assert_array_equal, a._replace(q=None), b._replace(q=None))
    if a.q is not None:
        exists = np.arange(a.max_nodes)[None] < np.asarray(a.count)[:, None]
        np.testing.assert_array_equal(np.asarray(a.q)[exists], np.asarray(b.q)[exists])


@pytest.fixture(params=[*CASES, *MODEL_CASES], scope="module")
def case(request, tmp_path_factory):
    """Drafter, its weights, and what puts the target into a context."""
    if request.param in CASES:
        return CASES[request.param](), None, lambda ctx: ctx
    source, options = MODEL_CASES[request.param]
    return model_case(tmp_path_factory.mktemp("model"), source, vocab=V, capacity=C, **options)


@pytest.fixture(scope="module")
def drafter(case):
    return case[0]


@pytest.fixture(scope="module")
def traced(case):
    """The compiled `fed` and the batch sizes it was traced for."""
    sizes = []

    def step(ctx):
        sizes.append(ctx.length.shape[0])
        return fed(case, ctx)

    return jax.jit(step), sizes


@pytest.fixture(scope="module")
def compiled(traced):
    return traced[0]


def test_drafters_are_static_and_name_their_draw(drafter):
    assert hash(drafter) == hash(drafter) and isinstance(drafter.kind, DraftKind)
    assert 1 <= drafter.max_depth <= drafter.max_nodes
    assert valid_verifiers(drafter.kind, tree=drafter.tree)


@pytest.mark.parametrize("seed", range(4))
def test_shapes_budget_and_parents(drafter, compiled, seed):
    budget = [0, 2, 100] if seed else [K, 1, 3]
    ctx = draft_context(texts(seed), capacity=C, budget=budget, round=seed)
    draft = compiled(ctx)
    assert draft.tokens.shape == draft.parents.shape == (3, drafter.max_nodes)
    assert {x.dtype for x in (draft.tokens, draft.parents, draft.count)} == {jnp.dtype("int32")}
    assert (draft.q is None) == (drafter.kind is DraftKind.ONE_HOT)
    depths = np.asarray(node_depths(draft.parents, max_depth=drafter.max_depth))
    for b in range(3):
        count = int(draft.count[b])
        assert 0 <= count <= min(budget[b], drafter.max_nodes)
        check_parents(np.asarray(draft.parents[b]).tolist(), count)
        assert depths[b, :count].max(initial=0) <= min(budget[b], drafter.max_depth)
        assert all(0 <= token < V for token in drafted_ids(draft, b))
        if not drafter.tree:
            assert np.asarray(draft.parents[b]).tolist() == list(range(-1, drafter.max_nodes - 1))


@pytest.mark.parametrize("seed", range(4))
def test_nothing_beyond_the_text_is_read(compiled, seed):
    """Poison that is a likely token, and poison that is none."""
    drafts = [compiled(draft_context(texts(seed), capacity=C, budget=K, poison=p)) for p in (-7, 0, 1, 2**31 - 1)]
    for draft in drafts[1:]:
        assert_same(drafts[0], draft)


@pytest.mark.parametrize("seed", range(4))
def test_rows_of_a_batch_are_independent(compiled, seed):
    ctx = draft_context(texts(seed), capacity=C, budget=[K, 2, 4], round=1)
    together = compiled(ctx)
    for b in range(3):
        assert_same(row(together, b), compiled(row(ctx, b)))


def test_one_compilation_serves_every_text(traced):
    step, sizes = traced
    for seed in range(3):
        step(draft_context(texts(seed), capacity=C, budget=seed, round=seed))
    assert sizes.count(3) == 1


def test_a_full_buffer_and_a_single_token(compiled):
    ids = list(TRUTH)
    draft = compiled(draft_context([ids, ids[:1], ids[: C - 1]], capacity=C, budget=K))
    assert ((draft.count >= 0) & (draft.count <= K)).all()


def test_the_cache_passes_through(case):
    drafter, weights, prepare = case
    ctx = draft_context(texts(0), capacity=C, budget=K)

    def check(cache):
        whole = prepare(ctx._replace(cache=cache))
        drafted = drafter.draft(weights, drafter.init(weights, whole, hidden=features(drafter, whole)), whole)
        if whole.cache is cache:
            assert drafted.cache is cache
        else:  # a self-draft writes beyond the length
            assert jax.tree.structure(drafted.cache) == jax.tree.structure(whole.cache)
        return drafted.draft

    jax.eval_shape(check, jnp.ones((3, 2)))


# Scripted


@pytest.mark.parametrize("accepted", range(4))
def test_scripted_chain_accepts_what_it_is_told(accepted):
    drafter = Scripted.chain(3, (accepted,), vocab_size=V)
    ctx = draft_context([TRUTH[:10], TRUTH[:4]], capacity=C, budget=3)
    draft = jax.jit(drafter.draft)(jnp.array(TRUTH, jnp.int32), None, ctx).draft
    target = jnp.array([TRUTH[10:14], TRUTH[4:8]], jnp.int32)
    verdict = judge(draft, target)
    assert verdict.accepted.tolist() == [accepted] * 2
    np.testing.assert_array_equal(verdict.tokens[:, : accepted + 1], target[:, : accepted + 1])


@pytest.mark.parametrize("end", range(-1, TREE.size))
def test_scripted_tree_accepts_the_path_to_any_node(end):
    truth = jnp.array([TRUTH, TRUTH[::-1]], jnp.int32)
    drafter = Scripted(TREE, (ROOT, end), V)
    ctx = draft_context([TRUTH[:10], TRUTH[::-1][:4]], capacity=C, budget=TREE.size, round=3)
    draft = jax.jit(drafter.draft)(truth, None, ctx).draft
    rows = np.asarray(ctx.length)[:, None] + np.array((0, *TREE.depths))[None]
    verdict = judge(draft, jnp.asarray(np.take_along_axis(np.asarray(truth), rows, axis=1)))
    path = list(TREE.path(end))
    assert [n for n in verdict.nodes[0].tolist() if n >= 0] == path
    assert verdict.accepted.tolist() == [len(path)] * 2
    for children in TREE.children:  # siblings never coincide
        assert len({int(draft.tokens[0, node]) for node in children}) == len(children)


def test_scripted_is_wrong_beyond_the_truth():
    ctx = draft_context([TRUTH[:4]], capacity=C, budget=3)
    for truth in ((), TRUTH[:4]):
        draft = jax.jit(Scripted.chain(3, (3,), vocab_size=V, truth=truth).draft)(None, None, ctx).draft
        assert drafted_ids(draft) == [1, 1, 1]


# Registry


def test_every_name_makes_a_drafter():
    options = {"scripted": {"accept": (1,)}}
    for name in DRAFTERS:
        assert get_drafter(name, **options.get(name, {})).max_nodes >= 1


@pytest.mark.parametrize(
    "alias", ["gamma", "num_speculative_tokens", "draft_max", "num_assistant_tokens", "prompt_lookup_num_tokens"]
)
def test_aliases_of_gamma(alias):
    assert {get_drafter(name, **{alias: 9}).max_nodes for name in DRAFTERS} == {9}


def test_prompt_lookup_names():
    named = get_drafter("ngram", num_speculative_tokens=5, prompt_lookup_max=4, prompt_lookup_min=2)
    assert named == get_drafter("prompt_lookup", gamma=5, ngram_max=4, ngram_min=2)
    assert get_drafter("prompt_lookup", ngram_min=6).ngram_max == 6


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("promt_lookup", {}, ["drafter=promt_lookup", "did you mean prompt_lookup?"]),
        ("zzz", {}, ["drafter=zzz", "suffix", "scripted"]),
        ("prompt_lookup", {"ngram_maks": 3}, ["drafter.ngram_maks", "did you mean ngram_max?"]),
        ("prompt_lookup", {"gamma": 0}, ["drafter.gamma=0", "1..512"]),
        ("prompt_lookup", {"gamma": 4.0}, ["drafter.gamma=4.0", "int"]),
        ("prompt_lookup", {"gamma": True}, ["drafter.gamma=True", "int"]),
        ("prompt_lookup", {"gamma": "4"}, ["drafter.gamma='4'", "int"]),
        ("prompt_lookup", {"gamma": 4, "draft_max": 5}, ["drafter.gamma", "drafter.draft_max", "one"]),
        ("prompt_lookup", {"ngram_max": 2, "ngram_min": 3}, ["ngram_max=2", "ngram_min=3"]),
        ("suffix", {"factor": 0}, ["drafter.factor"]),
        ("suffix", {"min_match": 65}, ["min_match=65", "longest=64"]),
        ("synthetic", {"rate": 1.5}, ["drafter.rate=1.5"]),
        ("synthetic", {"process": "poisson"}, ["poisson", "geometric", "minimum_variance"]),
        ("synthetic", {"rate": 0.5, "length": 2}, ["either"]),
        ("synthetic", {"gamma": 3, "length": 5}, ["5", "1..4"]),
        ("synthetic", {"rates": (0.5, 0.6)}, ["not increase"]),
        ("synthetic", {"rates": "ab"}, ["rates 'ab'", "list of numbers"]),
        ("scripted", {"gamma": 3, "accept": (4,)}, ["scripted"]),
        ("scripted", {"template": TREE, "ends": (0,), "vocab_size": 2}, ["vocab_size=2"]),
    ],
)
def test_bad_options_are_refused_in_one_line(name, options, words):
    with pytest.raises(UserError) as error:
        get_drafter(name, **options)
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)


def test_registering(monkeypatch):
    monkeypatch.setattr("specsparse.speculative.drafters.registry.DRAFTERS", dict(DRAFTERS))
    factory = Factory(lambda: Scripted.chain(1, (1,), vocab_size=V), {})
    register("mine", factory)
    assert get_drafter("mine").max_nodes == 1
    with pytest.raises(ValueError, match="mine"):
        register("mine", factory)
    with pytest.raises(UserError, match="valid: none"):
        get_drafter("mine", gamma=1)
