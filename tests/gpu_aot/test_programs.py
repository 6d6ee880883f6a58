"""Whole programs compiled for an H200: SmolLM2-135M's and a 7B's shapes, weights packed.

A layer is compiled, and a second one; what the second adds is what each layer adds, so that the figures of the whole
model are one layer's and the rest's. Nothing runs.
"""

import dataclasses
import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import pytest
from gguf import GGMLQuantizationType as GGML
from jax.sharding import NamedSharding, PartitionSpec

from specsparse.engine import llama
from specsparse.engine.fixed_width import fixed_width
from specsparse.kernels import get
from specsparse.kernels.gpu import attention, entry, mosaic, ops
from specsparse.kernels.gpu import fragments as fr
from specsparse.kernels.gpu.fragments import Plan, plan
from specsparse.kernels.gpu.ops import attend
from specsparse.kernels.gpu.weights import PlainMatrix
from specsparse.kernels.packing.pack import layout_of
from specsparse.kernels.qtensor import Layout
from specsparse.testing import tiny_config
from tests.card_programs import array, params_of, programs
from tests.gpu_aot import compiling, counting

WIDTH = 8
MOST = 1.15
"""Bytes over those of weights and cache that a step may read: operands times fetches, and the cache."""
IN_ALL = [("smollm2", "bf16"), ("7b", "bf16"), ("7b", "packed"), ("smollm2", "packed")]
"""Shapes, and how weights are kept."""
HOST = re.compile(r"callback|outfeed|infeed|\bsend\(|\brecv\(|S\(5\)|host_compute|HostExecute", re.IGNORECASE)
SHAPES = {
    "smollm2": (30, {"d_model": 576, "n_heads": 9, "n_kv_heads": 3, "d_ff": 1536, "vocab_size": 49152, "tied": True}),
    "7b": (32, {"d_model": 4096, "n_heads": 32, "n_kv_heads": 32, "d_ff": 11008, "vocab_size": 32000}),
}
CONTEXT = 512
ATTEND = partial(attend, compiled=True)
KEPT = {
    "packed": (
        dataclasses.replace(get("packed"), linear=partial(ops.linear, compiled=True), attend=ATTEND),
        lambda rows, cols: fr.abstract(layout_of(GGML.Q4_0), (rows, cols)),
    ),
    "bf16": (
        dataclasses.replace(get("bf16"), attend=ATTEND),
        lambda rows, cols: PlainMatrix(array([rows, cols], "bfloat16"), Layout("bf16")),
    ),
}
"""Kernels, and a matrix as they keep it: Q4_0 read packed, and two-byte weights, which `load` takes for both shapes."""


@pytest.fixture(scope="session")
def mesh():
    return compiling.device_mesh()


@cache
def program(shape: str, layers: int, name: str, kept: str = "packed"):
    """(function, args, config) of a program with so many layers."""
    (_, sizes), (kernels, matrix) = SHAPES[shape], KEPT[kept]
    config = tiny_config(n_layers=layers, context_length=CONTEXT, **sizes)
    return *programs(config, params_of(config, matrix, CONTEXT), kernels, WIDTH)[name], config


_DONE: dict[tuple, tuple[str, str]] = {}


def compiled_program(mesh, capfd, *key) -> tuple[str, str]:
    """Text of a program (shape, layers, name), and what the assembler said of its kernels. Compiled once."""
    if key not in _DONE:
        function, args, _ = program(*key)
        capfd.readouterr()
        found = compiling.lowered(function, args, mesh, donate=(3,) if key[2] == "prompt" else (2,)).compile()
        _DONE[key] = found.as_text(), "".join(capfd.readouterr())
    return _DONE[key]


def stored(*key) -> int:
    """Bytes of weights and cache of one step."""
    _, args, _ = program(*key)
    params, state = args[0], args[2]
    once = params._replace(embedding=None, cos=None, sin=None)
    return counting.tree_bytes(once) + counting.tree_bytes(state.cache)


def step_bytes(mesh, capfd, *key) -> tuple[int, int]:
    """(by our kernels, by the rest) of one round."""
    function, args, _ = program(*key)
    compiled = counting.Compiled(compiled_program(mesh, capfd, *key)[0])
    return counting.kernels_of_loop(function, args), compiled.reads(compiled.loop())


