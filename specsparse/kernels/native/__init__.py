"""The kernels in C++ behind `jax.ffi`."""
