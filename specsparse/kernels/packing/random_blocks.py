"""Random weights in any GGUF type: random codes under sane, finite scales, for types no Python code can quantise to."""

from dataclasses import dataclass

import numpy as np
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType


@dataclass(frozen=True)
class _Scales:
    """Where a block keeps its float16 scale (and min), by byte.

    Attributes:
        d: offset of the scale.
        m: offset of the min, or None.
        center: the min that makes a uniform code average to zero, in units of the scale: negative where the
            min is added.
    """

    d: int
    m: int | None = None
    center: float = 0.0


_T = GGMLQuantizationType
_SCALES = {
    _T.Q4_0: _Scales(0),
    _T.Q4_1: _Scales(0, 2, -7.5),
    _T.Q5_0: _Scales(0),
    _T.Q5_1: _Scales(0, 2, -15.5),
    _T.Q8_0: _Scales(0),
    _T.Q2_K: _Scales(80, 82, 1.5),
    _T.Q3_K: _Scales(108),
    _T.Q4_K: _Scales(0, 2, 7.5),
    _T.Q5_K: _Scales(0, 2, 15.5),
    _T.Q6_K: _Scales(208),
    _T.IQ1_S: _Scales(0),
    _T.IQ2_XXS: _Scales(0),
    _T.IQ2_XS: _Scales(0),
    _T.IQ2_S: _Scales(0),
    _T.IQ3_XXS: _Scales(0),
    _T.IQ3_S: _Scales(0),
    _T.IQ4_NL: _Scales(0),
    _T.IQ4_XS: _Scales(0),
    _T.TQ1_0: _Scales(52),
    _T.TQ2_0: _Scales(64),
}


_SAMPLE = 1 << 14
"""Blocks that tell the deviation of the codes; large tensors need not be dequantised whole."""


def random_quantised(
    kind: GGMLQuantizationType | str, rows: int, cols: int, seed: int = 0, *, std: float = 1.0, edges: bool = True
) -> np.ndarray:
    """Valid bytes of a random matrix in `kind`, uint8 [rows, bytes of a row], as `TensorInfo.raw` has them.

    Args:
        kind: any type gguf can dequantise, or its name.
        rows: of the matrix.
        cols: of the matrix, a multiple of the type's block.
        seed: of the random numbers.
        std: about the standard deviation of the weights.
        edges: make one block in 16 all zero and one in 16 carry a subnormal scale, where the type has float16 scales.

    Raises:
        ValueError: cols is no multiple of the block.
        NotImplementedError: gguf cannot dequantise the type.
    """
    kind = GGMLQuantizationType[kind] if isinstance(kind, str) else kind
    rng = np.random.default_rng([seed, int(kind), rows, cols])
    if kind in (_T.F32, _T.F16, _T.BF16):
        return quants.quantize(rng.normal(0, std, (rows, cols)).astype(np.float32), kind).view(np.uint8)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if cols % block:
        raise ValueError(f"{cols} columns are not a multiple of {kind.name}'s block of {block}")
    blocks = rng.integers(0, 256, (rows * (cols // block), block_bytes), dtype=np.uint8)
    if kind in _SCALES:
        _set_float16(blocks, _SCALES[kind], rng, kind, std, edges)
    elif kind == _T.IQ1_M:
        _set_iq1_m(blocks, _vary(rng, len(blocks)) * std / 8.0)
    elif kind == _T.MXFP4:  # an exponent of two; the codes' own deviation is 5.3
        blocks[:, 0] = 128 + round(np.log2(std / 5.3)) + rng.integers(-1, 2, len(blocks))
    elif kind == _T.NVFP4:  # four unsigned e4m3 scales, halved
        exponent = 7 + round(np.log2(std / 5.3)) + rng.integers(-1, 2, (len(blocks), 4))
        blocks[:, :4] = np.clip(exponent, 1, 14) * 8 + rng.integers(0, 8, (len(blocks), 4))
    else:
        raise NotImplementedError(f"no random weights for {kind.name}")
    return blocks.reshape(rows, -1)


def _vary(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.uniform(0.5, 1.5, n)


def _put_float16(blocks: np.ndarray, at: int, values: np.ndarray) -> None:
    blocks[:, at : at + 2] = values.astype("<f2").view(np.uint8).reshape(-1, 2)


def _set_float16(
    blocks: np.ndarray, scales: _Scales, rng: np.random.Generator, kind: GGMLQuantizationType, std: float, edges: bool
) -> None:
    """Writes the scales. Values are linear in them, so a unit scale tells what scale gives `std`."""
    _put_float16(blocks, scales.d, np.ones(len(blocks)))
    if scales.m is not None:
        _put_float16(blocks, scales.m, np.full(len(blocks), scales.center))
    d = _vary(rng, len(blocks)) * std / quants.dequantize(blocks[:_SAMPLE], kind).std()
    if scales.m is None:  # files hold negative scales too where there is no min
        d *= rng.choice([-1.0, 1.0], len(blocks))
    if edges:
        where = rng.integers(0, 16, len(blocks))
        d[where == 0] = 0.0
        d[where == 1] = 3e-6
    _put_float16(blocks, scales.d, d)
    if scales.m is not None:
        _put_float16(blocks, scales.m, d * scales.center * _vary(rng, len(blocks)))


def _set_iq1_m(blocks: np.ndarray, d: np.ndarray) -> None:
    """IQ1_M spreads its float16 scale over the high four bits of the block's last four uint16."""
    tail = blocks[:, 48:].copy().view("<u2")
    bits = d.astype("<f2").view("<u2")[:, None] >> np.array([0, 4, 8, 12], np.uint16)
    blocks[:, 48:] = ((tail & 0x0FFF) | ((bits & 0xF) << 12).astype(np.uint16)).view(np.uint8)
