"""Sampling through the whole engine at a real vocabulary (49,152), plain and speculative, against the exact
distributions.

Every token of a Markov model's texts is a draw from one of four distributions. Three tests at level 1e-6 each: how
often the event p > q came (what a verifier without a right residual draws too seldom), 16 bins of equal chance, and 16
ranges of ids, the last two by chi-square over the four distributions. At 500,000 draws they are sure (99 % power) to
see a change of 0.005 in the event's chance, and any distribution whose bins are 0.008 away in total variation. The
ordinary suite draws fewer.
"""

from typing import NamedTuple

import numpy as np
import pytest
from scipy import stats

import specsparse
from specsparse import SamplingParams
from specsparse.engine.sampling import pipeline
from specsparse.kernels.native import cpu
from specsparse.speculative.drafters import get_drafter
from specsparse.speculative.trees import get_tree
from specsparse.speculative.verifiers import residuals
from tests.statistics.chi_square import ALPHA, chi_square, least_shift, least_tv
from tests.statistics.markov import BINS, CLASSES, DRAFT_LAYERS, VOCAB, Probs, count, load_markov
from tests.statistics.tabular import Key, keyed

ROWS, TEXT = 16, 250
MANY, SOME, FEW = 500_000, 48_000, 8_000
LEAST_SHIFT = {MANY: 0.005, SOME: 0.017, FEW: 0.041}
LEAST_TV = {MANY: 0.008, SOME: 0.026, FEW: 0.062}

DRAFT = SamplingParams(temperature=0.42, top_k=400)
TARGETS = {
    "heated": SamplingParams(temperature=0.35, max_tokens=TEXT, ignore_eos=True, detokenize=False),
    "truncated": SamplingParams(
        temperature=0.35, top_k=150, top_p=0.9, min_p=0.004, max_tokens=TEXT, ignore_eos=True, detokenize=False
    ),
}


def drafter(name: str):
    """The first layer drafts, with a temperature and a truncation of its own."""
    own = {"layers": DRAFT_LAYERS, "temperature": DRAFT.temperature, "top_k": DRAFT.top_k}
    shape = {
        "token": {"gamma": 2},
        "block": {"gamma": 3},
        "match": {"gamma": 2},
        "delta": {"gamma": 2, "draw": "argmax"},
        "mss": {"tree": get_tree("sampled_iid", widths=(2, 1))},
        "kseq": {"tree": get_tree("sampled_iid", widths=(3,))},
        "wor": {"tree": get_tree("sampled_wor", widths=(2, 1))},
    }
    return get_drafter("layer_skip", **own, **shape[name])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    if not cpu.available():
        pytest.skip(f"no native kernels: {cpu.why_missing()}")
    return load_markov(tmp_path_factory.mktemp("model") / "markov.gguf")


