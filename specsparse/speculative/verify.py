"""Verifiers by name, and the one entry that runs them in the engine."""

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from specsparse.engine.sampling.params import Truncation
from specsparse.engine.sampling.probs import SamplingKernels
from specsparse.errors import UserError
from specsparse.speculative.base import PAD, Draft, DraftKind, Verdict, Verifier
from specsparse.speculative.verifiers import BUILTIN, RULES, SYNTHETIC, residuals
from specsparse.speculative.verifiers.draft_rules import Block, Match, TargetRule, follow, judge
from specsparse.speculative.verifiers.rejection import Rejection
from specsparse.speculative.verifiers.siblings import SiblingRule, walk
from specsparse.support.options import read

Draw = Callable[[jax.Array, jax.Array], jax.Array]
"""(p float[R, V], u in [0, 1)) -> int32[R]; u is float32[R, 4] for the engine, float[R] for `residuals.inverse_cdf`."""


def get_verifier(name: str, **options: object) -> Verifier:
    """The verifier of that name, of that `module:Class` (a `SiblingRule`), or that `module:NAME` (a `Verifier`).

    `options` are those of its rule; None is an option that was not given.

    Raises:
        UserError: an unknown name or option (with the nearest valid one), a value of the wrong type or out of range.
    """
    if name == SYNTHETIC:
        raise UserError(f"verifier={name} makes up the acceptance of a drafter's chains: it is made with a drafter")
    if name in BUILTIN:
        verifier = _made(name, options)
        return next((known for known in VERIFIERS.values() if known == verifier), verifier)
    found = RULES.look(name)
    if isinstance(found, Verifier):
        rule = read(type(found.rule), {**vars(found.rule), **options}, group="verifier", name=name)
        return dataclasses.replace(found, rule=rule) if options else found
    if not isinstance(found, type):
        raise UserError(f"verifier={name} is no specsparse.speculative.base.Verifier: make one of a rule")
    own = RULES.make(name, options)
    if not found.kinds:
        raise UserError(f"verifier={name} says no `kinds`: the draws that its rule is sound for")
    return Verifier(name, own, found.kinds, tree=found.tree, lossless=found.lossless, paper=found.paper)


def _made(name: str, options: Mapping[str, object]) -> Verifier:
    """The built-in verifier of that name."""
    return dataclasses.replace(BUILTIN[name], rule=RULES.make(name, options))


VERIFIERS: dict[str, Verifier] = {name: _made(name, {}) for name in BUILTIN}
"""All verifiers by name, with default options."""


def valid_verifiers(kind: DraftKind, *, tree: bool, temperature: float | None = None) -> list[str]:
    """Names of the verifiers that accept such drafts, lossless ones first."""
    ok = [v for v in VERIFIERS.values() if v.accepts(kind, tree=tree, temperature=temperature)]
    return [v.name for v in sorted(ok, key=lambda v: not v.lossless)]


def match_verdict(draft: Draft, target_Bn: jax.Array, *, tree: bool = True) -> Verdict:
    """Verdict of `greedy`, `match`, `tree_greedy`, `tree_match`.

    Args:
        draft: any draft made without the target's noise.
        target_Bn: int32[B, K+1], the target's token at each row: argmax of p, or drawn from p with the noise of the
            row's absolute position. A negative id (p was not a distribution) fails the sequence if its row is reached.
        tree: False for chains, which need no walk.
    """
    if not tree:
        return match_chain(draft, target_Bn)
    end = jax.lax.map(lambda b: follow(Match(), draft, target_Bn, b), jnp.arange(draft.tokens.shape[0]))
    last_B = jnp.take_along_axis(target_Bn, end.at[:, None], axis=1)[:, 0]
    tested_B = end.accepted + _has_child(draft, end.at)
    return _verdict(draft, end.nodes, end.accepted, tested_B, last_B, last_B < 0)


def verify_targets(verifier: Verifier, draft: Draft, target_Bn: jax.Array, *, coins_BK: jax.Array) -> Verdict:
    """Verdict of a verifier without `needs_p`.

    Args:
        verifier: of `Match` or of a `TargetRule`.
        draft: of a kind it accepts.
        target_Bn: as `match_verdict`'s.
        coins_BK: as `verify`'s.
    """
    if isinstance(verifier.rule, TargetRule):
        return verifier.rule.verdict(draft, target_Bn, coins_BK=coins_BK)
    return match_verdict(draft, target_Bn, tree=verifier.tree)


