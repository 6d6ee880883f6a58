"""Draft-length policies: how many tokens to draft in a round, and when to stop while drafting.

A policy may look at the context, at finished rounds and at the distributions q so far, never at the token it then
drops: a drawn token is verified, or the output no longer follows p. Hence `stop` is asked *before* a node is drawn from
its distribution. Only
`keep` drops drafted tokens, and is for one-hot drafts.
"""

import dataclasses
import functools
from typing import Annotated, Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine.pytree import AnyArray
from specsparse.errors import UserError
from specsparse.speculative.base import DEFAULT_GAMMA, GAMMA_NAMES, MAX_GAMMA, DraftContext, DraftKind, Verdict
from specsparse.support.options import Also, Count, Positive, Range, Size, check_at_most

Gamma = Annotated[int, Range(1, MAX_GAMMA), Also(*(name for name in GAMMA_NAMES if name != "gamma"))]
"""Most tokens to draft in a round, as an option."""
Unit = Annotated[float, Range(0, 1)]


class PolicyReport(NamedTuple):
    """The effect of a policy on one sequence.

    Attributes:
        rounds_off: rounds without a draft because the policy said so.
        off: whether drafting was off at the end (auto-off only).
        predicted: speed-up predicted at the end (auto-off only), or None.
    """

    rounds_off: int
    off: bool = False
    predicted: float | None = None


class DraftView(NamedTuple):
    """A model drafter's view before it draws node i from q_i; fields a policy does not name in `needs` are None.

    Attributes:
        depth: int32[B], i, nodes drafted so far.
        top: float32[B], max_x q_i(x).
        top10: float32[B], max_x q_i(x) over the mass of q_i's ten largest.
        entropy: float32[B], of q_i, in nats.
        last: float32[B], q_{i-1} at the node drawn before; 1 for the first. That node stays whatever the answer is.
        confidence: float32[B], the acceptance of node i that the drafter's own head predicts from what was drawn
            before it; None if it has no such head.
    """

    depth: jax.Array
    top: AnyArray = None
    top10: AnyArray = None
    entropy: AnyArray = None
    last: AnyArray = None
    confidence: AnyArray = None


def draft_view(q_BV: jax.Array, *, depth_B: jax.Array, last_B: jax.Array, needs: frozenset[str]) -> DraftView:
    """The view of a distribution, of which only what the policy `needs` is computed."""
    top_B = jnp.max(q_BV, axis=1)
    top10_B = entropy_B = None
    if "top10" in needs:
        top10_B = top_B / jnp.sum(jax.lax.top_k(q_BV, min(10, q_BV.shape[1]))[0], axis=1)
    if "entropy" in needs:
        entropy_B = -jnp.sum(jnp.where(q_BV > 0, q_BV * jnp.log(jnp.where(q_BV > 0, q_BV, 1.0)), 0.0), axis=1)
    return DraftView(depth_B, top_B, top10_B, entropy_B, last_B)


