"""Prefix caching: less is read, and texts and log probabilities stay those without it, bit for bit."""

from itertools import chain, repeat

import numpy as np
import pytest

import specsparse
from specsparse import PrefixCache
from specsparse.engine import devices
from specsparse.runtime.prefix_cache import ReadText, applies
from specsparse.support import files
from specsparse.testing import write_tiny_gguf
from specsparse.testing.drafting import random_head

FIRST = np.random.default_rng(0).integers(3, 300, 70).tolist()
SAMPLING = {"max_tokens": 9, "temperature": 1.0, "seed": 3, "ignore_eos": True, "logprobs": 0}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "m.gguf", n_layers=1, vocab_size=300, context_length=512)


@pytest.fixture(scope="module")
def model(path):
    return specsparse.load(path)


@pytest.mark.parametrize(("method", "tokens"), [("plain", 250), ("head", 40)])  # a larger cache, and one as large
def test_a_text_that_goes_on_is_read_from_there_and_has_the_same_bits(model, tmp_path, method, tokens):
    head = None if method == "plain" else specsparse.get_drafter("head", head=str(random_head(tmp_path, model)))
    how = {"drafter": head}
    cache = PrefixCache()
    first = specsparse.generate(model, FIRST, **SAMPLING, **how, prefix_cache=cache)
    assert first.stats.cached_tokens == 0
    longer = [*FIRST, *first.token_ids, *FIRST[::-1] * 4][: len(FIRST) + tokens]
    whole = specsparse.generate(model, longer, **SAMPLING, **how)
    read = len(FIRST) + 8 if method == "plain" else len(FIRST) - 1  # hidden rows are those of the prompt
    for known in (read, len(longer) - 1):
        found = specsparse.generate(model, longer, **SAMPLING, **how, prefix_cache=cache)
        assert found.token_ids == whole.token_ids and found.logprobs == whole.logprobs
        assert found.stats.cached_tokens == known
        assert found.stats.counters.target_passes <= whole.stats.counters.target_passes


def test_texts_are_kept_up_to_the_number_asked_for_and_others_are_read_whole(model):
    other, cache = FIRST[::-1], PrefixCache(2)

    def read(prompt):
        return specsparse.generate(model, prompt, max_tokens=2, prefix_cache=cache).stats.cached_tokens

    assert [read(p) for p in (FIRST, other, FIRST, other, [5, *FIRST], FIRST)] == [0, 0, 69, 69, 0, 0]
    assert specsparse.generate(model, [FIRST, other], max_tokens=2, prefix_cache=cache)[0].stats.cached_tokens == 0


def test_a_text_is_kept_in_its_own_length_and_forgotten_where_another_has_no_room_beside_it(model, monkeypatch):
    cache = PrefixCache()
    specsparse.generate(model, FIRST, max_tokens=2, prefix_cache=cache)
    ends = [*range(300)]
    specsparse.generate(model, FIRST[::-1], max_tokens=400, stop_token_ids=ends, prefix_cache=cache)
    found = cache.find(model, np.array([*FIRST[::-1], 3]), False)
    assert found is not None and found[1].cache.capacity == 256
    monkeypatch.setattr(devices, "_LARGE", 0)
    monkeypatch.setattr(files, "memory_available", chain([1], repeat(1 << 40)).__next__)
    assert specsparse.generate(model, FIRST[::-1], max_tokens=2, prefix_cache=cache).stats.cached_tokens == 0


def test_a_text_is_not_kept_where_its_copy_has_no_room(model, monkeypatch):
    cache = PrefixCache()
    specsparse.generate(model, FIRST, max_tokens=2, prefix_cache=cache)
    with monkeypatch.context() as patch:
        patch.setattr(files, "memory_available", lambda: 1)
        specsparse.generate(model, FIRST[::-1], max_tokens=2, prefix_cache=cache)
    assert not cache.forget()


def test_a_text_stays_beside_one_that_cannot_serve_in_its_place(model):
    ids, rows = np.array(FIRST, np.int32), np.zeros((1, len(FIRST), 4), np.float32)
    of_head = ReadText(model, ids, model.new_cache(1, 256), rows, True)
    for replacing, stays in (((None, False), True), ((rows, (0, 1)), True), ((rows, True), False)):
        cache = PrefixCache(2)
        cache.keep(of_head, len(ids))
        cache.keep(ReadText(model, ids, of_head.cache, *replacing), len(ids))
        found = cache.find(model, ids, True)
        assert found is not None and (found[1] is of_head) == stays


def test_mistakes_are_said(model):
    with pytest.raises(specsparse.UserError, match="texts=-1"):
        PrefixCache(-1)
    with pytest.raises(specsparse.UserError, match="prefix_cache=True"):
        specsparse.generate(model, "a", prefix_cache=True)


def test_the_cache_serves_its_own_model_and_only_exact_kernels(model, path):
    cache, again = PrefixCache(2), specsparse.load(path, kv_dtype="f32")
    passes = (specsparse.generate(m, FIRST, max_tokens=2, prefix_cache=cache) for m in (model, again, model, again))
    assert [found.stats.cached_tokens for found in passes] == [0, 0, 69, 69]
    assert not applies(specsparse.load(path, backend="xla"), 1)
