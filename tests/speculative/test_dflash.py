"""The DFlash drafter against the speculators library's own forward; its cache, its distributions, its files."""

import dataclasses
import functools
import itertools
import json
import shutil
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from safetensors.numpy import load_file, save_file

import specsparse
from specsparse import SamplingParams
from specsparse.engine.gguf.reader import open_gguf
from specsparse.engine.gguf.writer import NewTensor, write_gguf
from specsparse.engine.rope import rope_tables
from specsparse.errors import UserError
from specsparse.kernels.packing.dequant import dequantize, embed_rows
from specsparse.kernels.reference.dense import rms_norm
from specsparse.models.convert.heads import read_dflash, write_folder
from specsparse.runtime.method import load_drafter
from specsparse.speculative.drafters import get_drafter
from specsparse.speculative.drafters.heads.dflash import BlockLayer, BlockWeights, sees_block, sees_context
from specsparse.speculative.trees import get_tree
from specsparse.testing import write_tiny_gguf
from specsparse.testing.drafting import draft_context, on_target, random_dflash, target_rows
from specsparse.training.dflash_form import blocks as blocks_of
from tests.cells import cells
from tests.speculative import rolled_back
from tests.tolerances import HEAD_NMSE, nmse

DATA = Path(__file__).parents[1] / "data"
ORACLE = DATA / "dflash"
C = 64


@pytest.fixture(scope="module")
def io():
    with np.load(ORACLE / "io.npz") as arrays:
        return dict(arrays)


def bound(model, file, **options):
    spec = get_drafter("dflash", path=file, **({} if "tree" in options else {"gamma": 5}) | options)
    made = load_drafter(model, spec)
    return made.drafter, made.weights(C)


def trainable(file) -> BlockWeights:
    """The drafter's weights in float32, as they are trained."""

    def of(name):
        return jax.device_put(np.array(file.load(name).dequantize(), np.float32).reshape(file.tensors[name]))

    layers = tuple(
        BlockLayer(*(of(f"blk.{i}.{field}.weight") for field in BlockLayer._fields)) for i in range(file.shape.layers)
    )
    return BlockWeights(of("fc.weight"), of("enc.output_norm.weight"), layers, of("output_norm.weight"))


@functools.partial(jax.jit, static_argnums=0)
def trained_blocks(shape, w, embedding, output, features_TE, blocks, at, tables):
    """Rows after the output norm, and logits, as one program: an op at a time would compile dozens."""
    embedded = embed_rows(embedding, blocks.reshape(-1)).reshape(*blocks.shape, -1)
    place = jnp.arange(len(features_TE), dtype=jnp.int32)
    found = blocks_of(shape, w, features_TE, place, embedded, at, place[None] < at[:, None], tables)[0]
    h = rms_norm(found, w.output_norm, shape.eps)
    return h, h @ dequantize(output).T


def function_rows(model, file, features_TE, texts, *, rows):
    """Rows [T, rows, D] and logits [T, rows, V] of blocks that begin at the ends of texts, by the function that is
    trained."""
    blocks = np.full((len(texts), rows), file.mask_token, np.int32)
    blocks[:, 0] = [text[-1] for text in texts]
    at = np.array([len(text) - 1 for text in texts], np.int32)
    tables, ends = rope_tables(file.rope, C, file.rope_factors), (model.params.embedding, model.params.output)
    return jax.tree.map(
        np.asarray, trained_blocks(file.shape, trainable(file), *ends, features_TE, blocks, at, tables)
    )


def draft_logits(drafter, weights, ctx, hidden):
    """Logits [B, m, N] of a draft by the drafter's own cache, and the draft, of the one pass that it makes."""
    kind, passes = type(drafter.source), []

    def watched(*given, opened=kind.open):
        passes.append(opened(*given))
        return passes[-1]

    @jax.jit
    def run(weights, ctx, hidden):
        with mock.patch.object(kind, "open", watched):
            draft = drafter.draft(weights, drafter.init(weights, ctx, hidden=hidden), ctx).draft
        ((cache, _),) = passes
        return cache.logits, draft

    return run(weights, ctx, hidden)


def test_the_function_that_is_trained_is_the_librarys(io, target):
    file = read_dflash(ORACLE)
    texts = [io["input_ids"][: a + 1].tolist() for a in io["anchors"]]
    _, got = function_rows(target, file, io["aux_hidden"], texts, rows=6)
    assert nmse(got, io["block_logits"]) < HEAD_NMSE


