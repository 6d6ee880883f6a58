"""Anybody's callable: its arguments, what it may return, and the exact and the sampled distribution of its text."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specsparse
from specsparse.cli.main import main
from specsparse.errors import UserError
from specsparse.speculative.base import PAD, DraftKind
from specsparse.speculative.proof import certify, measured
from specsparse.speculative.proof.cases import CORNERS, Case, keep_top, make_case, random_tables, tempered
from specsparse.speculative.proof.exact import continuations, output_probs, total_variation
from specsparse.speculative.proof.external import ExternalVerifier
from specsparse.speculative.proof.measured import measure_external, round_probs, sampled_probs, several_rounds
from specsparse.speculative.proof.results import CALLABLE, LEVEL, SAMPLED, driver_tv, power
from specsparse.speculative.trees.template import TreeTemplate
from specsparse.speculative.verifiers.rejection import Rejection
from tests.cells import cells

CHAIN = TreeTemplate.chain(2)
DICE = np.random.default_rng(0)
few = functools.partial(ExternalVerifier, samples=2000)
"""Fewer points than by default, which find no narrow windows."""


def draw(probs, u):
    return min(int((np.cumsum(probs) <= u * probs.sum()).sum()), int(np.flatnonzero(probs)[-1]))


def leviathan(p, q, drafts, uniforms):
    """Algorithm 1 of arXiv:2211.17192."""
    K = len(drafts)
    for i, x in enumerate(drafts):
        if uniforms[i] * q[i, x] >= p[i, x]:
            rest = np.maximum(p[i] - q[i], 0)
            return i, draw(rest if rest.sum() > 0 else p[i], uniforms[K])
    return K, draw(p[K], uniforms[K])


def no_residual(p, q, drafts, uniforms):
    accepted, _ = leviathan(p, q, drafts, uniforms)
    return accepted, draw(p[accepted], uniforms[-1])


def leviathan_rows(p, q, drafts, uniforms):
    """Of a batch, in numpy or jax.numpy."""
    xp = np if isinstance(p, np.ndarray) else jnp
    K = drafts.shape[1]
    take = [xp.take_along_axis(probs[:, :K], drafts[..., None], axis=2)[..., 0] for probs in (p, q)]
    accepted = xp.cumprod(uniforms[:, :K] * take[1] < take[0], axis=1).sum(axis=1)
    gap = xp.concatenate([xp.maximum(p[:, :K] - q, 0), p[:, K:]], axis=1)
    rest = xp.take_along_axis(gap, accepted[:, None, None], axis=1)[:, 0]
    cdf = xp.cumsum(rest, axis=1)
    token = (cdf <= uniforms[:, K, None] * cdf[:, -1:]).sum(axis=1)
    return accepted, xp.minimum(token, p.shape[2] - 1)


def by_generator(p, q, drafts, generator):
    return leviathan(p, q, drafts, generator.random(len(drafts) + 1))


def by_generator_rows(p, q, drafts, generator):
    return leviathan_rows(p, q, drafts, generator.random((len(p), drafts.shape[1] + 1)))


def match(p, q, drafts, uniforms):
    """Samples the target at each row and goes on while the draft agrees: a list of tokens."""
    emitted = []
    for row, u, x in zip(p, uniforms, [*drafts, PAD]):
        emitted.append(draw(row, u))
        if emitted[-1] != x:
            break
    return emitted


def case(corner="random", vocab=3, kind=DraftKind.SAMPLED):
    return make_case(corner, kind, CHAIN, vocab=vocab, seed=0)


def long_case(vocab, depth, K=2):
    p, q = (random_tables(np.random.default_rng(1), vocab=vocab, depth=depth) for _ in range(2))
    return Case("long", DraftKind.SAMPLED, TreeTemplate.chain(K), p, q)


def test_a_function_is_certified_exactly():
    report = specsparse.certify(few(leviathan))
    assert report.passed and not report.mutants
    assert report.certified == [("leviathan", CALLABLE)]
    assert {r.corner for r in report.results} == {*CORNERS, "random, 4 tokens by rounds"}
    assert all(r.power is None and r.tv <= r.bound < 1e-7 for r in report.results)
    assert report.finds is None
    assert "every uniform bisected" in report.table() and "float32" not in report.table()


@pytest.mark.parametrize("corner", CORNERS)
def test_the_distribution_is_that_of_the_rule(corner):
    c = case(corner)
    probs, drafts = round_probs(few(leviathan), [c], seed=0)[0]
    rule = output_probs(Rejection(), c.outcomes(), c.p, c.length)
    assert total_variation(probs, rule) <= driver_tv(CHAIN, vocab=3, steps=1 << 36)
    assert drafts == len(list(c.outcomes()))


def test_a_lossy_function_has_the_distribution_that_arithmetic_gives_it():
    p, q = (
        [np.array([0.6, 0.4]), *random_tables(np.random.default_rng(0), vocab=2, depth=1)[1:]],
        [np.array([0.8, 0.2])],
    )
    one = Case("one", DraftKind.SAMPLED, TreeTemplate.chain(1), p, q)
    probs, _ = round_probs(few(no_residual), [one], seed=0)[0]
    # 0 is accepted with 3/4 and 1 always; what is rejected, 0.2 of all, is drawn from p
    np.testing.assert_allclose(probs.sum(axis=1), [0.6 + 0.2 * 0.6, 0.2 + 0.2 * 0.4], atol=1e-9)
    result = max(measure_external(few(no_residual), vocab=3, gamma=1, seed=0), key=lambda r: r.tv)
    assert not result.holds and result.tv == total_variation(result.probs, result.target) > 0.1
    first = result.differences()[0]
    assert first.startswith("text ") and ", by p " in first


def test_a_batch_in_jax_and_float32_a_list_and_argmax_drafts():
    rows = few(jax.jit(leviathan_rows), arrays="jax", batched=True, name="rows")
    assert (rows.dtype, rows.exact, rows.randomness) == ("float32", True, "uniforms")
    for how in (rows, few(leviathan_rows, batched=True), few(match), few(leviathan, drafts=DraftKind.ONE_HOT)):
        results = measure_external(how, vocab=3, gamma=2, seed=0)
        assert all(r.holds for r in results), how.name
        assert max(r.tv for r in results) < (1e-5 if how.dtype == "float32" else 1e-8)
    assert measure_external(few(no_residual, drafts=DraftKind.ONE_HOT), vocab=3, gamma=1, seed=0)[0].tv > 0.04


def test_greedy_is_exact_at_temperature_0_alone():
    def argmax(p, q, drafts, uniforms):
        best = p.argmax(axis=2)
        accepted = np.cumprod(best[:, :-1] == drafts, axis=1).sum(axis=1)
        return accepted, best[np.arange(len(best)), accepted]

    assert specsparse.certify(few(argmax, batched=True, greedy=True)).passed
    report = specsparse.certify(few(argmax, batched=True))
    assert not report.passed and report.worst("argmax", CALLABLE).tv > 0.3


def test_sampling_parameters_of_the_callable():
    """Both distributions before truncation are handed over: the callable that truncates both keeps the distribution."""
    cut = keep_top(2)

    def both(p, q, drafts, uniforms):
        return leviathan(np.stack([*map(cut, p)]), np.stack([*map(cut, q)]), drafts, uniforms)

    def target_alone(p, q, drafts, uniforms):
        return leviathan(np.stack([*map(cut, p)]), q, drafts, uniforms)

    tvs = [
        max(
            r.tv
            for r in measure_external(
                few(f, target_transform=cut, draft_transform=cut, shortest=1), vocab=3, gamma=1, seed=0
            )
        )
        for f in (both, target_alone)
    ]
    assert tvs[0] < 1e-9 and tvs[1] > 0.03


def test_several_rounds_are_the_targets_chain():
    long = long_case(2, 3, K=1)
    probs, drafts = several_rounds(few(leviathan), long, 3, seed=0)
    assert drafts == 2 * (1 + 2 + 4)
    assert total_variation(probs, continuations(long.p, 3)[0]) < 1e-9
    wrong, _ = several_rounds(few(no_residual), long, 3, seed=0)
    [(once, _)] = round_probs(few(no_residual), [long], seed=0)
    assert total_variation(wrong, continuations(long.p, 3)[0]) > total_variation(once, continuations(long.p, 2)[0])


def test_a_generator_is_sampled_with_a_stated_power():
    report = specsparse.certify(ExternalVerifier(by_generator_rows, batched=True))
    assert report.passed and report.certified == [("by_generator_rows", SAMPLED)]
    for result in report.results:
        assert result.power.samples == 200_000 and result.bound == result.power.bound
        assert result.bound < result.power.finds < 0.016
        assert abs(result.probs.sum() - 1) < 1e-12
    assert report.finds == max(r.power.finds for r in report.results)


def test_samples_find_what_the_power_says():
    """Tokens so far off that the joint output has the total variation that is found with 95 %: 60 runs, 52 find it."""
    flat = [np.full((3,) * (d + 1), 1 / 3) for d in range(4)]
    even = Case("even", DraftKind.SAMPLED, TreeTemplate.chain(1), flat, flat)
    target = continuations(flat, 3)[0]
    can = power(target, 2000, cases=4)

    def off(by):
        return np.array([1 / 3 + by, 1 / 3 - by / 2, 1 / 3 - by / 2])

    def joint(by):
        return total_variation(np.einsum("a,b,c->abc", *[off(by)] * 3), target)

    by = np.linspace(0, 0.5, 5001)
    by = float(by[np.searchsorted([joint(x) for x in by], can.finds)])
    assert joint(by) == pytest.approx(can.finds, rel=1e-3)

    def skewed(p, q, drafts, generator):
        first = (np.cumsum(off(by)) <= generator.random((len(p), 1))).sum(axis=1)
        return np.zeros(len(p), int), np.minimum(first, 2)

    how = ExternalVerifier(skewed, batched=True, samples=2000)
    assert sum(total_variation(sampled_probs(how, even, 3, seed=s), target) > can.bound for s in range(60)) >= 52
    right = ExternalVerifier(by_generator_rows, batched=True, samples=2000)
    assert not any(total_variation(sampled_probs(right, even, 3, seed=s), target) > can.bound for s in range(60))


def test_power_grows_with_samples():
    target = np.full(27, 1 / 27)
    few, many = (power(target, n, cases=4) for n in (10_000, 1_000_000))
    assert few.finds > 9 * many.finds and many.finds < 0.007
    assert few.level == LEVEL / 4


@pytest.mark.parametrize(
    ("call", "arrays", "randomness"),
    [
        (lambda p, q, drafts, u: None, "numpy", "uniforms"),
        (lambda p, q, drafts, rng: None, "numpy", "generator"),
        (lambda p, q, drafts, key: None, "jax", "key"),
        (lambda p, q, drafts, seed: None, "numpy", "seed"),
        (lambda p, q, drafts: None, "numpy", "own"),
        (lambda *given: None, "numpy", "uniforms"),
    ],
)
def test_the_fourth_parameter_says_what_randomness_it_takes(call, arrays, randomness):
    assert ExternalVerifier(call, arrays=arrays).randomness == randomness


def test_seeds_and_keys_are_new_for_each_call():
    seen = []

    def by_seed(p, q, drafts, seed):
        seen.append(seed)
        return leviathan(p, q, drafts, np.random.default_rng(seed).random(3))

    sampled_probs(ExternalVerifier(by_seed, samples=50), long_case(2, 3), 2, seed=0)
    assert len(set(seen)) == len(seen) >= 50

    def by_key(p, q, drafts, key):
        return leviathan_rows(p, q, drafts, jax.random.uniform(key, (len(p), 3)))

    probs = sampled_probs(
        ExternalVerifier(by_key, arrays="jax", batched=True, samples=4000), long_case(2, 3), 2, seed=0
    )
    assert total_variation(probs, continuations(long_case(2, 3).p, 2)[0]) < 0.05


def trusting(trusted):
    """Accepts the drafts (place, token) untested that are `trusted`."""

    def verifier(p, q, drafts, uniforms):
        K = drafts.shape[1]
        uniforms[:, :K] = np.where(trusted(np.arange(K)[None], drafts), -1, uniforms[:, :K])
        return leviathan_rows(p, q, drafts, uniforms)

    return few(verifier, batched=True)


@pytest.mark.parametrize(
    ("trusted", "asked"),
    [(lambda i, x: i >= 2, {"vocab": 2, "gamma": 3}), (lambda i, x: x >= 3, {"vocab": 4, "gamma": 1})],
)
def test_fooled_by_no_length_and_no_token_that_was_asked_for(trusted, asked):
    """Asked for nothing, it tries one case of each."""
    assert not specsparse.certify(trusting(trusted), **asked).passed
    assert not specsparse.certify(trusting(trusted)).passed


def test_fooled_by_no_empty_draft():
    def lazy(p, q, drafts, uniforms):
        return leviathan(p, q, drafts, uniforms) if len(drafts) else [p[0].argmax()]

    def lazy_rows(p, q, drafts, generator):
        if drafts.shape[1]:
            return by_generator_rows(p, q, drafts, generator)
        return p[:, 0].argmax(axis=1)[:, None]

    for how in (few(lazy), ExternalVerifier(lazy_rows, batched=True, samples=20_000)):
        wrong = [r for r in specsparse.certify(how, gamma=1).results if not r.holds]
        assert wrong and {r.parents for r in wrong} == {()}
    report = specsparse.certify(few(lazy, shortest=1), vocab=2, gamma=2)
    assert report.passed and report.covered() == "2 tokens: chains of 1, 2"
    assert "covered (callable), and nothing beyond: 2 tokens: chains of 1, 2" in report.table()
    with pytest.raises(UserError, match="gamma=2 leaves none"):
        specsparse.certify(few(lazy, shortest=3), gamma=2)


def test_ties_are_not_struck_out_with_a_rejected_token():
    """Argmax drafts: p of the rejected token is found again by its value."""

    def by_value(p, q, drafts, uniforms):
        for i, x in enumerate(drafts):
            if uniforms[i] >= p[i, x]:
                rest = np.where(p[i] == p[i, x], 0, p[i])
                return i, draw(rest if rest.sum() > 0 else p[i], uniforms[-1])
        return len(drafts), draw(p[-1], uniforms[-1])

    def by_value_sampled(p, q, drafts, generator):
        return by_value(p, q, drafts, generator.random(len(drafts) + 1))

    for call in (by_value, by_value_sampled):
        report = specsparse.certify(few(call, drafts=DraftKind.ONE_HOT), gamma=1)
        wrong = {r.corner for r in report.results if not r.holds}
        assert wrong and all("tied" in corner for corner in wrong)


def test_ties_of_drawn_drafts_are_not_struck_out_with_a_rejected_token():
    """Of the residual whatever has the rejected token's p, or its q, is struck out, unless nothing is left."""

    def by_p(p, q, drafts, uniforms, looked_at=0):
        accepted, token = leviathan(p, q, drafts, uniforms)
        if accepted == len(drafts):
            return accepted, token
        rest, value = np.maximum(p[accepted] - q[accepted], 0), (p, q)[looked_at][accepted]
        kept = np.where(value == value[drafts[accepted]], 0, rest)
        return accepted, draw(kept if kept.sum() > 0 else rest, uniforms[len(drafts)])

    def by_q(p, q, drafts, uniforms):
        return by_p(p, q, drafts, uniforms, looked_at=1)

    def by_p_sampled(p, q, drafts, generator):
        return by_p(p, q, drafts, generator.random(2 * len(drafts) + 1))

    for call in (by_p, by_q, by_p_sampled):
        wrong = {r.corner for r in specsparse.certify(few(call), gamma=1).results if not r.holds}
        assert wrong and all("tied" in corner for corner in wrong)


