"""Products and attention on packed weights: by Pallas kernels on a card that runs them, else by XLA.

The arithmetic of a product is that of the native kernels (docs/layouts.md): activations as int8, exact integer sums of
a block, float32 sums over blocks. Columns are cut into ranges (`fragments.Plan`), each summed on its own, and the
sums are added up in order.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from operator import add

import jax
import jax.numpy as jnp

from specsparse.kernels.gpu.fragments import (
    PIECE,
    SUMS,
    TILE,
    Fragments,
    PackedRows,
    Plan,
    block_sums,
    embed_rows,
    plan,
    quantise,
    unpack,
    widened,
)
from specsparse.kernels.gpu.weights import Matrix, PlainMatrix, multiply_plain
from specsparse.kernels.packing import dequant
from specsparse.kernels.qtensor import BLOCK
from specsparse.kernels.reference import dense

WIDEST = 64
"""Rows of the packed product at most; more, those of prompts, are multiplied with widened weights."""


def has_kernels() -> bool:
    """Whether the default device is a card that Mosaic GPU compiles for: Hopper or newer."""
    if jax.default_backend() != "gpu":
        return False
    return float(getattr(jax.devices()[0], "compute_capability", 0) or 0) >= 9.0


def attend(*args: jax.Array, compiled: bool | None = None, **options) -> tuple[jax.Array, ...]:
    """`reference.dense.attend_batched` of a cache that holds finite numbers alone.

    `compiled` says whether programs are for a card with the kernel, by default `has_kernels()`.
    """
    if has_kernels() if compiled is None else compiled:
        from specsparse.kernels.gpu.attention import core  # only a GPU needs Pallas

        options["core"] = core
    return dense.attend_batched(*args, finite=True, **options)


def multiply(x: jax.Array, w: Fragments, *, compiled: bool) -> jax.Array:
    """f32[R, rows of w] of x f32[R, K], by the Pallas kernel if `compiled`, else in jnp, in the same order."""
    if x.shape[0] > WIDEST:
        half = jnp.bfloat16
        return jnp.einsum("rk,nk->rn", x.astype(half), widened(w, half), preferred_element_type=jnp.float32)
    if not compiled:
        codes, scales = quantise(jax.lax.optimization_barrier(x))
        return _in_order(w, codes, scales, plan(w, -(-x.shape[0] // 8)))[:, : w.shape[0]]
    from specsparse.kernels.gpu import entry  # only a GPU needs Pallas

    return _by_kernel(entry.pack(x, None, 0.0), w)[: x.shape[0]]


def _by_kernel(rows: PackedRows, w: Fragments) -> jax.Array:
    """f32[8 n, rows of w] of n tiles."""
    from specsparse.kernels.gpu import mosaic

    how = plan(w, rows.tiles)
    found = mosaic.product((w,), rows, how)
    return (found if how.splits == 1 else reduce(add, found))[:, : w.shape[0]]


def _in_order(w: Fragments, codes: jax.Array, scales: jax.Array, how: Plan) -> jax.Array:
    """The product in jnp, f32[R, 64 T]: what `gpu.mosaic` computes, up to fused multiply-adds."""
    layout, count = w.layout, w.pieces * PIECE // how.ranges
    sums = block_sums(codes, scales, w)

    def by_scale(values: jax.Array, per: int) -> jax.Array:
        """[ranges, scales of a range, R, per]: values [R, columns] of rows, zeros where the matrix is padded."""
        whole = how.ranges * count * per // layout.sub
        padded = jnp.pad(values, ((0, 0), (0, whole - values.shape[1])))
        return padded.reshape(len(values), how.ranges, -1, per).transpose(1, 2, 0, 3)

    numbers, d, m = unpack(w.codes, w.scales, w.subs, layout)
    weights = numbers.reshape(-1, w.pieces * PIECE)
    a = by_scale(codes, layout.sub).astype(jnp.int32)
    dx = by_scale(jnp.repeat(scales, BLOCK // layout.sub, axis=1), 1)
    sx = None if sums is None else by_scale(sums, 1)
    d, m = (None if v is None else by_scale(v.reshape(len(weights), -1), 1)[..., 0] for v in (d, m))
    steps = (a, dx, sx, by_scale(weights, layout.sub).astype(jnp.int32), d, m)

    def step(acc, piece):
        a, dx, sx, codes, d, m = piece
        dot = jnp.einsum("grk,gnk->grn", a, codes)
        if layout.zero:
            dot = dot - jnp.int32(layout.zero) * sx
        acc = acc + d[:, None] * dx * dot.astype(jnp.float32)
        return acc if m is None else acc + m[:, None] * sx, None

    first = jnp.zeros((how.ranges, len(codes), len(weights)), jnp.float32)
    acc, _ = jax.lax.scan(step, first, jax.tree.map(lambda v: v.swapaxes(0, 1), steps))
    acc = acc.reshape(how.splits, how.parts, *acc.shape[1:])
    return reduce(add, (reduce(add, one) for one in acc))


def linear(
    x: jax.Array, weights: Sequence[Matrix], *, compiled: bool | None = None, **options
) -> tuple[jax.Array, ...]:
    """`reference.dense.linear` with `Fragments` and `PlainMatrix` among the matrices.

    `compiled` says whether programs are for a card with the kernels, by default `has_kernels()`.
    """
    compiled = has_kernels() if compiled is None else compiled
    if compiled and x.shape[0] <= WIDEST and all(isinstance(w, Fragments) for w in weights):
        return _by_kernels(x, weights, **options)

    def multiplier(w: Matrix) -> Callable[[jax.Array], jax.Array]:
        if isinstance(w, Fragments):
            return lambda h: multiply(h, w, compiled=compiled)
        return (lambda h: multiply_plain(h, w)) if isinstance(w, PlainMatrix) else dense.multiplier(w)

    outs = dense.linear(x, weights, multiplier=multiplier, over_rows=dense.at_once, **options)
    return _added_up_once(outs, options.get("residual"))


def _added_up_once(outs: tuple[jax.Array, ...], residual: jax.Array | None) -> tuple[jax.Array, ...]:
    """`outs`; with a residual, XLA would else add the sums over ranges of columns in every reader of the stream."""
    return outs if residual is None else jax.lax.optimization_barrier(outs)


def _by_kernels(
    x, weights, *, n_valid, norm=None, eps=0.0, biases=None, residual=None, act=None, zeros=True
) -> tuple[jax.Array, ...]:
    """`linear` on a GPU. The kernel of the rows does the norm. The kernel of the product does act, residual and zeros
    if its columns are not split and there are no biases."""
    from specsparse.kernels.gpu import entry, mosaic

    rows, count = entry.pack(x, norm, eps), x.shape[0]
    outputs = weights[0].shape[0]
    how = plan(weights[0], rows.tiles, matrices=len(weights) if act else 1)
    whole = count == 8 * rows.tiles and outputs == weights[0].tiles * TILE
    fits = 2 * rows.tiles <= SUMS if act else residual is not None and len(weights) == 1
    if fits and whole and how.splits == 1 and biases is None:
        keep = dense.valid(n_valid, count).astype(jnp.int32) if zeros else None
        return (mosaic.product(weights, rows, how, act=act, residual=residual, keep=keep),)

    outs = dense.linear(
        x, weights, multiplier=lambda w: lambda _: _by_kernel(rows, w)[:count], over_rows=dense.at_once,
        n_valid=n_valid, biases=biases, residual=residual, act=act, zeros=zeros,
    )  # fmt: skip
    return _added_up_once(outs, residual)


def embed(w: Matrix, ids: jax.Array) -> jax.Array:
    """Rows `ids` int32[R] of a matrix as f32[R, D]. Ids out of range are clipped."""
    if isinstance(w, PlainMatrix):
        return w.data[jnp.clip(ids, 0, w.shape[0] - 1)].astype(jnp.float32)
    return embed_rows(w, ids) if isinstance(w, Fragments) else dequant.embed_rows(w, ids)