def test_drafts_are_the_librarys_on_our_own_features(io, target):
    """The target's features come out of our forward function, the block over our cache."""
    drafter, weights = bound(target, str(ORACLE))
    assert drafter.wants_hidden == tuple(io["aux_layer_ids"])
    texts = [io["input_ids"][: a + 1].tolist() for a in io["anchors"]]
    ctx = on_target(target, draft_context([*texts, io["input_ids"].tolist()], capacity=C, budget=5))
    hidden = target_rows(target, ctx, drafter.wants_hidden)
    # The ids of the library mean inputs of layers, those of the authors outputs: one apart.
    assert nmse(hidden[2][:24], io["aux_hidden"][:24]) < HEAD_NMSE
    assert nmse(hidden[-1][:32], io["aux_hidden"]) < HEAD_NMSE
    logits, draft = draft_logits(drafter, weights, ctx, hidden)
    assert nmse(logits[:-1], io["block_logits"][:, 1:]) < HEAD_NMSE
    np.testing.assert_array_equal(draft.tokens[:-1], io["block_token_ids"][:, 1:])
    np.testing.assert_array_equal(draft.count, 5)


OPTIONS = {
    "causal": {"causal": (True,), "layers": 1},
    "window": {"windows": (5, None), "causal": (True, False)},
    "window both ways": {"windows": (2, 9), "causal": (False, False)},
    "from the anchor": {"from_anchor": True, "layers": 1},
    "draft vocabulary": {"ids": list(range(1, 300, 3)), "layers": 1},
    "windows of both kinds": {"windows": (5, 9), "causal": (True, False)},
    "windows of blocks": {"windows": (5, 9), "causal": (True, False), "windows_of_block": True},
    "causal, from the anchor, draft vocabulary": {
        "causal": (True,), "from_anchor": True, "ids": list(range(1, 300, 3)), "layers": 1,
    },
}  # fmt: skip


# The last two have every option; full attention both ways is the oracle's above, and how windows count is asked below.
# The slow ones have them one by one.
@pytest.mark.parametrize("options", cells(OPTIONS, list(OPTIONS)[-2:]))
def test_options_of_the_format(tiny, options):
    """Each option decodes as it is trained, beside plain full attention, on the native kernels too (head size 16)."""
    file = random_dflash(tiny, block_size=3, **OPTIONS[options])
    drafter, weights = bound(tiny, file, gamma=file.drafts)
    texts = [list(range(3, 33)), [7, 9, 11]]
    ctx = on_target(tiny, draft_context(texts, capacity=C, budget=3))
    hidden = target_rows(tiny, ctx, drafter.wants_hidden)
    logits, draft = draft_logits(drafter, weights, ctx, hidden)
    skipped = 0 if file.from_anchor else 1
    assert logits.shape[1] == file.drafts == 3 - skipped
    model = tiny
    if file.ids is not None:
        own = specsparse.kernels.packing.dequant.pack_float(jnp.asarray(file.load("output.weight").dequantize()))
        model = dataclasses.replace(tiny, params=tiny.params._replace(output=own))
        assert set(np.asarray(draft.tokens).reshape(-1).tolist()) <= set(file.ids.tolist())
    for b, text in enumerate(texts):
        _, wanted = function_rows(model, file, hidden[b], [text], rows=3)
        assert nmse(logits[b], wanted[0, skipped:]) < HEAD_NMSE


def test_windows_count_as_their_authors_count(tiny):
    """A block of three at position 20, a window of 2. In speculators a row sees context from 2 before the block on, and
    of the block what causality leaves; in llama.cpp no row sees a position that is 2 or more from its own."""
    rows, context = np.arange(3), np.arange(20)
    for of_block, causal in itertools.product((False, True), (False, True)):
        options = {"windows": (2,), "causal": (causal,), "windows_of_block": of_block}
        shape = random_dflash(tiny, layers=1, **options).shape
        seen = np.asarray(sees_context(shape, 0, jnp.full((3,), 20), jnp.asarray(rows), jnp.asarray(context)))
        block = np.asarray(sees_block(shape, 0, 3))
        for row in rows:
            first = 20 - 2 if of_block else 20 + row - 2 + 1
            assert np.flatnonzero(seen[row]).tolist() == list(range(first, 20))
            near, before = (of_block or abs(rows - row) < 2), (not causal or rows <= row)
            assert block[row].tolist() == np.broadcast_to(np.logical_and(near, before), rows.shape).tolist()


