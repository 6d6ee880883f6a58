"""A drafter under a draft-length policy: the policy sets each round's budget and learns from each verdict."""

import dataclasses
from operator import attrgetter
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specsparse.engine.pytree import Pytree
from specsparse.errors import UserError
from specsparse.speculative.base import DraftContext, Drafted, Drafter, Feedback
from specsparse.speculative.drafters.lookup import Either
from specsparse.speculative.drafters.model_drafter import ModelDrafter
from specsparse.speculative.drafters.slem import StringDrafter
from specsparse.speculative.loop import check_drafted, check_state, traced
from specsparse.speculative.policies.base import Policy, check_policy


class PolicyState(NamedTuple):
    """The drafter's state, the policy's, and int32[B], rounds in which the policy drafted nothing."""

    inner: Pytree
    policy: Pytree
    off: jax.Array


@dataclasses.dataclass(frozen=True)
class WithPolicy(Drafter):
    """`drafter`, but as long a draft as `policy` says. For policies that need not see the draft's distributions.

    Attributes:
        drafter: what proposes.
        policy: how much.
    """

    drafter: Drafter
    policy: Policy

    kind = property(attrgetter("drafter.kind"))
    max_nodes = property(attrgetter("drafter.max_nodes"))
    max_depth = property(attrgetter("drafter.max_depth"))
    tree = property(attrgetter("drafter.tree"))
    wants_hidden = property(attrgetter("drafter.wants_hidden"))

    def init(self, params: Pytree, ctx: DraftContext, *, hidden: jax.Array | None = None) -> PolicyState:
        batch = ctx.length.shape[0]
        with traced(self.drafter, "init"):
            inner = self.drafter.init(params, ctx, hidden=hidden)
        return PolicyState(inner, self.policy.init(batch), jnp.zeros((batch,), jnp.int32))

    def draft(self, params: Pytree, state: PolicyState, ctx: DraftContext) -> Drafted:
        """The drafter's draft on the policy's budget; one that is too short is dropped (one-hot drafts only)."""
        budget_B = self.policy.budget(state.policy, ctx)
        with traced(self.drafter, "draft"):
            drafted = self.drafter.draft(params, state.inner, ctx._replace(budget=budget_B))
        check_drafted(self.drafter, drafted, ctx)
        kept_B = self.policy.keep(state.policy, drafted.draft.count)
        off_B = state.off + ((ctx.budget > 0) & (budget_B == 0)).astype(jnp.int32)
        return drafted._replace(
            draft=drafted.draft._replace(count=kept_B), state=PolicyState(drafted.state, state.policy, off_B)
        )

    def commit(self, params: Pytree, state: PolicyState, ctx: DraftContext, feedback: Feedback) -> PolicyState:
        with traced(self.drafter, "commit"):
            inner = self.drafter.commit(params, state.inner, ctx, feedback)
        check_state(self.drafter, inner, state.inner)
        policy = self.policy.update(state.policy, feedback.verdict, feedback.draft.count)
        return state._replace(inner=inner, policy=policy)


def with_policy(drafter: Drafter, policy: Policy) -> Drafter:
    """The drafter under that policy; the drafter itself where the policy is to draft all it can.

    A model drafter asks its own policy, which this one replaces; of two drafters each is under the policy by itself.

    Raises:
        UserError: the policy looks at draft distributions, which this drafter has none of, or drops drawn tokens.
    """
    check_policy(policy, drafter.kind)
    if isinstance(drafter, ModelDrafter):
        return dataclasses.replace(drafter, policy=policy)
    if isinstance(drafter, StringDrafter):
        return dataclasses.replace(drafter, writer=dataclasses.replace(drafter.writer, policy=policy))
    if isinstance(drafter, Either):
        return Either(lookup_under(drafter.first, policy), with_policy(drafter.second, policy))
    if policy.needs:
        raise UserError(
            f"policy {type(policy).__name__} looks at the draft's q, and {type(drafter).__name__} has none: "
            "choose policy=fixed, heuristic, cost or auto_off"
        )
    return drafter if policy.always and policy.gamma >= drafter.max_nodes else WithPolicy(drafter, policy)


def lookup_under(lookup: Drafter, policy: Policy) -> Drafter:
    """A lookup beside a model drafter under that one's policy, with drafts that cost nothing; a policy that looks at
    draft distributions leaves it alone."""
    return lookup if policy.needs else with_policy(lookup, policy.free())
