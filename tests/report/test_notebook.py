"""What a notebook shows of a run: a small table whose cells are the record's figures, and text that is escaped."""

import re
from html import unescape

from specsparse.report import record, runs
from specsparse.report.record import RunRecord
from tests.report import making

TIMES = {("chat-1", "chat"): (2.0, 1.0), ("code-1", "code"): (4.0, 1.0)}


def cells(html):
    """Rows of texts."""
    rows = re.findall(r"<tr>(.*?)</tr>", html, re.DOTALL)
    return [[unescape(cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL)] for row in rows]


def made(passes, name="made"):
    return RunRecord(
        name=name,
        method={"drafter": "prompt_lookup", "verifier": "greedy", "label": "lossless"},
        groups=record.groups(passes, bytes_per_pass=1000, read_bandwidth=1e9),
        identity=record.identity_of(passes, verifier="greedy"),
        load_s=0.1, first_text_s=None, compile_s=0.1, read_bandwidth=1e9, bytes_per_pass=1000,
    )  # fmt: skip


def test_a_run_is_its_tasks_rates_and_speed_up():
    found = made(making.passes(TIMES))
    html = found._repr_html_()
    rows = {row[0]: row[1:] for row in cells(html)}
    assert "made: prompt_lookup x greedy" in html
    assert rows[""] == ["chat", "code", "all"]
    assert rows["plain, tok/s"] == ["10.0", "5.0", "6.7"] and rows["speculative, tok/s"] == ["20.0"] * 3
    assert rows["speed-up"] == ["2.00", "4.00", "3.00"] and rows["tokens per target pass"] == ["2.00"] * 3
    assert rows["tokens that differ from plain"] == ["0 of 40"]
    assert rows["  95 % interval"][-1] == found.groups["all"].speedup.interval.ends()


def test_a_plain_run_has_no_method_and_texts_are_escaped():
    only = [p for p in making.passes({("a", "<b>"): (2.0, 1.0)}) if p.side == record.PLAIN]
    html = made(only, name="x<script>")._repr_html_()
    assert "<script>" not in html and "&lt;b&gt;" in html
    names = [row[0] for row in cells(html)]
    assert names[:2] == ["", "plain, tok/s"] and names[-1] == "tokens that differ from plain"
    assert not any("speculative" in name for name in names)


def test_a_run_on_disk_says_what_it_is(tmp_path):
    making.speed_run(tmp_path, making.passes(TIMES), kernels={"kernels": "native", "isa": "avx2"})
    rows = {row[0]: row[1] for row in cells(runs.read(tmp_path)._repr_html_())}
    assert rows["kind"] == "speed" and rows["kernels"] == "native avx2" and rows["bytes_per_pass"] == "1000"
    assert "manifest" not in rows and "plain" not in rows
