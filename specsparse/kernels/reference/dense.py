"""The kernels in jnp: the definition, the oracle of every test, and the fallback where there is no compiler.

Rows of activations stay in float32 here; the native kernels quantise them for quantised weights, which is the whole
difference
between the two. The plain functions map over rows, so that a row's bits do not depend on its neighbours (contract C1);
the
`_batched` ones leave the batching to XLA, for GPUs.
"""

from functools import partial

import jax
import jax.numpy as jnp

from specsparse.kernels.packing import dequant

LANES = 16
_HIGHEST = jax.lax.Precision.HIGHEST


def _rowwise(function, *rows):
    """function over the leading axis, one row after the other."""
    return jax.lax.map(lambda args: function(*args), rows)


def _alone(function, *rows):
    """`_rowwise`, never fused with what is around it: XLA unrolls a loop of one step, and then may join a product in it
    with a sum outside, unrounded."""
    if rows[0].shape[0] > 1:
        return _rowwise(function, *rows)
    return _rowwise(function, *(jnp.concatenate([x, x]) for x in rows))[:1]


def _at_once(function, *rows):
    """function of all rows together."""
    return function(*rows)


def normalise(x, norm, *, eps):
    """RMS norm of each row f32[..., D] on its own, times norm f32[D]."""
    rows = x.reshape(-1, x.shape[-1])
    return _alone(lambda row: _normalise(row, norm, eps), rows).reshape(x.shape)


def normalise_batched(x, norm, *, eps):
    """`normalise` of all rows at once."""
    return _normalise(x, norm, eps)


def _normalise(x, norm, eps):
    return (
        x
        * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + jnp.float32(eps))
        * jnp.expand_dims(norm, tuple(range(x.ndim - 1)))
    )


def activate(x, act: str):
    """The gate's activation: silu, relu, relu2 (squared) or gelu_tanh (GELU by its tanh formula)."""
    if act == "silu":
        return x * jax.nn.sigmoid(x)
    if act == "gelu_tanh":  # x / 2 * (1 + tanh(z)) = x * sigmoid(2 z), z = sqrt(2 / pi) (x + 0.044715 x^3)
        return x * jax.nn.sigmoid(x * (jnp.float32(1.5957691216057308) + jnp.float32(0.07135481627260025) * x * x))
    positive = jnp.maximum(x, jnp.float32(0))
    return positive * positive if act == "relu2" else positive


def _valid(n_valid, rows: int):
    """bool[R]: which rows count."""
    n = rows // n_valid.shape[0]
    return (jnp.arange(n)[None] < n_valid[:, None]).reshape(rows)


def multiplier(w):
    """The function h f32[.., D] -> f32[.., O] of a QTensor [O, D], in float32."""
    groups = dequant.dequantize_groups(w.data, w.layout, w.shape[1])

    def multiply(h):
        y = jnp.einsum("...k,gkr->...gr", h, groups, precision=_HIGHEST)
        return y.reshape(*h.shape[:-1], -1)[..., : w.shape[0]]

    return multiply


def _linear(
    x, weights, *, over_rows, n_valid, norm=None, eps=0.0, biases=None, residual=None, act=None, zeros=True,
    multiplier=multiplier,
):  # fmt: skip
    multipliers = [multiplier(w) for w in weights]

    def product(h):
        if norm is not None:
            h = _normalise(h, norm, eps)
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
    keep = _valid(n_valid, x.shape[0])[:, None]
    return tuple(jnp.where(keep, y, jnp.float32(0)) for y in outs)


def linear(x, weights, **options):
    """Matrices times rows: y_i = W_i norm(x) + b_i (+ residual), or act(W_0 norm(x)) * (W_1 norm(x)) with `act`.

    Args:
        x: f32[R, D].
        weights: QTensors [O_i, D].
        n_valid: int32[B]; rows i >= n_valid[b] of sequence b come out as zeros.
        norm: f32[D] weight of an RMS norm before the product, or None; `eps` belongs to it.
        biases: one f32[O_i] or None for each matrix, or None.
        residual: f32[R, O] added to the product, or None.
        act: None, or "silu" | "relu" | "relu2" | "gelu_tanh": the matrices are gate and up.
        zeros: False where nobody looks at the rows that do not count; they hold anything then, and cost no writing.
        multiplier: makes the function h f32[.., D] -> f32[.., O_i] of a matrix, for other kinds than QTensors.

    Returns:
        A tuple of f32[R, O_i]; one entry with `act`.
    """
    return _linear(x, weights, over_rows=_rowwise, **options)


