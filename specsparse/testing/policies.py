"""The contract of a draft-length policy, for anybody's own: `check_policy(MyPolicy(7))` is one line in a test."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.speculative.base import DraftContext, Verdict
from specsparse.speculative.policies.base import LawView, Policy
from specsparse.testing.drafting import draft_context
from specsparse.testing.verifiers import assert_lossless

BATCH, ROUNDS = 3, 4


def check_policy(policy: Policy) -> None:
    """Refuses a policy that breaks the contract of `policies.base`: budgets fit, rows are independent, the state keeps
    its structure, one compilation serves all rounds, and the text is not biased by what it drops.

    One that is not `one_hot_only` and drops drafted tokens is certified (`specsparse.certify`).

    Raises:
        AssertionError: says what is broken.
    """
    assert hash(policy) == hash(policy), "its hash changes"
    traces: list[int] = []

    def step(state: Any, ctx: DraftContext, verdict: Verdict, count_B: jax.Array) -> tuple:
        traces.append(len(ctx.length))
        budget_B = policy.budget(state, ctx)
        look = LawView(jnp.zeros_like(ctx.length), *(jnp.full(ctx.length.shape, x) for x in (0.5, 0.6, 1.0, 0.3)))
        keep_BG = jax.vmap(lambda n: policy.keep(state, jnp.full_like(count_B, n)), out_axes=1)(counts_G)
        return budget_B, policy.stop(state, look), keep_BG, policy.update(state, verdict, count_B)

    compiled, drops, counts_G = jax.jit(step), False, np.arange(policy.gamma + 1, dtype=np.int32)
    ctx = draft_context([[1], [2], [3]], capacity=4, budget=[0, 3, 100])
    state, alone, rng = policy.init(BATCH), [policy.init(1)] * BATCH, np.random.default_rng(1)
    for _ in range(ROUNDS):
        tested = rng.integers(0, 5, BATCH)
        verdict = _verdict(np.maximum(tested - rng.integers(0, 2, BATCH), 0), tested)
        count_B = jnp.array(np.where(tested > 0, 4, 0), jnp.int32)
        before = jax.tree.map(lambda x: (x.shape, x.dtype), state)
        *said, state = compiled(state, ctx, verdict, count_B)
        budget_B, stop_B, keep_BG = said
        assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == before, "its state changes its form"
        assert budget_B.dtype == keep_BG.dtype == jnp.int32, f"budget is {budget_B.dtype}, keep {keep_BG.dtype}: int32"
        assert stop_B.dtype == bool, f"stop is {stop_B.dtype}, not bool"
        most_B = jnp.minimum(ctx.budget, policy.gamma)
        assert ((budget_B >= 0) & (budget_B <= most_B)).all(), f"budget {budget_B} beyond 0..{most_B}"
        kept_BG = np.asarray(keep_BG)
        assert ((kept_BG >= 0) & (kept_BG <= counts_G)).all(), f"it keeps {kept_BG[0]} nodes of {counts_G}"
        drops = drops or bool((kept_BG < counts_G).any())
        for b in range(BATCH):
            one = jax.tree.map(lambda x, b=b: x[b : b + 1], (ctx, verdict, count_B))
            *own, alone[b] = compiled(alone[b], *one)
            same = all((x[0] == y[b]).all() for x, y in zip(own, said, strict=True))
            assert same, "what it says of a text depends on the batch around it"
    assert sorted(traces) == [1, BATCH], "it is compiled again for another round"
    if drops and not policy.one_hot_only:
        assert_lossless(policy)


def _verdict(accepted: np.ndarray, tested: np.ndarray) -> Verdict:
    """Counts are all that a policy reads."""
    accepted_B, tested_B = jnp.array(accepted, jnp.int32), jnp.array(tested, jnp.int32)
    return Verdict(None, accepted_B + 1, None, accepted_B, tested_B, None, None, None)  # type: ignore[arg-type]
