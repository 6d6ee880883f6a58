"""Records that describe matrices and layers to the C++ kernels, field by field the structs of csrc/dense/descriptor.h.

A change of these records, or of a call's operands, raises the version in both files.
"""

import numpy as np

VERSION = 8


def _record(*fields: str, **more: int) -> np.dtype:
    return np.dtype([(name, "i8") for name in fields] + [(name, "i8", (count,)) for name, count in more.items()])


MATRIX = _record("codes", "scales", "sub", "zero", "rows", "cols", "bytes", "data", "bias", lut=16)
"""A packed matrix: `bytes` of a group of rows or of one neuron, places of data and bias among a call's further operands
(-1 for no bias), and a table, all 0 if codes are their own values."""

NORMS = ("attn_norm", "ffn_norm", "attn_q_norm", "attn_k_norm", "post_attention_norm", "post_ffw_norm")
PROJECTIONS = ("attn_q", "attn_k", "attn_v", "attn_output")
FFN = ("ffn_gate", "ffn_up", "ffn_down")

LAYER = _record(
    *NORMS,  # operands
    *PROJECTIONS,  # matrices
    *FFN,  # matrices; rows of neurons if these are predicted
    "keys", "values",  # operands
    "window", "table",
    "up_rows", "down_blocks",  # operands, if zeros are skipped or neurons masked
    "gate_rows",  # operand, if neurons are masked
    "first", "second",  # matrices of a predictor
    "signs", "threshold", "least", "predictor_norm",  # its operands
)  # fmt: skip
"""A layer, with the names of `engine.weights.Layer`. -1 is an operand or a matrix that it does not have."""
