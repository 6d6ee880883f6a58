"""The small model: what is trained is what the engine runs from the file, and its start is a projection."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specsparse
from specsparse.engine.llama import Want
from specsparse.errors import UserError
from specsparse.kernels.packing.dequant import dequantize
from specsparse.testing import write_tiny_gguf
from specsparse.training.corpus import Text, Window
from specsparse.training.form import Frozen, SmallForm, SmallOptions

TOKENS = np.array([5, 9, 200, 33, 33, 7, 150, 9, 41], np.int32)
OPTIONS = SmallOptions(width=32, heads=2, ffn=96, layers=2)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    path = write_tiny_gguf(folder / "t.gguf", vocab_size=300, context_length=64, norm_eps=1e-4)
    return specsparse.load(path)


def shaken(weights):
    """The same with random numbers added, so that no matrix is 0 and no norm is 1."""
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda x: x + jnp.asarray(rng.normal(0, 0.1, x.shape), jnp.float32), weights)


def window_of(tokens: np.ndarray, *, before: int) -> Window:
    """A text behind `before` rows of another one; all its rows are drafted from."""
    n = before + len(tokens)
    return Window(
        hidden=jnp.zeros((n, 1)), after=jnp.zeros((len(tokens), 1)),
        tokens=jnp.asarray(np.concatenate([np.full(before, 17, np.int32), tokens])),
        position=jnp.asarray([*range(before), *range(len(tokens))]),
        text=jnp.asarray([0] * before + [1] * len(tokens)),
        rows=jnp.arange(before, n), depth=jnp.arange(len(tokens)),
    )  # fmt: skip


def test_the_file_runs_as_it_was_trained(target, tmp_path):
    form = SmallForm(target, OPTIONS)
    weights = shaken(form.first([]))
    ids = jnp.arange(300)
    frozen = Frozen(None, None, ids, None, None)
    embedding, window = target.params.embedding, window_of(TOKENS, before=3)
    (trained,) = jax.jit(form.logits, static_argnums=4)(weights, frozen, embedding, window, 1)

    model = specsparse.load(form.write(tmp_path / "d.gguf", weights, np.arange(300), quant="f32"), kv_dtype="f32")
    assert model.config == form.config
    count = jnp.asarray([len(TOKENS)], jnp.int32)
    cache = model.new_cache(1, 64)
    forward = jax.jit(partial(model.forward, want=Want(logits="all")))
    out, _ = forward(model.params_for(64), TOKENS[None], cache, n_valid_B=count)
    np.testing.assert_allclose(out.logits[0], trained, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(model.tokenizer.encode("a b"), target.tokenizer.encode("a b"))


def test_it_begins_with_what_the_texts_hold_of_the_output_matrix(target):
    """All of it in as many directions as the target has, and the ids of the texts better than others in fewer."""
    rows = np.asarray(dequantize(target.params.output))
    tokens = np.tile(np.arange(20, dtype=np.int32), 10_000)
    texts = [Text(tokens, 1)]
    wide = np.asarray(SmallForm(target, SmallOptions(width=rows.shape[1], heads=2)).first(texts).embedding)
    scale = np.sqrt(np.mean(np.sum(rows[:20] ** 2, axis=1)))  # the others count next to nothing
    np.testing.assert_allclose(wide @ wide.T, rows @ rows.T / scale**2, rtol=1e-3, atol=1e-4)
    few = np.asarray(SmallForm(target, OPTIONS).first(texts).embedding)
    kept = np.sum(few**2, axis=1) / np.sum(wide**2, axis=1)
    assert kept[:20].min() > 0.999 and kept[20:].mean() < 0.7


def test_a_type_that_cannot_be_written_is_refused(target, tmp_path):
    form = SmallForm(target, OPTIONS)
    with pytest.raises(UserError, match="type 'Q9': choose one of"):
        form.write(tmp_path / "d.gguf", form.zeros(), np.arange(300), quant="Q9")
