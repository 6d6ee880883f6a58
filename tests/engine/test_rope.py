"""RoPE: tables against independent formulas, pairings against rotation, rows that depend on no other."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsparse.engine.rope import RopeConfig, rope_tables
from specsparse.errors import UserError
from specsparse.kernels.reference.dense import rotate as apply_rope


def llama_cpp_tables(cfg: RopeConfig, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """`rope_yarn` of ggml, one scalar at a time."""

    def corr(turns: float) -> float:
        return cfg.dim * math.log(cfg.original_context / (turns * 2 * math.pi)) / (2 * math.log(cfg.base))

    if cfg.scaling == "yarn":
        start = max(0, math.floor(corr(cfg.beta_fast)))
        end = min(cfg.dim - 1, math.ceil(corr(cfg.beta_slow)))
    cos, sin = np.zeros((2, capacity, cfg.dim // 2))
    for position in range(capacity):
        for i0 in range(0, cfg.dim, 2):
            theta_extrap = position * cfg.base ** (-i0 / cfg.dim)
            theta = theta_extrap / cfg.factor
            scale = cfg.attn_factor
            if cfg.scaling == "yarn":
                ramp = 1 - min(1, max(0, (i0 / 2 - start) / max(0.001, end - start)))
                theta = theta * (1 - ramp) + theta_extrap * ramp
                scale *= 1 + 0.1 * math.log(cfg.factor)
            cos[position, i0 // 2], sin[position, i0 // 2] = math.cos(theta) * scale, math.sin(theta) * scale
    return cos, sin


@pytest.mark.parametrize(
    "cfg",
    [
        RopeConfig(10000.0, 16, "norm"),
        RopeConfig(500000.0, 128, "norm"),
        RopeConfig(10000.0, 16, "norm", "linear", 4.0),
        RopeConfig(10000.0, 64, "neox", "yarn", 4.0, 32768),
        RopeConfig(10000.0, 64, "neox", "yarn", 16.0, 64, 0.7, 8.0, 2.0),
        RopeConfig(10000.0, 8, "neox", "yarn", 1.0, 4),
    ],
    ids=str,
)
def test_tables_are_those_of_llama_cpp(cfg):
    tables = rope_tables(cfg, 50)
    for got, want in zip(tables, llama_cpp_tables(cfg, 50), strict=True):
        assert got.dtype == np.float32 and got.shape == (50, cfg.dim // 2)
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-7 * (1 + 0.1 * math.log(cfg.factor)))


def test_yarn_against_the_paper():
    """Pairs that turn often keep their angle, those that hardly turn are stretched by the whole factor."""
    cfg = RopeConfig(10000.0, 128, "neox", "yarn", 4.0, 4096)
    cos, sin = rope_tables(cfg, 2)
    angle = np.arctan2(sin[1], cos[1])
    plain = 10000.0 ** (-np.arange(64) / 64)
    turns = 4096 * plain / (2 * np.pi)
    np.testing.assert_allclose(angle[turns > 40], plain[turns > 40], rtol=1e-6)
    np.testing.assert_allclose(angle[turns < 0.9], plain[turns < 0.9] / 4, rtol=1e-6)
    np.testing.assert_allclose(np.hypot(cos, sin), 1 + 0.1 * np.log(4.0), rtol=1e-6)


def test_far_positions_keep_their_precision():
    cos, _ = rope_tables(RopeConfig(10000.0, 4, "norm"), 100_001)
    assert abs(cos[100_000, 0] - math.cos(100_000.0)) < 1e-7


def test_frequency_factors_divide_the_angle():
    cfg = RopeConfig(10000.0, 8, "norm", freq_factors=True)
    factors = np.array([1.0, 2.0, 4.0, 8.0], np.float32)
    cos, _ = rope_tables(cfg, 9, factors)
    plain, _ = rope_tables(cfg, 9)
    np.testing.assert_array_equal(cos[8, 3], np.cos(8 * 10000.0 ** (-6 / 8) / 8).astype(np.float32))
    np.testing.assert_array_equal(cos[:, 0], plain[:, 0])


@pytest.mark.parametrize("factors", [np.ones(3), np.zeros(4), np.full(4, np.nan)])
def test_bad_factors_are_refused(factors):
    with pytest.raises(UserError, match=r"rope_freqs\.weight"):
        rope_tables(RopeConfig(10000.0, 8, "norm"), 4, factors)


@pytest.mark.parametrize("pairing", ["norm", "neox"])
def test_apply_is_a_rotation(pairing):
    cos, sin = rope_tables(RopeConfig(100.0, 8, pairing), 7)
    x = np.random.default_rng(0).normal(size=(7, 3, 8)).astype(np.float32)
    got = np.asarray(apply_rope(jnp.asarray(x), jnp.asarray(cos[:, None]), jnp.asarray(sin[:, None]), pairing))
    first, second = (np.arange(0, 8, 2), np.arange(1, 8, 2)) if pairing == "norm" else (np.arange(4), np.arange(4, 8))
    z = (x[..., first] + 1j * x[..., second]) * (cos + 1j * sin)[:, None]
    np.testing.assert_allclose(got[..., first], z.real, atol=1e-6)
    np.testing.assert_allclose(got[..., second], z.imag, atol=1e-6)


def test_the_pairings_are_permutations_of_each_other():
    cos, sin = (jnp.asarray(table) for table in rope_tables(RopeConfig(100.0, 8, "norm"), 5))
    x = jax.random.normal(jax.random.key(0), (5, 8))
    order = np.array([0, 2, 4, 6, 1, 3, 5, 7])
    norm = apply_rope(x, cos, sin, "norm")
    np.testing.assert_allclose(apply_rope(x[:, order], cos, sin, "neox"), norm[:, order], atol=1e-6)


def test_what_lies_past_dim_is_untouched():
    cos, sin = (jnp.asarray(table) for table in rope_tables(RopeConfig(100.0, 4, "neox"), 5))
    x = jax.random.normal(jax.random.key(0), (5, 8)).astype(jnp.float32)
    got = apply_rope(x, cos, sin, "neox")
    assert got.dtype == jnp.float32 and bool((got[:, 4:] == x[:, 4:]).all())


@pytest.mark.parametrize("pairing", ["norm", "neox"])
def test_a_row_does_not_depend_on_its_company(pairing):
    """C1 for this stage: bit-identical rows for every number of rows."""
    cos, sin = (jnp.asarray(table) for table in rope_tables(RopeConfig(10000.0, 64, pairing), 17))
    x = jax.random.normal(jax.random.key(1), (17, 64))
    turn = jax.jit(apply_rope, static_argnums=3)
    alone = jnp.concatenate([turn(x[i : i + 1], cos[i : i + 1], sin[i : i + 1], pairing) for i in range(17)])
    for n in (2, 8, 17):
        assert bool((turn(x[:n], cos[:n], sin[:n], pairing) == alone[:n]).all())
