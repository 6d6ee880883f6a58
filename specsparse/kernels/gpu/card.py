"""Which cards run our kernels."""

import jax


def has_kernels() -> bool:
    """Whether the default device is a card that Mosaic GPU compiles for: Hopper or newer; else XLA's products serve."""
    if jax.default_backend() != "gpu":
        return False
    return float(getattr(jax.devices()[0], "compute_capability", 0) or 0) >= 9.0
