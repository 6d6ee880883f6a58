"""The standard streams: closed, full, in another encoding, left early."""

import io
import json
import subprocess
import sys

import pytest

from specsparse.cli import main as cli
from specsparse.errors import UserError
from specsparse.support import terminal
from specsparse.support.terminal import decoding_input, until_the_reader_leaves
from specsparse.tools.chat.conversation import _piped_lines


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_is_one_line(unbuffered):
    line = f"PYTHONUNBUFFERED={unbuffered} {sys.executable} -m specsparse version >/dev/full"
    done = subprocess.run(line, shell=True, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("specsparse: the output: cannot be written: No space left on device; make room")


def test_closed_streams_are_empty_ones(monkeypatch, capsys):
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    assert cli.main(["version"]) == 0
    assert cli.main(["generate", "no-model"]) == 2
    monkeypatch.undo()
    assert capsys.readouterr() == ("", "")


def test_what_the_encoding_has_not_is_escaped_as_json_has_it(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    text = "na\xefve \u4e2d \U0001f600 \udcff"
    with until_the_reader_leaves():
        print(f'"{text}"')
    assert json.loads(written.getvalue()) == text


def test_input_in_another_encoding_is_one_line(monkeypatch):
    def given():
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe\n"), encoding="utf-8"))

    said = "^the standard input is no UTF-8 text: convert it"
    given()
    with pytest.raises(UserError, match=said), decoding_input():
        sys.stdin.read()
    given()
    with pytest.raises(UserError, match=said):
        list(_piped_lines())


def test_a_table_whose_reader_has_left_ends_as_a_print_does(monkeypatch):
    class Left(io.StringIO):
        def write(self, _):
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Left())
    with pytest.raises(BrokenPipeError):
        terminal.console().print("unread")
