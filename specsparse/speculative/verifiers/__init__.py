"""The rules of verification, one function family per file.

Everything that decides (acceptance probabilities, residual laws) is written once for numpy and jax.numpy: the engine
runs it in float32 inside the jit, the certificate in float64 with exact weights instead of coins.
"""
