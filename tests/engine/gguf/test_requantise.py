"""Re-quantised files: the same model, its matrices in another type."""

import numpy as np
import pytest
from gguf import quants
from gguf.constants import GGMLQuantizationType

from specsparse.engine.config import ModelConfig
from specsparse.engine.gguf import requantise
from specsparse.engine.gguf.reader import open_gguf
from specsparse.engine.text.tokenizer import Tokenizer
from specsparse.errors import UserError
from specsparse.testing import write_tiny_gguf


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("requantise")
    return open_gguf(write_tiny_gguf(folder / "tiny.gguf", quant="F32", tied=True, metadata={"general.name": "a name"}))


@pytest.mark.parametrize("name", requantise.targets())
def test_weights_are_what_gguf_makes_of_the_source(source, tmp_path, name):
    kind = requantise.kind_of(name)
    made = open_gguf(requantise.requantise(source, tmp_path / "made.gguf", kind))
    assert list(made.tensors) == list(source.tensors)
    for key, tensor in source.tensors.items():
        to = requantise.type_for(tensor.name, tensor.shape, kind, tied=True)
        assert made.tensors[key].type == to
        wanted = quants.quantize(tensor.dequantize(), to)
        np.testing.assert_array_equal(made.tensors[key].raw.reshape(-1), wanted.view(np.uint8).reshape(-1))


def test_metadata_stays(source, tmp_path):
    made = open_gguf(requantise.requantise(source, tmp_path / "made.gguf", GGMLQuantizationType.Q8_0))
    changed = {"general.file_type", "general.quantization_version"}
    assert set(made.metadata) == set(source.metadata) | changed
    for key, value in source.metadata.items():
        if key not in changed:
            np.testing.assert_array_equal(made.metadata[key], value)
            assert type(made.metadata[key]) is type(value)
    assert ModelConfig.from_gguf(made) == ModelConfig.from_gguf(source)
    ours = Tokenizer.from_metadata(made.metadata, where="made").encode("hello there")
    assert ours == Tokenizer.from_metadata(source.metadata, where="source").encode("hello there")


def test_a_file_of_the_same_type_keeps_its_bytes(source, tmp_path):
    once = open_gguf(requantise.requantise(source, tmp_path / "once.gguf", GGMLQuantizationType.Q5_0))
    again = open_gguf(requantise.requantise(once, tmp_path / "again.gguf", GGMLQuantizationType.Q5_0))
    assert (tmp_path / "once.gguf").read_bytes() == (tmp_path / "again.gguf").read_bytes()
    assert again.metadata["general.file_type"] == 8


def test_four_bit_types_keep_the_output_at_eight(tmp_path):
    q4 = GGMLQuantizationType.Q4_0
    for tied, kept in ((True, "token_embd.weight"), (False, "output.weight")):
        f = open_gguf(write_tiny_gguf(tmp_path / "tiny.gguf", tied=tied))
        types = {
            n: requantise.type_for(t.name, t.shape, q4, tied=tied).name
            for n, t in f.tensors.items()
            if len(t.shape) > 1
        }
        assert {n for n, t in types.items() if t == "Q8_0"} == {kept}
        assert {t for n, t in types.items() if n != kept} == {"Q4_0"}


def test_rows_that_do_not_fit_the_block_become_f16(tmp_path):
    f = open_gguf(write_tiny_gguf(tmp_path / "odd.gguf", d_model=48, n_heads=3, n_kv_heads=3, d_ff=64))
    made = open_gguf(requantise.requantise(f, tmp_path / "made.gguf", GGMLQuantizationType.Q8_0))
    assert made.tensors["blk.0.attn_q.weight"].type.name == "F16"
    assert made.tensors["blk.0.ffn_down.weight"].type.name == "Q8_0"


@pytest.mark.parametrize("name", ["Q4_9", "", "I32"])
def test_unknown_types_are_named(name):
    with pytest.raises(UserError, match=r"cannot quantise to .*: choose one of .*Q4_0"):
        requantise.kind_of(name)


def test_a_place_that_cannot_be_written(source, tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match="cannot be written"):
        requantise.requantise(source, tmp_path / "folder", GGMLQuantizationType.F16)
    with pytest.raises(UserError, match=r"there is no folder .*missing to write it in"):
        requantise.requantise(source, tmp_path / "missing" / "made.gguf", GGMLQuantizationType.F16)
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_a_damaged_file_is_refused_and_leaves_nothing(tmp_path):
    path = write_tiny_gguf(tmp_path / "tiny.gguf", quant="F32", n_layers=1)
    f = open_gguf(path)
    data = bytearray(path.read_bytes())
    tensor = next(t for t in f.tensors.values() if len(t.shape) > 1)
    at = bytes(data).index(tensor.raw.tobytes())
    data[at : at + 4] = np.float32(np.inf).tobytes()
    path.write_bytes(data)
    with pytest.raises(UserError, match="not finite"):
        requantise.requantise(open_gguf(path), tmp_path / "made.gguf", GGMLQuantizationType.Q8_0)
    assert [p.name for p in tmp_path.iterdir()] == ["tiny.gguf"]