@pytest.mark.parametrize("name", ["decode", "verify", "tree", "prompt"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_program_compiles_without_spills_dense_copies_or_the_host(mesh, shape, name, capfd):
    text, printed = compiled_program(mesh, capfd, shape, 1, name)
    used = compiling.registers(printed)
    ours = sorted({r.used for r in used if "mosaic" in r.name})  # equal kernels are assembled once in a process
    with capfd.disabled():
        print(f"\n{shape} {name}: {len(used)} kernels, ours new with {ours} registers")
    assert used and not [r for r in used if r.spilled]
    assert not HOST.search(re.sub(r'custom_call_target="[^"]*"', "", text))
    if name != "prompt":
        assert "mosaic_gpu" in text
        assert not counting.Compiled(text).dense_copies(weight_sizes(shape))


@pytest.mark.parametrize(("shape", "kept"), IN_ALL)
def test_a_decode_step_reads_little_beside_weights_and_cache(mesh, shape, kept, capfd):
    layers = SHAPES[shape][0]
    one, two = ((shape, n, "decode", kept) for n in (1, 2))

    def whole(first, second):
        return first + (layers - 1) * (second - first)

    kernels, rest = (whole(*both) for both in zip(step_bytes(mesh, capfd, *one), step_bytes(mesh, capfd, *two)))
    base, cache = whole(stored(*one), stored(*two)), layers * counting.tree_bytes(program(*one)[1][2].cache)
    with capfd.disabled():
        print(
            f"\n{shape} {kept}: {kernels / 1e6:.1f} MB by kernels, {rest / 1e6:.1f} by XLA, of {base / 1e6:.1f} stored "
            f"with {cache / 1e6:.1f} of cache: in all {(kernels + rest) / base:.3f}"
        )
    assert base < kernels + rest <= MOST * base
    if kept == "packed":
        assert base < kernels <= MOST * base


def weight_sizes(shape: str) -> set[int]:
    """Numbers of each matrix, as stored."""
    params = program(shape, 1, "decode")[1][0]
    matrices = [
        w for w in jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, fr.Fragments)) if isinstance(w, fr.Fragments)
    ]
    return {w.shape[0] * w.shape[1] for w in matrices}


KERNELS = {
    **{kind: (8, 16, 24, 32, 64) for kind in ("Q4_0", "Q4_K", "Q6_K")},
    **{kind: (8, 64) for kind in ("Q8_0", "Q4_1", "Q2_K", "IQ4_XS", "MXFP4", "NVFP4")},
}
"""Rows by type: of each way to code weights and scales one, the widest and the narrowest step."""


@pytest.mark.parametrize("kind", KERNELS)
def test_no_product_spills_at_any_width(mesh, kind, capfd):
    """Of a 4096 x 4096 matrix."""
    w, found = fr.abstract(layout_of(GGML[kind]), (4096, 4096)), []
    for count in KERNELS[kind]:
        capfd.readouterr()
        compiling.lowered(lambda x, w: ops.multiply(x, w, compiled=True), (array([count, 4096]), w), mesh).compile()
        kernels = [r for r in compiling.registers("".join(capfd.readouterr())) if "mosaic" in r.name]
        found += [(count, max(r.used for r in kernels), sum(r.spilled for r in kernels))] if kernels else []
    with capfd.disabled():
        print(f"\n{kind}: " + ", ".join(f"{count} rows {used} registers" for count, used, _ in found))
    assert len(found) >= len(KERNELS[kind]) - 1  # one may have been assembled for another test
    assert not [one for one in found if one[2]]


