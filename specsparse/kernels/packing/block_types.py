"""Decoders of the plain GGUF types: 4-bit, 5-bit, 8-bit, K-quants, ternary and FP4 blocks.

A decoder sees blocks as a structured array [rows, blocks] and yields `Parts`. Codes are handled four at a time as the
bytes of a uint32: the packed layout keeps four neighbouring columns together, and shifts and masks work on whole words.
"""

from collections.abc import Callable
from typing import NamedTuple

import gguf.quants as gq
import numpy as np
from gguf import GGMLQuantizationType as GGML

from specsparse.kernels.qtensor import Layout


class Parts(NamedTuple):
    """Decoded blocks of some rows. Axes between the first and the last are blocks of 32 columns (or supers of 256).

    Attributes:
        codes: uint32[rows, *blocks, words], 4 words of 2 x 4 nibbles or 8 words of 4 int8, see `Layout.codes`.
        d: the bits of f16[rows, blocks or supers, 1], or float32[rows, blocks, subs] for scales "f32".
        m: the bits of f16[rows, blocks or supers, 1]: m of "dm", dmin of "super_min".
        sc: int8[rows, *blocks, subs], byte scales of "super" and "super_min".
        mn: uint8[rows, *blocks, subs], byte mins of "super_min".
    """

    codes: np.ndarray
    d: np.ndarray
    m: np.ndarray | None = None
    sc: np.ndarray | None = None
    mn: np.ndarray | None = None


class BlockKind(NamedTuple):
    """How a GGUF type is packed: its layout, the fields of a block, and the decoder of an array of blocks."""

    layout: Layout
    block: np.dtype
    decode: Callable[[np.ndarray], Parts]


def bytes_of(mask: int) -> np.uint32:
    """`mask` in each byte of a word."""
    return np.uint32(mask * 0x01010101)


def shifted(words: np.ndarray, bits: int, mask: int) -> np.ndarray:
    """(byte >> bits) & mask of each byte of uint32 words."""
    return (words >> np.uint32(bits)) & bytes_of(mask)


def minus(words: np.ndarray, offset: int) -> np.ndarray:
    """Subtracts `offset` from every byte of contiguous words, in place."""
    signed = words.view(np.int8)
    np.subtract(signed, np.int8(offset), out=signed)
    return words


def as_stored(blocks: np.ndarray) -> Parts:
    """Codes are stored as the layout wants them: Q4_0, Q4_1, IQ4_NL, Q8_0."""
    names = blocks.dtype.names
    return Parts(blocks["q"], blocks["d"][..., None], blocks["m"][..., None] if "m" in names else None)


def _planes(field: np.ndarray, axis: int) -> np.ndarray:
    """A copy with `axis` first: each step then runs over one long contiguous array, not over runs of 4 or 8."""
    return np.ascontiguousarray(np.moveaxis(field, axis, 0))


def _five_bits(blocks: np.ndarray, *, offset: int) -> Parts:
    """Q5_0, Q5_1: 4 low bits as in Q4_0, and a word with the fifth bits of the 32 columns."""
    low = np.ascontiguousarray(blocks["q"])
    codes = np.unpackbits(_planes(blocks["h"], 2), axis=-1, bitorder="little").view("<u4")
    codes <<= np.uint32(4)
    codes[0] |= low & bytes_of(0x0F)
    codes[1] |= shifted(low, 4, 0x0F)
    codes = np.moveaxis(minus(codes, offset) if offset else codes, 0, 2)
    return Parts(codes, blocks["d"][..., None], blocks["m"][..., None] if "m" in blocks.dtype.names else None)


def _mxfp4(blocks: np.ndarray) -> Parts:
    return Parts(blocks["q"], _E8M0_HALF[blocks["e"]][..., None])


