"""Decoders of the GGUF types whose codes index a codebook: IQ1, IQ2 and IQ3, as int8 codes with float32 scales.

A codebook entry is 8 (or 4) small numbers; it is held as the bytes of one word, so that one `take` fetches all of them.
All scales are d * integer * power of two, and all codes have at most 6 bits, hence every product is exact in float32.
"""

from collections.abc import Callable

import gguf.quants as gq
import numpy as np
from gguf import GGMLQuantizationType as GGML

from specsparse.kernels.packing.block_types import BlockKind, Parts, kind_table

EIGHT = np.arange(8, dtype=np.uint8)


def _grid(source: type, factor: int = 1) -> np.ndarray:
    """A codebook of gguf times `factor`, its int8 entries as words: uint64[entries], or uint32 for entries of 4."""
    source.init_grid()
    entries = (source.grid.reshape(source.grid_shape) * np.float32(factor)).astype(np.int8)
    return entries.view(np.uint64 if entries.shape[1] == 8 else np.uint32)[:, 0]


_GRIDS: dict[str, np.ndarray] = {}


def _entries(source: type, index: np.ndarray) -> np.ndarray:
    """Codebook words of the indices; the codebook is decoded at its first use."""
    if source.__name__ not in _GRIDS:
        _GRIDS[source.__name__] = _grid(source)
    return _GRIDS[source.__name__].take(index)


def _iq1_grid() -> np.ndarray:
    """Eight times the ternary codebook plus and minus its shift of 1/8: words [2, 2048]."""
    if "iq1" not in _GRIDS:
        bytes8 = _grid(gq.IQ1_S, 8).view(np.int8)
        _GRIDS["iq1"] = np.stack([bytes8 + np.int8(1), bytes8 - np.int8(1)]).view(np.uint64)
    return _GRIDS["iq1"]


_SIGN_BITS = (np.arange(256, dtype=np.uint8)[:, None] >> EIGHT) & np.uint8(1)
_SIGN_MASKS = (_SIGN_BITS * np.uint8(255)).view(np.uint64)[:, 0]
"""A byte of sign bits as a word with 255 where the sign is set."""
_SEVEN_SIGNS = np.frombuffer(gq.IQ2_XXS.ksigns, np.uint8)
_SEVEN_MASKS = _SIGN_MASKS[_SEVEN_SIGNS]
"""The same for 7 bits, the eighth sign chosen for even parity."""


def _signed(values: np.ndarray, masks: np.ndarray) -> np.ndarray:
    """Negates the bytes of `values` whose mask byte is 255 (as ~x + 1); both contiguous, same bytes."""
    mask = masks.view(np.int8)
    out = values.view(np.int8).reshape(mask.shape) ^ mask
    np.subtract(out, mask, out=out)
    return out


