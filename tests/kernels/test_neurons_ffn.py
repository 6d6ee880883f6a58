"""One suite for all implementations of the sparse FFN and the sign-bit predictor.

Promised: the native kernels compute the definition of csrc/sparse/sparse.inl, emulated in numpy, bit for bit, on every
instruction set, for every number of threads, and whatever other rows keep (contract C1). All implementations agree with
float64 within `tests/tolerances.py`, the reference keeps C1 too, and predicted neurons are the same everywhere.
"""

import itertools
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf.quants import dequantize

from specsparse.errors import UserError
from specsparse.kernels import BACKENDS, NeuronRows, pack_neurons, pack_signs
from specsparse.kernels.native import cpu
from specsparse.kernels.packing.pack import SUPPORTED, layout_of
from specsparse.testing import random_quantised
from tests.cells import cells
from tests.kernels import neuron_emulation
from tests.kernels.test_kernels import ISAS, columns, same_bits, use
from tests.tolerances import LINEAR_NMSE, SPARSE_NMSE, nmse

pytestmark = pytest.mark.skipif(not cpu.available(), reason=f"no native kernels: {cpu.why_missing()}")

TYPES = {t.name: t for t in SUPPORTED}
F, R, EPS = 150, 9, 1e-5
KINDS = {  # gate's activation, up's, gated
    "reglu": ("relu", None, True),
    "drelu": ("relu", "relu", True),
    "swiglu": ("silu", None, True),
    "fatrelu": (("fatrelu", 0.5), None, True),
    "relu2": ("relu2", None, False),
    "linear": (None, None, False),
}
FEW = ("F16", "Q4_0", "Q4_K", "Q6_K")


@cache
def raw_weights(name: str) -> tuple[np.ndarray, ...]:
    """Gate, up and down transposed, as bytes of a file."""
    return tuple(random_quantised(name, F, columns(name), seed, std=0.3) for seed in range(3))


@cache
def weights(name: str):
    """The same packed."""
    return tuple(pack_neurons(raw, TYPES[name], (F, columns(name))) for raw in raw_weights(name))


@cache
def case(cols: int) -> dict[str, np.ndarray]:
    """Rows and masks: a row keeps nothing, one all, one a single neuron, one is zeros; one neuron is kept by no row."""
    rng = np.random.default_rng(cols)
    x = rng.normal(size=(R, cols)).astype(np.float32) * np.exp2(rng.integers(-4, 4, (R, 1))).astype(np.float32)
    x[3], x[4, :32] = 0, 0
    keep = (rng.random((R, F)) < 0.4).astype(np.uint8) * rng.integers(1, 255, (R, F), dtype=np.uint8)
    keep[1], keep[2], keep[5] = 0, 255, 0
    keep[5, F - 1] = 1
    keep[:, 77] = 0
    norm = rng.normal(1, 0.2, cols).astype(np.float32)
    return {"x": x, "keep": keep, "norm": norm, "residual": rng.normal(size=(R, cols)).astype(np.float32)}


@cache
def program(backend: str, kind: str):
    """The sparse FFN of a kind, compiled once for each type of weights."""
    act, up_act, gated = KINDS[kind]

    def run(w, a, n_valid):
        gate, up, down_t = w
        options = {"norm": a["norm"], "eps": EPS, "residual": a["residual"], "n_valid": n_valid, "act": act}
        return BACKENDS[backend].sparse_ffn(
            a["x"], a["keep"], gate if gated else None, up, down_t, up_act=up_act, **options
        )

    return jax.jit(run)


def run(name: str, kind: str, backend: str = "native", n: int = R, **changed):
    """(y, stats) as numpy for the first n of R rows."""
    a = case(columns(name)) | changed
    return jax.tree.map(np.asarray, program(backend, kind)(weights(name), a, jnp.array([n], jnp.int32)))


def emulated(name: str, kind: str):
    """(y, activations) by the emulation."""
    a, (gate, up, down_t), (act, up_act, gated) = case(columns(name)), weights(name), KINDS[kind]
    options = {"norm": a["norm"], "eps": EPS, "act": act, "up_act": up_act, "residual": a["residual"]}
    return neuron_emulation.sparse_ffn(a["x"], a["keep"], gate if gated else None, up, down_t, **options)


