import numpy as np
import pytest

from specsparse.engine.sampling.params import SamplingParams, compile_params
from specsparse.errors import UserError

V = 20


def letters(text):
    """One token a letter; a space joins the letter after it (a -> 1, " a" -> 11)."""
    ids, spaced = [], False
    for letter in text:
        if letter == " ":
            spaced = True
        else:
            ids.append(ord(letter) - ord("a") + (11 if spaced else 1))
            spaced = False
    return ids


def compiled(batch=1, **fields):
    return compile_params(SamplingParams(**fields), vocab_size=V, batch=batch, encode=letters, eos_ids=(2,))


def test_neutral_parameters_use_nothing():
    cfg, arrays = compiled(batch=3)
    assert cfg.raw and not cfg.greedy and not (cfg.use_min_p or cfg.use_top_k or cfg.use_top_p)
    assert hash(cfg) == hash(compiled()[0])
    assert arrays.bias is None and arrays.presence is None and arrays.bad_prefix is None and arrays.stop_ids is None
    assert (
        arrays.truncation.temperature.shape == (3,)
        and arrays.truncation.top_k.tolist() == [V] * 3
        and np.isneginf(arrays.truncation.log_min_p).all()
    )


def test_greedy_ignores_truncation():
    cfg, arrays = compiled(temperature=0, top_k=3, top_p=0.5, min_p=0.1)
    assert cfg.greedy and not (cfg.use_min_p or cfg.use_top_k or cfg.use_top_p)
    assert (
        arrays.truncation.temperature[0] == 0.0
        and arrays.truncation.top_k[0] == V
        and arrays.truncation.top_p[0] == 1.0
    )


def test_a_batch_may_mix():
    cfg, arrays = compile_params([SamplingParams(temperature=0), SamplingParams(top_k=3, min_p=0.5)], vocab_size=V)
    assert cfg.mixed and not cfg.greedy and cfg.use_top_k and cfg.use_min_p
    assert arrays.truncation.top_k.tolist() == [V, 3]
    np.testing.assert_allclose(arrays.truncation.log_min_p, [-np.inf, np.log(0.5)], rtol=1e-6)


def test_top_k_beyond_the_vocabulary_is_off():
    cfg, arrays = compiled(top_k=1000)
    assert not cfg.use_top_k and arrays.truncation.top_k[0] == V


def test_bias_allowed_and_one_token_bad_words():
    cfg, arrays = compiled(logit_bias={3: 2.5, 4: -np.inf}, allowed_token_ids=[1, 3, 4, 5], bad_words=["e"])
    assert cfg.use_bias and not cfg.bad_prefix
    assert arrays.bias.shape == (1, V) and arrays.bias[0, 3] == 2.5 and arrays.bias[0, 1] == 0.0
    assert np.isneginf(np.delete(arrays.bias[0], [1, 3])).all()  # 5 is "e", 15 is " e"


def test_bad_words_of_several_tokens_come_with_and_without_a_space():
    cfg, arrays = compiled(bad_words=["abc", "ab"])
    assert cfg.bad_prefix == 2 and cfg.context == 2
    assert arrays.bad_prefix[0].tolist() == [[1, 2], [11, 2], [-1, 1], [-1, 11]]
    assert arrays.bad_last[0].tolist() == [3, 3, 2, 2]


def test_min_tokens_mask_eos_and_stop_ids():
    cfg, arrays = compiled(min_tokens=3, stop_token_ids=[7], ignore_eos=True)
    assert cfg.use_min_tokens and arrays.min_tokens.tolist() == [3] and arrays.stop_ids.tolist() == [[2, 7]]


def test_logprobs_and_context():
    assert compiled(logprobs=-1)[0].logprobs == V
    assert compiled(logprobs=5)[0].logprobs == 5
    assert compiled(logits_processors=[lambda ids, x: x], max_tokens=9)[0].context == 9


@pytest.mark.parametrize(
    "fields",
    [
        {"stop_token_ids": [V]},
        {"logit_bias": {V: 1.0}},
        {"allowed_token_ids": [1, V + 5]},
        {"bad_words": [" "]},
        {"allowed_token_ids": [1], "bad_words": ["a"]},
        {"allowed_token_ids": [3], "logit_bias": {3: -np.inf}},
    ],
)
def test_bad_ids_are_refused_by_name(fields):
    with pytest.raises(UserError) as error:
        compiled(**fields)
    assert next(iter(fields)) in str(error.value)


def test_bad_words_need_a_tokenizer_and_processors_must_agree():
    with pytest.raises(UserError, match="bad_words"):
        compile_params(SamplingParams(bad_words=["a"]), vocab_size=V)
    with pytest.raises(UserError, match="logits_processors"):
        compile_params([SamplingParams(), SamplingParams(logits_processors=[lambda i, x: x])], vocab_size=V)
