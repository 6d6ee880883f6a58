import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specsparse.speculative.verifiers import residuals
from specsparse.speculative.verifiers.sibling_rules import overlap, solve_rho, uses

WIDTHS = [1, 3, 100, 255, 256, 8193, 10000, 49152]


def probs(rng, width, zeros=0.0):
    weights = rng.exponential(size=width) * (rng.random(width) >= zeros)
    weights[rng.integers(width)] += 1
    return weights / weights.sum()


@pytest.mark.parametrize("width", WIDTHS)
def test_total_is_the_sum(width):
    x = np.random.default_rng(width).random(width)
    assert residuals.total(x) == pytest.approx(x.sum(), rel=1e-14)
    assert float(residuals.total(jnp.asarray(x, jnp.float32))) == pytest.approx(x.sum(), rel=1e-6)


@given(st.integers(0, 2**32 - 1), st.integers(2, 8))
@settings(max_examples=50)
def test_residual_makes_up_for_the_accepted_mass(seed, width):
    rng = np.random.default_rng(seed)
    p, q = probs(rng, width, 0.3), probs(rng, width, 0.3)
    accepted = np.minimum(p, q)
    emitted = accepted + (1 - accepted.sum()) * residuals.residual(p, q)
    np.testing.assert_allclose(emitted, p, atol=1e-14)


def test_residual_of_equal_distributions_is_p():
    p = np.array([0.5, 0.3, 0.2])
    np.testing.assert_array_equal(residuals.residual(p, p), p)
    np.testing.assert_array_equal(residuals.residual(p, p * 2), p)


def test_one_hot_residual_equals_the_general_one():
    p = np.array([0.5, 0.3, 0.2])
    np.testing.assert_allclose(residuals.residual(p, residuals.one_hot(p, 1)), [5 / 7, 0, 2 / 7])
    np.testing.assert_allclose(residuals.remove(p, 1), [5 / 7, 0, 2 / 7])


def test_remove_of_the_last_token_leaves_nothing():
    np.testing.assert_array_equal(residuals.remove(np.array([0.0, 1.0]), 1), [0, 0])


@pytest.mark.parametrize("bad", [0.0, np.nan, -1.0])
def test_ratio_of_what_q_could_not_draw_is_zero(bad):
    assert residuals.ratio(np.float64(0.5), np.float64(bad)) == 0
    assert float(residuals.ratio(jnp.float32(0.5), jnp.float32(bad))) == 0


@pytest.mark.parametrize("width", [1, 5, 8193])
def test_inverse_cdf_draws_every_token_over_its_own_interval(width):
    rng = np.random.default_rng(width)
    p = np.stack([probs(rng, width, 0.5) for _ in range(4)])
    u = np.array([0.0, 0.3, 0.999, np.nextafter(1.0, 0)])
    drawn = residuals.inverse_cdf(p, u)
    cdf = np.cumsum(p, axis=1)
    for row, token in enumerate(drawn):
        assert p[row, token] > 0
        assert cdf[row, token] > u[row] * cdf[row, -1] or token == np.flatnonzero(p[row])[-1]
        assert token == 0 or cdf[row, token - 1] <= u[row] * cdf[row, -1]
    f32 = residuals.inverse_cdf(jnp.asarray(p, jnp.float32), jnp.asarray(u[:2], jnp.float32).repeat(2))
    assert f32.dtype == jnp.int32
    assert (jnp.take_along_axis(jnp.asarray(p, jnp.float32), f32[:, None], axis=1) > 0).all()


@given(st.integers(0, 2**32 - 1), st.integers(2, 8), st.integers(1, 8))
@settings(max_examples=50)
def test_rho_solves_spectrs_equation_from_above(seed, width, siblings):
    rng = np.random.default_rng(seed)
    p, q, k = probs(rng, width, 0.3), probs(rng, width, 0.3), np.float64(siblings)
    rho, c = solve_rho(p, q, k)
    b = overlap(p, q, rho)
    assert 1 <= rho <= siblings
    assert (1 - (1 - b) ** siblings) - rho * b <= 1e-12
    assert c <= rho
    if b > 0 and rho > 1:
        low = rho - 1.1e-4
        assert low < 1 or uses(overlap(p, q, low), k) > low


def test_rho_of_an_only_child_is_one():
    p, q = np.array([0.9, 0.1]), np.array([0.2, 0.8])
    assert solve_rho(p, q, np.float64(1)) == (1, 1)
    rho, c = solve_rho(jnp.asarray(p, jnp.float32), jnp.asarray(q, jnp.float32), jnp.float32(1))
    assert (float(rho), float(c)) == (1, 1)
