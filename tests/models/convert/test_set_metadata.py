"""One value changes, in its own type; every other value and every tensor stays, byte for byte."""

import numpy as np
import pytest
from gguf import GGUFReader

from specsparse.cli import main as cli
from specsparse.engine.gguf.reader import open_gguf
from specsparse.errors import UserError
from specsparse.models.convert.edit import set_metadata
from specsparse.testing import write_tiny_gguf

EOS = "tokenizer.ggml.eos_token_id"


@pytest.fixture
def file(tmp_path):
    return write_tiny_gguf(tmp_path / "t.gguf", quant="Q8_0", n_layers=1, metadata={"my.flag": False, "my.rate": 0.5})


def values(path):
    """Everything but the header's places, read by the library: types and values of keys, tensors."""
    reader = GGUFReader(path)
    keys = {k: (f.types, [np.asarray(p).tolist() for p in f.parts[2:]]) for k, f in reader.fields.items()}
    tensors = {t.name: (t.tensor_type, t.data.tobytes()) for t in reader.tensors}
    return {k: v for k, v in keys.items() if not k.startswith("GGUF.")}, tensors


@pytest.mark.parametrize(
    ("key", "value", "reads"),
    [
        (EOS, "7", 7),
        ("general.name", "a longer name \u00e9", "a longer name \u00e9"),
        ("my.flag", "true", True),
        ("my.rate", "2.5", 2.5),
    ],
)
def test_one_value_changes(file, tmp_path, key, value, reads):
    before = file.read_bytes()
    old, new = set_metadata(file, key, value, tmp_path / "new.gguf")
    assert (old, new) == (str(open_gguf(file).metadata[key]), str(reads)) and file.read_bytes() == before
    assert open_gguf(tmp_path / "new.gguf").metadata[key] == reads
    (keys, tensors), (keys_new, tensors_new) = values(file), values(tmp_path / "new.gguf")
    assert list(keys) == list(keys_new) and keys[key][0] == keys_new[key][0]
    assert {k: v for k, v in keys.items() if k != key} == {k: v for k, v in keys_new.items() if k != key}
    assert tensors == tensors_new


def test_a_new_key_comes_last(file):
    _, tensors = values(file)
    assert set_metadata(file, "tokenizer.ggml.eot_token_id", "2", type_name="uint32") == ("nothing", "2")
    keys, tensors_new = values(file)
    assert list(keys)[-1] == "tokenizer.ggml.eot_token_id" and tensors == tensors_new
    assert open_gguf(file).metadata["tokenizer.ggml.eot_token_id"] == 2


def test_there_and_back_is_the_same_file(file):
    before = file.read_bytes()
    set_metadata(file, "general.name", "x" * 100)
    assert file.read_bytes() != before
    set_metadata(file, "general.name", "tiny")
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    ("key", "value", "options", "says"),
    [
        (EOS, "-1", {}, f"{EOS}=-1: is no uint32"),
        (EOS, "many", {}, "is no uint32"),
        (EOS, "1", {"type_name": "string"}, f"{EOS} is of type uint32, not string"),
        (EOS, "1", {"type_name": "u32"}, "is of type uint32, not u32"),
        ("my.flag", "maybe", {}, "is no bool"),
        ("tokenizer.ggml.tokens", "x", {}, "is an array; only single values"),
        ("no.such", "x", {}, "'no.such': there is no such key; to add it give --type"),
        ("general.alignment", "64", {}, "says how the file is laid out"),
        ("", "x", {"type_name": "string"}, "a key is needed"),
        ("general.architecture", "\udcff", {}, "must be UTF-8 text"),
        ("my.\udcff", "x", {"type_name": "string"}, "'my.\\udcff': key and value must be UTF-8"),
    ],
)
def test_mistakes(file, key, value, options, says):
    before = file.read_bytes()
    with pytest.raises(UserError) as caught:
        set_metadata(file, key, value, **options)
    assert says in str(caught.value) and file.read_bytes() == before
    assert [p.name for p in file.parent.iterdir()] == [file.name]


def test_from_the_command_line(file, capsys):
    assert cli.main(["convert", "set-metadata", str(file), EOS, "5"]) == 0
    assert capsys.readouterr().out == f"{EOS}: 5 (was 2)\n"
    assert cli.main(["convert", "quantize", str(file), str(file), "q4_0"]) == 2
    assert "is the source; give another file" in capsys.readouterr().err
    assert cli.main(["convert", "quantise"]) == 2
    assert "invalid choice: 'quantise'" in capsys.readouterr().err
