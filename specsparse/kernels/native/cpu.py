"""The C++ kernels behind `jax.ffi`: loading, registration, and calls with the reference's signatures."""

import ctypes
import functools
import os
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.errors import UserError
from specsparse.kernels.qtensor import QTensor
from specsparse.kernels.reference import dense
from specsparse.kernels.reference.q8_cache import head_size
from specsparse.support.options import shown

LIBRARY = Path(__file__).parents[1] / "libspecsparse_kernels.so"
OPERATIONS = (
    "linear", "add_normed", "embed", "attend", "layers", "argmax", "check", "law", "draw_token", "sample", "propose",
    "judge", "sparse_ffn", "signbit_keep",
)  # fmt: skip

ISAS = ("portable", "avx2", "avxvnni", "avx512", "amx")
"""Instruction sets that kernels are written for; the widest that the processor has is taken."""
_USE = f"use {', '.join(ISAS[:-1])} or {ISAS[-1]}"

_DIGITS = 9
"""Of a number of threads or microseconds, at most."""

_CODES = ("nibble", "int8", "f32", "f16", "bf16")
_SCALES = ("none", "d", "dm", "f32", "super", "super_min")
ACTS = {None: 0, "silu": 1, "relu": 2, "relu2": 3, "gelu_tanh": 4}


@functools.cache
def _opened() -> ctypes.CDLL | str:
    """The library, or one line on why there is none."""
    if not LIBRARY.exists():
        return f"{LIBRARY.name} was not built"
    try:
        return ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        return f"{LIBRARY.name} cannot be loaded: {' '.join(str(error).split())}"


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, set up as the environment asks, or None.

    Raises:
        UserError: an older build, or a bad SPECSPARSE_ISA, SPECSPARSE_THREADS or SPECSPARSE_SPIN_US.
    """
    opened = _opened()
    if isinstance(opened, str):
        return None
    opened.specsparse_isa.restype = ctypes.c_char_p
    opened.specsparse_set_isa.argtypes = [ctypes.c_char_p]
    for operation in OPERATIONS:
        _register(opened, f"specsparse_{operation}")
    wanted = os.environ.get("SPECSPARSE_ISA")
    if wanted and not opened.specsparse_set_isa(wanted.encode()):
        raise UserError(f"SPECSPARSE_ISA={wanted}: this processor or build has no such kernels; {_USE}")
    count = os.environ.get("SPECSPARSE_THREADS")
    if count:
        _check_threads(count)
        opened.specsparse_set_threads(int(count))
    spin = os.environ.get("SPECSPARSE_SPIN_US")
    if spin and not (spin.isascii() and spin.isdecimal() and len(spin) <= _DIGITS):
        raise UserError(f"SPECSPARSE_SPIN_US={shown(spin)}: microseconds from 0 to 999999999 are needed")
    return opened


def symbol(library: ctypes.CDLL, name: str) -> Callable[..., object]:
    """A function of the library.

    Raises:
        UserError: an older build, which does not have it.
    """
    if not hasattr(library, name):
        raise UserError(f"{LIBRARY.name} is older than this checkout: build it again with `make native`")
    return getattr(library, name)


def _register(library: ctypes.CDLL, target: str) -> None:
    jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(symbol(library, target)), platform="cpu")


@functools.cache
def register(target: str) -> None:
    """Makes a call known to JAX that is none of a forward pass's `OPERATIONS`.

    Raises:
        UserError: no native kernels, or a library without it.
    """
    _register(_needed(), target)


def available() -> bool:
    """Whether the compiled kernels are there."""
    return library() is not None


def why_missing() -> str | None:
    """One line on why `available()` is false, or None."""
    opened = _opened()
    return opened if isinstance(opened, str) else None


def isa() -> str | None:
    """The instruction set in use, one of `ISAS`."""
    return found.specsparse_isa().decode() if (found := library()) else None


def why_no_amx() -> str | None:
    """One line on why products of many rows do not use AMX's tiles; None where the system lets them."""
    if (found := library()) is None:
        return why_missing()
    call = symbol(found, "specsparse_why_no_amx")
    call.restype = ctypes.c_char_p
    reason = call()
    return reason.decode() if reason else None


def set_isa(name: str) -> None:
    """Switches the instruction set of this process; raises UserError where the processor lacks it."""
    if (found := library()) is None or not found.specsparse_set_isa(name.encode()):
        raise UserError(f"this processor or build has no {name!r} kernels; {_USE}")


