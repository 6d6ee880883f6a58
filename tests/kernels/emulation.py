"""The definition of the native kernels (docs/layouts.md) in plain numpy, written from the text, not from the C++.

Fused multiply-adds are emulated in float64, where the product of two float32 is exact; the sum is then rounded twice,
which in about one of 2^29 cases gives another float32.
"""

import numpy as np

from specsparse.kernels.qtensor import Layout

f32 = np.float32


def fma(a, b, c):
    """float32 fused multiply-add."""
    return (np.float64(a) * np.float64(b) + np.float64(c)).astype(f32)


def lanes_first(chunks: np.ndarray) -> np.ndarray:
    """uint8[chunks, 16 rows, 4] -> [16 rows, 4 * chunks]: byte 4 r + b of chunk c is column 4 c + b of row r."""
    return np.moveaxis(chunks, -3, -2).reshape(*chunks.shape[:-3], 16, -1)


def unpack(data: np.ndarray, layout: Layout, rows: int, cols: int):
    """Integer weights [rows, cols] (table and zero applied), scales and mins (or None) float32[rows, cols / sub]."""
    subs, nibble = 32 // layout.sub, layout.codes == "nibble"
    is_super, has_min = layout.scales.startswith("super"), layout.scales in ("dm", "super_min")
    code_bytes = 256 if nibble else 512
    weights, scales, mins = [], [], []
    stream, at = data.reshape(-1), 0

    def take(count, dtype):
        nonlocal at
        size = count * np.dtype(dtype).itemsize
        at += size
        return stream[at - size : at].view(dtype)

    for _ in data:
        for block in range(cols // 32):
            if is_super and block % 8 == 0:
                top = take(16, "<f2").astype(f32)
                low = take(16, "<f2").astype(f32) if has_min else None
            if is_super:
                scales += [top * s.astype(f32) for s in take(16 * subs, np.int8).reshape(subs, 16)]
                if has_min:
                    mins += [-(low * s.astype(f32)) for s in take(16 * subs, np.uint8).reshape(subs, 16)]
            elif layout.scales == "f32":
                scales += list(take(16 * subs, "<f4").reshape(subs, 16))
            else:
                scales.append(take(16, "<f2").astype(f32))
                if has_min:
                    mins.append(take(16, "<f2").astype(f32))
            raw = take(code_bytes, np.uint8).reshape(-1, 16, 4)
            if nibble:
                codes = np.concatenate([lanes_first(raw & 15), lanes_first(raw >> 4)], axis=1).astype(np.int32)
                codes = np.array(layout.lut, np.int32)[codes] if layout.lut else codes - layout.zero
            else:
                codes = lanes_first(raw.view(np.int8)).astype(np.int32)
            weights.append(codes)
    assert at == len(stream)

    def matrix(parts, width):
        """A list over (group, block) of [16, ..] as [rows, width]."""
        a = np.stack([np.asarray(p).reshape(16, -1) for p in parts]).reshape(len(data), -1, 16, parts[0].size // 16)
        return a.transpose(0, 2, 1, 3).reshape(-1, width)[:rows]

    return matrix(weights, cols), matrix(scales, cols // layout.sub), matrix(mins, cols // layout.sub) if mins else None


def unpack_floats(data: np.ndarray, layout: Layout, rows: int, cols: int) -> np.ndarray:
    """float32[rows, cols] of the float layouts."""
    if layout.codes == "bf16":
        values = (data.view("<u2").astype(np.uint32) << 16).view(f32)
    else:
        values = data.view("<f4" if layout.codes == "f32" else "<f2").astype(f32)
    return values.reshape(len(data), cols, 16).transpose(0, 2, 1).reshape(-1, cols)[:rows]


def quantise(x: np.ndarray):
    """Rows float32[R, D] as int8 codes (in int32) and one scale per block of 32, float32[R, D / 32]."""
    blocks = x.reshape(len(x), -1, 32)
    largest = np.abs(blocks).max(axis=-1)
    inverse = np.where(largest > 0, f32(127) / np.where(largest > 0, largest, f32(1)), f32(0)).astype(f32)
    codes = np.rint(blocks * inverse[..., None]).astype(np.int32)
    return codes.reshape(x.shape), (largest / f32(127)).astype(f32)


def product(x: np.ndarray, data: np.ndarray, layout: Layout, shape: tuple[int, int]) -> np.ndarray:
    """float32[R, rows]: one matrix times the rows of x, in the order of the definition."""
    rows, cols = shape
    acc = np.zeros((len(x), rows), f32)
    if layout.is_float:
        w = unpack_floats(data, layout, rows, cols)
        for k in range(cols):
            acc = fma(w[None, :, k], x[:, k, None], acc)
        return acc
    w, d, m = unpack(data, layout, rows, cols)
    codes, dx = quantise(x)
    for at in range(cols // layout.sub):
        columns = slice(at * layout.sub, (at + 1) * layout.sub)
        scale = dx[:, columns.start // 32, None]
        dot = codes[:, columns] @ w[:, columns].T
        acc = fma(d[None, :, at] * scale, dot.astype(f32), acc)
        if m is not None:
            total = codes[:, columns].sum(axis=1, keepdims=True).astype(f32)
            acc = fma(m[None, :, at], scale * total, acc)
    return acc


def tree_sum(lanes: np.ndarray) -> np.ndarray:
    """Sum of the last axis (16) as a fixed tree: i with i + 8, then + 4, + 2, + 1."""
    for width in (8, 4, 2, 1):
        lanes = lanes[..., :width] + lanes[..., width : 2 * width]
    return lanes[..., 0]


def normalise(x: np.ndarray, norm: np.ndarray, eps: float) -> np.ndarray:
    """RMS norm: squares added lane by lane, then the tree."""
    count = x.shape[1]
    padded = np.pad(x, ((0, 0), (0, -count % 16))).reshape(len(x), -1, 16)
    acc = np.zeros((len(x), 16), f32)
    for i in range(padded.shape[1]):
        acc = fma(padded[:, i], padded[:, i], acc)
    scale = f32(1) / np.sqrt(tree_sum(acc) / f32(count) + f32(eps))
    return (x * scale[:, None]) * norm[None]


def exp(x: np.ndarray) -> np.ndarray:
    """exp as 2^n p(r): Cody-Waite reduction, polynomial of degree 6 by Horner; 0 below -87."""
    held = np.clip(x, f32(-87), f32(88))
    n = np.rint(held * f32(1.44269504))
    r = fma(n, f32(2.12194440e-4), fma(n, f32(-0.693359375), held))
    p = np.full_like(r, f32(1.9875691500e-4))
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = fma(p, r, f32(c))
    p = fma(p, r * r, r) + f32(1)
    return np.where(x < f32(-87), f32(0), p * np.ldexp(f32(1), n.astype(np.int32)))


def activate(x: np.ndarray, act: str) -> np.ndarray:
    """silu, relu or relu2."""
    if act == "silu":
        return x / (f32(1) + exp(-x))
    positive = np.maximum(x, f32(0))
    return positive * positive if act == "relu2" else positive


def to_bf16(x: np.ndarray) -> np.ndarray:
    """float32 rounded to bfloat16, as float32."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(f32)


ROUND = {"f32": lambda x: x, "f16": lambda x: x.astype(np.float16).astype(f32), "bf16": to_bf16}


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, pairing: str) -> np.ndarray:
    """Rotary embedding of heads [.., d] in float32, products and sums rounded one by one."""
    half, out = cos.shape[-1], x.copy()
    a, b = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    if pairing == "neox":
        a, b = slice(0, half), slice(half, 2 * half)
    out[..., a] = x[..., a] * cos - x[..., b] * sin
    out[..., b] = x[..., a] * sin + x[..., b] * cos
    return out


def paths_of(parents: np.ndarray) -> list[list[int]]:
    """Of each row, itself and its ancestors, the eldest first."""
    out: list[list[int]] = []
    for i, parent in enumerate(parents):
        out.append([*(out[parent] if parent >= 0 else []), i])
    return out


def attend(
    q, k, v, keys, values, *, cos, sin, length, n_valid, parents, pairing, cache, mass=None, window=0, sinks=None,
):  # fmt: skip
    """Attention of one sequence in float64, over keys and values rounded to the cache's type.

    Args:
        q, k, v: float32[n, H, d], [n, G, d], [n, G, d].
        keys, values: float32[C, G, d]; changed in place.
        parents: int[n].
        mass: float64[H, C/16]; gets the first row's weights, if there is one.
        window, sinks: as `kernels.attend` takes them.

    Returns:
        float64[n, H * d], zeros in rows that do not count.
    """
    n, heads, d = q.shape
    share = heads // k.shape[1]
    out = np.zeros((n, heads * d))
    paths = paths_of(parents)
    count = min(n_valid, len(keys) - length)
    positions = [length + len(p) - 1 for p in paths]
    for i in range(count):
        keys[length + i] = ROUND[cache](rotate(k[i], cos[positions[i]], sin[positions[i]], pairing))
        values[length + i] = ROUND[cache](v[i])
    for i in range(count):
        slots = [*range(length), *(length + j for j in paths[i])][-window:]
        turned = rotate(q[i], cos[positions[i]], sin[positions[i]], pairing).astype(np.float64)
        for h in range(heads):
            scores = keys[slots, h // share].astype(np.float64) @ turned[h] / np.sqrt(d)
            weights = np.exp(scores - scores.max())
            total = weights.sum() + (0 if sinks is None else np.exp(sinks[h] - scores.max()))
            out[i, h * d : (h + 1) * d] = weights @ values[slots, h // share].astype(np.float64) / total
            if mass is not None and i == 0:
                np.add.at(mass[h], np.array(slots) // 16, weights / total)
    return out
