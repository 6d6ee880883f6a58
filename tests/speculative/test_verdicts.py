"""The case list of rejection samplers, through the engine's entry."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsparse.engine.sampling.pipeline import kernels_of
from specsparse.engine.sampling.probs import REFERENCE
from specsparse.kernels import get
from specsparse.speculative.base import PAD, Draft
from specsparse.speculative.trees.template import TreeTemplate
from specsparse.speculative.verifiers import VERIFIERS
from specsparse.speculative.verifiers.draft_rules import match_verdict
from specsparse.speculative.verify import Noise, Target, native_judge, of_nothing
from tests.cells import cells
from tests.speculative.verdicts import verify, verify_rows

NEEDS_P = [name for name, v in VERIFIERS.items() if v.needs_p]
CHAINS = ["token", "delta", "block"]
# Most tests share one shape, 4 sequences of 3 nodes over 5 tokens, and so one program of each verifier.
f32 = functools.partial(np.asarray, dtype=np.float32)
i32 = functools.partial(np.asarray, dtype=np.int32)


@functools.cache
def compiled(name, alpha=False):
    return jax.jit(functools.partial(verify, VERIFIERS[name], alpha=alpha, draw=REFERENCE.draw))


@functools.cache
def at_once(name, alpha=False):
    """The verdict by this machine's kernels in one call, or None where they have none for this verifier."""
    ours = kernels_of(get())
    if not native_judge(VERIFIERS[name], ours):
        return None

    def run(draft, p, *, coins_BK, u_B):
        return verify_rows(
            VERIFIERS[name], draft, p.reshape(-1, p.shape[-1]), None, coins_BK=coins_BK, u_B=u_B, judge=ours.judge,
            alpha=alpha,
        )  # fmt: skip

    return jax.jit(run)


def spikes(tokens, vocab):
    """Distributions that are 1 at the given tokens."""
    return f32(np.eye(vocab)[np.asarray(tokens)])


def chain(tokens, *, count=None, q=None):
    tokens = i32(tokens)
    batch, K = tokens.shape
    counts = i32([K] * batch) if count is None else i32(count)
    return Draft(tokens, TreeTemplate.chain(K).parents_array(batch), counts, q)


def run(name, draft, p, *, coins=0.5, u=0.5, alpha=False):
    batch, K = draft.tokens.shape
    coins = np.broadcast_to(f32(coins), (batch, K))
    u = np.full((batch, 4), u, np.float32)
    verdict = compiled(name, alpha)(draft, p, coins_BK=coins, u_B=u)
    if at_once(name) is not None:
        same(at_once(name, alpha)(draft, p, coins_BK=coins, u_B=u), verdict)
    return jax.tree.map(np.asarray, verdict)


def same(a, b):
    """All of two verdicts, bit for bit."""
    for field, x, y in zip(a._fields, a, b, strict=True):
        np.testing.assert_array_equal(x, y, err_msg=field)


def with_q(name, draft, vocab):
    """The draft as this verifier takes it: one-hot distributions written out unless it reads none."""
    return draft if "delta" in name else draft._replace(q=spikes(draft.tokens, vocab))


@pytest.mark.parametrize("name", NEEDS_P)
def test_perfect_match(name):
    verdict = run(name, with_q(name, chain([[1, 2, 3]] * 4), 5), spikes([[1, 2, 3, 4]] * 4, 5))
    np.testing.assert_array_equal(verdict.tokens, [[1, 2, 3, 4]] * 4)
    assert verdict.accepted[0] == 3 == verdict.tested[0]


@pytest.mark.parametrize("name", NEEDS_P)
def test_mismatches(name):
    draft = with_q(name, chain([[1, 2, 3], [1, 0, 3], [0, 2, 0], [1, 2, 0]]), 5)
    verdict = run(name, draft, spikes([[4, 2, 3, 1], [1, 4, 3, 1], [4, 4, 4, 4], [1, 2, 4, 0]], 5))
    np.testing.assert_array_equal(
        verdict.tokens, [[4, PAD, PAD, PAD], [1, 4, PAD, PAD], [4, PAD, PAD, PAD], [1, 2, 4, PAD]]
    )
    np.testing.assert_array_equal(verdict.count, [1, 2, 1, 3])
    np.testing.assert_array_equal(verdict.nodes, [[PAD] * 3, [0, PAD, PAD], [PAD] * 3, [0, 1, PAD]])
    np.testing.assert_array_equal(verdict.tested, [1, 2, 1, 3])


