"""Models split into several files open as one, and what does not belong together is refused."""

import shutil

import numpy as np
import pytest

from specsparse.engine.config import ModelConfig
from specsparse.engine.gguf.reader import open_gguf, open_one
from specsparse.engine.gguf.shards import shard_names
from specsparse.errors import UserError
from specsparse.testing import write_tiny_gguf
from tests.engine.gguf.shards import split


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return write_tiny_gguf(tmp_path_factory.mktemp("whole") / "m.gguf", quant="Q8_0", tokenizer="spm")


def refusal(path):
    with pytest.raises(UserError) as caught:
        open_gguf(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_three_files_are_one_model(whole, tmp_path):
    names = split(whole, tmp_path, count=3)
    assert names == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    f, joined = open_gguf(whole), open_gguf(tmp_path / names[0])
    assert list(joined.tensors) == list(f.tensors) and joined.metadata.keys() == f.metadata.keys()
    for name, tensor in f.tensors.items():
        np.testing.assert_array_equal(joined.tensors[name].raw, tensor.raw)
    assert ModelConfig.from_gguf(joined) == ModelConfig.from_gguf(f)
    assert len(open_one(tmp_path / names[1]).tensors) < len(f.tensors)


def test_a_later_file_names_the_first(whole, tmp_path):
    names = split(whole, tmp_path, count=2)
    assert f"file 2 of 2: give the first one, {names[0]}" in refusal(tmp_path / names[1])


def test_a_missing_file(whole, tmp_path):
    names = split(whole, tmp_path, count=2)
    (tmp_path / names[1]).unlink()
    assert f"{names[1]}: no such file" in refusal(tmp_path / names[0])


def test_another_name(whole, tmp_path):
    names = split(whole, tmp_path, count=2)
    (tmp_path / names[0]).rename(tmp_path / "renamed.gguf")
    assert "its name must be -00001-of-00002.gguf" in refusal(tmp_path / "renamed.gguf")


def test_files_of_another_split(whole, tmp_path):
    names = split(whole, tmp_path, count=3)
    shutil.copy(tmp_path / names[2], tmp_path / names[1])
    assert f"{names[1]}: is not file 2 of the 3 that {names[0]} begins" in refusal(tmp_path / names[0])


def test_a_tensor_too_many_or_too_few(whole, tmp_path):
    names = split(whole, tmp_path, count=2, tensors_count=99)
    assert "hold 21 tensors, 99 are needed" in refusal(tmp_path / names[0])


def test_names():
    assert shard_names("a.gguf") == [] and shard_names("a-1-of-2.gguf") == []
    assert shard_names("x-00002-of-00002.gguf") == ["x-00001-of-00002.gguf", "x-00002-of-00002.gguf"]
