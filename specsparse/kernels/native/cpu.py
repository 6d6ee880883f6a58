"""The C++ kernels behind `jax.ffi`: loading, registration, and calls with the reference's signatures."""

import ctypes
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.errors import UserError
from specsparse.kernels.native.descriptor import MATRIX, VERSION
from specsparse.kernels.qtensor import Packed
from specsparse.kernels.reference import dense
from specsparse.kernels.reference.dense import LANES
from specsparse.kernels.reference.q8_cache import head_size
from specsparse.support.cgroup import cpus
from specsparse.support.options import shown

LIBRARY = Path(__file__).parents[1] / "libspecsparse_kernels.so"
OPERATIONS = (
    "linear", "choose", "experts", "add_normed", "embed", "attend", "layers", "argmax", "check", "probs", "draw_token",
    "sample", "propose", "judge", "sparse_ffn", "signbit_keep", "lut_linear",
)  # fmt: skip

ISAS = ("portable", "avx2", "avxvnni", "avx512", "amx")
"""Instruction sets of the kernels; by default the widest that the processor has."""
MOST_THREADS = 1024
"""`kMaxThreads` of csrc/pool/pool.h."""
_CODES = ("nibble", "int8", "f32", "f16", "bf16")
_SCALES = ("none", "d", "dm", "f32", "super", "super_min")
_GATINGS = ("softmax", "sigmoid", "chosen")
ACTS = {None: 0, "silu": 1, "relu": 2, "relu2": 3, "gelu_tanh": 4, "clamped_swiglu": 5}


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
    """The compiled kernels, set up as the environment asks, or None. UserError: a build of another version, or a bad
    SPECSPARSE_ISA, SPECSPARSE_THREADS or SPECSPARSE_SPIN_US."""
    opened = _opened()
    if isinstance(opened, str):
        return None
    if not hasattr(opened, "specsparse_version") or opened.specsparse_version() != VERSION:
        raise UserError(f"{LIBRARY.name} is of another version than this checkout: build it again with `make native`")
    for operation in OPERATIONS:
        handler = getattr(opened, f"specsparse_{operation}")
        jax.ffi.register_ffi_target(f"specsparse_{operation}", jax.ffi.pycapsule(handler), platform="cpu")
    opened.specsparse_isa.restype = opened.specsparse_why_no_amx.restype = ctypes.c_char_p
    opened.specsparse_set_isa.argtypes = [ctypes.c_char_p]
    opened.specsparse_pack.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_int64] * 7
    opened.specsparse_read_rate.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    opened.specsparse_int8_rate.argtypes = opened.specsparse_f32_rate.argtypes = [ctypes.c_double]
    for rate in (opened.specsparse_read_rate, opened.specsparse_int8_rate, opened.specsparse_f32_rate):
        rate.restype = ctypes.c_double
    if wanted := os.environ.get("SPECSPARSE_ISA"):
        _choose_isa(opened, wanted, f"SPECSPARSE_ISA={wanted}")
    count = os.environ.get("SPECSPARSE_THREADS") or min(cpus(), MOST_THREADS)
    opened.specsparse_set_threads(_whole_number("SPECSPARSE_THREADS", count, 1, MOST_THREADS))
    if spin := os.environ.get("SPECSPARSE_SPIN_US"):  # the library reads it itself
        _whole_number("SPECSPARSE_SPIN_US", spin, 0, 10**9 - 1)
    return opened


def _choose_isa(opened: ctypes.CDLL, name: str, label: str) -> None:
    if not opened.specsparse_set_isa(name.encode()):
        known = f"use {', '.join(ISAS[:-1])} or {ISAS[-1]}"
        raise UserError(f"{label}: this processor or build has no such kernels; {known}")


def _whole_number(name: str, value: int | str, low: int, high: int) -> int:
    text = str(value)
    if not (text.isascii() and text.isdecimal() and len(text) <= 9 and low <= int(text) <= high):
        raise UserError(f"{name}={shown(value)}: an integer from {low} to {high} is needed")
    return int(text)


def available() -> bool:
    return library() is not None


def why_missing() -> str | None:
    """One line on why `available()` is false, or None."""
    opened = _opened()
    return opened if isinstance(opened, str) else None


def needed() -> ctypes.CDLL:
    """The compiled kernels. Raises UserError if they are missing."""
    if (found := library()) is None:
        raise UserError(f"the native kernels are not there ({why_missing()}); build them with `make native`")
    return found


def isa() -> str | None:
    """The instruction set in use, one of `ISAS`."""
    return found.specsparse_isa().decode() if (found := library()) else None