@pytest.mark.parametrize("seed", cells(range(6), [0]))
def test_fooled_by_no_narrow_window_of_a_coin(seed):
    """1e-4 of the coin anywhere; and much less near the rule's own threshold."""

    def anywhere(p, q, drafts, uniforms):
        return (uniforms >= 0.6172) & (uniforms < 0.6173)

    def near(p, q, drafts, uniforms):
        above = uniforms - p[:, 0][np.arange(len(p)), drafts[:, 0]] / q[:, 0][np.arange(len(p)), drafts[:, 0]]
        return (above >= 1e-6) & (above < 3e-6)

    for window in (anywhere, near):

        def verifier(p, q, drafts, uniforms, window=window):
            inside = window(p, q, drafts, uniforms[:, 0]) if drafts.shape[1] else np.zeros(len(p), bool)
            return leviathan_rows(p, q, drafts, np.where(inside[:, None] & (np.arange(3) == 0), -1, uniforms))

        report = specsparse.certify(ExternalVerifier(verifier, batched=True, uniforms=3), vocab=2, gamma=1, seed=seed)
        assert not report.passed and report.window == pytest.approx(1.04e-4, rel=0.01)
        assert "is seen from 1e-04 on with 95%" in report.table()


def race(p, q, drafts, uniforms):
    """No threshold of single uniforms decides: the token with the smallest of -log(u) / p, of a batch."""
    return np.argmin(-np.log(1 - uniforms[:, : p.shape[2]]) / np.maximum(p[:, 0], 1e-300), axis=1)[:, None]


