"""`python -m specsparse inspect`: every line is computed here again from the file."""

import json

import pytest

from specsparse.cli import main as cli
from specsparse.engine.gguf.reader import open_gguf
from specsparse.measure.costs.roofline import get_device
from specsparse.testing import tiny_config, write_tiny_gguf
from specsparse.tools.inspect import inspection


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    write_tiny_gguf(folder / "target.gguf", tokenizer="spm", quant="Q8_0", n_layers=3, tied=True)
    write_tiny_gguf(folder / "draft.gguf", tokenizer="spm", quant="Q4_0", n_layers=1, tied=True, seed=1)
    write_tiny_gguf(folder / "other.gguf", tokenizer="bpe", n_layers=1)
    write_tiny_gguf(folder / "alien.gguf", metadata={"llama.expert_count": 8})
    return folder


def as_json(capsys, *argv):
    assert cli.main(["inspect", "--device", "a100", "--json", *map(str, argv)]) == 0
    return json.loads(capsys.readouterr().out)


def as_text(capsys, *argv):
    assert cli.main(["inspect", "--device", "a100", *map(str, argv)]) == 0
    return capsys.readouterr().out


def test_sizes_and_traffic(capsys, files):
    found = as_json(capsys, files / "target.gguf")
    tensors = open_gguf(files / "target.gguf").tensors.values()
    total = sum(t.nbytes for t in tensors)
    assert found["sizes"]["bytes"] == total == sum(g["nbytes"] for g in found["tensors"])
    assert found["sizes"]["weights"] == sum(t.raw.size if t.type.name == "F32" else 0 for t in tensors) // 4 + sum(
        32 * t.raw.size // 34 for t in tensors if t.type.name == "Q8_0"
    )
    assert sum(found["sizes"]["bytes_by_type"].values()) == total
    assert found["rates"]["weight_bytes"] == total  # tied: all of it is read
    kv = 2 * 3 * 2 * 16 * 2  # keys and values, layers, heads, head dimension, bytes of f16
    assert found["rates"]["kv_bytes_per_position"] == kv
    assert found["rates"]["kv_bytes"] == kv * (inspection.KV_LENGTH + 1)
    rate = 1 / ((total + found["rates"]["kv_bytes"]) / get_device("a100").bandwidth)
    assert found["rates"]["tokens_per_second"] == pytest.approx(rate, rel=1e-12)


def test_newcomer_gives_two_files(capsys, files):
    pair = [files / "target.gguf", files / "draft.gguf"]
    assert as_json(capsys, *pair) == as_json(capsys, pair[0], "--draft", pair[1])


def test_layers_are_one_line_unless_each_is_asked_for(capsys, files):
    grouped = as_json(capsys, files / "target.gguf")["tensors"]
    assert {"name": "blk.*.attn_q.weight", "type": "Q8_0", "shape": [64, 64], "count": 3, "nbytes": 3 * 64 * 68} in (
        grouped
    )
    names = [t["name"] for t in as_json(capsys, files / "target.gguf", "--tensors")["tensors"]]
    assert names == list(open_gguf(files / "target.gguf").tensors)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (
            {"architecture": "gemma3", "n_layers": 7},
            "a window of 8 tokens on 6 of 7, RoPE base 10000 there, norms",
        ),
        ({"architecture": "smollm3", "n_layers": 5}, "no RoPE on 1 of 5"),
        ({}, None),
    ],
)
def test_what_the_layers_of_an_architecture_have(model, says):
    found = inspection.model_facts(tiny_config(**model)).get("layers")
    assert (found or "").startswith(says or "") and (found is None) == (says is None)


def test_the_pages_say_what_matters(capsys, files):
    text = as_text(capsys, files / "target.gguf")
    for part in ("llama.block_count", "blk.*.attn_q.weight", "bits a weight", "3 layers, width 64", "chat template"):
        assert part in text
    assert "(300)" in text  # a long array is cut, and says how long it is


def test_a_pair_that_fits(capsys, files):
    found = as_json(capsys, files / "target.gguf", "--draft", files / "draft.gguf")["pair"]
    assert found["fits"] and found["differences"] == [] and found["intersection"] is None and 0 < found["cost"] < 1
    sizes = [as_json(capsys, files / f"{n}.gguf")["rates"] for n in ("draft", "target")]
    read = [r["weight_bytes"] + r["kv_bytes"] for r in sizes]
    assert found["cost"] == pytest.approx(read[0] / read[1], rel=1e-12)
    gains = [row["speedup"] for row in found["speedups"]]
    assert gains == sorted(gains) and gains[-1] > 1
    assert "the vocabularies fit" in as_text(capsys, files / "target.gguf", "--draft", files / "draft.gguf")


def test_a_pair_that_does_not(capsys, files):
    found = as_json(capsys, files / "target.gguf", "--draft", files / "other.gguf")["pair"]
    assert not found["fits"] and not found["only_special"]
    assert found["differences"][0] == {"what": "tokenizer", "target": "spm", "draft": "bpe", "special": False}
    text = as_text(capsys, files / "target.gguf", "--draft", files / "other.gguf")
    assert "they do not fit" in text and "drafter.vocabulary=tli" in text and found["overlap"] in text
    shared = found["intersection"]["shared"]
    assert shared > 256 and found["overlap"].startswith(f"{shared} tokens shared")


def test_a_file_that_does_not_run_here_is_still_shown(capsys, files):
    text = as_text(capsys, files / "alien.gguf")
    assert "does not run here: metadata key 'llama.expert_count' is 8" in text and "token_embd.weight" in text
    assert as_json(capsys, files / "alien.gguf")["rates"] is None


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["none.gguf"], "none.gguf: no such file"),
        (["target.gguf", "--draft", "alien.gguf"], "alien.gguf: does not run here: metadata key 'llama.expert_count'"),
        (["target.gguf", "--device", "abacus"], "device abacus is unknown; valid: 4090, 5090, a100"),
    ],
)
def test_mistakes(capsys, files, monkeypatch, argv, says):
    monkeypatch.chdir(files)
    assert cli.main(["inspect", "--device", "a100", *argv]) == 2
    captured = capsys.readouterr()
    assert says in captured.err and captured.err.count("\n") == 1 and captured.out == ""
