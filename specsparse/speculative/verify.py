"""What all rules of verification share: what they are asked, and how a verdict is made of where a draft ended."""

import abc
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine.sampling.params import Truncation
from specsparse.engine.sampling.probs import SamplingKernels
from specsparse.errors import UserError
from specsparse.speculative.base import PAD, Draft, DraftKind, Verdict, Verifier
from specsparse.speculative.verifiers import residuals

Draw = Callable[[jax.Array, jax.Array], jax.Array]
"""(p float[R, V], u in [0, 1)) -> int32[R]; u is float32[R, 4] for the engine, float[R] for `residuals.inverse_cdf`."""


class Noise(NamedTuple):
    """The noise that a round's verdict draws on."""

    coins: jax.Array  # float32[B, K] in [0, 1), one acceptance coin a node (noise stream `accept`)
    # what `Target.draw` takes for the token after the accepted ones, in [0, 1): float32[B, 4] of noise stream
    # `residual`, or float32[B] by `residuals.inverse_cdf`
    last: jax.Array


class LogitRows(NamedTuple):
    """The target's rows for a native call that judges drafts and writes no distribution down."""

    values: jax.Array  # float32[B * (K + 1), V], logits; distributions if `probs` is None
    probs: Truncation | None  # the numbers of each sequence's distribution
    n_valid: jax.Array  # int32[B], 1 + count, or 0 for a sequence whose verdict is not asked for
    judge: Callable[..., tuple[jax.Array, ...]]  # `SamplingKernels.judge`


class Target:
    """The target at the K+1 rows of a draft, as rules read it; `loop.RoundTarget` computes a property when it is read.

    Row 0 follows the last committed token, row 1+i node i. Rows of nodes >= count may hold anything.

    Attributes:
        probs: float32[B, K+1, V], distributions after temperature, truncation and penalties. An all-zero row marks an
            invalid one: the sequence fails there.
        tokens: int32[B, K+1], the target's own token at each row: argmax of p, or drawn from p with the noise of the
            row's absolute position. A negative one marks a row without a distribution.
        rows: for rules with a native call (`Rule.judges_whole`), else None.
        draw: inverse-CDF sampling.
        tree: whether a node may have several children.
        alpha: whether to measure `Verdict.alpha` (`Rule.reads_alpha`).
    """

    def __init__(
        self, probs: Any = None, tokens: Any = None, *, rows: LogitRows | None = None,
        draw: Draw = residuals.inverse_cdf, tree: bool = False, alpha: bool = False,
    ):  # fmt: skip
        self.probs, self.tokens, self.rows = probs, tokens, rows
        self.draw, self.tree, self.alpha = draw, tree, alpha

    def at(self, tokens_BK: jax.Array) -> jax.Array:
        """float32[B, K], p of each token of a chain before it."""
        K = tokens_BK.shape[1]
        return jnp.take_along_axis(self.probs[:, :K], tokens_BK[:, :, None], axis=2)[:, :, 0]


class Coin(NamedTuple):
    """One coin of a path to an end: it is under `chance` (`passed`) or not."""

    node: int
    chance: float
    passed: bool


class End(NamedTuple):
    """One way a round ends."""

    weight: float  # probability of this end, given the draft
    path: tuple[int, ...]  # accepted nodes from the root down
    probs: np.ndarray  # float64[V], distribution of the token after them
    coins: tuple[Coin, ...] = ()  # coin intervals that lead here (empty for match, which has none)


class Rule(abc.ABC):
    """Base of all rules: final frozen dataclasses whose fields are the options.

    One's own is a verifier by itself, `verifier=module:Class`, and says:

    Attributes:
        kinds: draws it is sound for.
        tree: whether it takes drafts with several children per node.
        lossless: whether the output distribution is p exactly; `specsparse.certify` finds out.
        needs_p: False if it reads the target's tokens alone.
        paper: arXiv id of the paper.
        judges_whole: how `SamplingKernels.judge` judges as this very class does: chains as a whole, or drafts token by
            token; None if it does not. Not inherited.
    """

    kinds: ClassVar[frozenset[DraftKind]] = frozenset()
    tree: ClassVar[bool] = False
    lossless: ClassVar[bool] = False
    needs_p: ClassVar[bool] = True
    paper: ClassVar[str] = ""
    judges_whole: ClassVar[bool | None] = None

    def __init_subclass__(cls) -> None:
        if "judges_whole" not in vars(cls):
            cls.judges_whole = None

    @abc.abstractmethod
    def verdict(self, draft: Draft, target: Target, noise: Noise) -> Verdict:
        """The verdict on a draft of a kind that it accepts. Rows of a batch do not depend on each other."""

    def ends(self, draft: Draft, p_nV: np.ndarray) -> list[End]:
        """All ends of positive probability of a round on one sequence's draft, for the certificate, in numpy."""
        raise UserError(
            f"{type(self).__name__} has no `ends(draft, p_nV)`, which certify needs: write it, or derive the rule from "
            "SiblingRule or Block"
        )

    def reads_alpha(self, *, tree: bool, greedy: bool) -> bool:
        """Whether it reads alpha off the target's distributions: it accepts position by position, with a probability
        each. `block` and trees do not."""
        return False

    def measures_alpha(self, *, tree: bool, greedy: bool) -> bool:
        """Whether verdicts hold alpha, be it read off distributions or not."""
        return self.reads_alpha(tree=tree, greedy=greedy)


