"""Every tolerance of the suite that is not zero, in one place. A test may be tightened here, never loosened to pass.

NMSE is |got - wanted|^2 / |wanted|^2.
"""

import numpy as np

LINEAR_NMSE = {
    "float": 1e-12,  # float weights or float kernels: the same products, added up in another order
    "plain": 1e-4,
    "qkv": 1e-4,
    "residual": 1e-4,
    "silu": 1.5e-4,
    "relu": 1.5e-4,  # two factors with an error each
    "biased": 1.5e-4,
    "relu2": 2e-4,  # three
}
"""A product against float64, by call of `tests/kernels/test_kernels.py`; quantised weights where not "float": the
native kernels then round activations to int8, which costs 1/12 of a step of max|x| / 127, squared, over x^2."""

EXPERTS_NMSE = {"float": 1e-12, "rounded": 3e-4}
"""Weighted sums of experts against float64; "rounded": native on quantised weights, where rows and hidden neurons are
rounded to int8."""

SPARSE_NMSE = {"reglu": 2e-4, "drelu": 2e-4, "swiglu": 2e-4, "fatrelu": 2e-4, "relu2": 2e-4, "linear": 1e-4}
"""A sparse FFN on quantised weights against float64, by kind: one rounding of the row for each factor."""

ATTEND_NMSE = {"native": 1e-12, "reference": 1e-12, "xla": 1e-12, "keys": 1e-7}
"""Attention against float64 by implementation; "keys" are keys in the cache, where XLA may fuse the rotation's products
and so change the last bit before it rounds to the cache's type."""

FORWARD_NMSE = {"f32": 1e-11, "F32/f16": 1e-6, "F32/bf16": 5e-5, "Q8_0/f16": 1e-3, "Q8_0/bf16": 1e-3}
"""Logits of a tiny model against float64, by weights and cache; "f32" is both, with any kernels."""

PEER_NMSE = 1e-11
"""Logits of a float32 file with a float32 cache against llama.cpp."""
PEER_GELU_NMSE = 1e-7
"""The same where the FFN has GELU, which llama.cpp reads from a table of half floats; measured 8e-9, and 1e-13 with
SiLU. Against transformers such files keep `FORWARD_NMSE`."""

HEAD_NMSE = 1e-10
"""Rows and logits of a float32 head with a float32 cache against the library that published the format."""

MESH_NMSE = {"f32": 1e-11, "quantised": 2e-4}
"""Logits of a model over several devices against one, by weights: sums over columns are rounded in another order, and
int8 activations of quantised weights turn some last bits into a step of 1/127."""

PROBS_RTOL = 2e-6
"""A probability of the native distribution against the jnp one: two roundings of exp, and of the sums."""


def nmse(got, wanted) -> float:
    """|got - wanted|^2 / |wanted|^2 in float64."""
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    return float(np.sum((got - wanted) ** 2) / max(np.sum(wanted**2), 1e-300))
