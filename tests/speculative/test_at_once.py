"""Native calls that judge and draw drafts in one go, against whole distributions: the same bits."""

import jax
import numpy as np
import pytest

from specsparse.engine.sampling.params import Truncation
from specsparse.engine.sampling.probs import REFERENCE
from specsparse.kernels.native import cpu
from specsparse.speculative.base import Draft
from specsparse.speculative.drafters.sources import DraftWeights, VocabMap
from specsparse.speculative.trees.template import TreeTemplate
from specsparse.speculative.verifiers import VERIFIERS
from tests.speculative.verdicts import verify, verify_rows

pytestmark = pytest.mark.skipif(not cpu.available(), reason="no native kernels")

B, K, V = 12, 3, 1300  # no multiple of a block of sums


def prob_rows(rng, rows):
    """Neutral numbers, truncations and greedy rows mixed."""
    pick = lambda *values: rng.choice(values, rows)  # noqa: E731
    return Truncation(
        pick(0.0, 0.6, 1.0, 1.3).astype(np.float32),
        pick(-np.inf, np.log(0.05)).astype(np.float32),
        pick(V, 40).astype(np.int32),
        pick(1.0, 0.9).astype(np.float32),
    )


def drafts(rng, logits_BnV, name):
    """Drawn from distributions near the target's, of all lengths; some that q could not have drawn."""
    near_BKV = logits_BnV[:, :K] + rng.normal(0, 0.7, (B, K, V))
    q_BKV = np.exp(near_BKV - near_BKV.max(axis=-1, keepdims=True))
    q_BKV = (q_BKV / q_BKV.sum(axis=-1, keepdims=True)).astype(np.float32)
    tokens = np.array([[rng.choice(V, p=q / q.sum()) for q in row.astype(np.float64)] for row in q_BKV], np.int32)
    q_BKV[0, 0] = 0
    q_BKV[1, 1, 7] = np.nan
    count = rng.integers(0, K + 1, B).astype(np.int32)
    count[:3] = K
    parents = np.array(TreeTemplate.chain(K).parents_array(B))
    if VERIFIERS[name].tree:
        parents[3:] = rng.integers(-1, np.arange(K), (B - 3, K))
    return Draft(tokens, parents, count, None if "delta" in name else q_BKV)


@pytest.mark.parametrize("name", ["token", "delta", "block", "tree_delta", "wor"])
def test_verdicts_on_logits(name):
    """The whole verdict is that on the same kernels' distributions, also where a row is invalid or one-hot."""
    verifier = VERIFIERS[name]

    @jax.jit
    def written_down(draft, logits_BnV, rows, coins_BK, u_B):
        x_RV, per_row = logits_BnV.reshape(-1, V), Truncation(*(a.repeat(K + 1) for a in rows))
        p_RV = jax.numpy.where(cpu.check(x_RV)[:, None], cpu.probs(x_RV, per_row), 0)
        p_BnV = p_RV.reshape(B, K + 1, V)
        return verify(verifier, draft, p_BnV, coins_BK=coins_BK, u_B=u_B, draw=REFERENCE.draw, alpha=True)

    @jax.jit
    def at_once(draft, logits_BnV, rows, coins_BK, u_B):
        return verify_rows(
            verifier, draft, logits_BnV.reshape(-1, V), rows, coins_BK=coins_BK, u_B=u_B, judge=cpu.judge, alpha=True
        )  # fmt: skip

    accepted = set()
    for seed in range(6):
        rng = np.random.default_rng(seed)
        logits_BnV = (3 * rng.standard_normal((B, K + 1, V))).astype(np.float32)
        draft = drafts(rng, logits_BnV, name)
        if draft.q is None:
            logits_BnV[np.arange(B)[:, None], draft.parents + 1, draft.tokens] = 12.0
        logits_BnV[2, 1, 5], logits_BnV[3, 0] = np.nan, -np.inf
        coins_BK, u_B = rng.random((B, K)).astype(np.float32) ** 2, rng.random((B, 4)).astype(np.float32)
        given = draft, logits_BnV, prob_rows(rng, B), coins_BK, u_B
        want, got = written_down(*given), at_once(*given)
        for field, x, y in zip(want._fields, want, got, strict=True):
            np.testing.assert_array_equal(x, y, err_msg=f"{field} of seed {seed}")
        accepted |= set(np.asarray(got.accepted).tolist())
        assert got.failed[3] and not got.failed[4:].any()
    assert accepted == set(range(K + 1))


def test_a_sequence_that_has_ended_is_not_looked_at():
    rng = np.random.default_rng(0)
    p_BnV = rng.dirichlet(np.ones(5), (2, K + 1)).astype(np.float32)
    tokens, coins = rng.integers(0, 5, (2, K)).astype(np.int32), np.zeros((2, K), np.float32)
    u = np.full((2, 4), 0.5, np.float32)

    def of(n_valid, p_BnV):
        found = cpu.judge(p_BnV.reshape(-1, 5), None, np.int32(n_valid), tokens, None, None, coins, u, whole=False)
        return [np.asarray(x) for x in found]

    both, broken = of([4, 3], p_BnV), p_BnV.copy()
    broken[0] = np.nan
    one = of([0, 3], broken)
    for x, y in zip(both, one, strict=True):
        np.testing.assert_array_equal(x[1], y[1])
    assert [x[0].tolist() for x in one] == [[-1] * K, 0, 0, 0, False, [0.0] * K]


@pytest.mark.parametrize("ids", [False, True])
def test_a_proposal_is_distribution_draw_and_widening(ids):
    rng = np.random.default_rng(ids)
    R, wide = 12, V + 200
    own = np.sort(rng.choice(wide, V, replace=False)).astype(np.int32) if ids else None
    vocab = VocabMap(wide, wide, V)

    @jax.jit
    def by_probs(x_RN, rows, u_RU):
        q_RN = cpu.probs(x_RN, rows)
        return cpu.draw(q_RN, u_RU), cpu.check(x_RN), vocab.widen(DraftWeights(ids=own), q_RN)

    at_once = jax.jit(lambda x, rows, u: cpu.propose(x, rows, u, own, wide))
    x_RN = (3 * rng.standard_normal((R, V))).astype(np.float32)
    x_RN[1, 3], x_RN[2] = np.inf, -np.inf
    given = x_RN, prob_rows(rng, R), rng.random((R, 4)).astype(np.float32)
    for want, got in zip(by_probs(*given), at_once(*given), strict=True):
        np.testing.assert_array_equal(want, got)
    shared = Truncation(*(a[4:5] for a in given[1]))
    same = Truncation(*(np.repeat(a, R) for a in shared))
    for want, got in zip(by_probs(x_RN, same, given[2]), at_once(x_RN, shared, given[2]), strict=True):
        np.testing.assert_array_equal(want, got)


def test_arrays_that_do_not_go_together_are_refused():
    """By one line, and no read beyond an array."""
    p, K1 = np.full((4, 5), 0.2, np.float32), np.zeros((1, 3), np.float32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="do not go together"):
        cpu.judge(p, None, np.int32([3]), np.zeros((1, 2), np.int32), None, None, K1, K1[0, :1], whole=True)
    rows = Truncation(np.ones(1, np.float32), np.zeros(1, np.float32), np.ones(1, np.int32), np.ones(1, np.float32))
    with pytest.raises(jax.errors.JaxRuntimeError, match="do not go together"):
        cpu.propose(p, rows, K1[0], None, 5)
    with pytest.raises(jax.errors.JaxRuntimeError, match="do not go together"):
        cpu.draw(p, K1[0])
