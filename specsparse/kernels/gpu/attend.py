"""Which attention a program has: one kernel on a card that has its instructions, XLA's operations elsewhere."""

import jax

from specsparse.kernels.reference import dense


def attend(*args: jax.Array, compiled: bool | None = None, **options) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`reference.dense.attend_batched` of a cache that holds finite numbers alone.

    `compiled` says whether programs are for a card with the kernel (Hopper or newer); by default whether there is one.
    """
    if _has_kernels() if compiled is None else compiled:
        from specsparse.kernels.gpu.attention import core  # only a GPU needs Pallas

        options["core"] = core
    return dense.attend_batched(*args, finite=True, **options)


def _has_kernels() -> bool:
    """Whether the default device is a Hopper card or a newer one."""
    if jax.default_backend() != "gpu":
        return False
    return float(getattr(jax.devices()[0], "compute_capability", 0) or 0) >= 9.0
