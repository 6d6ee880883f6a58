"""`specsparse models`: the table, JSON, and what brings a model here."""

import json

import pytest

from specsparse.cli import main as cli
from specsparse.cli import models
from specsparse.models import entries
from specsparse.testing import write_tiny_gguf


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "_measured", [38.25e9])
    for name in ("SPECSPARSE_CACHE", "SPECSPARSE_MODELS", "XDG_CACHE_HOME", "HF_HOME", entries.OWN):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)


def test_the_table_has_every_entry_and_says_what_is_unknown(capsys):
    assert cli.main(["models"]) == 0
    lines = {words[0]: line for line in capsys.readouterr().out.splitlines() if (words := line.split())}
    assert set(entries.entries()) <= set(lines)
    assert lines["llama-2-7b"].split()[1:7] == ["no", "3.8", "GB", "3.8", "GB", "10"]
    assert lines["qwen3-8b"].split()[1:6] == ["no", "?", "?", "?", "?"]
    assert "(consent and HF_TOKEN)" in lines["llama-3.1-8b-hf"]


def test_json_of_one_that_is_here(tmp_path, capsys):
    file = write_tiny_gguf(tmp_path / "llama-2-7b.Q4_0.gguf", context_length=128, n_layers=1)
    assert cli.main(["models", "llama-2-7b", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    size = file.stat().st_size
    assert (row["here"], row["path"], row["size"]) == ("yes", str(file), size)
    assert row["memory"] > size and row["tokens_per_second"] == pytest.approx(38.25e9 / size)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["llama-2-7"], "llama-2-7 is no model of the catalogue; did you mean llama-2-7b?"),
        (["--download"], "--download needs the names"),
        (["llama-2-7b", "--download=yes"], "without a network give model.path=/path/to/llama-2-7b.Q4_0.gguf"),
        (["llama-2-7b", "--download", "no"], "download=no; give"),
    ],
)
def test_mistakes_are_one_line(argv, says, capsys):
    assert cli.main(["models", *argv]) == 2
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1
