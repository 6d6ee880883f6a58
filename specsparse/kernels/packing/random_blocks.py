"""Random weights in any GGUF type: random codes under sane, finite scales, for types no Python code can quantise to."""

import numpy as np
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

_T = GGMLQuantizationType
_FIRST = (
    _T.Q4_0, _T.Q4_1, _T.Q5_0, _T.Q5_1, _T.Q8_0, _T.Q4_K, _T.Q5_K, _T.IQ1_S, _T.IQ2_XXS, _T.IQ2_XS, _T.IQ2_S,
    _T.IQ3_XXS, _T.IQ3_S, _T.IQ4_NL, _T.IQ4_XS,
)  # fmt: skip
_SCALE_AT = dict.fromkeys(_FIRST, 0) | {_T.Q2_K: 80, _T.Q3_K: 108, _T.Q6_K: 208, _T.TQ1_0: 52, _T.TQ2_0: 64}
"""Offset in a block of its float16 scale."""
_MIN = {_T.Q4_1: (2, -7.5), _T.Q5_1: (2, -15.5), _T.Q2_K: (82, 1.5), _T.Q4_K: (2, 7.5), _T.Q5_K: (2, 15.5)}
"""Offset of a float16 min, and the min, in units of the scale, with which a uniform code averages to zero."""
_SAMPLE = 1 << 14  # blocks that tell the deviation of the codes; large tensors need not be dequantised whole


def random_quantised(
    kind: GGMLQuantizationType | str, rows: int, cols: int, seed: int = 0, *, std: float = 1.0, edges: bool = True
) -> np.ndarray:
    """Valid bytes of a random matrix in `kind`, uint8 [rows, bytes of a row], as `TensorInfo.raw` has them.

    Args:
        kind: any type gguf can dequantise, or its name; else NotImplementedError.
        cols: a multiple of the type's block, else ValueError.
        std: about the standard deviation of the weights.
        edges: make one block in 16 all zero and one in 16 carry a subnormal scale, if the type has float16 scales.
    """
    kind = GGMLQuantizationType[kind] if isinstance(kind, str) else kind
    rng = np.random.default_rng([seed, int(kind), rows, cols])
    if kind in (_T.F32, _T.F16, _T.BF16):
        return quants.quantize(rng.normal(0, std, (rows, cols)).astype(np.float32), kind).view(np.uint8)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if cols % block:
        raise ValueError(f"{cols} columns are not a multiple of {kind.name}'s block of {block}")
    blocks = rng.integers(0, 256, (rows * (cols // block), block_bytes), dtype=np.uint8)
    if kind in _SCALE_AT:
        # Values are linear in the scales, so a unit scale tells the scale for `std`.
        least, center = _MIN.get(kind, (None, 0.0))

        def put(at: int, values: np.ndarray) -> None:
            blocks[:, at : at + 2] = values.astype("<f2").view(np.uint8).reshape(-1, 2)

        put(_SCALE_AT[kind], np.ones(len(blocks)))
        if least is not None:
            put(least, np.full(len(blocks), center))
        d = rng.uniform(0.5, 1.5, len(blocks)) * std / quants.dequantize(blocks[:_SAMPLE], kind).std()
        if least is None:  # files hold negative scales too if there is no min
            d *= rng.choice([-1.0, 1.0], len(blocks))
        if edges:
            where = rng.integers(0, 16, len(blocks))
            d[where == 0] = 0.0
            d[where == 1] = 3e-6
        put(_SCALE_AT[kind], d)
        if least is not None:
            put(least, d * center * rng.uniform(0.5, 1.5, len(blocks)))
    elif kind == _T.IQ1_M:  # its float16 scale is spread over the high four bits of the block's last four uint16
        d = rng.uniform(0.5, 1.5, len(blocks)) * std / 8.0
        tail = blocks[:, 48:].copy().view("<u2")
        bits = d.astype("<f2").view("<u2")[:, None] >> np.array([0, 4, 8, 12], np.uint16)
        blocks[:, 48:] = ((tail & 0x0FFF) | ((bits & 0xF) << 12).astype(np.uint16)).view(np.uint8)
    elif kind == _T.MXFP4:  # an exponent of two; the codes' own deviation is 5.3
        blocks[:, 0] = 128 + round(np.log2(std / 5.3)) + rng.integers(-1, 2, len(blocks))
    elif kind == _T.NVFP4:  # four unsigned e4m3 scales, halved
        exponent = 7 + round(np.log2(std / 5.3)) + rng.integers(-1, 2, (len(blocks), 4))
        blocks[:, :4] = np.clip(exponent, 1, 14) * 8 + rng.integers(0, 8, (len(blocks), 4))
    else:
        raise NotImplementedError(f"no random weights for {kind.name}")
    return blocks.reshape(rows, -1)
