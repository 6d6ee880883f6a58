"""N-gram lookup and suffix decoding against plain Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specsparse.speculative.drafters.lookup import NGramMap, NGramSimple, PromptLookup, Suffix
from specsparse.testing.drafting import draft_context, drafted_ids

C = 40
TEXT = st.integers(1, 4).flatmap(lambda v: st.lists(st.integers(0, v), min_size=1, max_size=C))


def proposed(drafter, ctx):
    return drafted_ids(jax.jit(lambda c: drafter.draft(None, drafter.init(None, c), c).draft)(ctx))


def looked_up(ids, nodes, n_max, n_min, *, newest, hits=1, follow=1, copy=None, least=0):
    """What the documentation of NGrams says, in Python."""
    for n in range(n_max, n_min - 1, -1):
        ends = [e for e in range(n, len(ids)) if ids[e - n : e] == ids[-n:] and len(ids) - e >= follow]
        if len(ends) >= hits:
            end = ends[-1] if newest else ends[0]
            copied = ids[end:][: copy or len(ids)]
            return copied[:nodes] if len(copied) >= least else []
    return []


class NewestOfThree(PromptLookup):
    newest, min_hits = True, 3


NGRAMS = {
    "prompt_lookup": (
        PromptLookup(3, 1, 5),
        lambda ids: looked_up(ids, 5, 3, 1, newest=False),
    ),
    "prompt_lookup_2_4": (PromptLookup(4, 2, 3), lambda ids: looked_up(ids, 3, 4, 2, newest=False)),
    "ngram_simple": (
        NGramSimple(4, 2, 3),
        lambda ids: looked_up(ids, 4, 2, 2, newest=True, copy=3, least=2),
    ),
    "ngram_map": (
        NGramMap(8, 2, 5, min_hits=2),
        lambda ids: looked_up(ids, 8, 2, 2, newest=True, hits=2, follow=5, copy=5),
    ),
    "hits": (
        NewestOfThree(3, 1, 4),
        lambda ids: looked_up(ids, 4, 3, 1, newest=True, hits=3),
    ),
}


@pytest.fixture(params=NGRAMS, scope="module")
def ngram(request):
    drafter, oracle = NGRAMS[request.param]
    step = jax.jit(lambda ctx: drafter.draft(None, None, ctx).draft)
    return lambda ids: drafted_ids(step(draft_context([ids], capacity=C, budget=100))), oracle


@given(ids=TEXT)
@settings(max_examples=100)
def test_ngram_equals_the_plain_definition(ngram, ids):
    draft, oracle = ngram
    assert draft(ids) == oracle(ids)


def test_the_first_or_the_most_recent_match():
    ids = [7, 8, 1, 2, 9, 7, 8, 3, 4, 6, 7, 8]
    ctx = draft_context([ids], capacity=C, budget=2)
    assert proposed(PromptLookup(3, 1, 2), ctx) == [1, 2]
    assert proposed(NGramSimple(2, 2, 4), ctx) == [3, 4]


def test_a_longer_ngram_beats_an_earlier_match():
    ids = [8, 1, 1, 7, 8, 2, 2, 5, 7, 8]
    ctx = draft_context([ids], capacity=C, budget=2)
    assert proposed(PromptLookup(3, 1, 2), ctx) == [2, 2]


# Suffix


def naive_matches(ids, longest):
    """Common suffix of ids[: j + 1] and ids, for each j."""
    found = []
    for j in range(len(ids)):
        n = 0
        while j < len(ids) - 1 and n <= j and n < longest and ids[j - n] == ids[-1 - n]:
            n += 1
        found.append(n)
    return found


def naive_suffix(ids, s, budget):
    """What the documentation of Suffix says, in Python."""
    match = naive_matches(ids, s.longest)
    best = max(match)
    if best < s.min_match:
        return []
    ends = [j for j in range(len(ids)) if match[j] == best][::-1][: s.candidates]
    wanted = max(0, min(s.max_nodes, budget, int(np.float32(best) * np.float32(s.factor)) + s.offset))
    least = np.float32(len(ends)) * np.float32(s.min_share)
    scored = []
    for end in ends:
        path, score = [], 0
        for i in range(1, min(wanted, len(ids) - 1 - end) + 1):
            votes = sum(ids[e + 1 : e + 1 + i] == ids[end + 1 : end + 1 + i] for e in ends)
            if votes < least:
                break
            path, score = ids[end + 1 : end + 1 + i], score + votes
        scored.append((score, path))
    return max(scored, key=lambda pair: pair[0])[1]  # max keeps the first: the most recent


SUFFIXES = {
    "default": Suffix(max_nodes=6),
    "short": Suffix(max_nodes=5, longest=2, factor=2.5, candidates=3),
    "choosy": Suffix(max_nodes=6, longest=3, min_match=2, factor=1.5, offset=1, min_share=0.5, candidates=4),
    "shy": Suffix(max_nodes=4, factor=0.5, offset=-1, min_share=1.0),
}


@pytest.fixture(params=SUFFIXES, scope="module")
def suffix(request):
    drafter = SUFFIXES[request.param]

    def draft(ctx, prompt):
        state = drafter.init(None, ctx._replace(length=jnp.minimum(prompt, ctx.length)))
        state = drafter.commit(None, state, ctx, None)
        return drafter.draft(None, state, ctx).draft, state

    return drafter, jax.jit(draft)


@given(ids=TEXT, prompt=st.integers(1, C), budget=st.integers(0, 7))
@settings(max_examples=100)
def test_suffix_equals_the_plain_definition(suffix, ids, prompt, budget):
    drafter, step = suffix
    ctx = draft_context([ids], capacity=C, budget=budget)
    draft, state = step(ctx, jnp.full((1,), prompt, jnp.int32))
    assert np.asarray(state.match)[0, : len(ids)].tolist() == naive_matches(ids, drafter.longest)
    assert not np.asarray(state.match)[0, len(ids) :].any() and int(state.seen[0]) == len(ids)
    assert drafted_ids(draft) == naive_suffix(ids, drafter, budget)


def test_the_continuation_most_matches_agree_on_wins():
    ids = [1, 2, 3, 9, 1, 2, 3, 9, 1, 2, 5, 9, 1, 2]
    drafter = Suffix(max_nodes=3, longest=2)
    ctx = draft_context([ids], capacity=C, budget=3)
    assert proposed(drafter, ctx) == [3, 9]
