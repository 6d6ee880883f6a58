"""GGUF bytes to the packed layouts of `docs/layouts.md`.

A decoder of `block_types` turns the blocks of some rows into `Fields`: codes in column order, and scales, as views of
the file if it stores them so. This module lays the fields out in groups of 16 rows by strided copies, a few groups at a
time, so that the work stays in the cache and the only large allocation is the result.
"""

import jax
import numpy as np
from gguf import GGMLQuantizationType as GGML
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES

from specsparse.kernels.arena import aligned_empty
from specsparse.kernels.native import cpu
from specsparse.kernels.packing.block_types import KINDS, as_stored
from specsparse.kernels.qtensor import BLOCK, ROWS, SUPER, Fields, Layout, QTensor

CHUNK_BYTES = 512 << 10
"""Packed bytes written between two looks at the file: the decoder's temporaries stay in the L2 cache."""

FLOATS: dict[GGML, Layout] = {
    GGML.F32: Layout("f32", source="F32"),
    GGML.F16: Layout("f16", source="F16"),
    GGML.BF16: Layout("bf16", source="BF16"),
}
_SUPER_BITS = {GGML.Q4_K: 4, GGML.Q5_K: 5, GGML.Q6_K: 6}
SUPPORTED: tuple[GGML, ...] = (*FLOATS, *KINDS)
"""Every type that has a layout of its own."""


def pack(raw: np.ndarray, qtype: GGML, shape: tuple[int, int]) -> tuple[np.ndarray, Layout]:
    """Packs a matrix (rows, cols) from a file's bytes, contiguous, in any shape and dtype.

    Scales are copied as they are, finite or not.

    Returns:
        data uint8[ceil(rows/16), layout.group_bytes(cols)], aligned to 64 bytes and read-only, and its layout.
    """
    qtype = GGML(qtype)
    layout = layout_of(qtype)
    raw = np.ascontiguousarray(rows_of(raw, qtype, shape))
    out = aligned_empty(-(-len(raw) // ROWS), layout.group_bytes(shape[1]))
    # The compiled kernels are ten times as fast. They know floats, types that are stored as packed, and K-quants.
    if layout.is_float:
        done = cpu.pack(out, raw, item=4 if layout.codes == "f32" else 2)
    elif qtype in _SUPER_BITS:
        done = cpu.pack(out, raw, bits=_SUPER_BITS[qtype])
    elif KINDS[qtype].decode is as_stored:
        done = cpu.pack(out, raw, scales=1 + layout.has_min, words=8 if layout.codes == "int8" else 4)
    else:
        done = False
    whole, step = len(raw) // ROWS, max(1, CHUNK_BYTES // out.shape[1])
    for start in range(0, 0 if done else whole, step):
        stop = min(start + step, whole)
        _write_groups(out[start:stop], raw[start * ROWS : stop * ROWS].reshape(stop - start, ROWS, -1), qtype, layout)
    if not done and whole < len(out):
        out[whole:] = 0
        _write_groups(out[whole:], raw[None, whole * ROWS :], qtype, layout)
    out.flags.writeable = False
    return out, layout


def pack_qtensor(raw: np.ndarray, qtype: GGML, shape: tuple[int, int]) -> QTensor:
    """`pack` as a QTensor on the default device; on a CPU its array is the packed buffer itself."""
    data, layout = pack(raw, qtype, shape)
    return QTensor(jax.device_put(data), layout, shape)


def layout_of(qtype: GGML) -> Layout:
    """The layout a GGUF type is packed into: its own, or float32 for another type that gguf can dequantise."""
    if qtype in FLOATS:
        return FLOATS[qtype]
    return KINDS[qtype].layout if qtype in KINDS else Layout("f32", source=GGML(qtype).name)


def rows_of(raw: np.ndarray, qtype: GGML, shape: tuple[int, int]) -> np.ndarray:
    """A file's bytes as uint8[rows, bytes of a row], those of float32 if the type has no layout of its own."""
    rows, cols = shape
    unit, unit_bytes = GGML_QUANT_SIZES[qtype]
    raw = np.asarray(raw).view(np.uint8)
    assert rows > 0 and cols > 0 and cols % unit == 0 and raw.size == rows * (cols // unit) * unit_bytes, (qtype, shape)
    raw = raw.reshape(rows, -1)
    return raw if qtype in SUPPORTED else quants.dequantize(raw, qtype).view(np.uint8)


def _write_groups(out: np.ndarray, raw: np.ndarray, qtype: GGML, layout: Layout) -> None:
    """Packs rows raw[groups, lanes, bytes] into out[groups, group_bytes]; the lanes after those stay as they are."""
    groups, lanes, _ = raw.shape
    if layout.is_float:
        values = raw.view("<u4" if layout.codes == "f32" else "<u2")
        out.view(values.dtype).reshape(groups, -1, ROWS)[..., :lanes] = values.transpose(0, 2, 1)
    else:
        kind = KINDS[qtype]
        _write_fields(out, kind.decode(raw.reshape(groups * lanes, -1).view(kind.block)), layout, lanes)


def _write_fields(out: np.ndarray, fields: Fields, layout: Layout, lanes: int) -> None:
    """Lays out decoded fields [groups * lanes, *blocks, items] in out uint8[groups, group_bytes]."""
    header, scales, block = layout.sizes

    def put(dst: np.ndarray, *values: np.ndarray | None) -> None:
        """Writes values into each block of dst uint8[groups, *blocks, bytes], one after the other, lanes innermost.

        The block axes of values may be cut finer than those of dst. No reshape may copy, since what is written to a
        copy would be lost.
        """
        present = [v for v in values if v is not None]
        size = dst.shape[-1] // len(present)
        for i, value in enumerate(present):
            inner = value.shape[1:]
            words = dst[..., i * size : (i + 1) * size].view(value.dtype)
            words = words.reshape((len(out), *inner, ROWS), copy=False)
            words[..., :lanes] = np.moveaxis(value.reshape((len(out), lanes, *inner), copy=False), 1, -1)

    if header:
        supers = out.reshape(len(out), -1, header + SUPER // BLOCK * block)
        put(supers[..., :header], fields.d, fields.m)
        blocks = supers[..., header:].reshape((*supers.shape[:2], SUPER // BLOCK, block), copy=False)
        put(blocks[..., :scales], fields.sc, fields.mn)
    else:
        blocks = out.reshape(len(out), -1, block)
        put(blocks[..., :scales], fields.d, fields.m)
    put(blocks[..., scales:], fields.codes)
