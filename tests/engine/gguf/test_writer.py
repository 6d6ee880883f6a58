"""Files of the one writer: the gguf library reads them, our reader gives the values back, a failure leaves nothing."""

import ast
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as GGML

import specsparse
from specsparse.engine.gguf.reader import POWERINFER_MAGIC, open_gguf
from specsparse.engine.gguf.writer import NewTensor, write_gguf
from specsparse.errors import UserError

KEYS = {
    "general.architecture": "llama",
    "small": 7,
    "below": -7,
    "large": 1 << 40,
    "ratio": 0.1,
    "yes": True,
    "names": ["a", "ä"],
    "types": [1, 3],
    "scores": [0.5, -1.0],
    "wide": np.arange(3, dtype=np.int64),
    "narrow": np.uint16(3),
}


@pytest.fixture
def tensors():
    values = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    return [NewTensor.from_values("a", values, GGML.Q8_0), NewTensor.from_values("b", values[0], GGML.F32)]


def test_values_come_back(tmp_path, tensors):
    f = open_gguf(write_gguf(tmp_path / "a.gguf", {**KEYS, "general.alignment": 64, "nothing": []}, tensors))
    assert f.metadata.keys() == KEYS.keys()
    for key, value in KEYS.items():
        np.testing.assert_array_equal(f.metadata[key], np.float32(value) if key == "ratio" else value)
    assert (f.metadata["types"].dtype, f.metadata["scores"].dtype) == (np.int32, np.float32)
    for t in tensors:
        np.testing.assert_array_equal(f.tensors[t.name].raw.ravel(), t.data().view(np.uint8).ravel())
    own = {**f.metadata, "narrow": KEYS["narrow"]}  # a width that plain numbers do not say
    again = write_gguf(tmp_path / "b.gguf", own, [NewTensor.from_file(t) for t in f.tensors.values()])
    assert again.read_bytes() == f.path.read_bytes()


def test_the_gguf_library_reads_them(tmp_path, tensors):
    theirs = gguf.GGUFReader(write_gguf(tmp_path / "a.gguf", KEYS, tensors))
    kinds = {name: [kind.name for kind in theirs.fields[name].types] for name in KEYS}
    assert kinds["small"] == ["UINT32"] and kinds["below"] == ["INT64"]
    assert kinds["large"] == ["UINT64"] and kinds["ratio"] == ["FLOAT32"] and kinds["yes"] == ["BOOL"]
    assert kinds["types"] == ["ARRAY", "INT32"] and kinds["narrow"] == ["UINT16"]
    assert [(t.name, t.tensor_type) for t in theirs.tensors] == [("a", GGML.Q8_0), ("b", GGML.F32)]


@pytest.mark.parametrize(
    ("keys", "says"),
    [({"": 1}, "key is empty"), ({"k": None}, "k holds None"), ({"k": [1, "a"]}, "k holds"), ({"k": {}}, "k holds")],
)
def test_a_key_that_no_reader_takes(tmp_path, tensors, keys, says):
    with pytest.raises(ValueError, match=says):
        write_gguf(tmp_path / "a.gguf", keys, tensors)
    assert not list(tmp_path.iterdir())


def test_tensors_that_do_not_fit(tmp_path, tensors):
    path, a, b = tmp_path / "a.gguf", *tensors
    with pytest.raises(ValueError, match="names of their own"):
        write_gguf(path, {}, [a, a])
    with pytest.raises(ValueError, match="0 dimensions"):
        write_gguf(path, {}, [NewTensor("c", GGML.F32, (), b.data)])
    with pytest.raises(ValueError, match="has 256 bytes, its type and shape ask for 128"):
        write_gguf(path, {}, [a, NewTensor("c", GGML.F32, (32,), b.data)])
    with pytest.raises(UserError, match="rows of 33: type Q8_0"):
        write_gguf(path, {}, [NewTensor("c", GGML.Q8_0, (33,), b.data)])
    with pytest.raises(UserError, match="type BF16 cannot hold them in a PWRI file"):
        write_gguf(path, {}, [NewTensor("c", GGML.BF16, (32,), b.data)], magic=POWERINFER_MAGIC)
    assert not list(tmp_path.iterdir())


def test_nothing_else_writes_or_reads_the_container():
    own = {"GGUFWriter", "GGUFReader"}
    root = Path(specsparse.__file__).parent
    for path in (*root.rglob("*.py"), *(root.parent / "experiments").glob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        used = {n.attr for n in nodes if isinstance(n, ast.Attribute)}
        used |= {alias.name for n in nodes if isinstance(n, ast.ImportFrom) for alias in n.names}
        assert not used & own, f"{path} uses {used & own}: engine/gguf/reader.py and writer.py are the only ones"
