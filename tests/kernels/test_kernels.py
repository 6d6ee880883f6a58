"""One suite for all implementations of the kernels: native on every instruction set, reference and xla.

Promised: the native kernels compute the definition of docs/layouts.md, emulated in numpy, bit for bit, on every
instruction set, for every number of threads, and for every number of rows (contract C1). All implementations agree with
float64 within `tests/tolerances.py`, and the reference keeps C1 as well. Rows past `n_valid` are zeros and leave the
cache alone, whatever it holds there.
"""

import contextlib
import ctypes
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize, quantize

from specsparse.engine.sampling.params import Truncation
from specsparse.engine.sampling.probs import REFERENCE
from specsparse.errors import UserError
from specsparse.kernels import BACKENDS, QTensor, status
from specsparse.kernels.native import cpu
from specsparse.kernels.packing.pack import SUPPORTED, layout_of, pack_qtensor
from specsparse.kernels.reference import dense, q8_cache
from specsparse.testing import random_quantised
from tests.cells import cells
from tests.kernels import emulation
from tests.kernels.emulated_tiles import set_isa
from tests.tolerances import ATTEND_NMSE, LINEAR_NMSE, PROBS_RTOL, nmse

pytestmark = pytest.mark.skipif(not cpu.available(), reason=f"no native kernels: {cpu.why_missing()}")

ISAS = ("portable", "avx2", "avx512")
"""Of vectors; what follows differs from them in integer products alone."""
PRODUCTS = ("avxvnni", "amx", "amx_emulated")
ROWS = (1, 2, 3, 5, 8, 9, 17)
R = max(ROWS)
OUT = (37, 19, 5)
ACTS = ("silu", "relu", "relu2")
EPS = 1e-5
TYPES = {t.name: t for t in SUPPORTED}


def use(isa: str, threads: int = 2) -> None:
    """Switches the instruction set; skips where the processor lacks it."""
    try:
        set_isa(isa)
    except UserError as error:
        pytest.skip(str(error))
    cpu.set_threads(threads)


