"""Synthetic acceptance: a run whose acceptance is chosen beforehand, to test speed apart from draft quality.

The verdict ignores what the tokens are, so the output is *not text* and the law is not the target's: it is labelled
`synthetic` wherever it is named. Draft, forward, cache commit and counters are the real ones.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from specsparse.engine.pytree import Pytree
from specsparse.errors import UserError
from specsparse.speculative.base import Draft, DraftContext, Drafted, Drafter, DraftKind, Verdict, Verifier
from specsparse.speculative.drafters import lookup
from specsparse.speculative.tree import TreeTemplate
from specsparse.speculative.verifiers.registry import SYNTHETIC
from specsparse.speculative.verifiers.targets import TargetRule
from specsparse.speculative.verify import match_verdict


@dataclasses.dataclass(frozen=True)
class SyntheticRates(TargetRule):
    """The law of the accepted length of a chain.

    Attributes:
        process: "geometric", "minimum_variance" or "rates".
        conditional: r_i, chance that draft token i is accepted once those before it were; each in [0, 1].
    """

    process: str
    conditional: tuple[float, ...]

    def __post_init__(self):
        if any(not 0 <= r <= 1 for r in self.conditional):
            raise UserError(f"synthetic acceptance rates {self.conditional} must lie in [0, 1]")

    @classmethod
    def geometric(cls, gamma: int, *, rate: float | None = None, length: float | None = None) -> "SyntheticRates":
        """One rate r at every position: P(accepted >= i) = r^i.

        Give `rate`, or the mean acceptance `length` L in [1, gamma + 1], from which r solves
        1 + r + ... + r^gamma = L (llama.cpp's `--spec-synthetic-acceptance-length`).
        """
        if (rate is None) == (length is None):
            raise UserError("synthetic acceptance takes either a rate or a mean length")
        if length is not None:
            rate = _solve_geometric(gamma, _checked_length(gamma, length))
        return cls("geometric", (rate,) * gamma)

    @classmethod
    def minimum_variance(
        cls, gamma: int, *, rate: float | None = None, length: float | None = None
    ) -> "SyntheticRates":
        """Accepted lengths are the two integers around the mean (vLLM's `synthetic_acceptance_length`).

        `length` is the mean acceptance length in [1, gamma + 1], bonus token included. `rate` asks for the mean length
        of the geometric process of that rate, so that the two processes can be compared at one mean.
        """
        if (rate is None) == (length is None):
            raise UserError("synthetic acceptance takes either a rate or a mean length")
        if length is None:
            length = cls.geometric(gamma, rate=rate).mean_acceptance_length()
        accepted = _checked_length(gamma, length) - 1
        whole = int(accepted)
        rates = [1.0] * whole + [accepted - whole] + [0.0] * gamma
        return cls("minimum_variance", tuple(rates[:gamma]))

    @classmethod
    def from_unconditional(cls, rates: tuple[float, ...]) -> "SyntheticRates":
        """From P(accepted >= i + 1) for each position, non-increasing (vLLM's `synthetic_acceptance_rates`)."""
        before, conditional = 1.0, []
        for rate in rates:
            if not 0 <= rate <= before:
                raise UserError(f"synthetic acceptance rates {rates} must lie in [0, 1] and not increase")
            conditional.append(rate / before if before > 0 else 0.0)
            before = rate
        return cls("rates", tuple(conditional))

    @classmethod
    def of(
        cls,
        gamma: int,
        *,
        process: str = "geometric",
        rate: float | None = None,
        length: float | None = None,
        rates: Sequence[float] | None = None,
    ) -> "SyntheticRates":
        """From options: a rate (0.7 if nothing is said), a mean acceptance length, or a rate for each position."""
        if rates is not None:
            if rate is not None or length is not None:
                raise UserError("synthetic acceptance takes rates, or a rate, or a mean length")
            return cls.from_unconditional(tuple(rates))
        if rate is None and length is None:
            rate = 0.7
        return getattr(cls, process)(gamma, rate=rate, length=length)

    def unconditional(self, drafted: int | None = None) -> tuple[float, ...]:
        """P(accepted >= i + 1) for each position of a draft of `drafted` tokens (default: all)."""
        found, reach = [], 1.0
        for rate in self.conditional[:drafted]:
            reach *= rate
            found.append(reach)
        return tuple(found)

    def mean_acceptance_length(self, drafted: int | None = None) -> float:
        """1 + sum_i P(accepted >= i), bonus token included; geometric: (1 - r^(gamma+1)) / (1 - r)."""
        return 1.0 + sum(self.unconditional(drafted))

    def variance(self, drafted: int | None = None) -> float:
        """Of the acceptance length: sum_i (2i - 1) P(accepted >= i) - (sum_i P(accepted >= i))^2."""
        reach = self.unconditional(drafted)
        return sum((2 * i + 1) * r for i, r in enumerate(reach)) - sum(reach) ** 2

    def verdict(self, draft: Draft, target_Bn: jax.Array, *, coins_BK: jax.Array) -> Verdict:
        """Accepts the first a tokens of a chain, a drawn from these rates whatever the tokens are: lossy, and not text.

        The accepted tokens are emitted as drafted, then the target's own token at the row it ends on. `alpha` holds the
        rates of the tested positions. Positions beyond them are rejected.

        Args:
            draft: a chain.
            target_Bn: int32[B, K+1], the target's token at each row, as `match_verdict` takes it.
            coins_BK: float32[B, K] in [0, 1), noise stream `accept`, one coin a node.
        """
        K = draft.max_nodes
        rate_K = jnp.array((*self.conditional[:K], *(0.0,) * (K - len(self.conditional))), jnp.float32)[None]
        node_K = jnp.arange(K, dtype=jnp.int32)[None]
        heads_BK = (coins_BK < rate_K) & (node_K < draft.count[:, None])
        accepted_B = jnp.sum(jnp.cumprod(heads_BK.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
        # The verdict of `match` on the accepted part alone, with a target that agrees with it.
        taken_Bn = jnp.arange(K + 1, dtype=jnp.int32)[None] < accepted_B[:, None]
        forced_Bn = jnp.where(taken_Bn, jnp.pad(draft.tokens, ((0, 0), (0, 1))), target_Bn)
        verdict = match_verdict(draft._replace(count=accepted_B), forced_Bn, tree=False)
        tested_B = jnp.minimum(accepted_B + 1, draft.count)
        tested_BK = node_K < tested_B[:, None]
        return verdict._replace(
            tested=tested_B,
            alpha=jnp.sum(jnp.where(tested_BK, rate_K, 0.0), axis=1),
            alpha_var=jnp.sum(jnp.where(tested_BK, rate_K * (1 - rate_K), 0.0), axis=1),
        )


def _checked_length(gamma: int, length: float) -> float:
    if not 1 <= length <= gamma + 1:
        raise UserError(f"mean acceptance length {length:g} must lie in 1..{gamma + 1} for gamma={gamma}")
    return float(length)


def _solve_geometric(gamma: int, length: float) -> float:
    """r with 1 + r + ... + r^gamma = length, by bisection to the last bit."""
    low, high = 0.0, 1.0
    if length >= gamma + 1:
        return 1.0
    while low < (middle := (low + high) / 2) < high:
        if 1 + sum(middle**i for i in range(1, gamma + 1)) < length:
            low = middle
        else:
            high = middle
    return low


def synthetic_verifier(rates: SyntheticRates) -> Verifier:
    """`SyntheticRates.verdict` as a verifier of any chain. Not among `verify.VERIFIERS`: there is no law to certify."""
    kinds = frozenset({DraftKind.ONE_HOT, DraftKind.SAMPLED})
    return Verifier(SYNTHETIC, rates, kinds, lossless=False, needs_p=False)


@dataclasses.dataclass(frozen=True)
class Synthetic(Drafter):
    """Drafts the tokens that stand before the last one; the verdict of its `rates` decides how many stay.

    Different tokens, so that a sparse target's pass reads for each of them what it would read for a real draft.

    Attributes:
        rates: the law of the accepted length; its positions are K.
    """

    rates: SyntheticRates
    kind: ClassVar[DraftKind] = DraftKind.ONE_HOT

    @classmethod
    def of(cls, max_nodes: int, **options: Any) -> "Synthetic":
        """Of options; see `SyntheticRates.of`."""
        return cls(SyntheticRates.of(max_nodes, **options))

    @property
    def max_nodes(self) -> int:
        """K."""
        return len(self.rates.conditional)

    def draft(self, params: Pytree, state: Pytree, ctx: DraftContext) -> Drafted:
        """The K tokens before the last one, of them `budget`; consumes no noise."""
        batch, K = ctx.tokens.shape[0], self.max_nodes
        count_B = lookup.allowed(ctx, jnp.full((batch,), K, jnp.int32), max_nodes=K)
        place_K = jnp.arange(K, dtype=jnp.int32)[None]
        before_BK = jnp.maximum(ctx.length[:, None] - 1 - K + place_K, 0)
        tokens_BK = jnp.where(place_K < count_B[:, None], jnp.take_along_axis(ctx.tokens, before_BK, axis=1), 0)
        return lookup.drafted(Draft(tokens_BK, TreeTemplate.chain(K).parents_array(batch), count_B), state, ctx)