def verify(
    verifier: Verifier,
    draft: Draft,
    p_BnV: jax.Array,
    *,
    coins_BK: jax.Array,
    u_B: jax.Array,
    draw: Draw = residuals.inverse_cdf,
    alpha: bool = False,
) -> Verdict:
    """Verdict of a verifier that weighs p against the draft. Rows of a batch do not depend on each other.

    Args:
        verifier: one with `needs_p`.
        draft: a draft of a kind it accepts.
        p_BnV: float32[B, K+1, V], the target's distribution after temperature, truncation and penalties (with the draft
            prefix as context): row 0 after the last committed token, row 1+i after node i. Rows of nodes >= count may
            hold anything.
        coins_BK: float32[B, K] in [0, 1), one acceptance coin a node (noise stream `accept`).
        u_B: what `draw` takes for the last token of each sequence, in [0, 1): float32[B, 4] of noise stream `residual`,
            or float32[B] by `residuals.inverse_cdf`.
        draw: inverse-CDF sampling.
        alpha: whether to measure `Verdict.alpha` (chains under `token` or `delta`; one pass over V a tested position).
    """
    sequences = jnp.arange(draft.tokens.shape[0])
    if isinstance(verifier.rule, Block):
        end = jax.lax.map(lambda b: judge(verifier.rule, draft, p_BnV, coins_BK, b), sequences)
        accepted_B, probs_BV = end.accepted, end.probs
        nodes_BK, tested_B = _along_chain(draft, accepted_B)
    elif isinstance(verifier.rule, SiblingRule):

        def one(b):
            s = walk(verifier.rule, draft, p_BnV, coins_BK, b)
            return s.nodes, s.accepted, s.at, jnp.where(s.fresh, p_BnV[b, s.at], s.probs)

        nodes_BK, accepted_B, at_B, probs_BV = jax.lax.map(one, sequences)
        tested_B = accepted_B + _has_child(draft, at_B)
    else:
        raise TypeError(f"{verifier.name} takes the target's tokens: use match_verdict")
    verdict = _verdict(draft, nodes_BK, accepted_B, tested_B, *_last(probs_BV, u_B, draw))
    return measure_alpha(verifier, draft, p_BnV, verdict) if alpha else verdict


def judged_at_once(verifier: Verifier, kernels: SamplingKernels) -> bool:
    """Whether `verify_rows` has this verifier's verdicts on chains."""
    return kernels.judge is not None and type(verifier.rule) in (Rejection, Block) and not verifier.tree


def verify_rows(
    verifier: Verifier,
    draft: Draft,
    rows_RV: jax.Array,
    prob_rows: Truncation | None,
    *,
    n_valid_B: jax.Array,
    coins_BK: jax.Array,
    u_B: jax.Array,
    judge: Callable[..., tuple[jax.Array, jax.Array, jax.Array, jax.Array]],
    alpha: bool = False,
) -> Verdict:
    """`verify` of chains by kernels that write no distribution down: the same bits as by their distributions and draws.

    Args:
        verifier: one of those that are `judged_at_once`.
        draft: chains of a kind it accepts.
        rows_RV: float32[B * (K + 1), V], the target's logits; its distributions where `prob_rows` is None.
        prob_rows: the numbers of each sequence's distribution.
        n_valid_B: int32[B], 1 + count, or 0 for a sequence whose verdict is not asked for.
        coins_BK, u_B, alpha: as in `verify`.
        judge: `SamplingKernels.judge`.
    """
    accepted_B, last_B, failed_B, alpha_BK = judge(
        rows_RV, prob_rows, n_valid_B, draft.tokens, draft.q, coins_BK, u_B, whole=isinstance(verifier.rule, Block)
    )
    nodes_BK, tested_B = _along_chain(draft, accepted_B)
    verdict = _verdict(draft, nodes_BK, accepted_B, tested_B, last_B, failed_B)
    return sum_alpha(verdict, alpha_BK) if alpha and has_alpha(verifier) and draft.max_nodes else verdict


def _along_chain(draft: Draft, accepted_B: jax.Array) -> tuple[jax.Array, jax.Array]:
    """int32[B, K] accepted nodes and int32[B] tested positions of a chain."""
    steps_K = jnp.arange(draft.max_nodes, dtype=jnp.int32)[None]
    return jnp.where(steps_K < accepted_B[:, None], steps_K, PAD), jnp.minimum(accepted_B + 1, draft.count)


