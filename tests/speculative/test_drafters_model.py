"""Model drafters: q is the distribution a token was drawn from, a rolled back cache is as good as a new one, and a
draft by the target itself is accepted whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specsparse
from specsparse import SamplingParams
from specsparse.errors import UserError
from specsparse.speculative.base import ROOT, Feedback
from specsparse.speculative.drafters import get_drafter
from specsparse.speculative.policies.base import Fixed
from specsparse.speculative.trees import get_tree
from specsparse.speculative.verifiers.draft_rules import match_verdict
from specsparse.testing import write_tiny_gguf
from specsparse.testing.drafting import draft_context, model_case, tiny_model
from tests.cells import cells

V, C = 24, 64
TEXTS = [list(range(3, 20)), [5, 6, 7], [9] * 30]


def softmax(x, temperature):
    x = x.astype(np.float64) / temperature
    e = np.exp(x - x.max())
    return e / e.sum()


@pytest.fixture(scope="module")
def draft_model(tmp_path_factory):
    """That of `model_case`."""
    return tiny_model(tmp_path_factory.mktemp("draft"), vocab=V, capacity=C, seed=1, layers=1)


# The trimmed one is a chain, and `wor` a tree that draws from all ids.
@pytest.mark.parametrize("shape", cells(["chain", "iid", "wor", "trimmed"], ["wor", "trimmed"]))
def test_q_is_the_distribution_of_the_draw(shape, tmp_path, draft_model):
    """Against the draft model's own logits after each node's path, read without any cache."""
    extra = {
        "iid": {"tree": get_tree("sampled_iid", widths=(2, 2))},
        "wor": {"tree": get_tree("sampled_wor", widths=(2, 2))},
        "trimmed": {"draft_vocab": [2, 3, 5, 7, 11, 13, 17, 19, 23]},
    }.get(shape, {})
    drafter, weights, prepare = model_case(tmp_path, "model", vocab=V, capacity=C, temperature=0.7, **extra)
    ctx = prepare(draft_context(TEXTS, capacity=C, budget=6, round=4))
    draft = jax.jit(lambda w, c: drafter.draft(w, drafter.init(w, c), c).draft)(weights, ctx)
    tokens, parents, q = (np.asarray(a) for a in (draft.tokens, draft.parents, draft.q))
    for b, text in enumerate(TEXTS):
        assert draft.count[b] == 6
        used: dict[int, list[int]] = {}
        for node in range(int(draft.count[b])):
            path, at = [], int(parents[b, node])
            while at != ROOT:
                path, at = [int(tokens[b, at]), *path], int(parents[b, at])
            logits = draft_model.logits([*text, *path])[-1]
            keep = np.zeros(V, bool)
            keep[extra.get("draft_vocab", range(V))] = True
            probs = np.where(keep, softmax(np.where(keep, logits, -1e30), 0.7), 0)
            if shape == "wor":
                probs[used.setdefault(int(parents[b, node]), [])] = 0
                probs /= probs.sum()
                used[int(parents[b, node])].append(int(tokens[b, node]))
            np.testing.assert_allclose(q[b, node], probs, atol=2e-6)
            assert q[b, node, tokens[b, node]] > 0
            assert (q[b, node][~keep] == 0).all()


# A tree is rolled back in test_tli.py, a dynamic one in test_head.py.
@pytest.mark.parametrize("shape", cells(["chain", "p_split", "dynamic"], ["chain"]))
def test_a_rolled_back_cache_drafts_as_a_new_one(shape, tmp_path):
    """Rounds that accept none, some and all; the draft equals that of a drafter that has just read the whole text."""
    trees = {"p_split": {"nodes": 6, "p_split": 0.02}, "dynamic": {"total": 6, "depth": 3, "top_k": 2}}
    options = {"tree": get_tree(shape, **trees[shape])} if shape in trees else {}
    drafter, weights, _ = model_case(tmp_path, "model", vocab=V, capacity=C, **options)
    K = drafter.max_nodes
    init, draft = jax.jit(drafter.init), jax.jit(drafter.draft)

    @jax.jit
    def commit(weights, state, ctx, draft, target_Bn):
        verdict = match_verdict(draft, target_Bn)
        return drafter.commit(weights, state, ctx, Feedback(draft, verdict))

    rng, texts = np.random.default_rng(0), [list(t) for t in TEXTS]
    state = init(weights, draft_context(texts, capacity=C, budget=K))
    for number in range(6):
        ctx = draft_context(texts, capacity=C, budget=K, round=number)
        found = draft(weights, state, ctx)
        fresh = draft(weights, init(weights, ctx), ctx)
        jax.tree.map(np.testing.assert_array_equal, found.draft, fresh.draft)
        target = np.full((3, K + 1), V, np.int32)
        for b, accept in enumerate(((0, 1, 2, 9, 9, 0)[number], 9, int(rng.integers(0, 4)))):
            row, emitted = 0, []
            while len(emitted) < accept and len(texts[b]) + len(emitted) < C - 8:
                children = [i for i in range(int(found.draft.count[b])) if int(found.draft.parents[b, i]) == row - 1]
                if not children:
                    break
                child = children[int(rng.integers(len(children)))]
                target[b, row] = int(found.draft.tokens[b, child])
                emitted.append(int(target[b, row]))
                row = child + 1
            texts[b] += [*emitted, int(rng.integers(3, V))] if len(texts[b]) < C - 8 else []
        after = draft_context(texts, capacity=C, budget=K, round=number)
        state = commit(weights, found.state, after, found.draft, jnp.asarray(target))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A target, and draft models with a few ids fewer and more."""
    folder = tmp_path_factory.mktemp("files")
    config = {"quant": "Q4_0", "d_model": 64, "d_ff": 96, "n_layers": 1, "context_length": 80}
    return {size: write_tiny_gguf(folder / f"{size}.gguf", vocab_size=size, **config) for size in (300, 290, 320)}


