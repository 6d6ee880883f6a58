"""Files appear whole or not at all, and one line says why not, whatever writes them."""

import json
import os

import numpy as np
import pytest

from specsparse.errors import UserError
from specsparse.powerinfer.profiler import ActivationStats, save_stats
from specsparse.support.files import (
    append_line,
    atomically,
    json_lines,
    kept,
    need_disk,
    need_place,
    read_npz,
    replacing,
    to_json,
    write_atomically,
    write_tensors,
)

WRITERS = {
    "text": lambda path: write_atomically(path, "x"),
    "tensors": lambda path: write_tensors(path, {"a": np.ones(3)}, {}),
    "counts": lambda path: save_stats(path, ActivationStats((np.ones(3),))),
}


@pytest.mark.parametrize("what", WRITERS)
def test_a_place_that_cannot_be_written_is_named_in_one_line(tmp_path, what):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/x: cannot be written: [^\n]+$"):
        WRITERS[what](tmp_path / "file" / "x")
    WRITERS[what](tmp_path / "new" / "x")
    assert os.listdir(tmp_path / "new") == ["x"]


def test_a_file_is_refused_before_the_work_that_fills_it(tmp_path, monkeypatch):
    (tmp_path / "read").write_text("")
    need_place(tmp_path / "new", tmp_path / "read", None, "no such file")
    need_place(tmp_path / "read")
    for path, said in ((tmp_path, "is a folder"), (tmp_path / "a" / "b", "no folder"), (tmp_path / "read", "is read")):
        with pytest.raises(UserError, match=said):
            need_place(path, tmp_path / "read")
    with pytest.raises(UserError, match="is read"):
        need_place(tmp_path / "read", tmp_path)  # a run's folder
    need_place(tmp_path / "new.PNG", picture=True)
    for name in ("new.svg", "new"):
        with pytest.raises(UserError, match=f"{name}: figures are written as PNG; name a file that ends in .png"):
            need_place(tmp_path / name, picture=True)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(UserError, match="is not writable here"):
        need_place(tmp_path / "new")


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "x"
    path.write_text("old")
    with pytest.raises(UserError, match="x: cannot be written: No space left"), atomically(path) as file:
        file.write(b"ne")
        raise OSError(28, "No space left on device")
    with pytest.raises(KeyboardInterrupt), replacing(path):
        raise KeyboardInterrupt
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["x"]


def test_a_new_file_has_the_users_permissions(tmp_path):
    (tmp_path / "plain").write_text("")
    with atomically(tmp_path / "x") as file:
        file.write(b"new")
    assert (tmp_path / "x").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_work_that_the_disk_cannot_hold_is_not_begun(tmp_path):
    need_disk(tmp_path / "not" / "yet", 1, "")
    with pytest.raises(UserError, match=r"are free: give fewer train\.tokens"):
        need_disk(tmp_path / "not" / "yet", 1 << 62, "give fewer train.tokens")


class Full:
    """A file on a disk with room for three more bytes."""

    def __init__(self, path):
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115
        self.tell, self.truncate, self._room = self._file.tell, self._file.truncate, 3

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._file.close()

    def write(self, data):
        if not self._room:
            raise OSError(28, "No space left on device")
        taken, self._room = self._file.write(data[: self._room]), 0
        return taken


def test_a_line_is_added_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "rows"
    append_line(path, "fir\u0161t")
    with monkeypatch.context() as patch:
        patch.setattr(type(path), "open", lambda self, *_, **__: Full(self))
        with pytest.raises(UserError, match="rows: cannot be written: No space left on device; make room"):
            append_line(path, "second")
        with pytest.raises(UserError, match="new: cannot be written"):
            append_line(tmp_path / "new", "first")
    assert os.listdir(tmp_path) == ["rows"]
    append_line(path, "third")
    assert path.read_text(encoding="utf-8") == "fir\u0161t\nthird\n"


def test_a_damaged_archive_of_arrays_is_one_line(tmp_path):
    file = tmp_path / "x.npz"
    with pytest.raises(UserError, match="no such file: "):
        read_npz(file)
    np.savez_compressed(file, a=np.arange(100))
    blob = file.read_bytes()
    assert read_npz(file)["a"].sum() == 4950
    np.save(tmp_path / "x.npy", np.ones(3))
    for damaged in (
        b"",
        blob[:50],
        blob[:-9],
        blob.replace(b"\x08\x00", b"\x63\x00"),
        (tmp_path / "x.npy").read_bytes(),
    ):
        file.write_bytes(damaged)
        with pytest.raises(UserError, match=r"x.npz: cannot be read as \.npz \([^\n]+$"):
            read_npz(file)


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
    from specsparse.models import catalogue

    entry = next(entry for entry in catalogue.entries().values() if entry.repo)
    monkeypatch.setattr(catalogue, "_facts_file", lambda entry: tmp_path / "facts.json")
    (tmp_path / "facts.json").write_text(json.dumps([1]))
    assert catalogue.known(entry) == entry


def test_json_lines_end_at_newlines_alone_and_name_the_line_that_is_none(tmp_path):
    """U+2028, which Python's splitlines takes for a line's end, stands in texts of our own prompts.jsonl."""
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "a\u2028b"}\n\n{"text"\n', encoding="utf-8")
    rows = json_lines(file)
    assert next(rows) == (f"{file}:1", {"text": "a\u2028b"})
    with pytest.raises(UserError, match=r"rows\.jsonl:3: not JSON"):
        next(rows)
