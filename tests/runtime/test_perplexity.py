"""Perplexity and KL against llama.cpp's definitions, worked out here from teacher-forced logits in float64."""

import numpy as np
import pytest
from scipy.special import log_softmax

import specsparse
from specsparse.errors import UserError
from specsparse.runtime.perplexity import Scores, score, windows
from specsparse.testing import write_tiny_gguf

IDS = np.random.default_rng(5).integers(3, 300, 150).tolist()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = write_tiny_gguf(tmp_path_factory.mktemp("m") / "m.gguf", tokenizer="spm", quant="Q8_0", n_layers=1)
    return specsparse.load(path, kv_dtype="f32")


def log_probs(model, ids):
    return log_softmax(model.logits(ids).astype(np.float64), -1)


def test_halves_of_windows_are_scored(model):
    text = windows(IDS, context=40, bos=1)
    assert text.tokens.shape == (3, 40) and text.tokens[:, 0].tolist() == [1, 1, 1]
    expected = []
    for i in range(3):
        ids = [1, *IDS[40 * i + 1 : 40 * i + 40]]
        logprobs = log_probs(model, ids)
        expected += [-logprobs[row, ids[row + 1]] for row in range(20, 39)]
    found = score(model, text)
    np.testing.assert_allclose(found.nll, expected, rtol=1e-5)
    assert len(found.nll) == text.scored == 57 and found.kl is None
    summary = found.summary()
    assert summary["perplexity"] == pytest.approx(np.exp(np.mean(expected)), rel=1e-5)
    error = summary["perplexity"] * np.std(expected) / np.sqrt(56)
    assert summary["perplexity_error"] == pytest.approx(error, rel=1e-4) and summary["kl_mean"] is None


def test_with_a_stride_the_last_of_each_window_are(model):
    text = windows(IDS, context=40, stride=16, bos=1)
    starts = range(0, 150 - 48, 16)
    assert text.tokens.shape == (len(starts), 48) and text.tokens[0].tolist() == IDS[:48]  # llama.cpp: no BOS here
    expected = []
    for start in starts:
        ids = IDS[start : start + 48]
        logprobs = log_probs(model, ids)
        expected += [-logprobs[row, ids[row + 1]] for row in range(48 - 16 - 1, 47)]
    np.testing.assert_allclose(score(model, text).nll, expected, rtol=1e-5)


def test_kl_from_another_distribution(model):
    text = windows(IDS, context=70, bos=None)  # 35 tokens fed and 34 scored: more than a piece of either program
    keep = np.empty((text.scored, 300), np.float32)
    score(model, text, keep=keep)
    own = score(model, text, base=keep)
    assert own.kl.min() >= 0 and own.kl.max() < 1e-9 and own.same.all()
    other = keep[::-1].copy()
    found = score(model, text, base=other)
    q, p = keep.astype(np.float64), other.astype(np.float64)
    np.testing.assert_allclose(found.kl, (np.exp(p) * (p - q)).sum(-1), rtol=1e-4)
    np.testing.assert_array_equal(found.same, p.argmax(-1) == q.argmax(-1))


def test_summary_of_the_distances():
    kl = np.arange(101) / 128
    found = Scores(np.zeros(101), kl, kl > 25 / 128).summary()
    assert [found[f"kl_{name}"] for name in ("mean", "median", "99", "max")] == [n / 128 for n in (50, 50, 99, 100)]
    assert found["kl_error"] == pytest.approx(np.std(kl, ddof=1) / np.sqrt(101), rel=1e-12)
    assert found["same_top"] == 75 / 101 and found["perplexity"] == 1 and found["perplexity_error"] == 0


def test_chunks_are_the_first_ones():
    assert windows(IDS, context=40, chunks=2, bos=None).tokens.tolist() == [IDS[:40], IDS[40:80]]
    assert len(windows(IDS, context=40, chunks=9, bos=None).tokens) == 3


@pytest.mark.parametrize(("n", "stride"), [(39, 0), (48, 16)])
def test_too_short_a_text(n, stride):
    with pytest.raises(UserError, match=f"the text has {n} tokens and a window takes {n + 1}"):
        windows(IDS[:n], context=40, stride=stride, bos=None)


def test_a_window_longer_than_the_context(model):
    with pytest.raises(UserError, match="windows of 300 tokens, and the context holds 256"):
        score(model, windows(IDS * 3, context=300, bos=None))
