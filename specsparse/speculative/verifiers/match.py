"""Rules that read the target's own token at each row, drawn or the likeliest, and not its law; `Match` follows it."""

import abc
import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specsparse.speculative.base import PAD, Draft, Verdict
from specsparse.speculative.verifiers.laws import Array, namespace


class TargetRule(abc.ABC):
    """Base of such rules but `Match`; a verifier of one has `needs_p` False. Its verdicts hold alpha."""

    @abc.abstractmethod
    def verdict(self, draft: Draft, target_Bn: jax.Array, *, coins_BK: jax.Array) -> Verdict:
        """The verdict on a draft.

        Args:
            draft: of a kind that the verifier accepts.
            target_Bn: int32[B, K+1], the target's token at each row, as `verify.match_verdict` takes it.
            coins_BK: float32[B, K] in [0, 1), one coin a node (noise stream `accept`).
        """


@dataclasses.dataclass(frozen=True)
class Match:
    """x ~ p at each position with the noise of that absolute position (argmax at T = 0); emit x, go on if drafted.

    Lossless for every draft that was made without that noise, and token-for-token equal to plain decoding.
    """

    def child(self, tokens_K: Array, parents_K: Array, count: Array, at: Array, token: Array) -> Array:
        """First existing child of row `at` that holds `token`; K if there is none."""
        xp = namespace(tokens_K)
        K = tokens_K.shape[0]
        hit_K = (parents_K == at - 1) & (tokens_K == token) & (xp.arange(K) < count)
        return xp.where(hit_K.any(), hit_K.argmax(), K).astype(xp.int32)


class MatchEnd(NamedTuple):
    """Where a match ends: int32 row of the last accepted token, int32[K] accepted nodes, int32 their number."""

    at: jax.Array
    nodes: jax.Array
    accepted: jax.Array


def follow(rule: Match, draft: Draft, target_Bn: jax.Array, b: jax.Array) -> MatchEnd:
    """Follows the target's tokens through sequence b's tree; `target_Bn[b, row]` was sampled from p at that row."""
    K = draft.max_nodes

    def next_node(at):
        return rule.child(draft.tokens[b], draft.parents[b], draft.count[b], at, target_Bn[b, at])

    def step(carry):
        node, end = carry
        nodes_K = jnp.where(jnp.arange(K) == end.accepted, node, end.nodes)
        return next_node(node + 1), MatchEnd(node + 1, nodes_K, end.accepted + 1)

    start = MatchEnd(jnp.int32(0), jnp.full((K,), PAD, jnp.int32), jnp.int32(0))
    if not K:
        return start
    _, end = jax.lax.while_loop(lambda c: c[0] < K, step, (next_node(start.at), start))
    return end
