"""The DSpark drafter against the speculators library's own drafts; its Markov and confidence heads, trees, files."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specsparse
from specsparse import SamplingParams
from specsparse.cli import main as cli
from specsparse.engine import cache as kv
from specsparse.engine.gguf.reader import open_gguf
from specsparse.engine.gguf.writer import NewTensor, write_gguf
from specsparse.errors import UserError
from specsparse.kernels.packing.dequant import pack_float
from specsparse.models.convert.heads import convert_head, read_dflash, write_folder
from specsparse.runtime.method import load_drafter
from specsparse.speculative.drafters import get_drafter
from specsparse.speculative.drafters.heads.dspark import W1, W2
from specsparse.speculative.drafters.sources import FedRows
from specsparse.speculative.policies import get_policy
from specsparse.speculative.policies.base import ActivePolicy, DraftView
from specsparse.speculative.trees import get_tree
from specsparse.testing.drafting import draft_context, on_target, random_dflash, target_rows
from tests.cells import cells
from tests.speculative import rolled_back
from tests.speculative.test_dflash import assert_same, function_rows
from tests.tolerances import HEAD_NMSE, nmse

DATA = Path(__file__).parents[1] / "data"
ORACLE, TARGET = DATA / "dspark", DATA / "eagle3" / "target.gguf"
C = 64


def bound(model, file, **options):
    made = load_drafter(model, get_drafter("dspark", path=file, **options))
    return made.drafter, made.weights(C)


def asked(ctx, threshold=0.4):
    """The context under a policy that reads confidence."""
    policy = get_policy("confidence", threshold=threshold, gamma=6)
    return ctx._replace(policies=(ActivePolicy(policy, policy.init(len(ctx.length))),))


def drafting(drafter):
    """A function: the draft of weights, context and the target's rows."""
    return jax.jit(lambda w, ctx, hidden: drafter.draft(w, drafter.init(w, ctx, hidden=hidden), ctx).draft)


def greedy_chain(drafter, weights, ctx, hidden, *, tokens):
    """Logits [B, K, N], confidence [B, K] or None and tokens [B, K] of a source's chain of argmaxes."""
    source = drafter.source

    @jax.jit
    def run(weights, ctx, hidden):
        one_B = jnp.ones(len(ctx.length), jnp.int32)

        def step(carry, _):
            cache, z_BN = carry
            x_B = source.vocab.token_ids(weights, jnp.argmax(z_BN, axis=-1))
            z_B1N, fed = source.feed(weights, ctx, cache, FedRows(x_B[:, None], one_B))
            return (kv.commit(fed, one_B), z_B1N[:, 0]), (z_BN, source.confidence(cache), x_B)

        begun = source.open(weights, drafter.init(weights, ctx, hidden=hidden), ctx, one_B > 0)
        return jax.tree.map(lambda a: jnp.moveaxis(a, 0, 1), jax.lax.scan(step, begun, length=tokens)[1])

    return jax.tree.map(np.asarray, run(weights, ctx, hidden))


def by_hand(file, h_nD, z_nN, last):
    """The same of one block, from its rows and logits without a Markov head, in numpy as the paper writes it."""
    w, s = {name: file.values(name) for name in file.tensors}, file.shape
    R, first = s.markov_rank, 0 if file.from_anchor else 1
    sigmoid, state, x = (lambda a: 1 / (1 + np.exp(-a))), np.zeros(s.markov_rank), last
    logits, confidences, tokens = [], [], []
    for k in range(len(h_nD)):
        h, e = h_nD[k], w[f"{W1}.weight"][x]
        b = e
        if s.markov_head_type == "gated":
            b = sigmoid(w["markov_gate.weight"] @ [*h, *e] + w["markov_gate.bias"]) * e
        elif s.markov_head_type == "rnn":
            z = w["markov_joint.weight"] @ [*state, *e, *h] + w["markov_joint.bias"]
            gate, b = sigmoid(z[:R]), np.tanh(z[2 * R :])
            state = gate * state + (1 - gate) * np.tanh(z[R : 2 * R])
        if k < first:
            continue
        if s.enable_confidence_head:
            read = [*h, *e] if s.confidence_head_with_markov else h
            confidences.append(sigmoid(w["conf_proj.weight"][0] @ read + w["conf_proj.bias"][0]))
        logits.append(z_nN[k] + w[f"{W2}.weight"] @ b)
        column = int(np.argmax(logits[-1]))
        x = column if file.ids is None else int(file.ids[column])
        tokens.append(x)
    return np.array(logits), np.array(confidences), tokens


