"""Words of vLLM, Hugging Face and llama.cpp, in Python, in configs and at the server: understood, or answered."""

import pytest

import specsparse
from specsparse import SamplingParams, UserError
from specsparse.engine.config import OVERRIDES
from specsparse.experiments.command_line import shorthand
from specsparse.runtime.load import load
from specsparse.speculative.drafters import DRAFTERS, get_drafter, takes
from specsparse.support.neighbours import METHODS, SPECULATIVE_METHODS, WORDS, answer, config_key, hint, understood
from specsparse.support.options import options_of
from specsparse.support.registry import Choice
from specsparse.testing import write_tiny_gguf
from specsparse.tools.serve.protocol import HttpError, parse_request

PROMPT = [5, 6, 7, 8, 5, 6, 7, 8, 5, 6]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return specsparse.load(write_tiny_gguf(tmp_path_factory.mktemp("m") / "m.gguf", n_layers=1))


def test_neighbours_words_lead_to_names_that_there_are():
    places = {"sampling": options_of(SamplingParams), "load": {*OVERRIDES, "threads", "kv_dtype", "mesh"}}
    places["drafter"] = set().union(*(takes(name) for name in DRAFTERS.names()))
    places[""] = {"sampling", "drafter", ""}
    for name, word in WORDS.items():
        owner, _, own = word.here.rpartition(".")
        assert own in places[owner], name
        assert bool(word.here) != bool(word.line) or name == "speculative_config"
        assert "\n" not in answer(name) and answer(name)
    assert {DRAFTERS.canonical(name) for name in (*METHODS, *SPECULATIVE_METHODS)} <= {*DRAFTERS.names()}


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"max_new_tokens": 5, "do_sample": False, "temperature": 0.7}, {"max_tokens": 5, "temperature": 0.0}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": True, "temp": 0.7}, {"temperature": 0.7}),
        ({"do_sample": True, "sampling": 1}, {"sampling": 1}),
        ({"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 2},
         {"drafter": Choice("prompt_lookup", {"gamma": 4, "ngram_max": 2})}),
        ({"assistant_model": "a", "num_assistant_tokens": 3}, {"drafter": Choice("model", {"model": "a", "gamma": 3})}),
        ({"drafter": "model", "assistant_model": "a"}, {"drafter": Choice("model", {"model": "a"})}),
        ({"drafter": "suffix", "num_speculative_tokens": 3}, {"drafter": Choice("suffix", {"gamma": 3})}),
        ({"spec_type": "ngram-simple", "draft_max": 3}, {"drafter": Choice("ngram-simple", {"gamma": 3})}),
        ({"speculative_config": {"method": "suffix", "model": None}}, {"drafter": Choice("suffix")}),
        ({"speculative_config": {"model": "a", "rejection_sample_method": "block"}},
         {"drafter": Choice("model", {"model": "a"}), "verifier": "block"}),
        ({"speculative_config": '{"method": "eagle3", "model": "h", "num_speculative_tokens": 2}'},
         {"drafter": Choice("eagle3", {"path": "h", "num_speculative_tokens": 2})}),
        ({"speculative_config": {"model": "[ngram]"}, "stop": None},
         {"drafter": Choice("prompt_lookup"), "stop": None}),
    ],
)  # fmt: skip
def test_neighbours_arguments_are_understood(given, found):
    assert understood(given) == found


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"speculative_config": {"method": "medusa"}}, "method=medusa: .* ngram, draft_model, suffix, eagle, eagle3"),
        ({"speculative_config": {"method": ["ngram"]}}, "give one of the methods"),
        ({"speculative_config": {}}, "speculative_config.method=null: give one of the methods"),
        ({"speculative_config": {"method": "draft_model"}}, "speculative_config.model=null: it is for draft_model"),
        ({"speculative_config": {"method": "ngram", "model": "a"}}, "it is not for ngram, leave it out"),
        ({"speculative_config": {"method": "ngram", "disable_by_batch_size": 4}}, "policy='auto_off'"),
        ({"speculative_config": {"method": "ngram", "rejection_sample_method": "x"}}, "standard or block"),
        ({"speculative_config": "{"}, "must be a mapping, such as"),
        ({"structured_outputs": {}}, "free text"),
        ({"num_beams": 2}, "best_of"),
        ({"do_sample": "yes"}, "do_sample=yes must be true or false"),
        ({"max_new_tokens": 1, "max_tokens": 2}, "are one thing"),
        ({"drafter": "head", "speculative_config": {"method": "ngram"}}, "are one thing"),
        ({"assistant_model": "a", "speculative_config": {"method": "ngram"}}, "are one thing"),
        ({"drafter": get_drafter("suffix"), "num_speculative_tokens": 2}, r"get_drafter\(NAME, gamma=VALUE\)"),
        (
            {"speculative_config": {"method": "ngram", "rejection_sample_method": "block"}, "verifier": "match"},
            "are one thing",
        ),
        ({"max_model_len": 9}, r"load\(FILE, context_length=VALUE\)"),
        ({"foo_bar": 9}, "valid: allowed_token_ids, .*top_p"),
        ({"temperatur": 9}, "did you mean temperature"),
        ({"draftr": "suffix"}, "did you mean drafter"),
        ({"assistant_modl": "a", "do_sample": True}, "did you mean assistant_model"),
        ({"speculative_config": {"method": "ngram", "n": 1}}, "drafter.n is no option of prompt_lookup"),
    ],
)
def test_neighbours_words_without_a_meaning_are_one_line_with_what_there_is(model, given, said):
    with pytest.raises(UserError, match=said) as caught:
        specsparse.generate(model, PROMPT, **given)
    assert "\n" not in str(caught.value)


