"""The definition of the native sparse kernels (the text of csrc/sparse/sparse.inl) in plain numpy."""

import numpy as np

from specsparse.kernels.qtensor import Layout
from tests.kernels.emulation import activate, f32, fma, normalise, quantise, tree_sum

CHUNK = 64


def split(data: np.ndarray, layout: Layout, cols: int):
    """Integer weights [F, C] (zero and table applied), scales and mins (or None) [F, C / sub] of packed rows."""
    padded = -(-cols // CHUNK) * CHUNK
    nibble, subs, blocks, supers = layout.codes == "nibble", padded // layout.sub, padded // 32, cols // 256
    at = 0

    def take(count, dtype):
        nonlocal at
        size = count * np.dtype(dtype).itemsize
        at += size
        return np.ascontiguousarray(data[:, at - size : at]).view(dtype)

    if nibble:
        pairs = take(padded // 2, np.uint8).reshape(len(data), -1, 32)
        codes = np.stack([pairs & 15, pairs >> 4], axis=2).reshape(len(data), padded).astype(np.int32)
        codes = np.array(layout.lut, np.int32)[codes] if layout.lut else codes - layout.zero
    else:
        codes = take(padded, np.int8).astype(np.int32)
    if layout.scales == "f32":
        return codes, take(subs, "<f4"), None
    if not layout.scales.startswith("super"):
        d = take(blocks, "<f2").astype(f32)
        return codes, d, take(blocks, "<f2").astype(f32) if layout.scales == "dm" else None
    top = take(supers, "<f2").astype(f32).repeat(subs // supers, axis=1)
    low = take(supers, "<f2").astype(f32).repeat(subs // supers, axis=1) if layout.scales == "super_min" else None
    d = top * take(subs, np.int8).astype(f32)
    return codes, d, None if low is None else -(low * take(subs, np.uint8).astype(f32))


def floats(data: np.ndarray, layout: Layout, cols: int) -> np.ndarray:
    """float32[F, C] of packed float rows, C whole chunks."""
    padded = -(-cols // CHUNK) * CHUNK
    if layout.codes == "bf16":
        bits = np.ascontiguousarray(data[:, : 2 * padded]).view("<u2").astype(np.uint32) << 16
        return bits.view(f32)
    dtype = "<f4" if layout.codes == "f32" else "<f2"
    return np.ascontiguousarray(data[:, : np.dtype(dtype).itemsize * padded]).view(dtype).astype(f32)


def pad(x: np.ndarray, count: int) -> np.ndarray:
    """Zeros up to a multiple of `count` columns."""
    return np.pad(x, ((0, 0), (0, -x.shape[1] % count)))


def products(z: np.ndarray, data: np.ndarray, layout: Layout, cols: int) -> np.ndarray:
    """float32[R, F]: every neuron times every row."""
    x = pad(z, CHUNK)
    if layout.is_float:
        w, acc = floats(data, layout, cols), np.zeros((len(x), len(data), 32), f32)
        for c in range(0, x.shape[1], 32):
            acc = fma(w[None, :, c : c + 32], x[:, None, c : c + 32], acc)
        return tree_sum(acc[..., :16] + acc[..., 16:])
    w, d, m = split(data, layout, cols)
    codes, dx = quantise(x)
    acc = np.zeros((len(x), len(data), 16), f32)
    dx = dx.repeat(32 // layout.sub, axis=1)
    for c in range(0, x.shape[1], CHUNK):
        lanes = (part[:, c : c + CHUNK].reshape(-1, 16, 4) for part in (w, codes))
        sums = np.einsum("jik,rik->rji", *lanes)
        subs = slice(c // layout.sub, (c + CHUNK) // layout.sub)
        scale = (d[None, :, subs] * dx[:, None, subs]).repeat(16 * layout.sub // CHUNK, axis=2)
        acc = fma(scale, sums.astype(f32), acc)
    if m is not None:
        total = dx * codes.reshape(len(x), -1, layout.sub).sum(axis=2).astype(f32)
        low, total = pad(m, 16), pad(total, 16)
        for i in range(0, low.shape[1], 16):
            acc = fma(low[None, :, i : i + 16], total[:, None, i : i + 16], acc)
    return tree_sum(acc)


def act_of(x: np.ndarray, act) -> np.ndarray:
    """None, a name, or ("fatrelu", t)."""
    if act is None:
        return x
    return np.where(x > f32(act[1]), x, f32(0)) if isinstance(act, tuple) else activate(x, act)


SEGMENTS = 16


def project(a: np.ndarray, data: np.ndarray, layout: Layout, cols: int) -> np.ndarray:
    """float32[R, D]: sum over neurons in order of a[r, j] times row j, segment by segment; a 0 adds nothing."""
    parts = (floats(data, layout, cols), None, None) if layout.is_float else split(data, layout, cols)
    y = np.zeros((len(a), parts[0].shape[1]), f32)
    for s in range(SEGMENTS):
        js = range(s * len(data) // SEGMENTS, (s + 1) * len(data) // SEGMENTS)
        part = np.zeros_like(y)
        for j in js:
            new = _added(part, a[:, j, None], j, layout, *parts)
            part = np.where(a[:, j, None] != 0, new, part)
        y = np.where((a[:, js] != 0).any(axis=1)[:, None], y + part, y)
    return y[:, :cols]


def _added(y: np.ndarray, factor: np.ndarray, j: int, layout: Layout, w, d, m) -> np.ndarray:
    """y plus factor times neuron j."""
    if layout.is_float:
        return fma(factor, w[None, j], y)
    new = fma((factor * d[None, j]).repeat(layout.sub, axis=1), w[None, j].astype(f32), y)
    return new if m is None else fma(m[None, j].repeat(layout.sub, axis=1), factor, new)


def sparse_ffn(x, keep, gate, up, down_t, *, norm, eps, act, up_act=None, residual=None, least=0.0):
    """(y, activations a float32[R, F]) of all rows; matrices are NeuronRows."""
    z = x if norm is None else normalise(x, norm, eps)
    first, cols = up if gate is None else gate, up.shape[1]
    a = act_of(products(z, np.asarray(first.data), first.layout, cols), act)
    a = np.where((keep != 0) & ~(np.abs(a) < f32(least)), a, f32(0))
    if gate is not None:
        a = np.where(a == 0, a, a * act_of(products(z, np.asarray(up.data), up.layout, cols), up_act))
    y = project(a, np.asarray(down_t.data), down_t.layout, cols)
    return y if residual is None else residual + y, a
