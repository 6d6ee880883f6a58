"""Ids equal to llama.cpp's, on its own test vocabularies, on prompts of the oracle and for every pre-tokenizer."""

import json
import logging
import time
from pathlib import Path

import numpy as np
import pytest

from specsparse.engine.gguf.reader import open_gguf
from specsparse.engine.text import bpe
from specsparse.engine.text.bpe import PRE_TOKENIZERS
from specsparse.engine.text.tokenizer import Tokenizer
from specsparse.errors import UserError
from specsparse.models import catalogue

ROOT = Path(__file__).resolve().parents[3]
ORACLE = ROOT / "tests" / "data" / "oracle_llama"
VOCAB = ROOT.parent / "shared" / "data" / "vocab"
PROMPTS = json.loads((ORACLE / "prompts.json").read_text())
PRE = json.loads((ORACLE / "pre_tokenizers.json").read_text())


@pytest.fixture(scope="module")
def metadata():
    try:
        return open_gguf(catalogue.resolve("smollm2-135m")).metadata
    except UserError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def smol(metadata):
    return Tokenizer.from_metadata(metadata, where="smollm2.gguf")


def vocabulary(name: str) -> tuple[Tokenizer, list[str], list[list[int]]]:
    path = VOCAB / f"ggml-vocab-{name}.gguf"
    if not path.exists():
        pytest.skip(f"{path} is missing: llama.cpp's test vocabularies are no part of the project")
    texts = Path(f"{path}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    ids = [[int(word) for word in line.split()] for line in Path(f"{path}.out").read_text().split("\n")]
    return Tokenizer.from_metadata(open_gguf(path).metadata, where=path.name), texts, ids


@pytest.mark.parametrize("name", ["gpt-2", "llama-spm"])
def test_ids_equal_those_of_llama_cpp_on_its_test_vocabularies(name):
    tokenizer, texts, ids = vocabulary(name)
    assert len(texts) == len(ids) == 47
    assert [tokenizer.encode(text) for text in texts] == ids
    assert [tokenizer.decode(row) for row in ids] == texts


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: prompt["id"])
def test_ids_equal_those_of_llama_cpp_on_the_oracle_prompts(smol, prompt):
    golden = np.load(ORACLE / "golden_smollm2_q4_1.npz")[f"{prompt['id']}/ids"].tolist()
    if "text" in prompt:
        assert smol.encode(prompt["text"], add_special=True, parse_special=True) == golden
        assert smol.decode(golden) == prompt["text"]
        return
    turns = [f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in prompt["chat"]]
    text = "".join(turns) + "<|im_start|>assistant\n"
    assert smol.encode(text, parse_special=True) == golden
    assert smol.decode(golden, skip_special=False) == text


@pytest.mark.parametrize("pre", PRE["ids"])
def test_each_pre_tokenizer_cuts_as_llama_cpp_does(metadata, pre):
    # The file says add_bos_token false; the golden ids were made without that key.
    keys = {key: value for key, value in metadata.items() if key != "tokenizer.ggml.add_bos_token"}
    tokenizer = Tokenizer.from_metadata({**keys, "tokenizer.ggml.pre": pre}, where="x.gguf")
    for text, ids in zip(PRE["texts"], PRE["ids"][pre], strict=True):
        assert tokenizer.encode(text, add_special=True, parse_special="<|" in text) == ids, text


def test_every_pre_tokenizer_is_of_a_family_with_golden_ids():
    golden = [PRE_TOKENIZERS[name] for name in PRE["ids"]]
    assert all(pre in golden for pre in PRE_TOKENIZERS.values())


def test_what_a_smollm2_file_says(smol):
    assert (smol.type, smol.vocab_size, smol.bos_id, smol.eos_id, smol.eot_id) == ("bpe", 49152, 1, 2, 2)
    assert (smol.add_bos, smol.add_eos, smol.add_space_prefix) == (False, False, False)
    assert smol.stop_ids == {0, 2, 4}  # <|endoftext|>, <|im_end|>, and <reponame>, where another file begins
    assert smol.special_ids == set(range(17))
    assert smol.token_text(28) == "," and smol.token_text(1) == "<|im_start|>"


def test_a_missing_pre_tokenizer_is_the_default_one_with_a_warning(metadata, caplog, monkeypatch):
    monkeypatch.setattr(bpe.log, "disabled", False)  # Hydra, in another test, disables the loggers it finds
    caplog.set_level(logging.WARNING)
    keys = {key: value for key, value in metadata.items() if not key.endswith((".pre", ".add_bos_token"))}
    tokenizer = Tokenizer.from_metadata(keys, where="old.gguf")
    assert "old.gguf" in caplog.text and "ids may be wrong" in caplog.text
    ids = [tokenizer.encode(text, parse_special="<|" in text) for text in PRE["texts"]]
    assert ids == PRE["ids"]["default"]


def test_chat_of_the_real_template(smol):
    text = smol.apply_chat_template([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}])
    expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert text == expected
    ids = smol.apply_chat_template([{"role": "user", "content": "Hi"}], False, tokenize=True)
    assert smol.decode(ids, skip_special=False).endswith("<|im_start|>user\nHi<|im_end|>\n")
    assert ids[0] == smol.bos_id


@pytest.mark.parametrize("text", ["a" * 100_000, " " * 100_000, "7" * 100_000, "word, " * 16_000], ids="a 7w")
def test_time_is_linear_in_the_text(smol, text):
    smol.encode("warm")
    start = time.perf_counter()
    ids = smol.encode(text)
    assert time.perf_counter() - start < 2.0  # 0.05 s where nothing else runs; a quadratic one takes minutes
    assert smol.decode(ids) == text


def test_loading_is_quick(metadata):
    start = time.perf_counter()
    Tokenizer.from_metadata(metadata, where="x.gguf")
    assert time.perf_counter() - start < 1.0  # 0.1 s where nothing else runs
