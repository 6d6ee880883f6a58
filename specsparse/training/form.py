"""What a drafter in training is, whatever it is: a start, a function to differentiate, a file."""

import abc
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import jax
import numpy as np

from specsparse.engine.gguf.reader import open_gguf
from specsparse.engine.model import Model
from specsparse.engine.pytree import Pytree
from specsparse.kernels import QTensor
from specsparse.training.data import Text
from specsparse.training.unroll import Frozen, Window


class Form(abc.ABC):
    """Base of what can be trained. Its weights are a pytree of float32 arrays.

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
        """N, where `wanted` ids are asked for; 0 for all."""
        vocab_size = self.model.config.vocab_size
        return min(wanted or vocab_size, vocab_size)

    def ids(self, texts: Sequence[Text], wanted: int) -> np.ndarray:
        """int32[N], ascending: the draft vocabulary, the ids that answers hold most often."""
        return frequent_ids(texts, self.size(wanted), self.model.config.vocab_size)

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


def frequent_ids(texts: Sequence[Text], count: int, vocab_size: int) -> np.ndarray:
    """int32[N], ascending: the ids that answers hold most often; equally frequent ones by id."""
    order = np.argsort(-id_counts(texts, vocab_size), kind="stable")
    return np.sort(order[: min(count, vocab_size)]).astype(np.int32)


def id_counts(texts: Sequence[Text], vocab_size: int) -> np.ndarray:
    """int64[V]: how often answers hold each id."""
    return np.bincount(np.concatenate([t.tokens[t.prompt :] for t in texts]), minlength=vocab_size)


def beginning_with(texts: Sequence[Text], rows: int) -> list[Text]:
    """The first texts whose answers hold so many tokens; all where they do not."""
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
