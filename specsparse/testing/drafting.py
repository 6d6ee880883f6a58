"""Helpers for tests of drafters: contexts of ids, tiny models under them, and drafts read back as lists."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine import cache as kv
from specsparse.engine.config import ModelConfig, RopeConfig
from specsparse.engine.gguf.reader import open_gguf
from specsparse.engine.llama import Want
from specsparse.engine.model import Model
from specsparse.engine.noise import seed_words
from specsparse.engine.weights import Params
from specsparse.runtime.method import load_drafter
from specsparse.speculative.base import AnyDrafter, Draft, DraftContext, Drafter, Vocabulary
from specsparse.speculative.drafters import get_drafter
from specsparse.speculative.drafters.heads import dflash, dspark, eagle3, head
from specsparse.speculative.drafters.heads.dflash import BlockShape, DFlashFile
from specsparse.speculative.drafters.heads.dspark import DSparkFile, MarkovForm, SparkShape
from specsparse.speculative.drafters.heads.eagle3 import Eagle3File, HeadShape
from specsparse.testing.tiny import DummyTokenizer, model_of, write_tiny_gguf

Case = tuple[Drafter, Any, Callable[[DraftContext], DraftContext]]
"""A drafter, its weights, and the function that puts the target into a context."""


def draft_context(
    texts: Sequence[Sequence[int]], *, capacity: int, budget: int | Sequence[int], round: int = 0, poison: int = -7,
    vocab: int | None = None,
) -> DraftContext:  # fmt: skip
    """A context of B texts of at most `capacity` ids; the slots beyond each text hold `poison`."""
    tokens = np.full((len(texts), capacity), poison, np.int32)
    for row, ids in zip(tokens, texts, strict=True):
        row[: len(ids)] = ids
    B = len(texts)
    return DraftContext(
        tokens=jnp.asarray(tokens),
        length=jnp.asarray(np.array([len(ids) for ids in texts], np.int32)),
        budget=jnp.asarray(np.broadcast_to(np.asarray(budget, np.int32), (B,))),
        seed=jnp.asarray(np.tile(seed_words(3)[None], (B, 1))),
        sample=jnp.asarray(np.arange(B, dtype=np.int32)),
        round=jnp.asarray(np.full((B,), round, np.int32)),
        vocabulary=None if vocab is None else Vocabulary(vocab),
    )


def drafted_ids(draft: Draft, b: int = 0) -> list[int]:
    """Ids of the nodes that sequence b really drafted."""
    return np.asarray(draft.tokens)[b, : int(draft.count[b])].tolist()


def tiny_model(folder: Path, *, vocab: int, capacity: int, seed: int = 0, layers: int = 2) -> Model:
    """A tiny random model with a vocabulary of any size, whose tokenizer is a dummy."""
    path = folder / f"tiny{vocab}_{seed}.gguf"
    write_tiny_gguf(
        path, quant="Q8_0", tokenizer="none", vocab_size=vocab, context_length=capacity, n_layers=layers, seed=seed
    )
    f = open_gguf(path)
    return model_of(f, ModelConfig.from_gguf(f), DummyTokenizer(vocab))


def on_target(model: Model, ctx: DraftContext) -> DraftContext:
    """The context with the target's weights, and its cache after all tokens but the last."""
    _, cache = _read(model, ctx.tokens, ctx.length - 1, False)
    return ctx._replace(params=model.params_for(ctx.tokens.shape[1]), cache=cache)


def target_rows(model: Model, ctx: DraftContext, hidden: bool | tuple[int, ...] = True) -> jax.Array:
    """float32[B, C, ..]: the model's hidden rows, as `Want.hidden` says, at every position of the texts."""
    return _read(model, ctx.tokens, ctx.length, hidden)[0]


def _read(model: Model, tokens_BC: jax.Array, count_B: jax.Array, hidden: bool | tuple[int, ...]) -> tuple:
    """Hidden rows, and the cache after the first tokens of each text.

    It is one program of the model's, for all tests that share the model: an op at a time would compile dozens.
    """
    batch, capacity = tokens_BC.shape

    def run(params: Params, cache: kv.KVCache, tokens_BC: jax.Array, count_B: jax.Array) -> tuple:
        held_BC = jnp.where(jnp.arange(capacity, dtype=jnp.int32)[None] < count_B[:, None], tokens_BC, 0)
        want = Want(logits="none", hidden=hidden)
        out, cache = model.forward(params, held_BC, cache, n_valid_B=count_B, want=want)
        return out.hidden, kv.commit(cache, count_B)

    read = model.programs.once((("read", hidden), model.forward), lambda: jax.jit(run))
    return read(model.params_for(capacity), model.new_cache(batch, capacity), tokens_BC, count_B)


def random_head(
    folder: Path, target: Model, *, seed: int = 0, ids: Sequence[int] | None = None, below: Sequence[int] = ()
) -> Path:
    """A head of `target` with random weights; it scores all ids, or those given, and reads such layers below."""
    rng, c = np.random.default_rng(seed), target.config
    tensors = {
        name: rng.normal(*((1, 0.1) if len(shape) == 1 else (0, 1 / np.sqrt(shape[1]))), shape).astype(np.float32)
        for name, shape in head.tensor_shapes(c, len(below)).items()
    }
    path = folder / f"head_{seed}_{len(below)}.gguf"
    every = np.arange(c.vocab_size) if ids is None else np.asarray(ids)
    return head.write_head(path, target, tensors, every, below=below)


