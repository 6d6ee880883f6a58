"""The sparse kernels in jnp: definition, oracle and fallback. Every neuron is computed, and only the kept ones count.

As in `reference.dense`, activations stay in float32 here, while the native kernels round them to int8 for quantised
weights, and by default rows are mapped one by one (contract C1).
"""

import jax
import jax.numpy as jnp

from specsparse.errors import UserError
from specsparse.kernels.neurons import NeuronRows, SignRows, SparseStats, unpack_neurons
from specsparse.kernels.reference import dense


def check(x_RD, keep_RF, gate: NeuronRows | None, up: NeuronRows, down_t: NeuronRows, act, up_act) -> None:
    """Asserts that shapes go together. UserError: an activation that no sparse FFN has, such as a model's GELU."""
    assert up.shape == down_t.shape and (gate is None or gate.shape == up.shape), up.shape
    assert x_RD.shape == (keep_RF.shape[0], up.shape[1]) and keep_RF.shape[1] == up.shape[0], keep_RF.shape
    assert keep_RF.dtype == jnp.uint8, keep_RF.dtype
    assert gate is not None or up_act is None, up_act
    for one in (act, up_act):
        if not isinstance(one, tuple) and one not in (None, "relu", "silu", "relu2"):
            raise UserError(f"activation {one!r}: a sparse FFN has relu, silu, relu2, ('fatrelu', t) or None")


def sparse_ffn(
    x_RD, keep_RF, gate, up, down_t, *,
    n_valid, norm=None, eps=0.0, act=None, up_act=None, residual=None, least=None, over_rows=dense.rowwise,
):  # fmt: skip
    """y = sum over kept neurons j, ascending, of act(gate_j z) * up_act(up_j z) * down_j, with z = rmsnorm(x) * norm.

    The FFN of PowerInfer (arXiv:2312.12456, section 5) with any predictor: neurons that no row keeps are not read, and
    of those with act(gate_j z) = 0 only the gate is.

    Args:
        x_RD: f32[R, D].
        keep_RF: uint8[R, F]; neurons with a mask other than 0 are computed.
        gate: NeuronRows [F, D], or None for an FFN without gate: a = act(up z).
        up, down_t: NeuronRows [F, D]; row j of down_t is column j of the down projection.
        norm: f32[D] weight of an RMS norm before the products, or None for z = x; `eps` belongs to it.
        n_valid: int32[B]; rows i >= n_valid[b] of sequence b come out as zeros and keep nothing.
        act: None, "relu", "silu", "relu2" or ("fatrelu", t): x if x > t, else 0.
        up_act: the same for up.
        residual: f32[R, D] that the sum is added to, or None.
        least: f32[]; neurons with |act(gate_j z)| below it are left out (CATS, arXiv:2404.08763, eq. 3). None for 0.
        over_rows: `dense.rowwise` or `dense.at_once`.

    Returns:
        f32[R, D] and `SparseStats`.
    """
    check(x_RD, keep_RF, gate, up, down_t, act, up_act)
    gate_FD, up_FD, down_FD = (None if w is None else unpack_neurons(w) for w in (gate, up, down_t))
    live_R = dense.valid(n_valid, x_RD.shape[0])
    keep_RF = (keep_RF != jnp.uint8(0)) & live_R[:, None]

    def product(x, w_FD):
        return jnp.einsum("...d,fd->...f", x, w_FD, precision=dense.HIGHEST)

    def ffn(x, keep):
        z = x if norm is None else dense.rms_norm(x, norm, eps)
        a = dense.activate(product(z, up_FD if gate is None else gate_FD), act)
        a = jnp.where(keep if least is None else keep & ~(jnp.abs(a) < least), a, jnp.float32(0))
        if gate is not None:
            a = jnp.where(a == jnp.float32(0), a, a * dense.activate(product(z, up_FD), up_act))
        return jnp.einsum("...f,fd->...d", a, down_FD, precision=dense.HIGHEST), a != jnp.float32(0)

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


def signs_alike(x_RD, signs: SignRows):
    """How many products x_rk w_jk are positive by the signs of their factors, f32[R, F]; below 0 is negative."""
    assert x_RD.shape[1] == signs.shape[1], (x_RD.shape, signs.shape)
    bits = jnp.packbits(x_RD < jnp.float32(0), axis=1, bitorder="little")
    bits = jnp.pad(bits, ((0, 0), (0, signs.data.shape[1] - bits.shape[1])))

    def one(row):
        counts = jax.lax.population_count(signs.data ^ row[None]).astype(jnp.int32)
        return (signs.shape[1] - jnp.sum(counts, axis=1)).astype(jnp.float32)

    return dense.rowwise(one, bits)


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
    """
    keep = (signs_alike(x_RD, signs) >= threshold) & dense.valid(n_valid, x_RD.shape[0])[:, None]
    return keep.astype(jnp.uint8)
