"""A small Llama in training: the target's vocabulary, one matrix for embedding and output, its start and its file."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine.config import ModelConfig
from specsparse.engine.gguf.reader import open_gguf
from specsparse.engine.model import Model
from specsparse.engine.rope import rope_tables
from specsparse.engine.rope_config import RopeConfig
from specsparse.errors import UserError
from specsparse.kernels import QTensor
from specsparse.kernels.packing.dequant import dequantize
from specsparse.models.convert.write import out_type, write_model
from specsparse.support.options import Count
from specsparse.training.corpus import Text
from specsparse.training.form import Form, Frozen
from specsparse.training.layer import LayerWeights, attend, feed_forward, layer_shapes, rms_norm, times
from specsparse.training.text_windows import Window


@dataclass(frozen=True)
class SmallOptions:
    """The shape of a small model.

    Attributes:
        width, heads, ffn, layers: D, H, F and L of docs/notation.md; every query head has keys of its own.
    """

    width: Count = 128
    heads: Count = 4
    ffn: Count = 512
    layers: Count = 3

    def __post_init__(self):
        if self.width % (2 * self.heads):
            raise UserError(f"train.width={self.width} must be a multiple of 2 train.heads, {2 * self.heads}")


class SmallWeights(NamedTuple):
    """Weights of a small Llama.

    Attributes:
        embedding: [V, D], of the input and of the output.
        layers: one after the other.
        output_norm: [D].
    """

    embedding: jax.Array
    layers: tuple[LayerWeights, ...]
    output_norm: jax.Array


@dataclass(frozen=True)
class SmallForm(Form):
    """A Llama of its own, distilled from the target's distributions (Hinton et al. 2015, arXiv:1503.02531).

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
        """A Llama of that shape with the target's vocabulary, context and base of rotation."""
        o, target = self.options, self.model.config
        dim = o.width // o.heads
        return ModelConfig(
            architecture="llama",
            n_layers=o.layers,
            d_model=o.width,
            n_heads=o.heads,
            n_kv_heads=o.heads,
            head_dim=dim,
            d_ff=o.ffn,
            vocab_size=target.vocab_size,
            context_length=target.context_length,
            norm_eps=target.norm_eps,
            rope=RopeConfig(target.rope.base, dim, "norm", original_context=target.context_length),
            tied_output=True,
        )

    @property
    def layers(self) -> tuple[int, ...]:
        """The last rows, for the target's distribution."""
        return (self.model.config.n_layers,)

    def first(self, texts: Sequence[Text]) -> SmallWeights:
        """The target's output rows along the D directions in which they are largest, weighted by the ids of `texts`;
        random layers that add nothing yet, since their two output matrices are 0."""
        config = self.config
        rows_VD = np.asarray(dequantize(self.model.params.output))
        count_V = np.ones(config.vocab_size, np.float32)
        for text in texts:
            count_V += np.bincount(text.tokens, minlength=config.vocab_size)
        _, directions = np.linalg.eigh((rows_VD * count_V[:, None]).T @ rows_VD)
        embedding = rows_VD @ directions[:, : -config.d_model - 1 : -1]
        length = np.sqrt(np.average(np.sum(embedding**2, axis=1), weights=count_V))
        rng, shapes = np.random.default_rng(self.seed), layer_shapes(config)

        def array(name: str, shape: tuple[int, ...]) -> jax.Array:
            if len(shape) == 1:
                return jnp.ones(shape, jnp.float32)
            if name in ("attn_output", "ffn_down"):
                return jnp.zeros(shape, jnp.float32)
            return jnp.asarray(rng.normal(0, shape[1] ** -0.5, shape), jnp.float32)

        layers = [LayerWeights(**{n: array(n, shape) for n, shape in shapes.items()}) for _ in range(config.n_layers)]
        return SmallWeights(jnp.asarray(embedding / length), tuple(layers), jnp.ones((config.d_model,), jnp.float32))

    def zeros(self) -> SmallWeights:
        c = self.config
        layer = LayerWeights(**{name: jnp.zeros(shape) for name, shape in layer_shapes(c).items()})
        return SmallWeights(jnp.zeros((c.vocab_size, c.d_model)), (layer,) * c.n_layers, jnp.zeros((c.d_model,)))

    def logits(
        self, weights: SmallWeights, frozen: Frozen, embedding: QTensor, window: Window, count: int
    ) -> list[jax.Array]:
        """The same for every stream, whose earlier tokens are the text's.

        Row i of a window holds the token that follows it: a text is seen from its second token on.
        """
        config, positions = self.config, len(window.tokens)
        cos, sin = (jnp.asarray(table)[window.position] for table in rope_tables(config.rope, positions))
        place = jnp.arange(positions)
        seen_nn = (window.text[None] == window.text[:, None]) & (place[None] <= place[:, None])
        x_nD = weights.embedding[window.tokens].astype(jnp.float32)
        for layer in weights.layers:
            x_nD = feed_forward(config, layer, attend(config, layer, x_nD, cos, sin, seen_nn))
        y_mD = rms_norm(x_nD[window.rows], weights.output_norm, config.norm_eps)
        return [times(y_mD, weights.embedding[frozen.ids])] * count

    def write(self, path: Path, weights: SmallWeights, ids: np.ndarray, *, quant: str) -> Path:
        """A GGUF file of the Llama architecture with the target's tokenizer; it scores all ids."""
        kind, c = out_type(quant), self.config
        keys = {
            "general.architecture": "llama",
            "general.name": path.stem,
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
        keys |= {key: value for key, value in target.items() if key.startswith("tokenizer.")}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_model(path, keys, _tensors(weights), kind, output=kind)
        return path


def _tensors(weights: SmallWeights) -> Iterator[tuple[str, tuple[int, ...], Callable[[], np.ndarray]]]:
    arrays = {"token_embd": weights.embedding, "output_norm": weights.output_norm}
    for i, layer in enumerate(weights.layers):
        arrays |= {f"blk.{i}.{name}": array for name, array in layer._asdict().items()}
    for name, array in arrays.items():
        yield f"{name}.weight", array.shape, partial(np.asarray, array)