@pytest.mark.parametrize(
    ("call", "how", "words"),
    [
        (lambda p, q, x, u: 1 / 0, {}, "raised ZeroDivisionError"),
        (lambda p, q, x, u: (0, int(u[7] * 0)), {}, r"uniforms=n\) gives more than 3"),
        (lambda p, q, x, u: (0, int(p[99, 0])), {}, r"index 99 .* with size 2 \(\S+\)$"),  # uniforms are not to blame
        (lambda p, q, x, u: (5, 0), {}, r"returned \(5, 0\): return a tuple \(accepted 0..1"),
        (lambda p, q, x, u: (0, 3), {}, "each below 3"),
        (lambda p, q, x, u: [], {}, "a list of 1..2 tokens"),
        (lambda p, q, x, u: [0, -2], {}, "returned"),
        (lambda p, q, x, u: "x", {}, "returned 'x'"),
        (lambda p, q, x, u: (np.full(len(p), 2), np.zeros(len(p))), {"batched": True}, "returned"),
        (lambda p, q, x, u: np.full((len(p), 2), -1), {"batched": True}, "returned"),
        (lambda p, q, x, u: np.zeros((3, 1)), {"batched": True}, "returned"),
        (lambda p, q, x, u: sys.exit(3), {}, "raised SystemExit: 3"),
        (lambda p, q, x, u: (float("inf"), 0), {}, r"returned \(inf, 0\)"),
        (lambda p, q, x, u: (0.5, 0), {}, r"returned \(0.5, 0\)"),
        (lambda p, q, x, u: [float("nan")], {}, r"returned \[nan\]"),
        (lambda p, q, x, u: [0.5], {}, r"returned \[0.5\]"),
        (lambda p, q, x, u: np.full((len(p), 1), np.nan), {"batched": True}, "returned"),
        (lambda p, q, x, u: np.full((len(p), 2), 0.5), {"batched": True}, "returned"),
        (lambda p, q, x, u: [int(DICE.integers(3))], {}, "is no function of thresholds of its uniforms"),
        (race, {"uniforms": 3, "batched": True}, "is no function of thresholds of its uniforms"),
        (race, {"arrays": "numpi"}, "did you mean numpy"),
        (race, {"randomness": "dice"}, "randomness='dice' is unknown; valid: .* uniforms"),
        (race, {"drafts": DraftKind.WOR}, "drafts are a chain: one_hot, sampled$"),
        (race, {"samples": -1}, "samples=-1 must be"),
        (race, {"samples": 10**14}, "race: samples=100000000000000 must be"),
        (race, {"samples": True}, "samples=True must be a whole number"),
        (race, {"uniforms": 10**11}, "uniforms=100000000000 must be"),
        (
            lambda p, q: (0, 0),
            {},
            r"must be verifier\(p \[K\+1, V\], .*\) -> \(number of accepted drafts, next token\)$",
        ),
        (lambda p, q, x, parents, u: (0, 0), {}, "path of accepted indices, next token"),
        (
            lambda p, q, x, parents, u: ([1, 0], 0),
            {},
            r"parents int\[K\], uniforms \[n\]\) -> \(indices of",
        ),
        (lambda p, q, x, parents, u: ([7], 0), {}, "returned"),
        (race, {"uniforms": 1.5}, "uniforms=1.5 must be a whole number"),
        (lambda p, q, x, u: {"accepted": 1}, {}, "returned {'accepted': 1}"),
        (lambda p, q, x, u: [1j], {}, "returned"),
        (race, {"tree": True, "drafts": DraftKind.SAMPLED}, "drafts are of a tree"),
    ],
)
def test_what_cannot_be_certified_is_one_line(monkeypatch, call, how, words):
    monkeypatch.setattr(measured, "BOXES", 5)  # where thresholds do not settle it, five times as many do not either
    with pytest.raises(UserError, match=words) as caught:
        measure_external(few(call, **how), vocab=3, gamma=1, seed=0)
    assert "\n" not in str(caught.value)


