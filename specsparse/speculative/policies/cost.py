"""Policies that weigh expected tokens against measured time.

Times are in units of a round without a draft: v(n) for a round of n positions (v(1) = 1), c for drafting one token, c0
for what a draft takes whatever its length. With acceptance alpha a draft of g tokens yields

    E(g) = (1 - alpha^(g+1)) / (1 - alpha)   tokens (Leviathan et al. 2211.17192, eq. 1)

in time T(g) = v(g+1) + c g + c0 (T(0) = v(1)), so the predicted speed-up is E(g) / T(g). Behind a long text attention
adds to that: for each 1,000 tokens in the cache `kv` to a round, `kv_row` to each of its rows and `kv_draft` to each
token that is drafted.

A tree that shows the chance of each node (`worth`) is verified as far as its nodes bring more tokens than the run does
in the time that they take. CaDDTree (arXiv:2606.01813) maximises the ratio of each round instead; over many rounds the
ratio of the sums is the speed.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.errors import UserError
from specsparse.speculative import expected
from specsparse.speculative.base import SHORT_GAMMA, Verdict
from specsparse.speculative.policies import POLICIES, get_policy
from specsparse.speculative.policies.base import DraftView, Gamma, Policy, PolicyReport, Unit
from specsparse.support.options import Also, Count, Inline, Positive, Range, Size, check_at_most, instance_of

KEPT = "kept"
"""Value of `v` that asks for the times that were kept on this machine."""
PROBES = 0.005
"""Plain steps that the probes of `cost` are expected to lose for each round without a draft, at most."""


class FadingCounts(NamedTuple):
    """Fading counts of a sequence: float32[B] accepted and tested tokens, and int32[B] rounds since the last draft and
    tokens of the text."""

    accepted: jax.Array
    tested: jax.Array
    idle: jax.Array
    length: jax.Array


@dataclasses.dataclass(frozen=True)
class CostModel:
    """Times in rounds without a draft, and how acceptance is estimated.

    Attributes:
        v: times v(1), v(2), ... of a round of n positions, v(1) = 1; kept: as `+experiment=roofline` measured them
            here, else a safe guess; null: measured before the run.
        c: time to draft a token; by default as v, or by the bytes that a drafted token reads.
        c0: time that a drafting round takes besides; by default as v.
        kv: time that 1,000 tokens in the cache add to a round; by default as v.
        kv_row: time that they add to each of its rows; by default as v.
        kv_draft: time that they add to drafting a token; by default by what the drafter reads of them.
        prior: acceptance expected before there is evidence; null: measured on the built-in prompts, 0.6 in the API.
        weight: tests (of `auto_off`: drafts) that the prior is worth.
        memory: by which evidence fades in each round with a draft.
    """

    v: tuple[Positive, ...] | Literal["kept"] | None = None
    c: Annotated[float | None, Range(0, 1e6), Also("draft_cost")] = None
    c0: Annotated[float | None, Range(0, 1e6)] = None
    kv: Annotated[float | None, Range(0, 1e6)] = None
    kv_row: Annotated[float | None, Range(0, 1e6)] = None
    kv_draft: Annotated[float | None, Range(0, 1e6)] = None
    prior: Unit | None = None
    weight: Annotated[float, Range(1e-3, 1e6)] = 3.0
    memory: Annotated[float, Range(1e-3, 1)] = 0.9

    @property
    def times(self) -> tuple[float, ...]:
        """v, if it was given or measured."""
        if not isinstance(self.v, tuple):
            raise UserError("policy.v is needed: measured times v(1)..v(gamma+1) of a round of n positions, v(1) = 1")
        return self.v

    @property
    def acceptance(self) -> float:
        return 0.6 if self.prior is None else self.prior

    def check(self, gamma: int) -> None:
        """Refuses times of fewer positions than a draft of `gamma` tokens has."""
        if isinstance(self.v, tuple) and len(self.v) <= gamma:
            raise UserError(f"policy.gamma={gamma} needs v(1)..v({gamma + 1}), measured up to v({len(self.v)})")

    def zero_cost(self) -> "CostModel":
        """The same for drafts that take no time."""
        return dataclasses.replace(self, c=0.0, c0=0.0, kv_draft=0.0)

    def begin(self, length_B: jax.Array) -> FadingCounts:
        zero_B = jnp.zeros(length_B.shape, jnp.float32)
        return FadingCounts(zero_B, zero_B, jnp.zeros_like(length_B), length_B)

    def update(self, state: FadingCounts, verdict: Verdict, count_B: jax.Array) -> FadingCounts:
        """Counts after a round; one without a draft says nothing."""
        drafted_B = count_B > 0
        memory_B = jnp.where(drafted_B, jnp.float32(self.memory), 1)
        return FadingCounts(
            memory_B * state.accepted + jnp.where(drafted_B, verdict.accepted, 0).astype(jnp.float32),
            memory_B * state.tested + jnp.where(drafted_B, verdict.tested, 0).astype(jnp.float32),
            jnp.where(drafted_B, 0, state.idle + 1),
            state.length + verdict.count,
        )

    def alpha(self, state: FadingCounts) -> jax.Array:
        """float32[B], posterior mean of the acceptance of a tested token."""
        return (state.accepted + self.acceptance * self.weight) / (state.tested + self.weight)

    def speedups(self, alpha_B: jax.Array, gamma: int, length_B: jax.Array) -> jax.Array:
        """float32[B, gamma+1]: E(g) / T(g) for g = 0..gamma behind so many tokens, each divided by that of g = 0."""
        tokens_B = reach_B = jnp.ones_like(alpha_B)
        found = [tokens_B]
        for _ in range(gamma):
            reach_B = reach_B * alpha_B
            tokens_B = tokens_B + reach_B
            found.append(tokens_B)
        return jnp.stack(found, axis=1) / self.drafted(range(gamma + 1), length_B)

    def worth(self, reach_BK: jax.Array, rate_B: jax.Array, length_B: jax.Array) -> jax.Array:
        """int32[B]: the first nodes, of falling chance, that are worth most beside `rate` tokens in a plain step."""
        most = min(reach_BK.shape[1], len(self.times) - 1)
        tokens_Bn = jnp.pad(jnp.cumsum(reach_BK[:, :most], axis=1), ((0, 0), (1, 0)))
        v_Bn = self.rounds(self.times[: most + 1], length_B)
        return jnp.argmax(tokens_Bn - rate_B[:, None] * v_Bn, axis=1).astype(jnp.int32)

    def deeper(self, gain_B: jax.Array, rate_B: jax.Array, length_B: jax.Array) -> jax.Array:
        """bool[B]: whether `gain` tokens are worth the time c of drafting one and that of a row."""
        more_B = self.rounds(self.times[:2], length_B)[:, 1] - 1 + self.token(length_B)
        return gain_B >= rate_B * more_B

    def drafted(self, sizes: Iterable[int], length_B: jax.Array) -> jax.Array:
        """T of drafts of so many tokens, as `rounds`: float32[B, drafts]."""
        tokens = list(sizes)
        more = [self._more(g + 1) + (self.kv_draft or 0.0) * g for g in tokens]
        return self._behind([self.time(g) for g in tokens], more, length_B)

    def token(self, length_B: jax.Array) -> jax.Array:
        """c behind so many tokens, in rounds without a draft there: float32[B]."""
        return self._behind([self.c or 0.0], [self.kv_draft or 0.0], length_B)[:, 0]

    def rounds(self, times: Sequence[float], length_B: jax.Array) -> jax.Array:
        """Times of rounds of 1, 2, .. rows behind a short text, in ones without a draft behind so many tokens:
        float32[B, n]."""
        return self._behind(times, [self._more(n) for n in range(1, len(times) + 1)], length_B)

    def _more(self, rows: int) -> float:
        """Time that 1,000 tokens in the cache add to a round of so many rows."""
        return (self.kv or 0.0) + (self.kv_row or 0.0) * rows

    def _behind(self, times: Sequence[float], more_n: Sequence[float], length_B: jax.Array) -> jax.Array:
        """Such times, to each of which 1,000 tokens add `more`."""
        times_n, first = np.minimum(times, 2.0**30).astype(np.float32), self.times[0]
        if not any((*more_n, self._more(1))):
            return jnp.broadcast_to(times_n / np.float32(first), (*length_B.shape, len(times)))
        thousands_B1 = length_B[:, None].astype(jnp.float32) / 1000
        time_Bn = jnp.array([times_n]) + thousands_B1 * jnp.array([more_n], jnp.float32)
        return time_Bn / (jnp.float32(first) + thousands_B1 * jnp.float32(self._more(1)))

    def time(self, g: int) -> float:
        return expected.round_cost(lambda n: self.times[n - 1], g, c=self.c or 0.0, c0=self.c0 or 0.0)


@dataclasses.dataclass(frozen=True)
class CostOptimal(Policy):
    """The draft length of the highest predicted speed-up; where none pays, `least` or a probe now and then.

    A probe is one token, so that acceptance is known when drafts pay again. By the acceptance so far it loses part of a
    plain step, and probes are so rare that they lose `PROBES` of the time: the nearer a draft is to paying, the more
    often it is tried.

    Attributes:
        cost: the measured times, at least v(1)..v(gamma+1), and the estimate of acceptance.
        least: shortest draft of every round.
    """

    name: ClassVar[str] = "cost"
    cost: Annotated[CostModel, Inline()] = CostModel()
    least: Size = 0

    def __post_init__(self):
        self.cost.check(self.gamma)
        check_at_most("policy", self, least="gamma")

    def check_times(self) -> None:
        assert self.cost.times

    def zero_cost(self) -> "CostOptimal":
        return dataclasses.replace(self, cost=self.cost.zero_cost())

    def init(self, batch: int) -> FadingCounts:
        return self.begin(jnp.zeros((batch,), jnp.int32))

    def begin(self, length_B: jax.Array) -> FadingCounts:
        return self.cost.begin(length_B)

    def length(self, state: FadingCounts) -> jax.Array:
        """argmax of the predicted speed-up (the shortest of equals)."""
        best_B = jnp.argmax(self._speedups(state), axis=1).astype(jnp.int32)
        return jnp.maximum(best_B, self._least(state))

    def update(self, state: FadingCounts, verdict: Verdict, count_B: jax.Array) -> FadingCounts:
        after = self.cost.update(state, verdict, count_B)
        return after._replace(idle=state.idle) if self.least else after  # nobody reads it then: operations saved

    def worth(self, state: FadingCounts, reach_BK: jax.Array) -> jax.Array:
        return jnp.maximum(self.cost.worth(reach_BK, self._rate(state), state.length), self._least(state))

    def deeper(self, state: FadingCounts, gain_B: jax.Array) -> jax.Array:
        return self.cost.deeper(gain_B, self._rate(state), state.length)

    def _least(self, state: FadingCounts) -> jax.Array:
        """int32[B] or a number: nodes to verify whatever is predicted, 1 at least if a probe is due."""
        if self.least:
            return jnp.int32(self.least)
        lost_B = self.cost.drafted([1], state.length)[:, 0] - 1 - self.cost.alpha(state)
        return (PROBES * state.idle.astype(jnp.float32) >= lost_B).astype(jnp.int32)

    def _rate(self, state: FadingCounts) -> jax.Array:
        """The best speed-up that is predicted, float32[B]."""
        return jnp.max(self._speedups(state), axis=1)

    def _speedups(self, state: FadingCounts) -> jax.Array:
        return self.cost.speedups(self.cost.alpha(state), self.gamma, state.length)


class AutoOffState(NamedTuple):
    """Attributes, of each sequence [B]:

    inner: the inner policy's state.
    tokens, time: float32, fading sums over rounds with a draft: tokens emitted, and what the rounds took.
    idle: int32, rounds since the last draft while off.
    wait: int32, of those, after how many a probe comes.
    length: int32, tokens of the text.
    """

    inner: Any
    tokens: jax.Array
    time: jax.Array
    idle: jax.Array
    wait: jax.Array
    length: jax.Array


@dataclasses.dataclass(frozen=True)
class AutoOff(Policy):
    """Drafts as `inner` says while that is predicted to pay, and nothing but a probe now and then while it is not.

    The prediction is tokens over time of the rounds that had a draft, each at the rows it really verified: lookups are
    right in bursts, and many of their drafts are shorter than asked for. A lookup that finds nothing costs nothing and
    says nothing. While it is off, `probe` tokens are drafted once enough rounds have gone by, and until something has
    been drafted: `every` rounds, or so many that probes take at most `probe_share` of the time. A probe that is not
    accepted whole doubles that wait, up to `most`.

    Attributes:
        cost: the measured times, at least v(1)..v(gamma+1), and the estimate of acceptance; its weight is in drafts.
        inner: the policy while it pays; by default cost, fixed for trees, which are drafted whole or not at all.
        inner_options: of a policy that is named.
        margin: predicted speed-up from which drafting pays.
        probe: tokens of a probe.
        every: rounds before a probe; each probe that is not accepted whole doubles them, up to `most`.
        most: rounds before a probe, at most; by default 32, or `every` where that is more.
        probe_share: most plain steps that failed probes may take, for each round without one: dear probes are rarer.
        probe_memory: like `memory`, after a probe.
    """

    name: ClassVar[str] = "auto_off"
    gamma: Gamma = SHORT_GAMMA
    cost: Annotated[CostModel, Inline()] = CostModel(KEPT, prior=0.6, weight=6.0, memory=0.95)
    inner: Annotated[Policy | str | None, instance_of("a policy or the name of one", Policy, str)] = None
    inner_options: dict[str, object] | None = dataclasses.field(default=None, hash=False)
    margin: Annotated[float, Range(1e-3, 1e3)] = 1.0
    probe: Count = 1
    every: Count = 4
    most: Count | None = None
    probe_share: Annotated[float, Range(1e-6, 1e6)] = 0.03
    probe_memory: Annotated[float, Range(1e-3, 1)] = 0.7

    def __post_init__(self):
        self.cost.check(self.gamma)
        check_at_most("policy", self, probe="gamma", every="most")
        if isinstance(self.inner, Policy) and self.inner.gamma > self.gamma:
            raise UserError(f"policy.gamma={self.gamma} must be at least the inner policy's {self.inner.gamma}")

    @cached_property
    def paying(self) -> Policy:
        """The policy while it pays. A named one has this gamma, and `cost` this cost model."""
        if isinstance(self.inner, Policy):
            return self.inner
        name = self.inner or CostOptimal.name
        times = {**vars(self.cost), "least": 1} if POLICIES.canonical(name) == CostOptimal.name else {}
        made = get_policy(name, **{"gamma": self.gamma, **times, **(self.inner_options or {})})
        return dataclasses.replace(self, inner=made).paying  # which compares the two gammas

    def check_times(self) -> None:
        assert self.cost.times and self.paying

    def over_tree(self, nodes: int) -> Self:
        """All nodes, whose number is no draft length, or none."""
        return dataclasses.replace(self, gamma=nodes, inner="fixed" if self.inner is None else self.inner)

    def zero_cost(self) -> "AutoOff":
        return dataclasses.replace(self, inner=self.paying.zero_cost(), cost=self.cost.zero_cost())

    @property
    def needs(self) -> frozenset[str]:
        return self.paying.needs

    @property
    def one_hot_only(self) -> bool:
        return self.paying.one_hot_only

    def waits(self, length_B: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Rounds before a probe behind so many tokens, at first and at most, with what a probe costs taken into
        account: int32[B] each."""
        loss_B = self.cost.drafted([self.probe], length_B)[:, 0] - 1
        least_B = jnp.minimum(loss_B / np.float32(self.probe_share), 2.0**29)
        least_B = jnp.ceil(least_B - 1e-4).astype(jnp.int32)  # a quotient that is whole has float32's error
        most = max(32, self.every) if self.most is None else self.most
        return jnp.maximum(self.every, least_B), jnp.maximum(most, least_B)

    def init(self, batch: int) -> AutoOffState:
        return self.begin(jnp.zeros((batch,), jnp.int32))

    def begin(self, length_B: jax.Array) -> AutoOffState:
        """The prior decides the first rounds and fades like all evidence. It judges the length that is best by it, or
        `inner`'s if that is shorter: trees that are verified as far as their nodes are worth are cut to about that."""
        inner, count = self.paying.begin(length_B), jnp.zeros_like(length_B)
        alpha, weight = self.cost.acceptance, jnp.float32(self.cost.weight)
        gain_BG = self.cost.speedups(jnp.full(length_B.shape, alpha), self.gamma, length_B)
        best_B = 1 + jnp.argmax(gain_BG[:, 1:], axis=1).astype(jnp.int32)
        drafted_B = jnp.minimum(self.paying.length(inner), best_B)
        tokens_G = jnp.array([expected.expected_tokens(alpha, g) for g in range(self.gamma + 1)], jnp.float32)
        time_B = weight * self._time(drafted_B, length_B)
        wait_B = self.waits(length_B)[0]
        return AutoOffState(inner, weight * tokens_G[drafted_B], time_B, count, wait_B, length_B)

    def pays(self, state: AutoOffState) -> jax.Array:
        """bool[B]: whether drafts of `inner`'s length are predicted to be worth it. False is auto-off in reports."""
        return self.predicted(state) >= self.margin

    def predicted(self, state: AutoOffState) -> jax.Array:
        """float32[B]: predicted speed-up of rounds with a draft, their tokens over their time in plain steps."""
        return state.tokens / state.time

    def length(self, state: AutoOffState) -> jax.Array:
        """`inner`'s where it pays; while off 0, or `probe`."""
        probe_B = jnp.where(state.idle >= state.wait, jnp.int32(self.probe), 0)
        return jnp.where(self.pays(state), self.paying.length(state.inner), probe_B)

    def update(self, state: AutoOffState, verdict: Verdict, count_B: jax.Array) -> AutoOffState:
        """Sums after a round; the idle rounds begin anew with every draft."""
        on_B, asked_B, drafted_B = self.pays(state), self.length(state), count_B > 0
        cost_B = self._time(count_B, state.length)
        if self.needs:  # a distribution that was looked at and not drawn from took the time of a token
            drafted_B = drafted_B | ((asked_B > 0) & (verdict.tested == 0))
            refused_B = (count_B < asked_B).astype(jnp.float32)
            cost_B = cost_B + refused_B * self.cost.token(state.length)
        accepted_B = jnp.where(count_B > 0, verdict.accepted, 0)
        whole_B = drafted_B & ~on_B & (accepted_B >= self.probe)
        fade_B = jnp.where(drafted_B, jnp.where(on_B, self.cost.memory, self.probe_memory), jnp.float32(1))
        brought_B = drafted_B.astype(jnp.float32) * (1 + accepted_B.astype(jnp.float32))
        every_B, most_B = self.waits(state.length)
        longer_B = jnp.minimum(2 * state.wait, most_B)
        return AutoOffState(
            self.paying.update(state.inner, verdict, count_B),
            fade_B * state.tokens + brought_B,
            fade_B * state.time + drafted_B.astype(jnp.float32) * cost_B,
            jnp.where(on_B | drafted_B, 0, state.idle + 1),
            jnp.where(on_B | whole_B, every_B, jnp.where(drafted_B, longer_B, state.wait)),
            state.length + verdict.count,
        )

    def passed(
        self, before: AutoOffState, after: AutoOffState, passes_B: jax.Array, count_B: jax.Array
    ) -> AutoOffState:
        more_B = jnp.where(count_B > 0, passes_B - count_B, 0).astype(jnp.float32)
        return after._replace(time=after.time + more_B * self.cost.token(before.length))

    def stop(self, state: AutoOffState, view: DraftView) -> jax.Array:
        return self.paying.stop(state.inner, view)

    def keep(self, state: AutoOffState, count_B: jax.Array) -> jax.Array:
        """As `inner` if drafting pays; a probe is verified however short it is."""
        return jnp.where(self.pays(state), self.paying.keep(state.inner, count_B), count_B)

    def worth(self, state: AutoOffState, reach_BK: jax.Array) -> jax.Array:
        """The nodes that pay beside the tokens over time of the run, but one at least, since a round without a draft
        says nothing; a probe is verified whole."""
        whole_B = super().worth(state, reach_BK)
        some_B = jnp.maximum(self.cost.worth(reach_BK, jnp.maximum(self.predicted(state), 1), state.length), 1)
        return jnp.where(self.pays(state), some_B, whole_B)

    def deeper(self, state: AutoOffState, gain_B: jax.Array) -> jax.Array:
        return self.cost.deeper(gain_B, jnp.maximum(self.predicted(state), 1), state.length)

    def reports(self, state: AutoOffState, off_B: np.ndarray) -> list[PolicyReport]:
        """Whether it was off at the end, too, and what it predicted."""
        pays_B, predicted_B = np.asarray(self.pays(state)), np.asarray(self.predicted(state))
        rows = zip(off_B.tolist(), pays_B.tolist(), predicted_B.tolist(), strict=True)
        return [PolicyReport(off, not pays, predicted) for off, pays, predicted in rows]

    def _time(self, drafted_B: jax.Array, length_B: jax.Array) -> jax.Array:
        """T of so many drafted tokens in plain steps, float32[B]."""
        times_BG = self.cost.drafted(range(self.gamma + 1), length_B)
        return jnp.take_along_axis(times_BG, drafted_B[:, None], axis=1)[:, 0]