@pytest.mark.parametrize("shape", cells(["chain", "tree"], ["tree"]))  # one block either way, kept as one path
def test_a_rolled_back_cache_drafts_as_a_new_one(tiny, shape):
    options = {"tree": get_tree("ddtree", nodes=7, depth=4)} if shape == "tree" else {}
    drafter, weights = bound(tiny, random_dflash(tiny, layers=1), **options)
    rolled_back.check(tiny, drafter, weights, [list(range(3, 20)), [5, 6, 7], [9] * 30], capacity=C, vocab=299)


def test_ddtree_holds_the_most_likely_paths(tiny):
    """All paths of three positions and four ranks, listed: those in the tree are the most likely ones."""
    drafter, weights = bound(tiny, random_dflash(tiny), tree=get_tree("ddtree", nodes=9, depth=3, top_k=9))
    ctx = on_target(tiny, draft_context([list(range(3, 20))], capacity=C, budget=9))
    hidden = target_rows(tiny, ctx, drafter.wants_hidden)
    logits, draft = draft_logits(drafter, weights, ctx, hidden)
    probs = np.asarray(jax.nn.softmax(logits[0, :3], axis=-1), np.float64)
    order = np.argsort(-probs, axis=1, kind="stable")[:, :9]
    all_paths = {}
    for depth in range(1, 4):
        for ranks in np.ndindex(*(9,) * depth):
            ids = tuple(int(order[d, r]) for d, r in enumerate(ranks))
            all_paths[ids] = np.prod([probs[d, i] for d, i in enumerate(ids)])
    wanted = sorted(all_paths, key=lambda ids: -all_paths[ids])[:9]
    tokens, parents = np.asarray(draft.tokens)[0].tolist(), np.asarray(draft.parents)[0].tolist()
    found = []
    for node in range(9):
        ids, at = (), node
        while at >= 0:
            ids, at = (tokens[at], *ids), parents[at]
        found.append(ids)
    assert found == wanted and int(draft.count[0]) == 9


def test_ddtree_is_for_distributions_that_do_not_depend_on_the_draft(tiny):
    spec = get_drafter("layer_skip", layers=[0], tree=get_tree("ddtree", nodes=4, depth=2))
    with pytest.raises(UserError, match="drafter=dflash"):
        load_drafter(tiny, spec)


# Decoding, end to end on the oracle's target

PROMPTS = ["hello world", "abc"]


def decode(model, heat, **options):
    sampling = SamplingParams(temperature=heat, max_tokens=24, ignore_eos=True)
    return specsparse.generate(model, PROMPTS, sampling=sampling, seed=3, **options)


# The others are slow: `block` weighs an EAGLE-3 head's draws in test_eagle3.py, and argmax drafts of a block are
# compared with plain text below.
@pytest.mark.parametrize(
    ("verifier", "heat"), cells([("token", 3.0), ("block", 3.0), ("delta", 0.0)], [("token", 3.0)])
)
def test_verifiers_of_distributions_decode(tiny, tmp_path, verifier, heat):
    """Drawn drafts (`token`, `block`) and one-hot ones (`delta`); near-uniform p and q overlap, so drafts pass."""
    folder = write_folder(random_dflash(tiny, block_size=4, layers=1), tmp_path / "d", form="speculators")
    drafter = get_drafter("dflash", path=str(folder), gamma=3, temperature=heat)
    for g in decode(tiny, 3.0, drafter=drafter, verifier=verifier):
        c = g.stats.counters
        assert len(g.token_ids) == c.num_emitted_tokens == 24 and g.finish_reason == "length"
        assert all(0 <= i < tiny.config.vocab_size for i in g.token_ids)
        assert c.num_emitted_tokens == c.num_rounds + c.num_accepted_tokens
        assert c.num_accepted_tokens == sum(c.num_accepted_tokens_per_pos) <= c.num_tested <= c.num_draft_tokens
        assert heat == 0 or c.num_accepted_tokens > 0


@pytest.mark.parametrize(
    ("verifier", "heat", "words"),
    [("token", 0.0, "token cannot verify one_hot chain"), ("delta", 1.0, "delta cannot verify sampled chain")],
)
def test_unsound_pairs_are_refused(target, verifier, heat, words):
    drafter = get_drafter("dflash", path=str(ORACLE), gamma=5, temperature=heat)
    with pytest.raises(UserError, match=words):
        decode(target, 1.0, drafter=drafter, verifier=verifier)