@dataclasses.dataclass(frozen=True)
class Policy:
    """Base of all policies: frozen dataclasses whose fields are the options, and pure.

    State is a pytree with a leading axis B, so rows stay independent.

    Attributes:
        gamma: tokens to draft in a round, at most; a drafter needs room for as many.
        name: for messages; by default that of the class.
    """

    name: ClassVar[str]
    gamma: Gamma = DEFAULT_GAMMA

    def __init_subclass__(cls) -> None:
        cls.name = vars(cls).get("name", cls.__name__)
        last = next(c for c in cls.__mro__ if {"keep", "one_hot_only"} & vars(c).keys())
        if "one_hot_only" not in vars(last):  # what a base says of its own `keep` does not hold of this one
            cls.one_hot_only = True  # pyrefly: ignore[bad-assignment]  # a class attribute in the property's place

    @property
    def needs(self) -> frozenset[str]:
        """Fields of `DraftView` that `stop` reads; empty if it never stops."""
        return frozenset()

    @property
    def one_hot_only(self) -> bool:
        """Whether `keep` may drop tokens, which only one-hot drafts survive without loss. True of a class that
        overrides `keep` and says nothing else."""
        return False

    @property
    def always(self) -> bool:
        """Whether every round drafts `gamma` tokens if it can, and all are verified: as without a policy."""
        return False

    def check_times(self) -> None:
        """Refuses a policy that weighs times and has none; by default it weighs none."""

    def over_tree(self, nodes: int) -> Self:
        """The same for drafts that are trees of so many nodes; by default as for chains."""
        return self

    def zero_cost(self) -> "Policy":
        """The same for drafts that cost nothing."""
        return self

    def init(self, batch: int) -> Any:
        """State before the first round; by default int32[B], the length of every draft."""
        return jnp.full((batch,), self.gamma, jnp.int32)

    def begin(self, length_B: jax.Array) -> Any:
        """`init` behind texts of so many tokens, int32[B], for policies that look at it."""
        return self.init(len(length_B))

    def length(self, state: Any) -> jax.Array:
        """Nodes to draft next, int32[B] in 0..gamma."""
        return state

    def budget(self, state: Any, ctx: DraftContext) -> jax.Array:
        """int32[B]: nodes to draft this round, at most `ctx.budget` (the room that is left)."""
        return jnp.minimum(ctx.budget, self.length(state))

    def update(self, state: Any, verdict: Verdict, count_B: jax.Array) -> Any:
        """State after a round in which this policy's drafter drafted int32[B] `count` of the verified nodes.

        A verdict on tokens that another drafter proposed comes with a count of 0.
        """
        return state

    def passed(self, before: Any, after: Any, passes_B: jax.Array, count_B: jax.Array) -> Any:
        """`update`'s state if drafting the `count` nodes took the time of `passes` ones, int32[B]."""
        return after

    def stop(self, state: Any, view: DraftView) -> jax.Array:
        """bool[B]: end the draft before the next node is drawn from the distribution in view."""
        return jnp.zeros(view.depth.shape, bool)

    def keep(self, state: Any, count_B: jax.Array) -> jax.Array:
        """int32[B]: how many of the nodes drafted to verify."""
        return count_B

    def worth(self, state: Any, reach_BK: jax.Array) -> jax.Array:
        """int32[B]: how many nodes of a one-hot tree to verify, the first ones of falling chance `reach`."""
        return jnp.full(reach_BK.shape[:1], reach_BK.shape[1], jnp.int32)

    def deeper(self, state: Any, gain_B: jax.Array) -> jax.Array:
        """bool[B]: whether to draft one more level of such a tree, from which so many tokens are expected."""
        return gain_B > 0

    def reports(self, state: Any, off_B: np.ndarray) -> list[PolicyReport]:
        """The effect on each sequence, of which it drafted nothing in `off_B` rounds."""
        return [PolicyReport(off) for off in off_B.tolist()]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["state"], meta_fields=["policy"])
@dataclasses.dataclass(frozen=True)
class ActivePolicy:
    """A policy in one round, with the state that it has there. A pytree, so that contexts may cross a jit."""

    policy: Policy
    state: Any


def check_policy(policy: Policy, kind: DraftKind) -> None:
    """Refuses a policy that may drop tokens of drafts that are drawn: `n_min`, or a `keep` of its own."""
    if policy.one_hot_only and kind is not DraftKind.ONE_HOT:
        raise UserError(
            f"policy={policy.name} may drop drawn tokens of {kind.value} drafts, and the text would be biased: draft "
            "one-hot (drafter.temperature=0), leave policy.n_min at 0 or `keep` out, or set `one_hot_only = False` "
            "on a class whose `keep` is certified by specsparse.certify(policy)"
        )


@dataclasses.dataclass(frozen=True)
class Fixed(Policy):
    """`gamma` tokens every round; none at all if fewer than `n_min` are found (llama.cpp's `draft_min`).

    Attributes:
        n_min: a draft of fewer tokens is not verified at all; above 1 for one-hot drafts only.
    """

    name: ClassVar[str] = "fixed"
    n_min: Annotated[Size, Also("draft_min")] = 0

    def __post_init__(self):
        check_at_most("policy", self, n_min="gamma")

    @property
    def always(self) -> bool:
        """True if no draft is too short; a class derived from this one may do otherwise."""
        return type(self) in (Fixed, NMin) and not self.one_hot_only

    @property
    def one_hot_only(self) -> bool:
        """Whether drafts must be one-hot, as `n_min` asks for."""
        return self.n_min > 1

    def keep(self, state: Any, count_B: jax.Array) -> jax.Array:
        """All, or none if they are too few."""
        return jnp.where(count_B >= self.n_min, count_B, 0)


