"""EAGLE-3 heads as functions to differentiate: what other software computes. DSpark drafters: what decodes."""

from pathlib import Path
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specsparse
from specsparse.engine.config import ACTIVATION_KEY
from specsparse.engine.rope import RopeConfig, rope_tables
from specsparse.kernels.packing.dequant import dequantize
from specsparse.models.convert.heads import read_eagle3
from specsparse.runtime.method import load_drafter
from specsparse.speculative.drafters import get_drafter
from specsparse.speculative.drafters.heads.eagle3 import Eagle3Weights
from specsparse.testing import write_tiny_gguf
from specsparse.testing.drafting import draft_context, on_target, target_rows
from specsparse.training.corpus import Window
from specsparse.training.dflash_form import DSparkForm
from specsparse.training.eagle_form import EAGLE3_NAMES, Eagle3Form
from specsparse.training.form import Aim, Frozen, Loss, last_inputs
from tests.speculative.test_dspark import along, asked
from tests.tolerances import HEAD_NMSE

ORACLE = Path(__file__).parents[1] / "data" / "eagle3"


def window(features, tokens, texts, depth=None) -> Window:
    """All rows of some texts side by side, each drafted from."""
    position = np.concatenate([np.arange(n) for n in texts])
    text = np.repeat(np.arange(len(texts)), texts)
    n = len(tokens)
    arrays = (features, np.zeros((n, 1)), tokens, position, text, np.arange(n), position if depth is None else depth)
    return Window(*map(jnp.asarray, arrays))


def nmse(found, wanted) -> float:
    return float(np.square(np.asarray(found) - wanted).sum() / np.square(wanted).sum())


def test_eagle3_on_its_own_rows_is_what_speculators_compute():
    """Three tokens of a draft at all positions at once: the library's own training-time test."""
    model = specsparse.load(ORACLE / "target.gguf", float_weights=True)
    file, io = read_eagle3(ORACLE / "default"), np.load(ORACLE / "default" / "io.npz")
    form = Eagle3Form(model, tuple(int(i) for i in io["aux_layer_ids"]))
    assert form.shape.d_ff != file.shape.d_ff  # the head's layer is its own
    weights = Eagle3Weights(**{field: jnp.asarray(file.values(name)) for field, name in EAGLE3_NAMES.items()})
    tables = rope_tables(file.rope, 32)
    frozen = Frozen(weights.output_norm, jnp.asarray(file.values("output.weight")), None, *map(jnp.asarray, tables))
    n = len(io["prefill_tokens"])
    rows = window(io["aux_hidden"][:n].astype(np.float32), io["prefill_tokens"].astype(np.int32), [n])
    found = jax.jit(lambda w: form.logits(w, frozen, model.params.embedding, rows, 3))(weights)
    for s, (ours, theirs) in enumerate(zip(found, io["library_ttt_logits"], strict=True)):
        assert nmse(ours[s:], theirs[: n - s]) < 1e-8, s