def same_bits(got, wanted, note: str = "") -> None:
    """Equality of bits, all leaves; NaN equals NaN."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        kind = f"u{a.dtype.itemsize}"
        np.testing.assert_array_equal(a.view(kind), b.view(kind), err_msg=note)


def columns(name: str) -> int:
    """An odd number of blocks (of columns, for floats)."""
    return {1: 50, 32: 96, 64: 192, 256: 768}[GGML_QUANT_SIZES[TYPES[name]][0]]


@cache
def raw_weights(name: str) -> tuple[np.ndarray, ...]:
    """q, k, v and a partner for q, of odd heights, as bytes of a file."""
    return tuple(random_quantised(name, rows, columns(name), seed) for seed, rows in enumerate((*OUT, OUT[0])))


@cache
def weights(name: str) -> tuple[QTensor, ...]:
    """The same packed."""
    return tuple(pack_qtensor(raw, TYPES[name], (len(raw), columns(name))) for raw in raw_weights(name))


@cache
def dense_weights(name: str) -> tuple[np.ndarray, ...]:
    """The same in float32, by gguf."""
    item = {"F32": "<f4", "F16": "<f2"}.get(name, np.uint8)
    return tuple(dequantize(raw.view(item), TYPES[name]) for raw in raw_weights(name))


@cache
def rows_of(cols: int) -> dict[str, np.ndarray]:
    """Activations and what goes with them: rows of all sizes, one of zeros, one with a block of zeros."""
    rng = np.random.default_rng(cols)
    x = rng.normal(size=(R, cols)).astype(np.float32) * np.exp2(rng.integers(-8, 8, (R, 1))).astype(np.float32)
    x[3] = 0
    x[4, :32] = 0
    x[5, 7] *= 1000
    out = {"x": x, "norm": rng.normal(1, 0.2, cols).astype(np.float32)}
    out["residual"] = rng.normal(size=(R, OUT[0])).astype(np.float32)
    return out | {f"b{i}": rng.normal(size=n).astype(np.float32) for i, n in enumerate((*OUT, OUT[0]))}


def linears(kernels, w: tuple[QTensor, ...], a: dict, n_valid):
    """Every kind of call that a model makes."""
    q, k, v, up = w
    normed = {"norm": a["norm"], "eps": EPS, "n_valid": n_valid}
    out = {
        "plain": kernels.linear(a["x"], (q,), n_valid=n_valid),
        "qkv": kernels.linear(a["x"], (q, k, v), biases=(a["b0"], None, a["b2"]), **normed),
        "residual": kernels.linear(a["x"], (q,), biases=(a["b0"],), residual=a["residual"], n_valid=n_valid),
    }
    out |= {act: kernels.linear(a["x"], (q, up), act=act, **normed) for act in ACTS}
    return out | {"biased": kernels.linear(a["x"], (q, up), act="silu", biases=(a["b0"], a["b3"]), **normed)}


@cache
def program(backend: str):
    """`linears` and an embedding lookup, compiled once for each kind of weights."""
    kernels = BACKENDS[backend]

    def run(w, a, n_valid, ids):
        return linears(kernels, w, a, n_valid) | {"embed": kernels.embed(w[0], ids)}

    return jax.jit(run)


IDS = np.array([0, 36, 17, 15, 16, 31, 32, -1, 99, *range(8)], np.int32)


def run(name: str, n: int, backend: str = "native"):
    """All calls for the first n of R rows, as numpy."""
    w = weights(name)
    return jax.tree.map(np.asarray, program(backend)(w, rows_of(w[0].shape[1]), jnp.array([n], jnp.int32), IDS))


@cache
def portable(name: str):
    """All rows by the plain C++ kernels on one thread: the definition."""
    use("portable", 1)
    return run(name, R)


def emulated(name: str):
    """`run(name, R)` by the numpy emulation."""
    w, a = weights(name), rows_of(columns(name))
    x, h = a["x"], emulation.normalise(a["x"], a["norm"], EPS)

    def times(rows, m):
        return emulation.product(rows, np.asarray(m.data), m.layout, m.shape)

    gate, up = times(h, w[0]), times(h, w[3])
    out = {
        "plain": (times(x, w[0]),),
        "qkv": (gate + a["b0"][None], times(h, w[1]), times(h, w[2]) + a["b2"][None]),
        "residual": (a["residual"] + (times(x, w[0]) + a["b0"][None]),),
    }
    out |= {act: (emulation.activate(gate, act) * up,) for act in ACTS}
    out["biased"] = (emulation.activate(gate + a["b0"][None], "silu") * (up + a["b3"][None]),)
    return out | {"embed": dense_weights(name)[0][np.clip(IDS, 0, OUT[0] - 1)]}


@pytest.mark.parametrize("name", TYPES)
def test_products_equal_the_definition(name):
    got, wanted = portable(name), emulated(name)
    for call, value in wanted.items():
        same_bits(jax.tree.map(lambda z: z + 0.0, got[call]), jax.tree.map(lambda z: z + np.float32(0), value), call)


@pytest.mark.parametrize(
    ("isa", "threads"), [*((isa, threads) for threads in (1, 2) for isa in ISAS), *((isa, 2) for isa in PRODUCTS)]
)
def test_products_have_the_same_bits_for_every_isa_thread_and_number_of_rows(isa, threads):
    for name in TYPES:
        wanted = portable(name)
        use(isa, threads)
        for n in ROWS:
            got = run(name, n)
            same_bits(got.pop("embed"), wanted["embed"], f"{name} embed")
            kept = {call: tuple(np.where(np.arange(R)[:, None] < n, y, 0) for y in wanted[call]) for call in got}
            same_bits(jax.tree.map(lambda z: z + 0.0, got), jax.tree.map(lambda z: z + 0.0, kept), f"{name} n={n}")


def test_more_threads_than_64_give_the_same_bits():
    """Servers have up to some 800 processors; the pool has no table that ends before."""
    wanted = portable("Q4_1")
    use("portable", 100)
    assert cpu.threads() == 100
    got = run("Q4_1", R)
    same_bits(jax.tree.map(lambda z: z + 0.0, got), jax.tree.map(lambda z: z + 0.0, wanted))


def test_status_says_why_there_are_no_tiles():
    why = status()["why_not_amx"]
    try:
        cpu.set_isa("amx")
    except UserError as error:
        assert why and "\n" not in why and "avxvnni" in str(error)
    else:
        assert why is None and cpu.isa() == "amx"


def test_an_unknown_instruction_set_is_no_variable_of_the_environment():
    with pytest.raises(UserError, match=f"^instruction set mmx: .*{ISAS[-1]}"):
        cpu.set_isa("mmx")


def test_a_table_that_gives_other_bits_or_faults_is_found_out():
    trial = cpu.library().specsparse_trial
    trial.restype = ctypes.c_char_p
    for isa in (*ISAS, *PRODUCTS):
        with contextlib.suppress(UserError):
            set_isa(isa)
            assert trial(0) is None, isa
    assert trial(1) == b"a trial of them gave other bits"
    assert trial(2) == b"a trial of them faulted"


@pytest.mark.parametrize("name", ["Q4_1", "Q6_K", "F16"])
def test_products_do_not_depend_on_the_shape_or_the_neighbours(name):
    """The same with R the true number of rows, in batches of ragged length, and beside a row of NaN."""
    use(ISAS[1] if cpu.isa() != "portable" else "portable")
    w, a, wanted = weights(name), dict(rows_of(columns(name))), portable(name)

    def call(x, n_valid):
        return linears(BACKENDS["native"], w, a | {"x": x, "residual": a["residual"][: len(x)]}, n_valid)

    for n in (1, 2, 3):
        same_bits(jax.jit(call)(a["x"][:n], jnp.array([n], jnp.int32))["qkv"], [y[:n] for y in wanted["qkv"]])
    x = a["x"].copy()
    x[[2, 7]] = np.nan
    got = jax.jit(call)(x[:16], jnp.array([3, 1, 0, 4], jnp.int32))["qkv"]
    keep = np.isin(np.arange(16), (0, 1, 4, 12, 13, 14, 15))
    drop = np.isin(np.arange(16), (2,)) | keep
    for y, full in zip(got, wanted["qkv"], strict=True):
        same_bits(np.asarray(y)[keep], full[:16][keep])
        assert (np.asarray(y)[~drop] == 0).all() and np.isnan(np.asarray(y)[2]).all()


@pytest.mark.parametrize("isa", ISAS)
def test_a_single_nan_is_never_lost(isa):
    """In any lane of a block that is quantised, and behind the gate of a ReLU."""
    use(isa)
    w = weights("Q8_0")[0]
    x = np.ones((40, w.shape[1]), np.float32)
    x[np.arange(40), 8 + np.arange(40)] = np.nan
    n_valid = jnp.array([40], jnp.int32)
    (y,) = BACKENDS["native"].linear(jnp.asarray(x), (w,), n_valid=n_valid)
    assert np.isnan(y).all()
    for act in ("relu", "relu2", "silu", "gelu_tanh"):
        (y,) = BACKENDS["native"].linear(jnp.asarray(x[:2]), (w, w), n_valid=n_valid[:1] // 20, act=act)
        assert np.isnan(y).all()


@pytest.mark.parametrize("pair", [("Q4_K", "Q6_K"), ("Q4_0", "F16"), ("BF16", "Q8_0"), ("Q4_1", "Q5_0")])
def test_matrices_of_two_types_in_one_call(pair):
    use("portable", 1)
    raws = [random_quantised(name, 21, 768, seed) for seed, name in enumerate(pair)]
    first, second = (pack_qtensor(raw, TYPES[name], (21, 768)) for raw, name in zip(raws, pair, strict=True))
    x = rows_of(768)["x"]
    options = {"n_valid": jnp.array([R], jnp.int32)}
    both = cpu.linear(x, (first, second), **options)
    same_bits(both, (*cpu.linear(x, (first,), **options), *cpu.linear(x, (second,), **options)))
    for act in ACTS:
        (got,) = cpu.linear(x, (first, second), act=act, **options)
        wanted = emulation.activate(np.asarray(both[0]), act) * np.asarray(both[1])
        same_bits(np.asarray(got) + 0.0, wanted + np.float32(0))


def exact(name: str) -> dict[str, tuple[np.ndarray, ...]]:
    """The products of dequantised weights and unrounded rows in float64."""
    q, k, v, up = (m.astype(np.float64) for m in dense_weights(name))
    a = {key: value.astype(np.float64) for key, value in rows_of(columns(name)).items()}
    x, h = a["x"], a["x"] / np.sqrt((a["x"] ** 2).mean(axis=1, keepdims=True) + EPS) * a["norm"]
    gate = h @ q.T
    act = {"silu": gate / (1 + np.exp(-gate)), "relu": np.maximum(gate, 0), "relu2": np.maximum(gate, 0) ** 2}
    out = {
        "plain": (x @ q.T,),
        "qkv": (gate + a["b0"], h @ k.T, h @ v.T + a["b2"]),
        "residual": (a["residual"] + x @ q.T + a["b0"],),
    }
    z = gate + a["b0"]
    out["biased"] = (z / (1 + np.exp(-z)) * (h @ up.T + a["b3"]),)
    return out | {name: (value * (h @ up.T),) for name, value in act.items()}


def errors(got: dict, name: str):
    """(call, NMSE) of every product, without row 5: its outlier costs the rest of a block its bits."""
    for call, wanted in exact(name).items():
        for y, z in zip(got[call], wanted, strict=True):
            yield call, nmse(np.delete(y, 5, 0), np.delete(z, 5, 0))


@pytest.mark.parametrize("name", TYPES)
def test_native_products_are_near_float64(name):
    """What differs is the rounding of rows to int8, and nothing for float weights."""
    codes = layout_of(TYPES[name]).codes
    for call, error in errors(portable(name), name):
        assert error <= (LINEAR_NMSE["float"] if codes in ("f32", "f16", "bf16") else LINEAR_NMSE[call]), call


FLOATS = [(backend, name) for backend in ("reference", "xla") for name in ("Q4_1", "Q6_K", "F16")]


# xla has the reference's products on the same unpacked weights: one type of them.
@pytest.mark.parametrize(("backend", "name"), cells(FLOATS, FLOATS[:4]))
def test_float_kernels_are_near_float64(backend, name):
    """On packed weights; the number of rows changes no bit of the reference."""
    got, few = run(name, R, backend), run(name, 5, backend)
    same_bits(got.pop("embed"), few.pop("embed"))
    for call, error in errors(got, name):
        assert error <= LINEAR_NMSE["float"], call
    assert all((y[5:] == 0).all() for ys in few.values() for y in ys)
    if backend == "reference":
        same_bits([y[:5] for ys in few.values() for y in ys], [y[:5] for ys in got.values() for y in ys])


def test_argmax_of_every_implementation():
    rng = np.random.default_rng(0)
    for width in (1, 5, 1023, 1024, 1025, 2049):
        x = rng.integers(-4, 4, (9, width)).astype(np.float32)  # many ties
        x[1, rng.random(width) < 0.5] = np.nan
        x[2] = np.nan
        x[3] = -np.inf
        x[4, -1] = np.inf
        x[5] = np.where(rng.random(width) < 0.5, 0.0, -0.0)
        wanted = np.argmax(np.where(np.isnan(x), -np.inf, x), axis=1)
        for kernels in BACKENDS.values():
            got = np.asarray(jax.jit(kernels.argmax)(x))
            np.testing.assert_array_equal(got, wanted, err_msg=f"{kernels.name} {width}")


# Distributions and draws.

SHAPES = {  # temperature, top-k, top-p, min-p
    "plain": (1.0, 0, 1.0, 0.0),
    "hot": (2.5, 0, 1.0, 0.0),
    "greedy": (0.0, 0, 1.0, 0.0),
    "top_k": (0.8, 5, 1.0, 0.0),
    "top_p": (0.8, 0, 0.9, 0.0),
    "min_p": (0.7, 0, 1.0, 0.05),
    "all": (0.6, 40, 0.95, 0.02),
    "one": (0.6, 1, 1.0, 0.0),
}


def probs_case(width: int):
    """Logits of one row for each of SHAPES, on a coarse grid (ties), some banned; and the Truncation."""
    rng = np.random.default_rng(width)
    logits = (rng.normal(size=(len(SHAPES), width)) * 4).round(1).astype(np.float32)
    logits[:, rng.random(width) < 0.1] = -np.inf
    logits[:, 0] = 0.5
    t, k, top_p, min_p = (np.array(column) for column in zip(*SHAPES.values(), strict=True))
    with np.errstate(divide="ignore"):
        rows = (t, np.log(min_p), np.where(k < 1, width, np.minimum(k, width)), top_p)
    types = (np.float32, np.float32, np.int32, np.float32)
    return logits, Truncation(*(jnp.asarray(a.astype(d)) for a, d in zip(rows, types, strict=True)))


@pytest.mark.parametrize("width", cells([1, 37, 256, 1000], [1, 37, 1000]))
def test_distributions_equal_the_reference(width):
    """The same tokens are kept, ties together; what is left differs by the last bits of exp."""
    use("portable", 1)
    logits, rows = probs_case(width)
    got, wanted = (np.asarray(jax.jit(probs)(logits, rows)) for probs in (cpu.probs, REFERENCE.probs))
    np.testing.assert_array_equal(got > 0, wanted > 0)
    np.testing.assert_allclose(got, wanted, rtol=PROBS_RTOL)
    for u in (0.0, 0.25, 0.6180339, 1 - 2.0**-24):
        u_RU = np.full((len(logits), 4), u, np.float32)
        np.testing.assert_array_equal(jax.jit(cpu.draw)(got, u_RU), jax.jit(REFERENCE.draw)(got, u_RU))


@pytest.mark.parametrize("spread", [0.01, 0.5, 3.0, 20.0])
def test_top_p_of_flat_and_of_peaked_distributions_equals_the_reference(spread):
    """From nearly all tokens kept to a single one, on a fine grid and on one full of ties."""
    use("portable", 1)
    rng = np.random.default_rng(int(100 * spread))
    fine = (rng.normal(size=(6, 5000)) * spread).astype(np.float32)
    shares = np.array([0.02, 0.3, 0.7, 0.95, 0.99, 0.9999], np.float32)
    every = np.ones(6, np.float32)
    rows = Truncation(every, every * -np.inf, every.astype(np.int32) * 5000, shares)
    for logits in (fine, fine.round(1)):
        got, wanted = (np.asarray(jax.jit(probs)(logits, rows)) for probs in (cpu.probs, REFERENCE.probs))
        np.testing.assert_array_equal((got > 0).sum(axis=1), (wanted > 0).sum(axis=1))
        np.testing.assert_allclose(got, wanted, rtol=PROBS_RTOL)


@pytest.mark.parametrize("isa", ISAS)
def test_one_call_samples_what_check_distribution_and_draw_do(isa):
    """Bit for bit, of the rows that count: two or one or none of each sequence's two rows."""
    use(isa, 2)
    logits, probs = probs_case(1000)
    rng = np.random.default_rng(0)
    B, twice = len(logits), jax.tree.map(lambda a: np.repeat(a, 2), probs)
    x = np.repeat(logits, 2, axis=0)
    x[1::2] = rng.permutation(x[1::2].T).T
    x[2, 3], x[5], x[9, 0] = np.nan, -np.inf, np.inf
    u, tokens = rng.random((2 * B, 4), np.float32), rng.integers(0, 1000, 2 * B, np.int32)
    n_valid = np.resize(np.array([2, 1, 2, 0], np.int32), B)
    p = np.asarray(jax.jit(cpu.probs)(x, twice))
    wanted = np.asarray(jax.jit(cpu.draw)(p, u)), np.asarray(jax.jit(cpu.check)(x)), p[np.arange(2 * B), tokens]
    got = [np.asarray(a) for a in jax.jit(cpu.sample)(x, probs, n_valid, u, tokens)]
    counts = (np.arange(2) < n_valid[:, None]).reshape(-1)
    for a, b in zip(got, wanted, strict=True):
        sane = counts & wanted[1] if a is got[2] else counts
        np.testing.assert_array_equal(a[sane], b[sane])
    assert not got[0][~counts].any() and got[1][~counts].all() and not got[2][~counts].any()
    greedy = probs._replace(temperature=np.zeros(B, np.float32))
    first = np.asarray(jax.jit(cpu.sample)(x, greedy, np.full(B, 2, np.int32))[0])
    np.testing.assert_array_equal(first[wanted[1]], np.asarray(jax.jit(cpu.argmax)(x))[wanted[1]])
    with pytest.raises(jax.errors.JaxRuntimeError, match="do not go together"):
        jax.block_until_ready(cpu.sample(x, probs, n_valid, u[:3], tokens))


