"""`python -m specsparse profile`: every kernel call is counted, its bytes are the file's, the trace adds up."""

import io
import itertools
import json
import sys

import jax
import numpy as np
import pytest

import specsparse
from specsparse.cli import main as cli
from specsparse.measure import machine
from specsparse.testing import write_tiny_gguf
from specsparse.tools.profile import stages as profile


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write_tiny_gguf(tmp_path_factory.mktemp("m") / "m.gguf", quant="Q8_0", n_layers=3, tokenizer="spm")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(machine, "read_bandwidth", lambda: 40e9)
    monkeypatch.setattr(profile, "_LONG_ENOUGH", 1e-4)


def test_the_tables_and_the_trace(file, tmp_path, capsys):
    trace = tmp_path / "trace.json"
    argv = ["profile", str(file), "--prompt", "abc abc abc", "--max-tokens", "12", "--depth", "20", "--gamma", "3"]
    assert cli.main([*argv, "--out", str(trace), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    calls = {k["name"]: k["calls"] for k in found["kernels"]}
    assert calls == {
        "embed": 1, "linear attn_q attn_k attn_v": 3, "attend": 3, "linear attn_output": 3,
        "linear ffn_gate ffn_up": 3, "linear ffn_down": 3, "linear output": 1, "argmax": 1,
    }  # fmt: skip
    nbytes = {k["name"]: k["nbytes"] for k in found["kernels"]}
    model = specsparse.load(file)
    assert sum(n for name, n in nbytes.items() if name.startswith("linear")) == model.footprint.packed
    assert nbytes["attend"] == 3 * 2 * 2 * 16 * 2 * 24  # layers, keys and values, heads, size, f16, tokens
    assert found["rows"] == 4 and found["rounds"] >= 3 and all(s >= 0 for s in found["stages"].values())
    _check_trace(json.loads(trace.read_text()), found)


def _check_trace(trace, found):
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    for tid in (1, 2):
        track = [e for e in spans if e["tid"] == tid]
        for one, after in itertools.pairwise(track):
            assert one["ts"] + one["dur"] == pytest.approx(after["ts"], abs=1e-3)
    kernels = [e for e in spans if e["tid"] == 2]
    assert [e["name"] for e in kernels][:3] == ["embed", "linear attn_q attn_k attn_v", "attend"]
    assert [e["name"] for e in kernels][-2:] == ["linear output", "argmax"] and len(kernels) == 18
    total = sum(k["seconds"] for k in found["kernels"])
    assert sum(e["dur"] for e in kernels) == pytest.approx(1e6 * total)
    assert sum(e["dur"] for e in spans if e["tid"] == 1) == pytest.approx(1e6 * sum(found["stages"].values()))


def test_the_recorded_calls_are_the_forward_pass(file):
    """The last product of the recorded calls gives the logits of the model itself."""
    model = specsparse.load(file)
    calls = profile.record(model, rows=2, depth=0)
    ids = np.asarray(jax.device_get(calls[0].args[1])).tolist()
    np.testing.assert_array_equal(np.asarray(calls[-1].args[0]), model.logits(ids))


def test_plain_decoding_has_one_row_and_no_stages(file, tmp_path, capsys):
    argv = ["profile", str(file), "--drafter", "none", "--depth", "4", "--out", str(tmp_path / "t.json")]
    assert cli.main(argv) == 0
    text = capsys.readouterr().out
    assert "a forward of 1 rows after 4 tokens" in text and "stage" not in text and "linear ffn_down" in text


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--gamma", "0"], "--gamma"),
        (["--depth", "9999"], "the context holds 256"),
        (["--out", "/proc/none/t.json"], "/proc/none/t.json: there is no folder /proc/none"),
        (["--prompt", "-"], "the standard input is no UTF-8 text"),
    ],
)
def test_mistakes(file, capsys, monkeypatch, argv, says):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), encoding="utf-8"))
    assert cli.main(["profile", str(file), "--max-tokens", "4", "--depth", "4", *argv]) == 2
    assert says in capsys.readouterr().err
