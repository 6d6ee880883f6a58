"""Weights of an FFN as the sparse kernels read them: rows of neurons, their sign bits, blocks of a down projection.

A neuron is a row of gate, of up and of down transposed. Each row is contiguous, so that only the rows of kept neurons
are read. Columns are filled up with zeros to chunks of 64, and a row to whole cache lines:

* float codes: the columns in order.
* `int8`: one byte a column. `nibble`: 32 bytes a chunk; byte i holds columns i (its low bits) and 32 + i of the chunk.
* then the scales, each field for the whole row: `d` f16 d[blocks]; `dm` f16 d[blocks], m[blocks]; `f32` f32 d[subs];
  `super` f16 d[supers], int8 sc[subs]; `super_min` f16 d[supers], dmin[supers], int8 sc[subs], uint8 mn[subs].

The value of a weight is that of `kernels.qtensor`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from gguf import GGMLQuantizationType as GGML

from specsparse.kernels.arena import aligned_empty
from specsparse.kernels.packing import dequant, pack
from specsparse.kernels.qtensor import BLOCK, ROWS, SUPER, Fields, Layout, Packed, QTensor, packed_pytree

CHUNK = 64
"""Columns that a kernel reads at a time: two blocks."""
LINE = 64
"""Bytes of a cache line; a row begins and ends with one."""


@packed_pytree
@dataclass(frozen=True)
class NeuronRows(Packed):
    """A matrix of neurons of shape (F, D).

    Invariant: data is uint8[F, row_bytes(layout, D)]; `layout.group_bytes` does not apply to these rows.
    """


@partial(jax.tree_util.register_dataclass, data_fields=["data"], meta_fields=["shape"])
@dataclass(frozen=True)
class SignRows:
    """Sign bits of a gate. Invariant: data is uint8[F, 8 * ceil(D / 64)]; bits past the last column are 0."""

    data: jax.Array  # bit c % 8 of byte c / 8 of row j says whether weight c of neuron j is below 0
    shape: tuple[int, int]  # (neurons, columns) = (F, D)

    @property
    def nbytes(self) -> int:
        return int(self.data.size)


class SkipWeights(NamedTuple):
    """Weights that skipping zeros reads beside the gate: up as rows [F, D], down [D, F] as `neuron_blocks`."""

    up: NeuronRows
    down: jax.Array


class SparseStats(NamedTuple):
    """Counts of a sparse FFN; R are rows of activations. If the gate decides, it is read for all neurons, and `kept`
    and `union` are `nonzero` and `active`.
    """

    kept: jax.Array  # int32[R], neurons computed for each row
    union: jax.Array  # int32[], neurons whose gate was read (their up, without one): those that any row keeps
    nonzero: jax.Array  # int32[R], kept neurons of each row whose activation was not 0
    active: jax.Array  # int32[], neurons with an activation other than 0 in any row: those whose down row was read


class NeuronChoice(NamedTuple):
    """Which neurons the rows of a layer compute, as `layers` of the native kernels decides it."""

    # "all": the gate alone decides; "scores": neurons with second relu(first z) >= threshold; "signs": neurons with
    # that many positive products of signs (`signbit_keep`)
    rule: Literal["all", "scores", "signs"] = "all"
    first: QTensor | None = None  # [r, D], of "scores"
    second: QTensor | None = None  # [F, r], of "scores"
    relu: bool = False
    norm: jax.Array | None = None  # f32[D], z is x normalised by it; None: z is x
    signs: SignRows | None = None  # of "signs"
    threshold: jax.Array | None = None  # f32[], equality keeps; None for "all"
    least: jax.Array | None = None  # f32[], neurons with |act(gate z)| below it are left out; None for 0


class ChosenFfn(NamedTuple):
    """A layer's FFN with predicted neurons: rows as `sparse_ffn` takes them, and the predictor's choice.

    With a gate and `blocks` in place of `down_t` the choice masks the layer's dense matrices, all of them `skippable`:
    the bits are theirs, with 0 for the neurons that a row does not keep.
    """

    gate: NeuronRows | None
    up: NeuronRows
    down_t: NeuronRows | None
    choice: NeuronChoice
    blocks: jax.Array | None = None


def field_places(layout: Layout, cols: int) -> dict[str, slice]:
    """The place of each field of a row, in bytes: "codes", and those of "d", "m", "sc", "mn" that there are."""
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
    places, at = {}, 0
    for name, size in {"codes": code, **sizes}.items():
        places[name] = slice(at, at + size)
        at += size
    return places


def row_bytes(layout: Layout, cols: int) -> int:
    """Bytes of a row, whole cache lines."""
    return -(-max(place.stop for place in field_places(layout, cols).values()) // LINE) * LINE


def pack_neurons(raw: np.ndarray, ggml_type: GGML, shape: tuple[int, int]) -> NeuronRows:
    """Packs a matrix (F, D) from a file's bytes, any GGUF type without loss; a down projection transposed."""
    ggml_type = GGML(ggml_type)
    layout = pack.layout_of(ggml_type)
    raw = pack.rows_of(raw, ggml_type, shape)

    def decoded(start: int, stop: int) -> Fields:
        if layout.is_float:
            return Fields(raw[start:stop])
        kind = pack.KINDS[ggml_type]
        return kind.decode(raw[start:stop].view(kind.block))

    return _packed_rows(decoded, layout, shape)