def native_judge(verifier: Verifier, kernels: SamplingKernels) -> Callable | None:
    """The one call by which these kernels judge the verifier's drafts, or None."""
    return None if verifier.rule.judges_whole is None else kernels.judge


def judged_at_once(rule: Rule, draft: Draft, target: Target, noise: Noise) -> Verdict:
    """The verdict by `Target.rows`: the same bits as by distributions and draws."""
    rows, parents_BK = target.rows, draft.parents if target.tree else None
    assert rows is not None
    given = rows.values, rows.probs, rows.n_valid, draft.tokens, parents_BK, draft.q, noise.coins, noise.last
    nodes_BK, accepted_B, tested_B, last_B, failed_B, alpha_BK = rows.judge(*given, whole=rule.judges_whole)
    verdict = emitted(draft, nodes_BK, accepted_B, tested_B, last_B, failed_B)
    return sum_alpha(verdict, alpha_BK) if target.alpha and draft.max_nodes else verdict


def along_chain(draft: Draft, accepted_B: jax.Array) -> tuple[jax.Array, jax.Array]:
    """int32[B, K] accepted nodes and int32[B] tested positions of a chain."""
    steps_K = jnp.arange(draft.max_nodes, dtype=jnp.int32)[None]
    return jnp.where(steps_K < accepted_B[:, None], steps_K, PAD), jnp.minimum(accepted_B + 1, draft.count)


def of_nothing(draft: Draft, p_BV: jax.Array, u_B: jax.Array, draw: Draw = residuals.inverse_cdf) -> Verdict:
    """The verdict on drafts that are all empty, by any rule that weighs p: a token of float32[B, V] after the root."""
    zero_B = jnp.zeros_like(draft.count)
    return emitted(draft, jnp.full_like(draft.tokens, PAD), zero_B, zero_B, *drawn(p_BV, u_B, draw))


def drawn(probs_BV: jax.Array, u_B: jax.Array, draw: Draw) -> tuple[jax.Array, jax.Array]:
    """int32[B], a token of each distribution; bool[B], whether it was no distribution."""
    mass_B = jax.vmap(residuals.total)(probs_BV)
    return draw(probs_BV, u_B), ~((mass_B > 0) & (mass_B < jnp.inf))


def with_alpha(verdict: Verdict, draft: Draft, target: Target, overlap: Callable = jnp.minimum) -> Verdict:
    """Fills `alpha` and `alpha_var` of a chain's verdict if the target is to: sum_x overlap(p, q) at each tested
    position of sampled drafts, p(x) of one-hot ones."""
    if not target.alpha or not draft.max_nodes:
        return verdict
    if draft.q is None:
        return sum_alpha(verdict, target.at(draft.tokens))
    p_BnV = target.probs

    def one(b):
        def put(i, alpha_K):
            return alpha_K.at[i].set(residuals.total(overlap(p_BnV[b, i], draft.q[b, i])))

        zero_K = jnp.zeros((draft.max_nodes,), p_BnV.dtype)
        return jax.lax.fori_loop(jnp.int32(0), verdict.tested[b], put, zero_K)

    return sum_alpha(verdict, jax.lax.map(one, jnp.arange(draft.tokens.shape[0])))


def sum_alpha(verdict: Verdict, alpha_BK: jax.Array) -> Verdict:
    """The verdict with the sums over its tested positions of acceptance probabilities float32[B, K]."""

    def add(i, sums):
        a_B = jnp.where(i < verdict.tested, alpha_BK[:, i], 0)
        return sums[0] + a_B, sums[1] + a_B * (1 - a_B)

    zero_B = jnp.zeros(alpha_BK.shape[:1], alpha_BK.dtype)
    if not alpha_BK.shape[1]:
        return verdict._replace(alpha=zero_B, alpha_var=zero_B)
    alpha_B, var_B = jax.lax.fori_loop(jnp.int32(0), jnp.max(verdict.tested), add, (zero_B, zero_B))
    return verdict._replace(alpha=alpha_B, alpha_var=var_B)


def has_child(draft: Draft, at_B: jax.Array) -> jax.Array:
    """int32[B]: 1 where row `at` has a child, so that the walk ended on a rejection there."""
    exists_BK = jnp.arange(draft.max_nodes)[None] < draft.count[:, None]
    return ((draft.parents == at_B[:, None] - 1) & exists_BK).any(axis=1).astype(jnp.int32)


def emitted(draft, nodes_BK, accepted_B, tested_B, last_B, failed_B) -> Verdict:
    """Emitted tokens from the accepted nodes and the token after them."""
    K = draft.max_nodes
    path_BK = jnp.take_along_axis(draft.tokens, jnp.maximum(nodes_BK, 0), axis=1)
    place_n = jnp.arange(K + 1)[None]
    last_B = jnp.where(failed_B, 0, last_B)
    path_Bn = jnp.pad(path_BK, ((0, 0), (0, 1)))
    tail_Bn = jnp.where(place_n == accepted_B[:, None], last_B[:, None], PAD)
    tokens_Bn = jnp.where(place_n < accepted_B[:, None], path_Bn, tail_Bn)
    zeros_B = jnp.zeros(accepted_B.shape, jnp.float32)
    return Verdict(tokens_Bn, accepted_B + 1, nodes_BK, accepted_B, tested_B, zeros_B, zeros_B, failed_B)
