"""The look-up kernels by C++ behind `jax.ffi`, with the signature of `reference.lut`. No model runs on them."""

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.kernels.native import cpu
from specsparse.kernels.packing.planes import BitPlanes
from specsparse.tools.bench.lut import reference as lut
from specsparse.tools.bench.lut.reference import SUMS, Sums

_TARGET = "specsparse_lut_linear"


def lut_linear(x_RD: jax.Array, w: BitPlanes, *, sums: Sums = "int16", residual: jax.Array | None = None) -> jax.Array:
    """`reference.lut.lut_linear` by the C++ kernels; with "int16" sums `native.cpu.linear`, bit for bit.

    Raises:
        UserError: an unknown `sums`, shapes that do not fit, or kernels that were not built.
    """
    lut.check(x_RD, w, sums, residual)
    cpu.register(_TARGET)
    call = jax.ffi.ffi_call(_TARGET, jax.ShapeDtypeStruct((x_RD.shape[0], w.shape[0]), jnp.float32))
    return call(
        x_RD,
        w.data,
        jnp.zeros((0,), jnp.float32) if residual is None else residual,
        description=cpu.describe((w,)),
        sums=np.int64(SUMS.index(sums)),
    )