def exact(name: str, kind: str) -> np.ndarray:
    """What is added to the residual, in float64 from gguf's own values."""
    item = {"F32": "<f4", "F16": "<f2"}.get(name, np.uint8)
    gate, up, down = (dequantize(raw.view(item), TYPES[name]).astype(np.float64) for raw in raw_weights(name))
    a = {k: v.astype(np.float64) for k, v in case(columns(name)).items()}
    z = a["x"] / np.sqrt((a["x"] ** 2).mean(axis=1, keepdims=True) + EPS) * a["norm"]
    act, up_act, gated = KINDS[kind]

    def apply(v, how):
        if how == "silu":
            return v / (1 + np.exp(-v))
        if how is None:
            return v
        if isinstance(how, tuple):
            return np.where(v > how[1], v, 0)
        return np.maximum(v, 0) ** (2 if how == "relu2" else 1)

    h = apply(z @ gate.T, act) * apply(z @ up.T, up_act) if gated else apply(z @ up.T, act)
    return np.where(a["keep"] != 0, h, 0) @ down


def plus_zero(y):
    """Minus zero becomes zero."""
    return y + np.float32(0)


@pytest.mark.parametrize("name", TYPES)
def test_native_equals_the_definition(name):
    use("portable", 1)
    for kind in KINDS if name in FEW else ("reglu",):
        y, stats = run(name, kind)
        wanted, a = emulated(name, kind)
        same_bits(plus_zero(y), plus_zero(wanted), kind)
        np.testing.assert_array_equal(stats.nonzero, (a != 0).sum(axis=1), err_msg=kind)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [1, 2, 9])  # a single row's items: all segments, one each, or lists of neurons
def test_bits_do_not_depend_on_isa_threads_or_rows(isa, threads):
    for name in TYPES if threads == 2 else FEW:
        kind = "swiglu" if name in FEW else "reglu"
        use("portable", 1)
        wanted, counted = run(name, kind)
        use(isa, threads)
        for n in (1, 2, 6, R):
            y, stats = run(name, kind, n=n)
            same_bits(y[:n], wanted[:n], f"{name} n={n}")
            assert (y[n:] == 0).all() and (stats.kept[n:] == 0).all() and (stats.nonzero[n:] == 0).all()
            np.testing.assert_array_equal(stats.nonzero[:n], counted.nonzero[:n])


@pytest.mark.parametrize("threads", [1, 2, 9])
@pytest.mark.parametrize("kind", ["reglu", "relu2"])
def test_one_row_has_its_bits_where_gates_close(kind, threads):
    """What a closed gate leaves out is fetched and added in other groups than with all gates open."""
    use("portable", 1)
    wanted, counted = run("Q4_0", kind)
    for isa in ISAS:
        use(isa, threads)
        y, stats = run("Q4_0", kind, n=1)
        same_bits(y[:1], wanted[:1], f"{isa} {kind}")
        assert stats.nonzero[0] == counted.nonzero[0] > 0


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("name", ["F16", "Q4_0"])
def test_bits_do_not_depend_on_what_other_rows_keep(backend, name):
    wanted, _ = run(name, "reglu", backend)
    keep = case(columns(name))["keep"].copy()
    keep[:4] = 1 - np.minimum(keep[:4], 1)
    keep[5:] = 1
    same_bits(run(name, "reglu", backend, keep=keep)[0][4], wanted[4])


MATRIX = list(itertools.product(["F16", "Q4_0", "Q6_K"], KINDS, BACKENDS))
# Every kind with Q4_0, in C++ and in jnp; the other types of weights, which a kind does not see, and xla with one.
ORDINARY = [c for c in MATRIX if (c[0] == "Q4_0" and c[2] != "xla") or c[1] == "swiglu"]


@pytest.mark.parametrize(("name", "kind", "backend"), cells(MATRIX, ORDINARY))
def test_every_implementation_is_near_float64(backend, kind, name):
    y, _ = run(name, kind, backend)
    rounded = backend == "native" and not layout_of(TYPES[name]).is_float
    wanted = exact(name, kind)
    limit = SPARSE_NMSE[kind] if rounded else LINEAR_NMSE["float"]
    assert nmse(y - case(columns(name))["residual"].astype(np.float64), wanted) <= limit