@pytest.mark.parametrize("name", NEEDS_P)
def test_empty_and_short_drafts(name):
    draft = with_q(name, chain([[1, 2, 3]] * 4, count=[0, 1, 2, 3]), 5)
    verdict = run(name, draft, spikes([[1, 2, 3, 4]] * 4, 5))
    np.testing.assert_array_equal(verdict.tokens, [[1, PAD, PAD, PAD], [1, 2, PAD, PAD], [1, 2, 3, PAD], [1, 2, 3, 4]])
    np.testing.assert_array_equal(verdict.tested, [0, 1, 2, 3])


nothing = jax.jit(of_nothing)


@pytest.mark.parametrize("name", NEEDS_P)
def test_nothing_drafted_is_the_verdict_on_empty_drafts(name):
    """What the loop asks where nobody drafted; a row that is no distribution fails here as there."""
    p = np.random.default_rng(3).dirichlet(np.ones(5), size=(4, 4)).astype(np.float32)
    p[1, 0], p[2, 0, 3] = 0.0, np.nan
    draft = with_q(name, chain([[1, 2, 3]] * 4, count=[0] * 4), 5)
    alone = nothing(draft, f32(p[:, 0]), f32([0.7] * 4))
    jax.tree.map(np.testing.assert_array_equal, alone, run(name, draft, f32(p), u=0.7))
    np.testing.assert_array_equal(alone.failed, [False, True, True, False])


TREES = ["tree_delta", "mss", "kseq", "typical", "threshold"]


# Argmax and drawn drafts by rules that keep the distribution, and one that does not.
@pytest.mark.parametrize("name", cells(TREES, ["tree_delta", "kseq", "typical"]))
def test_second_branch_is_taken_and_nodes_beyond_count_are_not(name):
    draft = Draft(i32([[0, 1, 3]] * 4), i32([[-1, -1, 1]] * 4), i32([3, 3, 2, 2]), None)
    verdict = run(name, with_q(name, draft, 5), spikes([[1, 4, 3, 2]] * 4, 5), coins=0.4)
    np.testing.assert_array_equal(verdict.tokens, [[1, 3, 2, PAD]] * 2 + [[1, 3, PAD, PAD]] * 2)
    np.testing.assert_array_equal(verdict.nodes, [[1, 2, PAD]] * 2 + [[1, PAD, PAD]] * 2)


@pytest.mark.parametrize("name", ["tree_delta", "mss", "wor", "kseq", "threshold"])
def test_duplicate_siblings(name):
    draft = Draft(i32([[1, 1, 1]] * 4), TreeTemplate.kary((3,)).parents_array(4), i32([3] * 4), None)
    p = f32(np.array([[[0.5, 0.2, 0.3, 0.0, 0.0]] * 4] * 4))
    verdict = run(name, with_q(name, draft, 5), p, coins=0.99, u=0.99)
    np.testing.assert_array_equal(verdict.tokens, [[2, PAD, PAD, PAD]] * 4)


MASKED = [(name, vocab) for name in ("token", "block") for vocab in (100, 8193, 10000)]


@pytest.mark.parametrize(("name", "vocab"), cells(MASKED, [m for m in MASKED if m[1] == 8193]))
def test_masks_are_never_violated(name, vocab):
    rng = np.random.default_rng(vocab)
    batch, K = 16, 3
    p, q = (rng.dirichlet(np.full(vocab, 0.05), size=(batch, n)) for n in (K + 1, K))
    p[:, :, rng.random(vocab) < 0.7] = 0
    p[:, :, 0] += 1e-3
    p /= p.sum(axis=-1, keepdims=True)
    tokens = [[rng.choice(vocab, p=q[b, i]) for i in range(K)] for b in range(batch)]
    verdict = run(name, chain(tokens, q=f32(q)), f32(p), coins=rng.random((batch, K)), u=0.999)
    assert not verdict.failed.any()
    for b in range(batch):
        for i in range(int(verdict.count[b])):
            assert p[b, i, verdict.tokens[b, i]] > 0