@pytest.fixture(scope="module")
def model(files):
    return specsparse.load(files[300])


PROMPTS = ["hello world hello", "abcabcabc"]


ITSELF = [
    ("model", "greedy", 0.0, {}, 4),
    ("layer_skip", "greedy", 0.0, {"layers": [0]}, 4),
    ("model", "token", 0.6, {"temperature": 0.6, "top_k": 20}, 4),
    ("layer_skip", "wor", 0.6, {"temperature": 0.6, "top_k": 20, "layers": [0],
                                "tree": get_tree("sampled_wor", widths=(2, 2))}, 2),
    ("model", "mss", 0.6, {"temperature": 0.6, "top_k": 20, "tree": get_tree("sampled_iid", widths=(2, 2))}, 2),
]  # fmt: skip


# Both sources, a chain and a tree, drawn; argmax drafts of the target itself are in test_tli.py.
@pytest.mark.parametrize(("name", "verifier", "temperature", "options", "depth"), cells(ITSELF, ITSELF[2:4]))
def test_the_target_accepts_its_own_draft(model, name, verifier, temperature, options, depth):
    own = {"model": model} if name == "model" else {}
    drafter = get_drafter(name, gamma=4, **own, **options)
    sampling = SamplingParams(temperature=temperature, top_k=20, max_tokens=40, ignore_eos=True)
    out = specsparse.generate(model, PROMPTS, sampling=sampling, seed=0, drafter=drafter, verifier=verifier)
    for g in out:
        c = g.stats.counters
        assert c.num_rounds == -(-40 // (depth + 1)) and c.num_accepted_tokens == 40 - c.num_rounds


@pytest.mark.parametrize("size", [290, 320])
def test_draft_models_of_other_sizes(model, files, size):
    plain = specsparse.generate(model, PROMPTS, max_tokens=50, ignore_eos=True)
    drafter = get_drafter("model", model=str(files[size]), gamma=3, temperature=1.5)
    out = specsparse.generate(model, PROMPTS, max_tokens=50, ignore_eos=True, drafter=drafter, verifier="match")
    assert [g.token_ids for g in out] == [g.token_ids for g in plain]
    assert len([k for k in model.programs.drafters if k == drafter.with_policy(Fixed(1))]) == 1  # whatever the policy


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("model", {}, "drafter.model"),
        ("model", {"temperature": 0.5, "n_min": 2}, "n_min"),
        ("model", {"special_tokens": "draft"}, "target"),
        ("layer_skip", {"layers": [1, 0]}, "ascending"),
        ("layer_skip", {"layers": [0, 2]}, "0..0"),
        ("layer_skip", {"layers": 3}, "drafter.layers"),
        ("layer_skip", {"draft_vocab": [1, 300]}, "draft_vocab"),
        ("layer_skip", {"draft_vocab": "nowhere.txt"}, "draft_vocab"),
        ("layer_skip", {"tree": "dynamic", "p_min": 0.5}, "tree"),
        ("layer_skip", {"top_p": 0.0}, "top_p"),
    ],
)
def test_mistakes_are_one_line(model, name, options, words):
    with pytest.raises(UserError) as error:
        specsparse.generate(model, "hello", max_tokens=4, drafter=get_drafter(name, **options))
    assert words in str(error.value) and "\n" not in str(error.value)