@pytest.mark.parametrize("form", ["vanilla", "rnn"])
def test_drafts_are_the_librarys(target, form):
    """The target's features come out of our forward function, the block over our cache."""
    with np.load(ORACLE / form / "io.npz") as arrays:
        io = dict(arrays)
    drafter, weights = bound(target, str(ORACLE / form), gamma=6)
    assert drafter.wants_hidden == tuple(io["aux_layer_ids"])
    texts = [io["input_ids"][: a + 1].tolist() for a in io["anchors"]]
    ctx = asked(on_target(target, draft_context(texts, capacity=C, budget=6)), threshold=0.0)
    hidden = target_rows(target, ctx, drafter.wants_hidden)
    logits, confidence, tokens = greedy_chain(drafter, weights, ctx, hidden, tokens=6)
    assert nmse(logits, io["logits"]) < HEAD_NMSE and nmse(confidence, io["confidence"]) < HEAD_NMSE
    np.testing.assert_array_equal(tokens, io["tokens"])
    if form == "rnn":  # the other forms draft by the same program
        draft = drafting(drafter)(weights, ctx, hidden)
        np.testing.assert_array_equal(draft.tokens, io["tokens"])
        np.testing.assert_array_equal(draft.count, 6)


SOME = list(range(1, 300, 3))
OPTIONS = {
    "vanilla": {"markov": "vanilla", "from_anchor": True},
    "gated": {"markov": "gated", "from_anchor": True},
    "rnn, the last token's row drafts nothing": {"markov": "rnn"},
    "rnn, draft vocabulary": {"markov": "rnn", "from_anchor": True, "ids": SOME},
    "vanilla, no confidence head": {"markov": "vanilla", "enable_confidence_head": False},
    "gated, confidence of the row alone, draft vocabulary, the last token's row drafts nothing": {
        "markov": "gated", "confidence_head_with_markov": False, "ids": SOME,
    },
}  # fmt: skip


# This one and the oracles' have every form and option; the slow ones have them one by one.
@pytest.mark.parametrize("options", cells(OPTIONS, list(OPTIONS)[-1:]))
def test_options_of_the_format(tiny, options):
    file = random_dflash(tiny, block_size=4, layers=1, **OPTIONS[options])
    drafter, weights = bound(tiny, file, gamma=3)
    texts = [list(range(3, 33)), [7, 9, 11]]
    ctx = asked(on_target(tiny, draft_context(texts, capacity=C, budget=4)))
    hidden, model = target_rows(tiny, ctx, drafter.wants_hidden), tiny
    if file.ids is not None:
        own = pack_float(jnp.asarray(file.values("output.weight")))
        model = dataclasses.replace(tiny, params=tiny.params._replace(output=own))
    logits, confidence, tokens = greedy_chain(drafter, weights, ctx, hidden, tokens=file.drafts)
    for b, text in enumerate(texts):
        h_1nD, z_1nN = function_rows(model, file, hidden[b], [text], rows=4)
        z_KN, c_K, x_K = by_hand(file, h_1nD[0], z_1nN[0], text[-1])
        assert nmse(logits[b], z_KN) < HEAD_NMSE and tokens[b].tolist() == x_K
        assert confidence is None if not len(c_K) else nmse(confidence[b], c_K) < HEAD_NMSE


def along(drafter):
    """A function: logits [K + 1, N] after the text and after each of these tokens of one sequence's chain, and the
    confidence [K + 1] of the next, or None."""
    source = drafter.source

    @jax.jit
    def run(weights, ctx, hidden, tokens_K):
        one_B = jnp.ones(1, jnp.int32)

        def step(carry, token):
            cache, z_BN = carry
            z_B1N, fed = source.feed(weights, ctx, cache, FedRows(token[None, None], one_B))
            return (kv.commit(fed, one_B), z_B1N[:, 0]), (z_BN, source.confidence(cache))

        begun = source.open(weights, drafter.init(weights, ctx, hidden=hidden), ctx, one_B > 0)
        return jax.tree.map(lambda a: a[:, 0], jax.lax.scan(step, begun, jnp.append(tokens_K, 0))[1])

    return run


@pytest.mark.parametrize("draw", cells(["top", "wor"], ["wor"]))
def test_a_tree_draws_each_node_by_its_own_path(tiny, draw):
    """A recurrent head: the distribution of a node's children is that of the chain that leads to it."""
    file, heat = random_dflash(tiny, block_size=4, layers=1, from_anchor=True, markov="rnn"), float(draw == "wor")
    tree = get_tree("static", widths=(2, 1, 2), draw=draw)
    drafter, weights = bound(tiny, file, tree=tree, temperature=heat)
    chain = along(bound(tiny, file, gamma=4)[0])
    ctx = on_target(tiny, draft_context([list(range(3, 20))], capacity=C, budget=tree.max_nodes, vocab=300))
    hidden = target_rows(tiny, ctx, drafter.wants_hidden)
    draft = drafting(drafter)(weights, ctx, hidden)
    tokens, parents = draft.tokens[0].tolist(), draft.parents[0].tolist()
    elders: dict[int, list[int]] = {}
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        path, at = [], parent
        while at >= 0:
            path, at = [tokens[at], *path], parents[at]
        z_N = np.array(chain(weights, ctx, hidden, np.array([*path, 0, 0, 0][:3], np.int32))[0][len(path)])
        before = elders.setdefault(parent, [])
        z_N[before] = -np.inf
        if draw == "top":
            assert token == int(np.argmax(z_N))
        else:
            np.testing.assert_allclose(draft.q[0, node], jax.nn.softmax(z_N), rtol=1e-4, atol=1e-7)
        before.append(token)
    assert len(tokens) == 8