def random_eagle3(
    target: Model, *, seed: int = 0, ids: Sequence[int] | None = None, features: int = 3, **options: Any
) -> Eagle3File:
    """An EAGLE-3 head of `target` with random weights and the target's output matrix, or its own for the ids given."""
    rng, c = np.random.default_rng(seed), target.config
    shape = HeadShape(c.d_model, c.n_heads, c.n_kv_heads, c.head_dim, c.d_ff, c.norm_eps, features, **options)
    shapes = dict(eagle3.tensor_shapes(shape, c.d_model))
    if ids is not None:
        shapes["output.weight"] = (len(ids), c.d_model)
    norms = {name: rng.normal(1, 0.1, size) for name, size in shapes.items() if len(size) == 1}
    matrices = {name: rng.normal(0, size[1] ** -0.5, size) for name, size in shapes.items() if len(size) == 2}
    layers = tuple(np.linspace(0, c.n_layers, features).astype(int).tolist())
    return Eagle3File.for_target(norms | matrices, c, path=Path("head"), shape=shape, layers=layers, ids=ids)


def random_dflash(
    target: Model, *, seed: int = 0, block_size: int = 6, layers: int = 2, ids: Sequence[int] | None = None,
    windows: Sequence[int | None] = (), causal: Sequence[bool] = (), from_anchor: bool = False,
    windows_of_block: bool = False, markov: MarkovForm | None = None, **heads: Any,
) -> DFlashFile:  # fmt: skip
    """A block drafter of `target` with random weights, which reads the rows that enter layer 1 and leave the last.

    With `ids` it has an output matrix of its own for them. Windows and causality are those of the layers. With `markov`
    it is a DSpark drafter of that form; `heads` are its other options.
    """
    rng, c = np.random.default_rng(seed), target.config
    facts: dict[str, Any] = dict(
        width=c.d_model, heads=4, kv_heads=2, head_dim=16, d_ff=48, eps=c.norm_eps,
        features=(1, c.n_layers), feature_width=c.d_model, windows_of_block=windows_of_block,
        windows=tuple(windows) or (None,) * layers, causal=tuple(causal) or (False,) * layers,
    )  # fmt: skip
    shape, file = BlockShape(**facts), DFlashFile
    sizes = dict(dflash.tensor_shapes(shape))
    if markov is not None:
        shape, file = SparkShape(**facts, markov_rank=32, markov_head_type=markov, **heads), DSparkFile
        sizes |= dspark.markov_shapes(shape, c.vocab_size, c.vocab_size if ids is None else len(ids))
    if ids is not None:
        sizes["output.weight"] = (len(ids), c.d_model)
    arrays = {
        name: rng.normal(float(len(size) == 1), 0.1 if len(size) == 1 else 1 / np.sqrt(size[-1]), size)
        for name, size in sizes.items()
    }
    return file.from_arrays(
        arrays, path=Path("random_dflash"), shape=shape, block_size=block_size, mask_token=c.vocab_size - 1,
        rope=RopeConfig(1e4, shape.head_dim, "neox"), context=c.context_length, ids=ids, from_anchor=from_anchor,
        target="random/target",
    )  # fmt: skip


def model_case(folder: Path, source: str, *, vocab: int, capacity: int, **options: Any) -> Case:
    """A drafter on tiny models, its weights, and the function that puts the target into a context.

    Args:
        folder: for the files.
        source: "model" (a draft model of its own), "layer_skip", "head", "lookup_head", "mixed", "eagle3",
            "dflash" or "dspark".
        vocab, capacity: of the models.
        options: of the drafter.
    """
    target = tiny_model(folder, vocab=vocab, capacity=capacity)
    given: dict[str, Any] = {}
    if source == "model":
        given = {"model": tiny_model(folder, vocab=vocab, capacity=capacity, seed=1, layers=1)}
    elif source in ("head", "lookup_head", "mixed"):
        given = {"head": random_head(folder, target)}
    elif source == "eagle3":
        given = {"path": random_eagle3(target, ids=range(1, vocab))}
    elif source == "dflash":
        given = {"path": random_dflash(target, block_size=7, layers=1)}
    elif source == "dspark":
        given = {"path": random_dflash(target, block_size=6, layers=1, from_anchor=True, markov="rnn")}
    spec = get_drafter(source, gamma=6, **given, **options)
    drafter, weights, prepare = on_spec(folder, spec, vocab=vocab, capacity=capacity, target=target)
    return drafter, weights, (lambda ctx: ctx) if source == "model" else prepare


def on_spec(folder: Path, spec: AnyDrafter, *, vocab: int, capacity: int, target: Model | None = None) -> Case:
    """`model_case` of anybody's spec, on a tiny target."""
    target = target or tiny_model(folder, vocab=vocab, capacity=capacity)
    target.params_for(capacity)  # kept by the model: not to be made first inside a trace
    loaded = load_drafter(target, spec)
    weights = None if loaded.weights is None else loaded.weights(capacity)
    return loaded.drafter, weights, lambda ctx: on_target(target, ctx)
