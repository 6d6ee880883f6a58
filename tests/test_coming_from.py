"""docs/coming_from.md: every line of its third columns is tried, as far as its first paragraph says."""

import importlib
import re
import shlex
from pathlib import Path

import pytest

import specsparse
from specsparse.cli import arguments
from specsparse.cli.main import TOOLS
from specsparse.cli.main import main as command_line
from specsparse.experiments.command_line import shorthand
from specsparse.models import hub
from specsparse.testing import write_tiny_gguf
from tests.experiments.test_config import composed
from tests.models.convert import checkpoints

PAGE = Path(__file__).parents[1] / "docs" / "coming_from.md"
LINES = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| ") and "`" in line]
HERE = [re.search("`(.+?)`", line.rsplit(" | ", 1)[1])[1] for line in LINES]


class Started(Exception):
    """All was understood, and the first token is next."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, a draft model and a checkpoint by the names of the page, and a text."""
    folder = tmp_path_factory.mktemp("page")
    for name, seed in (("model.gguf", 0), ("draft.gguf", 1)):
        write_tiny_gguf(folder / name, n_layers=2, n_heads=2, n_kv_heads=2, head_dim=32, seed=seed)
    (folder / "text.txt").write_text("a text")
    checkpoint = checkpoints.save(folder / "FOLDER", checkpoints.CONFIG, checkpoints.weights(checkpoints.CONFIG))
    checkpoints.bpe_tokenizer(checkpoint)
    return folder


@pytest.fixture(scope="module")
def model(folder):
    return specsparse.load(folder / "model.gguf")


@pytest.fixture(autouse=True)
def without_decoding(folder, monkeypatch):
    def started(*_, **__):
        raise Started

    monkeypatch.chdir(folder)
    monkeypatch.setattr("specsparse.api.Session", started)
    monkeypatch.setattr(hub, "download", lambda text: hub.Reference.parse(text) and folder / "model.gguf")


@pytest.mark.parametrize("here", HERE)
def test_coming_from(here, model, tmp_path, monkeypatch):
    if here.startswith("python -m specsparse.run "):
        composed(*shorthand(shlex.split(here)[3:]))
    elif here.startswith("python -m specsparse inspect "):
        assert command_line(shlex.split(here)[3:]) == 0
    elif here.startswith("python -m specsparse convert "):
        _, what, source, out, *options = shlex.split(here)[3:]
        assert command_line(["convert", what, source, str(tmp_path / out), *options]) == 0
        assert len(specsparse.load(tmp_path / out).logits([1, 2])) == 2
    elif here.startswith("python -m specsparse "):
        _command(shlex.split(here)[3:], monkeypatch)
    else:
        known = {"specsparse": specsparse, "model": model, "prompt": "Hi", "prompts": ["Hi", "there"]}
        if here.startswith("model = "):
            exec(here, known)
        else:
            with pytest.raises(Started):
                exec(here, known)


def _command(argv, monkeypatch):
    """The words are read by the command's own parser, and of one that decodes the method is made."""
    seen = []
    module = importlib.import_module(f"specsparse.{'tools' if argv[0] in TOOLS else 'cli'}.{argv[0]}")
    monkeypatch.setattr(module, "main", seen.append)
    assert command_line(argv) == 0
    (args,) = seen
    if argv[0] in ("generate", "chat", "serve"):
        arguments.settle(args)
        arguments.method_of(args, arguments.sampling_params(args)).arguments()
        assert args.model in ("model.gguf", "hf://owner/repo:Q4_K_M", "owner/repo:Q4_K_M")
