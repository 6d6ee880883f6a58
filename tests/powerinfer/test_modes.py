"""What `load(ffn=, threshold=, faithful_f16=)` runs, on tiny models."""

import math

import numpy as np
import pytest

import specsparse
from specsparse.engine.config import parse_activation
from specsparse.engine.gguf.reader import open_gguf
from specsparse.errors import UserError
from specsparse.powerinfer import faithful
from specsparse.powerinfer.model_files import PredictorFile, to_powerinfer, write_predictors
from specsparse.powerinfer.modes import threshold_of
from specsparse.testing import write_tiny_gguf
from tests.cells import cells
from tests.powerinfer.tiny import write_tiny_powerinfer
from tests.tolerances import nmse

IDS = [1, 5, 9, 200, 17, 42, 42, 8]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_tiny_powerinfer(tmp_path_factory.mktemp("m") / "m.powerinfer.gguf", threshold=0.125)


@pytest.fixture(scope="module")
def logits(path):
    made = {}

    def get(**options):
        key = tuple(sorted(options.items()))
        if key not in made:
            made[key] = specsparse.load(path, **options).logits(IDS)
        return made[key]

    return get


def test_the_plain_call_runs_a_powerinfer_file_as_powerinfer_would(path, logits):
    assert specsparse.load(path).ffn == "powerinfer"
    assert np.array_equal(logits(), logits(ffn="powerinfer", threshold=0.125))
    assert nmse(logits(), logits(ffn="dense")) > 1e-3


def test_thresholds_from_none_to_all(logits):
    assert np.array_equal(logits(threshold=-math.inf), logits(ffn="oracle"))
    assert nmse(logits(threshold=-math.inf), logits(ffn="dense")) < 1e-10
    assert nmse(logits(threshold=math.inf), logits(ffn="dense")) > 1e-3


def test_rows_do_not_depend_on_their_batch(path, logits):
    """C1: a mask is of its row alone."""
    model = specsparse.load(path)
    for n in (1, 3):
        assert np.array_equal(model.logits(IDS[:n]), logits()[:n])


@pytest.mark.parametrize("backend", cells(["reference", "xla"], ["reference"]))
def test_backends_agree(logits, backend):
    assert nmse(logits(backend=backend), logits()) < 1e-3


def test_faithful_rounding_is_small_and_there(logits):
    assert 0 < nmse(logits(faithful_f16=True), logits()) < 1e-4


def test_precedence_of_thresholds(path, monkeypatch):
    f = open_gguf(path)
    assert threshold_of(f) == 0.125
    monkeypatch.setenv("LLAMA_SPARSE_PRED_THRESHOLD", "0.5")
    assert threshold_of(f) == 0.5 and threshold_of(f, -1) == -1.0
    for bad in ("x", "nan"):
        monkeypatch.setenv("LLAMA_SPARSE_PRED_THRESHOLD", bad)
        with pytest.raises(UserError, match="LLAMA_SPARSE_PRED_THRESHOLD"):
            threshold_of(f)


@pytest.mark.parametrize("activation", ["relu", "drelu", "relu2", "fatrelu(0.25)", "silu"])
def test_activations_of_a_dense_file(tmp_path, activation):
    dense = write_tiny_gguf(tmp_path / "m.gguf", n_layers=1, quant="F32")
    found = specsparse.load(dense, activation=activation).logits(IDS)
    assert nmse(specsparse.load(dense, activation=activation, ffn="oracle").logits(IDS), found) < 1e-10
    if activation != "silu":
        assert nmse(specsparse.load(dense).logits(IDS), found) > 1e-4


def test_names_of_activations():
    assert parse_activation("drelu") == ("relu", "relu") and parse_activation("fatrelu(0.5)") == (
        ("fatrelu", 0.5),
        None,
    )
    for bad in ("gelu", "fatrelu", "fatrelu(-1)", "fatrelu(nan)", 3, None):
        with pytest.raises(UserError, match="must be one of"):
            parse_activation(bad)


BAD = {
    "a mode": ({"ffn": "sparse"}, "ffn='sparse' does not exist"),
    "NaN": ({"threshold": math.nan}, "threshold is nan"),
    "a text": ({"threshold": "x"}, "threshold=x must be a number"),
    "a threshold for nothing": ({"ffn": "dense", "threshold": 0.5}, "does nothing with ffn='dense'"),
    "a cache": ({"faithful_f16": True, "kv_dtype": "f32"}, "kv_dtype=f32 contradicts"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_options(path, what):
    options, says = BAD[what]
    with pytest.raises(UserError, match=says):
        specsparse.load(path, **options)


def test_a_dense_file_has_no_predictors(tmp_path):
    dense = write_tiny_gguf(tmp_path / "m.gguf")
    with pytest.raises(UserError, match="has no predictors"):
        specsparse.load(dense, ffn="powerinfer")
    for arch in ("opt", "falcon"):
        other = write_tiny_gguf(tmp_path / f"{arch}.gguf", metadata={"general.architecture": arch})
        with pytest.raises(UserError, match=f"'{arch}' .*not supported"):
            specsparse.load(other)


def test_rounding_is_numpys():
    x = np.random.default_rng(0).normal(size=(4, 256)).astype(np.float32) * np.float32([[1], [1e-3], [1e-6], [100]])
    assert np.array_equal(faithful.round_f16(x), x.astype(np.float16).astype(np.float32))
    b = x.reshape(4, -1, 32)
    most = np.abs(b).max(-1, keepdims=True)
    d = (most / np.float32(127)).astype(np.float16).astype(np.float32)
    assert np.array_equal(faithful.round_q8_0(x), (np.rint(b * (np.float32(127) / most)) * d).reshape(x.shape))
    assert np.abs(faithful.round_q8_k(x) - x).max(axis=1) == pytest.approx(np.abs(x).max(1) / 256, rel=0.1)


def test_a_predictor_that_says_exactly_the_threshold_keeps(tmp_path):
    dense = write_tiny_gguf(tmp_path / "d.gguf", quant="F16", n_layers=1)
    zeros = PredictorFile(np.zeros((32, 64), np.float16), np.zeros((96, 32), np.float16))
    write_predictors(tmp_path / "p", [zeros])
    to_powerinfer(dense, tmp_path / "p", tmp_path / "m.gguf")
    model = specsparse.load(tmp_path / "m.gguf", ffn="powerinfer")
    assert np.array_equal(model.logits(IDS), specsparse.load(tmp_path / "m.gguf", threshold=-1).logits(IDS))
    assert nmse(model.logits(IDS), specsparse.load(tmp_path / "m.gguf", threshold=1e-9).logits(IDS)) > 1e-3
