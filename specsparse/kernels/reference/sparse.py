"""The sparse kernels in jnp: definition, oracle and fallback. Every neuron is computed, and only the kept ones count.

As in `reference`, activations stay in float32 here, while the native kernels round them to int8 for quantised weights,
and rows are mapped one by one, so that a row's bits do not depend on its neighbours (contract C1).
"""

import jax
import jax.numpy as jnp

from specsparse.errors import UserError
from specsparse.kernels.neurons import NeuronRows, SparseStats, unpack_neurons
from specsparse.kernels.packing.signbits import SignRows
from specsparse.kernels.reference import dense

ACTS = (None, "relu", "silu", "relu2")


def apply(x, act):
    """act(x): x itself for None, ("fatrelu", t) is x where x > t, else 0; the others as `dense.activate`."""
    if act is None:
        return x
    if isinstance(act, tuple):
        return jnp.where(x > jnp.float32(act[1]), x, jnp.float32(0))
    return dense.activate(x, act)


def check(x_RD, keep_RF, gate: NeuronRows | None, up: NeuronRows, down_t: NeuronRows, act, up_act) -> None:
    """UserError where shapes or activations do not go together."""
    shapes = {"up": up.shape, "down_t": down_t.shape, **({"gate": gate.shape} if gate is not None else {})}
    if len(set(shapes.values())) > 1:
        raise UserError(f"a sparse FFN needs matrices of one shape [neurons, width]; these are {shapes}")
    if x_RD.shape != (keep_RF.shape[0], up.shape[1]) or keep_RF.shape[1] != up.shape[0]:
        raise UserError(f"rows {x_RD.shape} and mask {keep_RF.shape} do not fit neurons {up.shape}")
    if keep_RF.dtype != jnp.uint8:
        raise UserError(f"the mask of kept neurons must be uint8, not {keep_RF.dtype}")
    for one in (act, up_act):
        if one not in ACTS and not (isinstance(one, tuple) and len(one) == 2 and one[0] == "fatrelu"):
            raise UserError(f"activation {one!r} does not exist; there are relu, silu, relu2, ('fatrelu', t) and None")
    if gate is None and up_act is not None:
        raise UserError("an FFN without gate has one activation: give it as act, not as up_act")


def _sparse_ffn(
    x_RD, keep_RF, gate, up, down_t, *,
    over_rows, n_valid, norm=None, eps=0.0, act=None, up_act=None, residual=None, least=None,
):  # fmt: skip
    check(x_RD, keep_RF, gate, up, down_t, act, up_act)
    gate_FD, up_FD, down_FD = (None if w is None else unpack_neurons(w) for w in (gate, up, down_t))
    live_R = dense.valid(n_valid, x_RD.shape[0])
    keep_RF = (keep_RF != jnp.uint8(0)) & live_R[:, None]

    def product(x, w_FD):
        return jnp.einsum("...d,fd->...f", x, w_FD, precision=dense._HIGHEST)

    def ffn(x, keep):
        z = x if norm is None else dense._normalise(x, norm, eps)
        a = apply(product(z, up_FD if gate is None else gate_FD), act)
        a = jnp.where(keep if least is None else keep & ~(jnp.abs(a) < least), a, jnp.float32(0))
        if gate is not None:
            a = jnp.where(a == jnp.float32(0), a, a * apply(product(z, up_FD), up_act))
        return jnp.einsum("...f,fd->...d", a, down_FD, precision=dense._HIGHEST), a != jnp.float32(0)

    y_RD, live_RF = over_rows(ffn, x_RD, keep_RF)
    if residual is not None:
        y_RD = residual + y_RD
    stats = SparseStats(
        kept=jnp.sum(keep_RF, axis=1, dtype=jnp.int32),
        union=jnp.sum(jnp.any(keep_RF, axis=0), dtype=jnp.int32),
        nonzero=jnp.sum(live_RF, axis=1, dtype=jnp.int32),
        active=jnp.sum(jnp.any(live_RF, axis=0), dtype=jnp.int32),
    )
    return jnp.where(live_R[:, None], y_RD, jnp.float32(0)), stats


def sparse_ffn(x_RD, keep_RF, gate, up, down_t, **options):
    """y = sum over kept neurons j, ascending, of act(gate_j z) * up_act(up_j z) * down_j, with z = rmsnorm(x) * norm.

    The FFN of PowerInfer (arXiv:2312.12456, section 5) with any predictor: neurons that no row keeps are not read, and
    of those whose act(gate_j z) is 0 only the gate is.

    Args:
        x_RD: f32[R, D].
        keep_RF: uint8[R, F]; neurons with a mask other than 0 are computed.
        gate: NeuronRows [F, D], or None for an FFN without gate: a = act(up z).
        up, down_t: NeuronRows [F, D]; row j of down_t is column j of the down projection.
        norm: f32[D] weight of an RMS norm before the products, or None for z = x; `eps` belongs to it.
        n_valid: int32[B]; rows i >= n_valid[b] of sequence b come out as zeros and keep nothing.
        act: None, "relu", "silu", "relu2" or ("fatrelu", t): x where x > t, else 0.
        up_act: the same for up.
        residual: f32[R, D] that the sum is added to, or None.
        least: f32[]; neurons with |act(gate_j z)| below it are left out (CATS, arXiv:2404.08763, eq. 3). None for 0.

    Returns:
        f32[R, D] and `SparseStats`.

    Raises:
        UserError: shapes or activations that do not go together.
    """
    return _sparse_ffn(x_RD, keep_RF, gate, up, down_t, over_rows=dense._rowwise, **options)


def sparse_ffn_batched(x_RD, keep_RF, gate, up, down_t, **options):
    """`sparse_ffn` as batched products."""
    return _sparse_ffn(x_RD, keep_RF, gate, up, down_t, over_rows=lambda f, *rows: f(*rows), **options)


def check_signs(x_RD, signs: SignRows) -> None:
    """UserError where the rows do not fit the bits."""
    if x_RD.shape[1] != signs.shape[1]:
        raise UserError(f"rows of width {x_RD.shape[1]} do not fit sign bits of width {signs.shape[1]}")


def signs_alike(x_RD, signs: SignRows):
    """How many products x_rk w_jk are positive by the signs of their factors, f32[R, F]; below 0 is negative."""
    check_signs(x_RD, signs)
    bits = jnp.packbits(x_RD < jnp.float32(0), axis=1, bitorder="little")
    bits = jnp.pad(bits, ((0, 0), (0, signs.data.shape[1] - bits.shape[1])))

    def one(row):
        counts = jax.lax.population_count(signs.data ^ row[None]).astype(jnp.int32)
        return (signs.shape[1] - jnp.sum(counts, axis=1)).astype(jnp.float32)

    return dense._rowwise(one, bits)


def signbit_keep(x_RD, signs: SignRows, *, threshold, n_valid):
    """Neurons whose gate is predicted to be positive from signs alone (SparseInfer, arXiv:2411.12692, eq. 2).

    keep = `signs_alike` >= threshold; SparseInfer's alpha * n_pos >= n_neg is the threshold D / (1 + alpha).

    Args:
        x_RD: f32[R, D]; below 0 counts as negative.
        signs: of the gate, with the norm's signs in it if x is not normalised (`pack_signs`).
        threshold: f32[].
        n_valid: int32[B]; rows i >= n_valid[b] of sequence b keep nothing.

    Returns:
        uint8[R, F].

    Raises:
        UserError: widths that differ.
    """
    keep = (signs_alike(x_RD, signs) >= threshold) & dense.valid(n_valid, x_RD.shape[0])[:, None]
    return keep.astype(jnp.uint8)
