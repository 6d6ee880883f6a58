"""What differs between configs: one setting for each thing that was chosen, under a clear name."""

import pytest

from specsparse.report import methods


def named(*configs):
    return {s.name: s.values for s in methods.differing_settings(configs)}


def lookup(**options):
    return {"drafter": {"name": "prompt_lookup", "ngram_max": 3, **options}, "name": "a"}


SUFFIX = {"drafter": {"name": "suffix", "longest": 64}, "name": "b"}


def test_a_choice_brings_its_options_along():
    assert named(lookup(), SUFFIX) == {"drafter": ("prompt_lookup", "suffix")}


def test_an_option_that_the_choice_does_not_decide_is_a_setting_of_its_own():
    found = named(lookup(), lookup(ngram_max=4), SUFFIX)
    assert found == {"drafter": ("prompt_lookup", "prompt_lookup", "suffix"), "ngram_max": ("3", "4", methods.NOTHING)}


def test_what_is_the_same_is_no_setting():
    assert named(lookup(), lookup()) == {} == named()
    assert named({"t": 0}, {"t": 0.0}) == {}
    assert named({"stop": 1}, {"stop": True}) == {"stop": ("1", "true")}


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("policy.gamma", "gamma"),
        ("sampling.temperature", "T"),
        ("drafter.temperature", "drafter.temperature"),  # two groups have one
        ("drafter.ngram_max", "ngram_max"),
        ("drafter.model", "drafter.model"),  # not the target
        ("model.path", "model"),
        ("data.source", "data"),
        ("verifier.name", "verifier"),
        ("max_tokens", "max_tokens"),
    ],
)
def test_names_are_short_and_clear(key, name):
    keys = ["policy.gamma", "sampling.temperature", "drafter.temperature", "drafter.ngram_max", "drafter.model",
            "model.path", "data.source", "verifier.name", "max_tokens"]  # fmt: skip
    assert methods.setting_name(key, keys) == name


def test_values_are_short_where_that_tells_them_apart():
    paths = [{"model": {"path": path}} for path in ("/a/one.gguf", "/a/two.gguf")]
    assert named(*paths) == {"model": ("one.gguf", "two.gguf")}
    assert named(*paths, {"model": {"path": "/b/one.gguf"}})["model"] == ("/a/one.gguf", "/a/two.gguf", "/b/one.gguf")
    assert named({"x": 0.5}, {"x": None}, {"x": [1, "a"]}) == {"x": ("0.5", methods.NOTHING, "[1, a]")}
    assert named({"x": 0.1234567}, {"x": 0.12345671})["x"] == ("0.1234567", "0.12345671")
