"""`python -m specsparse convert`: it replaces nothing unasked, makes no folder, and warns of a second rounding."""

import io

import pytest

from specsparse.cli import main as cli
from specsparse.engine.gguf.reader import open_gguf
from specsparse.testing import write_tiny_gguf
from tests.models.convert import checkpoints


@pytest.fixture
def source(tmp_path):
    return write_tiny_gguf(tmp_path / "in.gguf", quant="F16", n_layers=1)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def quantize(source, out, *more, kind="q4_0"):
    return cli.main(["convert", "quantize", str(source), str(out), kind, *more])


def test_nothing_is_replaced_without_a_word(source, tmp_path, capsys):
    out = tmp_path / "out.gguf"
    assert quantize(source, out) == 0
    first = out.read_bytes()
    capsys.readouterr()
    assert quantize(source, out, kind="q8_0") == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "is there already; --overwrite replaces it" in said and out.read_bytes() == first
    for flag, kind in (("--overwrite", "q8_0"), ("--yes", "q5_0")):
        assert quantize(source, out, flag, kind=kind) == 0
        assert open_gguf(out).tensors["blk.0.attn_q.weight"].type.name == kind.upper()


@pytest.mark.parametrize(("answer", "replaced"), [("y", True), ("Yes", True), ("", False), ("n", False)])
def test_a_terminal_is_asked(source, tmp_path, capsys, monkeypatch, answer, replaced):
    out = tmp_path / "out.gguf"
    out.write_text("precious")
    monkeypatch.setattr("sys.stdin", Terminal(f"{answer}\n"))
    assert quantize(source, out) == (0 if replaced else 2)
    said = capsys.readouterr().err
    assert "Replace it? [y/N]" in said and ("left as it is" in said) == (not replaced)
    assert (out.read_bytes() == b"precious") == (not replaced)


def test_the_end_of_the_input_is_a_no(source, tmp_path, capsys, monkeypatch):
    (tmp_path / "out.gguf").write_text("precious")
    monkeypatch.setattr("sys.stdin", Terminal(""))
    assert quantize(source, tmp_path / "out.gguf") == 2
    assert "left as it is" in capsys.readouterr().err


def test_the_source_is_never_the_file_to_write(source, capsys):
    assert quantize(source, source, "--overwrite") == 2
    assert "is the source; give another file to write" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["quantize", "hf"])
def test_no_folder_is_made(source, tmp_path, capsys, kind):
    folder = checkpoints.save(tmp_path / "in", checkpoints.CONFIG, checkpoints.weights(checkpoints.CONFIG))
    out = tmp_path / "missing" / "out.gguf"
    argv = {"quantize": [str(source), str(out), "q8_0"], "hf": [str(folder), str(out)]}[kind]
    assert cli.main(["convert", kind, *argv]) == 2
    said = capsys.readouterr().err
    assert f"there is no folder {out.parent} to write it in" in said and said.count("\n") == 1
    assert not out.parent.exists()


def test_a_second_rounding_is_warned_of(source, tmp_path, capsys):
    once, twice = tmp_path / "once.gguf", tmp_path / "twice.gguf"
    assert quantize(source, once, kind="q8_0") == 0
    assert "warning" not in capsys.readouterr().err
    assert quantize(once, twice) == 0
    said = capsys.readouterr().err
    assert "is quantised already (Q8_0)" in said and said.count("\n") == 1
    assert quantize(once, tmp_path / "f16.gguf", kind="f16") == 0
    assert "warning" not in capsys.readouterr().err
