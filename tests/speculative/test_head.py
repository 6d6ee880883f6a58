"""The head drafter: its q is what the function that is trained says, its cache rolls back, its files are checked."""

import functools

import jax
import numpy as np
import pytest

import specsparse
from specsparse.engine.rope import rope_tables
from specsparse.errors import UserError
from specsparse.runtime.method import load_drafter
from specsparse.speculative.base import ROOT, DraftKind
from specsparse.speculative.drafters import get_drafter
from specsparse.speculative.drafters.heads import head as heads
from specsparse.speculative.drafters.heads.head import write_head
from specsparse.speculative.trees import get_tree
from specsparse.testing import write_tiny_gguf
from specsparse.testing.drafting import draft_context, on_target, random_eagle3, random_head, target_rows
from specsparse.training.corpus import Window
from specsparse.training.eagle_form import HeadForm, HeadWeights
from specsparse.training.form import Frozen
from tests.cells import cells
from tests.speculative import rolled_back

V, C, K = 300, 64, 4
TEXTS = [list(range(3, 20)), [5, 6, 7], [9] * 30]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Float weights and a float cache: what the head computes is then what is trained, but for the order of sums."""
    path = write_tiny_gguf(tmp_path_factory.mktemp("model") / "m.gguf", quant="F32", vocab_size=V, context_length=C)
    loaded = specsparse.load(path, kv_dtype="f32")
    loaded.params_for(C)  # kept by the model: not to be made first inside a trace
    return loaded


@pytest.fixture(scope="module")
def file(model, tmp_path_factory):
    return random_head(tmp_path_factory.mktemp("head"), model, ids=range(0, V, 2))


def bound(model, file, **options):
    spec = get_drafter("head", gamma=K, head=str(file), **options)
    made = load_drafter(model, spec)
    return made.drafter, made.weights(C)


def trainable(weights) -> HeadWeights:
    """The drafter's weights as the trained function takes them."""
    return HeadWeights.from_params(weights.params)


def probs(model, weights, temperature):
    """probs(rows, text, path): q after `text` and the drafted `path`, by the function that is trained: stream s of the
    path's rows.

    `rows` are the target's of the text. The window has C rows whatever it holds: those beyond are of no text. One
    program for each length of a path.
    """
    output = jax.jit(specsparse.kernels.packing.dequant.dequantize)(weights.head)
    frozen = Frozen(model.params.output_norm, output, weights.ids, *rope_tables(model.config.rope, C))
    w, ids, place = trainable(weights), np.asarray(weights.ids), np.arange(C, dtype=np.int32)

    @functools.partial(jax.jit, static_argnums=0)
    def run(count, w, frozen, embedding, window):
        return jax.nn.softmax(HeadForm(model).logits(w, frozen, embedding, window, count)[-1][-1] / temperature)

    def probs(rows, text, path):
        n = len(text) + len(path) - 1
        tokens, hidden = np.zeros(C, np.int32), np.zeros((C, rows.shape[1]), np.float32)
        tokens[:n], hidden[: len(text) - 1] = [*text, *path][1:], rows[: len(text) - 1]
        at = np.arange(len(text) - 2, n, dtype=np.int32)
        of_text, depth = np.where(place < n, 0, -1).astype(np.int32), np.arange(len(at), dtype=np.int32)
        window = Window(hidden, hidden[at], tokens, position=place, text=of_text, rows=at, depth=depth)
        out = np.zeros(V)
        out[ids] = run(len(at), w, frozen, model.params.embedding, window)
        return out

    return probs


OTHERS = {
    "qwen3": {"head_dim": 32},
    "smollm3": {"n_layers": 4},
    "gemma3": {"full_every": 2, "tied": True},
    "llama": {"window": 6, "activation": "relu"},
}
"""Targets whose layers are not a plain Llama's; the head's one layer is."""


def other_target(folder, architecture):
    given = dict(OTHERS[architecture])
    own = {"activation": given.pop("activation", None)}
    path = write_tiny_gguf(
        folder / f"{architecture}.gguf", quant="F32", architecture=architecture, vocab_size=V, context_length=C, **given
    )
    loaded = specsparse.load(path, kv_dtype="f32", **own)
    loaded.params_for(C)
    return loaded


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["chain", "tree", "below"])
def test_q_is_what_the_trained_function_says(model, file, tmp_path, shape):
    tree = {"tree": get_tree("sampled_iid", widths=(2, 2, 1))} if shape == "tree" else {}
    if shape == "below":
        file = random_head(tmp_path, model, ids=range(0, V, 2), below=(0, 1))
    check_q(model, file, tree, (0, 1, model.config.n_layers) if shape == "below" else True)


@pytest.mark.parametrize("architecture", cells(OTHERS, ["gemma3"]))
def test_q_of_other_targets(tmp_path, architecture):
    target = other_target(tmp_path, architecture)
    check_q(target, random_head(tmp_path, target, ids=range(0, V, 2)), {}, True)


