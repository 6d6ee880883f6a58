"""Weights of an FFN row by row: what the sparse kernels gather.

A neuron is a row of gate, of up and of down transposed. Each row lies in one piece, so that only the rows of kept
neurons are read. Columns are filled up with zeros to chunks of 64, and a row to whole cache lines:

* float codes: the columns in order.
* `int8`: one byte a column. `nibble`: 32 bytes a chunk; byte i holds columns i (its low bits) and 32 + i of the chunk.
* then the scales, each field for the whole row: `d` f16 d[blocks]; `dm` f16 d[blocks], m[blocks]; `f32` f32 d[subs];
  `super` f16 d[supers], int8 sc[subs]; `super_min` f16 d[supers], dmin[supers], int8 sc[subs], uint8 mn[subs].

A weight's value is that of `kernels.qtensor`.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from gguf import GGMLQuantizationType as GGML

from specsparse.errors import UserError
from specsparse.kernels.arena import aligned_empty
from specsparse.kernels.packing import dequant, pack
from specsparse.kernels.packing.block_types import Parts
from specsparse.kernels.packing.signbits import SignRows
from specsparse.kernels.qtensor import BLOCK, ROWS, SUPER, Layout, Packed, QTensor, packed_pytree

CHUNK = 64
"""Columns that a kernel reads at a time: two blocks."""
LINE = 64
"""Bytes of a cache line; a row begins and ends with one."""

_FLOATS = {"f32": jnp.float32, "f16": jnp.float16, "bf16": jnp.bfloat16}


@packed_pytree
@dataclass(frozen=True)
class NeuronRows(Packed):
    """A matrix of neurons of shape (F, D).

    Invariant: data is uint8[F, row_bytes(layout, D)]; `layout.group_bytes` is not meant for these rows.
    """


class SparseStats(NamedTuple):
    """What a sparse FFN did; "row" is a row of activations. Where the gate decides, it is read for all neurons, and
    `kept` and `union` are `nonzero` and `active`.

    Attributes:
        kept: int32[R], neurons computed for each row.
        union: int32[], neurons whose gate was read (their up, without one): those that any row keeps.
        nonzero: int32[R], kept neurons of each row whose activation was not 0.
        active: int32[], neurons of which that is so in any row: those whose down row was read.
    """

    kept: jax.Array
    union: jax.Array
    nonzero: jax.Array
    active: jax.Array


class NeuronChoice(NamedTuple):
    """Which neurons the rows of a layer compute, as `layers` of the native kernels decides it.

    Attributes:
        rule: "all", and the gate alone decides; "scores", where second relu(first z) reaches the threshold; "signs",
            where that many products of signs are positive (`signbit_keep`).
        first: QTensor [r, D], of "scores".
        second: QTensor [F, r], of "scores".
        relu: whether there is the ReLU.
        norm: f32[D], z is x normalised by it; None: z is x.
        signs: of "signs".
        threshold: f32[], equality keeps; None for "all".
        least: f32[], neurons with |act(gate z)| below it are left out; None for 0.
    """

    rule: Literal["all", "scores", "signs"] = "all"
    first: QTensor | None = None
    second: QTensor | None = None
    relu: bool = False
    norm: jax.Array | None = None
    signs: SignRows | None = None
    threshold: jax.Array | None = None
    least: jax.Array | None = None


class ChosenFfn(NamedTuple):
    """A layer's FFN in which a predictor chooses the neurons: rows as `sparse_ffn` takes them, and its choice."""

    gate: NeuronRows | None
    up: NeuronRows
    down_t: NeuronRows
    choice: NeuronChoice


