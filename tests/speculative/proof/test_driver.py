"""The certificate of what runs, and the test of that test."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from specsparse import kernels
from specsparse.engine.sampling import pipeline
from specsparse.engine.sampling.pipeline import REFERENCE, kernels_of
from specsparse.kernels.native import cpu
from specsparse.speculative.base import PAD, Draft, DraftKind, Verdict
from specsparse.speculative.proof import certify as certificate
from specsparse.speculative.proof.cases import make_case
from specsparse.speculative.proof.certify import cases, certify, measure_driver
from specsparse.speculative.proof.driver import (
    LANES,
    STEPS,
    Drafts,
    driver_probs,
    jitted,
    settle,
    sound,
    stack,
)
from specsparse.speculative.proof.exact import continuations, output_probs, total_variation
from specsparse.speculative.proof.mutants import DRIVER_MUTANTS, measure_mutant, scheduled
from specsparse.speculative.proof.results import DRIVER, MUTANT_TV, RULE, driver_tv
from specsparse.speculative.trees.template import TreeTemplate
from specsparse.speculative.verifiers import VERIFIERS, draft_rules, siblings
from specsparse.speculative.verify import native_judge
from tests.cells import cells
from tests.speculative.verdicts import verify

LOSSLESS = [name for name, v in VERIFIERS.items() if v.lossless]
EMPTY, CHAIN, BUSH = TreeTemplate.chain(0), TreeTemplate.chain(3), TreeTemplate.kary((2, 1))
FIRST_OF_EACH = list({m.wrong: name for name, m in reversed(DRIVER_MUTANTS.items())}.values())


@pytest.fixture
def retraced():
    """Drivers traced anew in the test, and forgotten after it."""
    jitted.cache_clear()
    yield
    jitted.cache_clear()


def _few_cases(verifier):
    """Of each kind an empty draft, and two cases of a draft that fills a chain's room or leaves some of a tree's."""
    some, shape = ("random", "truncated differently"), BUSH if verifier.tree else CHAIN
    every = [c for c in cases(verifier, vocab=3, gamma=3, seed=5) if c.name in some]
    return [c for c in every if c.template == shape or (c.template == EMPTY and c.name == "random")]


@pytest.mark.parametrize("name", LOSSLESS)
def test_what_runs_has_the_distribution_of_p(name):
    verifier = VERIFIERS[name]
    results = measure_driver(verifier, _few_cases(verifier), seed=0)
    assert {r.part for r in results} == {DRIVER}
    assert len(results) == 3 * len(verifier.kinds)
    assert all(r.holds for r in results), results
    assert max(r.tv for r in results) > 0 or verifier.greedy_only  # it is float32, not the rule again


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSLESS)
def test_every_case_of_what_runs(name):
    report = certify([name], mutants=False)
    assert report.passed, report.failures
    assert report.covered(name, DRIVER) == report.covered(name, RULE)


HANDED = [("token", False), ("block", False), ("match", False), ("tree_match", False), ("token", True), ("block", True)]


@pytest.mark.parametrize(("what", "at_once"), cells(HANDED, [("token", False), ("match", False), ("block", True)]))
def test_a_driver_that_is_handed_no_coins_fails_the_certificate(monkeypatch, retraced, what, at_once):
    """The rules stay as they are: only what the engine calls is wrong, jax's verdict or the kernels' in one call."""
    if at_once and not native_judge(VERIFIERS[what], kernels_of(kernels.get())):
        pytest.skip("no kernels have this verdict in one call")
    home, place = siblings if what == "token" else draft_rules, -1 if what == "match" else -2
    part = {"token": "walk", "block": "judge", "match": "match_chain", "tree_match": "follow"}[what]
    if at_once:
        home, part, place = cpu, "judge", 6
    elif VERIFIERS[what].needs_p:
        monkeypatch.setattr(pipeline, "kernels_of", lambda _: REFERENCE)
    right = getattr(home, part)

    def wrong(*given, **named):
        external = list(given)
        external[place] = given[place] * 0
        return right(*external, **named)

    monkeypatch.setattr(home, part, wrong)
    report = certify([what], vocab=2, gamma=1, mutants=False)
    assert not report.passed
    assert all("driver" in failure for failure in report.failures)
    assert report.worst(what).holds
    assert report.worst(what, DRIVER).tv > MUTANT_TV


@pytest.mark.parametrize("name", FIRST_OF_EACH)
def test_mutants_of_the_driver_are_caught(name):
    found = measure_mutant(name, seed=0)
    assert (found.part, found.caught) == (DRIVER, True), found


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in DRIVER_MUTANTS if name not in FIRST_OF_EACH])
def test_more_mutants_of_the_driver_are_caught(name):
    assert measure_mutant(name, seed=0).caught


def test_the_mutants_are_right_but_for_their_mistake():
    """Each of the four verifiers, on the mutants' own cases."""
    for name in ("token", "block", "match", "mss"):
        mutant = next(m for m in DRIVER_MUTANTS.values() if m.verifier == name)
        results = measure_driver(VERIFIERS[name], mutant.cases(range(3)), seed=0)
        assert all(r.holds for r in results)


