"""Floats -> the K-quants of ggml, Q4_K, Q5_K and Q6_K, by least squares.

A block of 256 weights of Q4_K or Q5_K is x = d s_j q - m t_j: d and m half floats, s_j and t_j of six bits for each 32
weights, q of four or five bits. One of Q6_K is x = d s_j q: s_j a signed byte for each 16 weights, q from -32 to 31.
The layouts are those of `block_q4_K`, `block_q5_K` and `block_q6_K` in ggml-common.h.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as GGML

from specsparse.support.cgroup import cpus

BLOCK = 256
_BLOCKS = 1024  # blocks that are worked on together: about as much as a core's cache holds
_ROUNDS = 2  # times that the scales are fitted to the codes, and the codes to the scales
_HALF = 65504.0


class _Fit(NamedTuple):
    """Blocks in float32: d, m [n, 1]; s, t [n, 256 / sub]; q [n, 256 / sub, sub]."""

    d: np.ndarray
    m: np.ndarray
    s: np.ndarray
    t: np.ndarray
    q: np.ndarray

    def values(self) -> np.ndarray:
        return (self.d * self.s)[..., None] * self.q - (self.m * self.t)[..., None]


@dataclass(frozen=True)
class _Form:
    sub: int  # weights that share a scale
    # codes, scales: least and largest
    codes: tuple[int, int]
    scales: tuple[int, int]
    largest: tuple[int, ...]  # whole numbers to try for the largest scale of a block
    minima: bool  # whether each scale has a minimum beside it
    tries: np.ndarray  # largest codes that the range of `sub` weights is spread over, one try each
    layout: Callable[[_Fit], list[np.ndarray]]  # the bytes of blocks


def quantize(values: np.ndarray, kind: GGML) -> np.ndarray:
    """uint8[..., bytes of a row] from float32[..., n], n a multiple of 256, in a type of KINDS.

    A weight that is not finite becomes 0, and one beyond the largest half-float scale is cut.
    """
    blocks = np.nan_to_num(np.asarray(values, np.float32), nan=0.0, posinf=0.0, neginf=0.0).reshape(-1, BLOCK)
    form = _FORMS[kind]

    def pack(start: int) -> np.ndarray:
        x = blocks[start : start + _BLOCKS]
        x = x.reshape(len(x), BLOCK // form.sub, form.sub)
        return np.concatenate([part.reshape(len(x), -1) for part in form.layout(_fitted(x, form))], axis=1)

    with ThreadPoolExecutor(cpus()) as threads:  # numpy computes outside of the interpreter's lock
        packed = list(threads.map(pack, range(0, len(blocks), _BLOCKS)))
    size = GGML_QUANT_SIZES[kind][1]
    return np.concatenate(packed).reshape(*values.shape[:-1], values.shape[-1] // BLOCK * size)


def _fitted(x: np.ndarray, form: _Form) -> _Fit:
    """The fit of each block with the least squared error, of those that alternate between codes and scales.

    One large scale leaves the others few whole numbers: a d for which it is a little less than the largest one may
    suit them better.
    """
    first = _first(x, form)
    best, least = None, np.inf
    for largest in form.largest:
        scale, minimum = first
        # d makes the scale of the largest magnitude the whole number `largest`.
        peak = np.take_along_axis(scale, np.abs(scale).argmax(axis=1)[:, None], axis=1)
        d, m = _half(peak / np.float32(largest)), _half(minimum.max(axis=1, keepdims=True) / form.scales[1])
        for _ in range(_ROUNDS):
            s = np.clip(np.rint(_quotient(scale, d)), *form.scales)
            t = np.clip(np.rint(_quotient(minimum, m)), 0, form.scales[1])
            for _ in range(2):
                fit = _Fit(d, m, s, t, _codes(x, d * s, m * t, form))
                error = _square(x - fit.values()).sum(axis=1)
                better = error < least
                by_block = [better.reshape(-1, *[1] * (a.ndim - 1)) for a in fit]
                best = fit if best is None else _Fit(*map(np.where, by_block, fit, best))
                least = np.minimum(error, least)
                d, m = _best_units(x, fit, form)
            scale, minimum = _best_scales(x, fit.q, form)
    assert best is not None
    return best


def _first(x: np.ndarray, form: _Form) -> tuple[np.ndarray, np.ndarray]:
    """Scale and minimum (at least 0) for each `sub` weights, [n, 256 / sub], with the least error of all tries."""
    low = np.minimum(x.min(axis=2), 0.0) if form.minima else np.zeros(x.shape[:2], np.float32)
    peak = np.take_along_axis(x, np.abs(x).argmax(axis=2)[..., None], axis=2)[..., 0]
    span = x.max(axis=2) - low if form.minima else -peak  # -32 is a code, 32 is not
    best, least = (np.zeros_like(low), -low), _square(x - low[..., None])
    for largest in form.tries:
        q = _codes(x, span / np.float32(largest), -low, form)
        scale, minimum = _best_scales(x, q, form)
        q = _codes(x, scale, minimum, form)
        error = _square(x - scale[..., None] * q + minimum[..., None])
        better = error < least
        best = np.where(better, scale, best[0]), np.where(better, minimum, best[1])
        least = np.minimum(error, least)
    return best


def _codes(x: np.ndarray, scale: np.ndarray, minimum: np.ndarray, form: _Form) -> np.ndarray:
    per_unit = _quotient(np.float32(1.0), scale)
    return np.clip(np.rint((x + minimum[..., None]) * per_unit[..., None]), *form.codes)


def _best_scales(x: np.ndarray, q: np.ndarray, form: _Form) -> tuple[np.ndarray, np.ndarray]:
    """Scale and minimum of each `sub` weights that fit their codes best; a minimum is at least 0."""
    xq, qq = _dot(x, q), _square(q)
    alone = _quotient(xq, qq)
    if not form.minima:
        return alone, np.zeros_like(alone)
    n, sx, sq = np.float32(form.sub), _sum(x), _sum(q)
    area = n * qq - sq * sq
    scale, minimum = _quotient(n * xq - sx * sq, area), _quotient(sq * xq - qq * sx, area)
    inside = (minimum > 0) & (scale > 0)
    flat = (area == 0) & (sx < 0)  # all of one code: the minimum alone
    minimum = np.where(flat, -sx / n, np.where(inside, minimum, 0.0))
    return np.where(flat, 0.0, np.where(inside, scale, np.maximum(alone, 0.0))), minimum


def _best_units(x: np.ndarray, fit: _Fit, form: _Form) -> tuple[np.ndarray, np.ndarray]:
    """d and m of each block that fit its codes and scales best, as half floats."""
    a = fit.s[..., None] * fit.q
    xa, aa = _dot(x, a).sum(axis=1), _square(a).sum(axis=1)
    if not form.minima:
        return _half(_quotient(xa, aa)[:, None]), fit.m
    xb, ab, bb = _dot(_sum(x), fit.t), _dot(_sum(a), fit.t), form.sub * _square(fit.t)
    area = aa * bb - ab * ab
    d, m = _quotient(xa * bb - xb * ab, area), _quotient(xa * ab - xb * aa, area)
    inside = ((d > 0) & (m > 0))[:, None]
    d, m = (np.where(inside, new[:, None], old) for new, old in ((d, fit.d), (m, fit.m)))
    return _half(d), _half(m)


def _quotient(a: np.ndarray | np.float32, b: np.ndarray) -> np.ndarray:
    """a / b, and 0 if b is 0."""
    return np.divide(a, b, out=np.zeros(np.broadcast_shapes(a.shape, b.shape), np.float32), where=b != 0)


def _dot(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.einsum("...k,...k->...", a, b)


def _square(a: np.ndarray) -> np.ndarray:
    return _dot(a, a)


def _sum(a: np.ndarray) -> np.ndarray:
    """The sum over the last axis, which is short: numpy's own sum is slow there."""
    return a @ np.ones(a.shape[-1], np.float32)