def regroup_neurons(matrix: QTensor) -> NeuronRows:
    """A matrix packed in groups of 16 rows as rows of neurons: the same codes and scales. Runs on the host."""
    (rows, cols), layout, data = matrix.shape, matrix.layout, np.asarray(matrix.data)

    def regrouped(start: int, stop: int) -> Fields:
        split = layout.split(data[start // ROWS : -(-stop // ROWS)], cols)
        by_row = (f if f is None else f.transpose(0, 2, 1, 3).reshape(len(f) * ROWS, -1)[: stop - start] for f in split)
        return Fields(*by_row)

    return _packed_rows(regrouped, layout, (rows, cols))


def _packed_rows(decode: Callable[[int, int], Fields], layout: Layout, shape: tuple[int, int]) -> NeuronRows:
    """The rows whose fields `decode(start, stop)` gives, some groups of 16 at a time; filled up with zeros."""
    rows, cols = shape
    out, places = aligned_empty(rows, row_bytes(layout, cols)), field_places(layout, cols)
    step = max(1, pack.CHUNK_BYTES // (ROWS * out.shape[1])) * ROWS
    for start in range(0, rows, step):
        to = out[start : start + step]
        for name, field in decode(start, start + len(to))._asdict().items():
            if field is None:
                continue
            stored = np.ascontiguousarray(field).view(np.uint8).reshape(len(to), -1)
            if name == "codes" and layout.codes == "nibble":
                # from blocks of 32 (columns j and 16 + j in a byte) to chunks of 64 (j and 32 + j)
                blocks = stored.reshape(len(to), -1, 16)
                if blocks.shape[1] % 2:
                    blocks = np.pad(blocks, ((0, 0), (0, 1), (0, 0)))
                first, second = blocks[:, ::2], blocks[:, 1::2]
                four, low, high = np.uint8(4), np.uint8(0x0F), np.uint8(0xF0)
                halves = [(first & low) | (second << four), (first >> four) | (second & high)]
                stored = np.stack(halves, axis=2).reshape(len(to), -1)
            at = places[name].start
            to[:, at : at + stored.shape[1]] = stored
    out.flags.writeable = False
    return NeuronRows(jax.device_put(out), layout, shape)


def unpack_neurons(rows: NeuronRows) -> jax.Array:
    """All values, float32[F, D]; equal to gguf's dequantiser."""
    layout, (count, cols) = rows.layout, rows.shape
    stored = {name: rows.data[:, place] for name, place in field_places(layout, cols).items()}
    codes = stored.pop("codes")
    if layout.is_float:
        dtype = dequant.FLOATS[layout.codes]
        values = jax.lax.bitcast_convert_type(codes.reshape(count, -1, dtype.dtype.itemsize), dtype)
        return values[:, :cols].astype(jnp.float32)
    if layout.codes == "nibble":
        codes = codes.reshape(count, -1, CHUNK // 2)
        codes = jnp.concatenate([codes & jnp.uint8(0x0F), codes >> jnp.uint8(4)], axis=2)
    # as packed groups with a single lane
    numbers = dequant.numbers(codes.reshape(count, -1, 1), layout)
    item = {"d": 4 if layout.scales == "f32" else 2, "m": 2, "sc": 1, "mn": 1}
    scales = {name: field.reshape(count, -1, 1, item[name]) for name, field in stored.items()}
    return dequant.scaled(numbers, Fields(None, **scales), layout).reshape(count, -1)[:, :cols]


def pack_signs(weights_FD: np.ndarray) -> SignRows:
    """Sign bits of a gate's weights, read by the training-free predictor of SparseInfer (arXiv:2411.12692).

    Runs on the host. For rows that are not normalised yet they are of the weights times those of the norm.
    """
    below = np.asarray(weights_FD) < 0
    bits = np.packbits(below, axis=1, bitorder="little")
    words = np.pad(bits, ((0, 0), (0, -bits.shape[1] % 8)))  # kernels count bits by words of 64
    return SignRows(jax.device_put(words), below.shape)


def skippable(matrix: QTensor) -> bool:
    """Whether its layout is Q4_0's, the only one that zeros are skipped in."""
    layout = matrix.layout
    return layout.codes == "nibble" and layout.scales == "d" and layout.zero == 8 and not layout.lut


def neuron_blocks(down: QTensor) -> jax.Array:
    """A `skippable` down projection [D, F] by blocks of 32 neurons, each a contiguous row of codes. Runs on the host.

    A block has f16 scales of all outputs, then 32 rows of nibbles as `NeuronRows` has them. Codes and scales are those
    of the Q4_0 matrix, whose blocks run along the neurons: nothing is rounded again. Zeros fill up chunks of 64.

    Returns:
        uint8[F / 32, 18 * D rounded up to chunks].
    """
    assert skippable(down), down.layout
    outputs, neurons = down.shape
    blocks, chunks, data = neurons // BLOCK, -(-outputs // CHUNK), np.asarray(down.data)
    out = aligned_empty(blocks, 18 * CHUNK * chunks)
    scales, rows = out[:, : 2 * CHUNK * chunks], out[:, 2 * CHUNK * chunks :].reshape(blocks, BLOCK, chunks, CHUNK // 2)
    groups = CHUNK // ROWS
    for c in range(chunks):
        some = data[c * groups : (c + 1) * groups]
        part = np.concatenate([some, np.zeros((groups - len(some), data.shape[1]), np.uint8)])
        fields = down.layout.split(part, neurons)
        by_block = fields.d.reshape(groups, blocks, 2 * ROWS).transpose(1, 0, 2)
        scales[:, 2 * CHUNK * c : 2 * CHUNK * (c + 1)] = by_block.reshape(blocks, -1)
        # four chunks of a block, two neurons a byte
        codes = fields.codes.reshape(groups, blocks, 4, ROWS, 4).transpose(1, 2, 4, 0, 3)
        codes = codes.reshape(blocks, BLOCK // 2, CHUNK)
        codes = np.concatenate([codes & 15, codes >> 4], axis=1)  # [blocks, neuron, output]
        rows[:, :, c] = codes[..., : CHUNK // 2] | codes[..., CHUNK // 2 :] << np.uint8(4)
    out.flags.writeable = False
    return jax.device_put(out)