def test_neighbours_calls_write_what_ours_write(model):
    ours = specsparse.generate(model, PROMPT, max_tokens=8, drafter=get_drafter("prompt_lookup", gamma=4, ngram_max=3))
    config = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
    vllm = SamplingParams(temperature=0, max_tokens=8)
    [one] = specsparse.generate(model, [PROMPT], sampling_params=vllm, speculative_config=config)
    two = specsparse.generate(model, PROMPT, max_new_tokens=8, do_sample=False, prompt_lookup_num_tokens=4,
                              max_matching_ngram_size=3)  # fmt: skip
    for found in (one, two):
        assert found.token_ids == ours.token_ids
        assert found.stats.counters.num_draft_tokens == ours.stats.counters.num_draft_tokens > 0
    assert "".join(specsparse.stream(model, PROMPT, n_predict=8)) == ours.text


def test_neighbours_names_of_a_hint_are_near_or_all_are_listed(model):
    for name in ("sampling_params", "assistant_model", "speculative_config", "structured_outputs"):
        with pytest.raises(UserError) as caught:
            SamplingParams(**{name: 1})
        assert "did you mean" not in str(caught.value)
    assert hint("qqq", ("a", "b")) == "; valid: a, b" and hint("max_new_tokens", ("a",)) == "; here it is max_tokens"
    with pytest.raises(UserError, match=r"no option 'max_model_len'; .*context_length=VALUE"):
        load(model.path, max_model_len=9)


def test_neighbours_keys_of_a_config_are_its_own():
    assert shorthand(["max_new_tokens=5", "temp=0.5", "n_threads=2", "draft_max=3", "gamma=1"]) == [
        "max_tokens=5", "sampling.temperature=0.5", "model.threads=2", "policy.gamma=3", "gamma=1"
    ]  # fmt: skip
    assert shorthand(["assistant_model=a"]) == ["drafter=model", "drafter.model=a"]
    assert shorthand(["spec_type=ngram-simple", "model_draft=a"])[0] == "drafter=ngram_simple"
    assert config_key("prompt_lookup_max") == "drafter.ngram_max" and config_key("num_beams") == "num_beams"


def test_neighbours_fields_of_a_request_are_the_servers_own():
    params = parse_request({"prompt": "a", "n_predict": 3, "repeat_penalty": 1.5}, {}, chat=False).params
    assert (params.max_tokens, params.repetition_penalty) == (3, 1.5)
    for field, said in (("speculative_config", "drafter"), ("draft_max", "serve MODEL --drafter NAME --option gamma=")):
        with pytest.raises(HttpError, match=said):
            parse_request({"prompt": "a", field: 3}, {}, chat=False)
    with pytest.raises(HttpError, match="n_predict and max_tokens are one field"):
        parse_request({"prompt": "a", "n_predict": 3, "max_tokens": 4}, {}, chat=False)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"prompt_lookup_num_tokens": 3, "drafter": "none"}, "^prompt_lookup_num_tokens needs a drafter"),
        ({"speculative_config": "[" * 100_000}, "^speculative_config=.* must be a mapping"),
    ],
)
def test_what_would_be_ignored_is_refused(given, said):
    with pytest.raises(UserError, match=said):
        understood(given)


@pytest.mark.parametrize("more", [{}, {"drafter": "none"}, {"max_new_tokens": 3}])
def test_a_policy_needs_a_drafter(more):
    with pytest.raises(UserError, match=r"^policy=auto_off needs a drafter: give drafter=prompt_lookup"):
        specsparse.generate(None, "hi", policy="auto_off", **more)
