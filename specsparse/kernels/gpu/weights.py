"""What a packed matrix becomes on an accelerator: fragments that are read packed, or plain numbers of two bytes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.kernels.gpu.fragments import Fragments, fragments, reads_packed
from specsparse.kernels.gpu.fragments import take_rows as fragment_rows
from specsparse.kernels.packing import dequant
from specsparse.kernels.packing.rows import checked_ids
from specsparse.kernels.packing.rows import take_rows as packed_rows
from specsparse.kernels.qtensor import Layout, QTensor

Kept = Literal["packed", "bf16", "f32"]
"""How quantised matrices are kept. Matrices of floats are plain in all: with f32 as f32, else as they are."""

FITS = 0.8
"""Of a card's memory, what weights may take: the rest is for the cache, activations and programs."""


@partial(jax.tree_util.register_dataclass, data_fields=["data"], meta_fields=["layout"])
@dataclass(frozen=True)
class PlainMatrix:
    """A matrix as plain numbers.

    Attributes:
        data: bf16, f16 or f32 [rows, cols].
        layout: codes are the type of `data`; `source` is the type that the file has.
    """

    data: jax.Array
    layout: Layout

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, cols)."""
        return self.data.shape

    @property
    def nbytes(self) -> int:
        """Bytes read by one use of the whole matrix."""
        return self.data.size * self.data.dtype.itemsize


Matrix = QTensor | Fragments | PlainMatrix
"""A weight matrix as some kernels take it."""


def on_card(w: QTensor, kept: Kept = "packed") -> Fragments | PlainMatrix:
    """The matrix as an accelerator's programs take it; made on the host, once."""
    if kept == "packed" and reads_packed(w.layout):
        return fragments(w)
    layout = Layout("f32", source=w.layout.source) if kept == "f32" else w.layout
    return plain(jax.jit(dequant.dequantize)(replace(w, data=jnp.asarray(w.data))), layout)


def take_rows(w: Matrix, ids: np.ndarray) -> Matrix:
    """Rows `ids` int[N] of a matrix, in that order, kept as it is; on the host, once, when a model is built.

    Raises:
        UserError: no ids, or one outside the matrix.
    """
    ids = checked_ids(ids, w.shape[0])
    if isinstance(w, PlainMatrix):
        return replace(w, data=w.data[ids])
    return fragment_rows(w, ids) if isinstance(w, Fragments) else packed_rows(w, ids)


def plain(values: jax.Array, layout: Layout) -> PlainMatrix:
    """f32[rows, cols] as they are kept plainly: in the type of the layout where that is a float, else in bf16."""
    if reads_packed(layout):
        layout = Layout("bf16", source=layout.source)
    dtype = {"f32": jnp.float32, "f16": jnp.float16, "bf16": jnp.bfloat16}[layout.codes]
    return PlainMatrix(values.astype(dtype), layout)


def kept_as(weights: int, memory: int | None) -> tuple[Kept, str]:
    """How the quantised weights of a model are kept on a card where nobody says, and why.

    Args:
        weights: how many there are.
        memory: bytes of the card, None where it does not say.
    """
    size, room = 2 * weights, None if memory is None else FITS * memory
    billions = f"{size / 1e9:.3g} GB of bf16 weights"
    if room is None:
        return "packed", f"packed: the card does not say whether {billions} fit"
    if size <= room:
        return "bf16", f"bf16: {billions} fit {memory / 1e9:.3g} GB"
    return "packed", f"packed: {billions} do not fit {FITS:.0%} of {memory / 1e9:.3g} GB"


def described(kinds: Sequence[str], kept: Kept) -> str:
    """How matrices of these GGUF types run, in one line; the types as `engine.weights.types` names them."""
    floats = [k for k in kinds if k in ("F32", "F16", "BF16")]
    coded = [k for k in kinds if k not in floats]
    says = [f"{', '.join(coded)} {'read packed' if kept == 'packed' else 'widened to bf16'}"] if coded else []
    return "; ".join([*says, *([f"{', '.join(floats)} as stored"] if floats else [])])


def multiply_plain(x: jax.Array, w: PlainMatrix) -> jax.Array:
    """f32[R, rows of w] of x f32[R, K]; rows are rounded to the type of the weights, sums are float32.

    Rows are scaled to f16's range by a power of two first.
    """
    dtype = w.data.dtype
    if dtype == jnp.float32:
        return jnp.einsum("rk,nk->rn", x, w.data, precision=jax.lax.Precision.HIGHEST)
    if dtype == jnp.bfloat16:
        return jnp.einsum("rk,nk->rn", x.astype(dtype), w.data, preferred_element_type=jnp.float32)
    largest = jnp.max(jnp.abs(x), axis=1, keepdims=True)
    _, exponent = jnp.frexp(jnp.where(largest > jnp.float32(0), largest, jnp.float32(1)))
    rows = jnp.ldexp(x, -exponent).astype(dtype)
    return jnp.ldexp(jnp.einsum("rk,nk->rn", rows, w.data, preferred_element_type=jnp.float32), exponent)


def embed_plain(w: PlainMatrix, ids: jax.Array) -> jax.Array:
    """Rows `ids` int32[R] as f32[R, cols]. Ids out of range are clipped."""
    return w.data[jnp.clip(ids, 0, w.shape[0] - 1)].astype(jnp.float32)
