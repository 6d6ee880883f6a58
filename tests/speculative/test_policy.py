"""Draft-length policies: each rule against plain Python, and what all of them promise."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsparse.engine.config import woken
from specsparse.errors import UserError
from specsparse.speculative.base import Draft, DraftKind, Verdict
from specsparse.speculative.policies import POLICIES, get_policy
from specsparse.speculative.policies.base import (
    Confidence,
    DraftView,
    Entropy,
    Fixed,
    Heuristic,
    NMin,
    PMin,
    check_policy,
    draft_view,
)
from specsparse.speculative.policies.cost import AutoOff, CostModel, CostOptimal
from specsparse.speculative.proof.certify import certifiable, certify
from specsparse.speculative.trees.template import TreeTemplate
from specsparse.speculative.verifiers import VERIFIERS
from specsparse.testing import contract
from tests.speculative.verdicts import verify

V_TABLE = (1.0, 1.1, 1.2, 1.3, 1.45, 1.6, 1.7, 1.8, 2.0)
NEEDED = {"cost": {"v": V_TABLE, "c": 0.05}, "auto_off": {"v": V_TABLE}}
SAMPLINGS = [[0.5, 0.3, 0.2] + [0.0] * 9, [1 / 12] * 12, [1.0] + [0.0] * 11]


def policy_of(name):
    return get_policy(name, **NEEDED.get(name, {}))


def verdict(accepted, tested):
    """Counts are all that a policy reads."""
    accepted, tested = jnp.array(accepted, jnp.int32), jnp.array(tested, jnp.int32)
    return Verdict(None, accepted + 1, None, accepted, tested, None, None, None)


def view(**fields):
    fields = {key: jnp.array(value, jnp.float32) for key, value in fields.items()}
    return DraftView(jnp.zeros(next(iter(fields.values())).shape, jnp.int32), **fields)


def lengths(policy, rounds):
    """Lengths asked for before, between and after rounds of (accepted, tested), for one sequence.

    A third number is the tokens drafted where they are fewer than were asked for.
    """
    state, update = policy.init(1), jax.jit(policy.update)
    found = [int(policy.length(state)[0])]
    for accepted, tested, *drafted in rounds:
        count = drafted[0] if drafted else found[-1] if tested else 0
        state = update(state, verdict([accepted], [tested]), jnp.array([count], jnp.int32))
        found.append(int(policy.length(state)[0]))
    return found


@pytest.mark.parametrize("name", POLICIES.names())
def test_every_policy_keeps_the_contract(name):
    contract.check_policy(policy_of(name))
    assert hash(policy_of(name)) == hash(policy_of(name))


@dataclasses.dataclass(frozen=True)
class Bad(Fixed):
    """Breaks one rule."""

    wrong: str = ""

    def length(self, state):
        return {"budget": -state, "batch": state - state.shape[0]}.get(self.wrong, state)

    def keep(self, state, count_B):
        return count_B + jnp.int32(self.wrong == "keep")

    def update(self, state, verdict, count_B):
        return state[:, None] if self.wrong == "state" else state

    def stop(self, state, view):
        return super().stop(state, view).astype(jnp.int32 if self.wrong == "stop" else bool)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("budget", "beyond 0.."), ("batch", "depends on the batch"), ("keep", "it keeps"), ("state", "its form"),
        ("stop", "not bool"),
    ],
)  # fmt: skip
def test_the_contract_refuses(wrong, words):
    with pytest.raises(AssertionError, match=words):
        contract.check_policy(Bad(4, wrong=wrong))
    contract.check_policy(Bad(4))


@dataclasses.dataclass(frozen=True)
class Drops(Confidence):
    """Leaves drafts of one token out, which are those whose first token was unlikely."""

    def keep(self, state, count_B):
        return jnp.where(count_B >= 2, count_B, 0)


@dataclasses.dataclass(frozen=True)
class Claims(Drops):
    """Says that this is fine."""

    one_hot_only = False


@dataclasses.dataclass(frozen=True)
class Halves(Fixed):
    """Drops tokens whatever they are, which is fine."""

    one_hot_only = False

    def keep(self, state, count_B):
        return count_B // 2


def test_no_one_is_fooled_by_a_policy_that_drops_drawn_tokens():
    assert Drops(3).one_hot_only and AutoOff(3, inner=Drops(3), cost=CostModel(V_TABLE)).one_hot_only
    assert not Claims(3).one_hot_only and Bad(3).one_hot_only  # Fixed speaks of its own `keep` alone
    check_policy(Drops(3), DraftKind.ONE_HOT)
    with pytest.raises(UserError, match="policy=Drops may drop drawn tokens of sampled drafts"):
        check_policy(Drops(3), DraftKind.SAMPLED)
    contract.check_policy(Drops(3))


def never(p, q, drafts, uniforms):
    raise AssertionError("this is not called")


def test_a_policy_that_claims_to_be_lossless_fools_no_certificate():
    with pytest.raises(AssertionError, match=r"policy Claims is not lossless: total variation 0\.2"):
        contract.check_policy(Claims(2))
    contract.check_policy(Halves(2))
    report = certify(Halves(2))
    assert report.passed and "policy Halves" in report.table()
    with pytest.raises(UserError, match="gamma=8 must be at most 7"):
        certify(Claims(8))
    with pytest.raises(UserError, match="its own gamma"):
        certify([never, Claims(3)], gamma=2)


def test_a_policy_that_can_be_called_is_a_policy():
    called = dataclasses.make_dataclass("Called", [], bases=(Halves,), frozen=True, namespace={"__call__": never})
    assert certifiable(called(2)) == called(2)


def test_fixed_and_n_min():
    assert lengths(Fixed(4), [(4, 4), (0, 1)]) == [4, 4, 4]
    counts = jnp.arange(5, dtype=jnp.int32)
    assert Fixed(4, n_min=3).keep(None, counts).tolist() == [0, 0, 0, 3, 4]
    assert Fixed(4).keep(None, counts).tolist() == [0, 1, 2, 3, 4]


def test_n_min_is_refused_for_drawn_tokens():
    check_policy(Fixed(4, n_min=3), DraftKind.ONE_HOT)
    check_policy(Fixed(4, n_min=1), DraftKind.SAMPLED)
    with pytest.raises(UserError, match="n_min"):
        check_policy(PMin(4, n_min=3), DraftKind.SAMPLED)
    with pytest.raises(UserError, match="n_min"):
        check_policy(get_policy("auto_off", v=V_TABLE, inner_options={"n_min": 2}), DraftKind.IID)


def test_heuristic_of_hugging_face():
    rounds = [(5, 5), (7, 7), (3, 4), (0, 0), (0, 1), (0, 1)]
    assert lengths(Heuristic(8, start=5), rounds) == [5, 7, 8, 7, 7, 6, 5]
    assert lengths(Heuristic(8, start=2), [(0, 1)] * 3) == [2, 1, 1, 1]


def test_distributions_in_view():
    q = jnp.array(SAMPLINGS, jnp.float32)
    ones = jnp.ones((3,), jnp.float32)
    seen = draft_view(q, depth_B=jnp.zeros((3,), jnp.int32), last_B=ones, needs=frozenset({"top10", "entropy"}))
    np.testing.assert_allclose(seen.top, [0.5, 1 / 12, 1.0], rtol=1e-6)
    np.testing.assert_allclose(seen.top10, [0.5, 0.1, 1.0], rtol=1e-6)
    np.testing.assert_allclose(seen.entropy, [1.0296530, np.log(12), 0.0], rtol=1e-5)
    lazy = draft_view(q, depth_B=jnp.zeros((3,), jnp.int32), last_B=ones, needs=frozenset())
    assert lazy.top10 is None and lazy.entropy is None


def test_stopping_rules():
    assert PMin(4, p_min=0.75).stop(None, view(top10=[0.74, 0.75, 1.0])).tolist() == [True, False, False]
    assert PMin(4, p_min=0.0).stop(None, view(top=[0.1])).tolist() == [False]
    assert Confidence(4).stop(None, view(last=[0.39, 0.41, 1.0])).tolist() == [True, False, False]
    entropy = Entropy(4, threshold=0.5, scale=0.25)  # stops over 1 nat
    assert entropy.stop(None, view(entropy=[0.0, 0.99, 1.01])).tolist() == [False, False, True]
    for policy in (PMin(4, p_min=0.1), Confidence(4), entropy):
        assert policy.needs


# Cost model


def best_length(alpha, cost, gamma):
    """argmax over g of E(g) / T(g), in float64."""
    c, c0 = cost.c or 0, cost.c0 or 0
    speed = [1.0] + [sum(alpha**i for i in range(g + 1)) / (cost.v[g] + c * g + c0) for g in range(1, gamma + 1)]
    return int(np.argmax(speed)), speed


@pytest.mark.parametrize("make", [CostOptimal, AutoOff])
def test_long_texts_have_the_drafts_that_pay_there(make):
    """Dear rows and drafted tokens make them shorter, and what all rows share makes them longer, as the text grows."""
    texts_B, v = jnp.array([10, 10_000], jnp.int32), (1.0, 1.3, 1.6, 1.9, 2.2)
    for kv, kv_row, kv_draft in ((0.1, 0.5, 0.0), (1.0, 0.0, 0.0), (1.0, 0.0, 0.9)):
        policy = make(4, cost=CostModel(v, kv=kv, kv_row=kv_row, kv_draft=kv_draft, prior=0.7))
        short, long = policy.length(policy.begin(texts_B)).tolist()
        assert (short > long) == (kv_row + kv_draft > 0) and short != long
        state = policy.begin(jnp.array([10, 9_998], jnp.int32))
        assert policy.update(state, verdict([2, 2], [2, 2]), jnp.array([2, 2])).length.tolist() == [13, 10_001]


@pytest.mark.parametrize("cost", [CostModel(V_TABLE), CostModel(V_TABLE, c=0.2), CostModel(V_TABLE, c=0.05, c0=0.3)])
def test_cost_optimal_is_the_best_length(cost):
    policy = CostOptimal(8, cost=cost, least=0)
    alphas = np.array([0.02, 0.2, 0.4, 0.55, 0.7, 0.85, 0.97])
    expected = [best_length(a, cost, 8) for a in alphas]
    got = cost.speedups(jnp.array(alphas, jnp.float32), 8, jnp.zeros((7,), jnp.int32))
    np.testing.assert_allclose(got, [speed for _, speed in expected], rtol=1e-5)
    state = policy.init(7)._replace(accepted=jnp.array(alphas * 1e6, jnp.float32), tested=jnp.full((7,), 1e6))
    assert policy.length(state).tolist() == [g for g, _ in expected]
    assert dataclasses.replace(policy, least=2).length(state).min() == 2
    dear = CostOptimal(1, cost=CostModel((1.0, 1e308)))  # a probe would never pay: no overflow
    assert dear.length(dear.init(2)).tolist() == [0, 0]


@pytest.mark.parametrize("name", ["delta", "block"])
def test_acceptance_counted_from_verdicts_gives_the_best_length(name):
    """A token of a one-hot draft is accepted with chance p(x) = 0.7, by `block` as by `delta`."""
    rounds, K, alpha = 4096, 8, 0.7
    tokens_BK, count_B = jnp.zeros((rounds, K), jnp.int32), jnp.full((rounds,), K, jnp.int32)
    draft = Draft(tokens_BK, TreeTemplate.chain(K).parents_array(rounds), count_B)
    rng = np.random.default_rng(0)
    coins_BK, u_B = (jnp.asarray(rng.random(shape), jnp.float32) for shape in ((rounds, K), rounds))
    p_BnV = jnp.broadcast_to(jnp.array([alpha, 1 - alpha], jnp.float32), (rounds, K + 1, 2))
    got = jax.jit(functools.partial(verify, VERIFIERS[name]))(draft, p_BnV, coins_BK=coins_BK, u_B=u_B)
    tested, accepted = (float(jnp.sum(x)) for x in (got.tested, got.accepted))
    assert accepted / tested == pytest.approx(alpha, abs=4 * np.sqrt(alpha * (1 - alpha) / tested))  # 4 sd = 0.016
    cost = CostModel(V_TABLE, c=0.05, c0=0.3, weight=1e-3, memory=1.0)
    sums = cost.update(cost.begin(jnp.zeros((rounds,), jnp.int32)), got, count_B)
    total = jax.tree.map(lambda a: jnp.sum(a, keepdims=True), sums)
    assert CostOptimal(8, cost=cost, least=0).length(total).tolist() == [best_length(alpha, cost, 8)[0]]


def test_acceptance_estimate_fades_and_ignores_rounds_without_a_draft():
    cost = CostModel(V_TABLE, prior=0.5, weight=2.0, memory=0.5)
    state = cost.begin(jnp.zeros((1,), jnp.int32))
    assert float(cost.alpha(state)[0]) == 0.5
    some, none = jnp.array([4], jnp.int32), jnp.array([0], jnp.int32)
    state = cost.update(cost.update(state, verdict([4], [4]), some), verdict([0], [0]), none)
    assert float(cost.alpha(state)[0]) == pytest.approx((4 + 1) / (4 + 2))
    state = cost.update(state, verdict([1], [2]), some)
    assert float(cost.alpha(state)[0]) == pytest.approx((2 + 1 + 1) / (2 + 2 + 2))


def simulate(policy, cost, alphas, seed=0):
    """Tokens per unit of time for chains whose tokens are accepted with chance alpha, and the lengths drafted."""
    rng, state, update = np.random.default_rng(seed), policy.init(1), jax.jit(policy.update)
    length = jax.jit(policy.length)
    tokens = time = 0.0
    asked = []
    for alpha in alphas:
        g = int(length(state)[0])
        misses = np.flatnonzero(rng.random(g) >= alpha)
        accepted = int(misses[0]) if len(misses) else g
        state = update(state, verdict([accepted], [min(accepted + 1, g)]), jnp.array([g], jnp.int32))
        tokens, time = tokens + accepted + 1, time + cost.time(g)
        asked.append(g)
    return tokens / time, asked


def of_experts(overlap):
    """v(n) by the bytes of SmallThinker-4B, in 1e6 weights: 411 of all rows and 453 of the experts of one."""
    return tuple((411 + 453 * woken(1 / 8, n, overlap) * 8) / 864 for n in range(1, 9))


MEASURED_EXPERTS = (1.0, 1.23, 1.44, 1.64, 1.88, 2.12, 2.35, 2.59)
"""Of that shape with random weights, whose rows share half of their experts; by 1, 2, 4 and 8 rows (docs/LOG.md)."""


@pytest.mark.parametrize("v", [of_experts(0.26), of_experts(0.38), MEASURED_EXPERTS], ids=["26 %", "38 %", "measured"])
def test_where_drafts_wake_experts_cost_never_loses_to_plain_decoding(v):
    """64 texts at each acceptance: within 2 % of plain decoding and 3 % of the best fixed length, no draft included."""
    cost, rates = CostModel(v, c=0.0, c0=0.03), np.array([0.3, 0.6, 0.9])
    policy, alpha_B = CostOptimal(7, cost=cost), jnp.asarray(np.repeat(rates, 64), jnp.float32)
    time_G = jnp.asarray([cost.time(g) for g in range(8)], jnp.float32)

    def step(state, key):
        count_B = policy.length(state)
        right_BG = jax.random.uniform(key, (len(alpha_B), 7)) < alpha_B[:, None]
        right_BG &= jnp.arange(7, dtype=jnp.int32)[None] < count_B[:, None]
        accepted_B = jnp.sum(jnp.cumprod(right_BG, axis=1, dtype=jnp.int32), axis=1, dtype=jnp.int32)
        state = policy.update(state, verdict(accepted_B, jnp.minimum(accepted_B + 1, count_B)), count_B)
        return state, (accepted_B + 1, time_G[count_B])

    _, done = jax.lax.scan(step, policy.init(len(alpha_B)), jax.random.split(jax.random.key(0), 256))
    tokens, time = (np.asarray(part, np.float64).reshape(256, 3, 64).sum(axis=(0, 2)) for part in done)
    best = np.array([max(best_length(rate, cost, 7)[1]) for rate in rates])
    assert (tokens / time >= 0.98).all() and (tokens / time >= 0.97 * best).all(), (tokens / time, best)


def test_cost_learns_by_rare_probes_when_drafts_pay_again():
    policy = CostOptimal(7, cost=CostModel(of_experts(0.26), c0=0.03))
    _, asked = simulate(policy, policy.cost, [0.0] * 100 + [0.95] * 200)
    assert 0 < sum(asked[20:100]) <= 80 // 20 and min(asked[-50:]) >= 3
    one = dataclasses.replace(policy, least=1)
    assert min(simulate(one, policy.cost, [0.0] * 30)[1]) == 1


def test_probes_are_the_more_frequent_the_nearer_a_draft_is_to_paying():
    policy = CostOptimal(1, cost=CostModel(of_experts(0.26), c0=0.03))
    near, tested = policy.cost.time(1) - 1.05, jnp.full((2,), 1e6, jnp.float32)  # a draft of 0.05 more would pay
    counts = {"accepted": tested * jnp.array([0, near], jnp.float32), "tested": tested}
    state = policy.init(2)._replace(**counts, idle=jnp.full((2,), 20, jnp.int32))
    assert policy.length(state).tolist() == [0, 1]


def test_auto_off_costs_next_to_nothing_when_drafts_are_bad():
    cost = CostModel(V_TABLE)
    policy = AutoOff(7, inner=Fixed(7), cost=cost)
    speed, asked = simulate(policy, cost, [0.02] * 600)
    assert speed > 0.97 and max(asked[20:]) <= policy.probe
    assert 500 // 33 - 1 <= sum(g > 0 for g in asked[100:]) <= 500 // 32 + 1


def test_auto_off_stays_on_when_drafts_are_good_and_comes_back():
    cost = CostModel(V_TABLE)
    policy = AutoOff(7, inner=Fixed(7), cost=cost)
    _, asked = simulate(policy, cost, [0.9] * 100)
    assert set(asked) == {7}
    _, asked = simulate(policy, cost, [0.0] * 60 + [0.95] * 300)
    assert 0 in asked[20:60] and set(asked[-50:]) == {7}


def test_auto_off_probes_until_a_draft_is_tested():
    """A lookup that finds nothing costs nothing, and says nothing; a failed probe doubles the wait."""
    policy = AutoOff(4, inner=Fixed(4), cost=CostModel(V_TABLE, weight=0.01), probe=2, every=3, probe_share=1.0)
    asked = lengths(policy, [(0, 1), *[(0, 0)] * 5, (0, 1), *[(0, 0)] * 6, (0, 1), (0, 0)])
    assert asked == [4, 0, 0, 0, 2, 2, 2, *[0] * 6, 2, 0, 0]
    rounds = [(0, 1), *[(0, 0)] * 3, (0, 1), *[(0, 0)] * 6, (0, 1), *[(0, 0)] * 7]
    assert lengths(dataclasses.replace(policy, most=7), rounds)[-7:] == [0] * 6 + [2]


def test_dear_probes_are_rarer_behind_a_long_text():
    """A probe takes 0.2 steps, and 10 more behind 10,000 tokens if the drafter reads them."""
    for kv_draft, waits in ((0.0, [10, 10]), (1.0, [10, 510])):
        policy = AutoOff(2, cost=CostModel((1.0, 1.1, 1.2), c=0.1, kv_draft=kv_draft), probe_share=0.02)
        first_B, most_B = policy.waits(jnp.array([0, 10_000], jnp.int32))
        assert first_B.tolist() == waits and most_B.tolist() == [max(32, wait) for wait in waits]


def test_auto_off_counts_the_passes_that_a_draft_took():
    """Three nodes of two passes of a head take the time of two drafted tokens, and those of lookup none."""
    policy = AutoOff(4, inner=Fixed(4), cost=CostModel(V_TABLE, c=0.2))
    before, count_B = policy.init(2), jnp.array([3, 0], jnp.int32)
    after = policy.update(before, verdict([1, 0], [2, 0]), count_B)
    for passes in (0, 2, 3):
        time_B = policy.passed(before, after, jnp.full((2,), passes), count_B).time
        np.testing.assert_allclose(after.time - time_B, [(3 - passes) * 0.2, 0], atol=1e-5)  # the second drafted none


def test_auto_off_takes_a_whole_probe_for_a_whole_draft():
    policy = AutoOff(4, inner=Fixed(4), cost=CostModel(V_TABLE, weight=0.01), probe=2, every=3, probe_share=1.0)
    assert lengths(policy, [(0, 1), *[(0, 0)] * 3, (2, 2)]) == [4, 0, 0, 0, 2, 4]


def test_auto_off_predicts_from_the_tokens_that_drafts_brought():
    """One draft of four right and three at once wrong: two tokens a round; alpha = 4/7 would promise 2.19."""
    policy = AutoOff(4, inner=Fixed(4), cost=CostModel(V_TABLE, weight=1e-6, memory=1.0), margin=0.01)
    state = policy.init(1)
    for accepted, tested in [(4, 4), (0, 1), (0, 0), (0, 1), (0, 1)]:
        state = policy.update(state, verdict([accepted], [tested]), jnp.array([4 if tested else 0], jnp.int32))
    assert float(policy.predicted(state)[0]) == pytest.approx(2 / V_TABLE[4], rel=1e-5)


def test_auto_off_begins_with_the_length_that_is_best_by_the_prior():
    """At alpha 0.4 one token pays: of a tree whose nodes are cut to what pays, too. Where none does, it begins off."""
    for inner in (None, Fixed(1), Fixed(7)):
        policy = AutoOff(7, inner=inner, cost=CostModel(V_TABLE, prior=0.4, weight=1e6))
        assert policy.pays(policy.init(1)).all()
    dear = AutoOff(7, inner=Fixed(7), cost=CostModel((1.0, 1.5, *V_TABLE[2:]), prior=0.1))
    assert not dear.pays(dear.init(1)).any()


# Names


def test_names_of_the_field():
    assert get_policy("n_min", draft_max=16, draft_min=5) == NMin(16, n_min=5)
    assert get_policy("p_min", draft_max=16, draft_p_min=0.9, draft_min=5) == PMin(16, n_min=5, p_min=0.9)
    assert get_policy("hf_heuristic", num_assistant_tokens=6) == Heuristic(16, start=6)
    assert get_policy("confidence", num_assistant_tokens=6) == Confidence(6, threshold=0.4)
    inner = get_policy("auto_off", gamma=4, v=list(V_TABLE), inner="cost", c=0.1).paying
    assert inner == CostOptimal(4, cost=CostModel(V_TABLE, c=0.1, prior=0.6, weight=6.0, memory=0.95), least=1)
    assert get_policy("fixed", n_min=None) == Fixed(7) and get_policy("n_min") == NMin(7, n_min=2)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("fixt", {}, ["policy=fixt", "did you mean fixed?"]),
        ("fixed", {"gama": 3}, ["policy.gama", "did you mean gamma?"]),
        ("fixed", {"gamma": 0}, ["policy.gamma=0"]),
        ("fixed", {"gamma": 3, "n_min": 4}, ["n_min=4", "gamma=3"]),
        ("p_min", {"p_min": 1.1}, ["p_min=1.1"]),
        ("heuristic", {"gamma": 4, "start": 5}, ["start=5"]),
        ("cost", {}, ["policy.v is needed"]),
        ("cost", {"v": [1.0, 1.2], "gamma": 4}, ["policy.gamma=4", "v(2)"]),
        ("cost", {"v": [1.0, -1.0], "gamma": 1}, ["above 0"]),
        ("cost", {"v": "abc"}, ["policy.v=abc must be a list"]),
        ("auto_off", {"v": V_TABLE, "inner": "fixt"}, ["policy=fixt"]),
        ("auto_off", {"v": V_TABLE, "probe": 9}, ["probe=9"]),
        ("auto_off", {"v": V_TABLE, "every": 9, "most": 8}, ["every=9", "most=8"]),
        ("auto_off", {"v": V_TABLE, "gamma": 3, "inner": Fixed(5)}, ["policy.gamma=3", "5"]),
    ],
)
def test_bad_options_are_refused_in_one_line(name, options, words):
    with pytest.raises(UserError) as error:
        get_policy(name, **options)
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)
