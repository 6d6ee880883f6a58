"""Experts by all implementations: native on every instruction set, reference and xla.

Promised: a row has the bits of dense products with its own experts, added up in the order of its ranks, whatever other
rows are there, in whatever order, on every instruction set and for every number of threads (contract C1).
"""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from gguf.constants import GGML_QUANT_SIZES

from specsparse.kernels import BACKENDS, Experts, QTensor, SkipWeights, skipping
from specsparse.kernels.native import cpu
from specsparse.kernels.packing.dequant import dequantize
from specsparse.kernels.packing.pack import pack_qtensor
from specsparse.testing import random_quantised
from tests.cells import cells
from tests.kernels import emulation
from tests.kernels.test_kernels import ISAS, PRODUCTS, TYPES, same_bits, use
from tests.tolerances import EXPERTS_NMSE, nmse

pytestmark = pytest.mark.skipif(not cpu.available(), reason=f"no native kernels: {cpu.why_missing()}")

E, K, N = 6, 3, 48  # experts, the last of them never chosen; of a row; rows
SOME = ("Q4_0", "Q6_K", "MXFP4", "F16")
KINDS = (*SOME, "F32", "BF16", "Q4_1", "Q4_K", "IQ4_NL", "IQ4_XS", "Q8_0", "Q5_1", "Q5_K", "IQ3_S", "Q2_K", "NVFP4")
"""Floats, and a type of each kind of block."""
RUN = {name: jax.jit(kernels.experts) for name, kernels in BACKENDS.items()}
LINEAR = jax.jit(cpu.linear, static_argnames="act")


def matrix_of(w: QTensor, e: int) -> QTensor:
    return replace(w, data=w.data[e])