def calls(total: int) -> range:
    """The seeds of that many draws."""
    assert total % (ROWS * TEXT) == 0
    return range(total // (ROWS * TEXT))


class Drawn(NamedTuple):
    """int64[CLASSES, VOCAB] counts of tokens by the class of the one before, and the drafted and accepted tokens."""

    counts: np.ndarray
    drafted: int
    accepted: int


def draws(model, target: SamplingParams, method: str, seeds: range) -> Drawn:
    """ROWS samples of one prompt a seed (their noise is independent), ROWS * TEXT draws each."""
    how = {} if method == "plain" else {"drafter": drafter(method), "verifier": method}
    counts, drafted, accepted = np.zeros((CLASSES, VOCAB), np.int64), 0, 0
    for seed in seeds:
        first = seed % CLASSES
        out = specsparse.generate(model, [first], sampling=target, seed=seed, n=ROWS, **how)
        counts += count(first, [np.array(g.token_ids) for g in out])
        drafted += sum(g.stats.counters.num_draft_tokens for g in out)
        accepted += sum(g.stats.counters.num_accepted_tokens for g in out)
    return Drawn(counts, drafted, accepted)


def summed(values: np.ndarray, cells: np.ndarray, number: int) -> np.ndarray:
    """[CLASSES, number]: the values of each class by cell."""
    return np.stack([np.bincount(c, weights=v, minlength=number) for v, c in zip(values, cells, strict=True)])


def p_values(counts: np.ndarray, exact: Probs) -> dict[str, float]:
    """Of the three tests. A token of probability 0 fails at once."""
    n_C = counts.sum(axis=1)
    event_C = (exact.p * exact.gains).sum(axis=1)
    spread = np.sqrt((n_C * event_C * (1 - event_C)).sum())
    z = (counts[exact.gains].sum() - (n_C * event_C).sum()) / spread
    ranges = np.broadcast_to(np.arange(VOCAB) // (VOCAB // BINS), exact.p.shape)
    found = {"event": 2 * float(stats.norm.sf(abs(z)))}
    for name, cells in (("bins", exact.bins()), ("ranges", ranges)):
        found[name] = chi_square(summed(counts, cells, BINS + 1), summed(exact.p, cells, BINS + 1)).p
    return found


def power(counts: np.ndarray, exact: Probs) -> tuple[float, float]:
    """(least change of the event's chance, least total variation over the bins) that are sure to be seen."""
    n_C = counts.sum(axis=1)
    event_C = (exact.p * exact.gains).sum(axis=1)
    variance = (n_C * event_C * (1 - event_C)).sum() / n_C.sum()
    freedom = CLASSES * (BINS - 1)
    return least_shift((1 - np.sqrt(1 - 4 * variance)) / 2, int(n_C.sum())), least_tv(freedom, int(n_C.sum()))


def check(model, target: str, method: str, total: int) -> None:
    exact = Probs.from_model(model, TARGETS[target], DRAFT)
    drawn = draws(model, TARGETS[target], method, calls(total))
    assert drawn.counts.sum() == total
    shift, tv = power(drawn.counts, exact)
    assert shift < LEAST_SHIFT[total] and tv < LEAST_TV[total], (shift, tv)
    if method != "plain":
        # Both ends of the rule are taken often; of the drafts for `match`, drawn by themselves, one in fifty agrees.
        assert min(drawn.accepted, drawn.drafted - drawn.accepted) > total // 50
    found = p_values(drawn.counts, exact)
    assert min(found.values()) > ALPHA, found


def test_the_distributions_are_known_and_all_steps_of_sampling_bite(model):
    """A class decides the next distribution, in any context. Each truncation removes tokens that the others keep."""
    x = model.logits([0, 5, 4099, 3, 40_002])
    np.testing.assert_array_equal(x[[0, 1, 3]], model.logits([0, 1, 3])[[0, 1, 2]])
    np.testing.assert_array_equal(x[2], x[3])
    s = TARGETS["truncated"]
    kept = [
        int((Probs.from_model(model, s.merged(**off), DRAFT).p > 0).sum())
        for off in ({}, {"top_p": 1.0}, {"top_p": 1.0, "top_k": -1}, {"top_p": 1.0, "top_k": -1, "min_p": 0.0})
    ]
    assert kept == sorted(set(kept)), kept


def test_plain_draws_follow_the_exact_distribution(model):
    check(model, "truncated", "plain", FEW)


@pytest.mark.slow
def test_a_verifier_without_a_residual_is_refused(model, monkeypatch):
    """The test of the test: after a rejection the token comes from p, not from what q left of it."""
    monkeypatch.setattr(residuals, "residual", lambda probs_V, q_V, usable=True: probs_V)
    of_model = pipeline.kernels_of  # their `judge` has a residual of its own
    monkeypatch.setattr(pipeline, "kernels_of", lambda kernels: of_model(kernels)._replace(judge=None))
    monkeypatch.setattr(model.programs, "compiled", {})
    drawn = draws(model, TARGETS["truncated"], "token", calls(FEW))
    assert p_values(drawn.counts, Probs.from_model(model, TARGETS["truncated"], DRAFT))["event"] < ALPHA


@pytest.mark.slow
def test_noise_keyed_by_position_alone_is_refused(model, monkeypatch):
    """A coin shares one of the four numbers that draw a token, the one that decides within 16 of them: hard to see."""
    monkeypatch.setattr(model.programs, "compiled", {})
    with keyed(Key(round=0, node=0, stream=0)):
        drawn = draws(model, TARGETS["truncated"], "token", calls(SOME))
    found = p_values(drawn.counts, Probs.from_model(model, TARGETS["truncated"], DRAFT))
    assert min(found.values()) < ALPHA


@pytest.mark.slow
def test_a_temperature_five_percent_off_is_refused(model):
    target = TARGETS["heated"]
    drawn = draws(model, target.merged(temperature=1.05 * target.temperature), "plain", calls(SOME))
    assert p_values(drawn.counts, Probs.from_model(model, target, DRAFT))["bins"] < ALPHA


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("method", ["plain", "token", "block", "match", "delta", "mss", "kseq", "wor"])
def test_every_verifier(model, target, method):
    """About a minute each."""
    check(model, target, method, SOME)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["plain", "token"])
def test_half_a_million_draws(model, method):
    """Several minutes for plain decoding, twenty for `token`, on one core."""
    check(model, "truncated", method, MANY)
