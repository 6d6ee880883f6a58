"""Decoders of GGUF's block types: 4-bit, 5-bit, 8-bit, K-quants, ternary, FP4, and those with a codebook (IQ1 to IQ3).

A decoder takes blocks as a structured array [rows, blocks] and returns `Fields`. Codes are handled four at a time as
the bytes of a uint32: the packed layout keeps four neighbouring columns together, and shifts and masks work on whole
words. An entry of a codebook is 8 (or 4) small numbers, held as the bytes of one word, so that one `take` fetches all
of them. Codebook types become int8 codes with float32 scales. These scales are d * integer * power of two, and codes
have at most 6 bits, hence every product is exact in float32.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import gguf.quants as gq
import numpy as np
from gguf import GGMLQuantizationType as GGML

from specsparse.kernels.qtensor import Fields, Layout


class BlockKind(NamedTuple):
    """A GGUF type: its packed layout, the fields of a block, and the decoder of an array of blocks."""

    layout: Layout
    block: np.dtype
    decode: Callable[[np.ndarray], Fields]


def _each(mask: int) -> np.uint32:
    """The mask in each byte of a word."""
    return np.uint32(mask * 0x01010101)


def _shifted(words: np.ndarray, bits: int, mask: int) -> np.ndarray:
    """(byte >> bits) & mask of each byte of uint32 words."""
    return (words >> np.uint32(bits)) & _each(mask)


def _minus(words: np.ndarray, offset: int) -> np.ndarray:
    """Subtracts `offset` from every byte of contiguous words, in place."""
    signed = words.view(np.int8)
    np.subtract(signed, np.int8(offset), out=signed)
    return words


def as_stored(blocks: np.ndarray) -> Fields:
    """Q4_0, Q4_1, IQ4_NL, Q8_0: codes in the file are those of the layout."""
    return Fields(blocks["q"], *_scales(blocks))


def _scales(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """d, and m of the types that have one."""
    has_min = "m" in (blocks.dtype.names or ())
    return blocks["d"][..., None], blocks["m"][..., None] if has_min else None


def _planes(field: np.ndarray, axis: int) -> np.ndarray:
    """A copy with `axis` first: each step then runs over one long contiguous array, not over runs of 4 or 8."""
    return np.ascontiguousarray(np.moveaxis(field, axis, 0))


def _five_bits(blocks: np.ndarray, *, offset: int) -> Fields:
    """Q5_0, Q5_1: 4 low bits as in Q4_0, and a word with the fifth bits of the 32 columns."""
    low = np.ascontiguousarray(blocks["q"])
    codes = np.unpackbits(_planes(blocks["h"], 2), axis=-1, bitorder="little").view("<u4")
    codes <<= np.uint32(4)
    codes[0] |= low & _each(0x0F)
    codes[1] |= _shifted(low, 4, 0x0F)
    codes = np.moveaxis(_minus(codes, offset) if offset else codes, 0, 2)
    return Fields(codes, *_scales(blocks))


def _nvfp4(blocks: np.ndarray) -> Fields:
    """64 columns in 4 sub-blocks of 16, each with its scale; byte j of a sub-block holds columns j and 8 + j."""
    rows, count = blocks.shape
    nibbles = np.ascontiguousarray(blocks["q"])
    codes = np.empty((rows, count, 4, 2, 8), np.uint8)
    for half in range(2):
        codes[..., half, :] = _E2M1.take((nibbles >> np.uint8(4 * half)) & np.uint8(0x0F))
    scales = _UE4M3_HALF[blocks["e"]]
    return Fields(codes.reshape(rows, count * 2, 32).view("<u4"), scales.reshape(rows, count * 2, 2))


def _iq4_xs(blocks: np.ndarray) -> Fields:
    low = np.stack([blocks["sl"] & np.uint8(0x0F), blocks["sl"] >> np.uint8(4)], axis=-1).reshape(*blocks.shape, 8)
    high = (blocks["sh"][..., None] >> np.arange(0, 16, 2, dtype=np.uint16)).astype(np.uint8) & np.uint8(3)
    scales = (low | (high << np.uint8(4))).view(np.int8) - np.int8(32)
    return Fields(blocks["q"], blocks["d"][..., None], sc=scales[..., None])


def _with_mins(blocks: np.ndarray, codes: np.ndarray) -> Fields:
    """Q4_K, Q5_K: scales and mins of six bits in the 12 bytes of `s`."""
    low, mins, high = blocks["s"][..., :4], blocks["s"][..., 4:8], blocks["s"][..., 8:]
    six, four, two = np.uint8(0x3F), np.uint8(0x0F), np.uint8(0x30)
    sc = np.concatenate([low & six, (high & four) | ((low >> np.uint8(2)) & two)], axis=-1).view(np.int8)
    mn = np.concatenate([mins & six, (high >> np.uint8(4)) | ((mins >> np.uint8(2)) & two)], axis=-1)
    sc, mn = (a.reshape(*codes.shape[:-1], 1) for a in (sc, mn))
    return Fields(codes, blocks["d"][..., None], blocks["m"][..., None], sc, mn)


def _q4_k(blocks: np.ndarray) -> Fields:
    """Byte j of a run of 32 holds columns j and 32 + j; the layout pairs j and 16 + j of one block of 32."""
    first, second = _planes(blocks["q"], 3)
    low, high = _each(0x0F), _each(0xF0)
    four = np.uint32(4)
    codes = np.empty((2, *first.shape), np.uint32)
    np.bitwise_or(first & low, (second & low) << four, out=codes[0])
    np.bitwise_or((first & high) >> four, second & high, out=codes[1])
    return _with_mins(blocks, np.moveaxis(codes, 0, 3))


def _q5_k(blocks: np.ndarray) -> Fields:
    """Nibbles as in Q4_K; bit i of byte j of `h` is the fifth bit of column j of block i."""
    nibbles, fifth = _planes(blocks["q"], 2), np.ascontiguousarray(blocks["h"])
    codes = np.empty((8, *fifth.shape), np.uint32)
    for i in range(8):
        low = _shifted(nibbles[i // 2], 4 * (i % 2), 0x0F)
        np.bitwise_or(low, _shifted(fifth, i, 1) << np.uint32(4), out=codes[i])
    return _with_mins(blocks, np.moveaxis(codes, 0, 2))


def _two_bits(quads: np.ndarray) -> np.ndarray:
    """Planes [half, quarter, rows, supers, 8] of 2-bit codes; byte j of a half holds columns j, 32+j, 64+j, 96+j."""
    quads = _planes(quads, 2)
    codes = np.empty((2, 4, *quads.shape[1:]), np.uint32)
    for i in range(4):
        np.bitwise_and(quads >> np.uint32(2 * i), _each(3), out=codes[:, i])
    return codes


def _quarters(codes: np.ndarray) -> np.ndarray:
    """Planes [half, quarter, rows, supers, 8] as codes [rows, supers, half, quarter, 8]."""
    return codes.transpose(2, 3, 0, 1, 4)


def _q2_k(blocks: np.ndarray) -> Fields:
    codes = _quarters(_two_bits(blocks["q"]))
    sc, mn = blocks["s"] & np.uint8(0x0F), blocks["s"] >> np.uint8(4)
    sc, mn = (a.reshape(*codes.shape[:-1], 2) for a in (sc.view(np.int8), mn))
    return Fields(codes, blocks["d"][..., None], blocks["m"][..., None], sc, mn)


def _q3_k(blocks: np.ndarray) -> Fields:
    """Two bits as in Q2_K; bit i of byte j of `h` says that column j of block i is not lowered by 4."""
    codes, third = _two_bits(blocks["q"]), np.ascontiguousarray(blocks["h"])
    for i in range(8):
        codes[i // 4, i % 4] |= _shifted(third, i, 1) << np.uint32(2)
    low, high = blocks["s"][..., :8], blocks["s"][..., 8:]
    scales = np.concatenate([low & np.uint8(0x0F), low >> np.uint8(4)], axis=-1)
    scales |= np.concatenate([((high >> np.uint8(2 * i)) & np.uint8(3)) << np.uint8(4) for i in range(4)], axis=-1)
    scales = scales.view(np.int8) - np.int8(32)
    codes = _quarters(_minus(codes, 4))
    return Fields(codes, blocks["d"][..., None], sc=scales.reshape(*codes.shape[:-1], 2))


def _q6_k(blocks: np.ndarray) -> Fields:
    """Byte j of a half of `q` holds columns j and 64+j, byte j of `h` two more bits of j, 32+j, 64+j and 96+j."""
    nibbles, pairs = _planes(blocks["q"], 3), np.ascontiguousarray(blocks["h"])
    codes = np.empty((4, *pairs.shape), np.uint32)
    for i in range(4):
        low = _shifted(nibbles[i % 2], 4 * (i // 2), 0x0F)
        np.bitwise_or(low, _shifted(pairs, 2 * i, 3) << np.uint32(4), out=codes[i])
    codes = np.moveaxis(_minus(codes, 32), 0, 3)
    return Fields(codes, blocks["d"][..., None], sc=blocks["s"].reshape(*codes.shape[:-1], 2))


def _tq1_0(blocks: np.ndarray) -> Fields:
    """Five (in the last four bytes, four) base-3 digits in a byte, read from the top by multiplying."""
    powers = np.array([1, 3, 9, 27, 81], np.uint8)[:, None]
    digits = [
        (blocks[name][..., None, :] * powers[:count]).reshape(*blocks.shape, -1)
        for name, count in (("q0", 5), ("q1", 5), ("q2", 4))
    ]
    codes = (np.concatenate(digits, axis=-1).astype(np.uint16) * np.uint16(3)) >> np.uint16(8)
    return _one_scale(blocks, _minus(codes.astype(np.uint8).view("<u4"), 1).reshape(*blocks.shape, 8, 8))


def _one_scale(blocks: np.ndarray, codes: np.ndarray) -> Fields:
    """The one scale of a super-block, written to each of its 8 blocks."""
    return Fields(codes, np.broadcast_to(blocks["d"][..., None, None], (*blocks.shape, 8, 1)))


_E8M0_HALF = np.array([0x00200000, 0x00400000, *(e << 23 for e in range(1, 255))], np.uint32).view(np.float32)
"""Half of 2^(e - 127), the scale of MXFP4 for doubled E2M1 values."""
_E2M1_VALUES = tuple(int(v) for v in gq.MXFP4.kvalues)
_E2M1 = np.array(_E2M1_VALUES, np.int8).view(np.uint8)
_UE4M3_HALF = gq.NVFP4.ue4m3_to_fp32(np.arange(256, dtype=np.uint8)).astype(np.float32)
_IQ4_VALUES = tuple(int(v) for v in gq.IQ4_NL.kvalues)


@functools.cache
def _grid(source: type, factor: int = 1) -> np.ndarray:
    """A codebook of gguf times `factor`, its int8 entries as words: uint64[entries], or uint32 for entries of 4."""
    source.init_grid()
    entries = (source.grid.reshape(source.grid_shape) * np.float32(factor)).astype(np.int8)
    return entries.view(np.uint64 if entries.shape[1] == 8 else np.uint32)[:, 0]


@functools.cache
def _iq1_grid() -> np.ndarray:
    """Eight times the ternary codebook plus and minus its shift of 1/8: words [2, 2048]."""
    entries = _grid(gq.IQ1_S, 8).view(np.int8)
    return np.stack([entries + np.int8(1), entries - np.int8(1)]).view(np.uint64)


_SIGN_MASKS = (np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") * np.uint8(255)).view(
    "<u8"
)[:, 0]
"""A byte of sign bits as a word with 255 for each bit that is set."""
_SEVEN_MASKS = _SIGN_MASKS[np.frombuffer(gq.IQ2_XXS.ksigns, np.uint8)]
"""The same for 7 bits, the eighth sign chosen for even parity."""


def _signed(values: np.ndarray, masks: np.ndarray) -> np.ndarray:
    """Negates the bytes of `values` whose mask byte is 255 (as ~x + 1); both contiguous, same bytes."""
    mask = masks.view(np.int8)
    out = values.view(np.int8).reshape(mask.shape) ^ mask
    np.subtract(out, mask, out=out)
    return out


def _codebook_fields(codes: np.ndarray, d: np.ndarray, sub: np.ndarray, factor: float) -> Fields:
    """Fields of 8-bit codes [rows, ..], columns in order, and exact scales d * (2 * sub + 1) * factor.

    `d` are bits of float16[rows, supers], `sub` is uint[rows, supers, n], `factor` a power of two.
    """
    with np.errstate(all="ignore"):
        scales = sub.astype(np.float32) * np.float32(2) + np.float32(1)
        scales = d.view(np.float16).astype(np.float32)[..., None] * scales * np.float32(factor)
    rows, supers, count = scales.shape
    codes = codes.view(np.uint8).reshape(rows, supers * 8, 32).view("<u4")
    return Fields(codes, scales.reshape(rows, supers * 8, count // 8))


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """uint8[.., n] -> uint8[.., 2 n], low half of each byte first."""
    return np.stack([packed & np.uint8(0x0F), packed >> np.uint8(4)], axis=-1).reshape(*packed.shape[:-1], -1)


def _fields(words: np.ndarray, count: int, width: int, item: type = np.uint16) -> np.ndarray:
    """`count` fields of `width` bits from the bottom of each word: [.., n] -> item[.., n, count]."""
    shifts = np.arange(count, dtype=words.dtype) * words.dtype.type(width)
    return ((words[..., None] >> shifts) & words.dtype.type((1 << width) - 1)).astype(item)


def _iq2_xxs(blocks: np.ndarray) -> Fields:
    words = blocks["q"][..., 1]
    grid = _grid(gq.IQ2_XXS).take(np.ascontiguousarray(blocks["q"][..., 0]).view(np.uint8))
    codes = _signed(grid, _SEVEN_MASKS.take(_fields(words, 4, 7, np.uint8)))
    return _codebook_fields(codes, blocks["d"], words >> np.uint32(28), 0.125)


def _iq2_xs(blocks: np.ndarray) -> Fields:
    grid = _grid(gq.IQ2_XS).take(blocks["q"] & np.uint16(511))
    codes = _signed(grid, _SEVEN_MASKS.take(blocks["q"] >> np.uint16(9)))
    return _codebook_fields(codes, blocks["d"], _nibbles(blocks["s"]), 0.125)


def _byte_indices(grid: type, width: int, factor: float) -> Callable[[np.ndarray], Fields]:
    """IQ2_S and IQ3_S: indices of a byte each, `width` more bits of each in `h`, a byte of signs for 8 columns."""

    def decode(blocks: np.ndarray) -> Fields:
        high = _fields(blocks["h"], 8 // width, width).reshape(blocks["q"].shape)
        entries = _grid(grid).take(blocks["q"] | (high << np.uint16(8)))
        codes = _signed(entries, _SIGN_MASKS.take(blocks["g"]))
        return _codebook_fields(codes, blocks["d"], _nibbles(blocks["s"]), factor)

    return decode


def _iq3_xxs(blocks: np.ndarray) -> Fields:
    grid = _grid(gq.IQ3_XXS).take(blocks["q"])
    codes = _signed(grid, _SEVEN_MASKS.take(_fields(blocks["s"], 4, 7, np.uint8)).reshape(*blocks.shape, 32))
    return _codebook_fields(codes, blocks["d"], blocks["s"] >> np.uint32(28), 0.25)


def _iq1_s(blocks: np.ndarray) -> Fields:
    """A word per 32 columns: three high index bits for each of 4 entries, three bits of scale, sign of the shift."""
    words = blocks["h"]
    index = blocks["q"] | (_fields(words, 4, 3) << np.uint16(8)).reshape(*blocks.shape, 32)
    sign = np.repeat(words >> np.uint16(15), 4, axis=-1)
    codes = _iq1_grid().take(index + (sign << np.uint16(11)))
    return _codebook_fields(codes, blocks["d"], (words >> np.uint16(12)) & np.uint16(7), 0.125)


def _iq1_m(blocks: np.ndarray) -> Fields:
    """Four bits an entry: three high index bits, sign of the shift. The top four bits of four words make up d."""
    words = blocks["s"]
    high = _nibbles(blocks["h"]).astype(np.uint16)
    index = blocks["q"] | (high << np.uint16(8))
    d = np.bitwise_or.reduce((words >> np.uint16(12)) << np.arange(0, 16, 4, dtype=np.uint16), axis=-1)
    sub = _fields(words, 4, 3).reshape(*blocks.shape, 16)
    return _codebook_fields(_iq1_grid().take(index), d, sub, 0.125)


_NIBBLE = {"codes": "nibble", "scales": "d"}
_INT8 = {"codes": "int8", "scales": "d"}
_LUT = {"codes": "nibble", "lut": _IQ4_VALUES}
_CODEBOOK = {"codes": "int8", "scales": "f32"}

_TABLE: tuple[tuple[GGML, dict, str, Callable[[np.ndarray], Fields]], ...] = (
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
    (
        GGML.MXFP4,
        {"codes": "nibble", "scales": "f32", "lut": _E2M1_VALUES},
        "e:u1 q:<u4x4",
        lambda b: Fields(b["q"], _E8M0_HALF[b["e"]][..., None]),
    ),
    (GGML.NVFP4, {"codes": "int8", "scales": "f32", "sub": 16}, "e:u1x4 q:u1x4,8", _nvfp4),
    (GGML.TQ1_0, _INT8, "q0:u1x32 q1:u1x16 q2:u1x4 d:<u2", _tq1_0),
    (GGML.TQ2_0, _INT8, "q:<u4x2,8 d:<u2", lambda b: _one_scale(b, _quarters(_minus(_two_bits(b["q"]), 1)))),
    (GGML.IQ2_XXS, _CODEBOOK, "d:<u2 q:<u4x8,2", _iq2_xxs),
    (GGML.IQ2_XS, {**_CODEBOOK, "sub": 16}, "d:<u2 q:<u2x32 s:u1x8", _iq2_xs),
    (GGML.IQ2_S, {**_CODEBOOK, "sub": 16}, "d:<u2 q:u1x32 g:u1x32 h:u1x8 s:u1x8", _byte_indices(gq.IQ2_S, 2, 0.125)),
    (GGML.IQ3_XXS, _CODEBOOK, "d:<u2 q:u1x64 s:<u4x8", _iq3_xxs),
    (GGML.IQ3_S, _CODEBOOK, "d:<u2 q:u1x64 h:u1x8 g:u1x32 s:u1x4", _byte_indices(gq.IQ3_S, 1, 1.0)),
    (GGML.IQ1_S, _CODEBOOK, "d:<u2 q:u1x32 h:<u2x8", _iq1_s),
    (GGML.IQ1_M, {**_CODEBOOK, "sub": 16}, "q:u1x32 h:u1x16 s:<u2x4", _iq1_m),
)
"""Type, arguments of its layout, fields of a block in file order as "name:type[xshape]", decoder."""


def _dtype(fields: str) -> np.dtype:
    block = []
    for field in fields.split():
        name, _, rest = field.partition(":")
        item, _, dims = rest.partition("x")
        block.append((name, item, tuple(int(n) for n in dims.split(",")) if dims else ()))
    return np.dtype(block)


KINDS: dict[GGML, BlockKind] = {
    t: BlockKind(Layout(**spec, source=t.name), _dtype(fields), decode) for t, spec, fields, decode in _TABLE
}
