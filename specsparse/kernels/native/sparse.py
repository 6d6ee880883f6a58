"""The sparse kernels by C++ behind `jax.ffi`, with the signatures of `reference.sparse`."""

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.kernels.native import cpu
from specsparse.kernels.neurons import NeuronRows, SparseStats, row_bytes
from specsparse.kernels.reference import sparse

_ACTS = {None: 0, "silu": 1, "relu": 2, "relu2": 3, "fatrelu": 4}


def describe(*matrices: NeuronRows) -> np.ndarray:
    """int64[23 * len(matrices)]: what `NeuronDescription::read` (sparse/sparse.cc) reads of each."""
    out = []
    for w in matrices:
        layout, codes, scales = w.layout, cpu._CODES, cpu._SCALES
        out += [codes.index(layout.codes), scales.index(layout.scales), layout.sub, layout.zero]
        out += [*w.shape, row_bytes(layout, w.shape[1]), *(layout.lut or (0,) * 16)]
    return np.array(out, np.int64)


def act_of(act) -> tuple[np.int64, np.float32]:
    """Number and threshold of an activation as `reference.sparse.sparse_ffn` takes it."""
    name, threshold = act if isinstance(act, tuple) else (act, 0.0)
    return np.int64(_ACTS[name]), np.float32(threshold)


def sparse_ffn(
    x_RD, keep_RF, gate, up, down_t, *,
    n_valid, norm=None, eps=0.0, act=None, up_act=None, residual=None, least=None,
):  # fmt: skip
    """`reference.sparse.sparse_ffn` by the C++ kernels."""
    sparse.check(x_RD, keep_RF, gate, up, down_t, act, up_act)
    rows = x_RD.shape[0]
    empty = jnp.zeros((0,), jnp.float32)
    counts = jax.ShapeDtypeStruct((rows,), jnp.int32)
    one = jax.ShapeDtypeStruct((), jnp.int32)
    shapes = (jax.ShapeDtypeStruct(x_RD.shape, jnp.float32), counts, one, counts, one)
    (kind, threshold), (up_kind, up_threshold) = act_of(act), act_of(up_act)
    y_RD, *stats = cpu._call("specsparse_sparse_ffn", shapes)(
        x_RD,
        keep_RF,
        jnp.zeros((0,), jnp.uint8) if gate is None else gate.data,
        up.data,
        down_t.data,
        empty if norm is None else norm,
        empty if residual is None else residual,
        n_valid,
        jnp.zeros((), jnp.float32) if least is None else least,
        description=describe(up, down_t, *([] if gate is None else [gate])),
        act=kind,
        threshold=threshold,
        up_act=up_kind,
        up_threshold=up_threshold,
        eps=np.float32(eps),
    )
    return y_RD, SparseStats(*stats)


def signbit_keep(x_RD, signs, *, threshold, n_valid):
    """`reference.sparse.signbit_keep` by the C++ kernels; the same neurons."""
    sparse.check_signs(x_RD, signs)
    shape = jax.ShapeDtypeStruct((x_RD.shape[0], signs.shape[0]), jnp.uint8)
    call = cpu._call("specsparse_signbit_keep", shape)
    return call(x_RD, signs.data, n_valid, jnp.asarray(threshold, jnp.float32))