@pytest.mark.parametrize("architecture", cells(OTHERS, ["smollm3"]))
def test_other_targets_write_plain_decodings_tokens(tmp_path, architecture):
    target = other_target(tmp_path, architecture)
    plain = specsparse.generate(target, [5, 6, 7], max_tokens=24, ignore_eos=True)
    drafter = get_drafter("head", gamma=K, head=str(random_head(tmp_path, target)))
    got = specsparse.generate(target, [5, 6, 7], max_tokens=24, ignore_eos=True, drafter=drafter)
    assert got.token_ids == plain.token_ids and got.stats.counters.num_draft_tokens > 0


def drafted(drafter, weights, ctx, hidden):
    """The first draft, as one program that takes its weights: what it closed over would be folded while it compiles."""
    run = jax.jit(lambda w, c, h: drafter.draft(w, drafter.init(w, c, hidden=h), c).draft)
    return run(weights, ctx, hidden)


def check_q(model, file, tree, features):
    """The drafter's distributions are those of the function that is trained."""
    drafter, weights = bound(model, file, temperature=0.7, **tree)
    wanted, shape = drafter.wants_hidden, "tree" if tree else "chain"
    assert wanted == features
    nodes = drafter.max_nodes
    ctx = on_target(model, draft_context(TEXTS, capacity=C, budget=nodes, round=4))
    hidden = target_rows(model, ctx, wanted)
    draft = drafted(drafter, weights, ctx, hidden)
    tokens, parents, q = (np.asarray(a) for a in (draft.tokens, draft.parents, draft.q))
    own, hidden = probs(model, weights, 0.7), np.asarray(hidden)
    for b, text in enumerate(TEXTS[:2]):
        assert draft.count[b] == nodes
        for node in (0, 3, 5, 9) if shape == "tree" else (0, nodes - 1):  # a program for each length of a path
            path, at = [], int(parents[b, node])
            while at != ROOT:
                path, at = [int(tokens[b, at]), *path], int(parents[b, at])
            np.testing.assert_allclose(q[b, node], own(hidden[b], text, path), atol=1e-5)
            assert q[b, node, tokens[b, node]] > 0


ROLLED_BACK = [(kind, shape) for kind in ("head", "eagle3") for shape in ("chain", "dynamic")]


@pytest.mark.parametrize(("kind", "shape"), cells(ROLLED_BACK, [("head", "chain"), ("eagle3", "dynamic")]))
def test_a_rolled_back_cache_drafts_as_a_new_one(model, file, kind, shape):
    """Rounds that accept none, some and all; the draft equals that of a drafter that has just read the whole text."""
    options = {"tree": get_tree("dynamic", total=6, depth=3, top_k=2)} if shape == "dynamic" else {}
    own = {"head": str(file)} if kind == "head" else {"path": random_eagle3(model, norm_output=True)}
    made = load_drafter(model, get_drafter(kind, gamma=K, **own, **options))
    drafter, weights = made.drafter, made.weights(C)
    rolled_back.check(model, drafter, weights, TEXTS, capacity=C, vocab=V)


@pytest.mark.slow  # one that reads more does below
def test_a_lone_token_has_no_features_and_still_decodes(model, file):
    plain = specsparse.generate(model, [[7], [3, 4]], max_tokens=20, ignore_eos=True)
    drafter = get_drafter("head", gamma=K, head=str(file))
    got = specsparse.generate(model, [[7], [3, 4]], max_tokens=20, ignore_eos=True, drafter=drafter)
    assert [g.token_ids for g in got] == [g.token_ids for g in plain]


def test_a_head_that_reads_layers_below_decodes(model, tmp_path):
    plain = specsparse.generate(model, [[7], [3, 4, 5, 6]], max_tokens=20, ignore_eos=True)
    file = random_head(tmp_path, model, below=(1,))
    got = specsparse.generate(
        model, [[7], [3, 4, 5, 6]], max_tokens=20, ignore_eos=True, drafter=get_drafter("head", gamma=K, head=str(file))
    )
    assert [g.token_ids for g in got] == [g.token_ids for g in plain]
    assert all(g.stats.counters.num_draft_tokens > 0 for g in got)


def test_a_file_gives_the_weights_that_it_was_made_of(model, tmp_path):
    made = random_head(tmp_path, model, below=(0, 1))
    found = heads.read_head(made, model.config, floats=True)
    assert found.below == (0, 1)
    tensors = HeadWeights.from_params(found.params).tensors()
    again = write_head(tmp_path / "again.gguf", model, tensors, found.ids, below=(0, 1))
    read = [heads.read_head(p, model.config, floats=True).params for p in (made, again)]
    both = list(map(HeadWeights.from_params, read))
    jax.tree.map(np.testing.assert_array_equal, *both)
    bad = write_head(tmp_path / "bad.gguf", model, both[0].tensors(), found.ids, below=(0, 99))
    with pytest.raises(UserError, match=r"layers_below=\[0, 99\]: the target has layers 0 to"):
        heads.read_head(bad, model.config, floats=True)


