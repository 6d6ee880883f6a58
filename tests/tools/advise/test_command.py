"""`python -m specsparse advise`: tables, JSON, a figure, and mistakes that cost no second."""

import json

import pytest

from specsparse.cli.main import main


def test_tables_json_and_a_figure_for_models_that_are_not_here(capsys, tmp_path):
    out, plot = tmp_path / "advice.json", tmp_path / "advice.png"
    argv = ["advise", "qwen3-8b", "qwen3-0.6b", "--device", "h200", "--context", "512,4096", "--batch", "1"]
    assert main([*argv, "--json", str(out), "--plot", str(plot)]) == 0
    said = capsys.readouterr().out
    assert "8,191 M weights" in said and "NVIDIA H200" in said and "break-even" in said and "of 141 GB" in said
    found = json.loads(out.read_text(encoding="utf-8"))
    assert [a["context"] for a in found["cases"]] == [512, 4096]
    methods = {m["method"] for m in found["cases"][0]["methods"]}
    assert {"qwen3-0.6b", "eagle3", "layer_skip", "prompt_lookup"} <= methods
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert main([*argv, "--alpha", "0.8", "--json"]) == 0
    assert "speculate with" in json.loads(capsys.readouterr().out)["cases"][0]["verdict"]


SIZES = ",".join(map(str, range(1, 18)))


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["qwen3-8c"], "did you mean qwen3-8b"),
        (["qwen3-8b", "--device", "h20"], "did you mean h200"),
        (["qwen3-8b", "--alpha", "1.5"], "from 0 to 1"),
        (["qwen3-8b", "--batch", "0"], "--batch"),
        (["qwen3-8b", "--gamma", "65"], "64 is the most"),
        (["qwen3-8b", "--gamma", "16777216"], "64 is the most"),
        (["qwen3-8b", "--batch", SIZES, "--context", "8,9"], "make 34 pairs, 32 are the most"),
        (["qwen3-8b", "--alpha", ",".join(f"0.{i}" for i in range(11, 28))], "has 17 values, 16 are the most"),
        (["qwen3-8b", "--alpha", "0.5", "--task", "chat"], "give one of them"),
        (["qwen3-8b", "--alpha", "0.5", "--acceptance", "no/record.json"], "give one of them"),
        (["qwen3-8b", "--refresh", "--paper"], "leave --paper and --device out"),
        (["qwen3-8b", "--refresh", "--device", "h200"], "leave --paper and --device out"),
        (["qwen3-8b", "--device", "h200", "--plot", "a.xyz"], "a.xyz: figures are written as PNG"),
        (["qwen3-8b", "--device", "h200", "--acceptance", "no/record.json"], "cannot be read"),
    ],
)
def test_a_mistake_is_one_line(capsys, argv, said):
    assert main(["advise", *argv]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
