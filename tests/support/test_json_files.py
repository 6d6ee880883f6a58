"""JSON files: what is written reads back, and a kept file that is damaged is as good as none."""

import json

import numpy as np
import pytest

from specsparse.support.json_files import kept, to_json, write_atomically


def test_what_is_written_reads_back(tmp_path):
    write_atomically(tmp_path / "a.json", to_json({"x": np.float32(0.5), "n": float("nan"), "ids": np.arange(2)}))
    assert kept(tmp_path / "a.json") == {"x": 0.5, "n": None, "ids": [0, 1]}


def test_a_name_that_is_no_utf8_is_written_as_its_escape(tmp_path):
    """Of a file name with such a byte Python makes half a surrogate pair, which no UTF-8 holds."""
    write_atomically(tmp_path / "a.json", to_json({"file": "\udcff\u00e9"}))
    assert (tmp_path / "a.json").read_bytes() == b'{"file": "\\udcff\xc3\xa9"}'
    assert kept(tmp_path / "a.json") == {"file": "\udcff\u00e9"}
    write_atomically(tmp_path / "page.html", "\udcff\u00e9")
    assert (tmp_path / "page.html").read_bytes() == b"?\xc3\xa9"


@pytest.mark.parametrize("text", [None, "", "{", "[1]", "3", "null", "[" * 100_000, "\xff"])
def test_a_kept_file_that_is_damaged_is_none(tmp_path, text):
    path = tmp_path / "a.json"
    if text is not None:
        path.write_bytes(text.encode("latin-1"))
    assert kept(path) == {}


def test_a_catalogue_entry_survives_damaged_facts(tmp_path, monkeypatch):
    """What the Hub said is kept in the cache; a file of it that holds no object was an AttributeError."""
    from specsparse.models import entries, obtain

    entry = next(entry for entry in entries.entries().values() if entry.repo)
    monkeypatch.setattr(obtain, "_facts_file", lambda entry: tmp_path / "facts.json")
    (tmp_path / "facts.json").write_text(json.dumps([1]))
    assert obtain.known(entry) == entry