def _half(x: np.ndarray) -> np.ndarray:
    return np.clip(x, -_HALF, _HALF).astype(np.float16).astype(np.float32)


def _half_bytes(*units: np.ndarray) -> np.ndarray:
    return np.concatenate([u.astype("<f2").view(np.uint8) for u in units], axis=1)


def _six_bits(s: np.ndarray, t: np.ndarray) -> np.ndarray:
    """uint8[n, 12]: the low six bits of scales and minima 0 to 3, then 4 to 7, their high bits in those before."""
    s, t = s.astype(np.uint8), t.astype(np.uint8)
    first, second = ((v[:, :4] | (v[:, 4:] >> 4) << 6) for v in (s, t))
    return np.concatenate([first, second, (s[:, 4:] & 15) | (t[:, 4:] & 15) << 4], axis=1)


def _nibbles(q: np.ndarray) -> np.ndarray:
    """uint8[n, 4, 32]: the low four bits of runs of 32, those of an odd run above those of the one before."""
    pairs = (q & 15).reshape(len(q), 4, 2, 32)
    return pairs[:, :, 0] | pairs[:, :, 1] << 4


def _q4_k(fit: _Fit) -> list[np.ndarray]:
    return [_half_bytes(fit.d, fit.m), _six_bits(fit.s, fit.t), _nibbles(fit.q.astype(np.uint8))]


def _q5_k(fit: _Fit) -> list[np.ndarray]:
    """Bit j of byte i of the second part is the fifth bit of weight i of run j."""
    q = fit.q.astype(np.uint8)
    fifth = ((q >> 4) << np.arange(8, dtype=np.uint8)[:, None]).sum(axis=1, dtype=np.uint8)
    return [_half_bytes(fit.d, fit.m), _six_bits(fit.s, fit.t), fifth, _nibbles(q)]


def _q6_k(fit: _Fit) -> list[np.ndarray]:
    """Low four bits, high two bits of four runs of 32 in one byte, scales, d."""
    q = (fit.q + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = (q[:, :, :2] & 15) | (q[:, :, 2:] & 15) << 4
    high = ((q >> 4) << np.array([0, 2, 4, 6], np.uint8)[:, None]).sum(axis=2, dtype=np.uint8)
    return [low, high, fit.s.astype(np.int8).view(np.uint8), _half_bytes(fit.d)]


_LARGEST = tuple(range(63, 48, -3))
_FORMS: Mapping[GGML, _Form] = {
    GGML.Q4_K: _Form(32, (0, 15), (0, 63), _LARGEST, True, np.linspace(12.0, 20.0, 33), _q4_k),
    GGML.Q5_K: _Form(32, (0, 31), (0, 63), _LARGEST, True, np.linspace(27.0, 35.0, 33), _q5_k),
    GGML.Q6_K: _Form(16, (-32, 31), (-128, 127), (-128,), False, np.linspace(27.0, 35.0, 17), _q6_k),
}
KINDS = tuple(_FORMS)
"""Types that `quantize` writes."""
