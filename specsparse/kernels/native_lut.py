"""The look-up kernels by C++ behind `jax.ffi`, with the signature of `reference_lut`. No model runs on them."""

import ctypes
import functools

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.errors import UserError
from specsparse.kernels import native_cpu, reference_lut
from specsparse.kernels.planes import BitPlanes
from specsparse.kernels.reference_lut import SUMS, Sums

_TARGET = "specsparse_lut_linear"


@functools.cache
def _registered() -> bool:
    """Registers the call, apart from those of a forward pass; UserError where there is none to register."""
    if not native_cpu.available():
        raise UserError(f"the native kernels are not there ({native_cpu.why_missing()}); build them with `make native`")
    library = ctypes.CDLL(str(native_cpu.LIBRARY))
    if not hasattr(library, _TARGET):
        name = native_cpu.LIBRARY.name
        raise UserError(f"{name} has no look-up kernels: build it again with `make native`")
    jax.ffi.register_ffi_target(_TARGET, jax.ffi.pycapsule(getattr(library, _TARGET)), platform="cpu")
    return True


def lut_linear(x_RD: jax.Array, w: BitPlanes, *, sums: Sums = "int16", residual: jax.Array | None = None) -> jax.Array:
    """`reference_lut.lut_linear` by the C++ kernels; with "int16" sums `native_cpu.linear`, bit for bit.

    Raises:
        UserError: an unknown `sums`, shapes that do not fit, or kernels that were not built.
    """
    reference_lut.check(x_RD, w, sums, residual)
    _registered()
    call = jax.ffi.ffi_call(_TARGET, jax.ShapeDtypeStruct((x_RD.shape[0], w.shape[0]), jnp.float32))
    return call(
        x_RD,
        w.data,
        jnp.zeros((0,), jnp.float32) if residual is None else residual,
        description=native_cpu._describe((w,)),
        sums=np.int64(SUMS.index(sums)),
    )
