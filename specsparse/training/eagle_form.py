"""Heads of one layer as functions to differentiate, their start and their files: EAGLE's and EAGLE-3's.

A head reads the target's row h_i and the token after it and says what the target's row i + 1 will be (EAGLE, Li et
al., arXiv:2401.15077). An EAGLE-3 head (arXiv:2503.01840) reads fused rows of several layers and is held against the
target's distribution alone. When a head drafts on, it reads its own output in place of the target's rows; a training
runs it so for all tokens of all drafts of a window at once (`streams`), as when decoding (HASS, Zhang et al.,
arXiv:2408.15766).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine.rope import halves
from specsparse.errors import UserError
from specsparse.kernels import QTensor
from specsparse.kernels.packing.dequant import dequantize, embed_rows
from specsparse.kernels.reference.dense import rms_norm
from specsparse.speculative.drafters.heads import eagle3
from specsparse.speculative.drafters.heads.eagle3 import Eagle3File, Eagle3Weights, HeadRows, HeadShape, Products
from specsparse.speculative.drafters.heads.head import LAYER_MATRICES, NORMS, HeadFile, HeadParams, write_head
from specsparse.training import form
from specsparse.training.corpus import Text, Window
from specsparse.training.form import FeatureForm, Form, Frozen, ridge, unit
from specsparse.training.layer import (
    Keys,
    LayerWeights,
    attention,
    feed_forward,
    layer_shapes,
    linear,
    split_heads,
    times,
)


def streams(
    frozen: Frozen, window: Window, first: HeadRows, again: Callable[[jax.Array], HeadRows],
    leave: Callable[[jax.Array, jax.Array], jax.Array], count: int, *, head_dim: int, pairing: str,
) -> list[jax.Array]:  # fmt: skip
    """[m, D] for each of `count` streams, the tokens of a draft: the layer's rows, the first stream first.

    Stream s is all rows as the s-th token of a draft. A row of it sees the rows of stream 1 up to where its draft began
    and one row of each stream since. It counts if its depth is at least s - 1.

    Args:
        frozen, window: the rotation, and the rows.
        first: all n rows, made of the target's.
        again: makes the m drafting rows of [m, D], the layer's own rows one token earlier.
        leave: (what attention found [m, H d], residual [m, D]) -> the layer's rows [m, D].
    """
    rows = window.rows
    cos, sin = frozen.cos[window.position], frozen.sin[window.position]
    split = partial(split_heads, head_dim=head_dim, pairing=pairing)
    base = Keys(split(first.k, cos, sin).swapaxes(0, 1), split(first.v).swapaxes(0, 1))
    cos, sin = cos[rows], sin[rows]
    place = jnp.arange(len(window.text))
    own: list[Keys] = []
    found: list[jax.Array] = []
    entered = HeadRows(*(x[rows] for x in first))
    for s in range(count):
        if s:
            entered = again(jnp.roll(found[-1], 1, axis=0))  # a row's predecessor in its draft
            own.append(Keys(split(entered.k, cos, sin).swapaxes(0, 1), split(entered.v).swapaxes(0, 1)))
        seen_mn = window.same_text() & (place[None] <= rows[:, None] - s)
        drafted = [Keys(*(jnp.roll(a, s - 1 - j, axis=1) for a in (key.k, key.v))) for j, key in enumerate(own)]
        attended = attention(split(entered.q, cos, sin), base, seen_mn, drafted)
        found.append(leave(attended, entered.residual))
    return found


class HeadWeights(NamedTuple):
    """Weights of an EAGLE head; matrices are [outputs, inputs]."""

    hidden_norm: jax.Array  # [D], RMS norm of h_i
    fc_hidden: jax.Array  # [D, D], of normalised h_i
    # token_norm, fc_token: likewise, of the token after it
    token_norm: jax.Array
    fc_token: jax.Array
    layer: LayerWeights  # a plain Llama's of the target's sizes
    output_norm: jax.Array  # [D], before the output matrix, which is the target's
    # [b D], RMS norms of the rows of b layers below, side by side; None for a head that reads h_i alone
    below_norm: jax.Array | None = None
    fc_below: jax.Array | None = None  # [D, b D], of those rows, normalised, side by side
    # own_norm, fc_own: in place of `hidden_norm` and `fc_hidden` when the head reads its own row; None: the same
    own_norm: jax.Array | None = None
    fc_own: jax.Array | None = None

    @staticmethod
    def from_params(params: HeadParams) -> "HeadWeights":
        layer = {name: dequantize(getattr(params.layer, name)) for name in LAYER_MATRICES}
        norms = {name: getattr(params.layer, name) for name in ("attn_norm", "ffn_norm")}
        weights = HeadWeights(
            params.hidden_norm, dequantize(params.fc_hidden), params.token_norm, dequantize(params.fc_token),
            LayerWeights(**layer, **norms), params.output_norm,
        )  # fmt: skip
        if params.own is not None:
            weights = weights._replace(
                below_norm=jnp.concatenate([x.norm for x in params.below]),
                fc_below=jnp.concatenate([dequantize(x.matrix) for x in params.below], axis=1),
                own_norm=params.own.norm,
                fc_own=dequantize(params.own.matrix),
            )
        return form.owned(weights)

    def tensors(self) -> dict[str, np.ndarray]:
        w = jax.tree.map(lambda x: np.asarray(x, np.float32), self)
        own = {f"{name}.weight": getattr(w, name) for name in (*NORMS, "fc_hidden", "fc_token")}
        if w.fc_below is not None:
            own |= {"own_norm.weight": w.own_norm, "fc_own.weight": w.fc_own}
            count = w.fc_below.shape[1] // len(w.fc_below)
            for i, matrix in enumerate(np.split(w.fc_below, count, axis=1)):
                own |= {f"below_norm.{i}.weight": np.split(w.below_norm, count)[i], f"fc_below.{i}.weight": matrix}
        layer = (*LAYER_MATRICES, "attn_norm", "ffn_norm")
        return {**own, **{f"blk.0.{name}.weight": getattr(w.layer, name) for name in layer}}


@dataclass(frozen=True)
class HeadForm(Form):
    """One layer on the target's features, under the target's output matrix (EAGLE, arXiv:2401.15077)."""

    name: ClassVar[str] = "head"
    drafter: ClassVar[str] = "head"
    option: ClassVar[str] = "head"

    # ids of layers whose entering rows it reads too, as EAGLE-3 (arXiv:2503.01840) does; it then also has a matrix of
    # its own for its own rows
    below: tuple[int, ...] = ()
    begin: HeadFile | None = None  # a head's file in floats whose weights training begins with, or None

    def __post_init__(self):
        if self.begin is not None and self.begin.below not in ((), self.below):
            found = list(self.begin.below)
            raise UserError(f"{self.begin.path}: reads layers {found} beside the last rows; give train.below={found}")

    @property
    def layers(self) -> tuple[int, ...]:
        return (*self.below, self.model.config.n_layers)

    def size(self, wanted: int) -> int:
        """The size of the file that training begins with, if there is one."""
        return super().size(wanted) if self.begin is None else len(self.begin.ids)

    def ids(self, texts: Sequence[Text], wanted: int) -> np.ndarray:
        """The ids of the file that training begins with, if there is one."""
        return super().ids(texts, wanted) if self.begin is None else self.begin.ids

    def first(self, texts: Sequence[Text]) -> HeadWeights:
        """The file's, or the best linear guess in a layer that passes it on; the rows below add nothing yet.

        `fc_hidden` and `fc_token` are the ridge regression of the target's next row on both inputs. Queries, keys,
        values, gate and up are `form.last_inputs`; the two output matrices are 0, so that the layer adds nothing yet.
        """
        model, params = self.model, self.model.params
        if self.begin is not None:
            weights = HeadWeights.from_params(self.begin.params)
        else:
            before, after, tokens = [], [], []
            for text in self.features.of(form.beginning_with(texts, form.GUESS_ROWS)):
                start, last_rows = max(text.prompt - 2, 0), text.read[:, -model.config.d_model :]
                before.append(last_rows[start:-1])
                after.append(last_rows[start + 1 :])
                tokens.append(text.tokens[start + 1 :])
            embedded = np.asarray(embed_rows(params.embedding, jnp.asarray(np.concatenate(tokens))))
            h, h_next, e = (unit(x) for x in (np.concatenate(before), np.concatenate(after), embedded))
            x, last = np.concatenate([h * np.asarray(params.output_norm), e], axis=1), params.layers[-1]
            fc_hidden, fc_token = map(jnp.asarray, np.split(ridge(x.T @ x, x.T @ h_next).T, 2, axis=1))
            shapes = {"attn_output": last.attn_output.shape, "ffn_down": (model.config.d_model, model.config.d_ff)}
            none = {name: jnp.zeros(shape, jnp.float32) for name, shape in shapes.items()}
            layer = LayerWeights(**none, **form.last_inputs(model))
            ones = jnp.ones((model.config.d_model,), jnp.float32)
            weights = form.owned(HeadWeights(params.output_norm, fc_hidden, ones, fc_token, layer, params.output_norm))
        if not self.below or weights.fc_below is not None:
            return weights
        D, b = model.config.d_model, len(self.below)
        return weights._replace(
            below_norm=jnp.ones((b * D,), jnp.float32), fc_below=jnp.zeros((D, b * D), jnp.float32),
            own_norm=jnp.array(weights.hidden_norm), fc_own=jnp.array(weights.fc_hidden),
        )  # fmt: skip

    def zeros(self) -> HeadWeights:
        D, b = self.model.config.d_model, len(self.below)
        layer = LayerWeights(**{name: jnp.zeros(shape) for name, shape in layer_shapes(self.model.config).items()})
        norm, square = jnp.zeros((D,)), jnp.zeros((D, D))
        alone = HeadWeights(norm, square, norm, square, layer, norm)
        below = {"below_norm": jnp.zeros((b * D,)), "fc_below": jnp.zeros((D, b * D))}
        return alone._replace(**below, own_norm=norm, fc_own=square) if b else alone

    def logits(
        self, weights: HeadWeights, frozen: Frozen, embedding: QTensor, window: Window, count: int
    ) -> list[jax.Array]:
        """Stream s is what the head finds after s - 1 rows of its own."""
        config, w, layer = self.model.config, weights, weights.layer
        D, eps = config.d_model, config.norm_eps
        own_norm = w.hidden_norm if w.own_norm is None else w.own_norm
        fc_own = w.fc_hidden if w.fc_own is None else w.fc_own
        told_nD = times(rms_norm(embed_rows(embedding, window.tokens), w.token_norm, eps), w.fc_token)
        x_nD = times(rms_norm(window.hidden[:, -D:], w.hidden_norm, eps), w.fc_hidden)
        if w.below_norm is not None and w.fc_below is not None:
            below_nbD = window.hidden[:, :-D].reshape(len(x_nD), -1, D)
            inverse = jax.lax.rsqrt(jnp.mean(below_nbD**2, axis=-1, keepdims=True) + jnp.float32(eps))
            x_nD = x_nD + times((below_nbD * inverse).reshape(len(x_nD), -1) * w.below_norm[None], w.fc_below)

        def enter(x_RD: jax.Array) -> HeadRows:
            q, k, v = linear(x_RD, (layer.attn_q, layer.attn_k, layer.attn_v), norm=layer.attn_norm, eps=eps)
            return HeadRows(q, k, v, x_RD)

        def again(y_mD: jax.Array) -> HeadRows:
            return enter(told_nD[window.rows] + times(rms_norm(y_mD, own_norm, eps), fc_own))

        def leave(attended: jax.Array, residual_mD: jax.Array) -> jax.Array:
            return feed_forward(config, layer, residual_mD + times(attended, layer.attn_output))

        how = {"head_dim": config.head_dim, "pairing": config.rope.pairing}
        found = streams(frozen, window, enter(told_nD + x_nD), again, leave, count, **how)
        return [times(rms_norm(y, w.output_norm, eps), frozen.head) for y in found]

    def write(self, path: Path, weights: HeadWeights, ids: np.ndarray, *, quant: str) -> Path:
        return write_head(path, self.model, weights.tensors(), ids, quant=quant, below=self.below)


EAGLE3_NAMES = {
    "token_norm": "blk.0.attn_norm.weight",
    "hidden_norm": "blk.0.attn_norm_2.weight",
    "fc": "fc.weight",
    "output_norm": "output_norm.weight",
    **{name: f"blk.0.{name}.weight" for name in LayerWeights._fields[1:]},
}
"""Fields of `Eagle3Weights` that are trained, and their tensors in the file."""


@dataclass(frozen=True)
class Eagle3Form(FeatureForm):
    """One layer on fused rows of several of the target's, under the target's output matrix.

    What it computes is the drafter's own (`speculative.drafters.heads.eagle3`).
    """

    name: ClassVar[str] = "eagle3"
    drafter: ClassVar[str] = "eagle3"
    option: ClassVar[str] = "path"

    @property
    def shape(self) -> HeadShape:
        """A layer of the target's shape, without options."""
        c = self.model.config
        return HeadShape(c.d_model, c.n_heads, c.n_kv_heads, c.head_dim, c.d_ff, c.norm_eps, len(self.read))

    def zeros(self) -> Eagle3Weights:
        sizes = dict(eagle3.tensor_shapes(self.shape, self.model.config.d_model))
        zeros: dict[str, Any] = {field: jnp.zeros(sizes[name]) for field, name in EAGLE3_NAMES.items()}
        return Eagle3Weights(**zeros)

    def first(self, texts: Sequence[Text]) -> Eagle3Weights:
        """`fc` is `FeatureForm.fused`. The rest is the target's last layer, which reads the fused rows and not yet the
        token; its two output matrices are 0, so that it adds nothing yet."""
        model, zeros = self.model, self.zeros()
        c, own = model.config, form.last_inputs(model)

        def beside(name: str) -> jax.Array:
            """[outputs, 2 D]: inputs of the token, which are 0, before those of the hidden row."""
            matrix = np.asarray(own[name], np.float32)
            if c.rope.pairing == "norm" and name != "attn_v":
                matrix = halves(matrix, c.n_heads if name == "attn_q" else c.n_kv_heads)
            return jnp.concatenate([jnp.zeros_like(matrix), matrix], axis=1)

        weights = zeros._replace(
            fc=jnp.asarray(self.fused(texts)),
            token_norm=jnp.ones_like(zeros.token_norm),
            hidden_norm=own["attn_norm"],
            attn_q=beside("attn_q"),
            attn_k=beside("attn_k"),
            attn_v=beside("attn_v"),
            ffn_norm=own["ffn_norm"],
            ffn_gate=own["ffn_gate"],
            ffn_up=own["ffn_up"],
            output_norm=model.params.output_norm,
        )
        return form.owned(weights)

    def logits(
        self, weights: Eagle3Weights, frozen: Frozen, embedding: QTensor, window: Window, count: int
    ) -> list[jax.Array]:
        """Stream s is what the head finds after s - 1 rows of its own."""
        shape, w = self.shape, weights
        products = Products(partial(linear, eps=shape.eps), partial(rms_norm, eps=shape.eps))
        embedded_nD = embed_rows(embedding, window.tokens)

        def again(y_mD: jax.Array) -> HeadRows:
            g_mD = eagle3.again(shape, w, products, y_mD)
            return eagle3.enter(shape, w, products, embedded_nD[window.rows], g_mD)

        g_nD = eagle3.fuse(shape, w, products, window.hidden[:, : w.fc.shape[1]])
        first = eagle3.enter(shape, w, products, embedded_nD, g_nD)
        leave = partial(eagle3.leave, w, products)
        found = streams(frozen, window, first, again, leave, count, head_dim=shape.head_dim, pairing="neox")
        return [times(rms_norm(y, w.output_norm, shape.eps), frozen.head) for y in found]

    def write(self, path: Path, weights: Eagle3Weights, ids: np.ndarray, *, quant: str) -> Path:
        """A GGUF file for `drafter=eagle3` and for llama.cpp, with the target's output rows of the draft vocabulary."""
        target, arrays = self.model, {name: np.asarray(getattr(weights, f)) for f, name in EAGLE3_NAMES.items()}
        arrays["output.weight"] = self.output_rows(ids)
        file = Eagle3File.for_target(
            arrays, target.config, path=path, shape=self.shape, layers=self.read, rope_factors=target.rope_factors,
            ids=ids,
        )  # fmt: skip
        return file.write_gguf(path, tokenizer=form.tokenizer_keys(target), quant=quant)