def _nvfp4(blocks: np.ndarray) -> Parts:
    """64 columns in 4 sub-blocks of 16, each with its scale; byte j of a sub-block holds columns j and 8 + j."""
    rows, count = blocks.shape
    nibbles = np.ascontiguousarray(blocks["q"])
    codes = np.empty((rows, count, 4, 2, 8), np.uint8)
    for half in range(2):
        codes[..., half, :] = _E2M1.take((nibbles >> np.uint8(4 * half)) & np.uint8(0x0F))
    scales = _UE4M3_HALF[blocks["e"]]
    return Parts(codes.reshape(rows, count * 2, 32).view("<u4"), scales.reshape(rows, count * 2, 2))


def _iq4_xs(blocks: np.ndarray) -> Parts:
    low = np.stack([blocks["sl"] & np.uint8(0x0F), blocks["sl"] >> np.uint8(4)], axis=-1).reshape(*blocks.shape, 8)
    high = (blocks["sh"][..., None] >> np.arange(0, 16, 2, dtype=np.uint16)).astype(np.uint8) & np.uint8(3)
    scales = (low | (high << np.uint8(4))).view(np.int8) - np.int8(32)
    return Parts(blocks["q"], blocks["d"][..., None], sc=scales[..., None])


def _six_bit_scales(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """uint8[.., 12] of Q4_K and Q5_K -> scales int8[.., 8] and mins uint8[.., 8]."""
    low, mins, high = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    six, four, two = np.uint8(0x3F), np.uint8(0x0F), np.uint8(0x30)
    sc = np.concatenate([low & six, (high & four) | ((low >> np.uint8(2)) & two)], axis=-1)
    mn = np.concatenate([mins & six, (high >> np.uint8(4)) | ((mins >> np.uint8(2)) & two)], axis=-1)
    return sc.view(np.int8), mn


def _q4_k(blocks: np.ndarray) -> Parts:
    """Byte j of a run of 32 holds columns j and 32 + j; the layout pairs j and 16 + j of one block of 32."""
    first, second = _planes(blocks["q"], 3)
    low, high = bytes_of(0x0F), bytes_of(0xF0)
    four = np.uint32(4)
    codes = np.empty((2, *first.shape), np.uint32)
    np.bitwise_or(first & low, (second & low) << four, out=codes[0])
    np.bitwise_or((first & high) >> four, second & high, out=codes[1])
    return _with_mins(blocks, np.moveaxis(codes, 0, 3))


def _q5_k(blocks: np.ndarray) -> Parts:
    """Nibbles as in Q4_K; bit i of byte j of `h` is the fifth bit of column j of block i."""
    nibbles, fifth = _planes(blocks["q"], 2), np.ascontiguousarray(blocks["h"])
    codes = np.empty((8, *fifth.shape), np.uint32)
    for i in range(8):
        low = shifted(nibbles[i // 2], 4 * (i % 2), 0x0F)
        np.bitwise_or(low, shifted(fifth, i, 1) << np.uint32(4), out=codes[i])
    return _with_mins(blocks, np.moveaxis(codes, 0, 2))


def _with_mins(blocks: np.ndarray, codes: np.ndarray) -> Parts:
    sc, mn = _six_bit_scales(blocks["s"])
    sc, mn = (a.reshape(*codes.shape[:-1], 1) for a in (sc, mn))
    return Parts(codes, blocks["d"][..., None], blocks["m"][..., None], sc, mn)


def _two_bits(quads: np.ndarray) -> np.ndarray:
    """Planes [half, quarter, rows, supers, 8] of 2-bit codes; byte j of a half holds columns j, 32+j, 64+j, 96+j."""
    quads = _planes(quads, 2)
    codes = np.empty((2, 4, *quads.shape[1:]), np.uint32)
    for i in range(4):
        np.bitwise_and(quads >> np.uint32(2 * i), bytes_of(3), out=codes[:, i])
    return codes


def _quarters(codes: np.ndarray) -> np.ndarray:
    """Planes [half, quarter, rows, supers, 8] as codes [rows, supers, half, quarter, 8]."""
    return codes.transpose(2, 3, 0, 1, 4)


def _q2_k(blocks: np.ndarray) -> Parts:
    codes = _quarters(_two_bits(blocks["q"]))
    sc, mn = blocks["s"] & np.uint8(0x0F), blocks["s"] >> np.uint8(4)
    sc, mn = (a.reshape(*codes.shape[:-1], 2) for a in (sc.view(np.int8), mn))
    return Parts(codes, blocks["d"][..., None], blocks["m"][..., None], sc, mn)


def _q3_k(blocks: np.ndarray) -> Parts:
    """Two bits as in Q2_K; bit i of byte j of `h` says that column j of block i is not lowered by 4."""
    codes, third = _two_bits(blocks["q"]), np.ascontiguousarray(blocks["h"])
    for i in range(8):
        codes[i // 4, i % 4] |= shifted(third, i, 1) << np.uint32(2)
    low, high = blocks["s"][..., :8], blocks["s"][..., 8:]
    scales = np.concatenate([low & np.uint8(0x0F), low >> np.uint8(4)], axis=-1)
    scales |= np.concatenate([((high >> np.uint8(2 * i)) & np.uint8(3)) << np.uint8(4) for i in range(4)], axis=-1)
    scales = scales.view(np.int8) - np.int8(32)
    codes = _quarters(minus(codes, 4))
    return Parts(codes, blocks["d"][..., None], sc=scales.reshape(*codes.shape[:-1], 2))


def _q6_k(blocks: np.ndarray) -> Parts:
    """Byte j of a half of `q` holds columns j and 64+j, byte j of `h` two more bits of j, 32+j, 64+j and 96+j."""
    nibbles, pairs = _planes(blocks["q"], 3), np.ascontiguousarray(blocks["h"])
    codes = np.empty((4, *pairs.shape), np.uint32)
    for i in range(4):
        low = shifted(nibbles[i % 2], 4 * (i // 2), 0x0F)
        np.bitwise_or(low, shifted(pairs, 2 * i, 3) << np.uint32(4), out=codes[i])
    codes = np.moveaxis(minus(codes, 32), 0, 3)
    return Parts(codes, blocks["d"][..., None], sc=blocks["s"].reshape(*codes.shape[:-1], 2))


def _tq1_0(blocks: np.ndarray) -> Parts:
    """Five (in the last four bytes, four) base-3 digits in a byte, read from the top by multiplying."""
    powers = np.array([1, 3, 9, 27, 81], np.uint8)[:, None]
    digits = [
        (blocks[name][..., None, :] * powers[:count]).reshape(*blocks.shape, -1)
        for name, count in (("q0", 5), ("q1", 5), ("q2", 4))
    ]
    codes = (np.concatenate(digits, axis=-1).astype(np.uint16) * np.uint16(3)) >> np.uint16(8)
    return _one_scale(blocks, minus(codes.astype(np.uint8).view("<u4"), 1).reshape(*blocks.shape, 8, 8))


def _tq2_0(blocks: np.ndarray) -> Parts:
    return _one_scale(blocks, _quarters(minus(_two_bits(blocks["q"]), 1)))


def _one_scale(blocks: np.ndarray, codes: np.ndarray) -> Parts:
    """The one scale of a super-block, written to each of its 8 blocks."""
    return Parts(codes, np.broadcast_to(blocks["d"][..., None, None], (*blocks.shape, 8, 1)))


_E8M0_HALF = np.array([0x00200000, 0x00400000, *(e << 23 for e in range(1, 255))], np.uint32).view(np.float32)
"""Half of 2^(e - 127), the scale of MXFP4 for doubled E2M1 values."""
_E2M1_VALUES = tuple(int(v) for v in gq.MXFP4.kvalues)
_E2M1 = np.array(_E2M1_VALUES, np.int8).view(np.uint8)
_UE4M3_HALF = gq.NVFP4.ue4m3_to_fp32(np.arange(256, dtype=np.uint8)).astype(np.float32)
_IQ4_VALUES = tuple(int(v) for v in gq.IQ4_NL.kvalues)


def _kind(layout: Layout, fields: str, decode: Callable[[np.ndarray], Parts]) -> BlockKind:
    """`fields` is "name:type[xshape]" in file order, for instance "d:<u2 q:<u4x4" or "q:<u4x2,8"."""
    block = []
    for field in fields.split():
        name, _, rest = field.partition(":")
        item, _, dims = rest.partition("x")
        block.append((name, item, tuple(int(n) for n in dims.split(",")) if dims else ()))
    return BlockKind(layout, np.dtype(block), decode)


def kind_table(*rows: tuple[GGML, dict, str, Callable[[np.ndarray], Parts]]) -> dict[GGML, BlockKind]:
    """Rows of (type, layout arguments, fields of a block, decoder) as a table by type."""
    return {t: _kind(Layout(**spec, source=t.name), fields, decode) for t, spec, fields, decode in rows}


_NIBBLE = {"codes": "nibble", "scales": "d"}
_INT8 = {"codes": "int8", "scales": "d"}
_LUT = {"codes": "nibble", "lut": _IQ4_VALUES}

PLAIN_KINDS: dict[GGML, BlockKind] = kind_table(
    (GGML.Q4_0, {**_NIBBLE, "zero": 8}, "d:<u2 q:<u4x4", as_stored),
    (GGML.Q4_1, {"codes": "nibble", "scales": "dm"}, "d:<u2 m:<u2 q:<u4x4", as_stored),
    (GGML.Q5_0, _INT8, "d:<u2 h:u1x2,2 q:<u4x4", lambda b: _five_bits(b, offset=16)),
    (GGML.Q5_1, {"codes": "int8", "scales": "dm"}, "d:<u2 m:<u2 h:u1x2,2 q:<u4x4", lambda b: _five_bits(b, offset=0)),
    (GGML.Q8_0, _INT8, "d:<u2 q:<u4x8", as_stored),
    (GGML.Q2_K, {"codes": "int8", "scales": "super_min", "sub": 16}, "s:u1x16 q:<u4x2,8 d:<u2 m:<u2", _q2_k),
    (GGML.Q3_K, {"codes": "int8", "scales": "super", "sub": 16}, "h:<u4x8 q:<u4x2,8 s:u1x12 d:<u2", _q3_k),
    (GGML.Q4_K, {"codes": "nibble", "scales": "super_min"}, "d:<u2 m:<u2 s:u1x12 q:<u4x4,2,4", _q4_k),
    (GGML.Q5_K, {"codes": "int8", "scales": "super_min"}, "d:<u2 m:<u2 s:u1x12 h:<u4x8 q:<u4x4,8", _q5_k),
    (GGML.Q6_K, {"codes": "int8", "scales": "super", "sub": 16}, "q:<u4x2,2,8 h:<u4x2,8 s:i1x16 d:<u2", _q6_k),
    (GGML.IQ4_NL, {**_LUT, "scales": "d"}, "d:<u2 q:<u4x4", as_stored),
    (GGML.IQ4_XS, {**_LUT, "scales": "super"}, "d:<u2 sh:<u2 sl:u1x4 q:<u4x8,4", _iq4_xs),
    (GGML.MXFP4, {"codes": "nibble", "scales": "f32", "lut": _E2M1_VALUES}, "e:u1 q:<u4x4", _mxfp4),
    (GGML.NVFP4, {"codes": "int8", "scales": "f32", "sub": 16}, "e:u1x4 q:u1x4,8", _nvfp4),
    (GGML.TQ1_0, _INT8, "q0:u1x32 q1:u1x16 q2:u1x4 d:<u2", _tq1_0),
    (GGML.TQ2_0, _INT8, "q:<u4x2,8 d:<u2", _tq2_0),
)
