"""Vocabularies that are damaged or not supported: one clear line that names the file, never a traceback."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specsparse.engine.text.tokenizer import Tokenizer
from specsparse.errors import UserError
from specsparse.testing import bpe_vocabulary, spm_vocabulary

from .test_tokenizer_properties import BPE, SPM, bpe, bpe_metadata, spm, spm_metadata

BPE_TOKENS, BPE_TYPES, BPE_MERGES = bpe_vocabulary(400)
SPM_TOKENS, SPM_TYPES, SPM_SCORES = spm_vocabulary(400)


def message(call) -> str:
    with pytest.raises(UserError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text and len(text) < 1200
    return text


@pytest.mark.parametrize("model", ["t5", "bert", "rwkv", "plamo2", "none", "", 7, ["gpt2"]])
def test_other_models_are_refused_by_name(model):
    text = message(lambda: bpe(model=model))
    assert "bpe.gguf" in text and repr(model) in text and "gpt2" in text


def test_no_tokenizer_at_all():
    assert "x.gguf: no tokenizer" in message(lambda: Tokenizer.from_metadata({}, where="x.gguf"))


def test_an_unknown_pre_tokenizer_is_named_with_those_that_are_known():
    text = message(lambda: bpe(pre="nonsense"))
    assert "'nonsense'" in text and "smollm" in text and "llama-bpe" in text


BAD_BPE = {
    "no tokens": (dict(tokens=None), "tokens"),
    "empty tokens": (dict(tokens=[]), "tokens"),
    "tokens are a string": (dict(tokens="abc"), "not an array"),
    "tokens are numbers": (dict(tokens=np.arange(400)), "not a string"),
    "one token is a number": (dict(tokens=[*BPE_TOKENS[:-1], 7]), "tokens[399]"),
    "one token is bytes": (dict(tokens=[*BPE_TOKENS[:-1], b"x"]), "tokens[399]"),
    "token twice": (dict(tokens=[*BPE_TOKENS[:-1], "a"]), "twice"),
    "broken utf-8": (dict(tokens=[*BPE_TOKENS[:-1], "\udcff"]), "Unicode"),
    "types too short": (dict(token_type=BPE_TYPES[:-1]), "399 entries for 400"),
    "types too long": (dict(token_type=[*BPE_TYPES, 1]), "401 entries for 400"),
    "types are a number": (dict(token_type=1), "not an array"),
    "no merges": (dict(merges=None), "merges"),
    "merges are a number": (dict(merges=3), "merges"),
    "merge is a number": (dict(merges=[*BPE_MERGES, 3]), "not a string"),
    "merge without a space": (dict(merges=["ab"]), "merges[0]"),
    "merge of three, which moves none": (dict(merges=[BPE_MERGES[0], "a b c", *BPE_MERGES[1:]]), "merges[1]"),
    "merge of nothing known": (dict(merges=["a qqq"]), "merges[0]"),
    "bos past the end": (dict(bos_token_id=400), "bos_token_id is 400"),
    "eos negative": (dict(eos_token_id=-1), "eos_token_id is -1"),
    "eot huge": (dict(eot_token_id=2**32 - 1), "eot_token_id"),
    "eos a float": (dict(eos_token_id=1.5), "eos_token_id"),
    "eos a string": (dict(eos_token_id="2"), "eos_token_id"),
    "flag a string": (dict(add_bos_token="yes"), "add_bos_token"),
    "bos wanted but absent": (dict(add_bos_token=True, bos_token_id=None), "no bos_token_id"),
    "byte token without a byte": (dict(token_type=[6, *BPE_TYPES[1:]]), "byte"),
}


@pytest.mark.parametrize("case", BAD_BPE)
def test_bad_bpe_vocabularies(case):
    changes, part = BAD_BPE[case]
    text = message(lambda: bpe(**changes))
    assert text.startswith("bpe.gguf: ") and part in text


BAD_SPM = {
    "no scores": (dict(scores=None), "scores"),
    "scores too short": (dict(scores=SPM_SCORES[:-1]), "399 entries for 400"),
    "score is a string": (dict(scores=[*SPM_SCORES[:-1], "x"]), "scores[399]"),
    "score is nan": (dict(scores=np.array([*SPM_SCORES[:-1], math.nan], np.float32)), "scores[399]"),
    "token twice": (dict(tokens=[*SPM_TOKENS[:-1], "e"]), "twice"),
}


@pytest.mark.parametrize("case", BAD_SPM)
def test_bad_spm_vocabularies(case):
    changes, part = BAD_SPM[case]
    text = message(lambda: spm(**changes))
    assert text.startswith("spm.gguf: ") and part in text


@pytest.mark.parametrize("token", ["x\0y", "y" * 100_000])
def test_a_token_that_the_library_does_not_take(token):
    tokenizer = spm(tokens=[*SPM_TOKENS[:-1], token])
    assert "spm.gguf" in message(lambda: tokenizer.encode("hello"))


def test_numpy_arrays_are_as_good_as_lists():
    arrays = spm(token_type=np.array(SPM_TYPES, np.int32), scores=np.array(SPM_SCORES, np.float32))
    assert arrays.encode("hello world é") == SPM.encode("hello world é")


def test_odd_but_harmless_vocabularies_load():
    assert bpe(token_type=None).encode("hello") == BPE.encode("hello")
    assert bpe(padding_token_id=2**32 - 1, unknown_token_id=4000).encode("hello") == BPE.encode("hello")
    assert bpe(merges=[*BPE_MERGES, *BPE_MERGES]).encode("hello") == BPE.encode("hello")
    assert bpe(tokens=["", *BPE_TOKENS[1:]]).token_text(0) == "[EMPTY_0]"
    assert bpe(token_type=[*BPE_TYPES[:-1], 77]).token_bytes(399) == b""


@pytest.mark.parametrize("index", [400, -1, 2**70, "a", None, 1.0, [1]])
def test_ids_that_are_none(index):
    for tokenizer in (BPE, SPM):
        said = message(lambda tokenizer=tokenizer: tokenizer.decode([index]))
        outside = f"token id {index} is outside the vocabulary of "
        assert said.startswith(outside if isinstance(index, int) else f"{index!r} is not a token id")


def test_ids_of_numpy_are_ids():
    assert BPE.decode(np.array(BPE.encode("hello"), np.int32)) == "hello"


@pytest.mark.parametrize("text", ["a\ud800b", "\udfff", b"bytes", None, 3])
def test_text_that_is_none(text):
    for tokenizer in (BPE, SPM):
        assert "text" in message(lambda tokenizer=tokenizer: tokenizer.encode(text))


KEYS = ("model", "pre", "tokens", "token_type", "scores", "merges", "bos_token_id", "eos_token_id", "add_bos_token")
VALUES = st.one_of(
    st.none(),
    st.integers(-5, 500),
    st.text(max_size=5),
    st.floats(),
    st.lists(st.one_of(st.integers(-5, 10), st.text(max_size=3), st.floats()), max_size=5),
)


@given(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=3), st.sampled_from([bpe_metadata, spm_metadata]))
def test_any_value_under_any_key_is_an_error_or_works(changes, family):
    try:
        tokenizer = Tokenizer.from_metadata(family(**changes), where="x.gguf")
        tokenizer.decode(tokenizer.encode("hello wörld", add_special=True))
    except UserError as error:
        assert "\n" not in str(error)
