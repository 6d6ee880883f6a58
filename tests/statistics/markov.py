"""A model of the real vocabulary whose next token depends on the class of the last one alone, so that its distributions
are few.

The file is a tiny random model with one embedding for each class of ids, and attention that adds nothing. Whatever is
generated, every token is then a draw from one of `CLASSES` distributions known exactly, and half a million draws are a
few hundred texts. The distributions are computed here from the model's logits in float64, by sorting: in no step as the
engine does.
"""

import dataclasses
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from gguf import GGUFReader

import specsparse
from specsparse import SamplingParams
from specsparse.engine.llama import Want
from specsparse.engine.model import Model
from specsparse.testing import write_tiny_gguf

VOCAB = 49_152
CLASSES = 4
DRAFT_LAYERS = (0,)
BLOCK_BYTES = 34  # of Q8_0: a scale in float16, then 32 codes
BINS = 16


def load_markov(path: Path) -> Model:
    """Two layers, of which the first one alone is the draft."""
    write_tiny_gguf(
        path, quant="Q8_0", vocab_size=VOCAB, context_length=1024, n_layers=2, d_model=32, n_heads=1, n_kv_heads=1,
        d_ff=64,
    )  # fmt: skip
    tensors = {t.name: t for t in GGUFReader(path, "r+").tensors}
    embedding = tensors["token_embd.weight"].data
    embedding[:] = embedding[np.arange(VOCAB) % CLASSES]
    for layer in range(2):
        tensors[f"blk.{layer}.attn_output.weight"].data[:] = 0  # scales of zero
    down = tensors["blk.1.ffn_down.weight"].data
    blocks = down.reshape(-1, BLOCK_BYTES).copy()
    blocks[:, :2] = (blocks[:, :2].copy().view(np.float16) * np.float16(0.5)).view(np.uint8)  # a better draft
    down[:] = blocks.reshape(down.shape)
    embedding.flush()
    return specsparse.load(path)


def logits(model: Model, layers: tuple[int, ...] | None = None) -> np.ndarray:
    """float32[CLASSES, VOCAB]: after a token of each class, of the model or of some of its layers."""
    tokens = jnp.arange(CLASSES, dtype=jnp.int32)[:, None]
    run = jax.jit(partial(model.forward, want=Want(layers=layers)))
    out, _ = run(model.params_for(16), tokens, model.new_cache(CLASSES, 16))
    return np.asarray(out.logits)[:, 0]


def exact_distribution(x_V: np.ndarray, s: SamplingParams) -> np.ndarray:
    """float64[VOCAB]: temperature, min-p, top-k, top-p, in this order.

    Raises:
        AssertionError: a token lies so near to a threshold that float32 could decide otherwise.
    """
    z = x_V.astype(np.float64) / s.temperature
    p = np.exp(z - z.max())
    order = np.argsort(-p, kind="stable")
    ranked = p[order]
    keep = len(p)
    if s.min_p > 0:
        keep = _cut(ranked, int((ranked >= s.min_p).sum()))
        assert np.abs(ranked / s.min_p - 1).min() > 1e-5
    if s.top_k > 0:
        keep = _cut(ranked, min(keep, s.top_k))
    if s.top_p < 1:
        share = np.cumsum(ranked[:keep]) / ranked[:keep].sum()
        keep = _cut(ranked, int((share < s.top_p).sum()) + 1)
        assert np.abs(share / s.top_p - 1).min() > 1e-5
    probs = np.zeros_like(p)
    probs[order[:keep]] = ranked[:keep]
    return probs / probs.sum()


def _cut(ranked: np.ndarray, keep: int) -> int:
    assert keep == len(ranked) or ranked[keep] < ranked[keep - 1], "equal logits at the cut"
    return keep


@dataclasses.dataclass(frozen=True)
class Probs:
    """float64[CLASSES, VOCAB]: p of the target and q of the draft after a token of each class."""

    p: np.ndarray
    q: np.ndarray

    @classmethod
    def from_model(cls, model: Model, target: SamplingParams, draft: SamplingParams) -> "Probs":
        p, q = logits(model), logits(model, DRAFT_LAYERS)
        return cls(
            np.stack([exact_distribution(x, target) for x in p]), np.stack([exact_distribution(x, draft) for x in q])
        )

    @property
    def gains(self) -> np.ndarray:
        """bool[CLASSES, VOCAB]: the event p > q, which a sampler without residual draws too seldom."""
        return self.p > self.q

    def bins(self) -> np.ndarray:
        """int[CLASSES, VOCAB], bins of about equal chance, likely tokens first; BINS where p is 0."""
        found = np.full(self.p.shape, BINS)
        for row, p in zip(found, self.p, strict=True):
            order = np.argsort(-p, kind="stable")
            share = np.cumsum(p[order]) - p[order] / 2
            row[order] = np.minimum((share * BINS).astype(int), BINS - 1)
            row[p == 0] = BINS
        return found


def count(prompt: int, texts: list[np.ndarray]) -> np.ndarray:
    """int64[CLASSES, VOCAB]: how often each token came after a token of each class; `prompt` is the first one."""
    counts = np.zeros((CLASSES, VOCAB), np.int64)
    for text in texts:
        before = np.concatenate([[prompt], text[:-1]]) % CLASSES
        np.add.at(counts, (before, text), 1)
    return counts
