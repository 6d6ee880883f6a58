"""PowerInfer's files: what is written is read again, and damage ends in one line."""

import pickle
import zipfile

import numpy as np
import pytest

from specsparse.cli.main import main
from specsparse.engine.config import ModelConfig
from specsparse.engine.gguf.reader import open_gguf
from specsparse.errors import UserError
from specsparse.models.convert.hf import convert_hf
from specsparse.powerinfer.model_files import read_predictor, read_threshold, to_powerinfer, write_predictors
from specsparse.powerinfer.placement import GpuIndex, path_for, read_gpuidx, write_gpuidx
from specsparse.powerinfer.profiler import (
    ActivationStats,
    read_activations,
    save_stats,
    write_activations,
)
from specsparse.powerinfer.torch_zip import read_torch, write_torch
from specsparse.testing import load_everything, mutate, write_tiny_gguf
from tests.models.convert import checkpoints
from tests.powerinfer.tiny import random_predictors, write_tiny_powerinfer

DTYPES = ["float32", "float16", "float64", "int64", "int32", "uint8", "bool"]


def index(layers=3, d_ff=512) -> GpuIndex:
    rng = np.random.default_rng(0)
    hot = [rng.random(d_ff) < 0.3 for _ in range(layers)]
    hot[1][:] = False  # PowerInfer writes an empty bucket then
    return GpuIndex(tuple(hot), 1 << 33)


def test_gpuidx_comes_back(tmp_path):
    path = write_gpuidx(path_for(tmp_path / "m.gguf"), index())
    assert path.name == "m.gguf.generated.gpuidx"
    found = read_gpuidx(path)
    assert found.vram_capacity == 1 << 33
    assert all(np.array_equal(a, b) for a, b in zip(found.hot, index().hot, strict=True))
    found.check(layers=3, d_ff=512, where="x")
    for other, says in (({"layers": 4, "d_ff": 512}, "places 3 layers"), ({"layers": 3, "d_ff": 256}, "512 neurons")):
        with pytest.raises(UserError, match=f"x: .*{says}.*another model"):
            found.check(**other, where="x")


def test_a_bucket_that_contradicts_its_mask_is_refused(tmp_path):
    path = write_gpuidx(tmp_path / "x.gpuidx", index())
    bucket = np.flatnonzero(index().hot[2]).astype(np.int32)
    blob = path.read_bytes()
    assert blob.count(bucket.tobytes()) == 1
    for wrong, says in ((bucket[::-1], "gpu_bucket"), (bucket * 0, "gpu_bucket")):
        path.write_bytes(blob.replace(bucket.tobytes(), wrong.tobytes()))
        with pytest.raises(UserError, match=f"blk.2.{says}"):
            read_gpuidx(path)
    path.write_bytes(blob.replace(b"generic.gpu_index", b"generic.gpu_indeX"))
    with pytest.raises(UserError, match="is no gpuidx file"):
        read_gpuidx(path)


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_files_come_back(tmp_path, dtype):
    array = (np.random.default_rng(0).random((5, 7)) * 100).astype(dtype)
    write_torch(tmp_path / "a.pt", array)
    write_torch(tmp_path / "d.pt", {"x": array, "y": array[:, :2]})
    assert np.array_equal(read_torch(tmp_path / "a.pt"), array) and read_torch(tmp_path / "a.pt").dtype == array.dtype
    state = read_torch(tmp_path / "d.pt")
    assert list(state) == ["x", "y"] and np.array_equal(state["y"], array[:, :2])


def test_tensors_of_one_storage_take_its_memory_once(tmp_path):
    write_torch(tmp_path / "a.pt", {"x": np.ones(5, np.float32), "y": np.zeros(5, np.float32)})
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    members["archive/data.pkl"] = members["archive/data.pkl"].replace(b"X\x01\0\0\x001", b"X\x01\0\0\x000")
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    state = read_torch(tmp_path / "a.pt")
    assert state["y"].tolist() == [1] * 5 and np.shares_memory(state["x"], state["y"])


def test_torch_itself_agrees(tmp_path):
    torch = pytest.importorskip("torch")
    write_torch(tmp_path / "a.pt", {"x": np.arange(6, dtype=np.float16).reshape(2, 3)})
    assert torch.load(tmp_path / "a.pt", weights_only=True)["x"].tolist() == [[0, 1, 2], [3, 4, 5]]
    torch.save({"t": torch.arange(6.0).reshape(2, 3).T, "b": torch.ones(2, dtype=torch.bfloat16)}, tmp_path / "b.pt")
    state = read_torch(tmp_path / "b.pt")
    assert state["t"].tolist() == [[0, 3], [1, 4], [2, 5]] and state["b"].astype(np.float32).tolist() == [1, 1]


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_a_pickle_runs_no_code(tmp_path):
    with zipfile.ZipFile(tmp_path / "e.pt", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Evil(tmp_path / "touched"), protocol=2))
    with pytest.raises(UserError, match="is no part of a tensor"):
        read_torch(tmp_path / "e.pt")
    assert not (tmp_path / "touched").exists()