def test_greedy_text_is_plain_where_whole_blocks_are_accepted(tmp_path):
    """A drafter of the one token that the greedy text repeats: its cache goes on after five accepted and after none.

    A random model whose output matrix is its embedding repeats the last token of its prompt.
    """
    tied = write_tiny_gguf(tmp_path / "m.gguf", quant="F32", vocab_size=300, context_length=C, tied=True)
    tiny = specsparse.load(tied, kv_dtype="f32")
    plain = decode(tiny, 0.0)
    ids = [token for g in plain for token in g.token_ids]
    drafter = get_drafter("dflash", path=random_dflash(tiny, ids=[max(ids, key=ids.count)], layers=1), gamma=5)
    got = decode(tiny, 0.0, drafter=drafter, verifier="greedy")
    assert [g.token_ids for g in got] == [g.token_ids for g in plain]
    accepted = np.array([g.stats.counters.num_accepted_tokens_per_pos for g in got])
    assert accepted[:, 4].sum() > 0 and accepted[:, 0].sum() < sum(g.stats.counters.num_drafts for g in got)


# Files


def assert_same(a, b):
    """Two drafters that are the same in everything but where they lie."""
    shapes = [dataclasses.replace(file.shape, eps=float(np.float32(file.shape.eps))) for file in (a, b)]
    assert shapes[0] == shapes[1]
    for field in dataclasses.fields(a):
        other = ("path", "load", "tensors", "target", "target_classes", "ids", "rope", "rope_scaling", "shape")
        if field.name not in other:
            assert getattr(a, field.name) == getattr(b, field.name), field.name
    assert (a.rope.base, a.rope.dim, a.rope.scaling, a.rope.factor) == (
        b.rope.base, b.rope.dim, b.rope.scaling, b.rope.factor,
    )  # fmt: skip
    np.testing.assert_array_equal(a.ids, b.ids)
    for name in a.tensors.keys() - {"d2t"}:
        np.testing.assert_array_equal(a.load(name).dequantize(), b.load(name).dequantize(), err_msg=name)


KINDS = {
    "plain": {},
    "causal": {"causal": (True, True)},
    "window": {"windows": (5, None), "causal": (True, False)},
    "window both ways": {"windows": (None, 5)},
    "window of blocks": {"windows": (5, None), "causal": (True, False), "windows_of_block": True},
    "from the anchor": {"from_anchor": True},
    "draft vocabulary": {"ids": [*range(1, 300, 3)]},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["authors", "speculators", "gguf"])
def test_what_is_written_is_read_back(tiny, tmp_path, form, kind):
    file = random_dflash(tiny, **KINDS[kind])
    cannot = {
        "authors": ("from the anchor", "draft vocabulary", "window of blocks"),
        "speculators": ("causal", "window", "window both ways"),
        "gguf": ("window", "window of blocks"),
    }[form]

    def write():
        if form == "gguf":
            return file.write_gguf(tmp_path / "d.gguf", tokenizer={})
        return write_folder(file, tmp_path / "d", form=form)

    if kind in cannot:
        with pytest.raises(UserError, match="no place"):
            write()
        return
    assert_same(file, read_dflash(write()))


def test_the_oracle_goes_through_gguf(io, target, tmp_path):
    """From the library's folder to llama.cpp's form and back: the same drafts."""
    file = read_dflash(ORACLE)
    path = file.write_gguf(tmp_path / "d.gguf", tokenizer={"tokenizer.ggml.model": "none"})
    metadata = open_gguf(path).metadata
    assert list(metadata["dflash.target_layers"]) == [1, 4, 6] and metadata["tokenizer.ggml.mask_token_id"] == 511
    assert_same(file, read_dflash(path))
    assert_same(file, read_dflash(write_folder(read_dflash(path), tmp_path / "back")))
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"] and config["dflash_config"]["target_layer_ids"] == [0, 3, 5]