@pytest.mark.parametrize("backend", BACKENDS)
def test_counts(backend):
    keep = case(columns("F16"))["keep"] != 0
    y, stats = run("F16", "reglu", backend)
    np.testing.assert_array_equal(stats.kept, keep.sum(axis=1))
    assert stats.union == keep.any(axis=0).sum() < F * R
    assert (stats.nonzero <= stats.kept).all() and 0 < stats.nonzero[2] < F and stats.nonzero[3] == 0
    same_bits(y[1], case(columns("F16"))["residual"][1])  # nothing kept, nothing added
    assert run("F16", "reglu", backend, n=1)[1].union == keep[0].sum()
    _, neurons = emulated("F16", "reglu")
    assert stats.active == (neurons != 0).any(axis=0).sum() < stats.union


def test_more_rows_than_share_one_reading():
    """Past 64 rows neurons are read again, and counted once."""
    use("portable" if cpu.isa() == "portable" else "avx2")
    a, copies = case(columns("Q4_0")), 9
    many = {k: np.concatenate([v] * copies) for k, v in a.items() if k != "norm"} | {"norm": a["norm"]}
    wanted, counted = run("Q4_0", "reglu")
    y, stats = jax.tree.map(
        np.asarray, program("native", "reglu")(weights("Q4_0"), many, jnp.array([R * copies], jnp.int32))
    )
    same_bits(y, np.concatenate([wanted] * copies))
    assert stats.union == counted.union and stats.active == counted.active


def test_ragged_batches_and_rows_of_nan():
    wanted, _ = run("Q4_0", "reglu")
    x = case(columns("Q4_0"))["x"].copy()
    x[[1, 7]] = np.nan
    a = case(columns("Q4_0")) | {"x": x}
    y, stats = program("native", "reglu")(weights("Q4_0"), a, jnp.array([2, 0, 3], jnp.int32))
    y, live = np.asarray(y), np.isin(np.arange(R), (0, 1, 6, 7, 8))
    same_bits(y[[0, 6, 8]], wanted[[0, 6, 8]])
    assert (y[~live] == 0).all() and (np.asarray(stats.kept)[~live] == 0).all()
    assert np.isnan(y[7]).all()  # keeps neurons; row 1 keeps none


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("gated", [True, False])
def test_neurons_below_a_least_activation_are_left_out(backend, gated):
    """CATS: as if the mask had lacked them; a threshold is data, not a new program."""
    a, (gate, up, down_t) = case(columns("F16")), weights("F16")
    options = {"norm": a["norm"], "eps": EPS, "act": "silu", "n_valid": jnp.array([R], jnp.int32)}

    @jax.jit
    def ffn(keep, least):
        return BACKENDS[backend].sparse_ffn(a["x"], keep, gate if gated else None, up, down_t, least=least, **options)

    least = np.float32(0.4)
    y, stats = jax.tree.map(np.asarray, ffn(a["keep"], least))
    full = dict(norm=a["norm"], eps=EPS, act="silu", least=least)
    _, neurons = neuron_emulation.sparse_ffn(a["x"], a["keep"], gate if gated else None, up, down_t, **full)
    masked, _ = ffn((neurons != 0).astype(np.uint8), np.float32(0))
    same_bits(y, np.asarray(masked))
    assert (stats.nonzero < stats.kept)[[0, 2]].all() and stats.active < stats.union
    np.testing.assert_array_equal(stats.nonzero, (neurons != 0).sum(axis=1))
    assert stats.active == (neurons != 0).any(axis=0).sum()


def test_up_is_not_read_where_the_gate_is_closed():
    """NaN in the up and down rows of neurons that no gate opens changes nothing."""
    a, (gate, up, down_t) = case(columns("F16")), weights("F16")
    options = {"act": "relu", "n_valid": jnp.array([R], jnp.int32)}
    _, neurons = neuron_emulation.sparse_ffn(a["x"], a["keep"], gate, up, down_t, norm=None, eps=0.0, act="relu")
    closed = ~(neurons != 0).any(axis=0)
    assert closed.sum() > 1
    hurt = [replace(m, data=jnp.where(closed[:, None], jnp.uint8(0x7E), m.data)) for m in (up, down_t)]
    got, _ = BACKENDS["native"].sparse_ffn(a["x"], a["keep"], gate, *hurt, **options)
    wanted, _ = BACKENDS["native"].sparse_ffn(a["x"], a["keep"], gate, up, down_t, **options)
    same_bits(np.asarray(got), np.asarray(wanted))