@pytest.mark.parametrize("vocab", cells([49152, 151936], [151936]))
def test_large_vocabularies(vocab):
    rng = np.random.default_rng(0)
    q = f32(rng.dirichlet(np.full(vocab, 0.01), size=(1, 2)))
    p = f32(rng.dirichlet(np.full(vocab, 0.01), size=(1, 3)))
    x = int(np.argmax(np.asarray(q[0, 0]) - np.asarray(p[0, 0])))
    verdict = run("token", chain([[x, 0]], q=q), p, coins=0.9999, u=0.9999)
    token = int(verdict.tokens[0, 0])
    assert verdict.accepted[0] == 0
    assert p[0, 0, token] > q[0, 0, token]


@pytest.mark.parametrize("name", CHAINS)
def test_equal_distributions_accept_everything(name):
    for seed in range(8):
        p = np.random.default_rng(seed).dirichlet(np.ones(5), size=(4, 4))
        draft = chain(np.argmax(p[:, :3], axis=-1))
        if name == "delta":
            p[:, :3] = np.asarray(spikes(draft.tokens, 5))
        else:
            draft = draft._replace(q=f32(p[:, :3]))
        verdict = run(name, draft, f32(p), coins=1 - 2**-20)
        assert (verdict.accepted == 3).all()
        assert not verdict.failed.any()


@pytest.mark.parametrize("name", NEEDS_P)
def test_broken_p_fails_the_sequence_and_no_other(name):
    p = np.asarray(spikes([[1, 2, 3, 4]] * 4, 5)).copy()
    p[0, 0], p[1, 2], p[2, 3] = np.nan, 0.0, np.nan
    verdict = run(name, with_q(name, chain([[1, 2, 3]] * 4), 5), f32(p))
    # `block` stops before a position it cannot judge, and the next round fails there; the others fail on reaching it.
    np.testing.assert_array_equal(verdict.failed, [True, name != "block", True, False])
    np.testing.assert_array_equal(verdict.tokens[3], [1, 2, 3, 4])
    assert ((verdict.tokens >= PAD) & (verdict.tokens < 5)).all()


@pytest.mark.parametrize("name", ["token", "mss", "wor", "kseq", "block"])
@pytest.mark.parametrize("bad", [np.nan, 0.0])
def test_broken_q_is_refused_and_p_is_owed_in_full(name, bad):
    p = f32(np.array([[[0.5, 0.2, 0.3, 0.0, 0.0]] * 4] * 4))
    draft = chain([[1, 2, 0]] * 4, q=f32(np.full((4, 3, 5), bad)))
    for u, token in [(0.0, 0), (0.6, 1), (0.8, 2)]:
        verdict = run(name, draft, p, coins=0.0, u=u)
        np.testing.assert_array_equal(verdict.tokens, [[token, PAD, PAD, PAD]] * 4)
        assert not verdict.failed.any()


# `delta` and `block` judge chains as `token` does, one draft after the other.
@pytest.mark.parametrize("name", cells(["token", "delta", "kseq", "block"], ["token", "kseq"]))
def test_rows_do_not_depend_on_their_neighbours_and_runs_repeat(name):
    rng = np.random.default_rng(1)
    p = f32(rng.dirichlet(np.ones(1100), size=(5, 4)))
    q = f32(rng.dirichlet(np.ones(1100), size=(5, 3)))
    draft = chain(np.argmax(np.asarray(p[:, :3] * q), axis=-1))
    draft = draft if "delta" in name else draft._replace(q=q)
    coins, u = f32(rng.random((5, 3)) ** 2), f32(rng.random((5, 4)))
    together = compiled(name)(draft, p, coins_BK=coins, u_B=u)
    again = compiled(name)(draft, p, coins_BK=coins, u_B=u)
    jax.tree.map(np.testing.assert_array_equal, together, again)
    for row in (0, 4):
        at = [row] * (1 if name == "token" else 5)  # the others among copies: tests/testing has them alone
        own = jax.tree.map(lambda x, at=at: np.asarray(x)[at], (draft, p, coins, u, together))
        same(own[-1], compiled(name)(*own[:2], coins_BK=own[2], u_B=own[3]))


