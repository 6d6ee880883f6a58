"""Texts are fed in chunks of few sizes, side by side."""

import numpy as np
import pytest

from specsparse.engine.prefill import CHUNKS, chunk_rows, prefill


@pytest.mark.parametrize("length", [0, 1, 31, 32, 33, 160, 512, 513, 1100])
def test_chunks_cover_a_text(length):
    rows = chunk_rows(length)
    assert set(rows) <= set(CHUNKS) and sum(rows) >= length
    assert not rows or (sum(rows[:-1]) < length and rows == sorted(rows, reverse=True))


@pytest.mark.parametrize("rows", [None, 3])
def test_every_token_is_fed_once_in_order(rows):
    texts = [np.arange(1, 41, dtype=np.int32), np.arange(100, 105, dtype=np.int32), np.zeros(0, np.int32)]
    got, calls = [[], [], []], []

    def program(chunk, cache):
        calls.append((chunk.start, chunk.tokens.shape[1], chunk.last, cache))
        for text, tokens, count in zip(got, chunk.tokens, chunk.count, strict=True):
            assert not tokens[count:].any()
            text += tokens[:count].tolist()
        return chunk.start, cache + 1

    fed = list(prefill(program, texts, 0, rows=rows))
    assert [text.tolist() for text in texts] == got
    assert [out for _, out, _ in fed] == [chunk.start for chunk, *_ in fed] and fed[-1][2] == len(calls)
    assert [last for _, _, last, _ in calls] == [False] * (len(calls) - 1) + [True]
    assert [cache for *_, cache in calls] == list(range(len(calls)))
    assert {size for _, size, _, _ in calls} == {rows or 128}


def test_empty_texts_are_not_fed():
    assert list(prefill(lambda chunk, cache: (None, cache), [np.zeros(0, np.int32)], 0)) == []