@pytest.mark.parametrize("name", ["token", "block"])
def test_dsparks_schedule_is_right_where_it_does_not_look_ahead(name):
    """The same schedule as the mutant's, which stops at the first node that lowers the rate: drafts of 1 and 2."""
    verifier, tried = VERIFIERS[name], DRIVER_MUTANTS[f"looks_ahead_{name}"].cases(range(3))
    change, lengths = scheduled((1.0, 1.8, 2.05, 9.0), ahead=False), set()

    def driver(*given):
        draft, *others = change(*given)
        lengths.update(np.unique(draft.count).tolist())
        return jitted(verifier)(draft, *others)

    for (probs, _), case in zip(driver_probs(driver, verifier, tried, seed=0), tried, strict=True):
        wanted = continuations(case.p, case.length)[0]
        assert total_variation(probs, wanted) <= driver_tv(case.template, vocab=len(case.p[0]))
    assert lengths == {1, 2}


def test_the_tolerance_is_far_from_a_mutant_everywhere():
    for tree in (False, True):
        for template, vocab in [*certificate.shapes(vocab=6, gamma=3, tree=tree), (EMPTY, 6), (CHAIN, 6)]:
            assert driver_tv(template, vocab=vocab) < MUTANT_TV / 10


@pytest.mark.parametrize(("name", "template"), [("token", CHAIN), ("mss", BUSH)])
def test_the_distribution_is_that_of_the_rule(name, template):
    kind = DraftKind.IID if template is BUSH else DraftKind.SAMPLED
    tried = [make_case("random", kind, template, vocab=3, seed=s) for s in (1, 2)]
    for case, (probs, drafts) in zip(tried, driver_probs(jitted(VERIFIERS[name]), VERIFIERS[name], tried, seed=0)):
        rule = output_probs(VERIFIERS[name].rule, case.outcomes(), case.p, case.length)
        assert total_variation(probs, rule) <= driver_tv(template, vocab=3)
        assert drafts == len(list(case.outcomes()))


