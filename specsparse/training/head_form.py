"""A head as what is trained: where it begins, its function, its file."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine.model import Model
from specsparse.kernels import QTensor
from specsparse.kernels.packing.dequant import dequantize, embed_rows
from specsparse.speculative.drafters.head_file import write_head
from specsparse.training import export, head
from specsparse.training.data import Text
from specsparse.training.form import Form
from specsparse.training.head import Frozen, HeadWeights, Window
from specsparse.training.layer import LayerWeights, layer_shapes


@dataclass(frozen=True)
class HeadForm(Form):
    """One layer on the target's features, under the target's output matrix (EAGLE, arXiv:2401.15077)."""

    name: ClassVar[str] = "head"
    drafter: ClassVar[str] = "head"
    option: ClassVar[str] = "head"

    model: Model

    def first(self, texts: Sequence[Text]) -> HeadWeights:
        """See `first_weights`."""
        return first_weights(self.model, texts)

    def zeros(self) -> HeadWeights:
        """Of one layer of the target's shape."""
        D = self.model.config.d_model
        layer = {name: jnp.zeros(shape, jnp.float32) for name, shape in layer_shapes(self.model.config).items()}
        norm = jnp.zeros((D,), jnp.float32)
        return HeadWeights(norm, norm, jnp.zeros((D, 2 * D), jnp.float32), LayerWeights(**layer), norm)

    def logits(
        self, weights: HeadWeights, frozen: Frozen, embedding: QTensor, window: Window, count: int
    ) -> list[jax.Array]:
        """Stream s is what the head finds after s - 1 rows of its own."""
        embedded = embed_rows(embedding, window.tokens)
        found = head.streams(self.model.config, weights, frozen, embedded, window, count)
        return [head.logits(self.model.config, weights, frozen, y) for y in found]

    def write(self, path: Path, weights: HeadWeights, ids: np.ndarray, *, quant: str) -> Path:
        """A file for `drafter=head`."""
        return write_head(path, self.model, export.tensors(weights), ids, quant=quant)


def first_weights(model: Model, texts: Sequence[Text], *, rows: int = 60_000, ridge: float = 3e-3) -> HeadWeights:
    """Where training begins: the best linear guess, in a layer that passes it on.

    `fc` is the ridge regression of the target's next row on both inputs. Queries, keys, values, gate and up are those
    of the target's last layer; the two output matrices are 0, so that the layer adds nothing yet.
    """
    params, width = model.params, model.config.d_model
    before, after, tokens = [], [], []
    for text in texts:
        start = max(text.prompt - 2, 0)
        before.append(text.hidden[start:-1])
        after.append(text.hidden[start + 1 :])
        tokens.append(text.tokens[start + 1 :])
        if sum(map(len, tokens)) >= rows:
            break
    embedded = np.asarray(embed_rows(params.embedding, jnp.asarray(np.concatenate(tokens))))
    h, h_next, e = (_unit(np.concatenate(x) if isinstance(x, list) else x) for x in (before, after, embedded))
    x = np.concatenate([h * np.asarray(params.output_norm), e], axis=1)
    gram, cross = x.T @ x, x.T @ h_next
    gram[np.diag_indices_from(gram)] += ridge * np.trace(gram) / len(gram)
    last = params.layers[-1]
    matrix = {n: dequantize(getattr(last, n)) for n in ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up")}
    weights = HeadWeights(
        hidden_norm=params.output_norm,
        token_norm=jnp.ones((width,), jnp.float32),
        fc=jnp.asarray(np.linalg.solve(gram, cross).T, jnp.float32),
        layer=LayerWeights(
            attn_norm=last.attn_norm,
            attn_output=jnp.zeros(last.attn_output.shape, jnp.float32),
            ffn_norm=last.ffn_norm,
            ffn_down=jnp.zeros(last.ffn_down.shape, jnp.float32),
            **matrix,
        ),
        output_norm=params.output_norm,
    )
    return jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), weights)  # a step donates them


def _unit(x: np.ndarray) -> np.ndarray:
    """Rows of mean square 1, float32."""
    x = x.astype(np.float32)
    return x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + np.float32(1e-5))
