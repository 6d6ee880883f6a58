"""The programs of a model lower for GPUs and TPUs on a machine that has none, and call no host in their loops."""

import re

import jax
import pytest
from gguf import GGMLQuantizationType as GGML

from specsparse.kernels import BACKENDS, QTensor
from specsparse.kernels.gpu import fragments, product
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
    """Pallas lowers it to a call of Mosaic GPU; no dense weight is in the program around it."""
    pytest.importorskip("jax.experimental.pallas.mosaic_gpu")
    w = fragments.abstract(layout_of(GGML[kind]), (320, 512))
    lowered = jax.jit(lambda x, w: product.multiply(x, w, compiled=True))
    calls = [jax.export.DisabledSafetyCheck.custom_call(f"mosaic_gpu{version}") for version in ("", "_v2")]
    text = jax.export.export(lowered, platforms=["cuda"], disabled_checks=calls)(array([8, 512]), w).mlir_module()
    assert "mosaic_gpu" in text and "dot_general" not in text
