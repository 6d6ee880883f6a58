"""`specsparse models`: the table, JSON, and what brings a model here."""

import json
from collections import Counter

import pytest

from specsparse.cli import main as cli
from specsparse.cli import models
from specsparse.models import catalogue
from specsparse.testing import write_tiny_gguf


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "_bandwidth", lambda: 38.25e9)
    for name in ("SPECSPARSE_CACHE", "SPECSPARSE_MODELS", "XDG_CACHE_HOME", "HF_HOME", catalogue.OWN):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("COLUMNS", raising=False)  # which workers of a parallel run have
    monkeypatch.chdir(tmp_path)


def test_the_table_has_every_entry_and_says_what_is_unknown(capsys):
    assert cli.main(["models"]) == 0
    lines = {words[0]: line for line in capsys.readouterr().out.splitlines() if (words := line.split())}
    assert set(catalogue.entries()) <= set(lines)
    assert lines["llama-2-7b"].split()[1:7] == ["no", "3.8", "GB", "6.0", "GB", "10"]  # with 2.1 GB of cache
    assert lines["relullama-7b"].split()[1:6] == ["no", "?", "?", "?", "?"]
    assert "(consent and HF_TOKEN)" in lines["llama-3.1-8b-hf"]


@pytest.mark.parametrize("width", [80, 96, 110])
def test_newcomer_reads_names_and_sizes_at_any_width(width, capsys, monkeypatch):
    """Piped, at COLUMNS; no name goes on in another line, and the catalogue's shape says what nobody has read."""
    monkeypatch.setenv("COLUMNS", str(width))
    assert cli.main(["models"]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert max(map(len, lines[:-1])) <= width  # the last one has commands and a path
    words = Counter(word.rstrip(",;:") for line in lines for word in line.split())
    known = catalogue.entries().values()
    for entry in known:
        drafted_for = sum(entry.name in other.drafts for other in known)
        assert words[entry.name] >= 2 + drafted_for, entry.name
        row = next(line.split() for line in lines if line.split()[:1] == [entry.name])
        assert "?" not in row[1:4] or entry.shape is None
    assert len(lines) < 200  # tables, not a line for each value


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
