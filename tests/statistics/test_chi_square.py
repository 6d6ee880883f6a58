"""The tests of samplers are tested: right draws pass, and wrong ones are refused from where the stated power begins."""

import numpy as np
import pytest
from scipy import stats

from tests.statistics.chi_square import ALPHA, POWER, chi_square, least_shift, least_tv

CELLS, DRAWS, REPEATS = 256, 20_000, 300


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def refused(counts, probs) -> float:
    return float(np.mean([chi_square(row, probs).p < ALPHA for row in counts]))


def test_right_draws_have_even_p_values(rng):
    probs = 0.5 * rng.dirichlet(np.ones(CELLS)) + 0.5 / CELLS
    p = [chi_square(row, probs).p for row in rng.multinomial(DRAWS, probs, size=REPEATS)]
    assert stats.kstest(p, "uniform").pvalue > 1e-3


def test_power_is_what_it_is_said_to_be(rng):
    """On the least visible deviation: the same share up or down in each cell of an even distribution."""
    probs = np.full(CELLS, 1 / CELLS)
    tv = least_tv(CELLS - 1, DRAWS)
    sign = np.tile([1.0, -1.0], CELLS // 2)
    seen = refused(rng.multinomial(DRAWS, probs * (1 + 2 * tv * sign), size=REPEATS), probs)
    assert seen > POWER - 0.02
    assert refused(rng.multinomial(DRAWS, probs * (1 + tv * sign), size=REPEATS), probs) < 0.2  # half of it is not seen


def test_other_deviations_are_seen_better(rng):
    probs = 0.9 * rng.dirichlet(np.ones(CELLS)) + 0.1 / CELLS
    tv = least_tv(CELLS - 1, DRAWS)
    wrong = probs.copy()
    wrong[np.argmax(probs)] += tv
    others = np.arange(CELLS) != np.argmax(probs)
    wrong[others] *= 1 - tv / probs[others].sum()
    assert refused(rng.multinomial(DRAWS, wrong, size=REPEATS), probs) > POWER - 0.02


@pytest.mark.parametrize("chance", [0.5, 0.1, 0.83])
def test_power_of_one_event(rng, chance):
    shift = least_shift(chance, DRAWS)
    for side in (1, -1):
        seen = rng.binomial(DRAWS, chance + side * shift, size=2000)
        z = (seen - DRAWS * chance) / np.sqrt(DRAWS * chance * (1 - chance))
        assert np.mean(np.abs(z) > stats.norm.isf(ALPHA / 2)) > POWER - 0.01


def test_rare_cells_are_counted_together_and_impossible_ones_refused():
    probs = np.array([0.5, 0.4998, 0.0001, 0.0001, 0.0])
    assert chi_square(np.array([500, 500, 0, 0, 0]), probs).freedom == 1
    assert chi_square(np.array([50_000, 49_980, 10, 10, 0]), probs).freedom == 3
    with pytest.raises(AssertionError, match="3 draws of probability 0"):
        chi_square(np.array([500, 497, 0, 0, 3]), probs)


def test_distributions_side_by_side_add_up(rng):
    probs = rng.dirichlet(np.full(8, 3.0), size=3)
    counts = np.stack([rng.multinomial(n, probs) for n, probs in zip((5000, 0, 9000), probs)])
    first, last, both = chi_square(counts[0], probs[0]), chi_square(counts[2], probs[2]), chi_square(counts, probs)
    assert both.value == pytest.approx(first.value + last.value) and both.freedom == first.freedom + last.freedom