@pytest.mark.parametrize(
    ("rows", "heads", "d", "slots"), [(8, 3, 64, 1024), (8, 3, 64, 768), (8, 4, 128, 512), (16, 2, 64, 256)]
)
def test_attention_does_not_spill(mesh, rows, heads, d, slots, capfd):
    """The most rows and heads, the widest heads and the most slots."""
    whole = array([1, rows], "int32")
    assert attention.parts_of(rows, heads, d, slots)
    capfd.readouterr()
    compiling.lowered(
        attention.attend,
        (
            array([1, rows, 2, heads, d]), array([1, 2, slots // 16, d, 16], "float16"),
            array([1, 2, slots, d], "float16"), whole, whole, array([1, rows, rows], "int32"), array([1], "int32"),
            whole,
        ),
        mesh,
    ).compile()  # fmt: skip
    used = [r for r in compiling.registers("".join(capfd.readouterr())) if "mosaic" in r.name]
    with capfd.disabled():
        print(f"\nattention of {rows} rows, {heads} heads of {d}, {slots} slots: {[r.used for r in used]} registers")
    assert used and not [r for r in used if r.spilled]


def test_a_step_of_any_width_up_to_the_models_is_the_same_program(mesh):
    """The pass itself, without what drafts and judges: from one row to eight the same operations, kernels included.

    One row and eight are compiled too: what is fused, and what is called, stays the same.
    """
    _, (params, _, state, _), config = program("smollm2", 1, "decode")
    forward = fixed_width(llama.make_forward(config, KEPT["packed"][0]), WIDTH)

    def step(p, t, c, v):
        return forward(p, t, c, n_valid_B=v)[0].logits

    def given(n):
        return params, array([1, n], "int32"), state.cache, array([1], "int32")

    inside = {between_barriers(jax.make_jaxpr(step)(*given(n)).jaxpr) for n in range(1, WIDTH + 1)}
    assert len(inside) == 1 and all(counting.KERNEL in text for text in inside)
    assert between_barriers(jax.make_jaxpr(step)(*given(WIDTH + 1)).jaxpr) not in inside  # longer ones are prompts

    def kinds(n):
        lowered = compiling.lowered(step, given(n), mesh)
        lines = [line for c in counting.Compiled(lowered.compile().as_text()).computations.values() for line in c]
        calls = sorted((kind, len(operands)) for _, kind, op, operands, _ in lines if op == "custom-call")
        return calls, sorted(kind for _, kind, op, *_ in lines if op in ("fusion", "dot"))

    (few, one), (many, eight) = kinds(1), kinds(WIDTH)
    assert few == many and few
    differing = set(one) ^ set(eight)
    assert len(differing) <= 4, differing  # padding before and cutting after


def between_barriers(jaxpr) -> str:
    """The operations between the first optimisation barrier and the last, names of values by order; "" without."""
    at = [i for i, eqn in enumerate(jaxpr.eqns) if eqn.primitive.name == "optimization_barrier"]
    if not at:
        return ""
    first, last = jaxpr.eqns[at[0]], jaxpr.eqns[at[-1]]
    return str(
        jaxpr.replace(constvars=(), invars=first.outvars, outvars=last.outvars, eqns=jaxpr.eqns[at[0] + 1 : at[-1] + 1])
    )


def test_a_doubled_fetch_and_a_dense_copy_are_found(mesh):
    """The checks above can fail: a kernel that reads its weights twice, and weights that are widened for eight rows."""
    w = fr.abstract(layout_of(GGML.Q4_0), (4096, 4096))
    x = array([8, 4096])
    how = plan(w, 1)

    def by(how):
        def call(x, w):
            return mosaic.product((w,), entry.pack(x, None, 0.0), how)

        return counting.kernel_loads(jax.make_jaxpr(call)(x, w).jaxpr)

    size = counting.tree_bytes(w)
    assert size < by(how) <= MOST * size
    assert by(dataclasses.replace(how, splits=2 * how.splits)) > 2 * size  # the second half again, under another name

    def widened(x, w):
        half = jnp.bfloat16
        return jnp.einsum("rk,nk->rn", x.astype(half), fr.widened(w, half), preferred_element_type=jnp.float32)

    dense = counting.Compiled(compiling.lowered(widened, (x, w), mesh).compile().as_text())
    assert dense.dense_copies({4096 * 4096})


def test_spills_and_transfers_to_the_host_are_found(mesh, capfd):
    """Four warpgroups for 64 rows of Q4_K have too few registers; a result in the host's memory is a transfer."""
    w, x = fr.abstract(layout_of(GGML.Q4_K), (4096, 4096)), array([64, 4096])
    how = Plan(1, 4, 1, 4, 4)

    def crowded(x, w):
        return mosaic.product((w,), entry.pack(x, None, 0.0), how)

    capfd.readouterr()
    compiling.lowered(crowded, (x, w), mesh).compile()
    assert [r for r in compiling.registers("".join(capfd.readouterr())) if r.spilled]

    def sent(x):
        return jax.device_put(x * 2, NamedSharding(mesh.abstract_mesh, PartitionSpec(), memory_kind="pinned_host"))

    assert HOST.search(compiling.lowered(sent, (x,), mesh).compile().as_text())
