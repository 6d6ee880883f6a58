"""Where tokens came from, as a generation says it, a stream marks it and a notebook shows it."""

import math
import re
from html import unescape

import pytest

import specsparse
from specsparse import SamplingParams
from specsparse.engine.gguf.reader import open_gguf
from specsparse.speculative.drafters import get_drafter
from specsparse.speculative.drafters.synthetic import Scripted
from specsparse.speculative.token_sources import KINDS, TokenSource
from specsparse.testing import write_tiny_gguf

PROMPT = "abc abc abc abc"
LETTERS = [3 + b for b in b"ab<&"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return specsparse.load(write_tiny_gguf(tmp_path_factory.mktemp("m") / "m.gguf", n_layers=1, context_length=512))


@pytest.fixture(scope="module")
def sampling():
    """Texts of letters that repeat soon, some of which HTML reads as its own."""
    return SamplingParams(temperature=1.0, max_tokens=40, allowed_token_ids=LETTERS)


def lookup():
    return get_drafter("prompt_lookup", gamma=3, ngram_min=1)


def test_scripted_rounds(model):
    """Of three drafted tokens the first are right: they have their positions, and the target ends the round."""
    plain = specsparse.generate(model, PROMPT, max_tokens=24, ignore_eos=True)
    truth = (*plain.prompt_token_ids, *plain.token_ids)
    drafter = Scripted.chain(3, (0, 2, 3), vocab_size=300, truth=truth)
    found = specsparse.generate(model, PROMPT, max_tokens=24, ignore_eos=True, drafter=drafter)
    rounds = ((0, "recovered"), (2, "recovered"), (3, "bonus"))
    wanted = [o for n, last in rounds for o in (*(TokenSource("accepted", k + 1) for k in range(n)), TokenSource(last))]
    assert found.token_ids == plain.token_ids and plain.token_sources is None
    assert list(found.token_sources[:16]) == wanted * 2


def test_a_round_without_a_draft_is_plain(model):
    """The first token of a text that repeats nothing."""
    found = specsparse.generate(model, "x", max_tokens=3, ignore_eos=True, drafter=lookup())
    assert found.token_sources[0] == TokenSource("plain")


@pytest.mark.parametrize("stop", [(), ("ba",), ("aa<",), ("<&", "b&")])
@pytest.mark.parametrize("include", [False, True])
def test_token_texts_make_the_text_and_a_stream_marks_the_same(model, sampling, stop, include):
    options = {
        "sampling": sampling,
        "seed": 3,
        "stop": stop,
        "include_stop_str_in_output": include,
        "drafter": lookup(),
    }
    found = specsparse.generate(model, PROMPT, **options)
    assert "".join(found.token_texts) == found.text
    assert len(found.token_texts) == len(found.token_sources) == len(found.token_ids)
    for rounds in (1, 5):
        marked = list(specsparse.stream(model, PROMPT, rounds=rounds, **options).marked())
        assert marked == [(t, o) for t, o in zip(found.token_texts, found.token_sources, strict=True) if t]
    assert stop or {o.kind for o in found.token_sources} >= {"accepted", "recovered"}


def test_a_token_without_text_has_none_and_a_character_comes_with_its_last_byte(model):
    ids = [3 + b for b in "é€".encode()]
    found = specsparse.generate(
        model, "x", temperature=1.0, max_tokens=30, seed=0, allowed_token_ids=ids, drafter=lookup()
    )
    assert "".join(found.token_texts) == found.text and "" in found.token_texts
    ended = specsparse.generate(model, "x", max_tokens=3, allowed_token_ids=[2], drafter=lookup())
    assert (ended.token_ids, ended.token_texts, ended.text) == ((2,), ("",), "")


def test_the_text_of_a_notebook_is_the_text_on_the_colours_of_its_origins(model, sampling):
    found = specsparse.generate(model, PROMPT, sampling=sampling, seed=3, drafter=lookup())
    text, legend = re.findall(r"<div[^>]*>(.*?)</div>", found._repr_html_(), re.DOTALL)
    assert "<" in found.text and "&" in found.text
    assert unescape(re.sub(r"<[^>]*>", "", text)) == found.text
    spans = re.findall(r'<span style="background:([^;]*);[^"]*" title="([^"]*)">', text)
    drafted = [o.position for o in found.token_sources if o.kind == "accepted"]
    said = [int(title.split()[2]) for _, title in spans if title.startswith("accepted, position")]
    assert said == drafted
    assert len({colour for colour, title in spans if title.startswith("accepted")}) == len(set(drafted)) > 1
    assert {k for k in KINDS if f"{k}</span>:" in legend or f"{k}:" in legend} == {o.kind for o in found.token_sources}


def test_a_plain_text_of_a_notebook_is_escaped(model, sampling):
    found = specsparse.generate(model, PROMPT, sampling=sampling, seed=3)
    html = found._repr_html_()
    assert "background" not in html and unescape(re.sub(r"</?div[^>]*>", "", html)) == found.text
    assert not re.search(r"<(?!/?div)", html)


def test_a_generation_shows_its_text_first(model, sampling):
    found = specsparse.generate(model, PROMPT, sampling=sampling, seed=3, drafter=lookup(), logprobs=2, max_tokens=400)
    assert str(found) == found.text
    assert repr(found).startswith(f"Generation({found.text[:70]!r}"[:-1]) and len(repr(found)) < 200
    assert "400 tokens, finish_reason='length'" in repr(found)


def test_a_model_is_one_line(model):
    line = repr(model)
    weights = sum(math.prod(t.shape) for t in open_gguf(model.path).tensors.values())
    assert line.startswith("Model('m.gguf', architecture='llama', parameters='") and len(line) < 250
    assert f"{weights / 1e6:,.4g}M" in line and "context='512'" in line and "kernels='" in line
    html = model._repr_html_()
    assert html.startswith("<table") and "m.gguf" in html and str(model.path) in html