def refused_mutants(valid, read, *, count, header):
    """How many damaged copies of a file are refused, each in one line."""
    blob, path, refused = valid.read_bytes(), valid.with_name("mutant"), 0
    for seed in range(count):
        path.write_bytes(mutate(blob, seed, header=header))
        try:
            read(path)
        except UserError as error:
            refused += 1
            assert "\n" not in str(error)
    return refused


def test_damaged_torch_files_end_in_one_line_or_a_result(tmp_path):
    write_torch(
        tmp_path / "a.pt", {"fc1.weight": np.ones((4, 8), np.float16), "fc2.weight": np.ones((9, 4), np.float16)}
    )
    whole = (tmp_path / "a.pt").stat().st_size
    assert refused_mutants(tmp_path / "a.pt", read_torch, count=300, header=whole) > 100


def test_damaged_powerinfer_files_end_in_one_line_or_a_result(tmp_path):
    kinds = {
        "model": (
            write_tiny_powerinfer(tmp_path / "m.gguf", n_layers=1, tokenizer="none", vocab_size=11),
            load_everything,
        ),
        "gpuidx": (write_gpuidx(tmp_path / "m.gpuidx", index()), read_gpuidx),
    }
    for valid, read in kinds.values():
        assert refused_mutants(valid, read, count=150, header=min(valid.stat().st_size, 2500)) > 50


def test_activations_come_back_by_number(tmp_path):
    counts = tuple(np.full(64, i, np.int64) for i in range(12))
    write_activations(tmp_path, ActivationStats(counts))
    found = read_activations(tmp_path, layers=12, d_ff=64)
    assert [int(c[0]) for c in found.counts] == list(range(12))
    save_stats(tmp_path / "s.safetensors", ActivationStats(counts, tokens=99))
    again = read_activations(tmp_path / "s.safetensors", layers=12, d_ff=64)
    assert again.tokens == 99 and [int(c[0]) for c in again.counts] == list(range(12))
    with pytest.raises(UserError, match=r"holds counts of 12 layers of \(64,\); 12 of \(65,\)"):
        read_activations(tmp_path / "s.safetensors", layers=12, d_ff=65)
    with pytest.raises(UserError, match=r"activation_12"):
        read_activations(tmp_path, layers=13, d_ff=64)
    write_torch(tmp_path / "activation_3.pt", np.full(64, np.nan, np.float32))
    with pytest.raises(UserError, match="finite numbers"):
        read_activations(tmp_path, layers=12, d_ff=64)


BAD_PREDICTORS = {
    "another rank": ({"fc1.weight": np.ones((4, 8)), "fc2.weight": np.ones((16, 5))}, "do not fit"),
    "another width": ({"fc1.weight": np.ones((4, 9)), "fc2.weight": np.ones((16, 4))}, "do not fit"),
    "a bias": (
        {"fc1.weight": np.ones((4, 8)), "fc2.weight": np.ones((16, 4)), "fc1.bias": np.ones(4)},
        "fc1.weight and fc2.weight",
    ),
    "NaN": ({"fc1.weight": np.full((4, 8), np.nan), "fc2.weight": np.ones((16, 4))}, "finite"),
    "integers": ({"fc1.weight": np.ones((4, 8), int), "fc2.weight": np.ones((16, 4))}, "finite floats"),
    "an array": (np.ones((4, 8)), "ndarray"),
}


@pytest.mark.parametrize("what", BAD_PREDICTORS)
def test_predictors_that_do_not_fit_are_refused(tmp_path, what):
    state, says = BAD_PREDICTORS[what]
    write_torch(tmp_path / "model_0.pt", state)
    with pytest.raises(UserError, match=rf"model_0\.pt: .*{says}"):
        read_predictor(tmp_path, 0, d_model=8, d_ff=16)


def test_thresholds_of_a_directory(tmp_path):
    assert read_threshold(tmp_path) is None
    for text, wanted in (('{"sparse_threshold": 0.5}', 0.5), ("{}", None)):
        (tmp_path / "config.json").write_text(text)
        assert read_threshold(tmp_path) == wanted
    for text in ('{"sparse_threshold": NaN}', '{"sparse_threshold": "x"}', "[1]", "{"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UserError, match=r"config\.json"):
            read_threshold(tmp_path)