def linear_batched(x, weights, **options):
    """`linear` as one batched product."""
    return _linear(x, weights, over_rows=_at_once, **options)


def _add_normed(x, y, norm, *, over_rows, n_valid, eps):
    out = over_rows(lambda a, b: a + _normalise(b, norm, eps), x, y)
    return jnp.where(_valid(n_valid, x.shape[0])[:, None], out, jnp.float32(0))


def add_normed(x, y, norm, **options):
    """x + y / rms(y) * norm, row by row: x, y f32[R, D], norm f32[D]; `n_valid` and `eps` as `linear` takes them."""
    return _add_normed(x, y, norm, over_rows=_alone, **options)


def add_normed_batched(x, y, norm, **options):
    """`add_normed` of all rows at once."""
    return _add_normed(x, y, norm, over_rows=_at_once, **options)


def embed(w, ids):
    """Rows `ids` int32[R] of a QTensor [V, D] as f32[R, D]."""
    return dequant.embed_rows(w, ids)


def argmax(x):
    """Lowest index of the largest value of each row: f32[R, V] -> int32[R]; NaN never wins."""
    return argmax_batched(x)


def argmax_batched(x):
    """`argmax`; the largest value does not depend on the order of comparison."""
    return jnp.argmax(jnp.where(jnp.isnan(x), -jnp.inf, x), axis=-1).astype(jnp.int32)


def rotate(x, cos, sin, pairing: str):
    """Rotary embedding of x f32[..., d] by cos, sin f32[..., r/2]; "norm" pairs (2i, 2i+1), "neox" (i, i + r/2)."""
    half = cos.shape[-1]
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    if pairing == "neox":
        a, b = turned[..., :half], turned[..., half:]
    else:
        a, b = turned[..., 0::2], turned[..., 1::2]
    a, b = a * cos - b * sin, a * sin + b * cos
    if pairing == "neox":
        return jnp.concatenate([a, b, rest], axis=-1)
    return jnp.concatenate([jnp.stack([a, b], axis=-1).reshape(turned.shape), rest], axis=-1)


def ancestors(parents_Bn):
    """bool[B, n, n]: whether row j is row i or one of its ancestors."""
    n = parents_Bn.shape[1]
    eye = jnp.eye(n, dtype=bool)

    def one(parents):
        def step(i, seen):
            above = jnp.where(parents[i] >= 0, seen[jnp.maximum(parents[i], 0)], jnp.zeros((n,), bool))
            return seen.at[i].set(above | eye[i])

        return jax.lax.fori_loop(0, n, step, jnp.zeros((n, n), bool))

    return jax.vmap(one)(parents_Bn)


