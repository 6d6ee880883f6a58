"""Rules that do not test siblings in turn: those that read the target's own token at each row, drawn or the likeliest,
and not its distribution (`Match` follows it), and block verification of a chain (Sun et al. 2403.10444)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.speculative.base import PAD, Draft, Verdict
from specsparse.speculative.verifiers import residuals
from specsparse.speculative.verifiers.residuals import Array, Scalar, namespace
from specsparse.speculative.verify import (
    Coin,
    End,
    Noise,
    Rule,
    Target,
    along_chain,
    drawn,
    emitted,
    has_child,
    judged_at_once,
    with_alpha,
)


@dataclasses.dataclass(frozen=True)
class Match(Rule):
    """x ~ p at each position with the noise of that absolute position (argmax at T = 0); emit x, go on if drafted.

    Lossless for every draft that was made without that noise, and token-for-token equal to plain decoding.
    """

    needs_p = False

    def verdict(self, draft: Draft, target: Target, noise: Noise) -> Verdict:
        """Follows the target's tokens; alpha of a sampled draft is sum_x p q."""
        return with_alpha(match_verdict(draft, target.tokens, tree=target.tree), draft, target, jnp.multiply)

    def reads_alpha(self, *, tree: bool, greedy: bool) -> bool:
        """True for chains; at temperature 0 there is no distribution to read it off."""
        return not tree and not greedy

    def child(self, tokens_K: Array, parents_K: Array, count: Scalar, at: Scalar, token: Scalar) -> Scalar:
        """First existing child of row `at` that holds `token`; K if there is none."""
        xp = namespace(tokens_K)
        K = tokens_K.shape[0]
        hit_K = (parents_K == at - 1) & (tokens_K == token) & (xp.arange(K) < count)
        return xp.where(hit_K.any(), hit_K.argmax(), K).astype(xp.int32)

    def ends(self, draft: Draft, p_nV: np.ndarray) -> list[End]:
        """Every token the target may sample at every row that is reached."""
        found: list[End] = []

        def visit(at: int, weight: float, path: tuple[int, ...]):
            nodes = [int(self.child(draft.tokens, draft.parents, draft.count, at, x)) for x in range(p_nV.shape[1])]
            off = np.where(np.array(nodes) == draft.max_nodes, p_nV[at], 0.0)
            if off.sum() > 0:
                found.append(End(weight * off.sum(), path, off / off.sum()))
            for x, node in enumerate(nodes):
                if node < draft.max_nodes and p_nV[at, x] > 0:
                    visit(node + 1, weight * p_nV[at, x], (*path, node))

        visit(0, 1.0, ())
        return found