def test_matrices_of_different_types():
    """Gate Q4_K, up Q6_K, down F16, as files mix them."""
    a, options = case(768), {"n_valid": jnp.array([R], jnp.int32), "act": "relu"}
    gate, up = weights("Q4_K")[0], weights("Q6_K")[1]
    down_t = pack_neurons(random_quantised("F16", F, 768, 2), TYPES["F16"], (F, 768))
    got, _ = BACKENDS["native"].sparse_ffn(a["x"], a["keep"], gate, up, down_t, **options)
    wanted, _ = neuron_emulation.sparse_ffn(a["x"], a["keep"], gate, up, down_t, norm=None, eps=0.0, act="relu")
    same_bits(plus_zero(np.asarray(got)), plus_zero(wanted))


def test_hot_and_cold_neurons_are_the_whole():
    """Taken apart and added again: the same but for the order of the sum."""
    name, ids = "Q4_0", np.random.default_rng(0).permutation(F)
    a, w, options = case(columns(name)), weights(name), {"n_valid": jnp.array([R], jnp.int32), "act": "relu"}
    parts = []
    for some in (np.sort(ids[:40]), np.sort(ids[40:])):
        taken = [NeuronRows(m.data[some], m.layout, (len(some), m.shape[1])) for m in w]
        parts.append(BACKENDS["native"].sparse_ffn(a["x"], a["keep"][:, some], *taken, **options)[0])
    whole, _ = BACKENDS["native"].sparse_ffn(a["x"], a["keep"], *w, **options)
    assert nmse(np.asarray(parts[0]) + np.asarray(parts[1]), whole) <= LINEAR_NMSE["float"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_activation_that_does_not_exist_is_one_line(backend):
    gate, up, down_t = weights("F16")
    given = {"x_RD": case(columns("F16"))["x"], "keep_RF": case(columns("F16"))["keep"], "act": "gelu"}
    with pytest.raises(UserError, match="'gelu'"):
        BACKENDS[backend].sparse_ffn(gate=gate, up=up, down_t=down_t, n_valid=jnp.array([R], jnp.int32), **given)


# Sign bits.


@cache
def sign_program(backend: str):
    """The predictor, compiled once for each width: weights and threshold are data."""
    return jax.jit(BACKENDS[backend].signbit_keep)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("width", [50, 64, 576, 4160])
@pytest.mark.parametrize("alpha", [0.0, 0.9, 1.0, 1.5])
def test_sign_bits_predict_by_counting(isa, width, alpha):
    """The same neurons by every implementation, and by float64 counts of signs that differ."""
    use(isa)
    rng = np.random.default_rng(width)
    x, w = (rng.normal(size=(n, width)).astype(np.float32) for n in (R, F))
    x[2], w[3], x[4, :7] = 0, -1, -0.0
    norm = rng.normal(size=width).astype(np.float32)
    different = ((x[:, None] < 0) != ((w < 0) ^ (norm < 0))[None]).sum(axis=2)
    wanted = np.float32(alpha) * (width - different).astype(np.float32) >= different
    threshold, n_valid = np.float32(width / (1 + alpha)), jnp.array([5, 1, 2], jnp.int32)
    for name in BACKENDS:
        got = np.asarray(sign_program(name)(x, pack_signs(w * norm), threshold=threshold, n_valid=n_valid))
        live = np.arange(R) % 3 < np.repeat([5, 1, 2], 3)
        np.testing.assert_array_equal(got, (wanted & live[:, None]).astype(np.uint8), err_msg=name)


def test_sign_bits_find_a_gate_that_follows_its_signs():
    """Rows near x, or near -x: the sign of the product is what is predicted."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(1, 256)).astype(np.float32)
    sides = np.where(np.arange(F) % 2, 1, -1)[:, None]
    w = (sides * x + 0.3 * rng.normal(size=(F, 256))).astype(np.float32)
    for kernels in BACKENDS.values():
        got = kernels.signbit_keep(x, pack_signs(w), threshold=128.0, n_valid=jnp.array([1], jnp.int32))
        np.testing.assert_array_equal(np.asarray(got)[0], (w @ x[0] > 0).astype(np.uint8), err_msg=kernels.name)
