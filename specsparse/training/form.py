"""A drafter in training: a start, a function to differentiate, a file."""

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine.gguf.reader import open_gguf
from specsparse.engine.model import Model
from specsparse.engine.pytree import Pytree
from specsparse.kernels import QTensor
from specsparse.kernels.packing.dequant import dequantize
from specsparse.kernels.packing.rows import take_rows
from specsparse.speculative.drafters.heads.eagle3 import default_layers
from specsparse.training.corpus import Text
from specsparse.training.text_windows import Features, Window


class Frozen(NamedTuple):
    """The target's part, which stays as it is.

    Attributes:
        output_norm: float32[D].
        head: float32[N, D], the output rows of the draft vocabulary.
        ids: int32[N], which ids those are.
        cos, sin: float32[positions, d / 2].
    """

    output_norm: jax.Array
    head: jax.Array
    ids: jax.Array
    cos: jax.Array
    sin: jax.Array


class Form(abc.ABC):
    """Base of the drafters that can be trained. Its weights are a pytree of float32 arrays.

    Attributes:
        model: the target.
        name: the end of its file's name.
        drafter: runs the file.
        option: of that drafter, which takes the file.
    """

    name: ClassVar[str]
    drafter: ClassVar[str]
    option: ClassVar[str]

    model: Model

    @property
    @abc.abstractmethod
    def layers(self) -> tuple[int, ...]:
        """Ids of the target's layers whose entering rows a window holds, side by side; the last is their number."""

    def size(self, wanted: int) -> int:
        """N, if `wanted` ids are asked for; 0 for all."""
        vocab_size = self.model.config.vocab_size
        return min(wanted or vocab_size, vocab_size)

    def ids(self, texts: Sequence[Text], wanted: int) -> np.ndarray:
        """int32[N], ascending: the draft vocabulary, the ids that answers hold most often; equally frequent ones by
        id."""
        order = np.argsort(-id_counts(texts, self.model.config.vocab_size), kind="stable")
        return np.sort(order[: self.size(wanted)]).astype(np.int32)

    @abc.abstractmethod
    def first(self, texts: Sequence[Text]) -> Pytree:
        """The weights that training begins with."""

    @abc.abstractmethod
    def zeros(self) -> Pytree:
        """Weights of the same shapes, to read a checkpoint by."""

    @abc.abstractmethod
    def logits(
        self, weights: Pytree, frozen: Frozen, embedding: QTensor, window: Window, count: int
    ) -> list[jax.Array]:
        """float32[m, N] for the s-th token of a draft, s up to `count`, at every drafting row of a window.

        Args:
            weights: differentiated.
            frozen: the target's part, of N ids.
            embedding: the target's, as the model keeps it.
            window: texts with float32 rows.
            count: streams.
        """

    @abc.abstractmethod
    def write(self, path: Path, weights: Pytree, ids: np.ndarray, *, quant: str) -> Path:
        """Writes the file; `ids` int32[N] is the draft vocabulary, `quant` the type of the matrices.

        Raises:
            UserError: a type that cannot be written.
        """


@dataclass(frozen=True)
class FeatureForm(Form):
    """Base of drafters that read fused rows of several of the target's layers, as EAGLE-3 and DFlash do.

    Attributes:
        model: the target.
        below: ids of the layers whose entering rows it reads; none for [2, L / 2, L - 3].
    """

    model: Model
    below: tuple[int, ...] = ()

    @property
    def read(self) -> tuple[int, ...]:
        """The layers that it reads."""
        return self.below or default_layers(self.model.config.n_layers)

    @property
    def layers(self) -> tuple[int, ...]:
        """Those that it reads, and the last rows, for the target's distribution."""
        return (*self.read, self.model.config.n_layers)

    def fused(self, texts: Sequence[Text], *, rows: int = 60_000) -> np.ndarray:
        """float32[D, len(read) D]: the ridge regression of the target's next row on those that it reads, over the
        first `rows` tokens of answers."""
        D, E = self.model.config.d_model, len(self.read) * self.model.config.d_model
        gram, cross = np.zeros((E, E), np.float32), np.zeros((E, D), np.float32)
        for text in Features(self.model, self.layers).of(beginning_with(texts, rows)):
            before, after = text.hidden[:-1, :E], text.hidden[1:, -D:]
            gram, cross = gram + before.T @ before, cross + before.T @ after
        return ridge(gram, cross).T

    def output_rows(self, ids: np.ndarray) -> np.ndarray:
        """float32[N, D]: the target's output rows of a draft vocabulary."""
        return np.asarray(dequantize(take_rows(self.model.params.output, np.asarray(ids))))


def last_inputs(model: Model) -> dict[str, jax.Array]:
    """float32 queries, keys, values, gate and up of the target's last layer, as a plain Llama's layer has them.

    If the target normalises each head of queries and keys, their rows are scaled to about the size that the norm
    gives them: inputs are taken as uncorrelated. An FFN without a gate gives `ffn_up` twice.
    """
    last, d = model.params.layers[-1], model.config.head_dim
    found = {name: dequantize(getattr(last, name)) for name in ("attn_q", "attn_k", "attn_v", "ffn_up")}
    found["ffn_gate"] = found["ffn_up"] if last.ffn_gate is None else dequantize(last.ffn_gate)
    for name, norm in (("attn_q", last.attn_q_norm), ("attn_k", last.attn_k_norm)):
        if norm is not None:
            heads = found[name].reshape(-1, d, found[name].shape[1])
            size = jnp.sqrt(jnp.mean(jnp.sum(jnp.square(heads * last.attn_norm[None, None]), axis=2), axis=1))
            found[name] = (heads * (norm[None] / size[:, None])[:, :, None]).reshape(found[name].shape)
    return found


def owned(weights: Pytree) -> Pytree:
    """float32 copies, since a step donates its weights."""
    return jax.tree.map(lambda a: jnp.array(a, jnp.float32, copy=True), weights)


def ridge(gram_II: np.ndarray, cross_IO: np.ndarray, share: float = 3e-3) -> np.ndarray:
    """[I, O]: the ridge regression whose penalty is `share` of the inputs' mean square."""
    penalty = share * np.trace(gram_II) / len(gram_II)
    return np.linalg.solve(gram_II + np.eye(len(gram_II), dtype=gram_II.dtype) * penalty, cross_IO)


def unit(x: np.ndarray) -> np.ndarray:
    """Rows of mean square 1, float32."""
    x = x.astype(np.float32)
    return x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + np.float32(1e-5))


def id_counts(texts: Sequence[Text], vocab_size: int) -> np.ndarray:
    """int64[V]: how often answers hold each id."""
    return np.bincount(np.concatenate([t.tokens[t.prompt :] for t in texts]), minlength=vocab_size)


def beginning_with(texts: Sequence[Text], rows: int) -> list[Text]:
    """The first texts whose answers hold so many tokens; all if they do not."""
    few, count = [], 0
    for text in texts:
        few.append(text)
        count += len(text.tokens) - text.prompt
        if count >= rows:
            break
    return few


def tokenizer_keys(model: Model) -> dict[str, object]:
    """The keys of a model's file that hold its tokenizer, which llama.cpp reads from a drafter's file too."""
    return {key: value for key, value in open_gguf(model.path).metadata.items() if key.startswith("tokenizer.ggml.")}