def test_quantised_heads_load(model, file, tmp_path):
    c = model.config
    tensors = {n: np.ones(s, np.float32) for n, s in heads.tensor_shapes(c).items()}
    path = write_head(tmp_path / "q.gguf", model, tensors, np.arange(V), quant="Q8_0")
    assert path.stat().st_size < file.stat().st_size / 3
    found = heads.read_head(path, c, floats=False)
    assert found.params.fc_hidden.layout.source == "Q8_0" and len(found.ids) == V
    with pytest.raises(UserError, match="type Q5_X cannot be written: choose F32"):
        write_head(tmp_path / "x.gguf", model, tensors, np.arange(V), quant="Q5_X")


def test_a_head_is_found_by_target_by_name_and_by_path(model, file, tmp_path, monkeypatch):
    monkeypatch.setattr(heads, "SHIPPED", tmp_path)
    with pytest.raises(UserError, match="no head was trained for this model"):
        heads.find(None, model.params.output_norm)
    (tmp_path / "mine.gguf").write_bytes(file.read_bytes())
    assert heads.find(None, model.params.output_norm) == heads.find("mine", None) == tmp_path / "mine.gguf"
    assert heads.find(str(file), None) == file
    with pytest.raises(UserError, match=r"drafter\.head=other: no such file; heads with a name: mine"):
        heads.find("other", None)


def test_mistakes_are_one_line(model, file, tmp_path):
    tensors = {n: np.ones(s, np.float32) for n, s in heads.tensor_shapes(model.config).items()}
    other = write_tiny_gguf(tmp_path / "other.gguf", quant="F32", vocab_size=V, d_model=32, d_ff=32)
    cases = {
        "is no head": model.path,
        r"tensor blk\.0\.ffn_up\.weight is missing": write_head(
            tmp_path / "a.gguf", model, {k: v for k, v in tensors.items() if "ffn_up" not in k}, np.arange(4)
        ),
        "must hold ascending ids": write_head(tmp_path / "b.gguf", model, tensors, np.array([3, 2])),
        "the target needs": write_head(
            tmp_path / "c.gguf", model, {**tensors, "fc_token.weight": np.ones((64, 32), np.float32)}, np.arange(4)
        ),
    }
    for message, path in cases.items():
        with pytest.raises(UserError, match=message):
            heads.read_head(path, model.config, floats=True)
    with pytest.raises(UserError, match="the target needs"):
        specsparse.generate(specsparse.load(other), "hello", drafter=get_drafter("head", head=str(file)))


def test_lookup_drafts_where_it_can_and_the_head_elsewhere(model, file):
    texts = [[5, 6, 7, 8, 5, 6, 7, 8, 5, 6], [3, 9, 27, 81, 10, 30]]
    drafter, weights = (lambda b: (b.drafter, b.weights(C)))(
        load_drafter(model, get_drafter("lookup_head", gamma=K, head=str(file), p_min=0.0))
    )
    head_drafter, head_weights = bound(model, file)
    lookup = get_drafter("prompt_lookup", gamma=K, ngram_min=2)
    ctx = on_target(model, draft_context(texts, capacity=C, budget=K))
    hidden = target_rows(model, ctx)

    @jax.jit
    def all_three(weights, head_weights, ctx, hidden):
        found = drafter.draft(weights, drafter.init(weights, ctx, hidden=hidden), ctx)
        alone = head_drafter.draft(head_weights, head_drafter.init(head_weights, ctx, hidden=hidden), ctx).draft
        return found.draft, found.state, lookup.draft(None, None, ctx).draft, alone

    draft, state, copied, headed = all_three(weights, head_weights, ctx, hidden)
    assert state.took.tolist() == [True, False] and draft.count.tolist() == [int(copied.count[0]), K]
    assert draft.tokens[0].tolist() == copied.tokens[0].tolist()
    assert draft.tokens[1].tolist() == headed.tokens[1].tolist() and copied.count[1] == 0


def test_lookup_beside_a_head_that_draws(model, file):
    """Copied tokens count as drawn from distributions of one token; the head's distributions stay as they are."""
    texts = [[5, 6, 7, 8, 5, 6, 7, 8, 5, 6], [3, 9, 27, 81, 10, 30]]
    spec = get_drafter("lookup_head", gamma=K, head=str(file), temperature=0.7, p_min=0.0)
    joined = load_drafter(model, spec)
    drafter, weights = joined.drafter, joined.weights(C)
    alone, head_weights = bound(model, file, temperature=0.7)
    ctx = on_target(model, draft_context(texts, capacity=C, budget=K))
    hidden = target_rows(model, ctx)

    @jax.jit
    def both(weights, head_weights, ctx, hidden):
        found = drafter.draft(weights, drafter.init(weights, ctx, hidden=hidden), ctx).draft
        return found, alone.draft(head_weights, alone.init(head_weights, ctx, hidden=hidden), ctx).draft

    draft, headed = both(weights, head_weights, ctx, hidden)
    assert drafter.kind is DraftKind.SAMPLED and int(draft.count[0]) > 0
    for i in range(int(draft.count[0])):
        assert float(draft.q[0, i, draft.tokens[0, i]]) == 1 and float(draft.q[0, i].sum()) == 1
    assert draft.tokens[1].tolist() == headed.tokens[1].tolist()
    np.testing.assert_array_equal(draft.q[1], headed.q[1])