def _parts(codes: np.ndarray, scales: np.ndarray) -> Parts:
    """codes [rows, ..] of 8 bits, columns in order, and scales float32[rows, supers, n] as parts."""
    rows, supers, count = scales.shape
    blocks = supers * 8
    return Parts(codes.view(np.uint8).reshape(rows, blocks, 32).view("<u4"), scales.reshape(rows, blocks, count // 8))


def _d(bits: np.ndarray) -> np.ndarray:
    """The super-block scale as float32[rows, supers, 1]."""
    return bits.view(np.float16).astype(np.float32)[..., None]


def _scale(bits: np.ndarray, sub: np.ndarray, factor: float) -> np.ndarray:
    """d * (2 * sub + 1) * factor, exact; a power of two as factor."""
    with np.errstate(all="ignore"):
        return _d(bits) * (sub.astype(np.float32) * np.float32(2) + np.float32(1)) * np.float32(factor)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """uint8[.., n] -> uint8[.., 2 n], low half of each byte first."""
    return np.stack([packed & np.uint8(0x0F), packed >> np.uint8(4)], axis=-1).reshape(*packed.shape[:-1], -1)


def _fields(words: np.ndarray, count: int, width: int, item: type = np.uint16) -> np.ndarray:
    """`count` fields of `width` bits from the bottom of each word: [.., n] -> item[.., n, count]."""
    shifts = np.arange(count, dtype=words.dtype) * words.dtype.type(width)
    return ((words[..., None] >> shifts) & words.dtype.type((1 << width) - 1)).astype(item)


def _iq2_xxs(blocks: np.ndarray) -> Parts:
    words = blocks["q"][..., 1]
    grid = _entries(gq.IQ2_XXS, np.ascontiguousarray(blocks["q"][..., 0]).view(np.uint8))
    codes = _signed(grid, _SEVEN_MASKS.take(_fields(words, 4, 7, np.uint8)))
    return _parts(codes, _scale(blocks["d"], words >> np.uint32(28), 0.125))


def _iq2_xs(blocks: np.ndarray) -> Parts:
    grid = _entries(gq.IQ2_XS, blocks["q"] & np.uint16(511))
    codes = _signed(grid, _SEVEN_MASKS.take(blocks["q"] >> np.uint16(9)))
    return _parts(codes, _scale(blocks["d"], _nibbles(blocks["s"]), 0.125))


def _byte_indices(grid: type, width: int, factor: float) -> Callable[[np.ndarray], Parts]:
    """IQ2_S and IQ3_S: indices of a byte each, `width` more bits of each in `h`, a byte of signs for 8 columns."""

    def decode(blocks: np.ndarray) -> Parts:
        high = _fields(blocks["h"], 8 // width, width).reshape(blocks["q"].shape)
        entries = _entries(grid, blocks["q"] | (high << np.uint16(8)))
        codes = _signed(entries, _SIGN_MASKS.take(blocks["g"]))
        return _parts(codes, _scale(blocks["d"], _nibbles(blocks["s"]), factor))

    return decode


def _iq3_xxs(blocks: np.ndarray) -> Parts:
    grid = _entries(gq.IQ3_XXS, blocks["q"])
    codes = _signed(grid, _SEVEN_MASKS.take(_fields(blocks["s"], 4, 7, np.uint8)).reshape(*blocks.shape, 32))
    return _parts(codes, _scale(blocks["d"], blocks["s"] >> np.uint32(28), 0.25))


def _iq1_s(blocks: np.ndarray) -> Parts:
    """A word per 32 columns: three high index bits for each of 4 entries, three bits of scale, sign of the shift."""
    words = blocks["h"]
    index = blocks["q"] | (_fields(words, 4, 3) << np.uint16(8)).reshape(*blocks.shape, 32)
    sign = np.repeat(words >> np.uint16(15), 4, axis=-1)
    codes = _iq1_grid().take(index + (sign << np.uint16(11)))
    return _parts(codes, _scale(blocks["d"], (words >> np.uint16(12)) & np.uint16(7), 0.125))


def _iq1_m(blocks: np.ndarray) -> Parts:
    """Four bits an entry: three high index bits, sign of the shift. The top four bits of four words make up d."""
    words = blocks["s"]
    high = _nibbles(blocks["h"]).astype(np.uint16)
    index = blocks["q"] | (high << np.uint16(8))
    d = sum(((words[..., i] >> np.uint16(12)) << np.uint16(4 * i) for i in range(4)), start=np.uint16(0))
    sub = _fields(words, 4, 3).reshape(*blocks.shape, 16)
    return _parts(_iq1_grid().take(index), _scale(d, sub, 0.125))


def _row(name: GGML, sub: int, fields: str, decode: Callable[[np.ndarray], Parts]) -> tuple:
    return name, {"codes": "int8", "scales": "f32", "sub": sub}, fields, decode


CODEBOOK_KINDS: dict[GGML, BlockKind] = kind_table(
    _row(GGML.IQ2_XXS, 32, "d:<u2 q:<u4x8,2", _iq2_xxs),
    _row(GGML.IQ2_XS, 16, "d:<u2 q:<u2x32 s:u1x8", _iq2_xs),
    _row(GGML.IQ2_S, 16, "d:<u2 q:u1x32 g:u1x32 h:u1x8 s:u1x8", _byte_indices(gq.IQ2_S, 2, 0.125)),
    _row(GGML.IQ3_XXS, 32, "d:<u2 q:u1x64 s:<u4x8", _iq3_xxs),
    _row(GGML.IQ3_S, 32, "d:<u2 q:u1x64 h:u1x8 g:u1x32 s:u1x4", _byte_indices(gq.IQ3_S, 1, 1.0)),
    _row(GGML.IQ1_S, 32, "d:<u2 q:u1x32 h:<u2x8", _iq1_s),
    _row(GGML.IQ1_M, 16, "q:u1x32 h:u1x16 s:<u2x4", _iq1_m),
)