@cache
def experts(name: str, act: str = "silu", biased: bool = False) -> Experts:
    block = GGML_QUANT_SIZES[TYPES[name]][0]
    size = -(-160 // block) * block  # half a chunk at its end

    def matrices(seed: int) -> QTensor:
        raw = random_quantised(TYPES[name], E * size, size, seed)
        raw[-size:] = 255
        flat = pack_qtensor(raw, TYPES[name], (E * size, size))
        return replace(flat, data=np.asarray(flat.data).reshape(E, size // 16, -1), shape=(size, size))

    made = Experts(matrices(0), matrices(1), matrices(2), act)
    if not biased:
        return made
    biases = np.random.default_rng(size).normal(size=(3, E, size)).astype(np.float32)
    return replace(made, gate_bias=biases[0], up_bias=biases[1], down_bias=biases[2])


@cache
def rows(cols: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows of all sizes, their experts, some with fewer than K, and weights."""
    rng = np.random.default_rng(cols)
    x = rng.normal(size=(N, cols)).astype(np.float32) * np.exp2(rng.integers(-4, 4, (N, 1))).astype(np.float32)
    chosen = np.stack([rng.permutation(E - 1)[:K] for _ in range(N)]).astype(np.int32)
    chosen[3], chosen[5, 1], chosen[6, 0], x[7] = -1, -1, -1, 0
    chosen[8, 1] = E  # no expert has this number: it adds nothing
    return x, chosen, rng.random((N, K), np.float32)


def of(name: str, **options):
    made = experts(name, **options)
    return made, *rows(made.gate.shape[1])


def composed(w: Experts, x, chosen, weights) -> np.ndarray:
    """By dense products with each expert, and sums in numpy."""
    outs, every = [], jnp.array([len(x)], jnp.int32)
    biases = (w.gate_bias, w.up_bias, w.down_bias)
    for e in range(E):
        gate, up, down = (None if b is None else b[e] for b in biases)
        (h,) = LINEAR(x, (matrix_of(w.gate, e), matrix_of(w.up, e)), n_valid=every, act=w.act, biases=[gate, up])
        outs.append(np.asarray(LINEAR(h, (matrix_of(w.down, e),), n_valid=every, biases=[down])[0]))
    y = np.zeros_like(x)
    for i, row in enumerate(chosen):
        terms = [weights[i, j] * outs[e][i] for j, e in enumerate(row) if 0 <= e < E]
        y[i] = sum(terms[1:], start=terms[0]) if terms else 0
    return y


@cache
def portable(name: str) -> np.ndarray:
    use("portable", 1)
    w, *a = of(name)
    return np.asarray(RUN["native"](*a, w))


@pytest.mark.parametrize("name", cells(TYPES, KINDS))
def test_rows_have_the_bits_of_dense_products(name):
    w, *a = of(name)
    same_bits(portable(name), composed(w, *a))


@pytest.mark.parametrize("act", ["relu", "gelu_tanh", "clamped_swiglu"])
def test_activations_and_biases(act):
    use("portable", 1)
    w, *a = of("Q8_0", act=act, biased=True)
    same_bits(RUN["native"](*a, w), composed(w, *a))


@pytest.mark.parametrize(("isa", "threads"), [("avx2", 1), ("avx512", 1), *((isa, 2) for isa in (*ISAS, *PRODUCTS))])
def test_instruction_sets_and_threads_change_no_bit(isa, threads):
    wanted = {name: portable(name) for name in KINDS}
    use(isa, threads)
    for name in KINDS:
        w, *a = of(name)
        same_bits(RUN["native"](*a, w), wanted[name], name)


@pytest.mark.parametrize(("backend", "name"), [("reference", "Q4_0"), *(("native", name) for name in SOME)])
def test_a_row_depends_on_itself_alone(backend, name):
    use("avx2" if cpu.isa() != "portable" else "portable", 2)
    w, *a = of(name)
    most = N if backend == "native" else 4
    shuffled = np.random.default_rng(0).permutation(N)[:most]
    whole = np.asarray(RUN[backend](*(z[shuffled] for z in a), w))
    for n in (1, 2, 4, 8, N):
        ids = np.arange(most)[::-1][:n]
        same_bits(RUN[backend](*(z[shuffled[ids]] for z in a), w), whole[ids], f"{n} rows")


def test_more_rows_of_an_expert_than_a_core_keeps():
    use("avx2" if cpu.isa() != "portable" else "portable", 2)
    w, x, _, weights = of("Q4_0")
    many = np.tile(x, (4, 1))
    chosen = np.full((len(many), K), [2, -1, 0], np.int32)
    few = RUN["native"](x, chosen[:N], weights, w)
    same_bits(RUN["native"](many, chosen, np.tile(weights, (4, 1)), w), np.tile(few, (4, 1)))


@pytest.mark.parametrize("isa", ISAS)
def test_idle_neurons_left_out_change_no_bit(isa):
    use(isa)
    w, *a = of("Q4_0", act="relu")
    skip = skipping(w)
    for n in (1, 3, N):
        some = [z[:n] for z in a]
        same_bits(RUN["native"](*some, skip), RUN["native"](*some, w))
    up, down = (np.asarray(z).copy() for z in (skip.skip.up.data, skip.skip.down))
    up[:], down[:] = 255, 255  # NaN
    poisoned = replace(skip, skip=SkipWeights(replace(skip.skip.up, data=up), down))
    assert np.isnan(RUN["native"](*(z[:1] for z in a), poisoned)).any()
    gate = np.full_like(skip.gate.data, 255)  # NaN is not taken for a closed gate
    assert np.isnan(RUN["native"](*(z[:1] for z in a), replace(skip, gate=replace(skip.gate, data=gate)))).any()


@cache
def exact(name: str) -> np.ndarray:
    """float64 outputs of biased experts and rounded weights, for the first rows."""
    w, *a = of(name, act="clamped_swiglu", biased=True)
    x, chosen, weights = (z[:9] for z in a)

    def dense(m: QTensor) -> np.ndarray:
        rows, cols = m.shape
        flat = replace(m, data=m.data.reshape(-1, m.data.shape[-1]), shape=(E * rows, cols))
        return np.asarray(dequantize(flat), np.float64).reshape(E, rows, cols)

    gate, up, down = map(dense, (w.gate, w.up, w.down))
    y = np.zeros(x.shape)
    for i, j in np.argwhere((chosen >= 0) & (chosen < E)):
        e = chosen[i, j]
        g, u = np.minimum(gate[e] @ x[i] + w.gate_bias[e], 7), np.clip(up[e] @ x[i] + w.up_bias[e], -7, 7)
        y[i] += weights[i, j] * (down[e] @ (g * scipy.special.expit(1.702 * g) * (u + 1)) + w.down_bias[e])
    return y


@pytest.mark.parametrize("name", ["Q6_K", "F32"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_implementations_are_near_float64(backend, name):
    w, *a = of(name, act="clamped_swiglu", biased=True)
    kind = "rounded" if backend == "native" and name == "Q6_K" else "float"
    assert nmse(RUN[backend](*(z[:9] for z in a), w), exact(name)) <= EXPERTS_NMSE[kind]


@pytest.mark.parametrize("isa", ISAS)
def test_clamped_swiglu_equals_its_definition(isa):
    use(isa)
    size, (seven, one) = 64, np.float32([7, 1])
    g = np.random.default_rng(0).normal(size=(9, size)).astype(np.float32) * np.float32(8)
    identity = np.eye(size, dtype=np.float32)
    gate, up = (pack_qtensor(m, TYPES["F32"], (size, size)) for m in (identity, identity[::-1].copy()))
    (got,) = LINEAR(g, (gate, up), n_valid=jnp.array([len(g)], jnp.int32), act="clamped_swiglu")
    u, g = np.clip(g[:, ::-1], -seven, seven), np.minimum(g, seven)
    np.testing.assert_array_equal(got, g / (one + emulation.exp(np.float32(-1.702) * g)) * (u + one))


def choose(backend: str, logits, k=3, gating="softmax", normalised=True, n_valid=None) -> tuple[np.ndarray, np.ndarray]:
    how = {"k": k, "gating": gating, "normalised": normalised}
    count = jnp.array([len(logits)] if n_valid is None else n_valid, jnp.int32)
    run = jax.jit(partial(BACKENDS[backend].choose, **how))
    experts, weights = run(jnp.asarray(logits, jnp.float32), n_valid=count)
    return np.asarray(experts), np.asarray(weights)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_router_breaks_ties_by_index_and_divides_as_llama_cpp_does(backend):
    rows = [[1.0, 40.0, 50.0, -1.0, 60.0, 1.0], [-20.0] * 6]
    experts, weights = choose(backend, rows, gating="sigmoid")
    assert experts.tolist() == [[1, 2, 4], [0, 1, 2]]  # sigmoid gives 1 for 40 and more
    np.testing.assert_allclose(weights[0], 1 / 3, rtol=1e-6)
    low = scipy.special.expit(-20.0) * 2**14  # their sum is below float16's least normal number
    np.testing.assert_allclose(weights[1], low, rtol=1e-5)
    experts, weights = choose(backend, np.zeros((2, 4)), k=2, normalised=False)
    np.testing.assert_allclose(weights, 0.25, rtol=1e-6)  # not divided by their sum
    for gating in ("softmax", "sigmoid", "chosen"):
        _, weights = choose(backend, [[1.0, 2.0, np.nan, 0.0]], k=2, gating=gating)
        assert np.isnan(weights).all()  # not passed over


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("gating", ["softmax", "sigmoid", "chosen"])
def test_a_row_chooses_by_itself_as_the_reference_does(isa, gating):
    use(isa)
    logits = np.random.default_rng(0).normal(size=(8, 37)).astype(np.float32) * 4
    experts, weights = choose("native", logits, gating=gating, n_valid=[3, 1])
    wanted, near = choose("reference", logits, gating=gating, n_valid=[3, 1])
    np.testing.assert_array_equal(experts, wanted)
    np.testing.assert_allclose(weights, near, rtol=1e-5)
    assert (experts[3] == -1).all() and not weights[5:].any()
    for i in (0, 2, 4):
        alone = choose("native", logits[i : i + 1], gating=gating)
        same_bits(alone[1], weights[i : i + 1])


def test_what_does_not_go_together_is_refused():
    w, x, chosen, weights = of("Q4_0")
    bad_skip = replace(skipping(experts("Q4_0", act="relu")), act="silu")
    for bad in (bad_skip, replace(w, up=experts("Q6_K").up), replace(w, down_bias=jnp.zeros((E - 1, x.shape[1])))):
        with pytest.raises(jax.errors.JaxRuntimeError, match="specsparse experts"):
            jax.block_until_ready(cpu.experts(x, chosen, weights, bad))
