"""PowerInfer's roundings on a CPU, for parity with its logits.

Its graph is llama.cpp's of November 2023: the right-hand side of a product is cast to the type that the weights' dot
product takes (F16, or blocks of 32 int8 codes), keys, values, queries and probabilities are F16, and exp and SiLU come
from tables of F16. For comparing, not for speed.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from specsparse.engine.gguf.reader import GGUFFile
from specsparse.errors import UserError
from specsparse.kernels import Kernels
from specsparse.kernels.reference import dense
from specsparse.kernels.reference.dense import activate

FLOAT_TYPES = ("Q6_K",)
"""Types to keep as float32: the native kernels would round the rounded side again, in blocks of 32. For the others
that changes nothing: a block of rounded codes has its largest at 127, so the second rounding finds the same codes."""


def faithful(kernels: Kernels) -> Kernels:
    """`kernels` with PowerInfer's roundings around them; the type of a matrix is its layout's `source`."""

    def linear(x, weights, *, n_valid, norm=None, eps=0.0, biases=None, residual=None, act=None, zeros=True):
        z = x if norm is None else jax.lax.map(lambda row: _normalise(row, norm, eps), x)
        outs = []
        for i, w in enumerate(weights):
            bias = None if biases is None else (biases[i],)
            outs += kernels.linear(_ROUNDED[w.layout.source](z), (w,), biases=bias, n_valid=n_valid, zeros=zeros)
        if act is not None:
            outs = [_activate(outs[0], act) * outs[1]]
        return tuple(outs) if residual is None else (outs[0] + residual,)

    attend = functools.partial(dense.attend, attend_row=_attend_row)
    return dataclasses.replace(kernels, linear=linear, attend=attend, layers=None)


def check_types(f: GGUFFile) -> None:
    """Refuses, with a UserError, a file with a type of weights whose rounding is not known."""
    for t in f.tensors.values():
        if t.type.name not in _ROUNDED:
            raise UserError(
                f"{f.path}: tensor '{t.name}' has type {t.type.name}: faithful_f16 knows {', '.join(_ROUNDED)}; "
                "load without it"
            )


def round_f16(x):
    """float32 rounded to F16, subnormals too; XLA drops a pair of casts, so it is done on the bits of the integers."""
    y = jax.lax.reduce_precision(x, 5, 10)
    tiny = jnp.round(x * jnp.float32(2.0**24)) * jnp.float32(2.0**-24)
    return jnp.where(jnp.abs(x) < jnp.float32(2.0**-14), tiny, y)


def round_q8_0(x):
    """Blocks of 32: codes round(127 x / max|x|), scale max|x| / 127 in F16."""
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    most = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True)
    inverse = jnp.where(most > 0, jnp.float32(127) / jnp.where(most > 0, most, jnp.float32(1)), jnp.float32(0))
    return (jnp.round(blocks * inverse) * round_f16(most / jnp.float32(127))).reshape(x.shape)


def round_q8_k(x):
    """Super-blocks of 256: the element of largest magnitude becomes -128, the scale is float32."""
    blocks = x.reshape(*x.shape[:-1], -1, 256)
    at = jnp.argmax(jnp.abs(blocks), axis=-1, keepdims=True)
    most = jnp.take_along_axis(blocks, at, axis=-1)
    live = most != jnp.float32(0)
    inverse = jnp.where(live, jnp.float32(-128) / jnp.where(live, most, jnp.float32(1)), jnp.float32(0))
    codes = jnp.minimum(jnp.round(blocks * inverse), jnp.float32(127))
    scale = jnp.where(live, jnp.float32(1) / jnp.where(live, inverse, jnp.float32(1)), jnp.float32(0))
    return (codes * scale).reshape(x.shape)


_ROUNDED = {
    "F32": lambda x: x,
    "F16": round_f16,
    "Q4_0": round_q8_0,
    "Q5_0": round_q8_0,
    "Q8_0": round_q8_0,
    "Q6_K": round_q8_k,
}
"""Rows f32[R, K] as a product sees them, by the type of the weights."""


def _normalise(row, norm, eps):
    scale = jnp.float32(1) / jnp.sqrt(jnp.mean(row * row) + jnp.float32(eps))
    return row * scale * norm


def _activate(x, act):
    """SiLU comes from a table of F16."""
    return round_f16(activate(round_f16(x), act)) if act == "silu" else activate(x, act)


def _attend_row(q_HD, keys_GCd, values_GCd, path_C):
    """One query over its path, with every operand of a product in F16 and exp rounded to it on both sides."""
    keys, values, live = dense.gather_path(keys_GCd, values_GCd, path_C, jnp.sum(path_C))
    groups, d = keys.shape[0], keys.shape[-1]
    q = round_f16(q_HD.reshape(groups, -1, d))
    scores = jnp.einsum("ghd,gcd->ghc", q, keys, precision=jax.lax.Precision.HIGHEST)
    scores = scores * (jnp.float32(1) / jnp.sqrt(jnp.float32(d)))
    scores = jnp.where(live[None, None], scores, -jnp.inf)
    below = jnp.maximum(scores - jnp.max(scores, axis=-1, keepdims=True), jnp.float32(-60))  # exp(-60) is 0 in F16
    p = jnp.where(live[None, None], round_f16(jnp.exp(round_f16(below))), jnp.float32(0))
    p = round_f16(p * (jnp.float32(1) / jnp.sum(p, axis=-1, keepdims=True)))
    values = jnp.where(live[None, :, None], values, jnp.float32(0))
    return jnp.einsum("ghc,gcd->ghd", p, values, precision=jax.lax.Precision.HIGHEST).reshape(-1)