def append(cache_k, cache_v, k_BnGd, v_BnGd, slots_Bn, keep_Bn):
    """A layer's two cache arrays with keys and values f32[B, n, G, d] in slots int32[B, n], where `keep` bool[B, n]."""
    capacity = cache_v.shape[2]
    slots = jnp.where(keep_Bn, slots_Bn, capacity)  # dropped

    def one(ck, cv, k, v, slot):
        ck = ck.at[:, slot // LANES, :, slot % LANES].set(k.astype(ck.dtype), mode="drop")
        return ck, cv.at[:, slot].set(v.transpose(1, 0, 2).astype(cv.dtype), mode="drop")

    return jax.vmap(one)(cache_k, cache_v, k_BnGd, v_BnGd, slots)


def _gather_path(keys, values, path, seen):
    """Keys and values of one row's path in position order: what makes a tree row equal to its chain."""
    order = jnp.argsort(jnp.where(path, jnp.arange(path.shape[0]), path.shape[0]), stable=True)
    live = jnp.arange(path.shape[0]) < seen
    return keys[:, order], values[:, order], live


def _attend_row(q_HD, keys_GCd, values_GCd, path_C):
    """One query row over the slots of its path; the reduction runs in position order."""
    keys, values, live = _gather_path(keys_GCd, values_GCd, path_C, jnp.sum(path_C))
    groups, d = keys.shape[0], keys.shape[-1]
    q = q_HD.reshape(groups, -1, d) * (jnp.float32(1) / jnp.sqrt(jnp.float32(d)))
    scores = jnp.einsum("ghd,gcd->ghc", q, keys, precision=_HIGHEST)
    scores = jnp.where(live[None, None], scores, -jnp.inf)
    p = jax.nn.softmax(scores, axis=-1)
    values = jnp.where(live[None, :, None], values, jnp.float32(0))
    return jnp.einsum("ghc,gcd->ghd", p, values, precision=_HIGHEST).reshape(-1)


def _attend(
    q, k, v, cache_k, cache_v, *, over_rows, each_row,
    cos, sin, length, n_valid, parents=None, pairing="norm", q_norm=None, k_norm=None, eps=0.0, window=0, table=0,
):  # fmt: skip
    batch, groups, capacity, d = cache_v.shape
    n = q.shape[0] // batch
    index = jnp.arange(n, dtype=jnp.int32)[None]
    if parents is None:
        parents = jnp.broadcast_to(index - 1, (batch, n))
    parents = parents.reshape(batch, n)
    keep = index < jnp.minimum(n_valid[:, None], capacity - length[:, None])
    seen_Bnn = ancestors(parents)
    positions = jnp.minimum(length[:, None] + jnp.sum(seen_Bnn, axis=-1, dtype=jnp.int32) - 1, capacity - 1)
    c, s = cos[table, positions][:, :, None], sin[table, positions][:, :, None]

    def heads(x, norm):
        x = x.reshape(batch * n, -1, d)
        if norm is not None:
            x = each_row(lambda row: _normalise(row, norm, eps), x)
        return rotate(x.reshape(batch, n, -1, d), c, s, pairing)

    q, k = heads(q, q_norm), heads(k, k_norm)
    cache_k, cache_v = append(cache_k, cache_v, k, v.reshape(batch, n, groups, d), length[:, None] + index, keep)

    slots = jnp.arange(capacity, dtype=jnp.int32)[None, None]
    node = slots - length[:, None, None]
    new = jnp.take_along_axis(seen_Bnn, jnp.clip(jnp.broadcast_to(node, (batch, n, capacity)), 0, n - 1), axis=2)
    paths = (node < 0) | ((node >= 0) & (node < n) & new)
    if window:  # of positions: a node's is that of its depth, whatever slot it lies in
        depths = jnp.take_along_axis(positions, jnp.clip(node[:, 0], 0, n - 1), axis=1)
        held = jnp.where(node[:, 0] < 0, slots[:, 0], depths)
        paths &= held[:, None] > positions[:, :, None] - window
    keys = cache_k.swapaxes(3, 4).reshape(batch, groups, capacity, d).astype(jnp.float32)
    values = cache_v.astype(jnp.float32)
    out = over_rows(_attend_row, q, keys, values, paths)
    out = jnp.where(keep[:, :, None], out.reshape(batch, n, -1), jnp.float32(0))
    return out.reshape(batch * n, -1), cache_k, cache_v


def _attend_rowwise(function, q, keys, values, paths):
    return _rowwise(lambda q, k, v, p: _rowwise(lambda q1, p1: function(q1, k, v, p1), q, p), q, keys, values, paths)


def _attend_vmapped(function, q, keys, values, paths):
    return jax.vmap(lambda q, k, v, p: jax.vmap(function, (0, None, None, 0))(q, k, v, p))(q, keys, values, paths)


attend = partial(_attend, over_rows=_attend_rowwise, each_row=_rowwise)
attend.__doc__ = """Rotates queries and keys, appends keys and values to the cache, and attends.

    Args:
        q, k, v: f32[R, H * d], f32[R, G * d], f32[R, G * d], R = B * n.
        cache_k, cache_v: [B, G, C/16, d, 16] and [B, G, C, d]; row i of sequence b goes to slot length[b] + i.
        cos, sin: f32[T, >= C, r/2], rotary tables.
        length, n_valid: int32[B].
        parents: int32[B, n], -1 = the committed prefix; None is a chain.
        pairing: "norm" or "neox".
        q_norm, k_norm: f32[d] weights of an RMS norm of each query and each key before it turns, or None; `eps`
            belongs to them.
        window: positions that a row sees, its own among them; 0: all before it.
        table: which of the T tables turns queries and keys.

    Returns:
        f32[R, H * d] and the two cache arrays.
    """
attend_batched = partial(_attend, over_rows=_attend_vmapped, each_row=_at_once)
