"""`assert_lossless`: one line in anybody's test, and what it says when it fails."""

import numpy as np
import pytest

from specsparse.errors import UserError
from specsparse.speculative.verifiers import get_verifier
from specsparse.testing import assert_lossless


def accept_all(p, q, drafts, uniforms):
    last = p[len(drafts)]
    return len(drafts), min(int((np.cumsum(last) <= uniforms[0] * last.sum()).sum()), len(last) - 1)


def sample_target(p, q, drafts, generator):
    return [int(generator.choice(len(p[0]), p=p[0] / p[0].sum()))]


def test_what_it_says():
    with pytest.raises(AssertionError) as caught:
        assert_lossless(accept_all, gamma=1)
    first, *texts = str(caught.value).splitlines()
    assert first.startswith("accept_all is not lossless: total variation 1 on disjoint supports")
    assert "cases fail" in first and "callable" in first
    assert texts and all(text.startswith("  text ") for text in texts)


def test_it_passes_what_is_lossless_and_says_what_it_would_have_found():
    report = assert_lossless(sample_target, samples=2000, gamma=1)
    assert 0 < report.finds < 0.2
    assert assert_lossless("greedy", vocab=2, gamma=1).passed


def test_ours_are_refused_like_anybodys():
    with pytest.raises(UserError, match="samples say how a callable"):
        assert_lossless(get_verifier("token"), samples=3)
    with pytest.raises(UserError, match=r"unexpected keyword.*known are call, name, arrays"):
        assert_lossless(accept_all, sample=3)
