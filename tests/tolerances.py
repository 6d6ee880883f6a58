"""Every tolerance of the suite that is not zero, in one place. A test may be tightened here, never loosened to pass.

NMSE is |a - b|^2 / |b|^2, b the reference.
"""

import numpy as np

LINEAR_NMSE = {
    "f32": 1e-12,  # the same products, added up in another order
    "f16": 1e-12,
    "bf16": 1e-12,
    "quantised": 1e-4,  # the native kernels round activations to int8: 1/12 of a step of max|x|/127, squared, over x^2
}
"""Native or xla product against the float reference, by codes of the weights."""

ATTEND_NMSE = {"f32": 1e-12, "f16": 1e-6, "bf16": 5e-5}
"""Attention against float64 by cache type: what rounding keys and values to the cache's type costs."""

LAW_NMSE = 1e-12
FORWARD_NMSE = {"reference": 1e-11, "native_float": 1e-6}
"""Logits of a whole float32 model against float64 numpy; the native kernels with the default f16 cache."""


def nmse(got, wanted) -> float:
    """|got - wanted|^2 / |wanted|^2 in float64."""
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    return float(np.sum((got - wanted) ** 2) / max(np.sum(wanted**2), 1e-300))
