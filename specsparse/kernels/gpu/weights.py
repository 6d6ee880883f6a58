"""Matrices on an accelerator: fragments that are read packed, or plain numbers of two bytes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.kernels.gpu.fragments import Fragments, fragments
from specsparse.kernels.gpu.fragments import take_rows as fragment_rows
from specsparse.kernels.packing import dequant
from specsparse.kernels.qtensor import Layout, QTensor
from specsparse.kernels.qtensor import take_rows as packed_rows

Kept = Literal["packed", "bf16", "f32"]
"""How quantised matrices are kept. Float matrices are always plain: with f32 as f32, else as they are."""

FITS = 0.8
"""Share of a card's memory that weights may take: the rest is for the cache, activations and programs."""


@partial(jax.tree_util.register_dataclass, data_fields=["data"], meta_fields=["layout"])
@dataclass(frozen=True)
class PlainMatrix:
    """A matrix as plain numbers bf16, f16 or f32 [rows, cols]; `layout.source` is the type that the file has."""

    data: jax.Array
    layout: Layout

    @property
    def shape(self) -> tuple[int, int]:
        rows, cols = self.data.shape
        return rows, cols

    @property
    def nbytes(self) -> int:
        return self.data.size * self.data.dtype.itemsize


Matrix = QTensor | Fragments | PlainMatrix
"""A weight matrix as some kernels take it."""


def on_card(w: QTensor, kept: Kept = "packed") -> Fragments | PlainMatrix:
    """The matrix for an accelerator's programs; made on the host, once."""
    if kept == "packed" and not w.layout.is_float:
        return fragments(w)
    layout = Layout("f32", source=w.layout.source) if kept == "f32" else w.layout
    return plain(dequant.dequantize(replace(w, data=jnp.asarray(w.data))), layout)


def take_rows(w: Matrix, ids: np.ndarray) -> Matrix:
    """Rows `ids` int[N] of a matrix, one at least, in that order; kept as it is. Runs on the host."""
    ids = np.asarray(ids, np.int64)
    assert ids.size and ids.min() >= 0 and ids.max() < w.shape[0], (ids, w.shape)
    if isinstance(w, PlainMatrix):
        return replace(w, data=w.data[ids])
    return fragment_rows(w, ids) if isinstance(w, Fragments) else packed_rows(w, ids)


def plain(values: jax.Array, layout: Layout) -> PlainMatrix:
    """f32[rows, cols] as plain numbers: in the type of the layout if that is a float, else in bf16."""
    if not layout.is_float:
        layout = Layout("bf16", source=layout.source)
    dtype = {"f32": jnp.float32, "f16": jnp.float16, "bf16": jnp.bfloat16}[layout.codes]
    return PlainMatrix(values.astype(dtype), layout)


def kept_as(weights: int, memory: int | None) -> tuple[Kept, str]:
    """How a number of quantised weights is kept by default on a card with so many bytes of memory, and why. Memory is
    None if the card does not say."""
    billions = f"{2 * weights / 1e9:.3g} GB of bf16 weights"
    if memory is None:
        return "packed", f"packed: the card does not say whether {billions} fit"
    if 2 * weights <= FITS * memory:
        return "bf16", f"bf16: {billions} fit {memory / 1e9:.3g} GB"
    return "packed", f"packed: {billions} do not fit {FITS:.0%} of {memory / 1e9:.3g} GB"


def described(kinds: Sequence[str], kept: Kept) -> str:
    """How matrices of these GGUF types run, in one line; the types as `engine.weights.types` names them."""
    floats = [k for k in kinds if k in ("F32", "F16", "BF16")]
    coded = [k for k in kinds if k not in floats]
    ways = {"read packed" if kept == "packed" else "widened to bf16": coded, "as stored": floats}
    return "; ".join(f"{', '.join(names)} {way}" for way, names in ways.items() if names)


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
