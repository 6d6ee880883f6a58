"""GGUF bytes to the packed layouts of `docs/layouts.md`.

A decoder (`packing_types`, `packing_codebooks`) turns the blocks of some rows into `Parts`: codes in column order, and
scales, as views of the file where it already stores them so. This module lays the parts out in groups of 16 rows by
strided copies, a few groups at a time, so that the work stays in the cache and the only large allocation is the result.
"""

from collections.abc import Callable

import jax
import numpy as np
from gguf import GGMLQuantizationType as GGML
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES

from specsparse.errors import UserError
from specsparse.kernels.arena import aligned_empty
from specsparse.kernels.native import cpu
from specsparse.kernels.packing.block_types import PLAIN_KINDS, BlockKind, Parts, as_stored
from specsparse.kernels.packing.codebooks import CODEBOOK_KINDS
from specsparse.kernels.qtensor import BLOCK, ROWS, SUPER, Layout, QTensor

CHUNK_BYTES = 512 << 10
"""Packed bytes written between two looks at the file: the decoder's temporaries stay in the L2 cache."""

KINDS: dict[GGML, BlockKind] = {**PLAIN_KINDS, **CODEBOOK_KINDS}
FLOATS: dict[GGML, Layout] = {
    GGML.F32: Layout("f32", source="F32"),
    GGML.F16: Layout("f16", source="F16"),
    GGML.BF16: Layout("bf16", source="BF16"),
}
_SUPER_BITS = {GGML.Q4_K: 4, GGML.Q5_K: 5, GGML.Q6_K: 6}
SUPPORTED: tuple[GGML, ...] = (*FLOATS, *KINDS)
"""Every type that has a layout of its own."""