def why_no_amx() -> str | None:
    """One line on why products of many rows do not use AMX's tiles, or None if they may."""
    if (found := library()) is None:
        return why_missing()
    reason = found.specsparse_why_no_amx()
    return reason.decode() if reason else None


def set_isa(name: str) -> None:
    """Switches the instruction set of this process; raises UserError if the processor lacks it."""
    _choose_isa(needed(), name, f"instruction set {name}")


def threads() -> int | None:
    return found.specsparse_threads() if (found := library()) else None


def set_threads(count: int) -> None:
    """Sets the number of threads, 1 to `MOST_THREADS`, else UserError; results do not depend on it."""
    count = _whole_number("threads", count, 1, MOST_THREADS)
    if found := library():
        found.specsparse_set_threads(count)


def pack(out: np.ndarray, raw: np.ndarray, *, item: int = 0, scales: int = 0, words: int = 0, bits: int = 0) -> bool:
    """Packs rows as `packing.pack` does, if the kernels are there and can. Other threads run meanwhile.

    Args:
        out: uint8[groups, bytes], contiguous; filled.
        raw: uint8[rows, bytes of a row], contiguous.
        item: bytes of a float, or 0 for blocks.
        scales, words: float16 scales at the start of a block, and words of four bytes of codes after them.
        bits: of a code of Q4_K, Q5_K or Q6_K, in place of these.

    Returns:
        Whether it did.
    """
    found, kind = library(), (item, scales, words, bits)
    if found is None:
        return False
    return bool(found.specsparse_pack(out.ctypes.data, raw.ctypes.data, *raw.shape, *kind, out.shape[1]))


def describe(*matrices: Packed, places: Sequence[tuple[int, int]] = ()) -> np.ndarray:
    """`MATRIX` records as int64; `places` are those of data and bias of each, if they are further operands."""
    records = np.zeros(len(matrices), MATRIX)
    for record, w in zip(records, matrices, strict=True):
        layout = w.layout
        record["codes"], record["scales"] = _CODES.index(layout.codes), _SCALES.index(layout.scales)
        record["sub"], record["zero"], record["lut"] = layout.sub, layout.zero, layout.lut or 0
        record["rows"], record["cols"] = w.shape
        record["bytes"] = w.data.shape[-1]
    if places:
        records["data"], records["bias"] = np.array(places, np.int64).T
    return records.view(np.int64)


class Operands(list):
    """The further operands of a call."""

    def place(self, array: jax.Array | None) -> int:
        """Adds an operand and returns its place; -1 for None."""
        if array is None:
            return -1
        self.append(array)
        return len(self) - 1


def given(array, dtype=jnp.float32):
    """The array, or an empty one for None: operands of a call are always there."""
    return jnp.zeros((0,), dtype) if array is None else array


def call(target: str, results, *operands, aliases=None, **attributes) -> Any:
    """Calls specsparse_`target`; `results` are (shape, dtype) pairs: a list of them, or one for a single array."""
    needed()
    one = not isinstance(results, list)
    shapes = [jax.ShapeDtypeStruct(*result) for result in ([results] if one else results)]
    run = jax.ffi.ffi_call(f"specsparse_{target}", shapes[0] if one else shapes, input_output_aliases=aliases)
    return run(*operands, **attributes)


# The functions of `reference.dense`, and `packing.dequant.embed_rows`, by the C++ kernels.


def linear(x, weights, *, n_valid, norm=None, eps=0.0, biases=None, residual=None, act=None, zeros=True):
    outs, operands = weights[:1] if act else weights, Operands()
    biases = biases or [None] * len(weights)
    places = [(operands.place(w.data), operands.place(bias)) for w, bias in zip(weights, biases, strict=True)]
    results = [((x.shape[0], w.shape[0]), jnp.float32) for w in outs]
    attributes = {"act": np.int64(ACTS[act]), "eps": np.float32(eps), "zeros": np.int64(zeros)}
    matrices = describe(*weights, places=places)
    return tuple(
        call("linear", results, x, given(norm), given(residual), n_valid, *operands, matrices=matrices, **attributes)
    )


def choose(logits_RE, *, k, gating, normalised, n_valid):
    shape = (len(logits_RE), k)
    how = {"gating": np.int64(_GATINGS.index(gating)), "normalised": np.int64(normalised)}
    return tuple(call("choose", [(shape, jnp.int32), (shape, jnp.float32)], logits_RE, n_valid, **how))


