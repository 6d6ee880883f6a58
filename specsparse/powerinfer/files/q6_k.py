"""Q6_K codes: what PowerInfer's own quantiser gives the output matrix of a Q4_0 file.

A block of 256 weights is x = d s_j (q - 32): d a half float, s_j a signed byte for each 16 weights, q of six bits.
"""

import numpy as np

BLOCK, SUB = 256, 16
BYTES = 210
"""Of a block: 128 of low four bits, 64 of high two bits, 16 scales, d."""

_STEPS = np.linspace(29.0, 33.0, 9, dtype=np.float32)
_ROWS = 4096


def quantize_q6_k(values: np.ndarray) -> np.ndarray:
    """uint8[..., n / 256 * 210] from float32[..., n], n a multiple of 256; a NaN becomes 0.

    The step of 16 weights is the one of `_STEPS` to their largest magnitude that leaves the least squared error, with
    the best factor for its codes.
    """
    blocks = np.nan_to_num(np.asarray(values, np.float32), copy=False).reshape(-1, BLOCK)
    packed = [_pack(blocks[i : i + _ROWS]) for i in range(0, len(blocks), _ROWS)]
    return np.concatenate(packed).reshape(*values.shape[:-1], values.shape[-1] // BLOCK * BYTES)


def _pack(blocks: np.ndarray) -> np.ndarray:
    """uint8[n, 210] of float32[n, 256]."""
    x = blocks.reshape(-1, BLOCK // SUB, SUB)
    step = _steps(x)
    largest = np.take_along_axis(step, np.abs(step).argmax(axis=1)[:, None], axis=1)
    d = (largest / np.float32(-128)).astype(np.float16)  # -128 is the largest byte, and it is exact
    unit = d.astype(np.float32)
    scale = np.clip(np.rint(_quotient(step, unit)), -128, 127).astype(np.int8)
    q = _codes(x, (unit * scale)[..., None]).reshape(-1, 2, 4, 32)
    q = (q + 32).astype(np.uint8)
    low, high = q & 15, q >> 4
    ql = np.concatenate([low[:, :, 0:2] | low[:, :, 2:4] << 4], axis=2).reshape(len(x), 128)
    qh = (high << np.array([0, 2, 4, 6], np.uint8)[:, None]).sum(axis=2, dtype=np.uint8).reshape(len(x), 64)
    return np.concatenate([ql, qh, scale.view(np.uint8), d.view(np.uint8)], axis=1)


def _steps(x: np.ndarray) -> np.ndarray:
    """float32[n, 16]: the step of each 16 weights; negative where the largest weight is positive, to use code -32."""
    peak = np.take_along_axis(x, np.abs(x).argmax(axis=2)[..., None], axis=2)
    best = np.zeros(x.shape[:2], np.float32)
    won = np.full(x.shape[:2], -1.0, np.float32)
    for steps in _STEPS:
        q = _codes(x, -peak / steps)
        along, square = (x * q).sum(axis=2), (q * q).sum(axis=2)
        gain = _quotient(along * along, square)
        best = np.where(gain > won, _quotient(along, square), best)
        won = np.maximum(gain, won)
    return best


def _codes(x: np.ndarray, step: np.ndarray) -> np.ndarray:
    """float32: x in steps, whole numbers in -32..31."""
    return np.clip(np.rint(_quotient(x, step)), -32, 31)


def _quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a / b, 0 where b is 0."""
    return np.divide(a, b, out=np.zeros(np.broadcast_shapes(a.shape, b.shape), np.float32), where=b != 0)
