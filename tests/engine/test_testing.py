"""The public test kit."""

import pytest

from specsparse.testing import (
    DummyTokenizer,
    bpe_vocabulary,
    byte_characters,
    random_quantised,
    spm_vocabulary,
    write_tiny_gguf,
)


def test_bpe_vocabulary_is_closed_under_its_merges():
    tokens, types, merges = bpe_vocabulary(320)
    assert len(tokens) == len(set(tokens)) == len(types) == 320
    known = {*byte_characters()}
    assert len(known) == 256 and known <= set(tokens)
    for merge in merges:
        left, right = merge.split(" ")
        assert left in known and right in known
        known.add(left + right)
    assert known <= set(tokens)
    assert bpe_vocabulary(259)[2] == []


def test_spm_vocabulary_has_every_byte_and_no_dead_piece():
    tokens, types, scores = spm_vocabulary(320)
    assert len(tokens) == len(set(tokens)) == len(types) == len(scores) == 320
    assert tokens[3] == "<0x00>" and tokens[258] == "<0xFF>" and types[3:259] == [6] * 256
    known = set(tokens)
    for token, kind in zip(tokens, types, strict=True):
        if kind == 1 and len(token) > 1:  # reached by joining two shorter ones
            assert any(token[:i] in known and token[i:] in known for i in range(1, len(token))), token


@pytest.mark.parametrize("make", [bpe_vocabulary, spm_vocabulary])
def test_a_vocabulary_too_small_is_refused(make):
    with pytest.raises(ValueError, match="at least 259"):
        make(258)


def test_dummy_tokenizer():
    tok = DummyTokenizer()
    assert tok.decode(tok.encode("héllo ∀", add_special=True)) == "héllo ∀"
    assert tok.encode("a", add_special=True) == [1, 100]
    assert tok.decode(tok.encode("é")[:1]) == "\ufffd"
    assert tok.apply_chat_template([{"role": "user", "content": "hi"}]) == "user: hi\nassistant: "


def test_files_are_repeatable(tmp_path):
    a, b, c = (write_tiny_gguf(tmp_path / f"{i}", seed=seed, quant="Q3_K") for i, seed in enumerate((1, 1, 2)))
    assert a.read_bytes() == b.read_bytes() != c.read_bytes()


def test_a_width_that_does_not_fit_is_refused(tmp_path):
    with pytest.raises(ValueError, match="64 columns cannot be Q4_K: its block is 256"):
        write_tiny_gguf(tmp_path / "x", quant="Q4_K", d_model=64)
    with pytest.raises(ValueError, match="block of 32"):
        random_quantised("Q4_0", 2, 33)