@dataclasses.dataclass(frozen=True)
class NMin(Fixed):
    """`fixed`, but a draft of fewer than `n_min` tokens is not verified at all."""

    name: ClassVar[str] = "n_min"
    n_min: Annotated[Size, Also("draft_min")] = 2


@dataclasses.dataclass(frozen=True)
class PMin(Fixed):
    """Stop when the draft's top probability, renormalised over its top ten, is under `p_min` (llama.cpp).

    Attributes:
        p_min: least top probability, over the top ten; 0 never stops.
    """

    name: ClassVar[str] = "p_min"
    p_min: Annotated[Unit, Also("draft_p_min")] = 0.75

    @property
    def needs(self) -> frozenset[str]:
        """It reads the renormalised top probability of each node."""
        return frozenset({"top10"}) if self.p_min > 0 else frozenset()

    def stop(self, state: Any, view: DraftView) -> jax.Array:
        """It ends a draft before a distribution that is not sure of its top token."""
        return jnp.zeros(view.depth.shape, bool) if self.p_min == 0 else view.top10 < self.p_min


@dataclasses.dataclass(frozen=True)
class Confidence(Policy):
    """Stop after a token that the draft gave less than `threshold` (Hugging Face's assistant confidence threshold), or
    before a token whose acceptance the drafter's own head predicts to be less (`dspark`).

    The unlikely token itself is verified: that the draft ends there depends on it, that it is tested does not. A head
    sees what was drawn before the token, and not the token or what may follow it (arXiv:2607.05147, appendix A).

    Attributes:
        threshold: least probability of a token, or least predicted acceptance.
    """

    name: ClassVar[str] = "confidence"
    gamma: Gamma = 20
    needs = frozenset({"last", "confidence"})
    threshold: Annotated[Unit, Also("assistant_confidence_threshold")] = 0.4

    def stop(self, state: Any, view: DraftView) -> jax.Array:
        """It ends a draft after an unlikely token, or before one that will hardly be accepted."""
        return (view.last if view.confidence is None else view.confidence) < self.threshold


@dataclasses.dataclass(frozen=True)
class Entropy(Policy):
    """Stop when 1 - sqrt(scale * H(q)), a lower estimate of the acceptance, is under `threshold`.

    AdaEDL (Agrawal et al., arXiv:2410.18351), with a fixed threshold.

    Attributes:
        threshold: least estimate.
        scale: of the entropy in nats.
    """

    name: ClassVar[str] = "entropy"
    threshold: Unit = 0.4
    needs = frozenset({"entropy"})
    scale: Positive = 0.2

    def stop(self, state: Any, view: DraftView) -> jax.Array:
        """It ends a draft before a distribution that is too flat."""
        return 1 - jnp.sqrt(self.scale * view.entropy) < self.threshold


@dataclasses.dataclass(frozen=True)
class Heuristic(Policy):
    """Two more after a round whose draft was accepted whole, else one fewer, at least 1 (Hugging Face's heuristic).

    A round without a draft changes nothing.

    Attributes:
        start: tokens at first; by default 5, or `gamma` where that is less.
    """

    name: ClassVar[str] = "heuristic"
    gamma: Annotated[int, Range(1, MAX_GAMMA), Also(*({*GAMMA_NAMES} - {"gamma", "num_assistant_tokens"}))] = 16
    start: Annotated[Count | None, Also("num_assistant_tokens")] = None

    def __post_init__(self):
        check_at_most("policy", self, start="gamma")

    def init(self, batch: int) -> jax.Array:
        """int32[B], the length of the next draft."""
        return jnp.full((batch,), min(5, self.gamma) if self.start is None else self.start, jnp.int32)

    def update(self, state: jax.Array, verdict: Verdict, count_B: jax.Array) -> jax.Array:
        """+2, -1 or, without a draft, as it was; at most gamma."""
        whole_B = verdict.accepted == verdict.tested  # a test that failed is counted in `tested` alone
        next_B = jnp.clip(jnp.where(whole_B, state + 2, state - 1), 1, self.gamma)
        return jnp.where(count_B > 0, next_B, state)
