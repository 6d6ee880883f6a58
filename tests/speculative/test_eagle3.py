"""EAGLE-3 heads: the oracle that speculators and transformers made, every option, rollback, targets they do not fit.

`tests/data/eagle3` holds random heads of a random Llama, three kinds of them, and what the library computes with them:
features, fused features, the head's rows and the logits of three chained draft steps.
"""

import functools
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specsparse
from specsparse.engine import cache as kv
from specsparse.engine.llama import Want
from specsparse.errors import UserError
from specsparse.kernels.packing.dequant import dequantize
from specsparse.models.convert.heads import read_eagle3
from specsparse.runtime.method import load_drafter
from specsparse.speculative.drafters import get_drafter
from specsparse.speculative.drafters.heads.published import EMBEDDING
from specsparse.speculative.drafters.sources import FedRows
from specsparse.testing import write_tiny_gguf
from specsparse.testing.drafting import draft_context, on_target, random_eagle3, target_rows
from tests.cells import cells
from tests.tolerances import HEAD_NMSE, nmse

ORACLE = Path(__file__).parents[1] / "data" / "eagle3"
V, C, K = 300, 64, 4
TEXT = list(range(3, 20))


def bound(target, path, **options):
    made = load_drafter(target, get_drafter("eagle3", path=path, **options))
    return made.drafter, made.weights(C)


@pytest.fixture(scope="module")
def target():
    loaded = specsparse.load(ORACLE / "target.gguf", kv_dtype="f32")
    loaded.params_for(C)  # kept by the model: not to be made first inside a trace
    return loaded


@functools.partial(jax.jit, static_argnums=0)
def chained(source, weights, ctx, hidden):
    """All that the oracle knows of a head, from the target's features [1, n, ..] on; programs go by the source."""
    n = hidden.shape[1]
    rows, one = jnp.array([n - 1], jnp.int32), jnp.array([1], jnp.int32)
    read = source.read(weights, hidden[:, : n - 1], rows)
    whole, _ = source.run(weights, ctx, source.init(weights, ctx), read, FedRows(ctx.tokens[:, 1:n], rows))
    cache, logits = source.open(weights, source.init(weights, ctx, hidden), ctx, jnp.array([True]))
    steps, tokens, found = [], [], []
    for _ in range(3):
        steps.append(logits[0])
        found.append(cache.root[0])
        tokens.append(source.vocab.token_ids(weights, jnp.argmax(logits[0])))
        logits, cache = source.feed(weights, ctx, cache, FedRows(tokens[-1].reshape(1, 1), one))
        logits, cache = logits[:, 0], kv.commit(cache, one)
    return read[0], whole[0], jnp.stack(steps), jnp.stack(found), jnp.stack(tokens)


@functools.partial(jax.jit, static_argnums=0)
def first_draft(drafter, weights, ctx, hidden):
    return drafter.draft(weights, drafter.init(weights, ctx, hidden=hidden), ctx).draft


FORMS = ["default", "nbr", "normout", "default/eagle3.gguf"]


@pytest.fixture(scope="module")
def seen(target):
    """The target's logits and features [1, n, ..] of a text: two programs for all heads."""
    run = jax.jit(target.forward, static_argnames="want")

    def of(ids, wanted):
        ctx = draft_context([ids.tolist()], capacity=C, budget=3)
        params, cache, n = target.params_for(C), target.new_cache(1, C), len(ids)
        out, _ = run(params, ctx.tokens[:, :n], cache, want=Want(hidden=wanted))
        return ctx._replace(params=params), out

    return of


# `nbr` and `normout` are slow: the transcription below has their options too.
@pytest.mark.parametrize("form", cells(FORMS, ["default", "default/eagle3.gguf"]))
def test_the_oracle(target, seen, form):
    known = np.load(ORACLE / form.partition("/")[0] / "io.npz")
    drafter, weights = bound(target, str(ORACLE / form), gamma=3)
    source, ids = drafter.source, known["input_ids"]
    assert source.wants_hidden == tuple(known["aux_layer_ids"])
    ctx, out = seen(ids, source.wants_hidden)
    assert nmse(out.hidden[0], known["aux_hidden"]) < HEAD_NMSE
    assert nmse(out.logits[0], known["target_logits"]) < HEAD_NMSE
    read, whole, steps, hidden, tokens = chained(source, weights, ctx, out.hidden)
    assert nmse(read, known["fc_output"]) < HEAD_NMSE
    assert nmse(whole, known["prefill_hidden"]) < HEAD_NMSE
    for got, wanted in zip(steps, known["chain_logits"], strict=True):
        assert nmse(got, wanted) < HEAD_NMSE
    assert nmse(hidden, known["chain_hidden"]) < HEAD_NMSE
    assert tokens.tolist() == known["chain_token_ids"].tolist()
    assert first_draft(drafter, weights, ctx, out.hidden).tokens[0].tolist() == known["chain_token_ids"].tolist()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = write_tiny_gguf(tmp_path_factory.mktemp("model") / "m.gguf", quant="F32", vocab_size=V, context_length=C)
    loaded = specsparse.load(path, kv_dtype="f32")
    loaded.params_for(C)
    return loaded