def test_quantised(tiny, tmp_path):
    """Matrices in Q8_0, norms in float32, drafted on the native kernels' quantised products."""
    file = random_dflash(tiny)
    quantised = read_dflash(file.write_gguf(tmp_path / "d.gguf", tokenizer={}, quant="F16"))
    assert quantised.load("fc.weight").type is GGMLQuantizationType.F16
    assert quantised.load("output_norm.weight").type is GGMLQuantizationType.F32
    with pytest.raises(UserError, match="choose"):
        file.write_gguf(tmp_path / "e.gguf", tokenizer={}, quant="Q3_X")


def changed(folder: Path, **config) -> Path:
    """The oracle's folder with other values in its config; dots lead inside."""
    shutil.copytree(ORACLE, folder)
    values = json.loads((folder / "config.json").read_text())
    for key, value in config.items():
        *path, last = key.split("__")
        at = values
        for step in path:
            at = at[step]
        if value is None:
            at.pop(last)
        else:
            at[last] = value
    (folder / "config.json").write_text(json.dumps(values))
    return folder


WINDOWED = {"transformer_layer_config__use_sliding_window": True}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"speculators_model_type": "peagle"}, "peagle"),
        ({"projector_type": "domino"}, "projector_type=domino"),
        ({"shift_label": True}, "shift_label"),
        ({"block_size": 0}, "block_size=0"),
        ({"block_size": "six"}, "block_size"),
        ({"mask_token_id": None}, "mask_token_id"),
        ({"aux_hidden_state_layer_ids": [1, -4, 6]}, "aux_hidden_state_layer_ids"),
        ({"aux_hidden_state_layer_ids": [1, 4]}, "36|fc.weight|missing|is for a target"),
        ({"transformer_layer_config": None}, "transformer_layer_config"),
        ({"transformer_layer_config__attention_bias": True}, "attention_bias"),
        ({"transformer_layer_config__hidden_act": "gelu"}, "hidden_act"),
        ({"transformer_layer_config__model_type": "gpt_oss"}, "gpt_oss"),
        ({"transformer_layer_config__layer_types": ["full_attention"]}, "layer_types"),
        ({"transformer_layer_config__head_dim": 16}, "attn_q"),
        ({"transformer_layer_config__num_attention_heads": 3}, "heads"),
        ({"transformer_layer_config__rope_parameters": {"rope_type": "longrope"}}, "longrope"),
        ({"transformer_layer_config__num_hidden_layers": 3}, "layer_types"),
        ({"transformer_layer_config__num_hidden_layers": 0}, "layers"),
        (
            {"transformer_layer_config__num_hidden_layers": 10**12},
            "num_hidden_layers is 1000000000000, a whole number from 1 to",
        ),
        ({"transformer_layer_config__rms_norm_eps": -1.0}, "rms_norm_eps is -1, a number above 0"),
        ({"transformer_layer_config__head_dim": 10**15}, "head_dim is 1000000000000000, a whole number from 1 to"),
        ({"transformer_layer_config__partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        ({"transformer_layer_config__rope_parameters": {"rope_theta": 0.5}}, "rope_theta is 0.5, a number above 1"),
        (WINDOWED | {"transformer_layer_config__sliding_window": 0}, "sliding_window is 0, a whole number from 1 to"),
        (
            WINDOWED | {"transformer_layer_config__sliding_window": 1 << 40},
            "sliding_window is 1099511627776, a whole number from 1 to",
        ),
        ({"speculators_model_type": None}, "dflash_config|target_layer_ids|mask_token_id"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_configs_are_refused_by_name(target, tmp_path, config, words):
    with pytest.raises(UserError, match=words):
        bound(target, str(changed(tmp_path / "d", **config)))


def test_the_authors_options_are_refused_by_name(tiny, tmp_path):
    folder = write_folder(random_dflash(tiny), tmp_path / "d", form="authors")
    values = json.loads((folder / "config.json").read_text())
    values["dflash_config"]["conv_kernel_size"] = 2
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match="conv_kernel_size"):
        read_dflash(folder)
    values["architectures"] = ["DFlash2DraftModel"]
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match="DFlash2DraftModel"):
        read_dflash(folder)


def test_tensors_of_other_drafters_are_refused(tmp_path):
    folder = shutil.copytree(ORACLE, tmp_path / "d")
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "markov_w1.weight": np.zeros((4, 512), np.float32)}, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"markov_w1.* is none of a DFlash drafter"):
        read_dflash(folder)
    save_file({k: v for k, v in tensors.items() if "q_norm" not in k}, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"attn_q_norm.*missing"):
        read_dflash(folder)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("general.architecture", "eagle3", "no DFlash drafter"),
        ("dflash.block_size", 1000, "block_size"),
        ("dflash.target_layers", None, "target_layers"),
        ("dflash.target_layers", [1, 4], "fc.weight|is for a target"),
        ("dflash.attention.head_count_kv", 3, "divide|attn_k"),
        ("dflash.embedding_length", 0, "embedding_length"),
        ("dflash.rope.scaling.type", "longrope", "longrope"),
        ("dflash.rope.freq_base", 1.0, "freq_base' is 1.0, above 1"),
        ("dflash.attention.sliding_window", 5, "sliding_window_pattern"),
        ("tokenizer.ggml.mask_token_id", None, "mask_token_id"),
        ("tokenizer.ggml.mask_token_id", 4000, "mask token"),
        ("dflash.markov_rank", 4, r"the option .?dflash\.markov_rank.? is not supported"),
        ("dflash.target_layers", [1, -4, 6], "must be a list of layers"),
        ("dflash.target_hidden_size", 64, "fc.weight|is for a target"),
    ],
)
def test_gguf_keys_are_checked(target, tmp_path, key, value, words):
    whole = open_gguf(read_dflash(ORACLE).write_gguf(tmp_path / "d.gguf", tokenizer={}))
    metadata = {k: v for k, v in whole.metadata.items() if k != key} | ({} if value is None else {key: value})
    path = write_gguf(tmp_path / "e.gguf", metadata, [NewTensor.from_file(t) for t in whole.tensors.values()])
    with pytest.raises(UserError, match=words):
        bound(target, str(path))