def threads() -> int | None:
    """Threads that share a kernel's work."""
    return found.specsparse_threads() if (found := library()) else None


def _check_threads(count) -> None:
    digits = isinstance(count, str) and count.isdecimal() and len(count) <= _DIGITS
    if not (isinstance(count, int) or digits) or isinstance(count, bool) or not 1 <= int(count) <= 64:
        raise UserError(f"threads={shown(count)}: an integer from 1 to 64 is needed")


def set_threads(count: int) -> None:
    """Sets the number of threads; results do not depend on it."""
    _check_threads(count)
    if found := library():
        found.specsparse_set_threads(count)


@functools.cache
def _packer() -> Callable[..., int] | None:
    if (found := library()) is None:
        return None
    call = symbol(found, "specsparse_pack")
    call.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_int64] * 7
    return call


def pack(out: np.ndarray, raw: np.ndarray, *, item: int = 0, scales: int = 0, words: int = 0, bits: int = 0) -> bool:
    """Packs rows as `packing.pack` does, where the kernels are there and can.

    Args:
        out: uint8[groups, bytes], contiguous; filled.
        raw: uint8[rows, bytes of a row], contiguous.
        item: bytes of a float, or 0 for blocks.
        scales, words: float16 scales that a block begins with, and words of four bytes of codes behind them.
        bits: of a code of Q4_K, Q5_K or Q6_K, in place of these.

    Returns:
        Whether it did; other threads run meanwhile.
    """
    call, kind = _packer(), (item, scales, words, bits)
    return call is not None and bool(call(out.ctypes.data, raw.ctypes.data, *raw.shape, *kind, out.shape[1]))


def describe(weights: tuple[QTensor, ...]) -> np.ndarray:
    """int64[23 * len(weights)]: what `Description::read` (dense/linear.cc) reads of each matrix (or its bit planes)."""
    rows = []
    for w in weights:
        layout, (out, cols) = w.layout, w.shape
        head = [_CODES.index(layout.codes), _SCALES.index(layout.scales), layout.sub, layout.zero]
        rows += [*head, out, cols, layout.group_bytes(cols), *(layout.lut or (0,) * 16)]
    return np.array(rows, np.int64)


def _needed() -> ctypes.CDLL:
    if (found := library()) is None:
        raise UserError(f"the native kernels are not there ({why_missing()}); build them with `make native`")
    return found


def _call(target: str, shapes, **options):
    _needed()
    return jax.ffi.ffi_call(target, shapes, **options)


def linear(x, weights, *, n_valid, norm=None, eps=0.0, biases=None, residual=None, act=None, zeros=True):
    """`reference.dense.linear` by the C++ kernels."""
    empty = jnp.zeros((0,), jnp.float32)
    outs = weights[:1] if act else weights
    shapes = tuple(jax.ShapeDtypeStruct((x.shape[0], w.shape[0]), jnp.float32) for w in outs)
    pairs = []
    for i, w in enumerate(weights):
        bias = biases[i] if biases is not None else None
        pairs += [w.data, empty if bias is None else bias]
    call = _call("specsparse_linear", shapes)
    return tuple(
        call(
            x,
            empty if norm is None else norm,
            empty if residual is None else residual,
            n_valid,
            *pairs,
            description=describe(weights),
            act=np.int64(ACTS[act]),
            eps=np.float32(eps),
            zeros=np.int64(zeros),
        )
    )


def add_normed(x, y, norm, *, n_valid, eps):
    """`reference.dense.add_normed` by the C++ kernels."""
    call = _call("specsparse_add_normed", jax.ShapeDtypeStruct(x.shape, jnp.float32))
    return call(x, y, norm, n_valid, eps=np.float32(eps))


def embed(w, ids):
    """`reference.dense.embed` by the C++ kernels."""
    call = _call("specsparse_embed", jax.ShapeDtypeStruct((ids.shape[0], w.shape[1]), jnp.float32))
    return call(w.data, ids, description=describe((w,)))