def test_a_newcomer_s_crash_names_its_own_file_and_line():
    def crashes(p, q, drafts, uniforms):
        return np.concatenate([p, drafts])  # numpy's own lines are below this one

    with pytest.raises(UserError, match=r"^crashes raised ValueError: all the input arrays") as caught:
        specsparse.certify(crashes, vocab=2, gamma=1)
    assert str(caught.value).endswith(f"({__file__}:{crashes.__code__.co_firstlineno + 1})")
    with pytest.raises(UserError, match=r"^divmod raised TypeError: .* it must be divmod\(p \[K\+1, V\], q \[K, V\]"):
        specsparse.certify(divmod, vocab=2, gamma=1)  # of a function in C no line is known


def test_what_is_no_verifier_is_refused():
    with pytest.raises(UserError, match="3 is no verifier"):
        specsparse.certify(3)


def test_what_a_callable_writes_into_is_its_own():
    def writes(p, q, drafts, uniforms):
        found = leviathan(p, q, drafts, uniforms)
        p[:], q[:], drafts[:], uniforms[:] = 0, 0, 0, 0
        return found

    assert all(r.holds for r in measure_external(few(writes), vocab=3, gamma=1, seed=0))


def test_an_island_between_two_corners_is_found():
    """It accepts in the middle of the coin, where both corners reject: random points see it, and the box is cut."""

    def island(p, q, drafts, uniforms):
        return (1, 0) if 0.4 <= uniforms[0] < 0.6 else (0, 0)

    c = case(vocab=2)
    probs, _ = round_probs(few(island), [c], seed=0)[0]
    assert probs[1].sum() == pytest.approx(0.2 * c.q[0][1], abs=1e-9)


