"""An EAGLE-3 head as what is trained (Li et al., arXiv:2503.01840): where it begins, its function, its file.

It has no loss on features: it is run on its own rows for as many tokens as are trained, and each is held against the
target's law. What it computes is the drafter's own (`speculative.drafters.heads.eagle3_head`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine.rope import halves
from specsparse.kernels import QTensor
from specsparse.kernels.packing.dequant import embed_rows
from specsparse.speculative.drafters.heads import eagle3_head
from specsparse.speculative.drafters.heads.eagle3_file import of_arrays, tensor_shapes, write_eagle3_gguf
from specsparse.speculative.drafters.heads.eagle3_head import Eagle3Weights, HeadRows, HeadShape, Products
from specsparse.training import unroll
from specsparse.training.data import Text
from specsparse.training.form import FeatureForm, last_inputs, tokenizer_keys
from specsparse.training.layer import linear, rms_norm
from specsparse.training.products import times
from specsparse.training.unroll import Frozen, Window

_NAMES = {"token_norm": "blk.0.attn_norm", "hidden_norm": "blk.0.attn_norm_2", "fc": "fc", "output_norm": "output_norm"}
_MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
NAMES = {**_NAMES, **{name: f"blk.0.{name}" for name in _MATRICES}}
"""Fields of `Eagle3Weights` that are trained, and their tensors in the file."""


@dataclass(frozen=True)
class Eagle3Form(FeatureForm):
    """One layer on fused rows of several of the target's, under the target's output matrix."""

    name: ClassVar[str] = "eagle3"
    drafter: ClassVar[str] = "eagle3"
    option: ClassVar[str] = "path"

    @property
    def shape(self) -> HeadShape:
        """A layer of the target's shape, without options."""
        c = self.model.config
        return HeadShape(c.d_model, c.n_heads, c.n_kv_heads, c.head_dim, c.d_ff, c.norm_eps, len(self.read))

    def zeros(self) -> Eagle3Weights:
        """Of the shape."""
        sizes = dict(tensor_shapes(self.shape, self.model.config.d_model))
        return Eagle3Weights(**{field: jnp.zeros(sizes[f"{name}.weight"]) for field, name in NAMES.items()})

    def first(self, texts: Sequence[Text]) -> Eagle3Weights:
        """See `first_weights`."""
        return first_weights(self, texts)

    def logits(
        self, weights: Eagle3Weights, frozen: Frozen, embedding: QTensor, window: Window, count: int
    ) -> list[jax.Array]:
        """Stream s is what the head finds after s - 1 rows of its own."""
        shape, w = self.shape, weights
        products = Products(partial(linear, eps=shape.eps), partial(rms_norm, eps=shape.eps))
        embedded_nD = embed_rows(embedding, window.tokens)

        def again(y_mD: jax.Array) -> HeadRows:
            g_mD = eagle3_head.again(shape, w, products, y_mD)
            return eagle3_head.enter(shape, w, products, embedded_nD[window.rows], g_mD)

        g_nD = eagle3_head.fuse(shape, w, products, window.hidden[:, : w.fc.shape[1]])
        first = eagle3_head.enter(shape, w, products, embedded_nD, g_nD)
        leave = partial(eagle3_head.leave, w, products)
        how = {"head_dim": shape.head_dim, "pairing": "neox"}
        found = unroll.streams(frozen, window, first, again, leave, count, **how)
        return [times(rms_norm(y, w.output_norm, shape.eps), frozen.head) for y in found]

    def write(self, path: Path, weights: Eagle3Weights, ids: np.ndarray, *, quant: str) -> Path:
        """A GGUF file for `drafter=eagle3` and for llama.cpp, with the target's output rows of the draft vocabulary."""
        target, arrays = self.model, {f"{n}.weight": np.asarray(getattr(weights, f)) for f, n in NAMES.items()}
        arrays["output.weight"] = self.output_rows(ids)
        file = of_arrays(
            arrays, self.shape, target=target.config, layers=self.read, rope_factors=target.rope_factors, ids=ids,
            path=path,
        )  # fmt: skip
        return write_eagle3_gguf(file, path, tokenizer=tokenizer_keys(target), quant=quant)


def first_weights(form: Eagle3Form, texts: Sequence[Text]) -> Eagle3Weights:
    """Where training begins.

    `fc` is `FeatureForm.fused`. The rest is the target's last layer, which reads the fused rows and not yet the token;
    its two output matrices are 0, so that it adds nothing yet.
    """
    model, zeros = form.model, form.zeros()
    c, last, own = model.config, model.params.layers[-1], last_inputs(model)

    def beside(name: str) -> jax.Array:
        """[outputs, 2 D]: inputs of the token, which are 0, before those of the hidden row."""
        matrix = np.asarray(own[name], np.float32)
        if c.rope.pairing == "norm" and name != "attn_v":
            matrix = halves(matrix, c.n_heads if name == "attn_q" else c.n_kv_heads)
        return jnp.concatenate([jnp.zeros_like(matrix), matrix], axis=1)

    weights = zeros._replace(
        fc=form.fused(texts),
        token_norm=jnp.ones_like(zeros.token_norm),
        hidden_norm=last.attn_norm,
        **{name: beside(name) for name in ("attn_q", "attn_k", "attn_v")},
        ffn_norm=last.ffn_norm,
        ffn_gate=own["ffn_gate"],
        ffn_up=own["ffn_up"],
        output_norm=model.params.output_norm,
    )
    return jax.tree.map(lambda a: jnp.array(a, jnp.float32, copy=True), weights)  # a step donates them
