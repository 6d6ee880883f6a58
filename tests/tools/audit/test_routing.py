"""`audit --routing`: ours at every width, another engine's choice beside it, and how llama.cpp's graph is seen."""

import ctypes
import importlib.util
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from specsparse.cli.main import main
from specsparse.testing import write_tiny_gguf
from specsparse.tools import peers
from specsparse.tools.audit import routing
from specsparse.tools.peers.logits import OurRows, RowRouting

FEW = ["--widths", "1,2,5", "--windows", "2", "--prompt-tokens", "6", "--tokens", "7"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    file = tmp_path_factory.mktemp("routing") / "experts.gguf"
    return write_tiny_gguf(file, architecture="smallthinker", n_layers=2, d_ff=32, n_experts=8, n_chosen=2)


def test_rows_choose_the_same_experts_with_the_same_weights_at_every_width(model, tmp_path, capsys, monkeypatch):
    out = tmp_path / "routing.json"
    assert main(["audit", "--routing", "--model", str(model), *FEW, "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    ours = report["engines"]["specsparse"]
    assert report["rows"] == 14 and set(ours["widths"]) == {"2", "5"}
    assert all(w["rows_differing"] == [0, 0] and w["overlap"] == [1, 1] for w in ours["widths"].values())
    assert "no bit that differs" in capsys.readouterr().out

    true = OurRows.routing

    def one_other(self, prompt, text, width):
        found = true(self, prompt, text, width)
        found.weights[1, 0, 0] += np.float32(1e-7 * (width == 5))
        return found

    monkeypatch.setattr(OurRows, "routing", one_other)
    assert main(["audit", "routing", "--model", str(model), *FEW, "--json", str(out)]) == 1
    found = json.loads(out.read_text())["engines"]["specsparse"]["widths"]
    assert (found["2"]["rows_differing"], found["5"]["rows_differing"]) == ([0, 0], [0, 2])
    assert found["5"]["experts_differing"] == [0, 0] and "differ in 2 of 56 rows" in capsys.readouterr().out


def test_how_far_two_choices_are_apart():
    """Three rows of one layer: alike, in another order, and with one expert in common."""
    a = RowRouting(np.array([[[0, 1], [2, 3], [4, 5]]], np.int32), np.array([[[0.75, 0.25]] * 3], np.float32))
    b = RowRouting(np.array([[[0, 1], [3, 2], [4, 6]]], np.int32), np.array([[[0.75, 0.25]] * 3], np.float32))
    found = routing.apart(a, b)
    assert found["rows_differing"] == found["experts_differing"] == [2]
    assert found["overlap"] == pytest.approx([(1 + 1 + 0.5) / 3])
    assert found["weights"] == pytest.approx([(0 + 0.5 + 0.25) / 3]) and found["largest"] == [0.5]


def test_mistakes_are_one_line(model, tmp_path, capsys, peer_python, monkeypatch):
    monkeypatch.setattr(routing, "load", pytest.fail)
    dense = write_tiny_gguf(tmp_path / "dense.gguf")
    assert main(["audit", "--routing", "--model", str(dense), *FEW]) == 2
    assert "--routing" in capsys.readouterr().err
    assert main(["audit", "--routing", "--model", str(model), "--widths", "1"]) == 2
    assert "--widths" in capsys.readouterr().err
    assert main(["audit", "--routing", "--model", str(model), *FEW, "--tokens", "99999"]) == 2
    assert "--tokens" in capsys.readouterr().err
    peer_python('#!/bin/sh\nread line\necho \'{"missing": "No module"}\'\n')
    assert main(["audit", "--routing", "--model", str(model), "--engine", "specsparse,llama.cpp"]) == 2
    said = capsys.readouterr().err.strip()
    assert "--engine llama.cpp needs llama-cpp-python" in said and "\n" not in said
    assert main(["audit", "--routing", "--model", str(model), "--engine", "transformers"]) == 2
    assert "--engine" in capsys.readouterr().err


@pytest.fixture
def child(monkeypatch):
    folder = Path(peers.__file__).parent
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    spec = importlib.util.spec_from_file_location("child_llama_cpp", folder / "child_llama_cpp.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    yield made
    sys.modules.pop("child", None)


def test_experts_are_the_first_columns_of_a_sorted_matrix_and_the_last_weights_count(child):
    watch = child.RoutingWatch(SimpleNamespace(c=SimpleNamespace(ggml_backend_sched_eval_callback=lambda f: f)))
    order = np.array([[5, 3, 1, 0], [2, 4, 0, 1], [7, 6, 5, 4]], np.int32)
    raw, normed = np.float32([[3, 1]] * 3), np.float32([[0.75, 0.25]] * 3)

    def tensor(name, array, ne, stride):
        made = child.Tensor(data=array.ctypes.data, name=name.encode())
        made.ne[:], made.nb[:] = (*ne, *(1,) * (4 - len(ne))), (4, stride, 0, 0)
        return made

    graph = [
        tensor("ffn_moe_topk-1", order, (2, 3), 16), tensor("ffn_moe_weights-1", raw, (1, 2, 3), 4),
        tensor("ffn_moe_weights_sum-1", raw, (1, 3), 4), tensor("ffn_moe_weights_norm-1", normed, (2, 3), 8),
        tensor("ffn_moe_weights_norm-1 (reshaped)", raw, (1, 2, 3), 4),
    ]  # fmt: skip
    asked = [watch.see(ctypes.addressof(t), True, None) for t in graph]
    assert asked == [True, True, False, True, False]
    assert all(watch.see(ctypes.addressof(t), False, None) for t in graph)
    np.testing.assert_array_equal(watch.experts[1], order[:, :2])
    np.testing.assert_array_equal(watch.weights[1].reshape(3, 2), normed)


@pytest.mark.slow
@pytest.mark.skipif(
    peers.PYTHON_VARIABLE not in os.environ and importlib.util.find_spec("llama_cpp") is None,
    reason="llama-cpp-python is optional",
)
def test_llama_cpp_chooses_the_same_experts_of_a_float32_file(model, tmp_path):
    out = tmp_path / "routing.json"
    both = ["--engine", "specsparse,llama.cpp", "--json", str(out)]
    assert main(["audit", "--routing", "--model", str(model), *FEW, *both]) == 0
    ours = json.loads(out.read_text())["engines"]["llama.cpp"]["ours"]
    assert ours["overlap"] == [1.0, 1.0] and max(ours["largest"]) < 1e-3