def drafted(one, drafter, weights):
    """The draft after the text, and the target's features of the text."""
    ctx = on_target(one, draft_context([TEXT], capacity=C, budget=K))
    features = target_rows(one, ctx, drafter.wants_hidden)
    return first_draft(drafter, weights, ctx, features), features


OPTIONS = {
    "plain": {},
    "norms": {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
    "eagle 3.1": {"fc_norm": True, "norm_output": True, "features": 4},
    "qwen3": {"qk_norm": True, "biases": ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_down")},
}
OPTIONS["all"] = OPTIONS["norms"] | OPTIONS["eagle 3.1"] | OPTIONS["qwen3"]


def transcribed(file, features, text, path, embedding, output):
    """Logits [V] after the text and a drafted path in float64 numpy: the text's rows, then a chain on its own."""
    s, w = file.shape, {name: file.values(name).astype(np.float64) for name in file.tensors}
    d, group = s.head_dim, s.heads // s.kv_heads

    def norm(x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + s.eps) * w[name]

    def times(name, x):
        return w[f"blk.0.{name}.weight"] @ x + w.get(f"blk.0.{name}.bias", 0)

    def turn(x, position):
        z = (x[: d // 2] + 1j * x[d // 2 :]) * np.exp(1j * position * file.rope.base ** (-np.arange(0, d, 2) / d))
        return np.concatenate([z.real, z.imag])

    def heads(name, x, position):
        rows = times(name, x).reshape(-1, d)
        if s.qk_norm:
            rows = norm(rows, f"blk.0.{name}_norm.weight")
        return [turn(row, position) for row in rows]

    keys, values = [], []

    def row(g, token, position):
        h = norm(g, "blk.0.attn_norm_2.weight")
        x = np.concatenate([norm(embedding[token], "blk.0.attn_norm.weight"), h])
        keys.append(heads("attn_k", x, position))
        values.append(times("attn_v", x).reshape(-1, d))
        mixed = []
        for i, query in enumerate(heads("attn_q", x, position)):
            scores = np.exp([query @ old[i // group] / np.sqrt(d) for old in keys])
            mixed.append(sum(p * old[i // group] for p, old in zip(scores / scores.sum(), values, strict=True)))
        y = (h if s.norm_before_residual else g) + times("attn_output", np.concatenate(mixed))
        z = norm(y, "blk.0.ffn_norm.weight")
        gate = times("ffn_gate", z)
        return y + times("ffn_down", gate / (1 + np.exp(-gate)) * times("ffn_up", z))

    for i, token in enumerate(text[1:]):
        f = features[i].astype(np.float64)
        if s.fc_norm:
            f = np.concatenate([norm(x, f"fc_norm.{j}.weight") for j, x in enumerate(np.split(f, s.features))])
        if s.norm_before_fc:
            f = norm(f, "enc.output_norm.weight")
        y = row(w["fc.weight"] @ f, token, i)
    for i, token in enumerate(path):
        y = row(norm(y, "output_norm.weight") if s.norm_output else y, token, len(text) - 1 + i)
    return output @ norm(y, "output_norm.weight")


@pytest.mark.parametrize("options", cells(OPTIONS, ["plain", "all"]))
def test_every_option_against_a_transcription(model, options):
    """With an output matrix of its own, every second id in any order; the plain one with the target's."""
    ids = np.random.default_rng(1).permutation(V)[::2] if options != "plain" else np.arange(V)
    file = random_eagle3(model, ids=None if options == "plain" else ids, **OPTIONS[options])
    drafter, weights = bound(model, file, gamma=K, temperature=0.7)
    draft, features = drafted(model, drafter, weights)
    embedding, rows = (np.asarray(dequantize(w), np.float64) for w in (model.params.embedding, model.params.output))
    output = rows if options == "plain" else file.values("output.weight").astype(np.float64)
    assert draft.count[0] == K
    for node in range(K):
        path = draft.tokens[0, :node].tolist()
        logits = transcribed(file, np.asarray(features[0]), TEXT, path, embedding, output)
        wanted = np.zeros(V)
        wanted[ids] = np.exp((logits - logits.max()) / 0.7)
        np.testing.assert_allclose(draft.q[0, node], wanted / wanted.sum(), atol=1e-5)


def test_other_kernels_draft_the_same(model):
    """The jnp kernels, with the same weights."""
    other = specsparse.load(model.path, kv_dtype="f32", backend="reference")
    other.params_for(C)
    file, found = random_eagle3(model, norm_before_residual=True), []
    for one in (model, other):
        drafter, weights = bound(one, file, gamma=K)
        ctx = draft_context([TEXT], capacity=C, budget=K)._replace(
            params=one.params_for(C)
        )  # no target's cache is read
        found.append(first_draft(drafter, weights, ctx, target_rows(one, ctx, drafter.wants_hidden)))
    assert found[0].tokens.tolist() == found[1].tokens.tolist()


# `token` weighs the draws of a DFlash drafter in test_dflash.py; argmax drafts under `delta` are in tests/runtime.
@pytest.mark.parametrize("verifier", cells(["token", "block", "delta"], ["block"]))
def test_verifiers(model, verifier):
    """Drawn drafts for those that weigh q, argmax drafts for `delta`; `match` is in tests/contracts."""
    drawn = {"temperature": 0.8} if verifier in ("token", "block") else {}
    drafter = get_drafter("eagle3", path=random_eagle3(model, ids=range(0, V, 2)), gamma=3, **drawn)
    sampling = specsparse.SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True)
    got = specsparse.generate(model, [TEXT, [5, 6]], sampling=sampling, seed=2, drafter=drafter, verifier=verifier)
    assert all(len(g.token_ids) == 40 for g in got)
    assert sum(g.stats.counters.num_draft_tokens for g in got) > 0


@pytest.fixture(scope="module")
def head(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("head") / "head.gguf"
    return str(random_eagle3(model).write_gguf(path, tokenizer={}))


@pytest.mark.parametrize("name", ["eagle3", "dflash", "dspark"])
def test_a_mistyped_file_is_no_name_of_the_hub(name):
    paths = ("heads/no.gguf", "no/folder/of/mine", "owner/repo", "owner/repo:Q4_K_M")
    found = [dict(get_drafter(name, path=path).files) for path in paths]
    assert found == [{"path": "heads/no.gguf"}, {"path": "no/folder/of/mine"}, {}, {}]


@pytest.mark.parametrize("name", ["head", "lookup_head"])
def test_drafter_head_takes_a_gguf_file_of_this_kind(model, head, name):
    """So that a shipped head may be of either kind; beside a lookup too."""
    made = load_drafter(model, get_drafter(name, head=head, gamma=3, p_min=0.0))
    drafter = made.drafter if name == "head" else made.drafter.second
    assert drafter.source == bound(model, head, gamma=3, p_min=0.0)[0].source


@pytest.mark.slow  # the source is that of drafter=eagle3
@pytest.mark.parametrize("name", ["head", "lookup_head"])
def test_a_gguf_file_of_this_kind_decodes_by_the_name_of_a_head(model, head, name):
    spec, sampling = get_drafter(name, head=head, gamma=3, p_min=0.0), {"max_tokens": 12, "ignore_eos": True}
    got = specsparse.generate(model, TEXT, drafter=spec, **sampling)
    assert got.token_ids == specsparse.generate(model, TEXT, **sampling).token_ids and got.stats.counters.num_drafts > 0


def test_a_head_that_names_no_layers_reads_those_of_the_authors(target):
    file = replace(read_eagle3(ORACLE / "nbr"), layers=())
    assert bound(target, file, gamma=2)[0].wants_hidden == (2, 4, 5)


def test_a_draft_vocabulary_of_one_s_own(target):
    """Fewer of the head's ids; none of them is an error."""
    file = read_eagle3(ORACLE / "default")
    some = sorted(file.ids.tolist())[10:20]
    drafter, weights = bound(target, file, gamma=2, draft_vocab=[*some, 3])
    assert weights.ids.tolist() == sorted({*some, 3} & {*file.ids.tolist()}) and drafter.source.vocab.columns >= 10
    with pytest.raises(UserError, match="holds none of the ids that the head scores"):
        bound(target, file, gamma=2, draft_vocab=[next(i for i in range(512) if i not in file.ids)])


def test_a_head_for_another_target_is_refused(target, model):
    file = read_eagle3(ORACLE / "default")
    narrow = {"tensors": {**file.tensors, EMBEDDING: (100, 32)}}
    cases = [
        (model, file, r"is for a target of width 32 \(its own is 32\), m\.gguf has 64"),
        (target, replace(file, layers=(2, 4, 9)), "reads the target's features at layer 9; target.gguf has"),
        (target, replace(file, **narrow), "embeds 100 ids, target.gguf has 512"),
        (target, replace(file, ids=file.ids + 300, vocab_size=1000), "drafts id 8.., target.gguf has 512 ids"),
        (target, replace(file, ids=None), r"scores 128 ids without saying which \(no d2t\)"),
    ]
    for one, head, message in cases:
        with pytest.raises(UserError, match=message):
            bound(one, head)
    with pytest.raises(UserError, match=r"drafter\.path: a value is needed"):
        bound(target, None)