def fields(layout: Layout, cols: int) -> dict[str, slice]:
    """Where each field of a row lies, in bytes: "codes", and those of "d", "m", "sc", "mn" that there are."""
    padded = -(-cols // CHUNK) * CHUNK
    blocks, subs, supers = padded // BLOCK, padded // layout.sub, cols // SUPER
    code = {"nibble": padded // 2, "int8": padded, "f32": 4 * padded}.get(layout.codes, 2 * padded)
    sizes = {
        "none": {},
        "d": {"d": 2 * blocks},
        "dm": {"d": 2 * blocks, "m": 2 * blocks},
        "f32": {"d": 4 * subs},
        "super": {"d": 2 * supers, "sc": subs},
        "super_min": {"d": 2 * supers, "m": 2 * supers, "sc": subs, "mn": subs},
    }[layout.scales]
    found, at = {}, 0
    for name, size in {"codes": code, **sizes}.items():
        found[name] = slice(at, at + size)
        at += size
    return found


def row_bytes(layout: Layout, cols: int) -> int:
    """Bytes of a row, whole cache lines."""
    return -(-max(place.stop for place in fields(layout, cols).values()) // LINE) * LINE


def pack_neurons(raw: np.ndarray, ggml_type: GGML, shape: tuple[int, int]) -> NeuronRows:
    """Packs a matrix [F, D] from a file's bytes, any GGUF type without loss.

    Args:
        raw: the tensor's bytes as `packing.pack.pack_qtensor` takes them.
        ggml_type: their GGUF type.
        shape: (F, D); for the down projection its transpose, one row a neuron.

    Raises:
        UserError: the type has no layout, or the byte count or the columns do not fit it.
    """
    ggml_type = GGML(ggml_type)
    layout, (rows, cols) = pack.layout_of(ggml_type), (int(n) for n in shape)
    raw = pack.rows_of(raw, ggml_type, (rows, cols))
    out = aligned_empty(rows, row_bytes(layout, cols))
    place = fields(layout, cols)
    step = max(1, pack.CHUNK_BYTES // out.shape[1])
    for start in range(0, rows, step):
        part, to = raw[start : start + step], out[start : start + step]
        to[...] = 0
        if layout.is_float:
            to[:, : part.shape[1]] = part
        else:
            kind = pack.KINDS[ggml_type]
            _write(to, kind.decode(part.view(kind.block)), layout, place)
    out.flags.writeable = False
    return NeuronRows(jax.device_put(out), layout, (rows, cols))


def _write(out: np.ndarray, parts: Parts, layout: Layout, place: dict[str, slice]) -> None:
    """Decoded rows into their places; what lies past the last column stays zero."""
    rows = len(out)
    codes = np.ascontiguousarray(parts.codes).view(np.uint8).reshape(rows, -1)
    if layout.codes == "nibble":
        codes = _pair_blocks(codes)
    for name, field in {"codes": codes, "d": parts.d, "m": parts.m, "sc": parts.sc, "mn": parts.mn}.items():
        if field is not None:
            stored = np.ascontiguousarray(field).reshape(rows, -1).view(np.uint8)
            start = place[name].start
            out[:, start : start + stored.shape[1]] = stored


def _pair_blocks(codes: np.ndarray) -> np.ndarray:
    """Nibbles of blocks of 32 (columns j and 16 + j in a byte) as nibbles of chunks of 64 (j and 32 + j)."""
    blocks = codes.reshape(len(codes), -1, 16)
    if blocks.shape[1] % 2:
        blocks = np.concatenate([blocks, np.zeros_like(blocks[:, :1])], axis=1)
    first, second = blocks[:, ::2], blocks[:, 1::2]
    four, low, high = np.uint8(4), np.uint8(0x0F), np.uint8(0xF0)
    halves = [(first & low) | (second << four), (first >> four) | (second & high)]
    return np.stack(halves, axis=2).reshape(len(codes), -1)


def unpack_neurons(rows: NeuronRows) -> jax.Array:
    """All values, float32[F, D]; equal to gguf's dequantiser."""
    layout, (count, cols) = rows.layout, rows.shape
    field = {name: rows.data[:, place] for name, place in fields(layout, cols).items()}
    if layout.is_float:
        dtype = _FLOATS[layout.codes]
        values = jax.lax.bitcast_convert_type(field["codes"].reshape(count, -1, dtype.dtype.itemsize), dtype)
        return values[:, :cols].astype(jnp.float32)
    codes = _codes(field["codes"], layout)
    scale = _scales(field, "d", "sc", layout)
    values = codes.reshape(count, scale.shape[1], -1) * scale[..., None]
    if "m" in field:
        mins = _scales(field, "m", "mn", layout)[..., None]
        values = values - mins if layout.scales == "super_min" else values + mins
    return values.reshape(count, -1)[:, :cols]


def _codes(stored: jax.Array, layout: Layout) -> jax.Array:
    """Code bytes of rows as the float32[F, padded columns] that scales multiply."""
    if layout.codes == "int8":
        return jax.lax.bitcast_convert_type(stored, jnp.int8).astype(jnp.float32)
    chunks = stored.reshape(len(stored), -1, CHUNK // 2)
    halves = jnp.concatenate([chunks & jnp.uint8(0x0F), chunks >> jnp.uint8(4)], axis=2).reshape(len(stored), -1)
    return dequant._lookup(halves, layout.lut) if layout.lut else halves.astype(jnp.float32) - float(layout.zero)


def _scales(field: dict[str, jax.Array], name: str, fine: str, layout: Layout) -> jax.Array:
    """A scale for each block or sub-block, float32[F, blocks]: `name`, times the bytes `fine` of super-blocks."""
    count = len(field[name])
    coarse = field[name].reshape(count, -1, 1, 4 if layout.scales == "f32" else 2)
    if fine not in field:
        return dequant._float(coarse)[..., 0]
    dtype = jnp.int8 if fine == "sc" else jnp.uint8
    return dequant._scaled(coarse, field[fine].reshape(count, -1, 1, 1), dtype)[..., 0]


def regroup_neurons(matrix: QTensor) -> NeuronRows:
    """A matrix packed in groups of 16 rows as rows of neurons: the same codes and scales. Runs on the host."""
    (rows, cols), layout = matrix.shape, matrix.layout
    out = pack.aligned_empty(rows, row_bytes(layout, cols))
    out[...] = 0
    place = fields(layout, cols)
    data = np.asarray(matrix.data)
    step = max(1, pack.CHUNK_BYTES // data.shape[1])
    for start in range(0, len(data), step):
        split = dequant._split(data[start : start + step], layout, cols)
        parts = Parts(*(None if f is None else f.transpose(0, 2, 1, 3).reshape(len(f) * ROWS, -1) for f in split))
        to = out[start * ROWS : (start + step) * ROWS]
        _write(to, Parts(*(None if part is None else part[: len(to)] for part in parts)), layout, place)
    out.flags.writeable = False
    return NeuronRows(jax.device_put(out), layout, (rows, cols))


def take_neurons(rows: NeuronRows, ids: np.ndarray) -> NeuronRows:
    """Neurons `ids` int[N] in that order, for instance the hot ones: shape (N, D), same layout. Runs on the host.

    Raises:
        UserError: no ids, or one outside the matrix.
    """
    ids = np.asarray(ids, np.int64)
    count, cols = rows.shape
    if ids.ndim != 1 or ids.size == 0 or ids.min() < 0 or ids.max() >= count:
        raise UserError(f"neurons to take must be a list of at least one, each in 0..{count - 1}")
    out = aligned_empty(len(ids), rows.data.shape[1])
    np.take(np.asarray(rows.data), ids, axis=0, out=out)
    out.flags.writeable = False
    return NeuronRows(jax.device_put(out), rows.layout, (len(ids), cols))