def pack(raw: np.ndarray, qtype: GGML, shape: tuple[int, int]) -> tuple[np.ndarray, Layout]:
    """Packs one matrix.

    Scales are copied as they are, finite or not.

    Args:
        raw: the tensor's bytes as they lie in the file, contiguous, in any shape and dtype.
        qtype: the GGUF type of the bytes.
        shape: (rows, cols).

    Returns:
        data uint8[ceil(rows/16), layout.group_bytes(cols)], aligned to 64 bytes and read-only, and its layout.

    Raises:
        UserError: the type has no layout, or the byte count or the columns do not fit it.
    """
    qtype = GGML(qtype)
    layout = layout_of(qtype)
    rows, cols = (int(n) for n in shape)
    raw = rows_of(raw, qtype, (rows, cols))
    out = aligned_empty(-(-rows // ROWS), layout.group_bytes(cols))
    if not _packed_natively(out, raw, qtype, layout):
        _fill(out, raw, _row_writer(qtype, layout))
    out.flags.writeable = False
    return out, layout


def pack_qtensor(raw: np.ndarray, qtype: GGML, shape: tuple[int, int]) -> QTensor:
    """`pack` as a QTensor on the default device; on a CPU its array is the packed buffer itself."""
    data, layout = pack(raw, qtype, shape)
    return QTensor(jax.device_put(data), layout, shape)


def layout_of(qtype: GGML) -> Layout:
    """The layout a GGUF type is packed into: its own, or float32 for another type that gguf can dequantise.

    Raises:
        UserError: gguf cannot dequantise it.
    """
    if qtype in FLOATS:
        return FLOATS[qtype]
    if qtype in KINDS:
        return KINDS[qtype].layout
    try:
        quants.dequantize(np.zeros((1, GGML_QUANT_SIZES[qtype][1]), np.uint8), qtype)
    except NotImplementedError:
        names = ", ".join(sorted(known.name for known in SUPPORTED))
        raise UserError(f"tensor type {GGML(qtype).name} is not supported (supported: {names})") from None
    return Layout("f32", source=GGML(qtype).name)


def rows_of(raw: np.ndarray, qtype: GGML, shape: tuple[int, int]) -> np.ndarray:
    """A file's bytes as uint8[rows, bytes of a row], those of float32 if the type has no layout of its own.

    Raises:
        UserError: they are no matrix of that type and shape.
    """
    rows, cols = shape
    unit, unit_bytes = GGML_QUANT_SIZES[qtype]
    raw = np.asarray(raw).view(np.uint8)
    if rows < 1 or cols < 1 or cols % unit or raw.size != rows * (cols // unit) * unit_bytes:
        raise UserError(
            f"{raw.size} bytes of {qtype.name} are not a [{rows}, {cols}] matrix (in blocks of {unit} columns)"
        )
    raw = raw.reshape(rows, -1)
    return raw if qtype in SUPPORTED else quants.dequantize(raw, qtype).view(np.uint8)


def _packed_natively(out: np.ndarray, raw: np.ndarray, qtype: GGML, layout: Layout) -> bool:
    """The same by the compiled kernels, ten times as fast; they know floats, the types that are stored as packed, and
    the K-quants that files are made of."""
    raw = np.ascontiguousarray(raw)
    if layout.is_float:
        return cpu.pack(out, raw, item=4 if layout.codes == "f32" else 2)
    if qtype in _SUPER_BITS:
        return cpu.pack(out, raw, bits=_SUPER_BITS[qtype])
    if KINDS[qtype].decode is not as_stored:
        return False
    scales, words = 2 if layout.scales == "dm" else 1, 8 if layout.codes == "int8" else 4
    return cpu.pack(out, raw, scales=scales, words=words)


def _fill(out: np.ndarray, raw: np.ndarray, write: Callable[[np.ndarray, np.ndarray], None]) -> None:
    """Runs write(out[g], raw[g, lanes, bytes]) over all groups; the lanes past the last row become zero."""
    whole = raw.shape[0] // ROWS
    step = max(1, CHUNK_BYTES // out.shape[1])
    for start in range(0, whole, step):
        stop = min(start + step, whole)
        write(out[start:stop], raw[start * ROWS : stop * ROWS].reshape(stop - start, ROWS, -1))
    if whole < out.shape[0]:
        out[whole:] = 0
        write(out[whole:], raw[None, whole * ROWS :])


def _row_writer(qtype: GGML, layout: Layout) -> Callable[[np.ndarray, np.ndarray], None]:
    """The function that packs raw rows [groups, lanes, bytes] into out [groups, group_bytes]."""
    if layout.is_float:
        item = np.dtype("<u4" if layout.codes == "f32" else "<u2")
        return lambda out, raw: _write_floats(out, raw.view(item))
    kind = KINDS[qtype]

    def write(out: np.ndarray, raw: np.ndarray) -> None:
        groups, lanes, _ = raw.shape
        blocks = raw.reshape(groups * lanes, -1).view(kind.block)
        _write_blocks(out, kind.decode(blocks), layout, (groups, lanes))

    return write


def _write_floats(out: np.ndarray, values: np.ndarray) -> None:
    """values [groups, lanes, cols] of 2 or 4 bytes -> [groups, cols, 16]."""
    lanes = values.shape[1]
    out.view(values.dtype).reshape(len(out), -1, ROWS)[..., :lanes] = values.transpose(0, 2, 1)


def _write_blocks(out: np.ndarray, parts: Parts, layout: Layout, group_lanes: tuple[int, int]) -> None:
    """Lays out decoded parts; `group_lanes` splits their leading row axis."""
    header, before, size = _sizes(layout)
    per_block = [parts.d, parts.m]
    if header:
        supers = out.reshape(len(out), -1, header + SUPER // BLOCK * size)
        _put(supers[..., :header], per_block, group_lanes)
        blocks = _view(supers[..., header:], (*supers.shape[:2], SUPER // BLOCK, size))
        per_block = [parts.sc, parts.mn]
    else:
        blocks = out.reshape(len(out), -1, size)
    _put(blocks[..., :before], per_block, group_lanes)
    _put(blocks[..., before:], [parts.codes], group_lanes)


def _sizes(layout: Layout) -> tuple[int, int, int]:
    """Bytes of a super-block header, of the scales of a block, and of a whole block."""
    subs = BLOCK // layout.sub
    header = {"super": 32, "super_min": 64}.get(layout.scales, 0)
    before = {"d": 32, "dm": 64, "f32": 64 * subs, "super": 16 * subs, "super_min": 32 * subs}[layout.scales]
    return header, before, before + ROWS * BLOCK // (2 if layout.codes == "nibble" else 1)


def _put(dst: np.ndarray, fields: list[np.ndarray | None], group_lanes: tuple[int, int]) -> None:
    """Writes the fields that are there into each block of dst, one after the other, each with its lanes innermost.

    A field [rows, *blocks, units] fills units * 16 items of dst uint8[groups, *blocks, bytes]. Its block axes may be
    cut finer than those of dst, as long as they stand for the same blocks in the same order.
    """
    groups, lanes = group_lanes
    present = [field for field in fields if field is not None]
    size = dst.shape[-1] // len(present)
    for i, field in enumerate(present):
        inner = field.shape[1:]
        words = _view(dst[..., i * size : (i + 1) * size].view(field.dtype), (groups, *inner, ROWS))
        words[..., :lanes] = np.moveaxis(_view(field, (groups, lanes, *inner)), 1, -1)


def _view(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """A reshape that must not copy, since what is written to a copy would be lost: numpy raises instead."""
    return array.reshape(shape, copy=False)