def test_match_follows_the_targets_tokens():
    template = TreeTemplate.kary((2, 2))
    draft = Draft(i32([[5, 6, 1, 2, 3, 4]] * 5), template.parents_array(5), i32([6, 6, 6, 6, 0]), None)
    target = i32(
        [
            [6, 0, 0, 0, 0, 0, 0],  # second branch; nothing fits below row 2
            [6, 0, 4, 0, 0, 0, 9],  # down to a leaf, then the bonus
            [7, 1, 1, 1, 1, 1, 1],
            [5, 1, 1, 8, 1, 1, 1],
            [5, 1, 1, 8, 1, 1, 1],
        ]
    )
    verdict = jax.jit(match_verdict)(draft, target)
    np.testing.assert_array_equal(
        verdict.tokens[:, :4], [[6, 0, -1, -1], [6, 4, 9, -1], [7, -1, -1, -1], [5, 1, 8, -1], [5, -1, -1, -1]]
    )
    np.testing.assert_array_equal(verdict.nodes[:, :2], [[1, -1], [1, 5], [-1, -1], [0, 2], [-1, -1]])
    np.testing.assert_array_equal(verdict.tested, [2, 2, 1, 2, 0])
    assert not verdict.failed.any()


def test_match_fails_on_a_missing_target_token():
    verdict = jax.jit(match_verdict)(chain([[1, 2]]), i32([[1, -1, 0]]))
    assert bool(verdict.failed[0])
    np.testing.assert_array_equal(verdict.tokens, [[1, 0, PAD]])


@pytest.mark.parametrize("nodes", [0, 1, 5])
def test_a_chain_needs_no_walk(nodes):
    """All of the verdict is the same without one: short and empty drafts, missing target tokens."""
    rng = np.random.default_rng(nodes)
    tokens, target = rng.integers(0, 2, (300, nodes)), rng.integers(-1, 2, (300, nodes + 1))
    target = np.where(rng.random(target.shape) < 0.6, abs(target), target)
    draft = chain(tokens, count=rng.integers(0, nodes + 1, 300))
    walked, read = (jax.jit(functools.partial(match_verdict, tree=t))(draft, i32(target)) for t in (True, False))
    for name, a, b in zip(walked._fields, walked, read, strict=True):
        np.testing.assert_array_equal(a, b, err_msg=name)


def test_match_takes_the_first_of_equal_siblings():
    draft = Draft(i32([[3, 3, 1]]), i32([[-1, -1, 1]]), i32([3]), None)
    verdict = jax.jit(match_verdict)(draft, i32([[3, 1, 1, 1]]))
    np.testing.assert_array_equal(verdict.tokens, [[3, 1, PAD, PAD]])
    np.testing.assert_array_equal(verdict.nodes, [[0, PAD, PAD]])


def test_alpha_is_the_chance_before_the_token_is_known():
    p = np.array([[[0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [1 / 3] * 3]])
    q = np.array([[[0.2, 0.3, 0.5], [0.3, 0.3, 0.4]]])
    draft = chain([[0, 0]], q=f32(q))
    overlap = np.minimum(p[:, :2], q).sum(axis=-1)[0]
    verdict = run("token", draft, f32(p), coins=[[0.0, 0.99]], alpha=True)
    assert verdict.tested[0] == 2
    assert float(verdict.alpha[0]) == pytest.approx(overlap.sum())
    assert float(verdict.alpha_var[0]) == pytest.approx((overlap * (1 - overlap)).sum())
    early = run("delta", draft._replace(q=None), f32(p), coins=0.99, alpha=True)
    assert early.tested[0] == 1
    assert float(early.alpha[0]) == pytest.approx(0.5)

    def matched(draft, p, target):
        return VERIFIERS["match"].rule.verdict(draft, Target(p, target, alpha=True), Noise(None, None))

    match = jax.jit(matched)(draft, f32(p), i32([[0, 1, 1]]))
    assert float(match.alpha[0]) == pytest.approx((p[:, :2] * q).sum())
    unasked = with_q("token", chain([[1, 2, 3]] * 4), 5)
    assert (run("token", unasked, spikes([[1, 2, 3, 4]] * 4, 5)).alpha == 0).all()


def test_one_compilation_serves_every_draft():
    count = 0

    def traced(draft, p):
        nonlocal count
        count += 1
        return verify(VERIFIERS["mss"], draft, p, coins_BK=jnp.full((1, 4), 0.5), u_B=jnp.full((1,), 0.5))

    step, p = jax.jit(traced), spikes([[1, 2, 3, 4, 0]], 5)
    for parents in ((-1, 0, 1, 2), (-1, -1, 0, 1), (-1, -1, -1, -1)):
        for nodes in range(5):
            draft = Draft(i32([[1, 2, 3, 4]]), i32([parents]), i32([nodes]), spikes([[1, 2, 3, 4]], 5))
            step(draft, p)
    assert count == 1