def test_a_report_is_one_line():
    report = specsparse.certify(few(leviathan), vocab=2, gamma=1)
    assert "holds" in repr(report) and "\n" not in repr(report) and len(repr(report)) < 120


def test_names_and_callables_in_one_report():
    report = specsparse.certify(["greedy", few(leviathan)], vocab=2, gamma=1, mutants=False, driver=False)
    assert report.passed and [name for name, _ in report.certified] == ["leviathan", "greedy"]
    assert "float64" in report.table()


def test_a_broken_callable_is_said_before_anything_is_enumerated(monkeypatch):
    monkeypatch.setattr(certify, "measure", lambda *_, **__: pytest.fail("a rule was enumerated first"))
    with pytest.raises(UserError, match="returned 3"):
        specsparse.certify(["greedy", lambda p, q, drafts, uniforms: 3])


def siblings(p, q, drafts, parents, uniforms):
    """Algorithm 2 of arXiv:2305.09781: the siblings one after the other, each against what the elder ones left of p."""
    at, path, owed = -1, [], p[0]
    for i, x in enumerate(drafts):
        if parents[i] == at and uniforms[i] * q[i, x] < owed[x]:
            path.append(i)
            at, owed = i, p[i + 1]
        elif parents[i] == at:
            rest = np.maximum(owed - q[i], 0)
            owed = rest / rest.sum() if rest.sum() > 0 else owed
    return path, draw(owed, uniforms[-1])


