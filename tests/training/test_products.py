"""Products of training in bfloat16 beside those in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsparse.training import layer


def _error(found, wanted) -> float:
    return float(np.linalg.norm(np.asarray(found, np.float32) - wanted) / np.linalg.norm(wanted))


@pytest.fixture
def factors() -> tuple[jax.Array, jax.Array, jax.Array]:
    """x [24, 40], w [56, 40] and a cotangent [24, 56]."""
    rng = np.random.default_rng(0)
    x, w, g = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((24, 40), (56, 40), (24, 56)))
    return x, w, g


@pytest.mark.parametrize(("precision", "bound"), [("float32", 1e-6), ("bfloat16", 6e-3)])
def test_product_and_both_gradients(factors, precision, bound):
    x, w, g = factors

    def product(x, w):
        return layer.times(x, layer.halved(w, precision))

    y, back = jax.jit(lambda x, w: jax.vjp(product, x, w))(x, w)
    dx, dw = back(g)
    x, w, g = (np.asarray(a, np.float64) for a in factors)
    assert y.dtype == dx.dtype == dw.dtype == jnp.float32
    for found, wanted in ((y, x @ w.T), (dx, g @ w), (dw, g.T @ x)):
        assert _error(found, wanted) < bound
        assert precision == "float32" or _error(found, wanted) > 1e-4  # else nothing was rounded


def test_not_a_number_is_passed_on(factors):
    x, w, g = factors
    _, back = jax.vjp(lambda w: layer.times(x, layer.halved(w, "bfloat16")), w)
    (dw,) = back(g.at[0, 0].set(jnp.nan))
    assert np.isnan(dw[0]).all()
    assert np.isfinite(dw[1:]).all()


def test_only_matrices_are_halved(factors):
    _, w, _ = factors
    halved = layer.halved({"norm": w[0], "matrix": w}, "bfloat16")
    assert halved["norm"].dtype == jnp.float32
    assert halved["matrix"].dtype == jnp.bfloat16
    assert layer.halved(w, "auto").dtype == (jnp.bfloat16 if layer.pays() else jnp.float32)
