"""A head as what is trained: where it begins, its function, its file."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine.model import Model
from specsparse.errors import UserError
from specsparse.kernels import QTensor
from specsparse.kernels.packing.dequant import embed_rows
from specsparse.speculative.drafters.heads.head_file import HeadFile, read_head, write_head
from specsparse.training import export, head
from specsparse.training.data import Text
from specsparse.training.features import Features
from specsparse.training.form import Form, beginning_with, last_inputs, ridge, unit
from specsparse.training.head import HeadWeights
from specsparse.training.layer import LayerWeights, layer_shapes
from specsparse.training.unroll import Frozen, Window


@dataclass(frozen=True)
class HeadForm(Form):
    """One layer on the target's features, under the target's output matrix (EAGLE, arXiv:2401.15077).

    Attributes:
        model: the target.
        below: ids of layers whose entering rows it reads too, as EAGLE-3 (arXiv:2503.01840) does; it then also has a
            matrix of its own for its own rows.
        begin: a head's file whose weights training begins with, or None.
    """

    name: ClassVar[str] = "head"
    drafter: ClassVar[str] = "head"
    option: ClassVar[str] = "head"

    model: Model
    below: tuple[int, ...] = ()
    begin: Path | None = None

    @property
    def layers(self) -> tuple[int, ...]:
        """Those below, and the last rows."""
        return (*self.below, self.model.config.n_layers)

    def check(self) -> None:
        """Refuses a file to begin with that reads other layers.

        Raises:
            UserError: such a file, or none.
        """
        if self.begin is not None and self._begun.below not in ((), self.below):
            found = list(self._begun.below)
            raise UserError(f"{self.begin}: reads layers {found} beside the last rows; give train.below={found}")

    def size(self, wanted: int) -> int:
        """That of the file it begins with, if any."""
        return super().size(wanted) if self.begin is None else len(self._begun.ids)

    def ids(self, texts: Sequence[Text], wanted: int) -> np.ndarray:
        """Those of the file it begins with, if any."""
        return super().ids(texts, wanted) if self.begin is None else self._begun.ids

    @property
    def _begun(self) -> HeadFile:
        assert self.begin is not None
        return read_head(self.begin, self.model.config, floats=True)

    def first(self, texts: Sequence[Text]) -> HeadWeights:
        """The file's, or `first_weights`; the rows below add nothing yet."""
        if self.begin is None:
            weights = first_weights(self.model, texts)
        else:
            weights = export.weights(self._begun.params)
        if not self.below or weights.fc_below is not None:
            return weights
        D, b = self.model.config.d_model, len(self.below)
        return weights._replace(
            below_norm=jnp.ones((b, D), jnp.float32), fc_below=jnp.zeros((D, b * D), jnp.float32),
            own_norm=jnp.array(weights.hidden_norm), fc_own=jnp.array(weights.fc_hidden),
        )  # fmt: skip

    def zeros(self) -> HeadWeights:
        """Of one layer of the target's shape."""
        D, b = self.model.config.d_model, len(self.below)
        layer = {name: jnp.zeros(shape, jnp.float32) for name, shape in layer_shapes(self.model.config).items()}
        norm, square = jnp.zeros((D,), jnp.float32), jnp.zeros((D, D), jnp.float32)
        alone = HeadWeights(norm, square, norm, square, LayerWeights(**layer), norm)
        if not b:
            return alone
        below = jnp.zeros((b, D), jnp.float32), jnp.zeros((D, b * D), jnp.float32)
        return alone._replace(below_norm=below[0], fc_below=below[1], own_norm=norm, fc_own=square)

    def logits(
        self, weights: HeadWeights, frozen: Frozen, embedding: QTensor, window: Window, count: int
    ) -> list[jax.Array]:
        """Stream s is what the head finds after s - 1 rows of its own."""
        embedded = embed_rows(embedding, window.tokens)
        found = head.streams(self.model.config, weights, frozen, embedded, window, count)
        return [head.logits(self.model.config, weights, frozen, y) for y in found]

    def write(self, path: Path, weights: HeadWeights, ids: np.ndarray, *, quant: str) -> Path:
        """A file for `drafter=head`."""
        return write_head(path, self.model, export.tensors(weights), ids, quant=quant, below=self.below)


def first_weights(model: Model, texts: Sequence[Text], *, rows: int = 60_000) -> HeadWeights:
    """Where training begins: the best linear guess, in a layer that passes it on.

    `fc_hidden` and `fc_token` are the ridge regression of the target's next row on both inputs. Queries, keys, values,
    gate and up are `last_inputs`; the two output matrices are 0, so that the layer adds nothing yet.
    """
    params, width = model.params, model.config.d_model
    before, after, tokens = [], [], []
    for text in Features(model, (model.config.n_layers,)).of(beginning_with(texts, rows)):
        assert text.hidden is not None
        start = max(text.prompt - 2, 0)
        before.append(text.hidden[start:-1])
        after.append(text.hidden[start + 1 :])
        tokens.append(text.tokens[start + 1 :])
    embedded = np.asarray(embed_rows(params.embedding, jnp.asarray(np.concatenate(tokens))))
    h, h_next, e = (unit(np.concatenate(x) if isinstance(x, list) else x) for x in (before, after, embedded))
    x = np.concatenate([h * np.asarray(params.output_norm), e], axis=1)
    last = params.layers[-1]
    fc_hidden, fc_token = np.split(ridge(x.T @ x, x.T @ h_next).T, 2, axis=1)
    weights = HeadWeights(
        hidden_norm=params.output_norm,
        fc_hidden=jnp.asarray(fc_hidden),
        token_norm=jnp.ones((width,), jnp.float32),
        fc_token=jnp.asarray(fc_token),
        layer=LayerWeights(
            attn_norm=last.attn_norm,
            attn_output=jnp.zeros(last.attn_output.shape, jnp.float32),
            ffn_norm=last.ffn_norm,
            ffn_down=jnp.zeros(last.ffn_down.shape, jnp.float32),
            **last_inputs(model),
        ),
        output_norm=params.output_norm,
    )
    return jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), weights)  # a step donates them
