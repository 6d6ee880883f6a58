"""Synthetic acceptance: closed forms against enumeration, and the verdict against its own distribution."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsparse.engine.noise import NoiseStream, seed_words, uniform
from specsparse.errors import UserError
from specsparse.speculative.base import PAD, Draft
from specsparse.speculative.drafters import get_drafter
from specsparse.speculative.drafters.synthetic import Synthetic, SyntheticRates
from specsparse.speculative.trees.template import TreeTemplate
from specsparse.speculative.verify import Noise, Target
from specsparse.testing.drafting import draft_context
from tests.cells import cells

RATES = [
    Synthetic(4, SyntheticRates(rate=0.7)),
    Synthetic(5, SyntheticRates(length=2.6)),
    Synthetic(4, SyntheticRates("minimum_variance", length=2.6)),
    Synthetic(3, SyntheticRates("minimum_variance", length=4.0)),
    Synthetic(3, SyntheticRates("minimum_variance", length=1.0)),
    Synthetic(acceptance=SyntheticRates(rates=(0.8, 0.6, 0.0))),
]


def enumerated(drafter):
    """P(accepted = a), over all outcomes of the coins."""
    rates = drafter.acceptance.conditional(drafter.max_nodes)
    probs = np.zeros(len(rates) + 1)
    for coins in itertools.product((True, False), repeat=len(rates)):
        weight = np.prod([r if c else 1 - r for r, c in zip(rates, coins)])
        probs[next((i for i, c in enumerate(coins) if not c), len(coins))] += weight
    return probs


@pytest.mark.parametrize("drafter", RATES, ids=str)
def test_closed_forms(drafter):
    probs, rates, gamma = enumerated(drafter), drafter.acceptance, drafter.max_nodes
    lengths = np.arange(gamma + 1) + 1
    mean = (probs * lengths).sum()
    assert rates.mean_acceptance_length(gamma) == pytest.approx(mean, abs=1e-12)
    assert rates.unconditional(gamma) == pytest.approx([probs[i + 1 :].sum() for i in range(gamma)])


def test_geometric_follows_leviathan():
    r, gamma = 0.7, 6
    assert SyntheticRates(rate=r).mean_acceptance_length(gamma) == pytest.approx((1 - r ** (gamma + 1)) / (1 - r))
    for length in (1.0, 1.3, 3.0, 5.9, 6.999, 7.0):
        assert SyntheticRates(length=length).mean_acceptance_length(gamma) == pytest.approx(length)


def variance(rates: SyntheticRates, gamma: int) -> float:
    """Of the acceptance length: sum_i (2i - 1) P(accepted >= i) - (sum_i P(accepted >= i))^2."""
    reach = rates.unconditional(gamma)
    return sum((2 * i + 1) * r for i, r in enumerate(reach)) - sum(reach) ** 2


def test_minimum_variance_is_the_two_integers_around_the_mean():
    rates = SyntheticRates("minimum_variance", length=3.25)
    assert rates.conditional(5) == (1.0, 1.0, 0.25, 0.0, 0.0)
    assert variance(rates, 5) == pytest.approx(0.25 * 0.75)
    same_mean, geometric = SyntheticRates("minimum_variance", rate=0.7), SyntheticRates(rate=0.7)
    assert same_mean.mean_acceptance_length(5) == pytest.approx(geometric.mean_acceptance_length(5))
    assert variance(same_mean, 5) < variance(geometric, 5)


@pytest.mark.parametrize("drafter", cells(RATES, [RATES[0], RATES[3], RATES[5]]), ids=str)
def test_the_verdict_follows_the_rates(drafter):
    """4,000 sequences in one verdict, coins as the engine draws them."""
    batch, gamma, rates = 4_000, drafter.max_nodes, drafter.acceptance
    ctx = draft_context([[3]] * batch, capacity=4, budget=gamma)
    coins = uniform(
        seed_words(1),
        sample=jnp.arange(batch, dtype=jnp.int32)[:, None],
        stream=NoiseStream.ACCEPT,
        position=1,
        node=jnp.arange(gamma, dtype=jnp.int32)[None],
    )
    target = jnp.full((batch, gamma + 1), 3, jnp.int32)  # equal to the draft everywhere: still rejected
    step = jax.jit(lambda x, t, c: rates.verdict(drafter.draft(None, None, x).draft, Target(tokens=t), Noise(c, None)))
    verdict = step(ctx, target, coins)
    expected = enumerated(drafter)
    seen = np.bincount(np.asarray(verdict.accepted), minlength=gamma + 1) / batch
    assert abs(seen - expected).max() < 5 * np.sqrt(0.25 / batch)
    np.testing.assert_array_equal(verdict.tested, np.minimum(np.asarray(verdict.accepted) + 1, gamma))
    spread = np.sqrt(np.asarray(verdict.alpha_var, np.float64).sum())
    surplus = np.asarray(verdict.accepted).sum() - np.asarray(verdict.alpha, np.float64).sum()
    assert abs(surplus) <= 5 * spread + 1e-2


def test_emitted_tokens_and_short_drafts():
    rates = SyntheticRates(rate=0.5)
    ctx = draft_context([[5], [6], [7]], capacity=4, budget=[3, 2, 0])
    draft = jax.jit(Synthetic(3, rates).draft)(None, None, ctx).draft
    assert draft.tokens.tolist() == [[5, 5, 5], [6, 6, 0], [0, 0, 0]]
    target = jnp.array([[10, 11, 12, 13]] * 3, jnp.int32)
    coins = jnp.array([[0.1, 0.9, 0.1], [0.1, 0.1, 0.1], [0.1, 0.1, 0.1]], jnp.float32)
    verdict = jax.jit(lambda d, t, c: rates.verdict(d, Target(tokens=t), Noise(c, None)))(draft, target, coins)
    assert verdict.tokens.tolist() == [[5, 11, PAD, PAD], [6, 6, 12, PAD], [10, PAD, PAD, PAD]]
    assert verdict.accepted.tolist() == [1, 2, 0] and verdict.tested.tolist() == [2, 2, 0]
    assert verdict.nodes.tolist() == [[0, PAD, PAD], [0, 1, PAD], [PAD, PAD, PAD]]
    np.testing.assert_allclose(verdict.alpha, [1.0, 1.0, 0.0])


def test_drafts_are_the_tokens_before_the_last():
    ctx = draft_context([[1, 2, 3, 4, 5, 6], [7, 8]], capacity=8, budget=3)
    draft = jax.jit(Synthetic(3).draft)(None, None, ctx).draft
    assert draft.tokens.tolist() == [[3, 4, 5], [7, 7, 7]]


def test_a_target_that_is_no_distribution_fails_the_sequence():
    rates = SyntheticRates(rate=0.0)
    ctx = draft_context([[5]], capacity=4, budget=2)
    no_target, coins = jnp.full((1, 3), -1, jnp.int32), jnp.zeros((1, 2), jnp.float32)
    target, noise = Target(tokens=no_target), Noise(coins, None)
    step = jax.jit(lambda x: rates.verdict(Synthetic(2, rates).draft(None, None, x).draft, target, noise))
    assert bool(step(ctx).failed[0])


def test_a_round_without_a_draft_is_the_targets_token():
    none = Draft(jnp.zeros((1, 0), jnp.int32), jnp.zeros((1, 0), jnp.int32), jnp.zeros((1,), jnp.int32))
    rates = SyntheticRates(rate=0.5)
    target, noise = Target(tokens=jnp.full((1, 1), 7, jnp.int32)), Noise(jnp.zeros((1, 0), jnp.float32), None)
    verdict = rates.verdict(none, target, noise)
    assert verdict.tokens.tolist() == [[7]] and verdict.tested.tolist() == verdict.accepted.tolist() == [0]
    assert verdict.alpha.tolist() == [0.0]


def test_by_name():
    assert get_drafter("synthetic", gamma=4, rate=0.7) == Synthetic(4, SyntheticRates(rate=0.7))
    named = get_drafter("synthetic", process="minimum_variance", gamma=4, synthetic_acceptance_length=2.6)
    assert named.acceptance == SyntheticRates("minimum_variance", length=2.6)
    assert get_drafter("synthetic", rates=(0.8, 0.6)).max_nodes == 2


@pytest.mark.parametrize(
    ("name", "given", "says"),
    [
        ("synthetic", {"rate": 0.5, "length": 2.0}, "takes one of rate, length and rates$"),
        ("synthetic", {"rates": (0.5, 0.6)}, r"rates \(0.5, 0.6\) must lie in"),
        ("synthetic", {"gamma": 3, "length": 4.5}, "mean acceptance length 4.5"),
        ("scripted", {"gamma": 3, "accept": (4,)}, r"ends \(3,\) must be nodes of a tree of 3, or -1$"),
        ("scripted", {"template": TreeTemplate.kary((3,)), "ends": (0,), "vocab_size": 3}, "^scripted vocab_size=3"),
    ],
)
def test_mistakes_name_the_option(name, given, says):
    with pytest.raises(UserError, match=says):
        get_drafter(name, **given)
