"""Properties of both tokenizer families on small vocabularies: round trips, streaming, special tokens."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specsparse.engine.text.tokenizer import Tokenizer
from specsparse.testing import bpe_vocabulary, spm_vocabulary

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
WORDS = st.lists(st.sampled_from(["hello", " world", "  ", "the", "<|im_end|>", "</s>", "é", "🦙", "12"]), max_size=12)


def bpe_metadata(**changes: Any) -> dict[str, Any]:
    tokens, types, merges = bpe_vocabulary(400)
    keys = {"model": "gpt2", "pre": "smollm", "tokens": tokens, "token_type": types, "merges": merges}
    keys |= {"bos_token_id": 1, "eos_token_id": 2} | changes
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}


def spm_metadata(**changes: Any) -> dict[str, Any]:
    tokens, types, scores = spm_vocabulary(400)
    keys = {"model": "llama", "tokens": tokens, "token_type": types, "scores": scores} | changes
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}


def bpe(**changes: Any) -> Tokenizer:
    return Tokenizer.from_metadata(bpe_metadata(**changes), where="bpe.gguf")


def spm(**changes: Any) -> Tokenizer:
    return Tokenizer.from_metadata(spm_metadata(**changes), where="spm.gguf")


BPE, SPM = bpe(), spm()


@given(TEXT)
def test_bpe_gives_every_text_back(text):
    assert BPE.decode(BPE.encode(text)) == text


@given(TEXT.filter(lambda text: "\u2581" not in text))  # which stands for a space there
def test_spm_gives_every_text_back(text):
    assert SPM.decode(SPM.encode(text)) == text
    assert SPM.decode(SPM.encode(text, add_special=True)) == text


@given(st.one_of(TEXT, WORDS.map("".join)), st.booleans())
def test_special_tokens_in_a_text_come_back_by_name(text, parse):
    for tokenizer in (BPE, SPM):
        if tokenizer is SPM and "\u2581" in text:
            continue
        ids = tokenizer.encode(text, parse_special=parse)
        if parse and tokenizer is SPM and tokenizer.special_ids & set(ids):
            continue  # a space is put before what follows a special token
        assert tokenizer.decode(ids, skip_special=False) == text
        assert parse or not tokenizer.special_ids & set(ids)


@pytest.mark.parametrize("tokenizer", [BPE, SPM], ids=["bpe", "spm"])
@pytest.mark.parametrize("skip", [True, False])
@given(data=st.data())
def test_streamed_pieces_are_the_decoded_text(tokenizer, skip, data):
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    for continues in (False, True):
        stream = tokenizer.stream(skip_special=skip, continues=continues)
        pieces = [stream.push(index) for index in ids] + [stream.flush()]
        assert "".join(pieces) == tokenizer.decode(ids, skip_special=skip, continues=continues)


@pytest.mark.parametrize("tokenizer", [BPE, SPM], ids=["bpe", "spm"])
@given(text=TEXT)
def test_a_stream_never_shows_half_a_character(tokenizer, text):
    if "\ufffd" in text:
        return
    stream = tokenizer.stream()
    pieces = [stream.push(index) for index in tokenizer.encode(text)]
    assert not any("\ufffd" in piece for piece in pieces)
    assert stream.flush() == ""


def test_broken_utf8_becomes_a_replacement_character():
    half = BPE.encode("é")
    half = [BPE.encode("🦙")[0]] if len(half) == 1 else half[:1]
    assert BPE.decode(half) == "\ufffd"
    assert BPE.decode(half + BPE.encode("x")) == "\ufffdx"


def test_token_bytes_are_the_text_without_decoding():
    ids = BPE.encode("héllo 🦙")
    assert b"".join(map(BPE.token_bytes, ids)).decode() == "héllo 🦙"
    assert b"".join(map(SPM.token_bytes, SPM.encode("héllo 🦙"))).decode() == " héllo 🦙"
    assert BPE.token_bytes(2) == b"<|im_end|>"


def test_the_space_before_a_text_belongs_to_the_start_only():
    ids = SPM.encode("hello world")
    assert SPM.decode(ids) == "hello world"
    assert SPM.decode(ids, continues=True) == " hello world"
    assert SPM.decode([1, *ids], skip_special=False) == "<s>hello world"
    bare = spm(add_space_prefix=False).encode("hello")
    assert [SPM.token_text(index) for index in bare] == ["he", "llo"]


def test_bos_and_eos_follow_the_file_and_else_the_family():
    assert SPM.encode("", add_special=True) == [1] and SPM.encode("") == []
    assert spm(add_bos_token=False, add_eos_token=True).encode("", add_special=True) == [2]
    assert BPE.encode("", add_special=True) == []
    assert bpe(pre="llama-bpe").encode("", add_special=True) == [1]
    assert bpe(pre="llama-bpe", add_bos_token=False).encode("", add_special=True) == []
    assert bpe(pre="llama-bpe", bos_token_id=None).encode("", add_special=True) == []


def test_control_tokens_are_parsed_only_if_asked_and_user_defined_ones_always():
    tokens, types, merges = bpe_vocabulary(400)
    types[399] = 4
    tokens[399], tokens[398], types[398] = "<tool>", "<tool>s", 4
    tokenizer = bpe(tokens=tokens, token_type=types, merges=merges)
    assert tokenizer.encode("a<tool>b", parse_special=False)[1] == 399
    assert tokenizer.encode("<tool>s<tool>") == [398, 399]  # the longer name first
    assert 2 not in tokenizer.encode("<|im_end|>")
    assert tokenizer.encode("<|im_end|>", parse_special=True) == [2]
    assert tokenizer.decode([399, 2]) == "<tool>"
    assert tokenizer.decode([399, 2], skip_special=False) == "<tool><|im_end|>"


def test_names_of_tokens_that_overlap():
    tokens, types, merges = bpe_vocabulary(400)
    tokens[397:], types[397:] = ["<x><", "<x>", "><"], [4, 4, 4]
    tokenizer = bpe(tokens=tokens, token_type=types, merges=merges)
    plain = tokenizer.encode
    assert plain("<x><x>") == [397, *plain("x>")]  # what a longer name took is not there for another
    assert plain("a<x>><<x>") == [*plain("a"), 398, 399, 398]
    assert plain("<x") == plain("<") + plain("x")


def test_end_tokens_are_found_by_name_and_by_key():
    tokens, types, _ = bpe_vocabulary(400)
    tokens[399], types[399] = "<|eot_id|>", 1
    tokenizer = bpe(tokens=tokens, token_type=types, eom_token_id=300)
    assert tokenizer.stop_ids == {0, 2, 300, 399}
    assert 399 in tokenizer.special_ids
    tokens[397:400] = ["<|end|>", "<|return|>", "<|call|>"]
    assert bpe(tokens=tokens, token_type=types).stop_ids == {0, 2, 398, 399}


def test_a_byte_without_a_token_is_dropped_and_its_neighbours_stay_apart():
    tokens, types, merges = bpe_vocabulary(400)
    tokens[3 + 4] = "unreachable"  # byte 4
    tokenizer = bpe(tokens=tokens, token_type=types, merges=merges, pre="falcon")
    assert tokenizer.decode(tokenizer.encode("1\x042")) == "12"
    assert tokenizer.encode("h\x04e") == tokenizer.encode("h") + tokenizer.encode("e") != tokenizer.encode("he")


def test_a_character_without_a_token_is_the_unknown_one_where_there_are_no_bytes():
    tokens, types, scores = ["<unk>", "<s>", "</s>", "\u2581", "a", "\u2581a"], [2, 3, 3, 1, 1, 1], [0.0] * 6
    tokenizer = spm(tokens=tokens, token_type=types, scores=scores)
    assert tokenizer.encode("aéa") == [5, 0, 4]
    assert tokenizer.decode([5, 0, 4]) == "aa"
