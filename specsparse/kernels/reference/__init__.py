"""The kernels in jnp: definition, oracle and fallback."""
