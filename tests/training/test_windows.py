"""Windows hold every row of every text once, and the rows that a draft needs beside each other."""

from itertools import pairwise

import numpy as np
import pytest

from specsparse.training.corpus import Text, cut, fill, fill_up, pack, spans

D = 4


def text(rng, prompt, answer):
    """Tokens 1.., rows that say which token they belong to."""
    n = prompt + answer
    tokens = rng.integers(1, 1000, n).astype(np.int32)
    return Text(tokens, prompt, np.repeat(tokens[:, None], 2 * D, axis=1).astype(np.float32))


@pytest.fixture
def texts():
    rng = np.random.default_rng(0)
    return [text(rng, int(p), int(a)) for p, a in zip(rng.integers(1, 40, 30), rng.integers(0, 30, 30), strict=True)]


def test_every_text_with_an_answer_is_packed_once(texts):
    plan = pack(texts, range(len(texts)), rows=128, drafting=48)
    packed = sorted(i for window in plan for i in window)
    assert packed == [i for i, t in enumerate(texts) if spans(t)[1] > 0 and spans(t)[0] > 0]
    for window in plan:
        rows, drafting = zip(*(spans(texts[i]) for i in window), strict=True)
        assert sum(rows) <= 128 and sum(drafting) <= 48
    assert len(plan) < len(packed) / 2
    assert pack(texts, range(len(texts)), rows=128, drafting=48) == plan


def test_windows_are_filled_to_the_last_row(texts):
    """All texts with an answer, once and in order; a window is left unfilled only where the next text has no room."""
    plan = list(fill_up(texts, range(len(texts)), rows=64, least=8))
    assert [i for window in plan for i in window] == [i for i, t in enumerate(texts) if len(t.tokens) > t.prompt]
    for window, after in pairwise(plan):
        sizes = [len(texts[i].tokens) for i in window]
        assert sum(sizes) + texts[after[0]].prompt + 8 > 64
        assert len(window) == 1 or sum(sizes[:-1]) + texts[window[-1]].prompt + 8 <= 64


def test_rows_stand_before_the_tokens_they_are_for(texts):
    for window in pack(texts, range(len(texts)), rows=128, drafting=48):
        group = [texts[i] for i in window]
        w = fill(group, rows=128, drafting=48, width=D)
        live = w.depth >= 0
        assert live.sum() == sum(spans(t)[1] for t in group)
        for index, t in enumerate(group):
            here = w.text == index
            np.testing.assert_array_equal(w.hidden[here], t.hidden[:-1])
            assert w.hidden.shape[1] == 2 * D and w.after.shape[1] == D
            np.testing.assert_array_equal(w.tokens[here], t.tokens[1:])
            np.testing.assert_array_equal(w.position[here], np.arange(here.sum()))
            rows = w.rows[live & (w.text[w.rows] == index)]
            first = max(t.prompt - 2, 0)
            np.testing.assert_array_equal(w.position[rows], np.arange(first, len(t.tokens) - 1))
            # The row to find is that of the token that follows.
            np.testing.assert_array_equal(w.after[live & (w.text[w.rows] == index)][:, 0], w.tokens[rows])
        assert (np.diff(w.rows[live]) > 0).all()
        starts = np.flatnonzero(w.depth[live] == 0)
        np.testing.assert_array_equal(w.text[w.rows[live][starts]], np.unique(w.text[w.rows[live]]))


def test_a_long_text_loses_the_beginning_of_its_prompt_and_the_end_of_its_answer():
    long = text(np.random.default_rng(1), 100, 50)
    short = cut(long, rows=64, drafting=32)
    assert spans(short) == (64, 32)
    at = 100 - short.prompt
    np.testing.assert_array_equal(short.tokens, long.tokens[at : at + 65])
    assert cut(long, rows=200, drafting=60) is not None and spans(cut(long, rows=200, drafting=60)) == spans(long)
