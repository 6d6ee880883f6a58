"""The kernels in jnp: the definition, the oracle of every test, and the fallback where there is no compiler.

Rows of activations stay in float32 here. The native kernels quantise them for quantised weights, which is the whole
difference between the two. By default functions map over rows, so that a row's bits do not depend on its neighbours
(contract C1). With `over_rows=at_once`, and in `attend_batched`, XLA does the batching, for GPUs.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specsparse.kernels.packing import dequant
from specsparse.kernels.reference.q8_cache import decode, encode, head_size

LANES = 16
HIGHEST = jax.lax.Precision.HIGHEST
_LOWEST = jnp.finfo(jnp.float32).min


def rowwise(function, *rows):
    """function over the leading axis, one row after the other."""
    return jax.lax.map(lambda args: function(*args), rows)


def alone(function, *rows):
    """`rowwise`, never fused with its neighbours: XLA unrolls a loop of one step, and then may join a product in it
    with a sum outside, unrounded."""
    if rows[0].shape[0] > 1:
        return rowwise(function, *rows)
    return jax.tree.map(lambda y: y[:1], rowwise(function, *(jnp.concatenate([x, x]) for x in rows)))


def at_once(function, *rows):
    return function(*rows)


def normalise(x, norm, *, eps, over_rows=alone):
    """RMS norm of each row f32[..., D] on its own, times norm f32[D]."""
    rows = x.reshape(-1, x.shape[-1])
    return over_rows(lambda row: rms_norm(row, norm, eps), rows).reshape(x.shape)


def rms_norm(x, norm, eps):
    """x / rms(x) * norm over the last axis, of one row or of rows at once."""
    return (
        x
        * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + jnp.float32(eps))
        * jnp.expand_dims(norm, tuple(range(x.ndim - 1)))
    )


def activate(x, act: str | tuple[str, float] | None):
    """silu, relu, relu2 (squared), gelu_tanh (GELU by its tanh formula), ("fatrelu", t), or None for x itself."""
    if act is None:
        return x
    if isinstance(act, tuple):
        return jnp.where(x > jnp.float32(act[1]), x, jnp.float32(0))
    if act == "silu":
        return x * jax.nn.sigmoid(x)
    if act == "gelu_tanh":  # x / 2 * (1 + tanh(z)) = x * sigmoid(2 z), z = sqrt(2 / pi) (x + 0.044715 x^3)
        return x * jax.nn.sigmoid(x * (jnp.float32(1.5957691216057308) + jnp.float32(0.07135481627260025) * x * x))
    positive = jnp.maximum(x, jnp.float32(0))
    return positive * positive if act == "relu2" else positive


def valid(n_valid, rows: int):
    """The rows that count, bool[R]: the first `n_valid` of each sequence."""
    n = rows // n_valid.shape[0]
    return (jnp.arange(n)[None] < n_valid[:, None]).reshape(rows)


def multiplier(w):
    """The function h f32[.., D] -> f32[.., O] of a QTensor [O, D], in float32."""
    groups = dequant.dequantize_groups(w.data, w.layout, w.shape[1])

    def multiply(h):
        y = jnp.einsum("...k,gkr->...gr", h, groups, precision=HIGHEST)
        return y.reshape(*h.shape[:-1], -1)[..., : w.shape[0]]

    return multiply


def linear(
    x, weights, *,
    n_valid, norm=None, eps=0.0, biases=None, residual=None, act=None, zeros=True, over_rows=rowwise,
    multiplier=multiplier,
):  # fmt: skip
    """Matrices times rows: y_i = W_i norm(x) + b_i (+ residual), or act(W_0 norm(x)) * (W_1 norm(x)) with `act`.

    Args:
        x: f32[R, D].
        weights: QTensors [O_i, D].
        n_valid: int32[B]; rows i >= n_valid[b] of sequence b come out as zeros.
        norm: f32[D] weight of an RMS norm before the product, or None; `eps` belongs to it.
        biases: one f32[O_i] or None for each matrix, or None.
        residual: f32[R, O] added to the product, or None.
        act: None, or "silu" | "relu" | "relu2" | "gelu_tanh": the matrices are gate and up.
        zeros: False if nobody reads the rows that do not count: they may hold anything, and cost no writing.
        over_rows: `rowwise` or `at_once`.
        multiplier: makes the function h f32[.., D] -> f32[.., O_i] of a matrix, for other kinds than QTensors.

    Returns:
        A tuple of f32[R, O_i]; one entry with `act`.
    """
    multipliers = [multiplier(w) for w in weights]

    def product(h):
        if norm is not None:
            h = rms_norm(h, norm, eps)
        outs = []
        for i, multiply in enumerate(multipliers):
            y = multiply(h)
            if biases is not None and biases[i] is not None:
                y = y + jnp.expand_dims(biases[i], tuple(range(y.ndim - 1)))
            outs.append(y)
        return (activate(outs[0], act) * outs[1],) if act else tuple(outs)

    outs = over_rows(product, x)
    if residual is not None:
        outs = tuple(residual + y for y in outs)
    if not zeros:
        return outs
    keep = valid(n_valid, x.shape[0])[:, None]
    return tuple(jnp.where(keep, y, jnp.float32(0)) for y in outs)


def add_normed(x, y, norm, *, n_valid, eps, over_rows=alone):
    """x + y / rms(y) * norm, row by row: x, y f32[R, D], norm f32[D]; `n_valid` and `eps` as `linear` takes them."""
    out = over_rows(lambda a, b: a + rms_norm(b, norm, eps), x, y)
    return jnp.where(valid(n_valid, x.shape[0])[:, None], out, jnp.float32(0))


def argmax(x):
    """Lowest index of the largest value of each row: f32[R, V] -> int32[R]; NaN never wins."""
    return jnp.argmax(jnp.where(jnp.isnan(x), -jnp.inf, x), axis=-1).astype(jnp.int32)


def rotate(x, cos, sin, pairing: str):
    """Rotary embedding of x f32[..., d] by cos, sin f32[..., r/2]; "norm" pairs (2i, 2i+1), "neox" (i, i + r/2)."""
    half = cos.shape[-1]
    rotated, rest = x[..., : 2 * half], x[..., 2 * half :]
    if pairing == "neox":
        a, b = rotated[..., :half], rotated[..., half:]
    else:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
    a, b = a * cos - b * sin, a * sin + b * cos
    if pairing == "neox":
        return jnp.concatenate([a, b, rest], axis=-1)
    return jnp.concatenate([jnp.stack([a, b], axis=-1).reshape(rotated.shape), rest], axis=-1)


def ancestors(parents_Bn):
    """bool[B, n, n]: whether row j is row i or one of its ancestors.

    Paths are doubled, so that a compiled step has no loop for it and has it once for all layers.
    """
    n = parents_Bn.shape[1]
    index = jnp.arange(n, dtype=jnp.int32)
    seen = ((index[:, None] == index[None])[None] | (parents_Bn[:, :, None] == index[None, None])).astype(jnp.float32)
    for _ in range((n - 1).bit_length()):
        seen = (jnp.einsum("bij,bjk->bik", seen, seen, precision=HIGHEST) > 0).astype(jnp.float32)
    return seen > 0


def append(cache_k, cache_v, k_BnGd, v_BnGd, slots_Bn, keep_Bn):
    """A layer's two cache arrays with keys and values f32[B, n, G, d] in slots int32[B, n], if `keep` bool[B, n]."""
    capacity = cache_v.shape[2]
    slots = jnp.where(keep_Bn, slots_Bn, capacity)  # dropped

    def one(ck, cv, k, v, slot):
        ck = ck.at[:, slot // LANES, :, slot % LANES].set(encode(k, ck.dtype), mode="drop")
        return ck, cv.at[:, slot].set(encode(v.transpose(1, 0, 2), cv.dtype), mode="drop")

    return jax.vmap(one)(cache_k, cache_v, k_BnGd, v_BnGd, slots)


class Step(NamedTuple):
    """The rows of a step of attention, with the cache they were appended to."""

    q: jax.Array  # f32[B, n, H, d], rotated
    # cache_k, cache_v: with the new rows
    cache_k: jax.Array
    cache_v: jax.Array
    length: jax.Array  # int32[B]
    keep: jax.Array  # bool[B, n], rows that count
    seen: jax.Array  # bool[B, n, n], see `ancestors`
    positions: jax.Array  # int32[B, n]


def _begin_step(
    q, k, v, cache_k, cache_v, *,
    each_row, cos, sin, length, n_valid, parents=None, shift=None, pairing="norm", q_norm=None, k_norm=None, eps=0.0,
    table=0, finite=False,
) -> Step:  # fmt: skip
    batch, groups, capacity, _ = cache_v.shape
    d = head_size(cache_v)
    n = q.shape[0] // batch
    index = jnp.arange(n, dtype=jnp.int32)[None]
    if parents is None:
        seen_Bnn = jnp.broadcast_to(index[..., None] >= index[:, None], (batch, n, n))
    else:
        seen_Bnn = ancestors(parents.reshape(batch, n))
    keep = index < jnp.minimum(n_valid[:, None], capacity - length[:, None])
    positions = jnp.minimum(length[:, None] + jnp.sum(seen_Bnn, axis=-1, dtype=jnp.int32) - 1, capacity - 1)
    at_Bn = positions if shift is None else jnp.minimum(positions + shift[:, None], cos.shape[1] - 1)
    c, s = cos[table, at_Bn][:, :, None], sin[table, at_Bn][:, :, None]

    def heads(x, norm):
        x = x.reshape(batch * n, -1, d)
        if norm is not None:
            x = each_row(lambda row: rms_norm(row, norm, eps), x)
        return rotate(x.reshape(batch, n, -1, d), c, s, pairing)

    q, k = heads(q, q_norm), heads(k, k_norm)
    v = v.reshape(batch, n, groups, d)
    if finite:
        most = jnp.finfo(cache_v.dtype if jnp.issubdtype(cache_v.dtype, jnp.floating) else jnp.float16).max
        k, v = _finite(k, most), _finite(v, most)
    cache_k, cache_v = append(cache_k, cache_v, k, v, length[:, None] + index, keep)
    return Step(q, cache_k, cache_v, length, keep, seen_Bnn, positions)


def _end_step(step: Step, out_BnI):
    """Results of attention and the caches; zeros for rows that do not count."""
    out = jnp.where(step.keep[:, :, None], out_BnI, jnp.float32(0))
    return out.reshape(step.keep.size, -1), step.cache_k, step.cache_v


def _mass(step: Step, window, sinks):
    """f32[B, H, C/16], see `attend`."""
    batch, groups, capacity, _ = step.cache_v.shape
    slots, d = jnp.arange(capacity, dtype=jnp.int32)[None], head_size(step.cache_v)
    seen_BC = (slots <= step.length[:, None]) & step.keep[:, :1]
    if window:
        seen_BC &= slots > step.length[:, None] - window
    q = (step.q[:, 0] * (jnp.float32(1) / jnp.sqrt(jnp.float32(d)))).reshape(batch, groups, -1, d)
    keys = decode(step.cache_k.swapaxes(3, 4)).reshape(batch, groups, capacity, d)
    scores = jnp.einsum("bghd,bgcd->bghc", q, keys, precision=HIGHEST).reshape(batch, -1, capacity)
    scores = jnp.where(seen_BC[:, None], scores, _LOWEST)
    if sinks is not None:
        scores = jnp.concatenate([scores, jnp.broadcast_to(sinks[None, :, None], (*scores.shape[:2], 1))], axis=2)
    weights = jnp.where(seen_BC[:, None], jax.nn.softmax(scores, axis=-1)[..., :capacity], jnp.float32(0))
    return jnp.sum(weights.reshape(batch, -1, capacity // LANES, LANES), axis=3)


def gather_path(keys, values, path, seen):
    """Keys and values of one row's path in position order, which makes a tree row equal to its chain."""
    order = jnp.argsort(jnp.where(path, jnp.arange(path.shape[0]), path.shape[0]), stable=True)
    live = jnp.arange(path.shape[0]) < seen
    return keys[:, order], values[:, order], live


def _attend_row(q_HD, keys_GCd, values_GCd, path_C, sinks_H=None):
    """One query row over the slots of its path; the reduction runs in position order."""
    keys, values, live = gather_path(keys_GCd, values_GCd, path_C, jnp.sum(path_C))
    groups, d = keys.shape[0], keys.shape[-1]
    q = q_HD.reshape(groups, -1, d) * (jnp.float32(1) / jnp.sqrt(jnp.float32(d)))
    scores = jnp.einsum("ghd,gcd->ghc", q, keys, precision=HIGHEST)
    scores = jnp.where(live[None, None], scores, -jnp.inf)
    if sinks_H is not None:  # one more score, whose weight is dropped
        scores = jnp.concatenate([scores, sinks_H.reshape(groups, -1, 1)], axis=-1)
    p = jax.nn.softmax(scores, axis=-1)[..., : live.shape[0]]
    values = jnp.where(live[None, :, None], values, jnp.float32(0))
    return jnp.einsum("ghc,gcd->ghd", p, values, precision=HIGHEST).reshape(-1)


def attend(q, k, v, cache_k, cache_v, *, window=0, sinks=None, mass=False, attend_row=_attend_row, **options):
    """Rotates queries and keys, appends keys and values to the cache, and attends.

    Args:
        q, k, v: f32[R, H * d], f32[R, G * d], f32[R, G * d], R = B * n.
        cache_k, cache_v: [B, G, C/16, d, 16] and [B, G, C, d] (q8_0: see `q8_cache`); row i of sequence b goes to slot
            length[b] + i.
        cos, sin: f32[T, >= C, r/2], rotary tables.
        length, n_valid: int32[B].
        parents: int32[B, n], -1 = the committed prefix; None is a chain.
        shift: int32[B], position less slot of new rows, in a cache of chosen slots; None for 0.
        pairing: "norm" or "neox".
        q_norm, k_norm: f32[d] weights of an RMS norm of each query and each key before it is rotated, or None; `eps`
            belongs to them.
        window: positions that a row sees, its own among them; 0: all before it.
        table: which of the T tables rotates queries and keys.
        sinks: f32[H], a logit of each head that takes part in its softmax and has no value, or None.
        mass: whether the weights of each sequence's first row are returned, summed by blocks of sixteen slots.
        attend_row: (q f32[H, d], keys f32[G, C, d], values, path bool[C]) -> f32[H * d], attention of one row.

    Returns:
        f32[R, H * d] and the two cache arrays; with `mass` also f32[B, H, C/16].
    """
    batch, groups, capacity, _ = cache_v.shape
    step = _begin_step(q, k, v, cache_k, cache_v, each_row=rowwise, **options)
    n, positions = step.q.shape[1], step.positions
    slots = jnp.arange(capacity, dtype=jnp.int32)[None, None]
    node = slots - step.length[:, None, None]
    new = jnp.take_along_axis(step.seen, jnp.clip(jnp.broadcast_to(node, (batch, n, capacity)), 0, n - 1), axis=2)
    paths = (node < 0) | ((node >= 0) & (node < n) & new)
    if window:  # of positions: a node's is that of its depth, whatever slot it lies in
        depths = jnp.take_along_axis(positions, jnp.clip(node[:, 0], 0, n - 1), axis=1)
        held = jnp.where(node[:, 0] < 0, slots[:, 0], depths)
        paths &= held[:, None] > positions[:, :, None] - window
    keys = decode(step.cache_k.swapaxes(3, 4).reshape(batch, groups, capacity, -1))
    values = decode(step.cache_v)

    more = () if sinks is None else (sinks,)

    def sequence(q, keys, values, paths):
        return rowwise(lambda q1, path: attend_row(q1, keys, values, path, *more), q, paths)

    found = _end_step(step, rowwise(sequence, step.q, keys, values, paths).reshape(batch, n, -1))
    return (*found, _mass(step, window, sinks)) if mass else found


def attend_batched(
    q, k, v, cache_k, cache_v, *,
    parents=None, window=0, sinks=None, mass=False, finite=False, core=None, **options,
):  # fmt: skip
    """`attend` of all rows together: one product with the cache, and for trees another with a row's newest positions.

    A row at position p of a tree of n rows sees the committed positions up to p - n in the cache, and the last n along
    its own path, by the scores that all rows have with all slots. The part of a position depends on p alone, so that a
    step and a verification of as many rows and as large a cache add up the same numbers in the same order. The two
    parts have a softmax each and are joined by their maxima.

    With `finite` all slots of the cache must hold finite numbers, whether they count or not. They do if they were 0 at
    first and written by this function alone: it stores NaN as 0, and too large numbers as the largest. Without it
    slots that do not count may hold anything; on a GPU that costs a copy of the values. `core` is a `Core` for steps of
    trees.
    """
    step = _begin_step(q, k, v, cache_k, cache_v, each_row=at_once, parents=parents, finite=finite, **options)
    batch, groups, capacity, _ = cache_v.shape
    d = head_size(cache_v)
    n, positions = step.q.shape[1], step.positions
    q_BnGhd = (step.q * (jnp.float32(1) / jnp.sqrt(jnp.float32(d)))).reshape(batch, n, groups, -1, d)
    first = positions + 1 if parents is None else positions + 1 - n
    at = first[..., None] + jnp.arange(n, dtype=jnp.int32)[None, None]
    low = positions - window if window else jnp.full_like(positions, -1)
    slot = None if parents is None else jnp.clip(_slots(step, at), 0, capacity - 1)
    if core is not None and slot is not None and sinks is None:
        near = jnp.where((at >= 0) & (at > low[..., None]), slot, -1)
        out = core(step, q_BnGhd, first, low, near)
        if out is not None:
            found = out.reshape(batch * n, -1), step.cache_k, step.cache_v
            return (*found, _mass(step, window, sinks)) if mass else found
    keys = decode(step.cache_k.swapaxes(3, 4)).swapaxes(3, 4)
    scores = jnp.einsum("bgnhd,bgxdl->bgnhxl", q_BnGhd.swapaxes(1, 2), keys, precision=HIGHEST)
    scores = scores.reshape(batch, groups, n, -1, capacity)

    def weighed(scores_BGnhs, held_Bns, at):
        """(top, weights, their sum) of a part of the positions; a position that is not seen has weight 0.

        If no position of the part is seen, weights are 1, and the top is so low that only the other part counts.
        """
        if window:
            held_Bns &= at > low[:, :, None]
        held = held_Bns[:, None, :, None]
        seen = jnp.where(held, scores_BGnhs, _LOWEST)
        top = jnp.max(seen, axis=-1, keepdims=True)
        weights = jnp.exp(seen - top)
        return top, weights, jnp.sum(weights, axis=-1, keepdims=True)

    slots = jnp.arange(capacity, dtype=jnp.int32)[None, None]
    top, weights, total = weighed(scores, slots < first[..., None], slots)
    read = decode if finite else lambda rows: _finite(decode(rows))
    summed = jnp.einsum("bgnhs,bgsd->bgnhd", weights, read(step.cache_v), precision=HIGHEST)
    if slot is not None:
        near = jnp.take_along_axis(scores, slot[:, None, :, None], axis=-1)
        top_2, weights, total_2 = weighed(near, at >= 0, at)
        newest = read(jax.vmap(lambda v, s: v[:, s])(step.cache_v, slot))  # [B, G, n, S, d]
        summed_2 = jnp.sum(weights[..., None] * newest[:, :, :, None], axis=4)
        both = jnp.maximum(top, top_2)
        a, b = jnp.exp(top - both), jnp.exp(top_2 - both)
        summed = a * summed + b * summed_2
        top, total = both, a * total + b * total_2
    if sinks is not None:
        sink = sinks.reshape(1, groups, 1, -1, 1)
        both = jnp.maximum(top, sink)
        summed = jnp.exp(top - both) * summed
        total = jnp.exp(top - both) * total + jnp.exp(sink - both)
    found = _end_step(step, (summed / total).swapaxes(1, 2).reshape(batch, n, -1))
    return (*found, _mass(step, window, sinks)) if mass else found


Core = Callable[[Step, jax.Array, jax.Array, jax.Array, jax.Array], jax.Array | None]
"""core(step, q, first, low, near) -> f32[B, n, G, h, d], attention of rows of trees, or None if it cannot.

`q` f32[B, n, G, h, d] is scaled. A row sees slots under `first` and above `low` int32[B, n], and its newest n positions
in slots `near` int32[B, n, n], -1 for no slot.
"""


def _finite(x, most=None):
    """x with 0 for NaN, clipped to the largest number of its type, or to `most`."""
    most = jnp.asarray(jnp.finfo(x.dtype).max if most is None else most, x.dtype)
    return jnp.where(jnp.isnan(x), jnp.zeros((), x.dtype), jnp.clip(x, -most, most))


def _slots(step: Step, at_BnS):
    """Slots of the positions `at` on the path of each row: the position itself if it is committed, else a node's."""
    n = step.seen.shape[1]
    index, depth_Bn = jnp.arange(n, dtype=jnp.int32), jnp.sum(step.seen, axis=-1, dtype=jnp.int32) - 1
    own = jnp.where(step.seen, index[None, None].astype(jnp.float32), jnp.float32(0))  # exact: they are small
    by_depth = (depth_Bn[..., None] == index[None, None]).astype(jnp.float32)
    path_Bnn = jnp.einsum("bij,bjk->bik", own, by_depth, precision=HIGHEST).astype(jnp.int32)
    new = at_BnS - step.length[:, None, None]
    node = jnp.take_along_axis(path_Bnn, jnp.clip(new, 0, n - 1), axis=2)
    return jnp.where(new < 0, at_BnS, step.length[:, None, None] + node)