def attend(
    q, k, v, cache_k, cache_v, *,
    cos, sin, length, n_valid, parents=None, pairing="norm", q_norm=None, k_norm=None, eps=0.0, window=0, table=0,
):  # fmt: skip
    """`reference.dense.attend` by the C++ kernels; a head size that is no multiple of 16 takes the reference."""
    if head_size(cache_v) % 16:
        return dense.attend(
            q, k, v, cache_k, cache_v, cos=cos, sin=sin, length=length, n_valid=n_valid, parents=parents,
            pairing=pairing, q_norm=q_norm, k_norm=k_norm, eps=eps, window=window, table=table,
        )  # fmt: skip
    shapes = (
        jax.ShapeDtypeStruct(q.shape, jnp.float32),
        jax.ShapeDtypeStruct(cache_k.shape, cache_k.dtype),
        jax.ShapeDtypeStruct(cache_v.shape, cache_v.dtype),
    )
    call = _call("specsparse_attend", shapes, input_output_aliases={3: 1, 4: 2})
    empty = jnp.zeros((0,), jnp.float32)
    return call(
        q,
        k,
        v,
        cache_k,
        cache_v,
        cos,
        sin,
        length,
        n_valid,
        jnp.zeros((0,), jnp.int32) if parents is None else parents,
        empty if q_norm is None else q_norm,
        empty if k_norm is None else k_norm,
        neox=np.int64(pairing == "neox"),
        window=np.int64(window),
        table=np.int64(table),
        eps=np.float32(eps),
    )


def argmax(x):
    """`reference.dense.argmax` by the C++ kernels."""
    return _call("specsparse_argmax", jax.ShapeDtypeStruct(x.shape[:1], jnp.int32))(x)


def check(logits_RV):
    """`SamplingKernels.check` (see `engine.sampling.row_probs`) by the C++ kernels."""
    return _call("specsparse_check", jax.ShapeDtypeStruct(logits_RV.shape[:1], jnp.bool_))(logits_RV)


def probs(logits_RV, rows, **_):
    """`engine.sampling.row_probs.reference_probs` by the C++ kernels; `rows` are its ProbRows."""
    call = _call("specsparse_law", jax.ShapeDtypeStruct(logits_RV.shape, jnp.float32))
    return call(logits_RV, rows.temperature, rows.log_min_p, rows.top_k, rows.top_p)


def draw(p_RV, u_RU):
    """`engine.sampling.row_probs.reference_draw` by the C++ kernels: the same tree of sums, the same token."""
    return _call("specsparse_draw_token", jax.ShapeDtypeStruct(p_RV.shape[:1], jnp.int32))(p_RV, u_RU)


def sample(logits_RV, probs, n_valid_B, u_RU=None, tokens_R=None):
    """`check`, `probs` and `draw` of the rows that count (see `SamplingKernels.sample`) by the C++ kernels."""
    R = logits_RV.shape[:1]
    shapes = tuple(jax.ShapeDtypeStruct(R, dtype) for dtype in (jnp.int32, jnp.bool_, jnp.float32))
    u_RU = jnp.zeros((0, 4), jnp.float32) if u_RU is None else u_RU
    tokens_R = jnp.zeros((0,), jnp.int32) if tokens_R is None else tokens_R
    return tuple(_call("specsparse_sample", shapes)(logits_RV, *probs, u_RU, tokens_R, n_valid_B))


def propose(logits_RN, probs, u_RU, ids_N, size):
    """`SamplingKernels.propose` (see `engine.sampling.row_probs`) by the C++ kernels."""
    R = logits_RN.shape[:1]
    shapes = [jax.ShapeDtypeStruct(R, dtype) for dtype in (jnp.int32, jnp.bool_)]
    shapes.append(jax.ShapeDtypeStruct((*R, size), jnp.float32))
    ids_N = jnp.zeros((0,), jnp.int32) if ids_N is None else ids_N
    return tuple(_call("specsparse_propose", shapes)(logits_RN, *probs, u_RU, ids_N))


def judge(rows_RV, probs, n_valid_B, tokens_BK, q_BKV, coins_BK, u_BU, *, whole):
    """`SamplingKernels.judge` (see `engine.sampling.row_probs`) by the C++ kernels."""
    B = n_valid_B.shape
    shapes = [jax.ShapeDtypeStruct(B, dtype) for dtype in (jnp.int32, jnp.int32, jnp.bool_)]
    shapes.append(jax.ShapeDtypeStruct(tokens_BK.shape, jnp.float32))
    empty = jnp.zeros((0,), jnp.float32)
    probs = (empty, empty, jnp.zeros((0,), jnp.int32), empty) if probs is None else probs
    call = _call("specsparse_judge", shapes)
    q_BKV = empty if q_BKV is None else q_BKV
    return tuple(call(rows_RV, *probs, n_valid_B, tokens_BK, q_BKV, coins_BK, u_BU, whole=np.int64(whole)))
