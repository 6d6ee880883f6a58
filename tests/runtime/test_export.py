"""The programs of a model lower for GPUs and TPUs on a machine that has none, and call no host in their loops."""

import re

import jax
import pytest

from specsparse.kernels import BACKENDS, QTensor
from specsparse.kernels.packing.pack import FLOATS
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
