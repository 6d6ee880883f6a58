"""Entries of v(n): one schema by which the code and everybody else validates, and a page made of nothing else."""

import copy
import json
from pathlib import Path

import pytest

from specsparse.errors import UserError
from specsparse.tools.bench import vn_entries

DOCS = Path(__file__).resolve().parents[3] / "docs"
GOOD = {
    "engine": {"name": "specsparse", "build": "abc, native AVX2", "threads": 2},
    "machine": {"name": "a machine", "cpu": "a processor", "bandwidth": 25e9},
    "model": "M", "type": "Q4_1", "date": "2026-11-23", "quiet": True, "depth": 0, "repeats": 5,
    "v": {"2": 1.1, "8": 2.0}, "source": "a log", "step_ms": 3.5,
}  # fmt: skip


def file_of(tmp_path, *entries):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"schema": 1, "entries": list(entries)}), encoding="utf-8")
    return path


def changed(key, value):
    entry = copy.deepcopy(GOOD)
    if value is None:
        del entry[key]
    else:
        entry[key] = value
    return entry


BAD = {
    "no engine": changed("engine", None),
    "no v": changed("v", {}),
    "v of one": changed("v", {"1": 1.0}),
    "v of nothing": changed("v", {"2": 0}),
    "v in words": changed("v", {"2": "1.1"}),
    "threads": changed("engine", {**GOOD["engine"], "threads": 0}),
    "typo": {**GOOD, "qiet": True},
    "quiet in words": changed("quiet", "yes"),
    "repeats": changed("repeats", 1.5),
}


def test_an_entry_comes_back_as_it_was_written(tmp_path):
    (entry,) = vn_entries.read_file(file_of(tmp_path, GOOD))
    assert dict(entry.v) == {"2": 1.1, "8": 2.0} and entry.machine.bandwidth == 25e9
    again = tmp_path / "again.json"
    vn_entries.write_file(again, [entry])
    assert json.loads(again.read_text(encoding="utf-8")) == {"schema": 1, "entries": [GOOD]}


@pytest.mark.parametrize("name", BAD)
def test_the_reader_refuses_in_one_line(tmp_path, name):
    with pytest.raises(UserError, match=r"mine\.json: entries"):
        vn_entries.read_file(file_of(tmp_path, BAD[name]))


def test_the_schema_refuses_the_same():
    jsonschema = pytest.importorskip("jsonschema")
    check = jsonschema.Draft202012Validator(vn_entries.schema())
    assert check.is_valid({"schema": 1, "entries": [GOOD]})
    assert not [name for name, entry in BAD.items() if check.is_valid({"schema": 1, "entries": [entry]})]
    for path in (DOCS / "data" / "vn").glob("*.json"):
        check.validate(json.loads(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    "text", ["[]", "{", "[" * 100_000, '{"schema": 2, "entries": [1]}', '{"schema": 1, "entries": []}']
)
def test_another_file_is_refused(tmp_path, text):
    path = tmp_path / "mine.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=r"mine\.json"):
        vn_entries.read_file(path)


def test_the_committed_page_and_schema_are_made_of_the_committed_entries():
    entries = [e for path in sorted((DOCS / "data" / "vn").glob("*.json")) for e in vn_entries.read_file(path)]
    assert (DOCS / "vn.md").read_text(encoding="utf-8") == vn_entries.page(entries)
    assert json.loads((DOCS / "data" / "vn.schema.json").read_text(encoding="utf-8")) == vn_entries.schema()
    assert {e.engine.name for e in entries} >= {"specsparse", "llama.cpp"}


def test_a_report_becomes_an_entry_for_each_engine():
    git, engines = {"commit": "0123456789abcdef"}, ("specsparse", "llama.cpp")
    report = {
        "manifest": {"cpu": {"model": "a processor"}, "git": git, "kernels": {"isa": "AVX2"}},
        "model": {"name": "M", "main_type": "Q4_1"}, "backend": "native", "threads": 2,
        "peers": [{"name": "llama.cpp", "version": "0.3", "flash": {"verify": False}}],
        "plan": {"depth": 0, "repeats": 3},
        "machine": {"read_bytes_per_second": {"median": 25e9, "mean": 25e9, "sd": 1e8}},
        "results": [{"engine": e, "test": "v1", "ms_per_token": ms} for e, ms in zip(engines, (4.0, 8.0))],
        "v": {e: {"1": {"median": 1.0}, "4": {"median": v}} for e, v in zip(engines, (1.4, 2.4))},
    }  # fmt: skip
    ours, peer = vn_entries.from_report(report, source="here")
    assert (ours.engine.build, ours.step_ms, dict(ours.v)) == ("0123456789, native AVX2", 4.0, {"4": 1.4})
    assert (peer.engine.build, peer.v) == (
        "0.3, flash attention off",
        {"4": 2.4},
    ) and peer.machine.name == "a processor"
    lines = vn_entries.page([ours, peer]).splitlines()
    assert any("| M | Q4_1 | specsparse | 0 | 4.00 |  | 1.40 |" in line for line in lines)