@pytest.mark.slow  # the block's own cache is DFlash's
def test_a_rolled_back_cache_drafts_as_a_new_one(tiny):
    file = random_dflash(tiny, block_size=5, layers=1, from_anchor=True, markov="vanilla")
    drafter, weights = bound(tiny, file, tree=get_tree("dynamic", total=7, depth=4, top_k=2))
    rolled_back.check(tiny, drafter, weights, [list(range(3, 20)), [5, 6, 7], [9] * 30], capacity=C, vocab=299)


def test_a_policy_ends_a_draft_before_the_first_token_of_too_little_confidence(tiny):
    """Whatever that token is: it is not drawn."""
    file = random_dflash(tiny, block_size=6, layers=1, from_anchor=True, markov="gated")
    texts = [list(range(3, 33)), [7, 9, 11], [9] * 20]
    drafter, weights = bound(tiny, file, gamma=6)
    ctx = asked(on_target(tiny, draft_context(texts, capacity=C, budget=6)))
    hidden = target_rows(tiny, ctx, drafter.wants_hidden)
    _, confidence, tokens = greedy_chain(drafter, weights, ctx, hidden, tokens=6)
    threshold = float(np.sort(confidence.ravel())[len(confidence.ravel()) // 3])
    found = drafting(drafter)(weights, asked(ctx, threshold), hidden)
    low = np.concatenate([confidence < threshold, np.ones((3, 1), bool)], axis=1)
    np.testing.assert_array_equal(found.count, np.argmax(low, axis=1))
    assert 0 < int(found.count.sum()) < 18
    for b, count in enumerate(found.count.tolist()):
        assert found.tokens[b, :count].tolist() == tokens[b, :count].tolist()


def test_a_drafter_without_the_head_is_judged_by_the_token_that_it_drew():
    policy, last = get_policy("confidence", threshold=0.4), jnp.asarray([0.3, 0.5])
    view = DraftView(jnp.zeros(2, jnp.int32), last=last)
    assert policy.stop(None, view).tolist() == [True, False]
    assert policy.stop(None, view._replace(confidence=1 - last)).tolist() == [False, False]


def decode(model, **options):
    sampling = SamplingParams(temperature=3.0, max_tokens=24, ignore_eos=True)
    return specsparse.generate(model, ["hello world", "abc"], sampling=sampling, seed=3, **options)


@pytest.mark.slow  # chains and trees of other drafters are, and what is drawn here is the q that is recorded
@pytest.mark.parametrize("verifier", ["token", "block", "mss"])
def test_verifiers_of_distributions_decode(tiny, tmp_path, verifier):
    """Near-uniform p and q overlap, so drafts pass; `block` under the policy, so that drafts have several lengths."""
    file = random_dflash(tiny, block_size=4, layers=1, from_anchor=True, markov="rnn")
    folder = write_folder(file, tmp_path / "d", form="speculators")
    how = {
        "token": {"gamma": 4}, "block": {"policy": get_policy("confidence", threshold=0.3, gamma=4)},
        "mss": {"tree": get_tree("sampled_iid", widths=(2, 1))},
    }[verifier]  # fmt: skip
    drafter = get_drafter("dspark", path=str(folder), temperature=3.0, **how)
    for g in decode(tiny, drafter=drafter, verifier=verifier):
        c = g.stats.counters
        assert len(g.token_ids) == c.num_emitted_tokens == 24 and g.finish_reason == "length"
        assert c.num_emitted_tokens == c.num_rounds + c.num_accepted_tokens
        assert 0 < c.num_accepted_tokens <= c.num_tested <= c.num_draft_tokens


# Files

FORMS = {
    "vanilla": {"markov": "vanilla", "from_anchor": True},
    "gated": {"markov": "gated", "from_anchor": True},
    "rnn, blind, bonus anchor": {"markov": "rnn", "confidence_head_with_markov": False},
    "no confidence head, draft vocabulary": {
        "markov": "vanilla", "from_anchor": True, "enable_confidence_head": False, "ids": SOME,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("form", ["authors", "speculators", "gguf"])
def test_what_is_written_is_read_back(tiny, tmp_path, form, kind):
    file = random_dflash(tiny, layers=1, **FORMS[kind])
    cannot = {"authors": list(FORMS), "speculators": (), "gguf": ("gated", "rnn, blind, bonus anchor")}[form]

    def write(file):
        if form == "gguf":
            return file.write_gguf(tmp_path / "d.gguf", tokenizer={})
        return write_folder(file, tmp_path / "d", form=form)

    if kind in cannot:
        with pytest.raises(UserError, match="no place"):
            write(file)
    else:
        assert_same(file, read_dflash(write(file)))
    if form == "authors" and file.from_anchor and file.ids is None:  # whose class has matrices of its own
        own = {name: file.values(name) for name in file.tensors}
        own |= dict.fromkeys(("token_embd.weight", "output.weight"), np.ones((300, tiny.config.d_model), np.float32))
        facts = {name: getattr(file, name) for name in ("shape", "rope", "context", "block_size", "mask_token")}
        whole = type(file).from_arrays(own, path=file.path, from_anchor=True, target=file.target, **facts)
        assert_same(whole, read_dflash(write(whole)))
        assert json.loads((tmp_path / "d" / "config.json").read_text())["architectures"] == ["Qwen3DSparkModel"]


def test_the_command_line(tmp_path, capsys):
    """From the library's folder to the form of llama.cpp, and back; each is inspected."""
    drafter, gguf, folder = str(ORACLE / "vanilla"), str(tmp_path / "d.gguf"), str(tmp_path / "d")
    assert cli.main(["convert", "dspark", drafter, gguf, "--target", str(TARGET)]) == 0
    metadata = open_gguf(Path(gguf)).metadata
    assert metadata["general.architecture"] == "dflash" and metadata["dflash.sample_from_anchor"]
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    assert cli.main(["convert", "dspark", gguf, folder, "--verifier", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "d" / "config.json").read_text())["architectures"] == ["DSparkDraftModel"]
    assert_same(read_dflash(drafter), read_dflash(gguf))
    assert_same(read_dflash(drafter), read_dflash(folder))
    for path in (drafter, gguf, folder):
        capsys.readouterr()
        assert cli.main(["inspect", path]) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert "DSpark, 2 layers" in out and "6 rows, 6 tokens drafted" in out and "vanilla, rank 16" in out
        assert ("drafter=dspark drafter.path=" in out) == (path == gguf)
    assert cli.main(["convert", "dflash", drafter, folder + "2"]) == 2
    assert "take convert dspark" in capsys.readouterr().err


def test_llama_cpps_earlier_name_is_read(tmp_path):
    """Architecture `dspark`, with the rank as a key, and no word on the anchor: its row drafts."""
    first = read_dflash(ORACLE / "vanilla")
    whole = open_gguf(first.write_gguf(tmp_path / "d.gguf", tokenizer={}))
    renamed = {k.replace("dflash.", "dspark.", 1): v for k, v in whole.metadata.items()}
    renamed |= {"general.architecture": "dspark"}
    del renamed["dspark.sample_from_anchor"]
    tensors = [NewTensor.from_file(t) for t in whole.tensors.values()]
    assert_same(first, read_dflash(write_gguf(tmp_path / "e.gguf", renamed, tensors)))
    with pytest.raises(UserError, match="rank 16, its keys say 8"):
        read_dflash(write_gguf(tmp_path / "f.gguf", renamed | {"dspark.markov_rank": 8}, tensors))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"markov_head_type": "fir"}, "markov_head_type"),
        ({"markov_rank": 0}, "markov_rank"),
        ({"markov_rank": 8}, "markov_w1"),
        ({"confidence_head_with_markov": False}, "conf_proj"),
        ({"enable_confidence_head": False}, "conf_proj"),
        ({"speculators_model_type": "dflash"}, "conf_proj.* is none of a DFlash drafter"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_configs_are_refused_by_name(tmp_path, config, words):
    folder = shutil.copytree(ORACLE / "vanilla", tmp_path / "d")
    values = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match=words):
        read_dflash(folder)


def test_the_other_drafter_is_named(target, tiny):
    with pytest.raises(UserError, match="is a DSpark drafter: take drafter=dspark"):
        load_drafter(target, get_drafter("dflash", path=str(ORACLE / "rnn")))
    with pytest.raises(UserError, match="is a DFlash drafter: take drafter=dflash"):
        bound(target, str(DATA / "dflash"))
    with pytest.raises(UserError, match="do not depend on the draft"):
        bound(target, str(ORACLE / "rnn"), tree=get_tree("ddtree", nodes=4, depth=2))
    with pytest.raises(UserError, match="take convert dflash"):
        convert_head("dspark", DATA / "dflash", Path("x"))
