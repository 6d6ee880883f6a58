"""A draft-length policy: every draft that it leaves of a drawn chain, verified by the driver, against the target.

A policy keeps the target's distribution with every lossless verifier if its choice does not depend on the tokens that
it drops. That is measured, in one round after each of a few histories: `stop` is asked before each node as a model
drafter asks it, `keep` when the chain has ended, and the driver verifies the rest.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from specsparse.engine.pytree import ABSENT
from specsparse.errors import UserError
from specsparse.speculative.base import DraftContext, DraftKind, Verdict
from specsparse.speculative.policies.base import Policy, draft_view
from specsparse.speculative.proof.cases import CORNERS, Case, make_case
from specsparse.speculative.proof.driver import driver_probs, jitted
from specsparse.speculative.proof.exact import Outcome, continuations
from specsparse.speculative.proof.results import DRIVER, Result, driver_tv
from specsparse.speculative.trees.template import TreeTemplate
from specsparse.speculative.verifiers import get_verifier

MOST_NODES = 7
"""Longest draft that is enumerated: 2^7 of them over two tokens, 3^3 over three if the draft has at most three."""

HISTORIES: Mapping[str, tuple[bool, ...]] = {"": (), ", after a draft": (True,), ", after refusals": (False,) * 4}
"""Rounds before the one that is measured, of which each draft was accepted whole or refused at its first token."""


@dataclasses.dataclass(frozen=True)
class PolicyCase(Case):
    """A case whose drafts are as long as a policy lets them be; `history` as in `HISTORIES`. If it is `predicted`, the
    drafter has a confidence head, which is right."""

    policy: Policy
    history: tuple[bool, ...]
    predicted: bool

    def outcomes(self) -> Iterator[Outcome]:
        """Every draft of the whole chain, cut to the nodes that the policy verifies."""
        # Nodes that the policy verifies of each chain; `drafters.chain` asks it likewise.
        V, K, policy = len(self.q[0]), self.template.size, self.policy
        tokens_KN = np.indices((V,) * K).reshape(K, -1)
        N = tokens_KN.shape[1]
        state, count_N, zero_N = self._state(N), jnp.zeros((N,), jnp.int32), jnp.zeros((N,), jnp.int32)
        ctx = DraftContext(zero_N[:, None], zero_N + 1, zero_N + K, jnp.zeros((N, 2), jnp.uint32), zero_N, zero_N)
        budget_N, last_N, live_N = policy.budget(state, ctx), jnp.ones((N,), jnp.float32), jnp.ones((N,), bool)
        for i in range(K):
            q_NV = np.broadcast_to(self.q[i][tuple(tokens_KN[:i])], (N, V)).astype(np.float32)
            live_N = live_N & (count_N < budget_N)
            if policy.needs:
                view = draft_view(jnp.asarray(q_NV), depth_B=count_N, last_B=last_N, needs=policy.needs)
                if self.predicted:
                    p_NV = np.broadcast_to(self.p[i][tuple(tokens_KN[:i])], (N, V))
                    view = view._replace(confidence=jnp.asarray(np.minimum(p_NV, q_NV).sum(axis=1), jnp.float32))
                live_N = live_N & ~policy.stop(state, view)
            last_N = jnp.asarray(q_NV[np.arange(N), tokens_KN[i]])
            count_N = count_N + live_N.astype(jnp.int32)
        kept_N = jnp.clip(policy.keep(state, count_N), 0, count_N)
        kept = np.asarray(kept_N, np.int32).reshape((V,) * K)
        for outcome in super().outcomes():
            yield outcome._replace(draft=outcome.draft._replace(count=kept[tuple(outcome.draft.tokens)]))

    def _state(self, N: int) -> Any:
        state, drafted = self.policy.begin(jnp.ones((N,), jnp.int32)), jnp.full((N,), self.template.size, jnp.int32)
        for whole in self.history:
            accepted, tested = (drafted, drafted) if whole else (drafted * 0, drafted * 0 + 1)
            said = Verdict(ABSENT, accepted + 1, ABSENT, accepted, tested, ABSENT, ABSENT, ABSENT)
            state = self.policy.update(state, said, drafted)
        return state


def measure_policy(policy: Policy, *, seed: int) -> list[Result]:
    """Total variation from plain sampling of one round by the driver, corner by corner and history by history.

    Drafts are drawn ones; of a policy that is `one_hot_only`, one-hot ones.
    """
    if policy.gamma > MOST_NODES:
        raise UserError(
            f"policy={policy.name}: certify enumerates every draft, so gamma={policy.gamma} must be at most "
            f"{MOST_NODES}: certify the same policy with a smaller gamma"
        )
    kind = DraftKind.ONE_HOT if policy.one_hot_only else DraftKind.SAMPLED
    template, vocab = TreeTemplate.chain(policy.gamma), 3 if policy.gamma <= 3 else 2
    verifier = get_verifier("delta" if policy.one_hot_only else "token")  # `match` would forgive everything
    tried = []
    for corner in CORNERS:
        made = make_case(corner, kind, template, vocab=vocab, seed=seed)
        for words, history in HISTORIES.items():
            for predicted in (False, True)[: 1 + ("confidence" in policy.needs)]:
                name = corner + words + (", confidence predicted" if predicted else "")
                tried.append(PolicyCase(name, kind, template, made.p, made.q, policy, history, predicted))
    found = []
    for case, (probs, drafts) in zip(tried, driver_probs(jitted(verifier), verifier, tried, seed=seed)):
        target, bound = continuations(case.p, case.length)[0], driver_tv(template, vocab=vocab)
        of = {"drafts": drafts, "part": DRIVER, "bound": bound}
        found.append(Result.from_probs(f"policy {policy.name}", True, case, probs, target, **of))
    return found