def experts(x_RD, chosen_Rk, weights_Rk, experts):
    operands, matrices = Operands(), (experts.gate, experts.up, experts.down)
    biases = (experts.gate_bias, experts.up_bias, experts.down_bias)
    places = [(operands.place(w.data), operands.place(bias)) for w, bias in zip(matrices, biases, strict=True)]
    up_rows, down_blocks = (None, None) if experts.skip is None else (experts.skip.up.data, experts.skip.down)
    skip = {"up_rows": np.int64(operands.place(up_rows)), "down_blocks": np.int64(operands.place(down_blocks))}
    return call(
        "experts", ((x_RD.shape[0], experts.down.shape[0]), jnp.float32), x_RD, chosen_Rk, weights_Rk, *operands,
        matrices=describe(*matrices, places=places), act=np.int64(ACTS[experts.act]), **skip,
    )  # fmt: skip


def add_normed(x, y, norm, *, n_valid, eps):
    return call("add_normed", (x.shape, jnp.float32), x, y, norm, n_valid, eps=np.float32(eps))


def embed(w, ids):
    return call("embed", ((ids.shape[0], w.shape[1]), jnp.float32), w.data, ids, matrices=describe(w))


def attend(
    q, k, v, cache_k, cache_v, *,
    cos, sin, length, n_valid, parents=None, shift=None, pairing="norm", q_norm=None, k_norm=None, eps=0.0, window=0,
    table=0, sinks=None, mass=False,
):  # fmt: skip
    if head_size(cache_v) % 16 or sinks is not None:  # not built in C++
        return dense.attend(
            q, k, v, cache_k, cache_v, cos=cos, sin=sin, length=length, n_valid=n_valid, parents=parents, shift=shift,
            pairing=pairing, q_norm=q_norm, k_norm=k_norm, eps=eps, window=window, table=table, sinks=sinks, mass=mass,
        )  # fmt: skip
    blocks = (len(cache_v), q.shape[1] // head_size(cache_v), cache_v.shape[2] // LANES) if mass else (0,)
    caches = [(cache_k.shape, cache_k.dtype), (cache_v.shape, cache_v.dtype)]
    found = call(
        "attend",
        [(q.shape, jnp.float32), *caches, (blocks, jnp.float32)],
        q, k, v, cache_k, cache_v, cos, sin, length, n_valid, given(parents, jnp.int32), given(shift, jnp.int32),
        given(q_norm), given(k_norm),
        aliases={3: 1, 4: 2},
        neox=np.int64(pairing == "neox"),
        window=np.int64(window),
        table=np.int64(table),
        eps=np.float32(eps),
    )  # fmt: skip
    return found if mass else found[:3]


def argmax(x):
    return call("argmax", (x.shape[:1], jnp.int32), x)


# Those of `engine.sampling.probs.SamplingKernels`, which says what they compute.


def check(logits_RV):
    return call("check", (logits_RV.shape[:1], jnp.bool_), logits_RV)


def probs(logits_RV, rows, **_):
    return call("probs", (logits_RV.shape, jnp.float32), logits_RV, *rows)


def draw(p_RV, u_RU):
    return call("draw_token", (p_RV.shape[:1], jnp.int32), p_RV, u_RU)


def sample(logits_RV, probs, n_valid_B, u_RU=None, tokens_R=None):
    R = logits_RV.shape[:1]
    u_RU = jnp.zeros((0, 4), jnp.float32) if u_RU is None else u_RU
    results = [(R, jnp.int32), (R, jnp.bool_), (R, jnp.float32)]
    return tuple(call("sample", results, logits_RV, *probs, u_RU, given(tokens_R, jnp.int32), n_valid_B))


def propose(logits_RN, probs, u_RU, ids_N, size):
    R = logits_RN.shape[:1]
    results = [(R, jnp.int32), (R, jnp.bool_), ((*R, size), jnp.float32)]
    return tuple(call("propose", results, logits_RN, *probs, u_RU, given(ids_N, jnp.int32)))


def judge(rows_RV, probs, n_valid_B, tokens_BK, parents_BK, q_BKV, coins_BK, u_BU, *, whole):
    B, BK = n_valid_B.shape, tokens_BK.shape
    results = [(BK, jnp.int32), *[(B, jnp.int32)] * 3, (B, jnp.bool_), (BK, jnp.float32)]
    probs = (given(None), given(None), given(None, jnp.int32), given(None)) if probs is None else probs
    operands = (rows_RV, *probs, n_valid_B, tokens_BK, given(parents_BK, jnp.int32), given(q_BKV), coins_BK, u_BU)
    return tuple(call("judge", results, *operands, whole=np.int64(whole)))
