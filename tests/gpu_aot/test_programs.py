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

from specsparse.engine import llama
from specsparse.engine.fixed_width import fixed_width
from specsparse.kernels import get
from specsparse.kernels.gpu import fragments as fr
from specsparse.kernels.gpu import mosaic, product, rows
from specsparse.kernels.gpu.plan import plan
from specsparse.kernels.packing.pack import layout_of
from specsparse.testing import tiny_config
from tests.card_programs import array, params_of, programs
from tests.gpu_aot import compiling, counting

WIDTH = 8
MOST = 1.15
"""Bytes over those of weights and cache that our kernels read, with the cache read once: operands times fetches."""
IN_ALL = {"smollm2": 1.9, "7b": 1.27}
"""The same with all that XLA's operations read: rows of activations, logits, and attention, which writes what it masks.
These are not at 1.15 yet; what they read lies in the card's 50 MB second-level cache."""
HOST = re.compile(r"callback|outfeed|infeed|\bsend\(|\brecv\(|S\(5\)|host_compute|HostExecute", re.IGNORECASE)
SHAPES = {
    "smollm2": (30, {"d_model": 576, "n_heads": 9, "n_kv_heads": 3, "d_ff": 1536, "vocab_size": 49152, "tied": True}),
    "7b": (32, {"d_model": 4096, "n_heads": 32, "n_kv_heads": 32, "d_ff": 11008, "vocab_size": 32000}),
}
CONTEXT = 512
PACKED = dataclasses.replace(get("packed"), linear=partial(product.linear, compiled=True))


@pytest.fixture(scope="session")
def mesh():
    return compiling.device_mesh()


@cache
def program(shape: str, layers: int, name: str):
    """(function, args, config) of a program with so many layers."""
    _, sizes = SHAPES[shape]
    config = tiny_config(n_layers=layers, context_length=CONTEXT, **sizes)
    params = params_of(config, lambda n, k: fr.abstract(layout_of(GGML.Q4_0), (n, k)), CONTEXT)
    return *programs(config, params, PACKED, WIDTH)[name], config


_DONE: dict[tuple, tuple[str, str]] = {}


def compiled_program(mesh, capfd, *key) -> tuple[str, str]:
    """Text of a program (shape, layers, name), and what the assembler said of its kernels. Compiled once."""
    if key not in _DONE:
        function, args, _ = program(*key)
        capfd.readouterr()
        found = compiling.lowered(function, args, mesh, donate=(3,) if key[2] == "prompt" else (2,)).compile()
        _DONE[key] = found.as_text(), "".join(capfd.readouterr())
    return _DONE[key]


def stored(shape: str, layers: int) -> int:
    """Bytes of packed weights and cache of one step."""
    _, args, _ = program(shape, layers, "decode")
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


@pytest.mark.parametrize("shape", SHAPES)
def test_a_decode_step_reads_little_beside_weights_and_cache(mesh, shape, capfd):
    layers = SHAPES[shape][0]
    (kernels_1, rest_1), (kernels_2, rest_2) = (step_bytes(mesh, capfd, shape, n, "decode") for n in (1, 2))
    kernels = kernels_1 + (layers - 1) * (kernels_2 - kernels_1)
    rest = rest_1 + (layers - 1) * (rest_2 - rest_1)
    base = stored(shape, 1) + (layers - 1) * (stored(shape, 2) - stored(shape, 1))
    cache = layers * counting.tree_bytes(program(shape, 1, "decode")[1][2].cache)
    with capfd.disabled():
        print(
            f"\n{shape}: {kernels / 1e6:.1f} MB by kernels, {rest / 1e6:.1f} by XLA, of {base / 1e6:.1f} stored with "
            f"{cache / 1e6:.1f} of cache: {(kernels + cache) / base:.3f}, in all {(kernels + rest) / base:.3f}"
        )
    assert kernels + cache <= MOST * base
    assert kernels + rest <= IN_ALL[shape] * base


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
        compiling.lowered(lambda x, w: product.multiply(x, w, compiled=True), (array([count, 4096]), w), mesh).compile()
        kernels = [r for r in compiling.registers("".join(capfd.readouterr())) if "mosaic" in r.name]
        found += [(count, kernels[0].used, kernels[0].spilled)] if kernels else []
    with capfd.disabled():
        print(f"\n{kind}: " + ", ".join(f"{count} rows {used} registers" for count, used, _ in found))
    assert len(found) >= len(KERNELS[kind]) - 1  # one may have been assembled for another test
    assert not [one for one in found if one[2]]


def test_a_step_of_any_width_up_to_the_models_is_the_same_program(mesh):
    """The pass itself, without what drafts and judges: one row and eight are lowered to one text."""
    _, (params, _, state, _), config = program("smollm2", 1, "decode")
    forward = fixed_width(llama.make_forward(config, PACKED), WIDTH)

    def inner(n):
        lowered = compiling.lowered(
            lambda p, t, c, v: forward(p, t, c, n_valid_B=v)[0].logits,
            (params, array([1, n], "int32"), state.cache, array([1], "int32")), mesh,
        )  # fmt: skip
        compiled = counting.Compiled(lowered.compile().as_text())
        calls = [line for lines in compiled.computations.values() for line in lines if line[2] == "custom-call"]
        return sorted((kind, len(operands)) for _, kind, _, operands, _ in calls), compiled

    few, one = inner(1)
    many, eight = inner(WIDTH)
    assert few == many and few

    def fusions(c):
        return sorted(kind for lines in c.computations.values() for _, kind, op, *_ in lines if op in ("fusion", "dot"))

    differing = set(fusions(one)) ^ set(fusions(eight))
    assert len(differing) <= 4, differing  # padding before and cutting after


def test_a_doubled_fetch_and_a_dense_copy_are_found(mesh):
    """The checks above can fail: a kernel that reads its weights twice, and weights that are widened for eight rows."""
    w = fr.abstract(layout_of(GGML.Q4_0), (4096, 4096))
    x = array([8, 4096])
    how = plan(w, 1)

    def by(how):
        def call(x, w):
            return mosaic.product(w, rows.pack_rows(*rows.quantise(x), w), how)

        return counting.kernel_loads(jax.make_jaxpr(call)(x, w).jaxpr)

    size = counting.tree_bytes(w)
    assert size < by(how) <= MOST * size
    assert by(dataclasses.replace(how, splits=2 * how.splits)) > 2 * size  # the second half again, under another name

    def widened(x, w):
        half = jnp.bfloat16
        return jnp.einsum("rk,nk->rn", x.astype(half), fr.widened(w, half), preferred_element_type=jnp.float32)

    dense = counting.Compiled(compiling.lowered(widened, (x, w), mesh).compile().as_text())
    assert dense.dense_copies({4096 * 4096})