def verify_nothing(draft: Draft, p_BV: jax.Array, *, u_B: jax.Array, draw: Draw = residuals.inverse_cdf) -> Verdict:
    """What `verify` says where every draft is empty, whichever its verifier: a token of the distribution after the
    root.

    Args:
        draft: of which all counts are 0.
        p_BV: float32[B, V], `verify`'s row 0.
        u_B: as `verify`'s.
        draw: inverse-CDF sampling.
    """
    zero_B = jnp.zeros_like(draft.count)
    return _verdict(draft, jnp.full_like(draft.tokens, PAD), zero_B, zero_B, *_last(p_BV, u_B, draw))


def _last(probs_BV: jax.Array, u_B: jax.Array, draw: Draw) -> tuple[jax.Array, jax.Array]:
    """int32[B], a token of each distribution; bool[B], whether it was no distribution."""
    mass_B = jax.vmap(residuals.total)(probs_BV)
    return draw(probs_BV, u_B), ~((mass_B > 0) & (mass_B < jnp.inf))


def has_alpha(verifier: Verifier) -> bool:
    """Whether alpha can be read off the distributions: the rule accepts position by position, with a probability each.

    `block` and trees do not.
    """
    return isinstance(verifier.rule, Rejection | Match) and not verifier.tree


def measures_alpha(verifier: Verifier, *, greedy: bool) -> bool:
    """Whether verdicts hold alpha. `greedy` and `match` at temperature 0 make no distribution to read it off."""
    return isinstance(verifier.rule, TargetRule) or (has_alpha(verifier) and (verifier.needs_p or not greedy))


def measure_alpha(verifier: Verifier, draft: Draft, p_BnV: jax.Array, verdict: Verdict) -> Verdict:
    """Fills `alpha` and `alpha_var` of a chain's verdict, p and q being the distributions at each tested position.

    Sampled drafts: `token` sum_x min(p, q), `match` sum_x p q; one-hot drafts: p(x). Where `has_alpha` is false, zeros.
    """
    if not has_alpha(verifier) or not draft.max_nodes:
        return verdict
    if draft.q is None:
        tokens_BK1 = draft.tokens[:, :, None]
        return sum_alpha(verdict, jnp.take_along_axis(p_BnV[:, : draft.max_nodes], tokens_BK1, axis=2)[:, :, 0])
    join = jnp.multiply if isinstance(verifier.rule, Match) else jnp.minimum

    def one(b):
        def put(i, alpha_K):
            return alpha_K.at[i].set(residuals.total(join(p_BnV[b, i], draft.q[b, i])))

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


def match_chain(draft: Draft, target_Bn: jax.Array) -> Verdict:
    """`match_verdict` of a chain: the tokens that equal the target's, up to the first that does not."""
    K = draft.max_nodes
    node_K, place_n = (jnp.arange(m, dtype=jnp.int32)[None] for m in (K, K + 1))
    # The first row that no equal token follows. The target's token there is the last one emitted.
    same_BK = (draft.tokens == target_Bn[:, :K]) & (node_K < draft.count[:, None])
    ends_Bn = jnp.pad(~same_BK, ((0, 0), (0, 1)), constant_values=True)
    accepted_B = jnp.min(jnp.where(ends_Bn, place_n, K), axis=1)
    here_Bn = place_n == accepted_B[:, None]
    failed_B = jnp.any(here_Bn & (target_Bn < 0), axis=1)
    emitted_Bn = jnp.where(here_Bn & failed_B[:, None], 0, target_Bn)
    zeros_B = jnp.zeros(accepted_B.shape, jnp.float32)
    return Verdict(
        tokens=jnp.where(place_n <= accepted_B[:, None], emitted_Bn, PAD),
        count=accepted_B + 1,
        nodes=jnp.where(node_K < accepted_B[:, None], node_K, PAD),
        accepted=accepted_B,
        tested=jnp.minimum(accepted_B + 1, draft.count),
        alpha=zeros_B,
        alpha_var=zeros_B,
        failed=failed_B,
    )


def _has_child(draft: Draft, at_B: jax.Array) -> jax.Array:
    """int32[B]: 1 where row `at` has a child, so that the walk ended on a rejection there."""
    exists_BK = jnp.arange(draft.max_nodes)[None] < draft.count[:, None]
    return ((draft.parents == at_B[:, None] - 1) & exists_BK).any(axis=1).astype(jnp.int32)


def _verdict(draft, nodes_BK, accepted_B, tested_B, last_B, failed_B) -> Verdict:
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