@pytest.mark.parametrize("out_type", ["f16", "q4_0"])
def test_there_and_back(tmp_path, capsys, out_type):
    dense = write_tiny_gguf(tmp_path / "dense.gguf", quant="F16", d_model=64, d_ff=96)
    config = ModelConfig.from_gguf(open_gguf(dense))
    predictors = random_predictors(config)
    write_predictors(tmp_path / "p", predictors, threshold=0.25)
    argv = ["convert", "powerinfer", str(dense), str(tmp_path / "p"), "--out", str(tmp_path / "s.gguf")]
    assert main([*argv, "--type", out_type]) == 0
    said = capsys.readouterr().out
    assert "PowerInfer applies another rule" in said and "the activation is silu: PowerInfer computes relu" in said
    made = open_gguf(tmp_path / "s.gguf")
    assert made.magic == b"PWRI" and made.metadata["powerinfer.sparse_threshold"] == 0.25
    assert ModelConfig.from_gguf(made).predictor_ranks == (32, 64) and ModelConfig.from_gguf(made).activation == "relu"
    assert made.tensors["output.weight"].type.name == ("F16" if out_type == "f16" else "Q8_0")
    source = open_gguf(dense).tensors["blk.0.ffn_down.weight"].dequantize()
    found = made.tensors["blk.0.ffn_down_t.weight"].dequantize().T
    assert np.array_equal(found, source) if out_type == "f16" else np.abs(found - source).max() < 0.1

    back = [*argv[:2], str(tmp_path / "s.gguf"), str(tmp_path / "q"), "--out", str(tmp_path / "back.gguf"), "--back"]
    assert main(back) == 0
    again = open_gguf(tmp_path / "back.gguf")
    assert again.magic == b"GGUF" and ModelConfig.from_gguf(again).activation == "relu"
    assert read_threshold(tmp_path / "q") == 0.25
    assert np.array_equal(again.tensors["blk.1.ffn_down.weight"].dequantize(),
                          made.tensors["blk.1.ffn_down_t.weight"].dequantize().T)  # fmt: skip
    if out_type == "f16":
        assert np.array_equal(read_predictor(tmp_path / "q", 1, d_model=64, d_ff=96).fc2, predictors[1].fc2)


def test_a_failed_conversion_leaves_nothing(tmp_path):
    dense = write_tiny_gguf(tmp_path / "dense.gguf", quant="F16")
    config = ModelConfig.from_gguf(open_gguf(dense))
    write_predictors(tmp_path / "p", random_predictors(config)[:1])
    with pytest.raises(UserError, match=r"model_1\.pt"):
        to_powerinfer(dense, tmp_path / "p", tmp_path / "out" / "s.gguf")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("threshold", [float("nan"), "x", True])
def test_a_threshold_that_is_no_number_is_not_written_down(tmp_path, threshold):
    dense = write_tiny_gguf(tmp_path / "dense.gguf", quant="F16", d_model=64)
    write_predictors(tmp_path / "p", random_predictors(ModelConfig.from_gguf(open_gguf(dense))))
    with pytest.raises(UserError, match=r"threshold is .*; a number is needed"):
        to_powerinfer(dense, tmp_path / "p", tmp_path / "s.gguf", threshold=threshold)
    assert not (tmp_path / "s.gguf").exists()


def test_another_type_than_powerinfers_is_refused(tmp_path):
    with pytest.raises(UserError, match="type 'q8_0': PowerInfer computes f16 and q4_0 only"):
        to_powerinfer(tmp_path / "dense.gguf", tmp_path / "p", tmp_path / "s.gguf", out_type="q8_0")


def test_a_folder_of_transformers_is_a_source(tmp_path, capsys):
    """As PowerInfer's converter takes it; the file between is gone afterwards."""
    config = {**checkpoints.CONFIG, "hidden_size": 256, "hidden_act": "relu"}
    folder = checkpoints.save(tmp_path / "in", config, checkpoints.weights(config))
    checkpoints.bpe_tokenizer(folder)
    out = tmp_path / "out"
    out.mkdir()
    convert_hf(folder, tmp_path / "dense.gguf", type_name="f16")
    write_predictors(tmp_path / "p", random_predictors(ModelConfig.from_gguf(open_gguf(tmp_path / "dense.gguf"))))
    made = {}
    for source in (folder, tmp_path / "dense.gguf"):
        argv = ["convert", "powerinfer", str(source), str(tmp_path / "p"), "--out", str(out / "s.gguf")]
        assert main([*argv, "--type", "q4_0", "--overwrite"]) == 0
        made[source] = (out / "s.gguf").read_bytes()
    assert len(set(made.values())) == 1 and [f.name for f in out.iterdir()] == ["s.gguf"]
    assert open_gguf(out / "s.gguf").tensors["output.weight"].type.name == "Q6_K"
    assert ModelConfig.from_gguf(open_gguf(out / "s.gguf")).activation == "relu"
    (folder / "model.safetensors").unlink()
    assert main(["convert", "powerinfer", str(folder), str(tmp_path / "p"), "--out", str(out / "t.gguf")]) == 2
    assert [f.name for f in out.iterdir()] == ["s.gguf"]