def test_boxes_hold_for_the_function_as_the_loop_calls_it():
    """Without `vmap`, every sequence of one batch in the middle of a box of its own."""
    verifier = VERIFIERS["mss"]
    tried = [make_case("random", DraftKind.IID, BUSH, vocab=3, seed=4)]
    drafts, _, _ = stack(tried, verifier, seed=0)
    spots = np.random.default_rng(0).random((*drafts.p.shape[:1], drafts.p.shape[1]), np.float32)
    spots = np.floor(spots * STEPS) / np.float32(STEPS)
    plain = jax.jit(functools.partial(verify, verifier))
    wanted = plain(*drafts, coins_BK=spots[:, :-1], u_B=spots[:, -1])
    index = np.resize(np.arange(len(spots)), LANES)
    paired = jax.tree.map(lambda a: a[index].reshape(LANES // 2, 2, *a.shape[1:]), drafts)
    got = jitted(verifier)(*paired, spots[index].reshape(LANES // 2, 2, -1))
    for field in ("tokens", "count", "nodes", "failed"):
        mine, theirs = np.asarray(getattr(got, field)), np.asarray(getattr(wanted, field))
        np.testing.assert_array_equal(mine.reshape(LANES, *mine.shape[2:]), theirs[index])


def _counted(accept):
    """A driver of one node: `accept` says whether it is, the last token is 1 from the tick 5 of its uniform on."""

    def driver(draft, p, uniforms):
        ticks = np.rint(uniforms * STEPS).astype(np.int64)
        ok, last = accept(ticks[..., 0]), (ticks[..., 1] >= 5).astype(int)
        tokens = np.stack([np.where(ok, draft.tokens[..., 0], last), np.where(ok, last, PAD)], axis=-1)
        nodes, accepted = np.where(ok, 0, PAD)[..., None], ok.astype(int)
        zeros = np.zeros(ok.shape)
        return Verdict(tokens, accepted + 1, nodes, accepted, accepted, zeros, zeros, zeros > 0)

    return driver


ONE_NODE = Drafts(
    Draft(np.full((1, 1), 7, np.int32), np.full((1, 1), -1, np.int32), np.ones(1, np.int32)),
    np.zeros((1, 2, 3), np.float32),
)


def test_boxes_are_exact_to_the_tick():
    found = settle(_counted(lambda tick: tick < 1_234_567), ONE_NODE, seed=0)
    volume = {tuple(t): v for t, v in zip(found.tokens.tolist(), found.volume)}
    accepted = 1_234_567 / STEPS
    assert volume == {
        (7, 0): accepted * 5 / STEPS,
        (7, 1): accepted * (1 - 5 / STEPS),
        (0, PAD): (1 - accepted) * 5 / STEPS,
        (1, PAD): (1 - accepted) * (1 - 5 / STEPS),
    }
    assert sound(ONE_NODE, found).all()


def test_a_verdict_that_is_no_function_of_the_uniforms_ends_and_lacks_mass():
    rng = np.random.default_rng(0)
    found = settle(_counted(lambda tick: rng.random(tick.shape) < 0.5), ONE_NODE, seed=0)
    assert found.volume.sum() < 0.99


def test_what_both_corners_hide_is_found_inside():
    many = jax.tree.map(lambda a: np.repeat(a, 64, axis=0), ONE_NODE)
    found = settle(_counted(lambda tick: (tick >= STEPS // 4) & (tick < 3 * STEPS // 4)), many, seed=0)
    accepted = np.bincount(found.draft, weights=found.volume * (found.count == 2), minlength=64)
    assert set(accepted.round(5)) == {0.0, 0.5}  # the box below the token's edge has a point of its own, and no size
    assert 16 < (accepted > 0.25).sum() < 64  # every other point is drawn there


def test_verdicts_that_cannot_be_committed_are_unsound():
    found = settle(_counted(lambda tick: tick < STEPS // 2), ONE_NODE, seed=0)
    none = ONE_NODE._replace(draft=ONE_NODE.draft._replace(count=np.zeros(1, np.int32)))
    for drafts, changed in [
        (none, {}),  # a node that does not exist
        (ONE_NODE, {"tokens": np.where(found.tokens == 7, 6, found.tokens)}),  # not the node's token
        (ONE_NODE, {"tokens": np.where(found.tokens == 1, -1, found.tokens)}),
        (ONE_NODE, {"count": found.count + 1}),
        (ONE_NODE, {"count": found.count * 0}),
        (ONE_NODE, {"failed": found.failed + 1}),
    ]:
        assert not sound(drafts, found._replace(**changed)).all()


def test_a_driver_over_its_bound_fails_the_report():
    report = certify(["token"], vocab=2, gamma=1, mutants=False)
    assert report.passed
    assert {part for _, part in report.certified} == {RULE, DRIVER}
    *others, last = report.results
    for tv in (2 * last.bound, float("nan")):
        broken = dataclasses.replace(report, results=(*others, dataclasses.replace(last, tv=tv)))
        assert broken.failures == [f"token (driver): {last.corner}"]
    assert "the jitted float32 verdict that the decode loop calls" in report.table()
    assert {part for _, part in certify(["token"], vocab=2, gamma=1, mutants=False, driver=False).certified} == {RULE}