def test_another_target_is_refused(tiny):
    with pytest.raises(UserError, match=r"layer|width"):
        bound(tiny, str(ORACLE))
    file = random_dflash(tiny)
    with pytest.raises(UserError, match="deeper"):
        bound(tiny, file, tree=get_tree("ddtree", nodes=9, depth=9))
    with pytest.raises(UserError, match="block_size"):
        bound(tiny, file, block_size=9)
    with pytest.raises(UserError, match="value is needed"):
        bound(tiny, None)
    with pytest.raises(UserError, match="vocabulary of its own"):
        bound(tiny, random_dflash(tiny, ids=[3, 5]), draft_vocab=4)


@pytest.mark.slow  # the contract of drafters has it of full attention
def test_the_bits_of_a_draft_do_not_depend_on_the_batch(tiny):
    """Windows and full attention, one after the other: each text alone and in a batch of three."""
    drafter, weights = bound(tiny, random_dflash(tiny, windows=(4, None), causal=(True, False)), temperature=0.7)
    texts = [list(range(3, 20)), [5, 6, 7], [9] * 30]
    wanted = None
    for some in (texts, texts[:1], texts[1:2]):
        ctx = on_target(tiny, draft_context(some, capacity=C, budget=5))
        ctx = ctx._replace(sample=jnp.asarray([texts.index(t) for t in some], jnp.int32))
        hidden = target_rows(tiny, ctx, drafter.wants_hidden)
        logits, draft = draft_logits(drafter, weights, ctx, hidden)
        wanted = (logits, draft) if wanted is None else wanted
        for b, text in enumerate(some):
            at = texts.index(text)
            np.testing.assert_array_equal(logits[b], wanted[0][at])
            np.testing.assert_array_equal(draft.tokens[b], wanted[1].tokens[at])
            np.testing.assert_array_equal(draft.q[b], wanted[1].q[at])


def test_gradients(tiny):
    """What is trained can be: every weight has a finite gradient."""
    file = random_dflash(tiny, layers=1)
    tables = jax.device_put(rope_tables(file.rope, C))
    rng = np.random.default_rng(0)
    features = rng.normal(size=(20, 2 * tiny.config.d_model)).astype(np.float32)
    blocks = rng.normal(size=(2, 2, tiny.config.d_model)).astype(np.float32)
    at, place = np.array([5, 12], np.int32), np.arange(20, dtype=np.int32)

    def loss(w):
        found = blocks_of(file.shape, w, features, place, blocks, at, place[None] < at[:, None], tables)[0]
        return jnp.sum(rms_norm(found, w.output_norm, file.shape.eps) ** 3)

    gradients = jax.jit(jax.grad(loss))(trainable(file))
    assert all(np.isfinite(g).all() and np.abs(g).max() > 0 for g in map(np.asarray, jax.tree.leaves(gradients)))