@pytest.mark.parametrize("isa", ISAS)
def test_only_rows_of_numbers_can_be_distributions(isa):
    """No NaN, no +inf, and something above -inf, wherever it stands."""
    use(isa, 1)
    for width in (1, 63, 64, 65, 1000):
        x = np.random.default_rng(width).normal(size=(6, width)).astype(np.float32)
        x[1, 0], x[2, -1], x[3, width // 2] = np.nan, np.nan, np.inf
        x[4], x[5, : width - 1] = -np.inf, -np.inf
        got = np.asarray(jax.jit(cpu.check)(x))
        np.testing.assert_array_equal(got, [True, False, False, False, False, True], err_msg=str(width))


def test_rows_that_are_no_distributions_stay_inside():
    """What comes of them is not looked at, but the kernels must neither write outside the row nor run on forever."""
    x = np.random.default_rng(0).normal(size=(4, 1000)).astype(np.float32)
    x[0, ::3], x[1, 500], x[2], x[3, :] = np.nan, np.inf, np.nan, np.inf
    for t, k, top_p, min_p in SHAPES.values():
        numbers = (t, np.log(min_p) if min_p else -np.inf, k or 1000, top_p)
        rows = Truncation(*(np.full(4, a, d) for a, d in zip(numbers, "ffif", strict=True)))
        p = jax.jit(cpu.probs)(x, rows)
        assert p.shape == x.shape
        token = np.asarray(jax.jit(cpu.draw)(p, np.full((4, 4), 0.7, np.float32)))
        assert ((token >= 0) & (token < 1000)).all()


@pytest.mark.parametrize("isa", ISAS)
def test_distributions_have_the_same_bits_for_every_isa_thread_and_number_of_rows(isa):
    logits, rows = probs_case(1000)
    use("portable", 1)
    wanted = np.asarray(jax.jit(cpu.probs)(logits, rows))
    one = jax.jit(cpu.probs)
    for threads in (1, 2):
        use(isa, threads)
        same_bits(jax.jit(cpu.probs)(logits, rows), wanted)
        for r in range(len(logits)):
            same_bits(one(logits[r : r + 1], jax.tree.map(lambda a, r=r: a[r : r + 1], rows))[0], wanted[r], f"row {r}")


# Attention: two sequences of 8 rows, 6 query heads over 2 key/value heads of 32, 64 slots.

B, N, H, G, D, C = 2, 8, 6, 2, 32, 64
DTYPES = {"f32": jnp.float32, "f16": jnp.float16, "bf16": jnp.bfloat16}
KINDS = [("f32", "norm"), ("f16", "norm"), ("bf16", "norm"), ("f16", "neox")]
CHAIN = np.arange(-1, N - 1)
TREE = np.array([-1, 0, 0, 1, 1, 2, -1, 6])
PARENTS = {"chain": np.stack([CHAIN, CHAIN]), "tree": np.stack([TREE, np.array([-1, 0, 1, 1, 1, 0, 5, 3])])}
LENGTHS = {"start": (0, 1), "middle": (5, 33), "full": (52, 60)}


@cache
def attention_case(dtype: str, seed: int = 0):
    """Rows, rotary table, and a cache that is full of numbers where it counts and of NaN where it does not."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    angle = np.arange(C)[:, None] * 100.0 ** (-np.arange(D // 2) / (D // 2))[None]
    table = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    keys, values = emulation.ROUND[dtype](normal(B, C, G, D)), emulation.ROUND[dtype](normal(B, C, G, D))
    return normal(B * N, H * D), normal(B * N, G * D), normal(B * N, G * D), keys, values, *table


def packed_cache(keys, values, dtype: str, length):
    """[B, C, G, d] as the cache has it, NaN beyond `length`."""
    dead = (np.arange(C)[None] >= np.asarray(length)[:, None])[:, :, None, None]
    keys, values = np.where(dead, np.nan, keys), np.where(dead, np.nan, values)
    k = keys.transpose(0, 2, 1, 3).reshape(B, G, C // 16, 16, D).swapaxes(3, 4)
    return jnp.asarray(k, DTYPES[dtype]), jnp.asarray(values.transpose(0, 2, 1, 3), DTYPES[dtype])


@cache
def attend_program(backend: str, pairing: str, mass: bool = False, window: int = 0, sinks: tuple[float, ...] = ()):
    def call(q, k, v, ck, cv, cos, sin, length, n_valid, parents, shift=None):
        options = {"length": length, "n_valid": n_valid, "parents": parents, "pairing": pairing, "window": window}
        options |= {"shift": shift} if shift is not None else {}
        options |= {"mass": True} if mass else {}
        options |= {"sinks": jnp.asarray(sinks, jnp.float32)} if sinks else {}
        return BACKENDS[backend].attend(q, k, v, ck, cv, cos=cos[None], sin=sin[None], **options)

    return jax.jit(call)


def attend(backend: str, dtype: str, pairing: str, length, n_valid, parents, rows=None):
    """(out [B, n, H * d], k, v) of one call as numpy; `rows` picks the new rows of each sequence."""
    q, k, v, keys, values, cos, sin = attention_case(dtype)
    if rows is not None:
        at = np.concatenate([np.array(rows[b]) + b * N for b in range(B)])
        q, k, v = q[at], k[at], v[at]
    ck, cv = packed_cache(keys, values, dtype, length)
    numbers = [jnp.asarray(a, jnp.int32) for a in (length, n_valid)]
    parents = None if parents is None else jnp.asarray(parents, jnp.int32)
    out, ck, cv = attend_program(backend, pairing)(q, k, v, ck, cv, cos, sin, *numbers, parents)
    return np.asarray(out).reshape(B, -1, H * D), np.asarray(ck), np.asarray(cv)


@cache
def attention_in_float64(dtype: str, pairing: str, shape: str, length: int, n_valid: int, b: int):
    """(rows, keys, values, values before) of sequence b by the emulation, once for all backends."""
    q, k, v, keys, values, cos, sin = attention_case(dtype)
    keys, values = keys[b].copy(), values[b].copy()
    keys[length:] = values[length:] = np.nan
    before = values.copy()
    wanted = emulation.attend(
        *(a.reshape(B, N, -1, D)[b] for a in (q, k, v)), keys, values, cos=cos, sin=sin, length=length,
        n_valid=n_valid, parents=PARENTS[shape][b], pairing=pairing, cache=dtype,
    )  # fmt: skip
    return wanted, keys, values, before


@pytest.mark.parametrize(("dtype", "pairing"), KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_equals_float64(backend, dtype, pairing):
    if backend == "native":
        use("portable", 1)
    for shape, parents in PARENTS.items():
        for length in LENGTHS.values():
            for n_valid in ((8, 3), (0, 8), (1, 5)):
                out, ck, cv = attend(backend, dtype, pairing, length, n_valid, parents)
                for b in range(B):
                    wanted, own_k, own_v, before = attention_in_float64(dtype, pairing, shape, length[b], n_valid[b], b)
                    count = min(n_valid[b], C - length[b])
                    assert (out[b, count:] == 0).all()
                    assert nmse(out[b, :count], wanted[:count]) <= ATTEND_NMSE[backend], (shape, length, n_valid)
                    got_v = cv[b].transpose(1, 0, 2).astype(np.float32)
                    got_k = ck[b].swapaxes(2, 3).reshape(G, C, D).transpose(1, 0, 2).astype(np.float32)
                    np.testing.assert_array_equal(got_v, own_v)
                    np.testing.assert_array_equal(np.isnan(got_k), np.isnan(before) & np.isnan(own_k))
                    assert nmse(np.nan_to_num(got_k), np.nan_to_num(own_k)) <= ATTEND_NMSE["keys"]


@pytest.mark.parametrize(("window", "sinks"), [(0, ()), (20, ()), (20, (0.5, -1.0, 2.0, 0.0, 1.0, -3.0))])
@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_of_the_first_row_by_block_equal_float64(backend, window, sinks):
    """They are 0 of a sequence without rows, and change no output."""
    if backend == "native":
        use(cpu.isa(), 2)
    q, k, v, keys, values, cos, sin = attention_case("f16")
    for shape, parents in PARENTS.items():
        for length, n_valid in ((LENGTHS["middle"], (8, 3)), (LENGTHS["start"], (1, 0))):
            given = q, k, v, *packed_cache(keys, values, "f16", length), cos, sin
            given = *given, *(jnp.asarray(a, jnp.int32) for a in (length, n_valid, parents))
            out, *_, mass = attend_program(backend, "norm", mass=True, window=window, sinks=sinks)(*given)
            same_bits(out, attend_program(backend, "norm", window=window, sinks=sinks)(*given)[0], "with mass")
            for b in range(B):
                wanted = np.zeros((H, C // 16))
                rows = (a.reshape(B, N, -1, D)[b] for a in (q, k, v))
                emulation.attend(
                    *rows, keys[b].copy(), values[b].copy(), cos=cos, sin=sin, length=length[b], n_valid=n_valid[b],
                    parents=PARENTS[shape][b], pairing="norm", cache="f16", mass=wanted, window=window,
                    sinks=sinks or None,
                )  # fmt: skip
                np.testing.assert_allclose(mass[b], wanted, atol=1e-5)
                assert n_valid[b] or not mass[b].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_shift_rotates_rows_as_later_positions(backend):
    """A sequence's bits are those of tables that begin so much later."""
    if backend == "native":
        use(cpu.isa(), 2)
    q, k, v, keys, values, *_ = attention_case("f16")
    angle = np.arange(C + 40)[:, None] * 100.0 ** (-np.arange(D // 2) / (D // 2))[None]
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    numbers = [jnp.asarray(a, jnp.int32) for a in (LENGTHS["middle"], (8, 5), PARENTS["tree"])]
    given = q, k, v, *packed_cache(keys, values, "f16", LENGTHS["middle"])
    shift = (3, 40)
    got = attend_program(backend, "norm")(*given, cos, sin, *numbers, jnp.asarray(shift, jnp.int32))
    for b, s in enumerate(shift):
        wanted = attend_program(backend, "norm")(*given, cos[s : s + C], sin[s : s + C], *numbers)
        same_bits(np.asarray(got[0]).reshape(B, N, -1)[b], np.asarray(wanted[0]).reshape(B, N, -1)[b])
        same_bits([np.asarray(a)[b] for a in got[1:]], [np.asarray(a)[b] for a in wanted[1:]])


def test_a_cache_of_finite_numbers_is_not_masked_has_the_same_bits_and_stays_finite():
    """As card kernels attend: a row that overflows or is NaN spoils no other one, in this step and in later ones."""
    q, k, v, keys, values, cos, sin = attention_case("f16")
    length, last = LENGTHS["middle"], slice(N - 1, None, N)  # the last row of a chain: no other one sees it
    caches = packed_cache(keys, values, "f16", length)
    turn = {"cos": jnp.asarray(cos)[None], "sin": jnp.asarray(sin)[None]}
    given = {"length": jnp.asarray(length), "n_valid": jnp.full(B, N, jnp.int32), **turn}
    step = jax.jit(
        partial(dense.attend_batched, parents=jnp.asarray(PARENTS["chain"]), **given), static_argnames="finite"
    )
    wanted, *_ = step(q, k, v, *caches)
    k, v = k.copy(), v.copy()
    k[last, 0], v[last, ::2], v[last, 1::2] = np.inf, np.nan, -1e9
    filled = [jnp.where(jnp.isnan(c), jnp.asarray(6e4, c.dtype), c) for c in caches]
    got, new_k, new_v = step(q, k, v, *filled, finite=True)
    others = np.arange(B * N) % N != N - 1
    same_bits(np.asarray(got)[others], np.asarray(wanted)[others], "without a mask")
    assert np.isfinite(new_k).all() and np.isfinite(new_v).all()
    for b in range(B):
        assert set(np.unique(new_v[b, :, length[b] + N - 1])) == {0, -65504}
    assert not np.isfinite(step(q, k, v, *filled)[2]).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [1, 2])
def test_attention_has_the_same_bits_for_every_isa_and_thread(isa, threads):
    for dtype, pairing in KINDS:
        for parents in PARENTS.values():
            for length in LENGTHS.values():
                for n_valid in ((8, 8), (3, 1)):
                    use("portable", 1)
                    wanted = attend("native", dtype, pairing, length, n_valid, parents)
                    use(isa, threads)
                    got = attend("native", dtype, pairing, length, n_valid, parents)
                    same_bits(got, wanted, f"{dtype} {pairing} {length} {n_valid}")


LONG = 1104
"""Positions of a cache whose tiles are cut: see kCutSlots of dense/attention.cc."""


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [jnp.float16, q8_cache.DTYPE])
def test_tiles_that_threads_share_have_the_bits_of_whole_ones_and_of_one_row(dtype, isa):
    """Trees, chains, windows after 0 to 1,080 positions; nine threads share tiles of 64 and 8 queries, two do not."""
    heads, groups, d, n = 9, 1, 32, 8
    rng = np.random.default_rng(3)
    q, k, v = (rng.normal(size=(2 * n, count * d)).astype(np.float32) for count in (heads, groups, groups))
    values = q8_cache.encode(jnp.asarray(rng.normal(size=(2, groups, LONG, d)), jnp.float32), dtype)
    keys = values.reshape(2, groups, LONG // 16, 16, -1).swapaxes(3, 4)
    angle = np.zeros((1, LONG, d // 2), np.float32)

    @partial(jax.jit, static_argnames="window")
    def call(q, k, v, keys, values, length, n_valid, parents, window):
        given = {"length": length, "n_valid": n_valid, "parents": parents, "pairing": "neox", "window": window}
        return BACKENDS["native"].attend(q, k, v, keys, values, cos=np.cos(angle), sin=angle, **given)

    for name, window in (("tree", 0), ("chain", 0), ("chain", 700)):
        for length in ((1080, 1033), (600, 0)):
            numbers = [jnp.asarray(a, jnp.int32) for a in (length, (n, n), PARENTS[name])]
            use("portable", 1)
            whole = call(q, k, v, keys, values, *numbers, window=window)
            for threads in (2, 9):
                use(isa, threads)
                same_bits(call(q, k, v, keys, values, *numbers, window=window), whole, f"{name} {length} {threads}")
            if name == "chain":
                one = [jnp.asarray(a, jnp.int32) for a in (length, (1, 1), np.full((2, 1), -1))]
                first = np.array([0, n])
                got = call(q[first], k[first], v[first], keys, values, *one, window=window)[0]
                same_bits(np.asarray(got), np.asarray(whole[0])[first], f"one row {length}")


@pytest.mark.parametrize("backend", [*ISAS, "reference", "xla"])
def test_a_q8_0_cache_is_a_float32_cache_of_its_values(backend):
    """Rows are not turned here, so that what is appended is known; bits by the native kernels, on every one alike."""
    if backend in ISAS:
        use(backend, 2)
    isa, backend = backend, "native" if backend in ISAS else backend
    q, k, v, keys, values, *_ = attention_case("f32")
    cos, sin = np.ones((C, D // 2), np.float32), np.zeros((C, D // 2), np.float32)

    encode, decode = jax.jit(lambda x: q8_cache.encode(x, q8_cache.DTYPE)), jax.jit(q8_cache.decode)

    def stored(x):
        return np.asarray(encode(x))

    def value(x):
        return np.asarray(decode(stored(x.reshape(*x.shape[:-1], -1, D)))).reshape(x.shape)

    for parents in PARENTS.values():
        for length in LENGTHS.values():
            dead = (np.arange(C)[None] >= np.asarray(length)[:, None])[:, :, None, None]
            codes = [np.where(dead, np.int8(-1), stored(x)).transpose(0, 2, 1, 3) for x in (keys, values)]
            floats = [np.where(dead, np.float32(np.nan), value(x)).transpose(0, 2, 1, 3) for x in (keys, values)]
            numbers = [jnp.asarray(a, jnp.int32) for a in (length, (8, 5), parents)]
            outs = []
            for (ck, cv), new_k, new_v in ((codes, k, v), (floats, value(k), value(v))):
                ck = ck.reshape(B, G, C // 16, 16, -1).swapaxes(3, 4)
                out, ck, cv = attend_program(backend, "norm")(q, new_k, new_v, ck, cv, cos, sin, *numbers)
                outs.append((out, *(decode(a) for a in (np.asarray(ck).swapaxes(3, 4), cv))))
            assert not np.isnan(outs[0][0]).any()
            for ours, theirs in zip(outs[0][1:], outs[1][1:], strict=True):
                np.testing.assert_array_equal(ours, theirs)
            if backend == "native":
                same_bits(outs[0][0], outs[1][0], f"{isa} {length}")
            else:
                assert nmse(np.asarray(outs[0][0]), np.asarray(outs[1][0])) <= ATTEND_NMSE[backend]


def test_a_q8_0_cache_holds_the_file_formats_blocks():
    """Codes and scales are those of GGUF's Q8_0, but for ties; heads that its blocks do not divide are refused."""
    x = np.random.default_rng(5).normal(size=(64, 96)).astype(np.float32)
    x[3] = 0
    rows = np.asarray(q8_cache.encode(jnp.asarray(x), q8_cache.DTYPE))
    raw = quantize(x, TYPES["Q8_0"]).reshape(64, 3, 34)
    np.testing.assert_array_equal(
        rows[:, 96:].view(np.float16), np.ascontiguousarray(raw[..., :2]).view(np.float16)[..., 0]
    )
    assert np.abs(rows[:, :96].astype(int) - raw[..., 2:].view(np.int8).reshape(64, 96)).max() <= 1
    with pytest.raises(UserError, match="multiple of 32"):
        q8_cache.row_size(48)


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize(("dtype", "pairing"), KINDS)
def test_a_row_of_a_tree_equals_the_end_of_its_chain(backend, dtype, pairing):
    """Contract C1 of attention: the same path gives the same bits, wherever its rows lie in the cache."""
    if backend == "native":
        use(cpu.isa(), 2)
    length = (5, 33)
    parents = PARENTS["tree"]
    out, *_ = attend(backend, dtype, pairing, length, (N, N), parents)
    whole, *_ = attend(backend, dtype, pairing, length, (N, N), PARENTS["chain"])
    same_bits(attend(backend, dtype, pairing, length, (N, N), None)[0], whole, "no parents are a chain")
    paths = [emulation.paths_of(p) for p in parents]
    for i in range(N):
        rows = [paths[b][i] + [0] * (N - len(paths[b][i])) for b in range(B)]
        count = [len(paths[b][i]) for b in range(B)]
        chain, *_ = attend(backend, dtype, pairing, length, count, PARENTS["chain"], rows)
        for b in range(B):
            same_bits(chain[b, count[b] - 1], out[b, i], f"row {i} of sequence {b}")
    for n in range(1, N):
        few, *_ = attend(backend, dtype, pairing, length, (n, N - n), PARENTS["chain"])
        same_bits((few[0, :n], few[1, : N - n]), (whole[0, :n], whole[1, : N - n]), f"{n} rows")


@pytest.mark.parametrize("d", [8, 24])
def test_a_head_size_without_native_kernel_takes_the_reference(d):
    rng = np.random.default_rng(d)
    q, k, v = (jnp.asarray(rng.normal(size=(3, heads * d)), jnp.float32) for heads in (4, 2, 2))
    angle = rng.normal(size=(16, d // 2))
    options = {
        "cos": jnp.asarray(np.cos(angle), jnp.float32)[None], "sin": jnp.asarray(np.sin(angle), jnp.float32)[None],
        "length": jnp.array([2], jnp.int32), "n_valid": jnp.array([3], jnp.int32),
    }  # fmt: skip
    empty = jnp.zeros((1, 2, 1, d, 16), jnp.float16), jnp.zeros((1, 2, 16, d), jnp.float16)
    got, wanted = (
        jax.jit(lambda kernels=BACKENDS[name]: kernels.attend(q, k, v, *empty, **options))()
        for name in ("native", "reference")
    )
    same_bits(got, wanted)