def follow(rule: Match, draft: Draft, target_Bn: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Follows the target's tokens through sequence b's tree; `target_Bn[b, row]` was sampled from p at that row.

    int32 row of the last accepted node, int32[K] accepted nodes, int32 their number.
    """
    K = draft.max_nodes

    def next_node(at):
        return rule.child(draft.tokens[b], draft.parents[b], draft.count[b], at, target_Bn[b, at])

    def step(carry):
        node, _, nodes_K, accepted = carry
        return next_node(node + 1), node + 1, jnp.where(jnp.arange(K) == accepted, node, nodes_K), accepted + 1

    start = (jnp.int32(0), jnp.full((K,), PAD, jnp.int32), jnp.int32(0))
    if not K:
        return start
    return jax.lax.while_loop(lambda c: c[0] < K, step, (next_node(start[0]), *start))[1:]


def match_verdict(draft: Draft, target_Bn: jax.Array, *, tree: bool = True) -> Verdict:
    """`Match`'s verdict by int32[B, K+1], the target's token at each row; a negative one fails the sequence if its row
    is reached. Chains (`tree` False) need no walk."""
    if not tree:
        return match_chain(draft, target_Bn)
    sequences = jnp.arange(draft.tokens.shape[0])
    at_B, nodes_BK, accepted_B = jax.lax.map(lambda b: follow(Match(), draft, target_Bn, b), sequences)
    last_B = jnp.take_along_axis(target_Bn, at_B[:, None], axis=1)[:, 0]
    return emitted(draft, nodes_BK, accepted_B, accepted_B + has_child(draft, at_B), last_B, last_B < 0)


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


@dataclasses.dataclass(frozen=True)
class Block(Rule):
    """Accept up to the largest i whose coin is under h_i, then sample norm(max(0, p_i p - q)), or p if i is the end.

    p_0 = 1, p_i = min(1, p_{i-1} p(x_i)/q(x_i)); s_i = sum_x max(0, p_i p(x given x_1..i) - q(x given x_1..i));
    h_i = s_i / (s_i + 1 - p_i), h_gamma = p_gamma (2403.10444, Alg. 2, eq. 4). Accepts at least as many tokens in
    expectation as `token`; of one-hot drafts, where q is 1 at the token, just as many as `delta`: no lossless rule can
    accept more of those. Written for numpy and jax.numpy.
    """

    judges_whole = True

    def verdict(self, draft: Draft, target: Target, noise: Noise) -> Verdict:
        """Judges each chain as a whole, then draws the token after it."""
        if target.rows is not None:
            return judged_at_once(self, draft, target, noise)
        p_BnV, sequences = target.probs, jnp.arange(draft.tokens.shape[0])
        accepted_B, probs_BV = jax.lax.map(lambda b: judge(self, draft, p_BnV, noise.coins, b), sequences)
        nodes_BK, tested_B = along_chain(draft, accepted_B)
        return emitted(draft, nodes_BK, accepted_B, tested_B, *drawn(probs_BV, noise.last, target.draw))

    def ends(self, draft: Draft, p_nV: np.ndarray) -> list[End]:
        """The largest passed coin decides: walk from the last node to the first."""
        count, q_KV = int(draft.count), draft.q
        if q_KV is None:
            q_KV = [residuals.one_hot(p_nV[i], draft.tokens[i]) for i in range(count)]
        weights, stops = [np.float64(1)], []
        for i in range(count):
            x = draft.tokens[i]
            weights.append(self.weight(weights[-1], p_nV[i, x], q_KV[i][x]))
            end = i + 1 == count
            stops.append(float(weights[-1] if end else self.stop(weights[-1], p_nV[i + 1], q_KV[i + 1])))
        found, open_weight, coins = [], 1.0, ()
        for i in range(count, -1, -1):
            chance = stops[i - 1] if i else 1.0
            probs = p_nV[i] if i == count else self.probs(weights[i], p_nV[i], q_KV[i])
            here = (*coins, Coin(i - 1, chance, True)) if i else coins
            found.append(End(open_weight * chance, tuple(range(i)), probs, here))
            open_weight, coins = open_weight * (1 - chance), (*coins, Coin(i - 1, chance, False))
        return [end for end in found if end.weight > 0]

    def weight(self, before: Scalar, p_x: Scalar, q_x: Scalar) -> Scalar:
        """p_i from p_{i-1} and both distributions at x_i."""
        return residuals.cap(before * residuals.ratio(p_x, q_x))

    def stop(self, weight: Scalar, p_V: Array, q_V: Array) -> Scalar:
        """h_i inside the draft, from p_i, and p and q of position i+1. 0/0 (p_i = 1 and p = q) never stops there."""
        xp = residuals.namespace(p_V)
        gap = self._scaled(weight, p_V) - q_V
        s = residuals.total(xp.maximum(gap, xp.zeros_like(gap)))
        return residuals.ratio(s, s + (1 - weight))

    def probs(self, weight: Scalar, p_V: Array, q_V: Array) -> Array:
        """Distribution of the token after i accepted ones, i < gamma."""
        return residuals.residual(self._scaled(weight, p_V), q_V)

    def _scaled(self, weight: Scalar, p_V: Array) -> Array:
        """weight * p. The maximum keeps a compiler from fusing the product with the difference that follows."""
        scaled = weight * p_V
        return residuals.namespace(p_V).maximum(scaled, residuals.namespace(p_V).zeros_like(scaled))


def judge(rule: Block, draft: Draft, p_BnV: jax.Array, coins_BK: jax.Array, b: jax.Array) -> tuple:
    """Judges the chain of sequence b with one coin per position (uniforms in [0, 1)).

    int32 number of accepted tokens, and float[V] the distribution of the token after them.
    """
    count = draft.count[b]

    def q_V(i):
        """What x_i was drawn from: all of it at x_i where the draft holds no distributions."""
        return residuals.one_hot(p_BnV[b, i], draft.tokens[b, i]) if draft.q is None else draft.q[b, i]

    def step(i, carry):
        weight, accepted, kept = carry
        x = draft.tokens[b, i]
        weight = rule.weight(weight, p_BnV[b, i, x], q_V(i)[x])
        end = i + 1 == count
        h = jax.lax.cond(end, lambda: weight, lambda: rule.stop(weight, p_BnV[b, i + 1], q_V(i + 1)))
        ok = coins_BK[b, i] < h
        return weight, jnp.where(ok, i + 1, accepted), jnp.where(ok, weight, kept)

    one = jnp.ones((), p_BnV.dtype)
    _, accepted, weight = jax.lax.fori_loop(jnp.int32(0), count, step, (one, jnp.int32(0), one))
    row = p_BnV[b, accepted]
    probs_V = jax.lax.cond(accepted < count, lambda: rule.probs(weight, row, q_V(accepted)), lambda: row)
    return accepted, probs_V
