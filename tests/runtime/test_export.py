"""The programs of a model lower for GPUs and TPUs on a machine that has none, and call no host in their loops."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from gguf import GGMLQuantizationType as GGML

from specsparse.kernels import BACKENDS, QTensor
from specsparse.kernels.gpu import fragments, ops
from specsparse.kernels.gpu.ops import attend
from specsparse.kernels.packing.pack import FLOATS, layout_of
from specsparse.testing import tiny_config
from tests.card_programs import array, params_of, programs

WIDTH = 8
HOST = re.compile(r"callback|outfeed|infeed|stablehlo\.(send|recv)|annotate_device_placement", re.IGNORECASE)


def floats(rows: int, cols: int) -> QTensor:
    """A float32 matrix by shape."""
    (layout,) = [layout for layout in FLOATS.values() if layout.codes == "f32"]
    return QTensor(array([-(-rows // 16), layout.group_bytes(cols)], "uint8"), layout, (rows, cols))


@pytest.fixture(scope="module")
def tiny():
    config = tiny_config(n_layers=1, context_length=64, vocab_size=64)
    return programs(config, params_of(config, floats, 64), BACKENDS["xla"], WIDTH)


@pytest.mark.parametrize("name", ["decode", "verify", "tree", "prompt"])
def test_a_program_is_exported_for_cuda_and_tpu_and_calls_no_host(tiny, name):
    function, args = tiny[name]
    exported = jax.export.export(jax.jit(function), platforms=["cuda", "tpu"])(*args)
    text = exported.mlir_module()
    assert exported.platforms == ("cuda", "tpu")
    assert not HOST.search(text)
    assert name == "prompt" or "stablehlo.while" in text


@pytest.mark.parametrize("kind", ["Q4_0", "Q6_K"])
def test_the_packed_product_is_exported_for_cuda(kind):
    """Pallas lowers it to calls of Mosaic GPU, rows and product; no dense weight is in the program around them."""
    w = fragments.abstract(layout_of(GGML[kind]), (320, 512))
    text = for_cuda(lambda x, w: ops.multiply(x, w, compiled=True), array([8, 512]), w)
    assert calls_of(text) == 2 and "dot_general" not in text


def test_an_ffn_and_attention_of_a_step_are_a_few_kernels_each():
    """Rows in, gate and up, rows in, down with the residual sum; and one for attention, with no score outside it."""
    gate, down = (fragments.abstract(layout_of(GGML["Q4_0"]), shape) for shape in ((128, 64), (64, 128)))

    def ffn(x, gate, up, down, n_valid):
        both = partial(ops.linear, compiled=True, n_valid=n_valid)
        (h,) = both(x, (gate, up), norm=jnp.ones(64), eps=1e-5, act="silu")
        return both(h, (down,), residual=x)[0]

    text = for_cuda(ffn, array([8, 64]), gate, gate, down, array([1], "int32"))
    assert calls_of(text) == 4 and "logistic" not in text

    whole, table, heads = array([1], "int32"), array([1, 256, 16]), array([8, 32])
    keys, values = array([1, 1, 16, 32, 16], "float16"), array([1, 1, 256, 32], "float16")

    def attention(*args):
        names = ("cos", "sin", "length", "n_valid", "parents")
        return attend(*args[:5], **dict(zip(names, args[5:], strict=True)), compiled=True)[0]

    text = for_cuda(attention, heads, heads, heads, keys, values, table, table, whole, whole, array([1, 8], "int32"))
    assert calls_of(text) == 1 and "exponential" not in text


def for_cuda(function, *args) -> str:
    """The exported program."""
    pytest.importorskip("jax.experimental.pallas.mosaic_gpu")
    calls = [jax.export.DisabledSafetyCheck.custom_call(f"mosaic_gpu{version}") for version in ("", "_v2")]
    return jax.export.export(jax.jit(function), platforms=["cuda"], disabled_checks=calls)(*args).mlir_module()


def calls_of(text: str) -> int:
    """Kernels of our own in it."""
    return len(re.findall(r"custom_call @mosaic_gpu", text))
