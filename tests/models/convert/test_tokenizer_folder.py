"""The tokenizer of a GGUF file as a folder: ids are those of the file, in `tokenizers` and in transformers."""

import json

import numpy as np
import pytest
import tokenizers

from specsparse.cli import main as cli
from specsparse.data import prompts
from specsparse.engine.gguf.reader import open_gguf
from specsparse.engine.text.tokenizer import Tokenizer
from specsparse.errors import UserError
from specsparse.models import catalogue
from specsparse.models.convert.hf_tokenizer import tokenizer_keys, write_tokenizer
from specsparse.testing import CHATML, write_tiny_gguf

TEXTS = (
    "", "a", " hello  world ", "abc abc\n\n\tthe 1234567", "\u00fcml\u00e4ut \u4f60\u597d \U0001f642\U0001f680",
    "<s>inner</s> x", "it's THE end</s>",
)  # fmt: skip


def ids_of(file, texts):
    tokenizer = Tokenizer.from_metadata(file.metadata, where="file")
    return [tokenizer.encode(text, add_special=True, parse_special=True) for text in texts]


@pytest.fixture(params=["bpe", "spm"])
def pair(request, tmp_path):
    """A file and its folder."""
    file = open_gguf(write_tiny_gguf(tmp_path / "m.gguf", tokenizer=request.param, n_layers=1, context_length=128))
    return file, write_tokenizer(file, tmp_path / "folder")


def test_ids_and_text_are_those_of_the_file(pair):
    file, folder = pair
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    expected = ids_of(file, TEXTS)
    assert [library.encode(text).ids for text in TEXTS] == expected
    tokenizer = Tokenizer.from_metadata(file.metadata, where="file")
    for ids in expected:
        assert library.decode(ids) == tokenizer.decode(ids)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert settings["chat_template"] == CHATML and settings["model_max_length"] == 128
    assert settings["eos_token"] == tokenizer.token_text(tokenizer.eos_id)


def test_runs_of_blanks_go_there_and_back(tmp_path):
    """Llama 2's runs of blanks stand among the first ids and merge last: a folder of them is read by `convert hf`."""
    file = open_gguf(write_tiny_gguf(tmp_path / "m.gguf", tokenizer="spm", n_layers=1))
    runs = ["\u2581" * n for n in (2, 4, 8, 5, 16, 6, 12, 13, 10, 14, 3, 9, 7, 11, 15)]
    kept = [i for i, token in enumerate(file.metadata["tokenizer.ggml.tokens"]) if token not in runs]
    for name, more in (("tokens", runs), ("scores", [-1e9] * 15), ("token_type", [1] * 15)):
        values = np.asarray(file.metadata[f"tokenizer.ggml.{name}"])[kept].tolist()
        file.metadata[f"tokenizer.ggml.{name}"] = [*values[:259], *more, *values[259:]]
    folder = write_tokenizer(file, tmp_path / "folder")
    again = tokenizer_keys(folder, {}, vocab_size=len(kept) + 15)
    texts = [*TEXTS, *(f"a{' ' * n}b" for n in range(40))]
    read = Tokenizer.from_metadata(again, where="again")
    assert [read.encode(text, add_special=True, parse_special=True) for text in texts] == ids_of(file, texts)


def test_transformers_reads_the_folder(pair):
    transformers = pytest.importorskip("transformers")
    file, folder = pair
    auto = transformers.AutoTokenizer.from_pretrained(str(folder))
    assert [auto(text).input_ids for text in TEXTS] == ids_of(file, TEXTS)
    chat = [{"role": "user", "content": "hi"}]
    rendered = Tokenizer.from_metadata(file.metadata, where="file").apply_chat_template(chat)
    assert auto.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == rendered


def test_the_real_model(tmp_path):
    try:
        file = open_gguf(catalogue.resolve("smollm2-135m"))
    except UserError as error:
        pytest.skip(str(error))
    library = tokenizers.Tokenizer.from_file(str(write_tokenizer(file, tmp_path) / "tokenizer.json"))
    texts = [p.text for p in prompts.load()] + ["<|im_start|>user\nhi<|im_end|>\n", *TEXTS]
    assert [library.encode(text).ids for text in texts] == ids_of(file, texts)


def test_the_command_replaces_nothing_unasked(tmp_path, capsys):
    source, out = str(write_tiny_gguf(tmp_path / "m.gguf", n_layers=1)), tmp_path / "folder"
    assert cli.main(["convert", "tokenizer", source, str(out)]) == 0
    assert capsys.readouterr().out == f"wrote {out}: tokenizer.json, tokenizer_config.json\n"
    assert cli.main(["convert", "tokenizer", source, str(out)]) == 2
    assert "--overwrite replaces it" in capsys.readouterr().err
    assert cli.main(["convert", "tokenizer", source, str(out), "--overwrite"]) == 0
    bare = str(write_tiny_gguf(tmp_path / "none.gguf", n_layers=1, tokenizer="none"))
    assert cli.main(["convert", "tokenizer", bare, str(tmp_path / "other")]) == 2 and not (tmp_path / "other").exists()
