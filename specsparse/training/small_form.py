"""A small model as what is trained: where it begins, its function, its file."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine.config import ModelConfig
from specsparse.engine.gguf.reader import open_gguf
from specsparse.engine.model import Model
from specsparse.kernels import QTensor
from specsparse.kernels.packing.dequant import dequantize
from specsparse.models.convert.write import out_type, write_model
from specsparse.training import small
from specsparse.training.data import Text
from specsparse.training.form import Form
from specsparse.training.layer import LayerWeights, layer_shapes
from specsparse.training.small import SmallOptions, SmallWeights, small_config
from specsparse.training.unroll import Frozen, Window


@dataclass(frozen=True)
class SmallForm(Form):
    """A Llama of its own, distilled from the target's laws (Hinton et al. 2015, arXiv:1503.02531).

    It drafts from tokens alone, so every stream of a draft is the same function and one is enough to train.
    """

    name: ClassVar[str] = "draft"
    drafter: ClassVar[str] = "model"
    option: ClassVar[str] = "model"

    model: Model
    options: SmallOptions = field(default_factory=SmallOptions)
    seed: int = 0

    @property
    def config(self) -> ModelConfig:
        """Of the small model."""
        return small_config(self.model.config, self.options)

    @property
    def layers(self) -> tuple[int, ...]:
        """The last rows, for the target's law."""
        return (self.model.config.n_layers,)

    def first(self, texts: Sequence[Text]) -> SmallWeights:
        """The target's output rows along the D directions in which they are largest, weighted by the ids of `texts`."""
        config = self.config
        rows_VD = np.asarray(dequantize(self.model.params.output))
        count_V = np.ones(config.vocab_size, np.float32)
        for text in texts:
            count_V += np.bincount(text.tokens, minlength=config.vocab_size)
        _, directions = np.linalg.eigh((rows_VD * count_V[:, None]).T @ rows_VD)
        embedding = rows_VD @ directions[:, : -config.d_model - 1 : -1]
        length = np.sqrt(np.average(np.sum(embedding**2, axis=1), weights=count_V))
        layers = small.first_layers(config, self.seed)
        return SmallWeights(jnp.asarray(embedding / length), layers, jnp.ones((config.d_model,), jnp.float32))

    def zeros(self) -> SmallWeights:
        """Of the shapes of `config`."""
        c = self.config
        layer = LayerWeights(**{name: jnp.zeros(shape) for name, shape in layer_shapes(c).items()})
        return SmallWeights(jnp.zeros((c.vocab_size, c.d_model)), (layer,) * c.n_layers, jnp.zeros((c.d_model,)))

    def logits(
        self, weights: SmallWeights, frozen: Frozen, embedding: QTensor, window: Window, count: int
    ) -> list[jax.Array]:
        """The same for every stream, whose earlier tokens are the text's."""
        return [small.logits(self.config, weights, frozen.ids, window)] * count

    def write(self, path: Path, weights: SmallWeights, ids: np.ndarray, *, quant: str) -> Path:
        """A GGUF file of the Llama architecture with the target's tokenizer; it scores all ids."""
        kind = out_type(quant)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_model(path, self._metadata(path.stem), self._tensors(weights), kind, output=kind)
        return path

    def _metadata(self, name: str) -> dict[str, object]:
        c = self.config
        keys = {
            "general.architecture": "llama",
            "general.name": name,
            "llama.vocab_size": c.vocab_size,
            "llama.context_length": c.context_length,
            "llama.embedding_length": c.d_model,
            "llama.block_count": c.n_layers,
            "llama.feed_forward_length": c.d_ff,
            "llama.attention.head_count": c.n_heads,
            "llama.attention.head_count_kv": c.n_kv_heads,
            "llama.attention.layer_norm_rms_epsilon": c.norm_eps,
            "llama.rope.freq_base": c.rope.base,
            "llama.rope.dimension_count": c.rope.dim,
        }
        target = open_gguf(self.model.path).metadata
        return keys | {key: value for key, value in target.items() if key.startswith("tokenizer.")}

    def _tensors(self, weights: SmallWeights) -> Iterator[tuple[str, tuple[int, ...], Callable[[], np.ndarray]]]:
        arrays = {"token_embd": weights.embedding, "output_norm": weights.output_norm}
        for i, layer in enumerate(weights.layers):
            arrays |= {f"blk.{i}.{name}": array for name, array in layer._asdict().items()}
        for name, array in arrays.items():
            yield f"{name}.weight", array.shape, partial(np.asarray, array)
