"""A difference gives back the model that it was made of, key for key and byte for byte, and fits its own base only."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType as GGML
from gguf import quants

from specsparse.cli import main as cli
from specsparse.engine.config import ModelConfig
from specsparse.engine.gguf.reader import open_gguf
from specsparse.engine.gguf.writer import NewTensor, write_gguf
from specsparse.errors import UserError
from specsparse.models import catalogue
from specsparse.models.convert.edit import apply_delta, make_delta, set_metadata, tensors_hash
from specsparse.testing import write_tiny_gguf

CHANGED = "blk.0.ffn_gate.weight"


@pytest.fixture
def base(tmp_path):
    return write_tiny_gguf(tmp_path / "base.gguf", quant="Q8_0", n_layers=1)


@pytest.fixture
def model(base, tmp_path):
    """The base with one matrix in another type, and two keys."""
    f = open_gguf(base)
    t = f.tensors[CHANGED]
    raw = quants.quantize(-t.dequantize(), GGML.Q4_0)
    tensors = [
        NewTensor(n, GGML.Q4_0 if n == CHANGED else t.type, t.shape, lambda n=n, t=t: raw if n == CHANGED else t.raw)
        for n, t in f.tensors.items()
    ]
    keys = {**f.metadata, "specsparse.activation": "relu", "general.name": "another"}
    return write_gguf(tmp_path / "model.gguf", keys, tensors)


def test_there_and_back(base, model, tmp_path):
    assert make_delta(base, model, tmp_path / "d.gguf") == 1
    delta = open_gguf(tmp_path / "d.gguf")
    assert list(delta.tensors) == [CHANGED] and delta.tensors[CHANGED].type == GGML.Q4_0
    made = open_gguf(apply_delta(base, tmp_path / "d.gguf", tmp_path / "made.gguf"))
    want = open_gguf(model)
    assert tensors_hash(made) == tensors_hash(want) != tensors_hash(open_gguf(base))
    assert made.metadata.keys() == want.metadata.keys()
    assert all(np.array_equal(made.metadata[k], want.metadata[k]) for k in want.metadata)
    assert made.metadata["specsparse.activation"] == "relu"


def test_a_foreign_base_is_refused(base, model, tmp_path):
    make_delta(base, model, tmp_path / "d.gguf")
    other = write_tiny_gguf(tmp_path / "other.gguf", quant="Q8_0", n_layers=1, seed=1)
    with pytest.raises(UserError, match="other weights than the file that"):
        apply_delta(other, tmp_path / "d.gguf", tmp_path / "made.gguf")
    assert not (tmp_path / "made.gguf").exists()


def test_the_hash_is_of_weights_and_not_of_metadata(base):
    before = tensors_hash(open_gguf(base))
    set_metadata(base, "general.name", "something else")
    assert tensors_hash(open_gguf(base)) == before


def test_what_is_no_pair_is_refused(base, model, tmp_path):
    with pytest.raises(UserError, match="same model"):
        make_delta(base, base, tmp_path / "d.gguf")
    with pytest.raises(UserError, match=r"has no key specsparse\.activation"):
        make_delta(model, base, tmp_path / "d.gguf")
    deeper = write_tiny_gguf(tmp_path / "deeper.gguf", quant="Q8_0", n_layers=2)
    with pytest.raises(UserError, match=r"tensor blk\.1\."):
        make_delta(base, deeper, tmp_path / "d.gguf")
    with pytest.raises(UserError, match="is no difference"):
        apply_delta(base, model, tmp_path / "made.gguf")


def test_command(base, model, tmp_path, capsys):
    delta, made = tmp_path / "d.gguf", tmp_path / "made.gguf"
    assert cli.main(["convert", "make-delta", str(base), str(model), str(delta)]) == 0
    assert cli.main(["convert", "apply-delta", str(base), str(delta), str(made)]) == 0
    assert "1 tensors" in capsys.readouterr().out
    assert tensors_hash(open_gguf(made)) == tensors_hash(open_gguf(model))
    assert cli.main(["convert", "apply-delta", str(made), str(delta), str(tmp_path / "x.gguf")]) == 2
    assert cli.main(["convert", "apply-delta", str(base), str(delta), str(delta)]) == 2


def test_the_shipped_difference_fits_the_embedded_model(smollm2, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECSPARSE_CACHE", str(tmp_path))
    base, made = (open_gguf(catalogue.resolve(name)) for name in ("smollm2-135m", "smollm2-135m-relu"))
    assert ModelConfig.from_gguf(made).activation == "relu" and made.tensors.keys() == base.tensors.keys()
    changed = {n for n, t in made.tensors.items() if not np.array_equal(t.raw, base.tensors[n].raw)}
    assert changed == {f"blk.{i}.ffn_{name}.weight" for i in range(30) for name in ("gate", "up", "down")}
