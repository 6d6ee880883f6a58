import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specsparse.engine.sampling.params import SamplingParams
from specsparse.errors import UserError

NAN = float("nan")
BAD = {
    "n": [0, -1, 1.0, True, "1", 16385, None, NAN],
    "best_of": [0, 1.5, True, "2"],
    "presence_penalty": [-2.1, 2.1, NAN, math.inf, 10**400, "0", True, None],
    "frequency_penalty": [-2.1, 2.1, NAN, "0", False],
    "repetition_penalty": [0, 0.0, -1.0, NAN, math.inf, "1", True],
    "temperature": [-0.1, NAN, math.inf, "0", True, None, [0.5], 1j],
    "top_p": [0, 0.0, 1.0001, -0.5, NAN, "0.9", True],
    "top_k": [-2, 1.0, 2.5, NAN, True, "40", None],
    "min_p": [-0.01, 1.01, NAN, "0", False],
    "seed": [1.0, True, "1", 2**64, -(2**63) - 1],
    "stop": ["", ["a", ""], [1], 5, {"a": 1}, [["a"]]],
    "stop_token_ids": [[-1], [1.0], [True], "12", 3, ["1"]],
    "bad_words": ["", ["a", ""], [1], 7],
    "include_stop_str_in_output": [1, 0, "true", None],
    "ignore_eos": [1, "false", None],
    "max_tokens": [0, -1, 1.5, True, "16", NAN],
    "min_tokens": [-1, 0.0, True, "0", None, 17],
    "logprobs": [-2, True, 1.0, "1"],
    "prompt_logprobs": [-2, True, 1.0, "1"],
    "detokenize": [1, None, "yes"],
    "skip_special_tokens": [1, None],
    "spaces_between_special_tokens": [1, None],
    "logit_bias": [[1], {"x": 1.0}, {-1: 1.0}, {1: NAN}, {1: math.inf}, {1: "1"}, {1: 1e31}, {1.5: 1.0}, {True: 1.0}],
    "allowed_token_ids": [[], [-1], [1.0], "1"],
    "truncate_prompt_tokens": [0, -2, True, 1.0, "1"],
    "logits_processors": [3, ["f"], "f", {"f": 1}],
}


def test_defaults_are_those_of_vllm():
    params = SamplingParams()
    assert (params.n, params.best_of, params.temperature, params.top_p, params.min_p) == (1, None, 1.0, 1.0, 0.0)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.0, 0.0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.logprobs, params.seed) == (16, 0, None, None)
    assert params.detokenize and params.skip_special_tokens and params.spaces_between_special_tokens
    assert params.stop == () and params.stop_token_ids == () and params.allowed_token_ids is None
    assert params.top_k in (-1, 0)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_bad_values_are_named_in_one_line(name, value):
    with pytest.raises(UserError) as error:
        SamplingParams(**{name: value})
    message = str(error.value)
    assert name in message and "must be" in message and "\n" not in message and len(message) < 250


def test_every_field_is_checked():
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    assert names == set(BAD) | {"guided_decoding", "use_beam_search"}


@pytest.mark.parametrize(
    ("name", "value"), [("top_k", -1), ("top_k", 0), ("top_k", 1), ("min_p", 1), ("top_p", 1), ("logprobs", -1)]
)
def test_edges_are_allowed(name, value):
    assert getattr(SamplingParams(**{name: value}), name) == value


def test_numpy_numbers_and_arrays_are_taken():
    params = SamplingParams(top_k=np.int64(3), temperature=np.float32(0.5), stop_token_ids=np.array([2, 3]))
    assert type(params.top_k) is int and type(params.temperature) is float and params.stop_token_ids == (2, 3)


def test_normal_forms():
    params = SamplingParams(stop="x", stop_token_ids=[3, 3, 1], seed=-1, logit_bias={"7": 1, 8: -math.inf})
    assert params.stop == ("x",) and params.stop_token_ids == (3, 1) and params.seed is None
    assert params.logit_bias == {7: 1.0, 8: -math.inf}
    assert hash(params) == hash(dataclasses.replace(params)) and params == dataclasses.replace(params)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2


def test_rules_between_fields():
    for bad in (
        {"min_tokens": 17},
        {"n": 3, "best_of": 2},
        {"n": 2, "temperature": 0},
        {"best_of": 2, "temperature": 0.0},
        {"stop": "x", "detokenize": False},
    ):
        with pytest.raises(UserError):
            SamplingParams(**bad)
    assert SamplingParams(min_tokens=17, max_tokens=None).min_tokens == 17
    assert SamplingParams(n=2, best_of=3).num_sequences == 3
    assert SamplingParams(temperature=0).greedy and not SamplingParams(temperature=0.01).greedy


@pytest.mark.parametrize(("name", "value"), [("guided_decoding", {"regex": "a"}), ("use_beam_search", True)])
def test_what_is_not_supported_is_refused_in_one_line(name, value):
    with pytest.raises(UserError, match=f"{name} is not supported") as error:
        SamplingParams(**{name: value})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("wrong", "right"), [("temprature", "temperature"), ("topk", "top_k"), ("top-p", "top_p")])
def test_unknown_names_get_the_nearest_one(wrong, right):
    with pytest.raises(UserError, match=f"did you mean {right}") as error:
        SamplingParams.from_dict({wrong: 1})
    assert wrong in str(error.value)


def test_merged_replaces_and_checks():
    params = SamplingParams(temperature=0.0, max_tokens=4).merged(max_tokens=9)
    assert params == SamplingParams(temperature=0.0, max_tokens=9)
    with pytest.raises(UserError, match="top_p"):
        params.merged(top_p=2)
    with pytest.raises(UserError, match="unknown sampling parameter"):
        params.merged(tempo=1)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.integers() | st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)


@settings(max_examples=100)
@given(st.dictionaries(st.sampled_from(sorted(BAD)) | st.text(max_size=6), anything, max_size=3))
def test_any_input_is_accepted_or_refused_in_one_line(mapping):
    try:
        params = SamplingParams.from_dict(mapping)
    except UserError as error:
        assert len(str(error).splitlines()) == 1
    else:
        assert SamplingParams.from_dict(dataclasses.asdict(params)) == params