def test_losses_are_those_of_their_papers():
    """With gradients: the weight of the divergence in `lk_hybrid` is not differentiated."""
    rng = np.random.default_rng(0)
    p_mN, y_mN = jax.nn.softmax(jnp.asarray(rng.normal(0, 2, (5, 9)))), jnp.asarray(rng.normal(0, 2, (5, 9)))

    def kl(y):
        return jnp.sum(p_mN * (jnp.log(p_mN) - jax.nn.log_softmax(y)), axis=-1)

    def tv(y):
        return 0.5 * jnp.sum(jnp.abs(p_mN - jax.nn.softmax(y)), axis=-1)

    weight_m = jnp.exp(-3 * (1 - tv(y_mN)))
    wanted = {
        "kl": kl, "tv": tv, "nla": lambda y: -jnp.log(1 - tv(y)), "kl_tv": lambda y: 0.1 * kl(y) + 0.9 * tv(y),
        "lk_hybrid": lambda y: weight_m * kl(y) + (1 - weight_m) * tv(y),
    }  # fmt: skip
    assert set(wanted) == set(get_args(Loss))
    for name, loss in wanted.items():
        found = Aim(p_mN, -jnp.sum(p_mN * jnp.log(p_mN), axis=-1), name).loss
        for ours, theirs in ((found, loss), (jax.jacrev(found), jax.jacrev(loss))):
            np.testing.assert_allclose(ours(y_mN), theirs(y_mN), rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    "given", [{"architecture": "qwen3", "head_dim": 32}, {"gated": False}], ids=["qwen3", "no gate"]
)
def test_a_drafter_begins_with_its_targets_last_layer_as_a_plain_one(tmp_path, given):
    """Queries and keys are of the size that a norm of heads gives them; an FFN without a gate has one all the same."""
    said = {} if given.get("gated", True) else {ACTIVATION_KEY: "relu"}
    model = specsparse.load(
        write_tiny_gguf(tmp_path / "m.gguf", n_layers=1, metadata=said, **given), float_weights=True
    )
    found, last, d = last_inputs(model), model.params.layers[-1], model.config.head_dim
    z = np.random.default_rng(0).normal(size=(4000, model.config.d_model)) * np.asarray(last.attn_norm)
    for name, norm in (("attn_q", last.attn_q_norm), ("attn_k", last.attn_k_norm)):
        if norm is None:
            np.testing.assert_array_equal(found[name], dequantize(getattr(last, name)))
            continue
        heads = (z @ np.asarray(found[name]).T).reshape(len(z), -1, d)
        wanted = np.sqrt(np.mean(np.square(norm)))
        np.testing.assert_allclose(np.sqrt(np.mean(np.square(heads), axis=(0, 2))), wanted, rtol=0.1)
    assert (np.asarray(found["ffn_gate"]) == np.asarray(found["ffn_up"])).all() == (last.ffn_gate is None)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": "yarn", "rope_factor": 4.0, "original_context": 64, "attn_factor": 0.9},
        {"rope_scaling": "linear", "rope_factor": 2.0},
        {"freq_factors": True},
    ],
    ids=["yarn", "linear", "frequency factors"],
)
def test_a_trained_head_turns_as_its_target_does(tmp_path, rope):
    """The file says the whole rotation that the head was trained with, not only its base."""
    model = specsparse.load(write_tiny_gguf(tmp_path / "m.gguf", rope_base=5000.0, **rope))
    form = Eagle3Form(model, (0, 1, 2))
    weights = jax.tree.map(lambda a: jnp.full(a.shape, 0.5), form.zeros())
    found = read_eagle3(form.write(tmp_path / "h.gguf", weights, np.arange(9), quant="F32"))
    trained = rope_tables(model.config.rope, 100, model.rope_factors)
    for ours, wanted in zip(rope_tables(found.rope, 100, found.rope_factors), trained, strict=True):
        np.testing.assert_array_equal(ours, wanted)
    plain = rope_tables(RopeConfig(5000.0, found.shape.head_dim, "neox"), 100)
    assert not np.array_equal(plain[0], trained[0])


@pytest.mark.slow
def test_dspark_trains_the_function_that_decodes(tmp_path):
    """A drafter of random weights, written to a file: logits and confidence of every place of the blocks at every row,
    which begin at the tokens that the text has there; and the loss of its authors."""
    vocab, read, n = 300, (0, 2), 12
    model = specsparse.load(
        write_tiny_gguf(tmp_path / "m.gguf", quant="F32", n_layers=2, vocab_size=vocab, context_length=32),
        kv_dtype="f32",
    )  # fmt: skip
    model.params_for(32)
    form, rng = DSparkForm(model, read, 3), np.random.default_rng(0)
    weights = jax.tree.map(lambda a: jnp.float32(rng.normal(0, a.shape[-1] ** -0.5, a.shape)), form.zeros())
    ids, text = np.arange(3, vocab, 2), rng.integers(3, vocab, n + 1)
    spec = get_drafter("dspark", path=form.write(tmp_path / "d.gguf", weights, ids, quant="F32"), gamma=3)
    made = load_drafter(model, spec)
    whole = on_target(model, draft_context([text.tolist()], capacity=32, budget=3))
    features = target_rows(model, whole, read)
    rows = window(np.asarray(features)[0, :n], text[1:].astype(np.int32), [n])
    frozen = Frozen(None, jnp.asarray(form.output_rows(ids)), jnp.asarray(ids, jnp.int32), None, None)
    p_nN = jax.nn.softmax(jnp.asarray(rng.normal(0, 1, (n, len(ids))), jnp.float32))
    aim = Aim(p_nN, -jnp.sum(p_nN * jnp.log(p_nN), axis=-1), form.loss)
    found = jax.jit(lambda w: form.losses(w, frozen, model.params.embedding, rows, 3, aim))(weights)
    decoded = along(made.drafter)
    for row in (0, n - 3):
        ctx = asked(on_target(model, draft_context([text[: row + 2].tolist()], capacity=32, budget=3)))
        after = np.asarray(text[row + 2 : row + 4], np.int32)
        z_KN, c_K = decoded(made.weights(32), ctx, features, after)
        for s, (y_nN, loss_n) in enumerate(found):
            p, q, c = p_nN[row + s], jax.nn.softmax(z_KN[s]), c_K[s]
            assert nmse(y_nN[row + s], z_KN[s]) < HEAD_NMSE
            tv = 0.5 * jnp.abs(p - q).sum()
            wanted = 0.1 * jnp.sum(p * jnp.log(p / q)) + 0.9 * tv - (1 - tv) * jnp.log(c) - tv * jnp.log(1 - c)
            np.testing.assert_allclose(loss_n[row + s], wanted, rtol=1e-4)
