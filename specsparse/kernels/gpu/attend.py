"""Which attention a program has: one kernel on a card that has its instructions, XLA's operations elsewhere."""

import jax

from specsparse.kernels.gpu.card import has_kernels
from specsparse.kernels.reference import dense


def attend(*args: jax.Array, compiled: bool | None = None, **options) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`reference.dense.attend_batched` of a cache that holds finite numbers alone.

    `compiled` says whether programs are for a card with the kernel; by default whether there is one (`has_kernels`).
    """
    if has_kernels() if compiled is None else compiled:
        from specsparse.kernels.gpu.attention import core  # only a GPU needs Pallas

        options["core"] = core
    return dense.attend_batched(*args, finite=True, **options)