def p_after_rejection(p, q, drafts, parents, uniforms):
    path, _ = siblings(p, q, drafts, parents, uniforms)
    return path, draw(p[path[-1] + 1 if path else 0], uniforms[-1])


@pytest.mark.parametrize("kind", [DraftKind.IID, DraftKind.WOR, DraftKind.ONE_HOT])
def test_a_tree_has_the_distribution_of_our_rule(kind):
    how, bush = few(siblings, drafts=kind, samples=200), TreeTemplate.kary((2, 1) if kind is DraftKind.IID else (2,))
    assert how.tree and how.exact
    c = make_case("random", kind, bush, vocab=3 if kind is not DraftKind.IID else 2, seed=0)
    [(probs, drafts)] = round_probs(how, [c], seed=0)
    assert drafts == len(list(c.outcomes()))
    rule = output_probs(Rejection(), c.outcomes(), c.p, c.length)
    assert total_variation(probs, rule) <= driver_tv(bush, vocab=3, steps=1 << 36)


def test_trees_are_certified_by_what_they_accept_and_by_samples():
    lines = []
    report = specsparse.certify(few(siblings, samples=200), vocab=2, gamma=1, progress=lines.append)
    assert report.passed and "trees to 2 nodes and 2 siblings" in report.covered()
    assert len(lines) == 4 and lines[0] == "siblings: shape 1 of 4, 2 tokens, 2 drafts, 14 cases"
    assert max(r.tv for r in measure_external(few(p_after_rejection, samples=200), vocab=2, gamma=1, seed=0)) > 0.05

    def rows(p, q, drafts, parents, generator):
        u = generator.random((len(p), drafts.shape[1] + 1))
        paths, tokens = zip(*map(siblings, p, q, drafts, parents, u))
        return np.array([path + [PAD] * (4 - len(path)) for path in paths]), np.array(tokens)

    how = ExternalVerifier(rows, batched=True, drafts=DraftKind.WOR, samples=400)
    assert all(r.holds and r.part == SAMPLED for r in measure_external(how, vocab=3, gamma=2, seed=0))


def test_heat_before_the_callable_is_its_own_business():
    hot = tempered(2.0)
    how = few(leviathan, target_transform=hot, name="target's temperature forgotten")
    assert measure_external(how, vocab=3, gamma=1, seed=0)[0].tv > 0.05


def test_a_whole_number_of_numpy_is_one():
    assert type(few(race, samples=np.int64(500)).samples) is int


def test_a_callable_of_too_few_arguments_is_told_of_all():
    assert "uniforms [n]" in ExternalVerifier(lambda p, q: 0).signature
    assert "uniforms" not in ExternalVerifier(lambda p, q, drafts: 0).signature


@pytest.mark.parametrize("name", [":verify", "./mine:verify", "mine.py:verify", "mine:"])
def test_a_name_that_is_no_module_and_name_says_the_form(name, capsys):
    assert main(["certify", name]) == 2
    assert "write MODULE:NAME" in capsys.readouterr().err
